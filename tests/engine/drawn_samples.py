# SPDX-License-Identifier: Apache-2.0
"""Samples of engines whose drafts are drawn ahead, beside the law that the target's own have."""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from chain_pair import PROMPT
from goodness import p_value
from harness import proposer_of
from target_law import LENGTH, Ids, Setting, counted, law_of, law_of_third, load
from vllm import SamplingParams

SAMPLES, WAVE = 640, 16
# Of few sequences each is seen often.
SETTINGS = {"hot": Setting(1.0), "few": Setting(1.6, top_k=6)}


class Law(NamedTuple):
    """The target's own: of the first tokens, and of the third, the first that is drafted."""

    texts: dict[Ids, float]
    third: dict[int, float]

    @classmethod
    def of(cls, target: Path, setting: Setting) -> "Law":
        """That of a model behind `PROMPT`."""
        model, start = load(target, PROMPT)
        third = law_of_third(model, start, setting).tolist()
        return cls(law_of(model, start, setting), dict(enumerate(third)))

    def p_value(self, found: Counter) -> float:
        """Of samples, by whichever tells more against them."""
        third = Counter[int]()
        for ids, count in found.items():
            third[ids[2]] += count
        return min(p_value(found, self.texts), p_value(third, self.third))


def sample(llm: Any, count: int, setting: Setting, *, seeds: int = 0) -> Counter:
    """Samples of one setting, a few at a time, every third with a seed of its own."""
    found = Counter[Ids]()
    for start in range(seeds, seeds + count, WAVE):
        params = [
            SamplingParams(
                temperature=setting.temperature,
                top_k=setting.top_k,
                top_p=setting.top_p,
                seed=None if number % 3 else number,
                max_tokens=LENGTH + 1,
                ignore_eos=True,
            )
            for number in range(start, start + WAVE)
        ]
        outputs = llm.generate([PROMPT] * WAVE, params, use_tqdm=False)
        found += counted(output.outputs[0].token_ids for output in outputs)
    return found


def waiting(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draft that was not foreseen is waited for."""
    observer = proposer_of(llm).drafting.observer
    monkeypatch.setattr(observer, "wait", lambda missing, *_: (max(missing.values()), 10.0))
