# SPDX-License-Identifier: Apache-2.0
"""Start the engine of an `EngineId`, and choose the number of engines that are up together."""

import contextlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_hetero_spec.bench.child_process import EngineProcess
from vllm_hetero_spec.bench.load import MeasurementError
from vllm_hetero_spec.bench.plan import EngineId
from vllm_hetero_spec.bench.suite import KINDS, Suite, SuiteDrafter, Target, speculative_config
from vllm_hetero_spec.errors import ConfigError, nearest
from vllm_hetero_spec.inputs.model_folder import text_config
from vllm_hetero_spec.inputs.tokenizer_source import open_tokenizer
from vllm_hetero_spec.inputs.weights import weight_bytes
from vllm_hetero_spec.machine import available_memory_bytes
from vllm_hetero_spec.options import METHODS, parse
from vllm_hetero_spec.text.tokenizer import UnsupportedTokenizer

_OVERHEAD_BYTES = 2 << 30  # per engine on a CPU, without weights: libraries, KV, buffers
_CPU_SHARE = 0.8  # share of the free memory
_GPU_SHARE = 0.9  # share of a device's memory
_PAIR = 2  # engines: `alone` and one other
_PARALLEL = "parallel_drafting"  # a key that vLLM's `draft_model` has, too
# Arguments of `vllm.LLM` that the Hugging Face peers also take.
_SHARED_KEYS = ("trust_remote_code", "dtype", "revision", "tokenizer")


def check_arguments(suite: Suite) -> None:
    """Check the names of a suite's engine arguments before weights are fetched.

    Raises:
        ConfigError: vLLM does not know an argument.
        ModuleNotFoundError: vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise ModuleNotFoundError("vLLM is not installed", name="vllm")
    given = [key for target in suite.targets for key in target.engine]
    if not given:
        return
    from vllm_hetero_spec.bench.vllm_engine import known_arguments

    known = known_arguments()
    for key in given:
        if key not in known:
            raise ConfigError(
                f"the engine argument {key!r} is unknown to this vLLM{nearest(key, known)}; "
                "--engine-args (engine in a suite) takes arguments of vllm.LLM."
            )


def start(engine: EngineId, suite: Suite, at_once: int, *, verbose: bool = False) -> EngineProcess:
    """Start an engine of a suite and wait until it is ready; `at_once` engines share the machine.

    Raises:
        ConfigError: It refuses the models or the configuration.
        MeasurementError: It fails for another reason.
    """
    target = suite.target(engine.target)
    drafter = next((d for d in target.drafters if d.name == engine.drafter), None)
    if KINDS[engine.method].huggingface:
        from vllm_hetero_spec.bench.huggingface_engine import HuggingFaceEngine, HuggingFaceSpec

        given = {key: target.engine[key] for key in _SHARED_KEYS if key in target.engine}
        if drafter is not None:
            given |= {"assistant": drafter.model, "num_assistant_tokens": engine.lookahead}
        return HuggingFaceEngine(HuggingFaceSpec(target.model, **given), verbose=verbose)
    from vllm_hetero_spec.bench.vllm_engine import EngineSpec, VllmEngine

    config = vllm_config(engine, drafter)
    # Branches of a draft tree run as sequences beside the requests; there are fewer than nodes.
    nodes = parse(config).tree_nodes if config and engine.method in METHODS else 0
    spec = EngineSpec(
        model=target.model,
        speculative_config=config,
        max_batch_size=max(suite.batch_sizes) * (1 + nodes),
        engine=device_share(at_once) | target.engine,
    )
    try:
        return VllmEngine(spec, verbose=verbose)
    except (ConfigError, MeasurementError) as error:
        if not on_gpu() or at_once == 1 or "memory" not in str(error).lower():
            raise
        raise type(error)(
            f"{error}\n  (up to {at_once} engines share the GPU's memory; --engines-at-once 1, in "
            "a suite engines_at_once: 1, gives each all of it)"
        ) from error


def vllm_config(engine: EngineId, drafter: SuiteDrafter | None) -> dict[str, Any] | None:
    """`speculative_config` of `vllm.LLM`; None for the target alone."""
    if drafter is None or engine.lookahead is None:
        return None
    if engine.method in METHODS:
        return speculative_config(engine.method, drafter, engine.lookahead)
    return {
        "method": "draft_model",
        "model": drafter.model,
        "num_speculative_tokens": engine.lookahead,
        **({"use_heterogeneous_vocab": True} if engine.method == "vllm_tli" else {}),
        **({_PARALLEL: True} if drafter.speculative.get(_PARALLEL) is True else {}),
    }


def vocabularies_differ(target: Target, drafter: SuiteDrafter) -> str | None:
    """Return why `draft_model` cannot run a pair, or None; ConfigError if a file is unreadable."""
    trust = bool(target.engine.get("trust_remote_code"))
    tokenizer = target.engine.get("tokenizer") or target.model
    try:
        own = open_tokenizer(tokenizer, "target", trust_remote_code=trust).text
        other = open_tokenizer(drafter.model, "drafter", trust_remote_code=trust).text
    except ConfigError as error:
        if isinstance(error.__cause__, UnsupportedTokenizer):
            return str(error.__cause__)
        raise
    if own.fingerprint != other.fingerprint:
        return "target and drafter have different vocabularies"
    sizes = [text_config(model, trust).vocab_size for model in (target.model, drafter.model)]
    if sizes[0] != sizes[1]:
        return f"the target has {sizes[0]} output rows, the drafter {sizes[1]}"
    return None


def at_once_for(suite: Suite) -> int:
    """Number of engines that may be up together, as examples/bench/README.md describes it.

    On a CPU two engines are up if a size is unknown because the model is on the hub.
    """
    if suite.engines_at_once is not None:
        return suite.engines_at_once
    given = [target.engine.get("gpu_memory_utilization") for target in suite.targets]
    if on_gpu() and any(isinstance(share, float) and share > 1 / _PAIR for share in given):
        return 1
    sizes = [_engine_bytes(target) for target in suite.targets]
    if on_gpu() or None in sizes:
        return _PAIR
    return max(1, int(available_memory_bytes() * _CPU_SHARE) // max(filter(None, sizes)))


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def device_share(at_once: int) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that leave memory for the other engines on a GPU."""
    if not on_gpu() or at_once == 1:
        return {}
    return {"gpu_memory_utilization": _GPU_SHARE / at_once}


def _engine_bytes(target: Target) -> int | None:
    """Memory of an engine on a CPU with the largest drafter; None if a size is unknown."""
    own = _float32_bytes(target.model)
    drafters = [_float32_bytes(drafter.model) for drafter in target.drafters]
    if own is None or None in drafters:
        return None
    return own + max(filter(None, drafters)) + _OVERHEAD_BYTES


def _float32_bytes(model: str) -> int | None:
    """Bytes of a folder's weights; None also for damaged files, which the engine reports."""
    with contextlib.suppress(ConfigError):
        return weight_bytes(Path(model), 4)
    return None
