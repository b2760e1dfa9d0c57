# SPDX-License-Identifier: Apache-2.0
"""What a drafter in a process of its own says behind texts, asked for without an engine."""

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from _parallel_model import Chain

from vllm_hetero_spec.engine.drafter.request_state import RequestState
from vllm_hetero_spec.engine.drafter.tasks import DraftTask
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.seam.tokenizers import Pair, load_pair
from vllm_hetero_spec.engine.source.deployment import Deployment
from vllm_hetero_spec.engine.source.kept_process import KeptProcess
from vllm_hetero_spec.engine.source.look_up import Found, LookUp, text_of
from vllm_hetero_spec.engine.source.messages import Commit, Row
from vllm_hetero_spec.engine.source.sent_texts import SentTexts

MOMENT = 2e-4  # seconds between two looks at what there is
_FIRST = 2  # further first tokens, where the target would have joined the likeliest to its own
SETTLED = 0.25  # seconds in which the drafter has read a prompt
_AT_ONCE = 24  # texts that are asked about together
_LONGEST = 120.0  # seconds for a chain


def deployed(config: Any) -> tuple[Deployment, Pair]:
    """What a drafter's process needs, and the tokenizers, of an engine's configuration."""
    spec = config.speculative_config
    drafter, options = spec.drafter_model_config, spec.hetero
    pair = load_pair(config.model_config, drafter, options)
    return Deployment.of(config, drafter, options, pair, None, torch.device("cpu")), pair


class Chains:
    """Asks the process, which is started."""

    def __init__(self, deployment: Deployment, pair: Pair) -> None:
        self._process = KeptProcess(deployment)
        self._process.start()
        self._look = LookUp(self._process, pair, DraftStats())
        self._pool = SentTexts(deployment.slots, 1, 1)
        self._bridge, self._longest, self._serial = pair.bridge, deployment.longest, 0
        self._wanted: dict[int, int] = {}  # ids, by slot

    def forwards(self) -> tuple[int, float]:
        """How many there were, and their seconds."""
        counts = self._process.counts
        return counts.forwards, counts.seconds

    def open(self, ids: Sequence[int]) -> RequestState:
        """A text, of target ids."""
        state = RequestState("", self._bridge.open())
        self.extend(state, ids)
        return state

    def extend(self, state: RequestState, ids: Sequence[int]) -> None:
        """More of it."""
        unchanged = self._bridge.extend([state.context], [ids])
        state.align(self._pool, unchanged[0])

    def close(self, state: RequestState) -> None:
        """It is not needed any more."""
        state.close(self._pool)

    def ask(self, state: RequestState, tokens: int) -> None:
        """Have the drafter begin anew behind a text as it is now.

        Args:
            state: The text.
            tokens: Target tokens to draft; with 0 it only reads.
        """
        sequence, text = state.sequence, text_of(DraftTask(state, 0))
        assert sequence is not None
        # One more than are wanted, so that the last is as a longer draft would have it.
        wanted = math.ceil((tokens + 1) * state.context.ratio) + 1 if tokens else 0
        wanted = min(wanted, self._longest)
        keep, ids = state.num_kv_valid if text.serial else -1, state.context.ids
        self._wanted[text.slot] = wanted
        self._serial += 1
        new = ids[state.num_kv_valid :]
        row = Row(text.slot, keep, new, [], wanted, beside=wanted, guesses=_FIRST)
        while not self._process.send(Commit(self._serial, [*self._pool.closed], [row])):
            time.sleep(MOMENT)
        self._pool.closed.clear()
        text.sent = sequence.kv_ids
        text.sent += row.ids
        text.serial, text.life, text.gone = self._serial, self._process.life, []
        state.num_kv_valid = len(ids)

    def read(self, state: RequestState) -> None:
        """Have it read a text, and wait."""
        self.ask(state, 0)
        time.sleep(SETTLED)

    def drafted(self, state: RequestState, tokens: int) -> Found:
        """So many target tokens behind a text, as far as they are drafted."""
        found = self._look.behind(DraftTask(state, tokens))
        if found.ids:
            self._look.translate([found])
        return found

    def done(self, found: Found) -> bool:
        """Whether no more will come of it, as far as was asked for."""
        return self._look.done(found, self._wanted[found.text.slot])

    def behind_each(self, prompt: Sequence[int], ids: Sequence[int], tokens: int) -> list[Chain]:
        """What the drafter says behind each place of a continuation.

        Args:
            prompt: In front of it.
            ids: The continuation.
            tokens: Of each chain, at most.
        """
        found = []
        for first in range(0, len(ids), _AT_ONCE):
            places = range(first, min(first + _AT_ONCE, len(ids)))
            states = [self.open([*prompt, *ids[:place]]) for place in places]
            for state in states:
                self.ask(state, tokens)
            for place, state in zip(places, states, strict=True):
                chain = self._whole(state, tokens)
                pairs = zip(chain.proposal, ids[place:], strict=False)
                wrong = (at for at, (ours, true) in enumerate(pairs) if ours != true)
                right = next(wrong, min(len(chain.proposal), len(ids) - place))
                found.append(Chain(right, chain.ends))
                self.close(state)
        return found

    def _whole(self, state: RequestState, tokens: int) -> Found:
        """Wait until the drafter has done what it was asked for."""
        deadline = time.monotonic() + _LONGEST
        while not self.done(found := self.drafted(state, tokens)):
            if time.monotonic() > deadline:
                raise TimeoutError("the drafter's process does not come to an end")
            time.sleep(SETTLED / 10)
        return found
