# SPDX-License-Identifier: Apache-2.0
"""The work behind the advice, step by step: tokenizers, then engines.

What is wrong with one drafter is noted in its findings, and the others go on. Models and engines
are loaded one after the other, so that each has the memory to itself.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_hetero_spec.advice.findings import Candidate, DrafterFindings
from vllm_hetero_spec.advice.measuring import (
    Alone,
    Plan,
    Start,
    fixed_config,
    measure_alone,
    measure_drafter,
)
from vllm_hetero_spec.advice.memory import local_folder, memory_of, missing_weights
from vllm_hetero_spec.advice.pairs import view_pair
from vllm_hetero_spec.bench.engines import on_gpu
from vllm_hetero_spec.config import ConfigError
from vllm_hetero_spec.errors import first_line
from vllm_hetero_spec.inputs.tokenizer_source import OpenTokenizer, open_tokenizer
from vllm_hetero_spec.measure.load import Engine, MeasurementError
from vllm_hetero_spec.measure.vllm_engine import EngineSpec

# Drafter tokens of a context for which its memory is told, unless it reads fewer.
_MEMORY_TOKENS = 2048


class Watcher(Protocol):
    """Is told how the work gets on."""

    def expect(self, loads: int) -> None:
        """So many loads are to be measured."""

    def say(self, words: str) -> None:
        """This is done now."""

    def advance(self) -> None:
        """A load is begun."""


@dataclass(frozen=True)
class Task:
    """What is asked for.

    Attributes:
        target: A Hugging Face name or a folder.
        plan: What engines are to generate.
        documents: The text that tokenizers are compared on.
        methods: To measure; empty for the one that the tokenizers say.
        speculative: Further keys of the speculative configuration.
        engine: Further arguments of `vllm.LLM`.
        trust_remote_code: Run code of the repositories.
    """

    target: str
    plan: Plan
    documents: Sequence[str]
    methods: Sequence[str]
    speculative: Mapping[str, Any]
    engine: Mapping[str, Any]
    trust_remote_code: bool


class Work:
    """Fills in what is found about drafters.

    Args:
        task: What is asked for.
        start: Starts an engine and waits until it is ready.
        watcher: Is told how it gets on.
    """

    def __init__(self, task: Task, start: Start, watcher: Watcher) -> None:
        self._task, self._start, self._watcher = task, start, watcher
        self._engine = ""

    def look(self, drafters: Sequence[DrafterFindings]) -> None:
        """Compare tokenizers, and tell the memory.

        Raises:
            ConfigError: The target's tokenizer cannot be bridged, or no drafter can be used.
        """
        self._watcher.say("comparing tokenizers")
        target = self._open(self._task.target, "target")
        for drafter in drafters:
            try:
                self._look(target, drafter)
            except ConfigError as error:
                drafter.stopped = str(error)
        if all(drafter.stopped for drafter in drafters):
            raise ConfigError(" ".join(drafter.stopped for drafter in drafters))

    def stop(self, drafters: Sequence[DrafterFindings], reason: str) -> None:
        """Leave it at that for all that have not stopped yet."""
        for drafter in drafters:
            drafter.stopped = drafter.stopped or f"not measured: {reason}."

    def find_weights(self, drafters: Sequence[DrafterFindings]) -> None:
        """Stop what would have to be downloaded first."""
        for drafter in drafters:
            for model in (self._task.target, drafter.model):
                if reason := missing_weights(model):
                    self.stop([drafter], reason)

    def measure(self, drafters: Sequence[DrafterFindings]) -> None:
        """The target alone, then each drafter; nothing where there is none.

        Raises:
            ConfigError: vLLM refuses the target.
            MeasurementError: The target alone fails.
        """
        if not drafters:
            return
        plan, methods = self._task.plan, self._task.methods
        self._watcher.expect(plan.count(max(1, len(methods)) * len(drafters)))
        with closing(self._started("the target alone", None)) as engine:
            alone = measure_alone(engine, plan, self._tell)
        for drafter in drafters:
            asked = [Candidate(method, "asked for") for method in methods]
            drafter.candidates = asked or [drafter.best_method(plan.temperatures)]
            for candidate in drafter.candidates:
                self._try(drafter, candidate, alone)

    def _look(self, target: OpenTokenizer, drafter: DrafterFindings) -> None:
        from transformers import AutoConfig

        opened = self._open(drafter.model, "drafter")
        try:
            config = AutoConfig.from_pretrained(
                drafter.model, trust_remote_code=self._task.trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the configuration of {drafter.name} cannot be read: {first_line(error)}."
            ) from error
        drafter.memory = memory_of(
            config,
            None if missing_weights(drafter.model) else local_folder(drafter.model),
            self._dtype(),
            self._task.plan.batch_sizes[-1],
            _MEMORY_TOKENS,
        )
        drafter.view = view_pair(target, opened, self._task.documents)

    def _open(self, name: str, role: str) -> OpenTokenizer:
        return open_tokenizer(name, role, trust_remote_code=self._task.trust_remote_code)

    def _dtype(self) -> str:
        """What vLLM runs a drafter in, by what the user and `VllmEngine` say."""
        given = self._task.speculative.get("dtype") or self._task.engine.get("dtype")
        return str(given or ("auto" if on_gpu() else "float32"))

    def _try(self, drafter: DrafterFindings, candidate: Candidate, alone: Alone) -> None:
        plan, method = self._task.plan, candidate.method
        config = {"method": method, "model": drafter.model, **self._task.speculative}
        try:
            engine = self._started(
                f"{drafter.name}, {method}", fixed_config(config, plan.lookahead)
            )
            with closing(engine):
                candidate.predictions = measure_drafter(engine, plan, alone, method, self._tell)
        except (ConfigError, MeasurementError) as error:
            candidate.failure = str(error)

    def _started(self, name: str, config: dict[str, Any] | None) -> Engine:
        self._engine = name
        self._watcher.say(f"starting {name}")
        trust = {"trust_remote_code": True} if self._task.trust_remote_code else {}
        return self._start(
            EngineSpec(
                self._task.target,
                config,
                self._task.plan.batch_sizes[-1],
                {**trust, **self._task.engine},
            )
        )

    def _tell(self, load: str) -> None:
        self._watcher.say(f"{self._engine}: {load}")
        self._watcher.advance()
