# SPDX-License-Identifier: Apache-2.0
"""What `measure_gpu.py` starts: engines by dtype, backend and memory, and how many at once."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import _gpu_graphs
import _shell
from _gpu_engine import GpuEngine, Setup

from vllm_hetero_spec.bench.load import MeasurementError
from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.inputs.model_folder import kv_bytes_per_token
from vllm_hetero_spec.inputs.prompts import load_prompts
from vllm_hetero_spec.options import DEFAULT_METHOD

MAX_MODEL_LEN = 1024
LOOKAHEAD = 5
FIXED = {"controller": "fixed"}  # options of ours
_BLOCK = 128  # tokens; the largest block of KV
_PROMPT_CHARACTERS = 300
_START, _RUN = 600.0, 240.0  # seconds; a first start compiles


@dataclass(frozen=True)
class Options:
    """What the user gave.

    Attributes:
        target: Folder of a small trained model.
        drafter: The same.
        prompts: JSON lines with a "prompt".
        backend: Attention backend in 16 bits; vLLM's own choice where empty.
        on_gpu: Whether there is one.
        verbose: Let engines write to stderr.
        traces: A folder for profiles; kept nowhere where empty.
    """

    target: Path
    drafter: Path
    prompts: Path
    backend: str
    on_gpu: bool
    verbose: bool
    traces: str = ""

    @property
    def at_once(self) -> int:
        """Engines that may be busy side by side where nothing is timed: one without a GPU."""
        return max(1, (os.cpu_count() or 1) // 2) if self.on_gpu else 1

    def texts(self, count: int) -> list[str]:
        """The first prompts, cut."""
        return [text[:_PROMPT_CHARACTERS] for text in load_prompts(self.prompts, count)]


class Setups:
    """Makes setups of one kind.

    Args:
        options: The user's.
        exact: In float32, so that tokens can be compared strictly; else as it would be served.
        batch: Most requests at once.
        target: In place of the user's.
        drafter: In place of the user's.
    """

    def __init__(
        self,
        options: Options,
        *,
        exact: bool,
        batch: int,
        target: Path | None = None,
        drafter: Path | None = None,
    ) -> None:
        self._options, self._batch = options, batch
        self._target, self._drafter = target or options.target, drafter or options.drafter
        self._bytes = 4 if exact or not options.on_gpu else 2
        self._backend = ""
        self._runner = "1" if options.on_gpu else "0"  # V2 needs Triton
        if options.on_gpu:  # FlashAttention has no float32
            self._backend = "TRITON_ATTN" if exact else options.backend

    @property
    def exact(self) -> bool:
        """Whether a token may differ for no reason at all."""
        return self._bytes == 4

    def alone(self, runner: str = "") -> Setup:
        """The target, on Model Runner V1 ("0") or V2 ("1"); vLLM's choice where empty."""
        return self._setup(None, runner)

    def ours(
        self,
        given: Mapping[str, Any],
        drafter: Path | None = None,
        runner: str = "",
        **engine: Any,
    ) -> Setup:
        """The target and a drafter, with options of ours, and of vLLM's engine."""
        model = drafter or self._drafter
        # Transformers reads a Qwen2's folder by the rules of Qwen2's tokenizer, whatever it says.
        tokenizer = {} if drafter else {"tokenizer": str(self._options.drafter)}
        return self._setup(
            {
                **tokenizer,
                "method": DEFAULT_METHOD,
                "model": str(model),
                "num_speculative_tokens": LOOKAHEAD,
                "kv_cache_memory_bytes": self._kv_bytes(model),
                **given,
            },
            runner,
            **engine,
        )

    def tli(self) -> Setup:
        """vLLM's own drafting across vocabularies."""
        backend = {"attention_backend": self._backend} if self._backend else {}
        return self._setup(
            {
                "method": "draft_model",
                "model": str(self._drafter),
                "num_speculative_tokens": LOOKAHEAD,
                "use_heterogeneous_vocab": True,
                **backend,
            },
            "0",
        )

    def _setup(self, speculation: dict[str, Any] | None, runner: str, **engine: Any) -> Setup:
        engine |= {
            "dtype": "float32" if self._bytes == 4 else "bfloat16",
            "load_format": _shell.FORMAT,
            "worker_extension_cls": "_shell_worker.ShellWorker",
            "max_model_len": MAX_MODEL_LEN,
            "kv_cache_memory_bytes": self._kv_bytes(self._target),
        }
        if self._options.on_gpu:
            engine |= {
                "gpu_memory_utilization": 0.05,  # only asked to be free: others are up as well
                "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
            }
        if self._backend:
            engine["attention_backend"] = self._backend
        return Setup(str(self._target), speculation, self._batch, engine, runner or self._runner)

    def _kv_bytes(self, model: Path) -> int:
        config = SimpleNamespace(**json.loads((model / "config.json").read_text()))
        tokens = (self._batch + 1) * (MAX_MODEL_LEN + _BLOCK)
        return tokens * kv_bytes_per_token(config, self._bytes)


def served(setup: Setup) -> Setup:
    """As users have it: compiled as vLLM does unasked, its core in a process of its own."""
    engine = {key: value for key, value in setup.engine.items() if key != "compilation_config"}
    return replace(setup, engine=engine, watched=False)


@contextmanager
def running(options: Options, setup: Setup) -> Iterator[GpuEngine]:
    """An engine that is up."""
    limits = {"start_timeout": _START, "run_timeout": _RUN}
    with GpuEngine(setup, verbose=options.verbose, **limits) as engine:
        yield engine


@contextmanager
def shells(options: Options) -> Iterator[tuple[Path, Path]]:
    """Folders of target and drafter in the shapes of real ones; small ones without a GPU."""
    target, drafter = ("llama-3.1-8b", "qwen2.5-0.5b") if options.on_gpu else ("small", "smaller")
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _shell.write_shell(options.target, _shell.SHAPES[target], folder / target)
        _shell.write_shell(options.drafter, _shell.SHAPES[drafter], folder / drafter)
        yield folder / target, folder / drafter


def modes(options: Options) -> dict[str, dict[str, Any]]:
    """Options of the drafter by mode, the fastest last; eager alone without a GPU."""
    return {
        mode: given
        for mode, given in _gpu_graphs.MODES.items()
        if options.on_gpu or mode == "eager"
    }


def tried(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the work returns, or why an engine could not do it."""
    try:
        return work()
    except (ConfigError, MeasurementError) as error:
        return {"error": str(error)}
