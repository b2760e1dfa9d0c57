# SPDX-License-Identifier: Apache-2.0
"""Presence, download and size of a model's weights."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from vllm_hetero_spec.errors import ConfigError, first_line

_WEIGHTS = (".safetensors", ".bin", ".pt")  # vLLM loads the first kind that exists, in this order
_LENGTH = 8  # bytes of the length field before the header of a safetensors file
_POINTER = b"version https://git-lfs"
NO_GGUF = (
    "this vLLM reads no GGUF; give a folder or Hugging Face name of the same model in safetensors"
)
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})  # dtypes that loading converts
_UNUSED = (".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ot")
# With these arguments of `vllm.LLM`, weights are in another place or do not exist.
_ELSEWHERE = frozenset({"load_format", "download_dir", "revision"})


def local_folder(name: str) -> Path | None:
    """Return the folder of a model's files on this machine, or None."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def only_gguf(name: str) -> bool:
    """Return True if an unreadable model consists of GGUF files, by its files or its name."""
    path = Path(name).expanduser()
    if path.is_dir():
        return any(path.glob("*.gguf")) and not _has_weights(path)
    return "gguf" in path.name.lower()


def _has_weights(folder: Path) -> bool:
    return any(any(folder.glob(f"*{kind}")) for kind in _WEIGHTS)


def missing_weights(name: str) -> str:
    """Return a clause that explains why a model's weights cannot be read here, or ""."""
    folder = local_folder(name)
    if folder is not None:
        listed = set[str]()
        for index in folder.glob("*.safetensors.index.json"):
            try:
                files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            except (OSError, ValueError, LookupError, TypeError, AttributeError):
                return f"{index} cannot be read as a list of weights; download it again"
            absent = sorted(file for file in files if not (folder / file).is_file())
            if absent:
                return f"{name} lacks {absent[0]}"
            listed |= files
        # Without an index, all files are loaded.
        used = [folder / file for file in listed] or list(folder.glob("*.safetensors"))
        try:
            for file in sorted(used):
                tensors_of(file)
        except ConfigError as error:
            return first_line(error)
        if _has_weights(folder):
            return ""
        if Path(name).is_dir():
            return NO_GGUF if only_gguf(name) else f"{name} contains no weights"
    return f"the weights of {name} are not on this machine (`hf download {name}` gets them)"


def tensors_of(file: Path) -> list[dict[str, Any]]:
    """Return the dtype, shape and data_offsets of each tensor of a safetensors file.

    Raises:
        ConfigError: It is not a safetensors file, or it is incomplete.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as data:
            begin = data.read(len(_POINTER))
            data.seek(0)
            length = int.from_bytes(data.read(_LENGTH), "little")
            header = json.loads(data.read(min(length, size)))
        header.pop("__metadata__", None)
        tensors = list(header.values())
        end = max((tensor["data_offsets"][1] for tensor in tensors), default=0)
    except OSError as error:
        raise ConfigError(f"the weights in {file} cannot be read: {error.strerror}.") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        if begin == _POINTER:
            what = "are only a Git LFS pointer; get them with `git lfs pull`"
        else:
            what = "are not a complete safetensors file; download it again"
        raise ConfigError(f"the weights in {file} {what}.") from error
    if _LENGTH + length + end > size:
        raise ConfigError(
            f"the weights in {file} end too early, after {size} of {_LENGTH + length + end} bytes; "
            "download the file again."
        )
    return tensors


def weight_bytes(folder: Path, element: int) -> int | None:
    """Return the memory of a model's weights, in bytes, or None if it has none.

    Floating-point numbers of safetensors files take `element` bytes. Other tensors and files of
    older formats keep their size.

    Raises:
        ConfigError: A safetensors file is incomplete.
    """
    files = _once(list(folder.glob("*.safetensors")))
    if not files:
        return sum(file.stat().st_size for file in folder.glob("*.bin")) or None
    total = 0
    for tensor in (tensor for file in files for tensor in tensors_of(file)):
        begin, end = tensor["data_offsets"]
        converted = tensor["dtype"] in _FLOATS
        total += math.prod(tensor["shape"]) * element if converted else end - begin
    return total or None


def fetch_weights(name: str, engine: Mapping[str, Any]) -> None:
    """Download missing files of a model, with progress bars on stderr.

    An engine would download them without progress bars and within its start-up timeout. Nothing is
    downloaded if `engine`, the arguments of `vllm.LLM`, names another place of the weights.

    Raises:
        ConfigError: Weights are missing in a folder, or cannot be downloaded.
    """
    given = {key for key, value in engine.items() if value is not None}
    if "VLLM_USE_MODELSCOPE" in os.environ or _ELSEWHERE & given or "://" in name:
        return
    reason = missing_weights(name)
    if not reason:
        return
    if Path(name).is_dir():
        raise ConfigError(f"{reason}.")
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError

    try:
        files = HfApi().list_repo_files(name)
        snapshot_download(name, allow_patterns=wanted_files(files))
    except GatedRepoError as error:
        raise ConfigError(gated(name)) from error
    except Exception as error:  # without a network, an error of the HTTP library
        raise ConfigError(f"{reason}; downloading them failed: {first_line(error)}.") from error


def wanted_files(files: Sequence[str]) -> list[str]:
    """Return the files of a repository that an engine reads, with one format of weights."""
    top = [file for file in files if "/" not in file]
    of_kind = {kind: [f for f in top if PurePosixPath(f).suffix == kind] for kind in _WEIGHTS}
    weights = next(filter(None, of_kind.values()), [])
    others = [f for f in top if PurePosixPath(f).suffix not in (*_WEIGHTS, *_UNUSED)]
    return [*map(str, _once([Path(file) for file in weights])), *others]


def _once(files: list[Path]) -> list[Path]:
    """Leave out consolidated files: the same weights again, in Mistral's own format."""
    return [file for file in files if not file.name.startswith("consolidated")] or files


def gated(name: str) -> str:
    """Return the sentence for a model whose terms have to be accepted first."""
    return (
        f"{name} is a gated model: accept its terms on https://huggingface.co/{name}, run "
        "`hf auth login`, and try again."
    )
