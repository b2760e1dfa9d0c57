# SPDX-License-Identifier: Apache-2.0
"""What the drafter knows of each request: its text in drafter ids, and the KV written for it."""

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vllm_hetero_spec.engine.drafter.kv_pool import KVPool
from vllm_hetero_spec.engine.drafter.token_choice import DraftSequence
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.text.bridge import Bridge, Context


@dataclass
class RequestState:
    """One request.

    Attributes:
        context: Its text in drafter ids.
        salt: Its cache_salt.
        prompt_length: Leading context ids that are its prompt.
        sequence: Its KV; None before the first round and after its blocks were given back.
        agreed: Leading ids of `sequence.kv_ids` that equal `context.ids`.
        last_target: The last target id taken into the context.
        retired: Why this request is not drafted any more, "" while it is.
        wait: Steps to let pass before asking the full pool again.
        generator: Its own stream of draws, where it has a seed.
    """

    context: Context
    salt: str | None = None
    prompt_length: int = 0
    sequence: DraftSequence | None = None
    agreed: int = 0
    last_target: int = -1
    retired: str = ""
    wait: int = 0
    generator: torch.Generator | None = None

    @property
    def pending(self) -> int:
        """Context ids whose KV is not written yet."""
        return len(self.context.ids) - self.agreed

    def is_behind(self, tokens: Any, length: int) -> bool:
        """Whether vLLM has taken tokens back (a resumed or edited request)."""
        known = self.context.num_target
        if self.retired or not known:
            return False
        return known > length or tokens[known - 1] != self.last_target

    def close(self, pool: KVPool) -> None:
        """Give the KV back."""
        if self.sequence is not None:
            pool.close(self.sequence.table)
        self.sequence = None
        self.agreed = 0

    def retire(self, reason: str, pool: KVPool) -> None:
        """Draft no more for this request."""
        self.retired = reason
        self.close(pool)

    def align(self, pool: KVPool, unchanged: int) -> None:
        """Keep of the written KV what the text so far agrees with; at least one id stays pending.

        Args:
            pool: Where the KV lives.
            unchanged: Leading context ids that have not changed since the last call.
        """
        ids = self.context.ids
        if self.sequence is None:
            table, reused = pool.open(ids, self.salt)
            self.sequence = DraftSequence(table, ids[:reused])
            self.agreed = reused
            return
        written = self.sequence.kv_ids
        limit = min(len(written), len(ids) - 1)
        same = min(self.agreed, unchanged, limit)
        while same < limit and written[same] == ids[same]:
            same += 1
        self.agreed = pool.rollback(self.sequence.table, same)
        del written[self.agreed :]


class Requests:
    """The states of all live requests, kept in step with the model runner's batch.

    Args:
        bridge: Between the two tokenizers.
        pool: The drafter's KV blocks.
        stats: Where skipped requests are counted.
    """

    def __init__(self, bridge: Bridge, pool: KVPool, stats: DraftStats) -> None:
        self._bridge = bridge
        self._pool = pool
        self._stats = stats
        self._states: dict[str, RequestState] = {}

    def clear(self) -> None:
        """Forget every request; their KV must be void already."""
        self._states.clear()

    def forget(self, live: Any, new: dict[str, str | None]) -> None:
        """Drop requests that are gone, or whose id a new request has taken.

        Args:
            live: The model runner's requests by id.
            new: Ids new in this step with their cache_salt.

        A step without tokens never reaches the proposer, so the scheduler's list of finished
        requests alone would miss some.
        """
        gone = (self._states.keys() - live.keys()) | (self._states.keys() & new.keys())
        for req_id in gone:
            self._states.pop(req_id).close(self._pool)
        self._salts = new

    def outside(self, batch: Any) -> Iterator[RequestState]:
        """States of requests that wait or are preempted, whose KV others may take."""
        for req_id in self._states.keys() - batch.req_id_to_index.keys():
            if self._states[req_id].sequence is not None:
                yield self._states[req_id]

    def unread(self, batch: Any) -> list[int]:
        """Context tokens that the drafter has yet to read of each request, roughly."""
        found = []
        for index, req_id in enumerate(batch.req_ids):
            state = self._states.get(req_id)
            length = int(batch.num_tokens_no_spec[index])
            known = state.context.num_target if state is not None else 0
            found.append(length - known + (state.pending if state is not None else 0))
        return found

    def read(
        self, batch: Any, sampled: list[list[int]], wanted: Collection[int] | None = None
    ) -> list[tuple[int, RequestState]]:
        """Take in what the batch's requests have gained since the last call.

        Args:
            batch: The model runner's input batch.
            sampled: Target ids each request sampled in this step, empty while it is prefilling.
            wanted: Batch indices of the requests to read; all where None.

        Returns:
            Batch index and state of every request that can be drafted for, KV aligned.
        """
        found, news = [], []
        for index, req_id in enumerate(batch.req_ids):
            if wanted is not None and index not in wanted:
                continue
            length = int(batch.num_tokens_no_spec[index])
            tokens = batch.token_ids_cpu[index]
            state = self._states.get(req_id)
            if state is None or state.is_behind(tokens, length):
                state = self._states[req_id] = self._open(req_id, batch, index)
            if state.retired or state.wait:
                state.wait -= bool(state.wait)
                if sampled[index]:
                    self._stats.skip(state.retired or "no_blocks")
                continue
            news.append(tokens[state.context.num_target : length].tolist())
            state.last_target = int(tokens[length - 1])
            found.append((index, state))
        began = time.perf_counter()
        unchanged = self._bridge.extend([state.context for _, state in found], news)
        self._stats.translate_seconds += time.perf_counter() - began
        ready = []
        for (index, state), prefix in zip(found, unchanged, strict=True):
            if state.context.broken:
                state.retire("untranslatable", self._pool)
            if state.context.broken or not state.context.ids:
                if sampled[index]:
                    self._stats.skip("untranslatable")
                continue
            state.align(self._pool, prefix)
            ready.append((index, state))
        return ready

    def _open(self, req_id: str, batch: Any, index: int) -> RequestState:
        """A new state that has read its prompt; an old one of the same id gives its KV back."""
        old = self._states.get(req_id)
        if old is not None:
            old.close(self._pool)
        state = RequestState(self._bridge.open(), old.salt if old else self._salts.get(req_id))
        prompt = int(batch.num_prompt_tokens[index])
        if not batch.is_token_ids[index, : int(batch.num_tokens_no_spec[index])].all():
            state.retired = "no_text"
            return state
        ids = batch.token_ids_cpu[index, :prompt]
        self._bridge.extend([state.context], [ids.tolist()])
        state.prompt_length = len(state.context.ids)
        state.last_target = int(ids[-1])
        return state
