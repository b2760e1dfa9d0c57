# SPDX-License-Identifier: Apache-2.0
"""Look-ups of drafts that were made ahead, all of them hits: what they take, and their translation.

A table is filled as a drafter's process fills it: behind each text there is a chain and eight lines
beside it, of the text that follows and of others. Every request then writes a few tokens of the
text, and its next draft is found in the chain, or in a line beside it, one as often as the other.
"""

import os
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from vllm_hetero_spec.engine.drafter.request_state import RequestState
from vllm_hetero_spec.engine.drafter.tasks import DraftTask
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.seam.tokenizers import Pair
from vllm_hetero_spec.engine.source.look_up import LookUp, text_of
from vllm_hetero_spec.engine.source.sent_texts import SentTexts
from vllm_hetero_spec.engine.source.table import Drafted, DraftTable, make_file
from vllm_hetero_spec.text.bridge import make_bridge
from vllm_hetero_spec.text.tokenizer import TextTokenizer

DRAFT, SIDES, LONGEST = 4, 8, 40
_SERIAL = 1


class LookUps:
    """Requests that are written, and looked up, together.

    Args:
        target: Its tokenizer.
        drafter: Its tokenizer.
        texts: Target ids of each request; the first `known` of them are its prompt.
        known: See `texts`.
        clock: Tells the time.

    Attributes:
        looking: Seconds of each step for the look-ups,
        translating: and for the translation of what they found.
        hits: Requests whose draft was found, over all steps.
    """

    def __init__(
        self,
        target: TextTokenizer,
        drafter: TextTokenizer,
        texts: Sequence[Sequence[int]],
        known: int,
        clock: Callable[[], float],
    ) -> None:
        self._target, self._drafter, self._clock = target, drafter, clock
        self._bridge = bridge = make_bridge(target, drafter, mode="text")
        shape = len(texts), LONGEST, SIDES
        file = make_file(*shape)
        self._table = DraftTable(file, *shape)
        os.close(file)
        process: Any = SimpleNamespace(table=self._table)
        self._look = LookUp(process, Pair(target, drafter, bridge), DraftStats())
        self._pool = SentTexts(len(texts), 1, 1)
        self._states = [RequestState(str(place), bridge.open()) for place in range(len(texts))]
        self._futures = [list(ids[known:]) for ids in texts]
        self._take([list(ids[:known]) for ids in texts])
        self.looking: list[float] = []
        self.translating: list[float] = []
        self.hits = 0

    def step(self, rng: random.Random) -> None:
        """A step of every request."""
        counts = []
        for state, future in zip(self._states, self._futures, strict=True):
            rank, accepted = rng.choice((0, rng.randint(1, SIDES))), rng.randint(0, DRAFT)
            counts.append(1 + (accepted if rank else DRAFT))
            self._draft(state, future, rank, accepted, rng)
        self._take([future[:n] for future, n in zip(self._futures, counts, strict=True)])
        self._futures = [future[n:] for future, n in zip(self._futures, counts, strict=True)]
        tasks = [DraftTask(state, DRAFT) for state in self._states]
        began = self._clock()
        found = [self._look.behind(task) for task in tasks]
        looked = self._clock()
        self._look.translate(found)
        self.translating.append(self._clock() - looked)
        self.looking.append(looked - began)
        self.hits += sum(bool(of.ids) for of in found)

    def _take(self, arrived: Sequence[Sequence[int]]) -> None:
        """More of the texts, in target ids."""
        kept = self._bridge.extend([state.context for state in self._states], arrived)
        for state, unchanged in zip(self._states, kept, strict=True):
            state.align(self._pool, unchanged)

    def _draft(
        self, state: RequestState, future: list[int], rank: int, accepted: int, rng: random.Random
    ) -> None:
        """Have the text told, and drafted behind.

        Args:
            state: The request.
            future: Target ids that follow.
            rank: Of the line that is right; the others are not.
            accepted: Target ids up to the place where a line beside the chain leaves it.
            rng: For the others.
        """
        text, sequence = text_of(DraftTask(state, 0)), state.sequence
        assert sequence is not None
        ids = state.context.ids[state.num_kv_valid :]
        text.sent = sequence.kv_ids
        text.sent += ids
        state.num_kv_valid += len(ids)
        text.serial, text.gone, held = _SERIAL, [], state.context.held
        spelled = [held + self._target.decode_bytes(future[:n]) for n in (accepted, 2 * DRAFT + 1)]
        right = self._drafter.encode_bytes(spelled[1])[:LONGEST]
        told = min(DRAFT, len(right) - 1)
        place = min(len(self._drafter.encode_bytes(spelled[0])), told) if rank else told
        wrong = [rng.randrange(300, self._drafter.vocab_size) for _ in right]
        text.drafted = right[:told] if not rank else [*right[:place], *wrong[place:told]]
        text.peaks = [0.5] * told
        for line in range(1 + SIDES):
            base = told if not line else place if line == rank else rng.randrange(told + 1)
            behind = (right if line == rank else wrong)[base:]
            behind = behind[: DRAFT + 2] if line else behind
            self._table.write(text.slot, line, Drafted(_SERIAL, base, behind, [0.5] * len(behind)))
