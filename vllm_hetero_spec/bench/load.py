# SPDX-License-Identifier: Apache-2.0
"""A load, the sample that an engine returns for it, and the definition of each figure.

All times are host seconds since the start of the load.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

_WARM_UP_TOKENS = 16


class MeasurementError(RuntimeError):
    """An engine failed; the message contains the errors that it printed."""


@dataclass(frozen=True)
class Load:
    """Prompts, each of which an engine completes once."""

    prompts: Sequence[str]
    max_tokens: int  # target tokens per completion
    batch_size: int = 1  # requests in flight; the next prompt starts when one ends
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None  # request i has `seed + i`; None: unseeded
    ignore_eos: bool = False

    @property
    def kind(self) -> tuple[tuple[str, ...], int, bool]:
        """Equal for loads that share a warm-up."""
        return tuple(self.prompts), self.batch_size, self.temperature > 0

    @property
    def warm_up(self) -> "Load":
        """The load that allocates memory and compiles kernels before this one is measured."""
        tokens, prompts = min(self.max_tokens, _WARM_UP_TOKENS), self.prompts[: self.batch_size]
        return replace(self, prompts=prompts, max_tokens=tokens, ignore_eos=True, seed=None)


@dataclass
class Trace:
    """Arrivals of one request's tokens at the client."""

    token_ids: list[int]  # generated target ids
    text: str
    sent: float  # seconds
    times: list[float]  # seconds, of each arrival of output
    counts: list[int]  # new tokens of each arrival

    def arrived(self, token_ids: Sequence[int], now: float) -> None:
        self.token_ids.extend(token_ids)
        self.times.append(now)
        self.counts.append(len(token_ids))

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.times[0] - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first arrival; None if there was one arrival."""
        later = sum(self.counts[1:])
        return (self.times[-1] - self.times[0]) / later if later else None

    @property
    def itl(self) -> list[float]:
        """Gaps between arrivals (inter-token latencies)."""
        return [after - before for before, after in pairwise(self.times)]


@dataclass(frozen=True)
class Sample:
    """Result of a load, without the warm-up.

    Peak memory on GPUs is the most bytes of tensors on the devices, for vLLM since its start. On
    CPUs it is the sum of the highest resident memory of each process of the engine.
    """

    traces: list[Trace]  # one per prompt, in their order
    seconds: float  # from the first request to the last token
    drafts: int = 0  # verified drafts
    draft_tokens: int = 0  # target tokens in these drafts, without padding
    accepted_tokens: int = 0  # without bonus tokens
    accepted_per_position: list[int] = field(default_factory=list)
    worker: dict[str, Any] = field(default_factory=dict)  # growth of the plugin's counters
    peak_memory_bytes: int = 0
    runner: str = ""  # vLLM's model runner, "V1" or "V2"
    dtype: str = ""  # dtype of the target, for example "bfloat16"

    @property
    def tokens(self) -> int:
        return sum(len(trace.token_ids) for trace in self.traces)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verification, 1 + accepted / drafts; None without drafts."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None
