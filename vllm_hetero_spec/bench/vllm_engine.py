# SPDX-License-Identifier: Apache-2.0
"""vLLM as a measured engine: alone, with our plugin, or with one of vLLM's own methods.

The child process runs `python -m` this module. It is a client that keeps a number of requests in
flight: it sends the next request when one ends, and records arrival times of tokens.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields
from itertools import count
from typing import Any

from vllm_hetero_spec.bench.child_process import REST, EngineProcess, serve
from vllm_hetero_spec.bench.load import Load, Sample, Trace
from vllm_hetero_spec.errors import ConfigError, one_line
from vllm_hetero_spec.inputs.model_folder import kv_bytes_per_token, text_config

_MODULE = "vllm_hetero_spec.bench.vllm_engine"
_METRICS = "vllm:spec_decode_num_"
_CPU_MAX_MODEL_LEN = 2048
_CPU_BLOCK = 128  # tokens; vLLM's block size on CPU
_LAST_WORDS = 5.0  # seconds for an exception of vLLM, which has more details than ours
_EXTENSION = f"{_MODULE}.DeviceMemory"


@dataclass(frozen=True)
class EngineSpec:
    """Models of an engine, and arguments of `vllm.LLM`."""

    model: str  # the target: a Hugging Face name or a folder
    speculative_config: dict[str, Any] | None = None  # None: the target alone
    max_batch_size: int = 1  # largest `Load.batch_size`
    engine: dict[str, Any] = field(default_factory=dict)  # further arguments; override defaults


class VllmEngine(EngineProcess):
    """vLLM for an `EngineSpec`; the child starts the engine core in a process of its own."""

    program = _MODULE


class DeviceMemory:
    """Worker extension that reports a GPU's memory; vLLM mixes it into the worker's class."""

    def hetero_spec_device_peak(self) -> int:
        """Maximum bytes of tensors on the device since the worker's start; 0 on CPUs."""
        import torch

        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


class Driver:
    """Runs loads on a `vllm.LLM`; ConfigError if branches of draft trees may not fit its KV."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        config = llm.llm_engine.vllm_config
        self._ours = hasattr(config.speculative_config, "hetero")
        self._runner = "V2" if config.use_v2_model_runner else "V1"
        self._dtype = str(config.model_config.dtype).removeprefix("torch.")
        self._extended = config.parallel_config.worker_extension_cls == _EXTENSION
        # True if the KV cache limits the length of requests; engines of a comparison may differ.
        model = config.model_config
        self._fitted = (
            model.original_max_model_len == -1
            and model.max_model_len < model.get_and_verify_max_len(-1)
        )
        if self._fitted and self._ours and config.speculative_config.hetero.tree_nodes:
            raise ConfigError(
                "tree_nodes needs KV blocks beside those of a request of full length, and the "
                f"memory holds only {model.max_model_len} tokens of one request; set a smaller "
                "max_model_len (engine in a suite), as with --engine-args "
                f"'{{\"max_model_len\": {model.max_model_len // 2}}}'."
            )
        self._salts = count()
        self._warm: set[Hashable] = set()

    def run(self, load: Load) -> Sample:
        """Generate a load, the first of each kind after a warm-up; ConfigError if vLLM refuses."""
        self.warm_up(load)
        before = self._counters()
        time.sleep(REST)
        traces, seconds = self._drive(load)
        grown = since(before, self._counters())
        # Of each worker; unknown if the user chose another worker extension.
        peaks = self._llm.collective_rpc("hetero_spec_device_peak") if self._extended else []
        return Sample(
            traces=traces,
            seconds=seconds,
            drafts=grown.get("drafts", 0),
            draft_tokens=grown.get("draft_tokens", 0),
            accepted_tokens=grown.get("accepted_tokens", 0),
            accepted_per_position=grown.get("accepted_tokens_per_pos", []),
            worker=grown["worker"],
            peak_memory_bytes=sum(peaks),
            runner=self._runner,
            dtype=self._dtype,
        )

    def warm_up(self, load: Load) -> None:
        """Generate a few tokens if the load is the first of its kind."""
        if load.kind not in self._warm:
            self._drive(load.warm_up)
            self._warm.add(load.kind)

    def _drive(self, load: Load) -> tuple[list[Trace], float]:
        """Run a load to its end; return its traces and its seconds."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind

        engine = self._llm.llm_engine
        # Requests of one load may share cached prefixes; a salt separates loads.
        salt = str(next(self._salts))
        traces: list[Trace] = []
        names: list[str] = []
        running = 0
        short: int | None = None  # tokens of a completion that memory cut short
        began = time.perf_counter()

        def send() -> None:
            index = len(traces)
            sampling = SamplingParams(
                temperature=load.temperature,
                top_p=load.top_p,
                max_tokens=load.max_tokens,
                ignore_eos=load.ignore_eos,
                seed=None if load.seed is None else load.seed + index,
                output_kind=RequestOutputKind.DELTA,
            )
            traces.append(Trace([], "", time.perf_counter() - began, [], []))
            prompt = {"prompt": load.prompts[index], "cache_salt": salt}
            try:
                names.append(engine.add_request(str(index), prompt, sampling))
            except (ValueError, VLLMClientError) as error:
                engine.abort_request(names, internal=True)
                self._warm.clear()  # the next warm-up includes counters of the aborted requests
                raise refusal(error) from error

        while running or len(traces) < len(load.prompts):
            while running < load.batch_size and len(traces) < len(load.prompts):
                send()
                running += 1
            outputs = engine.step()
            now = time.perf_counter() - began
            for output in outputs:
                trace, completion = traces[int(output.request_id)], output.outputs[0]
                if completion.token_ids:
                    trace.arrived(completion.token_ids, now)
                trace.text += completion.text
                running -= output.finished
                written = len(trace.token_ids)
                if completion.finish_reason == "length" and written < load.max_tokens:
                    short = written
        seconds = time.perf_counter() - began
        if self._fitted and short is not None:
            # Another engine with more memory might not cut it short.
            raise ConfigError(
                f"a completion of {load.max_tokens} tokens ended after {short}, as memory is left "
                f"for {engine.model_config.max_model_len} tokens of a request; give shorter "
                "prompts or less --max-tokens (max_tokens in a suite), or more memory, as with "
                "tensor_parallel_size."
            )
        return traces, seconds

    def _counters(self) -> dict[str, Any]:
        """vLLM's counters of speculation by their shortened names; our counters under "worker"."""
        from vllm_hetero_spec import read_stats

        found: dict[str, Any] = {}
        for metric in self._llm.get_metrics():
            if not metric.name.startswith(_METRICS):
                continue
            name = metric.name.removeprefix(_METRICS)
            if hasattr(metric, "values"):  # one metric per data-parallel rank
                sums = found.get(name, [0] * len(metric.values))
                found[name] = [a + b for a, b in zip(sums, metric.values, strict=True)]
            else:
                found[name] = found.get(name, 0) + metric.value
        return {**found, "worker": read_stats(self._llm) if self._ours else {}}


