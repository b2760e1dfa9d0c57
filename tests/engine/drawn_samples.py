# SPDX-License-Identifier: Apache-2.0
"""Samples of engines with precomputed sampled drafts, and the target's own distribution."""

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
# Under `few` only few sequences are possible, so each is sampled often.
SETTINGS = {"hot": Setting(1.0), "few": Setting(1.6, top_k=6)}


class Law(NamedTuple):
    """The target's distribution of the first tokens, and of the third token.

    The third token is the first one that is drafted.
    """

    texts: dict[Ids, float]
    third: dict[int, float]

    @classmethod
    def of(cls, target: Path, setting: Setting) -> "Law":
        """Compute the distributions of a model after `PROMPT`."""
        model, start = load(target, PROMPT)
        third = law_of_third(model, start, setting).tolist()
        return cls(law_of(model, start, setting), dict(enumerate(third)))

    def p_value(self, found: Counter) -> float:
        """Return the smaller one of the p-values of both distributions."""
        third = Counter[int]()
        for ids, count in found.items():
            third[ids[2]] += count
        return min(p_value(found, self.texts), p_value(third, self.third))


def sample(llm: Any, count: int, setting: Setting, *, seeds: int = 0) -> Counter:
    """Return samples of one setting, in batches of `WAVE`. Every third request has its own seed."""
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
    """Make the target wait at most 10 s for each draft that was not precomputed."""
    observer = proposer_of(llm).drafting.observer
    monkeypatch.setattr(observer, "wait", lambda missing, *_: (max(missing.values()), 10.0))
