# SPDX-License-Identifier: Apache-2.0
"""What the drafter knows of each request: its text in drafter ids, and the KV written for it."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from vllm_hetero_spec.draft.penalties import TokenCounts
from vllm_hetero_spec.draft.sampling import DraftSampling
from vllm_hetero_spec.engine.drafter.kv_pool import BlockTable
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.seam.step_view import RequestView, StepView
from vllm_hetero_spec.text.bridge import Bridge, Context

# The last drafter tokens of a text may still merge with what follows, so that their KV would be
# given up again: not published for reuse. Longer than any word is in tokens.
UNSTABLE_TAIL = 32


class Pool(Protocol):
    """Where the drafter's KV of each request is accounted for: see `KVPool`.

    Attributes:
        block_size: Tokens per block.
    """

    block_size: int

    @property
    def capacity(self) -> int:
        """Blocks in all."""

    def open(self, ids: Sequence[int], salt: str | None) -> tuple[BlockTable, int]:
        """A table for a text, and its leading tokens whose KV is there already."""

    def rollback(self, table: BlockTable, num_tokens: int) -> int:
        """Keep the KV of the first `num_tokens` tokens, or of fewer: how many are kept."""

    def close(self, table: BlockTable) -> None:
        """Give all blocks back."""


@dataclass
class DraftSequence:
    """What the drafter holds of one request.

    Attributes:
        table: Its KV blocks.
        kv_ids: Drafter ids whose KV is written, context first, then drafted ones.
    """

    table: BlockTable
    kv_ids: list[int] = field(default_factory=list)


@dataclass
class RequestState:
    """One request.

    Attributes:
        req_id: vLLM's name for it.
        context: Its text in drafter ids.
        salt: Its cache_salt.
        num_prompt: Leading context ids that were its prompt when it was opened.
        num_media: Target ids of its prompt that are no text, and not in the context.
        sequence: Its KV; None before the first round and after its blocks were given back.
        num_kv_valid: Leading ids of `sequence.kv_ids` that equal `context.ids`.
        last_target: The last target id taken into the context.
        retired: Why this request is not drafted any more, "" while it is.
        wait: Steps to let pass before asking the full pool again.
        counts: How often its text has each drafter token, where it is penalised.
    """

    req_id: str
    context: Context
    salt: str | None = None
    num_prompt: int = 0
    num_media: int = 0
    sequence: DraftSequence | None = None
    num_kv_valid: int = 0
    last_target: int = -1
    retired: str = ""
    wait: int = 0
    counts: TokenCounts | None = None

    @property
    def num_uncached(self) -> int:
        """Context ids whose KV is not written yet."""
        return len(self.context.ids) - self.num_kv_valid

    @property
    def num_target(self) -> int:
        """Target ids taken in."""
        return self.context.num_target + self.num_media

    def new_tokens_of(self, request: RequestView) -> Sequence[int] | None:
        """Target ids to take in; None where vLLM has taken some back (resumed, or edited)."""
        known, ids = self.num_target, request.token_ids
        if known and (known > len(ids) or ids[known - 1] != self.last_target):
            return None
        return request.since(known)

    def close(self, pool: Pool) -> None:
        """Give the KV back."""
        if self.sequence is not None:
            pool.close(self.sequence.table)
        self.sequence = None
        self.num_kv_valid = 0

    def retire(self, reason: str, pool: Pool) -> None:
        """Draft no more for this request."""
        self.retired = reason
        self.close(pool)

    def align(self, pool: Pool, unchanged: int) -> None:
        """Keep of the written KV what the text so far agrees with; at least one id stays uncached.

        Args:
            pool: Where the KV lives.
            unchanged: Leading context ids that have not changed since the last call.
        """
        ids = self.context.ids
        if unchanged <= 1:  # leading ids were given up, perhaps
            self.counts = None
        if self.counts is not None:
            self.counts.update(ids, unchanged)
        if self.sequence is None:
            table, reused = pool.open(ids, self.salt)
            self.sequence = DraftSequence(table, ids[:reused])
            self.num_kv_valid = reused
            return
        written = self.sequence.kv_ids
        limit = min(len(written), len(ids) - 1)
        same = min(self.num_kv_valid, unchanged, limit)
        while same < limit and written[same] == ids[same]:
            same += 1
        self.num_kv_valid = pool.rollback(self.sequence.table, same)
        del written[self.num_kv_valid :]

    def count_tokens(self, vocab_size: int, device: torch.device) -> TokenCounts:
        """How often the text that is kept has each drafter token; counted, then kept up to date."""
        if self.counts is None:
            num_prompt = max(0, self.num_prompt - self.context.num_dropped)
            self.counts = TokenCounts(vocab_size, num_prompt, device)
            self.counts.update(self.context.ids, 0)
        return self.counts

    def draw_of(self, request: RequestView, *, races: bool) -> DraftSampling | None:
        """How the next draft is drawn; None where it has to be greedy.

        Greedy are requests at temperature 0, those under a grammar (which shortens drafts by what
        is in them), and drafts that begin inside a character, whose first bytes are given.

        Args:
            request: The request.
            races: Tokens are raced for.
        """
        params = request.params
        if not params.random or params.structured or self.context.held:
            return None
        return DraftSampling(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=params.noise_seed,
            place=request.num_output_tokens,
            races=races,
        )


class Requests:
    """The states of all live requests, kept in step with the target's.

    Args:
        bridge: Between the two tokenizers.
        pool: The drafter's KV blocks.
        stats: Where skipped requests are counted.
        longest: Drafter ids kept of a request's text at most.
    """

    def __init__(self, bridge: Bridge, pool: Pool, stats: DraftStats, longest: int) -> None:
        self._bridge = bridge
        self._pool = pool
        self._stats = stats
        self._longest = longest
        self._states: dict[str, RequestState] = {}
        self._salts: dict[str, str] = {}  # of live requests, told once: a state may be opened late

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._states

    def clear(self) -> None:
        """Forget every request; their KV must be void already."""
        self._states.clear()

    def forget(self, step: StepView) -> None:
        """Drop requests that are gone, or whose id a new request has taken.

        A step without tokens never reaches the proposer, so a step's list of finished requests
        alone would miss some.
        """
        known = self._states.keys()
        for req_id in (known - step.live) | (known & step.started.keys()):
            self._states.pop(req_id).close(self._pool)
        for req_id in self._salts.keys() - step.live:
            del self._salts[req_id]
        for req_id, salt in step.started.items():
            self._salts.pop(req_id, None)
            if salt is not None:
                self._salts[req_id] = salt

    def outside(self, step: StepView) -> Iterator[RequestState]:
        """States of requests that wait or are preempted, whose KV others may take."""
        for req_id in self._states.keys() - step.index_of.keys():
            if self._states[req_id].sequence is not None:
                yield self._states[req_id]

    def num_unread(self, step: StepView) -> list[int]:
        """Context tokens that the drafter has yet to read of each request, roughly."""
        unread = []
        for request in step.requests:
            state = self._states.get(request.req_id)
            if state is None:
                text = len(request.prompt_text) + request.num_output_tokens
                unread.append(text if text <= self._longest else self._longest // 2)
            else:
                news = len(request.token_ids) - state.num_target
                unread.append(news + state.num_uncached)
        return unread

    def read(self, step: StepView, wanted: Iterable[int]) -> list[tuple[int, RequestState]]:
        """Take in what the batch's requests have gained since the last call.

        Args:
            step: The step.
            wanted: Batch indices of the requests to read.

        Returns:
            The index of every one that can be drafted for, and its state, KV aligned.
        """
        known, news = [], []
        for index in wanted:
            request = step.requests[index]
            state = self._states.get(request.req_id)
            new = state.new_tokens_of(request) if state is not None and not state.retired else ()
            if state is None or new is None:
                state = self._open(request)
                new = request.since(state.num_target)
            if state.retired or state.wait:
                state.wait -= bool(state.wait)
                if request.new_tokens:
                    self._stats.skip(state.retired or "no_blocks")
                continue
            state.last_target = new[-1] if new else state.last_target
            news.append(new)
            known.append((index, state))
        ready = []
        kept = self._extend([state for _, state in known], news)
        for (index, state), unchanged in zip(known, kept, strict=True):
            if state.context.broken:
                state.retire("untranslatable", self._pool)
            if state.context.broken or not state.context.ids:
                if step.requests[index].new_tokens:
                    self._stats.skip("untranslatable")
                continue
            state.align(self._pool, unchanged)
            ready.append((index, state))
        return ready

    def _extend(self, states: Sequence[RequestState], news: Sequence[Sequence[int]]) -> list[int]:
        began = time.perf_counter()
        unchanged = self._bridge.extend([state.context for state in states], news)
        self._stats.translate_seconds += time.perf_counter() - began
        return unchanged

    def _open(self, request: RequestView) -> RequestState:
        """A new state that has read its prompt; an old one of the same id gives its KV back."""
        old = self._states.get(request.req_id)
        if old is not None:
            old.close(self._pool)
        context = self._bridge.open(self._longest)
        state = RequestState(request.req_id, context, self._salts.get(request.req_id))
        self._states[request.req_id] = state
        if not request.has_text:
            state.retired = "no_text"
            return state
        text = request.prompt_text
        self._extend([state], [text.tolist()])
        state.num_prompt = context.num_dropped + len(context.ids)
        state.num_media = request.num_prompt_tokens - len(text)
        self._stats.media_tokens += state.num_media
        state.last_target = int(request.token_ids[request.num_prompt_tokens - 1])
        return state
