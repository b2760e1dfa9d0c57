# SPDX-License-Identifier: Apache-2.0
"""The drafter's state of each request: its context in drafter ids, and the KV written for it."""

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol

import torch
from typing_extensions import TypeVar

from vllm_hetero_spec.draft.penalties import TokenCounts
from vllm_hetero_spec.draft.sampling import DraftSampling
from vllm_hetero_spec.engine.drafter.kv_pool import BlockTable
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.seam.step_view import RequestView, StepView
from vllm_hetero_spec.text.bridge import Bridge, Context

# tokens; longer than any word. The last drafter tokens of a context may merge with later text, so
# their KV is not published for reuse.
UNSTABLE_TAIL = 32
NEVER = 1 << 30  # unread tokens of a request that is not drafted any more

# What a pool keeps of a sequence: its KV blocks, unless another process manages them.
Table = TypeVar("Table", default=BlockTable)


class Pool(Protocol[Table]):
    """Accounts for the drafter's KV; the part of `KVPool` that requests use."""

    block_size: int

    @property
    def capacity(self) -> int:
        """Number of blocks in total."""

    def open(self, ids: Sequence[int], salt: str | None) -> tuple[Table, int]:
        """Create a table; also return its number of leading tokens whose KV exists."""

    def rollback(self, table: Table, num_tokens: int) -> int:
        """Keep the KV of at most the first `num_tokens` tokens; return the kept number."""

    def close(self, table: Table) -> None:
        """Release all blocks."""


@dataclass
class DraftSequence(Generic[Table]):
    """The drafter's KV of one request: blocks, and the ids written (context, then draft tokens)."""

    table: Table
    kv_ids: list[int] = field(default_factory=list)


@dataclass
class RequestState(Generic[Table]):
    """One request, from its first step to its end.

    Attributes:
        context: The request's tokens in drafter ids.
        num_prompt: Number of leading context ids that belonged to the prompt when it was opened.
        num_media: Prompt ids of the target that are not text, and not in the context.
        sequence: Its KV; None before the first round and after its blocks were released.
        num_kv_valid: Number of leading ids of `sequence.kv_ids` that equal `context.ids`.
        last_target: Last target id that was appended to the context.
        retired: Reason why the request is not drafted any more; "" while it is drafted.
        wait: Number of steps to skip before the next try to allocate KV blocks.
        counts: Counts of drafter tokens in the context; None without penalties.
    """

    req_id: str
    context: Context
    salt: str | None = None
    num_prompt: int = 0
    num_media: int = 0
    sequence: DraftSequence[Table] | None = None
    num_kv_valid: int = 0
    last_target: int = -1
    retired: str = ""
    wait: int = 0
    counts: TokenCounts | None = None

    @property
    def num_uncached(self) -> int:
        """Number of context ids without KV."""
        return len(self.context.ids) - self.num_kv_valid

    @property
    def num_target(self) -> int:
        """Number of target ids read, media included."""
        return self.context.num_target + self.num_media

    def new_tokens_of(self, request: RequestView) -> Sequence[int] | None:
        """Return the new target ids; None if vLLM has removed or changed earlier ones."""
        known, ids = self.num_target, request.token_ids
        if known and (known > len(ids) or ids[known - 1] != self.last_target):
            return None
        return request.since(known)

    def close(self, pool: Pool[Table]) -> None:
        """Release the KV."""
        if self.sequence is not None:
            pool.close(self.sequence.table)
        self.sequence = None
        self.num_kv_valid = 0

    def retire(self, reason: str, pool: Pool[Table]) -> None:
        """Stop drafting for this request."""
        self.retired = reason
        self.close(pool)

    def align(self, pool: Pool[Table], unchanged: int) -> None:
        """Keep the written KV that agrees with the context. At least one id stays without KV.

        The first `unchanged` context ids have not changed since the last call.
        """
        ids = self.context.ids
        if unchanged <= 1:  # leading ids may have been dropped
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
        """Return the counts of drafter tokens in the kept context. `align` updates them."""
        if self.counts is None:
            num_prompt = max(0, self.num_prompt - self.context.num_dropped)
            self.counts = TokenCounts(vocab_size, num_prompt, device)
            self.counts.update(self.context.ids, 0)
        return self.counts

    def draw_of(self, request: RequestView, *, races: bool) -> DraftSampling | None:
        """Return how the next draft is sampled; None for a greedy draft.

        A draft is greedy at temperature 0. It is also greedy under structured output, because the
        grammar would shorten it depending on its tokens. A draft that begins with held bytes of the
        context is greedy too, because its first bytes are given.
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
    """The states of all live requests. A request keeps at most `longest` drafter ids."""

    def __init__(self, bridge: Bridge, pool: Pool[Any], stats: DraftStats, longest: int) -> None:
        self._bridge = bridge
        self._pool = pool
        self._stats = stats
        self._longest = longest
        self._states: dict[str, RequestState] = {}
        self._salts: dict[str, str] = {}  # live requests; vLLM sends a salt once

    def __len__(self) -> int:
        return len(self._states)

    def clear(self) -> None:
        """Forget all requests. Their KV must be invalid already."""
        self._states.clear()

    def forget(self, step: StepView) -> None:
        """Drop requests that have ended, or whose id belongs to a new request.

        A step without tokens does not reach the proposer. A list of the requests that finished in
        this step would therefore be incomplete. Ranks free blocks in the same order; that of a set
        of names differs between processes.
        """
        for req_id in [r for r in self._states if r not in step.live or r in step.started]:
            self._states.pop(req_id).close(self._pool)
        for req_id in self._salts.keys() - step.live:
            del self._salts[req_id]
        for req_id, salt in step.started.items():
            self._salts.pop(req_id, None)
            if salt is not None:
                self._salts[req_id] = salt

    def outside(self, step: StepView) -> Iterator[RequestState]:
        """Yield states with KV whose requests are not in the batch: waiting or preempted."""
        for req_id, state in list(self._states.items()):
            if req_id not in step.index_of and state.sequence is not None:
                yield state

    def skip_retired(self, step: StepView, copied: Collection[int]) -> int:
        """Count the requests that are not drafted any more, by reason. Return their number.

        Those at the batch indices `copied` have a draft that is not the drafter's.
        """
        found = 0
        for index, (request, goes_on) in enumerate(zip(step.requests, step.going_on, strict=True)):
            state = self._states.get(request.req_id)
            if goes_on and state is not None and state.retired and index not in copied:
                self._stats.skip(state.retired)
                found += 1
        return found

    def num_unread(self, step: StepView) -> list[int]:
        """Estimate for each request the number of context tokens that the drafter has not read.

        It is `NEVER` for a retired request.
        """
        unread = []
        for request in step.requests:
            state = self._states.get(request.req_id)
            if state is None:
                text = len(request.prompt_text) + request.num_output_tokens
                unread.append(text if text <= self._longest else self._longest // 2)
            elif state.retired:
                unread.append(NEVER)
            else:
                news = len(request.token_ids) - state.num_target
                unread.append(news + state.num_uncached)
        return unread

    def read(self, step: StepView, wanted: Iterable[int]) -> list[tuple[int, RequestState]]:
        """Append the new target tokens of the requests at batch indices `wanted`.

        Return (batch index, state) of every request that can be drafted, with aligned KV.
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
        """Create a state that has read the prompt. An older state of the same id is closed."""
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
