# SPDX-License-Identifier: Apache-2.0
"""An engine whose steps cost what is written here and whose drafter is right where it is told.

It keeps requests in flight as a real one does, so that what the command foresees of a lookahead can
be compared with what this engine does when it is asked for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_hetero_spec.measure.load import Load, Sample, Trace
from vllm_hetero_spec.measure.vllm_engine import EngineSpec

PROMPTS = ("one", "two", "three", "four")
# In which places of each completion the drafter is right; never four times in a row.
RIGHT = ("1101110", "0101011", "1110110", "0001101")


@dataclass(frozen=True)
class World:
    """What everything costs, in seconds, and what comes of drafts.

    Attributes:
        right: Of each prompt, "1" where a drafted token is right; from the start again at its end.
        plain, per_row: A step of the target, of no request and of each row more.
        drafter_step, beside: A forward of the drafter, and the rest of a round of drafting.
        steps_per_token: Forwards of a target token, one more for the round.
        read, read_drafter: Prompts, of the target and of the drafter.
        drafted: Whether anything is.
    """

    right: Sequence[str] = RIGHT
    plain: float = 1.0
    per_row: float = 0.125
    drafter_step: float = 0.0625
    beside: float = 0.03125
    steps_per_token: float = 1.5
    read: float = 2.0
    read_drafter: float = 0.25
    drafted: bool = True

    def steps(self, lookahead: int) -> float:
        return 1 + self.steps_per_token * lookahead

    def target(self, requests: int, lookahead: int) -> float:
        return (self.plain + self.per_row * requests * (1 + lookahead)) if requests else 0.0

    def drafting(self, lookahead: int) -> float:
        return self.beside + self.drafter_step * self.steps(lookahead) if lookahead else 0.0

    def is_right(self, prompt: str, place: int) -> bool:
        pattern = self.right[PROMPTS.index(prompt) % len(self.right)]
        return self.drafted and pattern[(place - 1) % len(pattern)] == "1"


@dataclass
class _Running:
    prompt: str
    sent: float
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


@dataclass
class FakeEngine:
    """One engine of a world.

    Attributes:
        world: It.
        spec: How it was started.
        fail: Raised by every load.
        loads: Those that were run.
    """

    world: World
    spec: EngineSpec
    fail: BaseException | None = None
    loads: list[Load] = field(default_factory=list)
    closed: bool = False

    @property
    def lookahead(self) -> int:
        config = self.spec.speculative_config
        return 0 if config is None else int(config["num_speculative_tokens"])

    def close(self) -> None:
        self.closed = True

    def run(self, load: Load) -> Sample:
        assert not self.closed
        assert load.batch_size <= self.spec.max_batch_size
        if self.fail is not None:
            raise self.fail
        self.loads.append(load)
        world, k = self.world, self.lookahead if load.max_tokens > 1 else 0
        waiting, active, done = list(load.prompts), [], []
        now = propose = forward = 0.0
        drafts = rounds = 0
        while waiting or active:
            new = [
                _Running(waiting.pop(0), now)
                for _ in range(min(load.batch_size - len(active), len(waiting)))
            ]
            catching_up = len(new) * world.read_drafter if self.lookahead else 0.0
            began = now
            now += len(new) * world.read + catching_up
            now += world.target(len(active), k) + world.drafting(k)
            assert now > began
            rounds += 1
            propose += catching_up + world.drafting(k)
            forward += catching_up + (world.drafter_step * world.steps(k) if k else 0.0)
            for one in active:
                have = sum(one.counts)
                room = min(k, load.max_tokens - have - 1)
                accepted = 0
                while accepted < room and world.is_right(one.prompt, have + accepted):
                    accepted += 1
                drafts += k > 0 and world.drafted
                one.counts.append(accepted + 1)
                one.times.append(now)
            for one in new:
                one.counts.append(1)
                one.times.append(now)
            active += new
            done += [one for one in active if sum(one.counts) >= load.max_tokens]
            active = [one for one in active if sum(one.counts) < load.max_tokens]
        done.sort(key=lambda one: load.prompts.index(one.prompt))
        traces = [
            Trace([7] * sum(one.counts), one.prompt, one.sent, one.times, one.counts)
            for one in done
        ]
        return Sample(traces, now, **self._counters(k, drafts, propose, forward))

    def _counters(self, k: int, drafts: int, propose: float, forward: float) -> dict[str, Any]:
        if self.spec.speculative_config is None:
            return {}
        worker = {
            "propose_seconds": propose,
            "forward_seconds": forward,
            "drafter_tokens": drafts * self.world.steps(k),
            "skipped": {} if self.world.drafted else {"untranslatable": 3, "no_text": 0},
        }
        return {"drafts": drafts, "worker": worker}


def engine(world: World, lookahead: int = 0, **options: Any) -> FakeEngine:
    """An engine that drafts so far; 0 is the target alone."""
    config = {"method": "slem", "model": "small", "num_speculative_tokens": lookahead}
    return FakeEngine(world, EngineSpec("big", config if lookahead else None, 8), **options)
