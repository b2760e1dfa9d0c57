# SPDX-License-Identifier: Apache-2.0
"""Measures one engine: what it generates, how fast, and what speculation did.

Each measurement runs in a process of its own, so that the memory of one engine is free before the
next starts, and so that whatever vLLM and its libraries print can be kept off the terminal. The
module is that process's program as well: `python -m vllm_hetero_spec.engine.measure`.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_hetero_spec.config import ConfigError

_METRICS = "vllm:spec_decode_num_"
_CPU_MAX_MODEL_LEN = 2048
_CPU_BLOCK = 128  # tokens; vLLM's block size on CPU
_WARM_UP = "Speculative decoding checks several tokens of a cheaper model in one forward pass. "


@dataclass(frozen=True)
class Workload:
    """What one engine is to generate.

    Attributes:
        model: The target: a Hugging Face name or a folder.
        prompts: Texts, each completed once.
        max_tokens: Longest completion, in target tokens.
        temperature: 0 is greedy.
        batch_size: Requests that run at the same time.
        speculative_config: As in vLLM; None runs the target alone.
        engine: Further arguments of `vllm.LLM`, over the defaults chosen here.
    """

    model: str
    prompts: Sequence[str]
    max_tokens: int
    temperature: float
    batch_size: int
    speculative_config: dict[str, Any] | None = None
    engine: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """What an engine did with a `Workload`, its warm-up not counted.

    Attributes:
        token_ids: Generated target ids of each prompt.
        texts: The same as text.
        seconds: From the first request to the last token, model loading left out.
        metrics: vLLM's `vllm:spec_decode_num_*` counters, by the rest of their name.
        worker: The plugin's counters (`DraftStats`), `skipped` among them.
    """

    token_ids: list[list[int]]
    texts: list[str]
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    worker: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Generated tokens of all prompts."""
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all prompts per second of wall-clock time."""
        return self.tokens / self.seconds

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens a verification step yields, bonus token included; None without drafts."""
        drafts = self.metrics.get("drafts")
        return 1 + self.metrics["accepted_tokens"] / drafts if drafts else None


class MeasurementError(RuntimeError):
    """An engine failed; the message names the errors it printed."""


def measure(workload: Workload, *, verbose: bool = False) -> Measured:
    """Run a workload on an engine in a new process and wait for it.

    Args:
        workload: What to run.
        verbose: Let vLLM write to stderr; otherwise its output is shown only if it fails.

    Raises:
        ConfigError: vLLM or the plugin refused the models or the configuration.
        MeasurementError: The engine failed for any other reason.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-hetero-spec-") as folder:
        asked, answer, log = (Path(folder) / name for name in ("asked", "answer", "log"))
        asked.write_text(json.dumps(asdict(workload)))
        environment = {"VLLM_LOGGING_LEVEL": "INFO" if verbose else "WARNING", **os.environ}
        with contextlib.ExitStack() as stack:
            output = sys.stderr if verbose else stack.enter_context(log.open("w"))
            command = [sys.executable, "-m", __name__, str(asked), str(answer)]
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
            ).returncode
        if not answer.exists():
            causes = "" if verbose else _causes(log.read_text(errors="replace"))
            raise MeasurementError(f"the engine ended with exit code {code}{causes}")
        found = json.loads(answer.read_text())
    if "refused" in found:
        raise ConfigError(found["refused"])
    return Measured(**found)


def _run(workload: Workload) -> Measured:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=workload.model,
        speculative_config=workload.speculative_config,
        max_num_seqs=workload.batch_size,
        disable_log_stats=False,
        **_engine_arguments(workload),
    )
    prompts = list(workload.prompts)
    speculating = workload.speculative_config is not None
    warm_up = SamplingParams(temperature=workload.temperature, max_tokens=16, ignore_eos=True)
    llm.generate([_WARM_UP] * workload.batch_size, warm_up, use_tqdm=False)
    metrics, worker = _counters(llm, speculating)
    sampling = SamplingParams(temperature=workload.temperature, max_tokens=workload.max_tokens)
    began = time.perf_counter()
    completions = [x.outputs[0] for x in llm.generate(prompts, sampling, use_tqdm=False)]
    seconds = time.perf_counter() - began
    metrics_after, worker_after = _counters(llm, speculating)
    return Measured(
        token_ids=[list(completion.token_ids) for completion in completions],
        texts=[completion.text for completion in completions],
        seconds=seconds,
        metrics=_since(metrics, metrics_after),
        worker=_since(worker, worker_after),
    )


def _engine_arguments(workload: Workload) -> dict[str, Any]:
    """vLLM's own defaults on a GPU; on a CPU, memory for this workload instead of most of the RAM.

    Float32 on CPUs: few of them are fast at 16 bits, and equal tokens should not hang on rounding.
    """
    from vllm.platforms import current_platform

    given: dict[str, Any] = {"use_tqdm_on_load": False, **workload.engine}
    if not current_platform.is_cpu():
        return given
    defaults = {"dtype": "float32", "enforce_eager": True}
    if not given.keys() & {"kv_cache_memory_bytes", "gpu_memory_utilization"}:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(
            workload.model, trust_remote_code=bool(given.get("trust_remote_code"))
        ).get_text_config()
        defaults["max_model_len"] = min(config.max_position_embeddings, _CPU_MAX_MODEL_LEN)
        tokens = given.get("max_model_len", defaults["max_model_len"]) + _CPU_BLOCK
        defaults["kv_cache_memory_bytes"] = (workload.batch_size + 1) * tokens * _kv_bytes(config)
    return {**defaults, **given}


def _kv_bytes(config: Any) -> int:
    """Bytes of keys and values of one token in float32."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * 4 * config.num_hidden_layers * heads * width)


def _counters(llm: Any, speculating: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    if not speculating:
        return {}, {}
    from vllm_hetero_spec.engine.stats import read_stats

    metrics = Counter[str]()
    for metric in llm.get_metrics():
        if metric.name.startswith(_METRICS) and hasattr(metric, "value"):
            metrics[metric.name.removeprefix(_METRICS)] += metric.value
    return dict(metrics), read_stats(llm)


def _since(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Growth of every counter, nested ones too."""
    return {
        name: _since(before.get(name, {}), value)
        if isinstance(value, dict)
        else value - before.get(name, 0)
        for name, value in after.items()
    }


def _causes(printed: str) -> str:
    """The distinct errors in an engine's output, the first of which caused the others."""
    found = dict.fromkeys(
        re.findall(r"(?:^|\] )(?:\w+\.)*(\w+(?:Error|Exception): .+)", printed, re.M)
    )
    return "".join(f"\n  {line}" for line in found) + "\n  (--verbose shows all that it prints)"


def _sentence(error: Exception) -> str:
    """What an error of vLLM's front end says, in one line."""
    details = getattr(error, "errors", None)  # pydantic lists what it refused
    text = details()[0]["msg"] if callable(details) else str(error)
    return " ".join(text.removeprefix("Value error, ").split())


def _main(asked: Path, answer: Path) -> None:
    try:
        found = asdict(_run(Workload(**json.loads(asked.read_text()))))
    except ConfigError as error:
        found = {"refused": str(error)}
    except (OSError, ValueError) as error:  # of vLLM's front end; engine failures are others
        found = {"refused": f"vLLM refuses this: {_sentence(error)}"}
    answer.write_text(json.dumps(found))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
