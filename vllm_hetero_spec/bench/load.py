# SPDX-License-Identifier: Apache-2.0
"""What is measured and how its figures are defined: a load, and what an engine did with it.

Pure Python, so that vLLM, its peers and the reports mean the same by every figure. All times are
host seconds counted from the moment the load began.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

_WARM_UP_TOKENS = 16


class MeasurementError(RuntimeError):
    """An engine failed; the message names the errors it printed."""


@dataclass(frozen=True)
class Load:
    """What an engine is to generate.

    Attributes:
        prompts: Texts, each completed once.
        max_tokens: Longest completion, in target tokens.
        batch_size: Requests in flight; the next prompt starts when one ends.
        temperature: 0 is greedy.
        top_p: Nucleus of the target's distribution; 1 is all of it.
        seed: Of request i is `seed + i`; None leaves sampling unseeded.
        ignore_eos: Generate `max_tokens` whatever comes.
    """

    prompts: Sequence[str]
    max_tokens: int
    batch_size: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False

    @property
    def warm_up(self) -> "Load":
        """What is generated before: memory for such prompts is there then, and kernels are made."""
        tokens, prompts = min(self.max_tokens, _WARM_UP_TOKENS), self.prompts[: self.batch_size]
        return replace(self, prompts=prompts, max_tokens=tokens, ignore_eos=True, seed=None)


@dataclass(frozen=True)
class Trace:
    """One request as a client sees it.

    Attributes:
        token_ids: Generated target ids.
        text: The same as text.
        sent: When the request was sent.
        times: When output arrived, in order.
        counts: New tokens in each arrival; they add up to `len(token_ids)`.
    """

    token_ids: list[int]
    text: str
    sent: float
    times: list[float]
    counts: list[int]

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.times[0] - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first arrival; None where all came at once."""
        later = sum(self.counts[1:])
        return (self.times[-1] - self.times[0]) / later if later else None

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies as a reader feels them: the gaps between arrivals."""
        return [after - before for before, after in pairwise(self.times)]


@dataclass(frozen=True)
class Sample:
    """What an engine did with a load, its warm-up not counted.

    Attributes:
        traces: One per prompt, in the order of the prompts.
        seconds: From the first request to the last token; model loading is not in it.
        drafts: Drafts that the target verified; 0 without speculation.
        draft_tokens: Target tokens in them, never padding.
        accepted_tokens: Those the target accepted, bonus tokens not counted.
        accepted_per_position: Accepted tokens at draft position 0, 1, ...
        drafted_per_position: Draft tokens at position 0, 1, ...; empty where the engine does not
            count them.
        worker: Growth of the plugin's counters (`DraftStats`); empty for other engines.
        peak_memory_bytes: Of the engine's processes: on GPUs most bytes of tensors on the devices,
            for vLLM since it started; else the sum of each process's highest resident memory.
        runner: Which of vLLM's model runners ran the target, "V1" or "V2"; "" for other engines.
        dtype: What the target computed in, as "bfloat16"; "" where nobody says.
    """

    traces: list[Trace]
    seconds: float
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    drafted_per_position: list[int] = field(default_factory=list)
    worker: dict[str, Any] = field(default_factory=dict)
    peak_memory_bytes: int = 0
    runner: str = ""
    dtype: str = ""

    @property
    def tokens(self) -> int:
        """Generated tokens of all prompts."""
        return sum(len(trace.token_ids) for trace in self.traces)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all prompts per second of wall-clock time."""
        return self.tokens / self.seconds

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens per verification, 1 + accepted / drafts; None without drafts."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None