def known_arguments() -> set[str]:
    """Return the names of the arguments of `vllm.LLM`."""
    from vllm.engine.arg_utils import EngineArgs

    return {each.name for each in fields(EngineArgs)} | {"chat_template"}


def since(before: Any, after: Any) -> Any:
    """Growth of counters, which are numbers or lists or dictionaries of them."""
    if isinstance(after, dict):
        return {name: since(before.get(name), value) for name, value in after.items()}
    if isinstance(after, list):
        return [since(a, b) for a, b in zip(before or [0] * len(after), after, strict=True)]
    return after - (before or 0)


def refusal(error: Exception) -> ConfigError:
    """Convert an error of vLLM's front end to one line."""
    details = getattr(error, "errors", None)  # a method of pydantic's errors
    text = details()[0]["msg"] if callable(details) else str(error)
    return ConfigError(f"vLLM refuses this: {one_line(text.removeprefix('Value error, '))}")


def start(spec: EngineSpec) -> Any:
    """Build a `vllm.LLM`; ConfigError if vLLM or the plugin refuses it."""
    from vllm import LLM

    try:
        return LLM(
            model=spec.model,
            speculative_config=spec.speculative_config,
            max_num_seqs=spec.max_batch_size,
            disable_log_stats=False,
            **_engine_arguments(spec),
        )
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # raised by the front end only, not by the core
        raise refusal(error) from error


def build(spec: EngineSpec) -> Callable[[Load], Sample]:
    """Start vLLM, and return the function that runs a load."""
    llm = start(spec)
    threading.Thread(target=_end_with_core, args=(llm.llm_engine.engine_core,), daemon=True).start()
    return Driver(llm).run


def _end_with_core(client: Any) -> None:
    """End this process if its engine core was killed, for which vLLM would wait forever."""
    resources = getattr(client, "resources", None)  # None: the core is in this process
    while resources is not None:
        time.sleep(1)
        if resources.engine_dead:
            time.sleep(_LAST_WORDS)
            print("EngineDeadError: the engine core has ended", file=sys.stderr, flush=True)
            os._exit(1)


def _engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Further arguments of `vllm.LLM`; on a CPU, KV for this batch size only.

    On a GPU, -1 shortens requests to the KV cache if necessary. CPUs compute in float32: few are
    fast at 16 bits, and equality of tokens should not depend on rounding.
    """
    from vllm.platforms import current_platform

    given = {"use_tqdm_on_load": False, "worker_extension_cls": _EXTENSION, **spec.engine}
    if given.get("max_model_len") is None:
        given.pop("max_model_len", None)
    if not current_platform.is_cpu():
        return {"max_model_len": -1, **given}
    defaults = {"dtype": "float32", "enforce_eager": True}
    if not given.keys() & {"kv_cache_memory_bytes", "gpu_memory_utilization"}:
        config = text_config(spec.model, bool(given.get("trust_remote_code")))
        most = getattr(config, "max_position_embeddings", _CPU_MAX_MODEL_LEN)
        longest = min(most, _CPU_MAX_MODEL_LEN)
        asked = given.get("max_model_len") or 0  # -1: as the KV cache allows
        tokens = (spec.max_batch_size + 1) * ((asked if asked > 0 else longest) + _CPU_BLOCK)
        room = tokens * kv_bytes_per_token(config, 4)
        defaults |= {"max_model_len": longest, "kv_cache_memory_bytes": room}
    return {**defaults, **given}


if __name__ == "__main__":
    serve(build)
