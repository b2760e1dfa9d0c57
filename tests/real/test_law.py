# SPDX-License-Identifier: Apache-2.0
"""Samples of a real pair follow the target's distribution as computed by transformers."""

from collections import Counter
from pathlib import Path

import pytest
from goodness import MISSED, follows, missed, p_value
from harness import engine, metrics_of
from real_models import hetero
from target_law import Ids, Setting, law_of, load
from vllm import SamplingParams

pytestmark = [pytest.mark.full, pytest.mark.real, pytest.mark.engine]

PROMPT = "One, two, three, four,"
LENGTH = 3  # tokens; the first two have no draft
# Sampling parameters, number of requests, and other parameters that the test must reject.
CASES = {
    "hot": (Setting(1.0), 1024, Setting(1.2)),
    "nucleus": (Setting(0.9, top_k=40, top_p=0.8), 384, Setting(0.9, top_k=40)),
}


@pytest.fixture(scope="module")
def laws(smollm: Path) -> dict[Setting, dict[Ids, float]]:
    """The distribution of the first three tokens after the prompt, for each setting."""
    model, start = load(smollm, PROMPT)
    settings = [setting for case in CASES.values() for setting in (case[0], case[2])]
    return {setting: law_of(model, start, setting, LENGTH, rare=1e-3) for setting in settings}


def test_sampled_drafts_keep_the_law(
    smollm: Path, gemma: Path, laws: dict[Setting, dict[Ids, float]]
) -> None:
    """The target has 49,152 tokens, the drafter 262,144. All requests are in one batch."""
    names = [name for name, (_, count, _) in CASES.items() for _ in range(count)]
    params = [
        SamplingParams(
            temperature=CASES[name][0].temperature,
            top_k=CASES[name][0].top_k,
            top_p=CASES[name][0].top_p,
            seed=seed,
            max_tokens=LENGTH + 2,
            ignore_eos=True,
        )
        for seed, name in enumerate(names)
    ]
    room = {"max_num_seqs": 64, "max_num_batched_tokens": 4096}
    with engine(smollm, hetero(gemma, lookahead=2), **room) as llm:
        outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
        counted = metrics_of(llm)
    assert 0 < counted["num_accepted_tokens"] < counted["num_draft_tokens"]
    assert counted["num_drafts"] >= len(params) / 2
    found: dict[str, Counter] = {name: Counter() for name in CASES}
    for name, output in zip(names, outputs, strict=True):
        found[name][tuple(output.outputs[0].token_ids)[:LENGTH]] += 1
    for name, (setting, count, other) in CASES.items():
        right, wrong = laws[setting], laws[other]
        print(f"\n{name}: p {p_value(found[name], right):.3f}, {p_value(found[name], wrong):.1e}")
        assert follows(found[name], right), name
        # The samples must not follow the distribution of the other parameters.
        assert missed(wrong, right, count) < MISSED, name
        assert not follows(found[name], wrong), name
