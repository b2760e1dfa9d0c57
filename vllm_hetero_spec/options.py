# SPDX-License-Identifier: Apache-2.0
"""Keys of `--speculative-config` for our methods.

`parse` turns a user's dictionary into `HeteroOptions`. Each error is one sentence. This file
imports neither vLLM nor torch.
"""

import difflib
import functools
import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, StrictBool, model_validator
from pydantic.dataclasses import dataclass

from vllm_hetero_spec.draft import methods
from vllm_hetero_spec.errors import ConfigError, Table, between, checked, must, one_of, whole

METHODS = tuple(methods.METHODS)
DEFAULT_METHOD = methods.HETERO
VERIFICATIONS = ("token", "block", "race", "fuzzy")
CONTROLLERS = ("goodput", "fixed", "confidence")
MAX_LOOKAHEAD = 64  # target tokens
MAX_TREE_NODES = 64
DEFAULT_TREE_WIDTH = 3  # decode paths; nearly as good as one for each of the best nodes
DEFAULT_CONTEXT = 4096  # drafter tokens; bounds memory and attention time, not a measured optimum
_log_once = functools.cache(logging.getLogger("vllm.hetero_spec").warning)


def _num_bytes(value: Any) -> int:
    """Parse a byte count like vLLM's command line: 67108864, "64MiB", "0.5G". 0 if invalid."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", str(value), re.IGNORECASE)
    if not match or isinstance(value, int):
        return int(value) if match else 0
    unit = (1024 if match[3] else 1000) ** " kmgt".index(match[2].lower() or " ")
    return int(min(float(match[1]) * unit, 1 << 63))


def _is_device(text: str) -> bool:
    """Return True for CPU cores like "0-2,5", or for a device of torch."""
    ranges = re.findall(r"(\d+)-(\d+)", text)
    pattern = r"\d+(-\d+)?(,\d+(-\d+)?)*|[a-z]+(:\d+)?"
    return bool(re.fullmatch(pattern, text)) and all(int(a) <= int(b) for a, b in ranges)


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


_DEVICE = (
    'CPU cores as "1" or "2-3,6", the smaller number of a range first, or a device as "cuda:1"'
)
_DIVERGENCE = "a finite divergence of at least 0, below which a draft passes, as 0.1"
_BYTES = 'a number of bytes from 1 and below 2^63, as 67108864 or "64MiB"'
_Folder = AfterValidator(os.path.expanduser)  # JSON passes through no shell


@dataclass(frozen=True)
class FuzzyOptions(Table):
    """Lossy verification: accept a sampled draft token if the distributions diverge by less."""

    word: ClassVar[str] = "fuzzy"
    threshold: Annotated[float, between(0, sys.float_info.max, _DIVERGENCE)] = Field(
        default=None, validate_default=True
    )
    divergence: Literal["js", "tv", "kl"] = "js"


@dataclass(frozen=True)
class ConfidenceOptions(Table):
    """Draft until the drafter's largest probability falls below the threshold."""

    word: ClassVar[str] = "confidence"
    threshold: Annotated[float, between(0, 1, "a probability from 0 to 1")] = 0.4


@dataclass(frozen=True)
class Debug(Table):
    """Keys for tests and comparisons."""

    translation: Literal["auto", "text", "identity"] = "auto"
    chat_template: Literal["auto", "off"] = "auto"
    tokenizer_revision: str | None = None
    calibrate: StrictBool = True
    copies: StrictBool = True
    tree_width: Annotated[int, whole(1, 4)] = DEFAULT_TREE_WIDTH


