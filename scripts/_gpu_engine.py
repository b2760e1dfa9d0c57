# SPDX-License-Identifier: Apache-2.0
"""An engine of `measure_gpu.py` in a process of its own, and what it can be asked."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_hetero_spec.bench.child_process import EngineProcess
from vllm_hetero_spec.bench.load import Load, Sample
from vllm_hetero_spec.bench.vllm_engine import EngineSpec

_FAULTS = ("drafter_error", "backing_off", "nan_logits")


@dataclass(frozen=True)
class Setup(EngineSpec):
    """What to start.

    Attributes:
        runner: vLLM's model runner, "1" for V2 and "0" for V1.
        watched: Engine core and worker are in the driver's process, where they can be reached;
            otherwise they are in their own, as users have them, and can only be given tasks.
    """

    runner: str = "0"
    watched: bool = True


@dataclass(frozen=True)
class Continuation:
    """What the target alone says after a prompt.

    Attributes:
        token_ids: Greedy.
        gaps: Of each, by how much its logit was above that of the second best.
    """

    token_ids: list[int]
    gaps: list[float]


@dataclass(frozen=True)
class Record:
    """Asks for the `Continuation` of each prompt, one after the other."""

    prompts: Sequence[str]
    max_tokens: int


@dataclass(frozen=True)
class Lesson:
    """An imposed acceptance: what the drafter really drafted is replaced by ids known beforehand.

    Attributes:
        texts: What the target will say after each prompt, and a lookahead more.
        rate: How often the token of a place is the right one, whatever stands before it; else it is
            one that the target does not say.
    """

    texts: Sequence[Sequence[int]]
    rate: float


@dataclass(frozen=True)
class Task(Load):
    """A load, and how it is to be drafted.

    Attributes:
        lookahead: Always so far; None leaves it to the engine's own controller.
        lesson: Imposes acceptance; None leaves the drafter's drafts.
        watched: Note the drafts, and where the host waits for a GPU while they are made.
    """

    lookahead: int | None = None
    lesson: Lesson | None = None
    watched: bool = False


@dataclass(frozen=True)
class Outcome(Sample):
    """What became of a `Task`.

    Attributes:
        made: Where watched, the drafts of each prompt in their order.
        waits: Where watched, how often the host waited at which line; None without a GPU.
        taught: Drafts that were replaced.
    """

    made: list[list[list[int]]] = field(default_factory=list)
    waits: dict[str, int] | None = None
    taught: int = 0

    @property
    def failures(self) -> int:
        """Requests that went undrafted for a step because the drafter failed."""
        skipped = self.worker.get("skipped", {})
        return sum(skipped.get(reason, 0) for reason in _FAULTS)

    @property
    def rounds(self) -> int:
        """Steps of the target; where nothing is drafted, those of the longest request."""
        counted: int = self.worker.get("steps") or max(len(trace.times) for trace in self.traces)
        return counted

    def same_as(self, others: Sequence[Sequence[int]]) -> int:
        """How many of the texts are those of others, which may be longer."""
        pairs = zip(self.traces, others, strict=True)
        return sum(trace.token_ids == list(ids[: len(trace.token_ids)]) for trace, ids in pairs)

    def figures(self) -> dict[str, Any]:
        """What was counted, and the milliseconds of a step."""
        found: dict[str, Any] = {"tokens": self.tokens, "seconds": round(self.seconds, 3)}
        if not self.worker:
            return {**found, "acceptance_length": self.acceptance_length}
        steps = max(1, self.worker["steps"])
        took = {name: self.worker[f"{name}_seconds"] for name in ("forward", "propose", "verify")}
        return {
            **found,
            "drafts": self.drafts,
            "drafted": self.draft_tokens,
            "accepted": self.accepted_tokens,
            "acceptance_length": self.acceptance_length,
            "skipped": self.worker["skipped"],
            "graph_forwards": self.worker["graph_forwards"],
            "steps": self.worker["steps"],
            "step_ms": {
                "whole": round(1e3 * self.seconds / steps, 3),
                **{name: round(1e3 * took[name] / steps, 3) for name in took},
            },
        }


@dataclass(frozen=True)
class StepTimes:
    """Asks what the drafter's forwards take, as dictionaries of milliseconds.

    Attributes:
        batches: Requests of a step of one token each.
        widths: Context tokens of one request, read in one forward.
    """

    batches: Sequence[int]
    widths: Sequence[int]


@dataclass(frozen=True)
class Profile:
    """Asks for profiles of a task: of the device by torch.profiler, of the host by cProfile.

    Attributes:
        task: The task.
        kept: Where the trace is written (Chrome's format, gzipped) and the host's profile; nowhere
            where empty.
    """

    task: Task
    kept: str = ""


class Facts:
    """Asks what was started."""


class GpuEngine(EngineProcess):
    """vLLM for a `Setup`, engine core and worker in the child itself, where they can be watched."""

    program = "_gpu_driver"

    def ask(self, question: Any) -> Any:
        """The answer to one of the questions above; an `Outcome` to a `Task`.

        Raises:
            ConfigError: The engine refused it; it stays up.
            MeasurementError: The engine failed or took too long, and is closed now.
        """
        return self._ask(question, self._run_timeout)
