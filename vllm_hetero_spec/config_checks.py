# SPDX-License-Identifier: Apache-2.0
"""One clear sentence for each value of a speculative configuration that cannot be used.

Each check takes the configuration as it was given, keys with underscores, and raises ConfigError.
Checks of numbers replace one that was given as text.
"""

import re
import sys
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from vllm_hetero_spec.draft import methods
from vllm_hetero_spec.errors import ConfigError, nearest

# CPU cores as "0-2,5", or a device of torch.
_DEVICES = r"\d+(-\d+)?(,\d+(-\d+)?)*|[a-z]+(:\d+)?"
_MOST_BYTES = 1 << 63
_NUMBER = TypeAdapter[Any](Annotated[int | float, Field(union_mode="left_to_right")])


def check_rows(given: Mapping[str, Any], target_tensor_parallel: int) -> None:
    """A drafter that is split draws on every rank, and all ranks would have to draw the same."""
    split = target_tensor_parallel > 1 and given.get("tensor_parallel") == "sharded"
    if split and methods.METHODS[given["method"]].needs_probs:
        raise ConfigError(
            f'method {given["method"]!r} does not run with "tensor_parallel": "sharded"; '
            'use "rank0", which runs the drafter whole on the first rank, or the method "slem".'
        )


def check_fuzzy(given: dict[str, Any]) -> None:
    if given.get("verification") != "fuzzy":
        for key in ("divergence", "threshold"):
            if given.get(key) is not None:
                raise ConfigError(
                    f'{key} belongs to "verification": "fuzzy", which is lossy; leave it out or '
                    "ask for that."
                )
        return
    threshold = number(given.get("threshold"))
    if isinstance(threshold, bool) or not isinstance(threshold, int | float):
        threshold = -1
    if not 0 <= threshold <= sys.float_info.max:  # nor NaN
        raise ConfigError(
            f"threshold is {given.get('threshold')!r}; fuzzy verification needs a finite "
            "divergence of at least 0, below which a draft passes, as 0.1."
        )
    given["threshold"] = threshold
    if given["method"] == "slem":
        raise ConfigError(
            '"verification": "fuzzy" needs sampled drafts; choose the method push_forward, tli or '
            "slrs instead of slem."
        )


def check_confidence(given: dict[str, Any]) -> None:
    threshold = number(given.get("confidence_threshold"))
    if threshold is None:
        return
    if given.get("controller") != "confidence":
        raise ConfigError(
            'confidence_threshold belongs to "controller": "confidence"; leave it out or ask for '
            "that."
        )
    if isinstance(threshold, bool) or not isinstance(threshold, int | float):
        threshold = -1
    if not 0 <= threshold <= 1:
        raise ConfigError(
            f"confidence_threshold is {given['confidence_threshold']!r}; it must be a probability "
            "from 0 to 1."
        )
    given["confidence_threshold"] = threshold


def check_trees(given: Mapping[str, Any]) -> None:
    for key in ("tree_width", "tree_values"):
        if given.get(key) is not None and not given.get("tree_nodes"):
            raise ConfigError(
                f'{key} is about draft trees, and there are none without "tree_nodes" above 0; '
                "leave it out or ask for them."
            )


