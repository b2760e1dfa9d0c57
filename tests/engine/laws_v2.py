# SPDX-License-Identifier: Apache-2.0
"""Distributions of samples on Model Runner V2.

`test_laws_v2.py` runs these tests in a child process. HETERO_SPEC_SAMPLES sets the number of
samples for each setting, and selects all methods.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from chain_pair import PROMPT
from goodness import MISSED, follows, missed, p_value
from harness import engine, metrics_of, proposer_of, slem
from target_law import (
    LENGTH,
    Ids,
    Setting,
    counted,
    law_of,
    law_of_third,
    load,
    raced,
    third_is_one_of,
    thirds,
)
from test_sampling import SETTINGS, params_of, sample
from vllm import SamplingParams

from vllm_hetero_spec.engine.seam.request_params import LOOKAHEAD_ARG
from vllm_hetero_spec.engine.seam.runner_v2 import RunnerV2

LONG = "HETERO_SPEC_SAMPLES" in os.environ
pytestmark = [pytest.mark.timeout(36_000)] if LONG else []
SAMPLES = int(os.environ.get("HETERO_SPEC_SAMPLES", "300"))
# V1 refuses `narrow` (min_p) and `biased` (logit_bias) with speculation. `repeating` rewards
# repetition, so that the penalties of a draft token depend on the draft tokens before it.
ALL_SETTINGS = SETTINGS | {
    "narrow": Setting(1.0, min_p=0.4),
    "biased": Setting(1.0, top_p=0.95, bias=((70, 4.0), (72, -4.0), (67, -4.0))),
    "repeating": Setting(1.0, top_k=4, presence=-2.0, frequency=-2.0, repetition=1.1),
}
CASES = [
    ("slem", "token"),
    ("tli", "block"),
    ("push_forward", "token"),
    ("slrs", "token"),
    ("push_forward", "block", "parallel"),
]
if LONG:
    CASES += [
        ("slem", "block"),
        ("tli", "token"),
        ("tli", "fuzzy"),  # with a threshold of 0 it is lossless
        ("union", "token"),
        ("union", "block"),
        ("push_forward", "block"),
        ("push_forward", "race"),
        ("slrs", "block"),
        ("slrs", "race"),
        ("hetero", "token"),
        ("hetero", "block"),
    ]
ROOM = {"max_num_seqs": 128, "max_num_batched_tokens": 32768}  # prompts are not split into chunks
WRITTEN = LENGTH + 2  # tokens of each sample
Target = tuple[Any, list[int]]


@pytest.fixture(scope="module")
def target(chain_pair: Path) -> Target:
    return load(chain_pair / "target", PROMPT)


@pytest.fixture(scope="module")
def laws(target: Target) -> dict[str, dict[Ids, float]]:
    """The distribution of the target's tokens under each setting."""
    return {name: law_of(*target, setting) for name, setting in ALL_SETTINGS.items()}


def spelt(verification: str) -> str | dict[str, Any]:
    return {"fuzzy": {"threshold": 0.0}} if verification == "fuzzy" else verification


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def llm(request: pytest.FixtureRequest, chain_pair: Path) -> Iterator[Any]:
    method, verification, *drafter = request.param
    more = {"method": method, "verification": spelt(verification)}
    name = drafter[0] if drafter else "drafter"
    with engine(chain_pair / "target", slem(chain_pair / name, 3, **more), **ROOM) as llm:
        yield llm


class Forgetful(Setting):
    """A faulty setting: penalties ignore draft tokens. The third token is the first draft token."""

    def rows(self, logits: torch.Tensor, texts: torch.Tensor, prompt: int) -> torch.Tensor:
        return super().rows(logits, texts[:, : prompt + 2], prompt)


def drafted(texts: Iterable[Ids]) -> Counter:
    """Count texts by the number of different tokens from the third token on."""
    return Counter(len(set(text[2:])) for text in texts)


@pytest.fixture(scope="module")
def repeats(target: Target) -> list[dict[int, float]]:
    """Distributions of `drafted` with correct penalties and with those of `Forgetful`."""
    asked, found = ALL_SETTINGS["repeating"], []
    for kind in (Setting, Forgetful):
        law: dict[int, float] = {}
        setting = kind(**{field.name: getattr(asked, field.name) for field in fields(Setting)})
        for text, share in law_of(*target, setting, WRITTEN, rare=1e-7).items():
            law[len(set(text[2:]))] = law.get(len(set(text[2:])), 0.0) + share
        assert sum(law.values()) > 0.9999
        found.append(law)
    return found


