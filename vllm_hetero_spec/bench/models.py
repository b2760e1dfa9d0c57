# SPDX-License-Identifier: Apache-2.0
"""Models as a suite names them: Hugging Face names, folders, and the demo pair."""

from pathlib import Path
from typing import Any

from vllm_hetero_spec.bench.suite import Drafter, Target
from vllm_hetero_spec.bench.yaml_file import Entry
from vllm_hetero_spec.config import ConfigError
from vllm_hetero_spec.errors import first_line
from vllm_hetero_spec.inputs.model_folder import check_model
from vllm_hetero_spec.paths import demo_folder

_DEMO = "demo:"


def located(entry: Entry) -> Path:
    """A path in a suite: of the demo pair, or relative to the suite's folder."""
    name = entry.text()
    if not name.startswith(_DEMO):
        return entry.file.parent / Path(name).expanduser()
    path = demo_folder() / name.removeprefix(_DEMO)
    if not path.exists():
        raise entry.refuse(
            f"{path} does not exist: make the demo pair with `python scripts/train_demo_models.py`."
        )
    return path


def model_name(entry: Entry, role: str) -> str:
    """A Hugging Face name, or the absolute path of a folder that holds a model.

    Args:
        entry: The name in the suite; folders begin with "/", "./", "../", "~" or "demo:".
        role: "target" or "drafter", for the message.
    """
    name = entry.text()
    if name.startswith((_DEMO, "./", "../", "~", "/")):
        name = str(located(entry).absolute())
    try:
        return check_model(name, role)
    except ConfigError as error:
        raise entry.refuse(str(error)) from error


def tokenizer_of(model: str, engine: dict[str, Any]) -> Any:
    """The transformers tokenizer of a model.

    Raises:
        ConfigError: It cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            engine.get("tokenizer") or model,
            trust_remote_code=bool(engine.get("trust_remote_code")),
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load the tokenizer of {model}: {first_line(error)}") from error


def vocabularies_differ(target: Target, drafter: Drafter) -> str | None:
    """Why vLLM's `draft_model` cannot run a pair; None where the vocabularies agree.

    Raises:
        ConfigError: A tokenizer or a configuration cannot be loaded.
    """
    from transformers import AutoConfig

    from vllm_hetero_spec.text.loading import load_tokenizer
    from vllm_hetero_spec.text.tokenizer import UnsupportedTokenizer

    models = target.model, drafter.model
    trust = bool(target.engine.get("trust_remote_code"))
    try:
        texts = [load_tokenizer(tokenizer_of(model, target.engine)) for model in models]
        sizes = [
            AutoConfig.from_pretrained(model, trust_remote_code=trust).get_text_config().vocab_size
            for model in models
        ]
    except UnsupportedTokenizer as error:
        return str(error)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load the models' configurations: {first_line(error)}") from error
    if texts[0].fingerprint != texts[1].fingerprint:
        return "target and drafter have different vocabularies"
    if sizes[0] != sizes[1]:
        return f"the target has {sizes[0]} output rows, the drafter {sizes[1]}"
    return None
