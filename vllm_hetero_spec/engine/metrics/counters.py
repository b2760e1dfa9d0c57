# SPDX-License-Identifier: Apache-2.0
"""What speculation did, counted in the worker, and how a front end reads it."""

import logging
from collections import Counter
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from vllm_hetero_spec.lookahead.controllers import Gauges

logger = logging.getLogger("vllm.hetero_spec")

RPC = "hetero_spec_stats"

# Why a request went undrafted in a step, and what a user can do about it.
REASONS = {
    "no_blocks": "the drafter's KV pool is full; raise kv_cache_memory_bytes",
    "drafter_length": "the context is longer than the drafter's max_model_len",
    "catching_up": "the drafter is still reading a long prompt",
    "drafter_error": "the drafter raised an exception",
    "backing_off": "the drafter failed before and rests for a while",
    "nan_logits": "the drafter's logits were not finite",
    "untranslatable": "the text cannot be spelt in the drafter's vocabulary",
    "no_text": "the request has no token ids (prompt embeddings)",
    "nothing_proposed": "the drafted text gave no whole target token",
    "not_worth_it": "the target alone is faster at present; see the option controller",
}
# Expected now and then in normal operation: counted, but not worth a warning.
_FADE = 0.3  # weight of the newest steps in `off_fraction`
_QUIET = frozenset({"catching_up", "nothing_proposed", "not_worth_it"})


@dataclass
class DraftStats:
    """Counters of one worker since it started. Times are host seconds.

    Attributes:
        steps: Calls of the proposer.
        off_steps: Those in which the controller left every request undrafted.
        drafts: Drafts handed to the target.
        draft_tokens: Target tokens in those drafts.
        drafter_tokens: Tokens the drafter generated for them.
        catch_up_tokens: Context tokens the drafter read.
        reused_tokens: Context tokens whose KV another request had left.
        skipped: Requests left undrafted in a step, by reason (`REASONS`).
        lengths: Drafts by their length in target tokens.
        translate_seconds: Both directions of translation.
        forward_seconds: In the drafter's forwards, picking tokens included.
        propose_seconds: The whole proposer, translation and forwards included.
        verify_seconds: The rejection sampler.
        fuzzy_tokens: Emitted tokens that only the fuzzy rule accepted.
        fuzzy_variation: Sum of total variations at the places where the fuzzy rule applied.
        kv_blocks: Blocks of the drafter's KV pool; `kv_blocks_held` of them are in use now.
        lookahead: Target tokens the controller drafts at present, 0 while the target is alone.
        off_fraction: Share of `off_steps` among recent steps.
        gain: Tokens per second it foresees, over those of the target alone.
        tokens_per_second: What it achieves.
        drafter_step_seconds, target_step_seconds: Its estimates for the present batch.
        acceptance: By position, the rate at which tokens whose predecessors were accepted are.
    """

    steps: int = 0
    off_steps: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    drafter_tokens: int = 0
    catch_up_tokens: int = 0
    reused_tokens: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    translate_seconds: float = 0.0
    forward_seconds: float = 0.0
    propose_seconds: float = 0.0
    verify_seconds: float = 0.0
    fuzzy_tokens: int = 0
    fuzzy_variation: float = 0.0
    kv_blocks: int = 0
    kv_blocks_held: int = 0
    lookahead: int = 0
    off_fraction: float = 0.0
    gain: float = 0.0
    tokens_per_second: float = 0.0
    drafter_step_seconds: float = 0.0
    target_step_seconds: float = 0.0
    acceptance: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._shown = 0, 0  # steps and off_steps when the gauges were last set

    def skip(self, reason: str, detail: str = "", times: int = 1) -> None:
        """Count undrafted requests; the first of each reason is logged once."""
        if times <= 0:
            return
        if not self.skipped[reason] and reason not in _QUIET:
            logger.warning(
                "Not speculating for some requests (%s): %s%s. They complete as without a drafter; "
                "further cases are only counted.",
                reason,
                REASONS[reason],
                f": {detail}" if detail else "",
            )
        self.skipped[reason] += times

    def drafted(self, length: int) -> None:
        """Count one draft of `length` target tokens; nothing where it is empty."""
        if length:
            self.drafts += 1
            self.draft_tokens += length
            self.lengths[length] += 1

    def show(self, gauges: Gauges) -> None:
        """Take over what the controller thinks at present."""
        steps, off = self.steps - self._shown[0], self.off_steps - self._shown[1]
        if steps > 0:
            self.off_fraction += _FADE * (off / steps - self.off_fraction)
        self._shown = self.steps, self.off_steps
        self.lookahead = gauges.lookahead
        self.gain, self.tokens_per_second = gauges.gain, gauges.tokens_per_second
        self.drafter_step_seconds = gauges.drafter_seconds
        self.target_step_seconds = gauges.target_seconds
        self.acceptance = {j: float(rate) for j, rate in enumerate(gauges.acceptance)}

    def as_dict(self) -> dict[str, Any]:
        """The numbers, and `skipped` as a plain dictionary."""
        numbers = {name: getattr(self, name) for name in (*_COUNTED, *_HELD)}
        return numbers | {"skipped": dict(self.skipped)}