@dataclass(frozen=True)
class HeteroOptions(Table):
    """A validated configuration; examples/configuration.md describes the keys.

    A value of None is derived from the target, the drafter or the device.
    """

    method: Annotated[str, one_of(METHODS)]
    model: Annotated[
        str, _Folder, must("a string: the drafter's Hugging Face name or folder", _is_string)
    ]
    num_speculative_tokens: Annotated[int, whole(1, MAX_LOOKAHEAD)]
    tree_nodes: Annotated[int, whole(0, MAX_TREE_NODES)] = 0
    tokenizer: Annotated[str, _Folder] | None = None
    tokenizer_mode: str = "auto"
    revision: str | None = None
    trust_remote_code: StrictBool | None = None
    quantization: str | None = None
    dtype: Any = None  # offline also a torch dtype; vLLM checks it
    attention_backend: Annotated[str, must('a string, as "FLASH_ATTN"', _is_string)] | None = None
    kv_cache_dtype: str | None = None
    context: Annotated[int, whole(64, 1 << 31)] | None = None
    enforce_eager: StrictBool | None = None
    kv_cache_memory_bytes: (
        Annotated[int, must(_BYTES, lambda found: 1 <= found < 1 << 63, _num_bytes)] | None
    ) = None
    tensor_parallel: Literal["rank0", "sharded"] = "rank0"
    parallel_drafting: StrictBool | None = None
    draft_ahead: StrictBool = False
    drafter_device: Annotated[str, must(_DEVICE, _is_device, str)] | None = None
    verification: Annotated[
        Literal["token", "block", "race"] | FuzzyOptions, one_of(VERIFICATIONS, fuzzy=FuzzyOptions)
    ] = "token"
    merge_candidates: Annotated[int, whole(0, 16)] = 1
    controller: Annotated[
        Literal["goodput", "fixed"] | ConfidenceOptions,
        one_of(CONTROLLERS, confidence=ConfidenceOptions),
    ] = "goodput"
    debug: Debug = Debug()

    @model_validator(mode="after")
    def _fit_together(self) -> "HeteroOptions":
        if self.merge_candidates != 1 and not methods.METHODS[self.method].merges:
            raise ConfigError(
                'merge_candidates belongs to the methods "slrs" and "hetero", and the method is '
                f"{self.method!r}; leave it out or choose one of them."
            )
        if isinstance(self.verification, FuzzyOptions) and self.method == methods.SLEM:
            raise ConfigError(
                '"verification": "fuzzy" needs sampled drafts; choose the method push_forward, tli '
                "or slrs instead of slem."
            )
        if not self.tree_nodes and self.debug.tree_width != DEFAULT_TREE_WIDTH:
            raise ConfigError(
                'debug.tree_width has no effect without "tree_nodes" above 0; set tree_nodes, or '
                "leave it out."
            )
        if self.draft_ahead:
            self._check_drafting_ahead()
        elif self.drafter_device is not None:
            raise ConfigError(
                'drafter_device needs "draft_ahead": true; add that, or leave it out.'
            )
        return self

    def _check_drafting_ahead(self) -> None:
        method, raced = methods.METHODS[self.method], self.verification == "race"
        if method.needs_probs and (raced or not method.draws_ahead):
            ahead = '"draft_ahead": true' + ' and "verification": "race"' * raced
            names = [name for name, of in methods.METHODS.items() if of.draws_ahead and not raced]
            raise ConfigError(
                f"method {self.method!r} does not run with {ahead}; use "
                f'{", ".join([methods.SLEM, *names])}, or "hetero", which chooses among them.'
            )
        for key, supported, why in (
            ("tree_nodes", (0,), "drafts chains only"),
            ("tensor_parallel", ("rank0",), "runs the drafter whole on one device"),
            ("verification", VERIFICATIONS[:3], "keeps the target's distribution"),
            ("controller", CONTROLLERS[:2], "does not wait for single drafter tokens"),
        ):
            if (found := getattr(self, key)) not in supported:
                raise ConfigError(
                    f"{key} is {getattr(found, 'word', found)!r}, which does not go with "
                    f'"draft_ahead": true: that {why}; leave one of them out.'
                )


# A key of vLLM's own SpeculativeConfig. Its only value with our methods is vLLM's default.
VLLM_KEY = "rejection_sample_method"
# Keys of other or old configurations, and what to do instead.
_OTHER_KEYS = {
    **dict.fromkeys(("drafter", "draft_model", "drafter_model"), 'write "model"'),
    "speculative_model": 'write "model"',
    "use_heterogeneous_vocab": "leave it out: it belongs to vLLM's own method draft_model",
    "heterogeneous_vocab_method": 'write "method"',
    "draft_tensor_parallel_size": 'write "tensor_parallel": "rank0" or "sharded"',
    "max_model_len": 'write "context"',
    "ray_drafter": "leave it out: no drafter runs in a Ray actor",
    "pipeline": "leave it out: Model Runner V2 serves pipeline stages without it",
}
# Old spellings, accepted until release 0.3, and the current place of each value.
_MOVED: dict[str, tuple[str, ...]] = {
    "translation": ("debug", "translation"),
    "chat_template": ("debug", "chat_template"),
    "tokenizer_revision": ("debug", "tokenizer_revision"),
    "calibrate": ("debug", "calibrate"),
    "tree_width": ("debug", "tree_width"),
    "parallel": ("draft_ahead",),
    "threshold": ("verification", "fuzzy", "threshold"),
    "divergence": ("verification", "fuzzy", "divergence"),
    "confidence_threshold": ("controller", "confidence", "threshold"),
}


