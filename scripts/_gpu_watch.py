# SPDX-License-Identifier: Apache-2.0
"""Between the drafter of a running engine and its target: drafts noted, or replaced by taught ones.

The drafter does all its work first, so that its costs are real. What it drafted is then replaced,
as if it had been right as often as the lesson says. In the next step it reads the target's tokens
as text that is not its own: an accepted token costs it a token of catch-up, which it would not if
it had drafted it itself.
"""

import contextlib
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _gpu_engine import Lesson

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.engine.proposer import HeteroProposer
from vllm_hetero_spec.engine.seam.step_view import StepView

# With this one the first two and the first eight texts of 128 tokens have the mean of their rate.
_SEED = 2


class Watch:
    """Takes its place around the drafting of a proposer, and does nothing until it is told to.

    Args:
        proposer: Of an engine in this process.
        verifier: Its rejection sampler.
        vocabulary: Ids of the target's tokenizer.
    """

    def __init__(self, proposer: HeteroProposer, verifier: object, vocabulary: int) -> None:
        assert proposer.drafting is not None
        self._lesson: Lesson | None = None
        self._made: dict[int, list[list[int]]] | None = None
        self._waits: Counter[str] | None = None
        self._taught = 0
        self._vocabulary = vocabulary
        self._on_gpu = proposer.seam.device.type == "cuda"
        self._step: StepView | None = None
        self._begin, self._finish = proposer.drafting.begin, proposer.drafting.finish
        vars(proposer.drafting).update(begin=self._began, finish=self._drafts)
        verifies = "forward" if hasattr(verifier, "forward") else "_verify"  # V1, V2
        for place, name in ((proposer, "after_step"), (proposer, "finish"), (verifier, verifies)):
            vars(place)[name] = self._noting_waits(getattr(place, name))

    def begin(self, lesson: Lesson | None, *, watched: bool) -> None:
        """Teach a lesson, and note drafts and waits where asked to."""
        self._lesson, self._taught = lesson, 0
        self._made = {} if watched else None
        self._waits = Counter() if watched and self._on_gpu else None

    def end(self) -> tuple[dict[int, list[list[int]]] | None, dict[str, int] | None, int]:
        """Drafts by request's index, waits by line, and how many drafts were taught."""
        found = self._made, None if self._waits is None else dict(self._waits), self._taught
        self.begin(None, watched=False)
        return found

    def _began(self, step: StepView) -> None:
        self._step = step
        self._begin(step)

    def _drafts(self) -> list[Draft]:
        drafts, step = self._finish(), self._step
        if self._lesson is not None and step is not None:
            drafts = [self._teach(self._lesson, step, draft) for draft in drafts]
        if self._made is not None:
            for draft in drafts:
                self._made.setdefault(index_of(draft.req_id), []).append(list(draft.tokens))
        return drafts

    def _teach(self, lesson: Lesson, step: StepView, draft: Draft) -> Draft:
        """A draft as long as the one that was made; that itself once the output is another."""
        request = step.requests[step.index_of[draft.req_id]]
        index = index_of(draft.req_id)
        text, done = list(lesson.texts[index]), request.num_output_tokens
        if request.token_ids[request.num_prompt_tokens :].tolist() != text[:done]:
            return draft
        known = text[done : done + len(draft.tokens)]
        self._taught += 1
        return draft.first(len(known))._replace(
            tokens=[
                token if is_right(lesson, index, done + place) else (token + 1) % self._vocabulary
                for place, token in enumerate(known)
            ]
        )

    def _noting_waits(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._waits is None:
                return original(*args, **kwargs)
            with waits_noted(self._waits):
                return original(*args, **kwargs)

        return watched


def index_of(req_id: str) -> int:
    """The request's number in its load; vLLM appends letters of its own."""
    return int(req_id.partition("-")[0])


def is_right(lesson: Lesson, index: int, place: int) -> bool:
    """Whether the token at a place of a request's output is taught rightly, always the same."""
    return random.Random(f"{_SEED} {index} {place}").random() < lesson.rate


@contextlib.contextmanager
def waits_noted(waits: Counter[str]) -> Iterator[None]:
    """Count the lines at which PyTorch waits for the GPU unasked, as a read of a tensor does.

    Waits for an event, which are asked for, are not among them.
    """
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if "synchroniz" in str(warning.message):
            waits[f"{Path(warning.filename).name}:{warning.lineno}"] += 1