def test_samples_follow_the_targets_law(
    llm: Any, target: Target, laws: dict[str, dict[Ids, float]], repeats: list[dict[int, float]]
) -> None:
    """One batch contains every setting with and without a seed, and greedy requests."""
    assert isinstance(proposer_of(llm).seam, RunnerV2)
    drawn = sample(llm, SAMPLES, ALL_SETTINGS, seeds=True)
    for name, texts in drawn.items():
        print(f"\n{name}: {len(texts)} samples, p {p_value(counted(texts), laws[name]):.3g}")
        assert follows(counted(texts), laws[name]), name
    # The third token is the first draft token. A parameter that is not applied to it is detected.
    hot = law_of_third(*target, SETTINGS["hot"])
    for name in ("narrow", "biased"):
        rarer = set((law_of_third(*target, ALL_SETTINGS[name]) < hot).nonzero()[:, 0].tolist())
        law, plain = (
            third_is_one_of(*target, setting, rarer)
            for setting in (ALL_SETTINGS[name], SETTINGS["hot"])
        )
        assert missed(law, plain, SAMPLES) < MISSED
        assert follows(thirds(drawn[name], rarer), law)
    law, forgetful = repeats
    assert missed(law, forgetful, SAMPLES) < MISSED
    assert follows(drafted(drawn["repeating"]), law)
    gained = metrics_of(llm)
    assert 0 < gained["num_accepted_tokens"] < gained["num_draft_tokens"]


def test_a_seed_means_the_same_in_any_batch(llm: Any) -> None:
    """A request gives the same tokens alone and beside requests with other draft lengths."""
    own = [params_of(SETTINGS["hot"], seed) for seed in range(8)]
    others = [
        SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True)
        for tokens in (2, 3, 4, 9)
    ]
    mixed = [params for seeded in own for params in (seeded, *others)]
    found = llm.generate([PROMPT] * len(mixed), mixed, use_tqdm=False)
    beside = [output.outputs[0].token_ids for output in found[:: 1 + len(others)]]
    alone = [
        llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids
        for params in own[:: 1 if LONG else 3]
    ]
    assert beside[:: 1 if LONG else 3] == alone
    assert len({tuple(text) for text in beside}) > 4


def test_log_probabilities_are_the_targets(llm: Any, target: Target) -> None:
    """Draft, recovered and bonus tokens have the target's own, before any sampling parameter."""
    model, start = target
    params = [
        SamplingParams(temperature=0.7, top_k=20, seed=s, logprobs=1, max_tokens=9, ignore_eos=True)
        for s in range(4)
    ]
    for output in llm.generate([PROMPT] * 4, params, use_tqdm=False):
        tokens = list(output.outputs[0].token_ids)
        with torch.inference_mode():
            rows = model(torch.tensor([[*start, *tokens]])).logits[0, len(start) - 1 : -1]
        expected = rows.log_softmax(-1)[range(9), tokens].tolist()
        told = [
            among[token].logprob
            for among, token in zip(output.outputs[0].logprobs, tokens, strict=True)
        ]
        assert told == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("drafter", ["drafter", "target", "none"])
def test_races_are_those_of_the_seed(chain_pair: Path, target: Target, drafter: str) -> None:
    """`test_races.py` requires the same texts of V1."""
    setting, seeds, length = Setting(0.9, top_p=0.95), list(range(20)), 10
    name = "drafter" if drafter == "none" else drafter
    wish = {"extra_args": {LOOKAHEAD_ARG: 0}} if drafter == "none" else {}
    spec = slem(chain_pair / name, 3, method="tli", verification="race")
    common = {"temperature": 0.9, "top_p": 0.95, "max_tokens": length, "ignore_eos": True}
    params = [SamplingParams(seed=s, **common, **wish) for s in seeds]
    with engine(chain_pair / "target", spec, max_num_seqs=16) as llm:
        found = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
        gained = metrics_of(llm)
    assert [list(o.outputs[0].token_ids) for o in found] == raced(*target, setting, seeds, length)
    drafted = gained["num_draft_tokens"], gained["num_accepted_tokens"]
    if drafter == "target":
        assert drafted[0] == drafted[1] > 100
    else:
        assert (drafted[1] > 0) is (drafter == "drafter")


@pytest.mark.parametrize(
    ("method", "verification"), [("tli", "token"), ("push_forward", "block"), ("slrs", "fuzzy")]
)
def test_a_drafter_that_is_the_target_is_always_right(
    chain_pair: Path, method: str, verification: str
) -> None:
    """Target and drafter are the same model, so their rows differ only by rounding."""
    target = chain_pair / "target"
    spec = slem(target, lookahead=4, method=method, verification=spelt(verification))
    params = [
        SamplingParams(temperature=heat, top_p=p, max_tokens=21, ignore_eos=True, seed=seed)
        for heat, p, seed in [(0.8, 0.95, None), (0.8, 1.0, 4), (1.0, 1.0, None), (0.0, 1.0, None)]
    ]
    with engine(target, spec, max_num_seqs=16) as llm:
        prompts = [PROMPT[start:] for start in range(16)]
        llm.generate(prompts, params * 4, use_tqdm=False)
        gained = metrics_of(llm)
    assert gained["num_draft_tokens"] > 150
    assert gained["num_accepted_tokens"] / gained["num_draft_tokens"] > 0.995
