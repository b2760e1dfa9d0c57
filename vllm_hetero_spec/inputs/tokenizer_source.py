# SPDX-License-Identifier: Apache-2.0
"""Opening a tokenizer as the engine does, without its model.

transformers opens folders and Hugging Face names, because the engine uses its tokenizer object,
which may differ from the tokenizer.json. A single file is opened by the library of its format.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from vllm_hetero_spec.errors import ConfigError, one_line
from vllm_hetero_spec.inputs.weights import gated
from vllm_hetero_spec.text.loading import load_tokenizer
from vllm_hetero_spec.text.token_bytes import SPACE_MARK, components
from vllm_hetero_spec.text.tokenizer import TextTokenizer, UnsupportedTokenizer

ROLES = ("bos", "eos", "unk", "pad")
# Files that may contain a vocabulary. tokenizer_config.json alone has none.
_VOCABULARIES = ("tokenizer.json", "tekken*.json", "vocab.*", "*.model", "*.model.v*", "*.tiktoken")
_LONGEST_REASON = 200  # characters
_FORMATS = "tokenizer.json, tekken.json or tokenizer.model"


@dataclass(frozen=True)
class OpenTokenizer:
    """A tokenizer, its adapter for the bridge, and properties that its library reports."""

    backend: Any  # tokenizer object of its library
    text: TextTokenizer  # adapter, with the name that the user wrote
    strings: frozenset[str]  # keys of `get_vocab()`
    roles: Mapping[str, int]  # ids by roles of `ROLES`
    round_trip: Callable[[str], str]  # decode(encode(text)), special tokens added and kept
    eos_ids: list[int] | None = None  # ids that end a generation; None if no configuration has any
    normalizers: tuple[str, ...] = ()  # types of the normalizers that may change text


def open_tokenizer(name: str, role: str, *, trust_remote_code: bool = False) -> OpenTokenizer:
    """Open the tokenizer of a role ("target", "drafter") from a folder, file or Hugging Face name.

    Raises:
        ConfigError: It does not exist, cannot be read, or its bytes cannot be determined.
    """
    path = Path(name).expanduser()
    try:
        if path.is_file():
            return _open_file(path, name)
        if path.is_dir():
            return _open_folder(path, name, role, trust_remote_code)
        if _only_a_path(name):
            raise ConfigError(
                f"the {role} {name} does not exist: name a folder, a tokenizer file or a Hugging "
                "Face repository."
            )
        return _from_transformers(name, name, _hub_eos_ids(name), trust_remote_code)
    except ConfigError:
        raise
    except UnsupportedTokenizer as error:
        raise ConfigError(f"the {role}'s tokenizer {name} cannot be bridged: {error}") from error
    except Exception as error:  # libraries raise errors of any type for a wrong name or file
        if _is_gated(error):
            raise ConfigError(gated(name)) from error
        raise ConfigError(
            f"the {role}'s tokenizer {name} cannot be opened: {_reason(error)}; name a folder or a "
            f"repository with a whole {_FORMATS}."
        ) from error


def _is_gated(error: BaseException | None) -> bool:
    from huggingface_hub.errors import GatedRepoError

    while error is not None and not isinstance(error, GatedRepoError):
        error = error.__cause__ or error.__context__  # transformers raises an OSError
    return error is not None


def _reason(error: Exception) -> str:
    text = one_line(error)
    sentence = text.split(". ")[0].rstrip(".")[:_LONGEST_REASON] or type(error).__name__
    return f"{type(error).__name__}: {sentence}" if isinstance(error, KeyError) else sentence


def _only_a_path(name: str) -> bool:
    """Return True if a name cannot be that of a repository."""
    return (
        name.startswith(("/", ".", "~"))
        or name.count("/") > 1
        or Path(name).suffix in (".json", ".model")
    )


def _open_folder(folder: Path, name: str, role: str, trust_remote_code: bool) -> OpenTokenizer:
    if not trust_remote_code and not any(any(folder.glob(p)) for p in _VOCABULARIES):
        raise ConfigError(
            f"the {role} folder {name} contains no tokenizer: it needs a {_FORMATS} (name another "
            "folder, or a tokenizer file)."
        )
    eos_ids = _eos_ids(lambda file: folder / file)
    native = _mistral_file(folder)
    if native is not None:
        return _from_mistral(native, name, eos_ids)
    return _from_transformers(str(folder), name, eos_ids, trust_remote_code)


def _mistral_file(folder: Path) -> Path | None:
    """Return the file for mistral_common, if vLLM would choose it or there is no other file."""
    own = [*folder.glob("tekken*.json"), *folder.glob("tokenizer.model.v*")]
    others = [file for file in ("tokenizer.json", "tokenizer.model") if (folder / file).is_file()]
    if own and (any(folder.glob("consolidated*.safetensors")) or not others):
        return min(own)
    return None


def _open_file(file: Path, name: str) -> OpenTokenizer:
    if file.name.startswith("tekken") or ".model.v" in file.name:
        return _from_mistral(file, name, None)
    if file.suffix == ".json":
        return _from_tokenizers(Tokenizer.from_file(str(file)), name)
    if file.suffix == ".model":
        return _from_sentencepiece(file, name)
    raise ConfigError(f"{name} is not a tokenizer file: name a {_FORMATS}, or the folder it is in.")


def _from_transformers(
    source: str, name: str, eos_ids: list[int] | None, trust_remote_code: bool
) -> OpenTokenizer:
    # This import takes half of the start-up time, because it imports torch. Files do not need it.
    from transformers import AutoTokenizer
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    finally:
        logging.set_verbosity(verbosity)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return OpenTokenizer(
        backend=tokenizer,
        text=load_tokenizer(tokenizer, name),
        strings=frozenset(tokenizer.get_vocab()),
        roles=_present({role: getattr(tokenizer, f"{role}_token_id", None) for role in ROLES}),
        eos_ids=eos_ids,
        normalizers=_normalizers(backend),
        round_trip=lambda text: tokenizer.decode(tokenizer.encode(text, verbose=False)),
    )


def _from_tokenizers(tokenizer: Tokenizer, name: str) -> OpenTokenizer:
    text = load_tokenizer(tokenizer, name)
    return OpenTokenizer(
        backend=tokenizer,
        text=text,
        strings=frozenset(tokenizer.get_vocab()),
        roles=_present({"bos": text.bos_id, "eos": text.eos_id}),
        normalizers=_normalizers(tokenizer),
        round_trip=lambda text: tokenizer.decode(
            tokenizer.encode(text).ids, skip_special_tokens=False
        ),
    )


def _from_mistral(file: Path, name: str, eos_ids: list[int] | None) -> OpenTokenizer:
    from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    core = MistralTokenizer.from_file(str(file)).instruct_tokenizer.tokenizer
    return OpenTokenizer(
        backend=core,
        text=load_tokenizer(core, name),
        strings=frozenset(core.vocab()),
        roles=_present({role: getattr(core, f"{role}_id", None) for role in ROLES}),
        eos_ids=eos_ids,
        round_trip=lambda text: core.decode(
            core.encode(text, bos=True, eos=False), SpecialTokenPolicy.KEEP
        ),
    )


def _from_sentencepiece(file: Path, name: str) -> OpenTokenizer:
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_file=str(file))
    return OpenTokenizer(
        backend=model,
        text=load_tokenizer(model, name),
        strings=frozenset(model.id_to_piece(i) for i in range(model.get_piece_size())),
        roles=_present({role: getattr(model, f"{role}_id")() for role in ROLES}),
        round_trip=lambda text: model.decode(model.encode(text)),
    )


def _present(roles: Mapping[str, int | None]) -> dict[str, int]:
    return {role: token_id for role, token_id in roles.items() if token_id not in (None, -1)}


def _normalizers(backend: Tokenizer | None) -> tuple[str, ...]:
    """Return the types of normalizers that change text in other ways than marking spaces."""
    if backend is None or backend.normalizer is None:
        return ()
    return tuple(
        part["type"]
        for part in components(json.loads(backend.normalizer.__getstate__()))
        if not (part["type"] == "Prepend" or part.get("content") == SPACE_MARK)
    )


def _hub_eos_ids(name: str) -> list[int] | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    def fetch(file: str) -> Path | None:
        try:
            return Path(hf_hub_download(name, file))
        except EntryNotFoundError:
            return None

    return _eos_ids(fetch)


def _eos_ids(locate: Callable[[str], Path | None]) -> list[int] | None:
    """Return EOS ids of generation_config.json or, without such a file, of config.json."""
    for file in ("generation_config.json", "config.json"):
        path = locate(file)
        if path is not None and path.is_file():
            ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            return [ids] if isinstance(ids, int) else ids
    return None
