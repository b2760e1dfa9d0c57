# SPDX-License-Identifier: Apache-2.0
"""Tests of sampled requests: output follows the target's distribution at temperature > 0.

A known-wrong rule must be detected. HETERO_SPEC_SAMPLES=<samples per setting> selects longer tests
of all methods.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chain_pair import PROMPT, unknown
from goodness import MISSED, follows, missed, p_value
from harness import engine, metrics_of, profile, slem
from target_law import LENGTH, Ids, Setting, counted, law_of, load, third_is_one_of, thirds
from vllm import SamplingParams

from vllm_hetero_spec.draft import token_map
from vllm_hetero_spec.verify.drafts import DraftBatch

LONG = "HETERO_SPEC_SAMPLES" in os.environ
pytestmark = [pytest.mark.engine, *([pytest.mark.timeout(7200)] if LONG else [])]
SAMPLES = int(os.environ.get("HETERO_SPEC_SAMPLES", "1200"))
FEW_SAMPLES = 300  # per setting, without --full
SETTINGS = {"cold": Setting(0.8, top_k=3), "nucleus": Setting(1.0, top_p=0.8), "hot": Setting(1.0)}
# Probability of each draft token in the wrong rule. It is so low that every token is accepted.
WRONG_MASS, WRONG_SAMPLES = 1e-9, 400


@pytest.fixture(scope="module")
def laws(chain_pair: Path) -> dict[str, dict[Ids, float]]:
    """The target's distribution under each setting."""
    model, start = load(chain_pair / "target", PROMPT)
    return {name: law_of(model, start, setting) for name, setting in SETTINGS.items()}


@pytest.fixture(scope="module")
def unwritten(chain_pair: Path) -> tuple[set[int], dict[bool, float]]:
    """Tokens that the drafter cannot draft, and the law of the third (first drafted) being one."""
    tokens = unknown(chain_pair / "target")
    model, start = load(chain_pair / "target", PROMPT)
    return tokens, third_is_one_of(model, start, SETTINGS["hot"], tokens)


def params_of(setting: Setting, seed: int | None = None) -> SamplingParams:
    return SamplingParams(
        temperature=setting.temperature,
        top_k=setting.top_k,
        top_p=setting.top_p,
        min_p=setting.min_p,
        logit_bias=dict(setting.bias) or None,
        presence_penalty=setting.presence,
        frequency_penalty=setting.frequency,
        repetition_penalty=setting.repetition,
        seed=seed,
        max_tokens=LENGTH + 2,
        ignore_eos=True,
    )


def sample(llm: Any, count: int, settings: dict[str, Setting], *, seeds: bool) -> dict[str, list]:
    """Return `count` samples of each setting, generated in one batch with greedy requests."""
    greedy = SamplingParams(temperature=0, max_tokens=LENGTH + 2, ignore_eos=True)
    params, names = [], []
    for s in range(count):
        for name, setting in settings.items():
            params.append(params_of(setting, s if seeds and s % 2 else None))
            names.append(name)
        if s % 3 == 0:
            params.append(greedy)
            names.append("greedy")
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    drawn: dict[str, list] = {name: [] for name in [*settings, "greedy"]}
    for name, output in zip(names, outputs, strict=True):
        drawn[name].append(tuple(output.outputs[0].token_ids))
    assert len(set(drawn.pop("greedy"))) == 1
    return drawn


def check(drawn: dict[str, list], laws: dict[str, dict[Ids, float]], unwritten: tuple) -> None:
    for name, texts in drawn.items():
        print(f"\n{name}: {len(texts)} samples, p {p_value(counted(texts), laws[name]):.3f}")
        assert follows(counted(texts), laws[name]), name
    assert follows(thirds(drawn["hot"], unwritten[0]), unwritten[1])


FAST = {("tli", "token", "drafter"), ("push_forward", "block", "drafter")}
FAST |= {("hetero", "race", "drafter"), ("push_forward", "token", "parallel")}
CASES = [
    ("slem", "token", "drafter"),
    ("tli", "token", "drafter"),
    ("push_forward", "block", "drafter"),
    ("slrs", "token", "drafter"),
    ("union", "token", "garbled"),
    ("hetero", "race", "drafter"),
    ("push_forward", "token", "parallel"),
    ("tli", "block", "parallel"),
    ("hetero", "race", "parallel"),
]
if LONG:
    CASES += [
        ("slem", "block", "garbled"),
        ("tli", "block", "garbled"),
        ("push_forward", "token", "garbled"),
        ("slrs", "block", "garbled"),
        ("union", "token", "drafter"),
        ("hetero", "token", "drafter"),
        ("push_forward", "race", "drafter"),
        ("slrs:4", "token", "drafter"),  # candidates
        ("slrs:4", "block", "garbled"),
    ]


TIERED = [pytest.param(case, marks=() if case in FAST else pytest.mark.full) for case in CASES]


