# SPDX-License-Identifier: Apache-2.0
"""At temperature > 0 samples follow the target's own law, and a wrong rule is caught."""

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import engine, metrics_of, slem
from vllm import SamplingParams

from vllm_hetero_spec.verify.drafts import DraftBatch

pytestmark = pytest.mark.engine

TEMPERATURE, TOP_K, LENGTH = 0.8, 3, 3
SAMPLES = int(os.environ.get("HETERO_SPEC_SAMPLES", "6000"))


@pytest.fixture(scope="module")
def prompt(code_prompts: list[str]) -> str:
    return code_prompts[0][:200]


@pytest.fixture(scope="module")
def law(demo_pair: Path, prompt: str) -> dict[tuple[int, ...], float]:
    """Exact probability of every sequence of LENGTH tokens, from the target's logits."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(demo_pair / "target", dtype=torch.float32)
    start = AutoTokenizer.from_pretrained(demo_pair / "target").encode(prompt)
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        ids = torch.tensor([[*start, *path] for path in found])
        with torch.inference_mode():
            logits = model(ids).logits[:, -1] / TEMPERATURE
        best = logits.topk(TOP_K)
        rows = best.values.softmax(-1)
        found = {
            (*path, int(best.indices[i, j])): p * float(rows[i, j])
            for (i, (path, p)), j in product(enumerate(found.items()), range(TOP_K))
        }
    assert abs(sum(found.values()) - 1) < 1e-5
    return found


def sample(llm: Any, prompt: str, count: int) -> Counter:
    params = SamplingParams(
        temperature=TEMPERATURE, top_k=TOP_K, max_tokens=LENGTH + 2, ignore_eos=True
    )
    outputs = llm.generate([prompt] * count, params, use_tqdm=False)
    return Counter(tuple(o.outputs[0].token_ids[:LENGTH]) for o in outputs)


def p_value(found: Counter, law: dict[tuple[int, ...], float]) -> float:
    """Pearson's chi-square against the law; rare sequences share a cell."""
    total = sum(found.values())
    common = [path for path, p in law.items() if p * total >= 8]
    cells = [(found[path], law[path] * total) for path in common]
    cells.append((total - sum(o for o, _ in cells), total - sum(e for _, e in cells)))
    statistic = sum((o - e) ** 2 / e for o, e in cells if e > 1e-6)
    freedom = torch.tensor((len(cells) - 1) / 2)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2)))


def follows(found: Counter, law: dict[tuple[int, ...], float]) -> bool:
    """Chi-square and total variation, with the bound of as many samples as there are."""
    total = sum(found.values())
    distance = sum(abs(found[path] / total - p) for path, p in law.items()) / 2
    bound = 1.5 * 0.5 * (2 * (len(law) - 1) / (3.1416 * total)) ** 0.5
    return p_value(found, law) > 1e-4 and distance < bound


CASES = [
    ("slem", "token", "drafter"),
    ("tli", "token", "drafter"),
    ("push_forward", "block", "drafter"),
    ("slrs", "token", "drafter"),
    ("union", "token", "garbled"),
    ("hetero", "race", "drafter"),
]


@pytest.fixture(scope="module")
def drafters(demo_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's drafter, and one of random weights with the same tokenizer."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("drafters")
    for name in ("drafter", "garbled"):
        shutil.copytree(demo_pair / "drafter", folder / name)
    model = AutoModelForCausalLM.from_pretrained(folder / "garbled", dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05)
    model.save_pretrained(folder / "garbled")
    return folder


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def llm(request: pytest.FixtureRequest, demo_pair: Path, drafters: Path) -> Iterator[Any]:
    method, verification, drafter = request.param
    spec = slem(drafters / drafter, lookahead=3, method=method, verification=verification)
    room = {"max_num_seqs": 128, "max_num_batched_tokens": 32768}  # whole prompts: see Limits
    with engine(demo_pair / "target", spec, **room) as llm:
        yield llm


def test_samples_follow_the_targets_law(
    llm: Any, prompt: str, law: dict, request: pytest.FixtureRequest
) -> None:
    found = sample(llm, prompt, SAMPLES)
    gained = metrics_of(llm)
    assert gained["num_accepted_tokens"] < gained["num_draft_tokens"]
    assert gained["num_accepted_tokens"] > 0 or "garbled" in request.node.name
    assert follows(found, law)


def test_mixed_batches_and_seeds(llm: Any, prompt: str, law: dict) -> None:
    """Greedy neighbours change nothing, and a seed gives the same text twice."""
    random = {"top_k": TOP_K, "max_tokens": LENGTH + 2, "ignore_eos": True}
    params = [
        SamplingParams(temperature=TEMPERATURE, seed=s, **random)
        if s % 3
        else SamplingParams(temperature=0, **random)
        for s in range(900)
    ]
    first, again = (
        [
            tuple(o.outputs[0].token_ids)
            for o in llm.generate([prompt] * 900, params, use_tqdm=False)
        ]
        for _ in range(2)
    )
    assert first == again
    assert len(set(first[::3])) == 1
    assert follows(Counter(ids[:LENGTH] for s, ids in enumerate(first) if s % 3), law)


def test_a_verifier_that_is_told_another_law_is_caught(
    llm: Any,
    prompt: str,
    law: dict,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """The negative oracle: what was drawn verified as if it had been certain, or the reverse."""
    if {"race", "garbled"} & set(request.node.name.strip("]").split("-")):
        pytest.skip("races do not read the laws of drafts, and bad drafts are hardly accepted")
    genuine = DraftBatch.mass

    def wrong(self: DraftBatch) -> torch.Tensor:
        certain = self.rows is None
        return torch.full_like(genuine(self), 0.3) if certain else torch.ones_like(genuine(self))

    monkeypatch.setattr(DraftBatch, "mass", wrong)
    monkeypatch.setattr(DraftBatch, "subtract", lambda self, rest, index: rest)
    assert not follows(sample(llm, prompt, SAMPLES), law)


@pytest.mark.parametrize("method", ["tli", "push_forward", "slrs"])
def test_a_drafter_that_is_the_target_is_always_right(
    demo_pair: Path, code_prompts: list[str], method: str
) -> None:
    """Same model, same tokenizer, same law: rows agree but for rounding."""
    target = demo_pair / "target"
    spec = slem(target, lookahead=4, method=method)
    with engine(target, spec, max_num_seqs=16) as llm:
        params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=41, ignore_eos=True)
        llm.generate(code_prompts, params, use_tqdm=False)
        gained = metrics_of(llm)
    assert gained["num_draft_tokens"] > 400
    assert gained["num_accepted_tokens"] / gained["num_draft_tokens"] > 0.999
