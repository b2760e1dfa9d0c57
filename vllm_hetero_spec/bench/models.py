# SPDX-License-Identifier: Apache-2.0
"""Models and files as a suite names them: Hugging Face names, folders, and the demo pair."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ValidationInfo

from vllm_hetero_spec.bench.values import Text
from vllm_hetero_spec.config import ConfigError
from vllm_hetero_spec.errors import first_line
from vllm_hetero_spec.inputs.model_folder import check_model
from vllm_hetero_spec.paths import demo_folder

_DEMO = "demo:"


def located(name: str, info: ValidationInfo) -> str:
    """A path in a suite: of the demo pair, or relative to the suite's folder.

    Raises:
        ConfigError: The demo pair is not there.
    """
    if not name.startswith(_DEMO):
        return str(Path(info.context or "") / Path(name).expanduser())
    path = demo_folder() / name.removeprefix(_DEMO)
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist: make the demo pair with `python scripts/train_demo_models.py`."
        )
    return str(path)


def _model(role: str) -> AfterValidator:
    """A Hugging Face name, or the absolute path of a folder that holds a model."""

    def check(name: str, info: ValidationInfo) -> str:
        if name.startswith((_DEMO, "./", "../", "~", "/")):
            name = str(Path(located(name, info)).absolute())
        return check_model(name, role)

    return AfterValidator(check)


TargetName = Annotated[Text, _model("target")]
DrafterName = Annotated[Text, _model("drafter")]


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
        raise ConfigError(f"cannot load the tokenizer of {model}: {first_line(error)}.") from error