def check_parallel(given: Mapping[str, Any]) -> None:
    """A drafter in a process of its own drafts chains token by token."""
    device, parallel = given.get("drafter_device"), given.get("parallel") or "off"
    if device is not None and parallel != "process":
        raise ConfigError(
            'drafter_device belongs to "parallel": "process"; leave it out or ask for that.'
        )
    if parallel == "off":
        return
    method, raced = methods.METHODS[given["method"]], given.get("verification") == "race"
    if method.needs_probs and (raced or not method.draws_ahead):
        of_races = ' and "verification": "race"' if raced else ""
        names = [name for name, of in methods.METHODS.items() if of.draws_ahead and not raced]
        raise ConfigError(
            f'method {given["method"]!r} does not run with "parallel": "{parallel}"{of_races}; use '
            f'{listed(["slem", *names])}, or "hetero", which chooses among them.'
        )
    for key, supported, why in (
        ("tree_nodes", (None, 0), "drafts chains alone"),
        ("tensor_parallel", (None, "rank0"), "runs the drafter whole on one device"),
        ("verification", (None, "token", "block", "race"), "keeps the target's law"),
        ("controller", (None, "goodput", "fixed"), "does not wait for single drafter tokens"),
    ):
        if (found := given.get(key)) not in supported:
            raise ConfigError(
                f'{key} is {found!r}, which does not go with "parallel": "{parallel}": that {why}; '
                "leave one of them out."
            )
    if device is None:
        return
    ranges = re.findall(r"(\d+)-(\d+)", str(device))
    if not re.fullmatch(_DEVICES, str(device)) or any(int(a) > int(b) for a, b in ranges):
        raise ConfigError(
            f'drafter_device is {device!r}; it must be CPU cores as "1" or "2-3,6", the smaller '
            'number of a range first, or a device as "cuda:1".'
        )


def check_texts(given: Mapping[str, Any]) -> None:
    """Values whose kind vLLM names by its classes, or does not look at."""
    for key, wanted in (
        ("model", "the drafter's Hugging Face name or folder"),
        ("attention_backend", 'a name that vLLM knows, as "FLASH_ATTN"'),
    ):
        value = given.get(key)
        if isinstance(value, bool | int | float | list | tuple | Mapping):
            raise ConfigError(f"{key} is {value!r}; it must be a string: {wanted}.")


def check_spellings(user: Mapping[Any, Any]) -> None:
    """A key may be spelt with dashes and with underscores, but not mean two things."""
    found: dict[str, Any] = {}
    for key, value in user.items():
        name = str(key).replace("-", "_")
        if name in found and found[name] != value:
            raise ConfigError(
                f"{name} is given twice, with dashes and with underscores, as {found[name]!r} and "
                f"{value!r}; leave one of them out."
            )
        found[name] = value


def check_verification(method: Any) -> None:
    if method != "standard":
        raise ConfigError(
            f"rejection_sample_method={method!r} is not supported here: this method promises the "
            "target's own distribution, which 'standard' keeps; leave the key out."
        )


def number(value: Any) -> Any:
    """A number, also one given as text, as vLLM (pydantic) reads it; any other value unchanged."""
    if isinstance(value, bool):
        return value
    try:
        return _NUMBER.validate_python(value)
    except ValueError:
        return value


def integer(key: str, value: Any, low: int, high: int) -> int:
    """A whole number in a range."""
    found = number(value)
    if isinstance(found, bool) or not isinstance(found, int) or not low <= found <= high:
        given = "missing" if value is None else repr(value)
        raise ConfigError(f"{key} is {given}; it must be a whole number from {low} to {high}.")
    return found


def num_bytes(value: Any) -> int:
    """A byte count as vLLM's command line takes it: 67108864, "64MiB", "0.5G"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", str(value), re.IGNORECASE)
    number: float = 0
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif match:
        base = 1024 if match[3] else 1000
        number = float(match[1]) * base ** " kmgt".index(match[2].lower() or " ")
    if not 1 <= number < _MOST_BYTES:
        raise ConfigError(
            f"kv_cache_memory_bytes is {value!r}; it must be a number of bytes from 1 and below "
            '2^63, as 67108864 or "64MiB".'
        )
    return int(number)


def one_of(key: str, value: Any, choices: tuple[str, ...]) -> None:
    """One of a few words."""
    if value not in choices:
        raise ConfigError(
            f"{key} is {value!r}{nearest(value, choices)}; supported: {listed(choices)}."
        )


def listed(names: Iterable[str]) -> str:
    """Names in a sentence."""
    return ", ".join(names)