def wants_us(user: Mapping[str, Any], vllm_methods: tuple[str, ...] = ()) -> bool:
    """Return True if a speculative configuration selects one of our methods.

    Raises:
        ConfigError: The method is unknown to vLLM and to us, and ours is the most similar name.
    """
    given = {str(key).replace("-", "_"): value for key, value in user.items()}
    method = given.get("method")
    if method in METHODS or given.get("heterogeneous_vocab_method") in METHODS:
        return True  # `parse` refuses the latter
    if isinstance(method, str) and method not in vllm_methods:
        near = difflib.get_close_matches(method.lower(), [*METHODS, *vllm_methods], n=1)
        if near and near[0] in METHODS:
            raise ConfigError(
                f"speculative method {method!r} does not exist; did you mean {near[0]!r}? "
                f"Methods of vllm_hetero_spec: {', '.join(METHODS)}."
            )
    return False


def parse(user: Mapping[str, Any], *, target_tensor_parallel: int = 1) -> HeteroOptions:
    """Validate a configuration for which `wants_us` returned True.

    Raises:
        ConfigError: One sentence with the key, the value found and what is supported.
    """
    # Null means the default, as in vLLM.
    given = {key: value for key, value in underscores(user).items() if value is not None}
    for key in filter(_OTHER_KEYS.get, given):
        raise ConfigError(f"{key} is no key of the speculative configuration; {_OTHER_KEYS[key]}.")
    _move_old_keys(given)
    if (sampling := given.pop(VLLM_KEY, "standard")) != "standard":
        raise ConfigError(
            f"{VLLM_KEY}={sampling!r} is not supported with our methods, which keep the target's "
            "own distribution, as 'standard' does; leave the key out."
        )
    if not given.get("model"):
        raise ConfigError(
            f"speculative method {given['method']!r} needs a drafter: add "
            '"model": "<Hugging Face name or folder>" to the speculative configuration.'
        )
    given.setdefault("num_speculative_tokens", None)  # the error names the range
    options = checked(HeteroOptions, given, "the speculative configuration")
    split = target_tensor_parallel > 1 and options.tensor_parallel == "sharded"
    if split and methods.METHODS[options.method].needs_probs:
        raise ConfigError(
            f'method {options.method!r} does not run with "tensor_parallel": "sharded"; '
            'use "rank0", which runs the drafter whole on the first rank, or the method "slem".'
        )
    return options


def underscores(user: Mapping[Any, Any]) -> dict[str, Any]:
    """Replace dashes in keys by underscores, also in nested tables, whose nulls are dropped.

    Raises:
        ConfigError: A key is given in both spellings, with two values.
    """
    found: dict[str, Any] = {}
    for key, value in user.items():
        name = str(key).replace("-", "_")
        if isinstance(value, Mapping):
            value = {k: v for k, v in underscores(value).items() if v is not None}
        if name in found and found[name] != value:
            raise ConfigError(
                f"{name} is given twice, with dashes and with underscores, as {found[name]!r} and "
                f"{value!r}; leave one of them out."
            )
        found[name] = value
    return found


def _move_old_keys(given: dict[str, Any]) -> None:
    """Replace old spellings by current ones, which one line of the log names."""
    old = [name for name in _MOVED if name in given]
    for name in old:
        (*way, last), value = _MOVED[name], given.pop(name)
        if name == "parallel":
            if value not in ("off", "process"):
                raise ConfigError(
                    f'parallel is {value!r}, which is not supported; write "draft_ahead": true, '
                    "which gives each engine a drafter process of its own, or leave it out."
                )
            value = value == "process"
        if len(way) == 2 and given.get(way[0]) == way[1]:
            given[way[0]] = {way[1]: {}}
        table: Any = given
        for part in way:
            table = table.setdefault(part, {}) if part == "debug" else table.get(part)
            if not isinstance(table, dict):
                where = ".".join(way)
                raise ConfigError(f"{name} needs {where}; set that, or leave {name} out.")
        if last in table and table[last] != value:
            where = ".".join((*way, last))
            raise ConfigError(f"{name} and {where} are one key with two values; leave {name} out.")
        table[last] = value
    if old:
        today = json.dumps({_MOVED[name][0]: given[_MOVED[name][0]] for name in old}, default=str)
        _log_once(
            f"Earlier keys in the speculative configuration: {', '.join(old)}. Release 0.3 will "
            f"refuse them; write {today}."
        )
