# SPDX-License-Identifier: Apache-2.0
"""What a user may write in `--speculative-config`, and one clear sentence for what they may not.

Knows neither vLLM nor torch. `parse` turns the user's dictionary into `HeteroOptions`
plus the keys that go on to vLLM's own `SpeculativeConfig` unchanged.
"""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm_hetero_spec.config_checks import (
    check_confidence,
    check_fuzzy,
    check_parallel,
    check_rows,
    check_spellings,
    check_texts,
    check_trees,
    check_verification,
    integer,
    listed,
    num_bytes,
    one_of,
)
from vllm_hetero_spec.draft import methods
from vllm_hetero_spec.errors import ConfigError, nearest

METHODS = tuple(methods.METHODS)
DEFAULT_METHOD = methods.HETERO
VERIFICATIONS = ("token", "block", "race", "fuzzy")
DIVERGENCES = ("js", "tv", "kl")
TRANSLATIONS = ("auto", "text", "identity")
CHAT_TEMPLATES = ("auto", "off")
CONTROLLERS = ("goodput", "fixed", "confidence")
TENSOR_PARALLEL_MODES = ("rank0", "sharded")
PARALLEL_MODES = ("off", "process")
TREE_VALUES = ("learnt", "rank")
MAX_LOOKAHEAD = 64
MAX_TREE_NODES = 64
MAX_TREE_WIDTH = 4
# With so many, trees are nearly as good as if the drafter fed their best nodes.
DEFAULT_TREE_WIDTH = 3
MAX_CANDIDATES = 16
MIN_CONTEXT = 64
# Drafter tokens, where the user does not say: each costs memory, and time in all steps behind it. A
# bound, not yet a measured optimum.
DEFAULT_CONTEXT = 4096

# Keys of vLLM's own SpeculativeConfig that keep their meaning beside our methods.
_VLLM_KEYS = frozenset({"rejection_sample_method"})
# Keys of other or earlier configurations, and what to do instead. By spelling another key of ours
# would be nearest.
_OTHER_KEYS = {
    "drafter": 'write "model"',
    "draft_model": 'write "model"',
    "drafter_model": 'write "model"',
    "speculative_model": 'write "model"',
    "use_heterogeneous_vocab": "leave it out: it belongs to vLLM's own method draft_model",
    "heterogeneous_vocab_method": 'write "method"',
    "draft_tensor_parallel_size": 'write "tensor_parallel": "rank0" or "sharded"',
    "max_model_len": 'write "context"',
    "ray_drafter": "leave it out: no drafter runs in a Ray actor",
}


