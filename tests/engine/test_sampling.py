# SPDX-License-Identifier: Apache-2.0
"""At temperature > 0 samples follow the target's own law, and a wrong rule is caught."""

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import engine, metrics_of, slem
from vllm import SamplingParams

from vllm_hetero_spec.engine.compat import cpu_expand

pytestmark = pytest.mark.engine

TEMPERATURE, TOP_K, LENGTH = 0.8, 3, 3
SAMPLES = 6000


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


@pytest.fixture(scope="module")
def llm(demo_pair: Path) -> Any:
    spec = slem(demo_pair / "drafter", lookahead=3)
    with engine(demo_pair / "target", spec, max_num_seqs=128) as llm:
        yield llm


def test_samples_follow_the_targets_law(llm: Any, prompt: str, law: dict) -> None:
    found = sample(llm, prompt, SAMPLES)
    gained = metrics_of(llm)
    assert gained["num_accepted_tokens"] > SAMPLES / 20
    assert gained["num_accepted_tokens"] < gained["num_draft_tokens"]
    assert p_value(found, law) > 1e-4
    distance = sum(abs(found[path] / SAMPLES - p) for path, p in law.items()) / 2
    cells = len(law)
    assert distance < 1.5 * 0.5 * (2 * (cells - 1) / (3.1416 * SAMPLES)) ** 0.5


def test_seeded_requests_are_reproducible(llm: Any, prompt: str) -> None:
    params = [SamplingParams(temperature=1.0, seed=s, max_tokens=12) for s in range(8)]
    first, again = (
        [list(o.outputs[0].token_ids) for o in llm.generate([prompt] * 8, params, use_tqdm=False)]
        for _ in range(2)
    )
    assert first == again
    assert len({tuple(ids) for ids in first}) > 1


def test_stock_expansion_on_cpu_is_caught(
    llm: Any, prompt: str, law: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative oracle: without our repair the law is off, and this very test would say so."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    stock = getattr(rejection_sampler.expand_batch_to_tokens, "__wrapped__", None)
    if not current_platform.is_cpu() or stock is None:
        pytest.skip("this vLLM expands sampling parameters correctly by itself")
    assert not cpu_expand.expands(stock)

    # What the fault amounts to, whatever lies in memory: parameters that are not the request's.
    def wrong(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows = cpu_expand.expand(x, *args, **kwargs)
        return torch.full_like(rows, 3.0) if rows.is_floating_point() else rows

    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", wrong)
    assert p_value(sample(llm, prompt, SAMPLES // 2), law) < 1e-4
