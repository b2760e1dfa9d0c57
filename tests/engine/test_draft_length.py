# SPDX-License-Identifier: Apache-2.0
"""Planned drafter steps of a draft, compared with the number that it needs."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from simulated_drafts import Text
from transformers import AutoTokenizer

from vllm_hetero_spec.engine.drafter.draft_batch import DraftLength
from vllm_hetero_spec.engine.drafter.tasks import DraftTask
from vllm_hetero_spec.text.bridge import make_bridge
from vllm_hetero_spec.text.loading import load_tokenizer
from vllm_hetero_spec.text.tokenizer import TextTokenizer

PAIRS = [
    ("llama-3.1", "qwen2.5"),
    ("phi-4", "qwen2.5"),
    ("qwen2.5", "llama-3.1"),
    ("mistral-v3-32768", "qwen2.5"),
    ("llama-3.1", "llama-2"),
    ("qwen2.5", "gpt2"),
    ("llama-3.1", "tinyllamas-4096"),
]
FILES = (
    "humaneval",
    "gsm8k_test_200",
    "mt_bench",
    "news_articles_cnndm_80",
    "python_stdlib_heldout",
)
ROOM = 100


def length_of(*, waits: bool, ratio: float = 1.0, bridge: Any = None) -> DraftLength:
    bridge = bridge or SimpleNamespace(tokens_ratio=ratio)
    drafter: Any = SimpleNamespace(waits=waits, parallel=False, max_length=ROOM)
    return DraftLength(bridge, drafter)


def task_of(lookahead: int, ratio: float, tokens: int) -> DraftTask:
    """Return the task of a greedy request with `tokens` drafter tokens."""
    context = SimpleNamespace(ratio=ratio, ids=range(tokens))
    state: Any = SimpleNamespace(context=context)
    return DraftTask(state, lookahead)


def planned(tasks: Sequence[DraftTask], *, waits: bool, ratio: float = 1.0) -> list[int]:
    length = length_of(waits=waits, ratio=ratio)
    mean = length.mean_ratio(tasks)
    return [length.steps(task, ROOM, mean) for task in tasks]


def test_on_a_device_requests_are_planned_by_their_mean() -> None:
    tasks = [task_of(5, ratio, 100_000) for ratio in (0.9, 1.0, 1.7)]
    assert planned(tasks, waits=True) == [6, 6, 6]
    assert planned([*tasks, task_of(1, 1.0, 9)], waits=True)[-1] == 1
    assert planned([task_of(0, 3.0, 9), task_of(3, 1.0, 9)], waits=True) == [0, 3]
    assert planned(tasks, waits=False) == [4, 5, 8]


def test_a_short_text_is_planned_by_the_pair() -> None:
    def steps(tokens: int) -> int:
        return planned([task_of(10, 3.0, tokens)], waits=True, ratio=1.0)[0]

    assert [steps(0), steps(32), steps(100_000)] == [10, 20, 30]


class Document:
    """Byte offsets at which the target's and the drafter's tokens of a text end."""

    def __init__(self, text: str, target: TextTokenizer, drafter: TextTokenizer) -> None:
        self.target, self.drafter = (self._ends(text, of) for of in (target, drafter))

    @staticmethod
    def _ends(text: str, tokenizer: TextTokenizer) -> np.ndarray:
        return np.cumsum([len(tokenizer.token_bytes[each]) for each in tokenizer.encode(text)])

    @property
    def same_bytes(self) -> bool:
        """True if the tokens of both tokenizers have the same number of bytes."""
        return bool(self.target[-1] == self.drafter[-1])

    def drafter_tokens(self, place: int) -> int:
        """Return the number of drafter tokens before target token `place`."""
        return int(np.searchsorted(self.drafter, self.target[place - 1], "right"))

    def needed(self, place: int, lookahead: int) -> int:
        """Return the number of drafter tokens that cover `lookahead` target tokens from `place`."""
        end = np.searchsorted(self.drafter, self.target[place + lookahead - 1], "left")
        return int(end) + 1 - self.drafter_tokens(place)


@pytest.mark.full
@pytest.mark.parametrize(("target", "drafter"), PAIRS)
def test_forwards_are_about_those_that_a_draft_needs(
    shared: Path, target: str, drafter: str
) -> None:
    """The drafter is perfect: it drafts the rest of the text in its own tokens."""
    folder = shared / "tokenizers"
    tokenizers = [
        load_tokenizer(AutoTokenizer.from_pretrained(folder / name), name)
        for name in (target, drafter)
    ]
    length = length_of(waits=True, bridge=make_bridge(*tokenizers))
    documents = []
    for name in FILES:
        lines = (shared / "data" / "prompts" / f"{name}.jsonl").read_text().splitlines()[:20]
        texts = [json.loads(line)["prompt"][:2000] for line in lines]
        documents += [Document(text, *tokenizers) for text in texts]
    for lookahead in (3, 5):
        found = []
        for document in filter(lambda document: document.same_bytes, documents):
            for place in range(8, len(document.target) - lookahead, 16):
                before = document.drafter_tokens(place)
                task = task_of(lookahead, before / place, before)
                steps = length.steps(task, ROOM, length.mean_ratio([task]))
                found.append((steps, document.needed(place, lookahead)))
        steps, needed = np.mean(found, axis=0)
        assert needed - 0.6 < steps < needed + 1


# Milliseconds of a target step, of a drafter forward, and of the rest of a step. One H200, an 8B
# target and a 0.5B drafter.
TARGET, FORWARD, REST = 5.2, 1.04, 1.8
LONGEST = 8


def rate(steps: int, lookahead: int, ratios: Sequence[float], accepted: np.ndarray) -> float:
    """Return output tokens per millisecond and request if each round has `steps` forwards.

    Args:
        steps: Drafter forwards of a round.
        lookahead: Maximum target tokens of a draft.
        ratios: Drafter tokens per target token, for each request.
        accepted: [drafts, LONGEST], see `SimulatedDrafts`.
    """
    kept = np.cumprod(accepted, axis=1).mean(0)
    phases = (np.arange(50) + 0.5) / 50  # share of a forward; position where the last token ends
    tokens = 0.0
    for ratio in ratios:
        covered = np.minimum((steps + phases - 0.5) // ratio, lookahead).astype(int)
        tokens += 1 + np.mean([kept[:count].sum() for count in covered])
    return tokens / len(ratios) / (TARGET + REST + steps * FORWARD)


def test_in_a_mixed_batch_the_plan_is_as_fast_as_the_best_number_of_forwards() -> None:
    ratios = [0.9, 1.05, 1.3, 0.9, 1.05, 1.3, 0.9, 1.05]
    chance = np.random.default_rng(1)
    for text in (Text(), Text(easy=0.97, hard=0.5, share=0.8), Text(easy=0.8, hard=0.3, share=0.5)):
        accepted = text.draw(4000, LONGEST, chance).accepted

        def fastest(plan: Callable[[int], Sequence[int]], accepted: np.ndarray = accepted) -> float:
            """Return the rate at the best lookahead, which a controller would find."""
            return max(
                rate(steps, lookahead, ratios, accepted)
                for lookahead in range(1, LONGEST + 1)
                for steps in plan(lookahead)
            )

        def ours(lookahead: int) -> list[int]:
            tasks = [task_of(lookahead, ratio, 400) for ratio in ratios]
            return [max(planned(tasks, waits=True))]

        def by_the_longest(lookahead: int) -> list[int]:
            return [max(math.ceil(lookahead * ratio) + (ratio > 1) for ratio in ratios)]

        best = fastest(lambda _: range(1, 2 * LONGEST))
        assert fastest(ours) > 0.98 * best
        assert fastest(by_the_longest) < 0.95 * best