@dataclass(frozen=True)
class HeteroOptions:
    """A validated request for one of our methods.

    Attributes:
        method: How drafts are chosen, one of `METHODS` (`draft.methods`); "hetero" stands for the
            one of them that fits the pair.
        model: The drafter: a Hugging Face name or a folder.
        num_speculative_tokens: Lookahead, in TARGET tokens per request and step.
        tree_nodes: Most tokens of a draft that may be a tree; 0 where all drafts are chains.
        tree_width: Most paths that the drafter follows for a tree: 1 knows the siblings of one
            path alone, 2 follows a second one from the next likeliest first token on, 3 also one
            that leaves the first behind its first token, 4 one behind its second.
        tree_values: By what nodes of trees are chosen: "learnt" by all that the drafter knows of
            them, "rank" by their place among their siblings alone (ERSD's Algorithm 3).
        tokenizer: The drafter's tokenizer; its model's where None.
        tokenizer_mode: vLLM's tokenizer mode for the drafter ("auto", "mistral", ...).
        revision: Version of the drafter's repository (weights and configuration).
        tokenizer_revision: Version of the drafter's tokenizer; `revision` where None.
        trust_remote_code: Run code of the drafter's repository; the target's setting where None.
        quantization: Quantization of the drafter's weights; read from its configuration where None.
        dtype: Weights and activations of the drafter; where None the target's if it can be, else
            its own.
        attention_backend: vLLM's name of what computes the drafter's attention; chosen for it where
            None, whatever computes the target's.
        kv_cache_dtype: Of the drafter's KV; that of its activations where None.
        context: Drafter tokens of a request's text that the drafter reads at most: past it, it goes
            on from the last part of the text. Derived where None.
        enforce_eager: False compiles the drafter as the target is compiled, True runs it without
            CUDA graphs too; None captures graphs on NVIDIA GPUs, unless the target is eager.
        kv_cache_memory_bytes: Budget of the drafter's KV pool; derived where None.
        tensor_parallel: "rank0" runs the drafter whole on the first rank of the target's tensor
            parallel group, "sharded" splits it over that group.
        parallel: "process" runs the drafter in a process of its own, which drafts what is likely to
            be wanted next while the target verifies; "off" drafts between the target's steps.
        drafter_device: Of that process: CPU cores as "1" or "2-3,6", or a device as "cuda:1"; the
            engine's own where None.
        translation: "auto" takes ids as they are when both tokenizers are the same, "text" always
            goes through text, "identity" demands equal tokenizers.
        verification: "token" accepts token by token, "block" the longest prefix that the draft as
            a whole supports, "race" makes the output of a seed the same whatever drafts, "fuzzy" is
            lossy.
        divergence: Of "fuzzy": "js" or "kl" in nats, or "tv".
        threshold: Of "fuzzy": drafts whose row diverges by less from the target's pass.
        merge_candidates: Of "slrs", also where "hetero" chooses it: the drafter is run one token
            past so many of the likeliest tokens at each step; past all but the first of them in KV
            blocks of their own, or past the first alone where its KV pool or the round's tokens
            leave no room. 0 is "push_forward".
        chat_template: "auto" shows the drafter its own turn markers where a prompt has the
            target's, if the two chat templates can be aligned; "off" shows it the target's.
        controller: Who decides how far to draft, up to num_speculative_tokens: "goodput" as far as
            it pays on this machine, and not at all where it does not; "fixed" always all the way;
            "confidence" until the drafter's confidence falls below confidence_threshold.
        confidence_threshold: Of "confidence": a probability.
        calibrate: Whether "goodput" begins with what earlier runs of this pair on this machine
            learnt (costs, acceptance), or times target and drafter for some seconds at start-up
            where none did, and keeps on disk what it learns; without, it begins with nothing.
    """

    method: str
    model: str
    num_speculative_tokens: int
    tree_nodes: int = 0
    tree_width: int = DEFAULT_TREE_WIDTH
    tree_values: str = "learnt"
    tokenizer: str | None = None
    tokenizer_mode: str = "auto"
    revision: str | None = None
    tokenizer_revision: str | None = None
    trust_remote_code: bool | None = None
    quantization: str | None = None
    dtype: str | None = None
    attention_backend: str | None = None
    kv_cache_dtype: str | None = None
    context: int | None = None
    enforce_eager: bool | None = None
    kv_cache_memory_bytes: int | None = None
    tensor_parallel: str = "rank0"
    parallel: str = "off"
    drafter_device: str | None = None
    translation: str = "auto"
    verification: str = "token"
    divergence: str = "js"
    threshold: float | None = None
    merge_candidates: int = 1
    chat_template: str = "auto"
    controller: str = "goodput"
    confidence_threshold: float = 0.4
    calibrate: bool = True


OWN_KEYS = tuple(f.name for f in fields(HeteroOptions))


def wants_us(user: Mapping[str, Any] | None, known_methods: tuple[str, ...] = ()) -> bool:
    """Whether a speculative configuration asks for one of our methods.

    Args:
        user: The user's dictionary, keys with dashes or underscores.
        known_methods: Method names that vLLM itself understands.

    Raises:
        ConfigError: The method is unknown to both, and ours is the nearest name.
    """
    if not user:
        return False
    user = _normalise_keys(user)
    method = user.get("method")
    if method in METHODS or user.get("heterogeneous_vocab_method") in METHODS:
        return True  # `parse` refuses the latter
    if isinstance(method, str) and method not in known_methods:
        near = difflib.get_close_matches(method.lower(), [*METHODS, *known_methods], n=1)
        if near and near[0] in METHODS:
            raise ConfigError(
                f"speculative method {method!r} does not exist; did you mean {near[0]!r}? "
                f"Methods of vllm_hetero_spec: {listed(METHODS)}."
            )
    return False