# What goes up and down.
_HELD: dict[str, type] = {
    "kv_blocks": int,
    "kv_blocks_held": int,
    "lookahead": int,
    "off_fraction": float,
    "gain": float,
    "tokens_per_second": float,
    "drafter_step_seconds": float,
    "target_step_seconds": float,
}
_COUNTED = {
    f.name: f.type for f in fields(DraftStats) if f.type in (int, float) and f.name not in _HELD
}
_read = attrgetter(*_COUNTED)


class Growth:
    """What was counted since the last time: all that a step tells the front end.

    Counters that were set back in between count from zero again, as Prometheus reads them.
    """

    def __init__(self) -> None:
        self._numbers: tuple[Any, ...] = _read(DraftStats())
        self._skipped: dict[str, int] = {}
        self._lengths: dict[int, int] = {}
        self._acceptance: dict[int, float] = {}
        self._held: dict[str, Any] = {}

    def take(self, stats: DraftStats) -> dict[str, Any]:
        """The fields that grew, `skipped` and `lengths` among them, and gauges that moved.

        Plain numbers in plain dictionaries, which vLLM's serializer takes.
        """
        numbers = _read(stats)
        grown: dict[str, Any] = {
            name: kind(now - last if now >= last else now)
            for (name, kind), now, last in zip(
                _COUNTED.items(), numbers, self._numbers, strict=True
            )
            if now != last
        }
        self._numbers = numbers
        held = {name: kind(getattr(stats, name)) for name, kind in _HELD.items()}
        grown |= {name: now for name, now in held.items() if self._held.get(name) != now}
        self._held = held
        if stats.skipped != self._skipped:
            grown["skipped"] = _grown(stats.skipped, self._skipped)
            self._skipped = dict(stats.skipped)
        if stats.lengths != self._lengths:
            grown["lengths"] = _grown(stats.lengths, self._lengths)
            self._lengths = dict(stats.lengths)
        if stats.acceptance != self._acceptance:
            grown["acceptance"] = self._acceptance = stats.acceptance
        return grown


def _grown(now: dict[Any, int], last: dict[Any, int]) -> dict[Any, int]:
    before = {key: last.get(key, 0) for key in now}
    return {
        key: count - before[key] if count >= before[key] else count
        for key, count in now.items()
        if count != before[key]
    }


def read_stats(llm: Any) -> dict[str, Any]:
    """The counters of an engine's workers, summed.

    Args:
        llm: A `vllm.LLM` (or anything with its `collective_rpc`) running one of our methods.

    Returns:
        The fields of `DraftStats`; `skipped` as a plain dictionary.
    """
    total = Counter[str]()
    skipped = Counter[str]()
    for worker in llm.collective_rpc(RPC):
        skipped.update(worker.pop("skipped"))
        total.update(worker)
    return {**total, "skipped": dict(skipped)}