@pytest.fixture(scope="module", params=TIERED, ids="-".join)
def llm(request: pytest.FixtureRequest, chain_pair: Path) -> Iterator[Any]:
    method, verification, drafter = request.param
    method, _, candidates = method.partition(":")
    more = {"merge_candidates": int(candidates)} if candidates else {}
    spec = slem(chain_pair / drafter, lookahead=3, method=method, verification=verification, **more)
    room = {"max_num_seqs": 128, "max_num_batched_tokens": 32768}  # prompts are not chunked
    with engine(chain_pair / "target", spec, **room) as llm:
        profile(llm)
        yield llm


def test_samples_follow_the_targets_law(
    llm: Any, laws: dict, unwritten: tuple, request: pytest.FixtureRequest
) -> None:
    """One batch has all settings, requests with and without a seed, and greedy requests."""
    count = SAMPLES if LONG or request.config.getoption("--full") else FEW_SAMPLES
    check(sample(llm, count, SETTINGS, seeds=True), laws, unwritten)
    gained = metrics_of(llm)
    assert gained["num_accepted_tokens"] < gained["num_draft_tokens"]
    assert gained["num_accepted_tokens"] > 0 or "garbled" in request.node.name


def test_a_seed_gives_the_same_text_twice(llm: Any) -> None:
    params = [params_of(SETTINGS["hot"], s if s % 3 else None) for s in range(150)]
    first, again = (
        [o.outputs[0].token_ids for o in llm.generate([PROMPT] * 150, params, use_tqdm=False)]
        for _ in range(2)
    )
    seeded = [s for s in range(150) if s % 3]
    assert [first[s] for s in seeded] == [again[s] for s in seeded]
    assert len({tuple(first[s]) for s in seeded}) > 20


def test_a_verifier_that_is_told_another_law_is_caught(
    llm: Any, unwritten: tuple, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Every draft is then accepted, so the third token is never one that the drafter lacks."""
    if {"race", "garbled"} & set(request.node.name.strip("]").split("-")):
        pytest.skip("races read no draft_probs, and a garbled drafter writes all letters")
    monkeypatch.setattr(
        DraftBatch, "mass", lambda self: torch.full((len(self.tokens),), WRONG_MASS)
    )
    tokens, law = unwritten
    assert missed(law, {True: 0.0, False: 1.0}, WRONG_SAMPLES) < MISSED
    hot = sample(llm, WRONG_SAMPLES, {"hot": SETTINGS["hot"]}, seeds=False)["hot"]
    assert not follows(thirds(hot, tokens), law)


@pytest.mark.full
@pytest.mark.parametrize("method", ["slem", "tli", "push_forward", "slrs", "union"])
def test_chunked_prompts(chain_pair: Path, laws: dict, unwritten: tuple, method: str) -> None:
    """Target and drafter prefill prompts in chunks, in the same batch as requests that sample."""
    if not LONG and method != "push_forward":
        pytest.skip("one method stands for all in the short run")
    spec = slem(chain_pair / "drafter", lookahead=3, method=method)
    room = {"max_num_seqs": 32, "max_num_batched_tokens": 48, "enable_prefix_caching": False}
    with engine(chain_pair / "target", spec, **room) as llm:
        check(sample(llm, max(300, SAMPLES // 4), SETTINGS, seeds=False), laws, unwritten)
        assert metrics_of(llm)["num_accepted_tokens"] > 0


@pytest.mark.full
@pytest.mark.parametrize("method", ["tli", "push_forward", "slrs"])
def test_a_drafter_that_is_the_target_is_always_right(chain_pair: Path, method: str) -> None:
    """The distributions of both models differ only by rounding."""
    target = chain_pair / "target"
    with engine(target, slem(target, lookahead=4, method=method), max_num_seqs=16) as llm:
        params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=41, ignore_eos=True)
        llm.generate([PROMPT[start:] for start in range(24)], params, use_tqdm=False)
        gained = metrics_of(llm)
    assert gained["num_draft_tokens"] > 400
    assert gained["num_accepted_tokens"] / gained["num_draft_tokens"] > 0.999


@pytest.mark.full
def test_rows_of_a_round_are_bounded(chain_pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If many requests sample, each draft is shorter. Greedy drafts have no rows."""
    width = json.loads((chain_pair / "target" / "config.json").read_text())["vocab_size"]
    monkeypatch.setattr(token_map, "_MOST_BYTES", 12 * 4 * (width + 1))
    hot, cold = (
        SamplingParams(temperature=heat, max_tokens=24, ignore_eos=True) for heat in (1.0, 0.0)
    )
    with engine(chain_pair / "target", slem(chain_pair / "drafter", 4, method="tli")) as llm:
        drafted = []
        for params in (hot, cold):
            before = metrics_of(llm)
            llm.generate([PROMPT] * 6, params, use_tqdm=False)
            gained = {name: value - before[name] for name, value in metrics_of(llm).items()}
            drafted.append(gained["num_draft_tokens"] / gained["num_drafts"])
    assert 1 < drafted[0] <= 2
    assert drafted[1] > 3