def parse(
    user: Mapping[str, Any], *, target_tensor_parallel: int = 1
) -> tuple[HeteroOptions, dict[str, Any]]:
    """Validate a configuration for which `wants_us` said yes.

    Args:
        user: The user's dictionary, keys with dashes or underscores.
        target_tensor_parallel: Size of the target's tensor parallel group.

    Returns:
        Our options, and the entries that vLLM's SpeculativeConfig takes unchanged.

    Raises:
        ConfigError: One sentence that names the key, what was found and what is supported.
    """
    check_spellings(user)
    given = _normalise_keys(user)
    vllm_keys = {key: given.pop(key) for key in _VLLM_KEYS & given.keys()}
    _check_keys(given)
    check_verification(vllm_keys.get("rejection_sample_method", "standard"))
    if not given.get("model"):
        raise ConfigError(
            f"speculative method {given['method']!r} needs a drafter: add "
            '"model": "<Hugging Face name or folder>" to the speculative configuration.'
        )
    check_texts(given)
    for key in ("model", "tokenizer"):
        if isinstance(given.get(key), str):
            given[key] = os.path.expanduser(given[key])  # no shell does inside of JSON
    given["num_speculative_tokens"] = integer(
        "num_speculative_tokens", given.get("num_speculative_tokens"), 1, MAX_LOOKAHEAD
    )
    if given.get("tree_nodes") is not None:
        given["tree_nodes"] = integer("tree_nodes", given["tree_nodes"], 0, MAX_TREE_NODES)
    if given.get("tree_width") is not None:
        given["tree_width"] = integer("tree_width", given["tree_width"], 1, MAX_TREE_WIDTH)
    if given.get("context") is not None:
        given["context"] = integer("context", given["context"], MIN_CONTEXT, 1 << 31)
    if given.get("kv_cache_memory_bytes") is not None:
        given["kv_cache_memory_bytes"] = num_bytes(given["kv_cache_memory_bytes"])
    if given.get("merge_candidates") is not None:
        given["merge_candidates"] = integer(
            "merge_candidates", given["merge_candidates"], 0, MAX_CANDIDATES
        )
        if not methods.METHODS[given["method"]].merges:
            raise ConfigError(
                'merge_candidates belongs to the methods "slrs" and "hetero", and the method is '
                f"{given['method']!r}; leave it out or ask for one of them."
            )
    if given.get("parallel") == "ray":
        raise ConfigError(
            "parallel is 'ray', which is no longer supported; supported: "
            f'{listed(PARALLEL_MODES)}; write "process", which gives each engine a drafter process '
            "of its own."
        )
    for key, choices in (
        ("tensor_parallel", TENSOR_PARALLEL_MODES),
        ("parallel", PARALLEL_MODES),
        ("translation", TRANSLATIONS),
        ("verification", VERIFICATIONS),
        ("divergence", DIVERGENCES),
        ("chat_template", CHAT_TEMPLATES),
        ("controller", CONTROLLERS),
        ("tree_values", TREE_VALUES),
    ):
        if given.get(key) is not None:
            one_of(key, given[key], choices)
    for key in ("enforce_eager", "trust_remote_code", "calibrate"):
        if not isinstance(given.get(key), bool | None):
            raise ConfigError(f"{key} is {given[key]!r}; it must be true or false.")
    check_fuzzy(given)
    check_confidence(given)
    check_trees(given)
    check_rows(given, target_tensor_parallel)
    check_parallel(given)
    # An explicit null means "the default", as it does in vLLM.
    return HeteroOptions(**{k: v for k, v in given.items() if v is not None}), vllm_keys


def _normalise_keys(user: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key).replace("-", "_"): value for key, value in user.items()}


def _check_keys(given: Mapping[str, Any]) -> None:
    for key in given:
        if key in _OTHER_KEYS:
            raise ConfigError(
                f"{key} is no key of the speculative configuration; {_OTHER_KEYS[key]}."
            )
        if key not in OWN_KEYS:
            supported = sorted({*OWN_KEYS, *_VLLM_KEYS})
            raise ConfigError(
                f"unknown key {key!r} in the speculative configuration"
                f"{nearest(key, supported)}; supported: {listed(supported)}."
            )
