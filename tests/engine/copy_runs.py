# SPDX-License-Identifier: Apache-2.0
"""Copies in engines. `test_copies.py` runs these tests with both model runners."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from goodness import follows
from harness import engine, metrics_of, slem
from scenarios import TIGHT_LIMITS, Outputs, generate, greedy
from target_law import Setting, counted, law_of, load
from v2_runs import SOME
from vllm import LLM, SamplingParams

from vllm_hetero_spec import read_stats
from vllm_hetero_spec.engine.copies.policy import Copies, Drafts


@pytest.fixture(scope="module")
def always() -> Iterator[None]:
    """Read every step, and copy whatever is predicted, at any price."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Copies, "is_idle", False)
        patch.setattr(Copies, "_price_of_row", lambda *_: 0.0)
        patch.setattr(Copies, "_requested", lambda self, _: self._step.buckets[-1])
        patch.setattr(
            Copies,
            "_best",
            lambda _, copies, planned: Drafts(
                copies, [0 if i in copies else n for i, n in enumerate(planned)]
            ),
        )
        yield


@pytest.fixture(scope="module")
def alone(demo_pair: Path, code_prompts: list[str]) -> dict[str, Outputs]:
    with engine(demo_pair / "target", **TIGHT_LIMITS) as llm:
        return {name: run(llm, code_prompts[:8]) for name, run in SOME.items()}


@pytest.fixture(scope="module")
def copying(demo_pair: Path, always: None, alone: dict[str, Outputs]) -> Iterator[LLM]:
    spec = slem(demo_pair / "drafter", 6, method="push_forward", controller="goodput")
    with engine(demo_pair / "target", spec, **TIGHT_LIMITS) as llm:
        yield llm


@pytest.mark.parametrize("scenario", SOME)
def test_same_tokens_as_the_target_alone(
    copying: LLM, alone: dict[str, Outputs], code_prompts: list[str], scenario: str
) -> None:
    assert SOME[scenario](copying, code_prompts[:8]) == alone[scenario]
    assert "drafter_error" not in read_stats(copying)["skipped"]


def test_copies_are_accepted(copying: LLM, code_prompts: list[str]) -> None:
    """With two allowed tokens, a greedy output soon repeats itself."""
    before, verified = read_stats(copying), metrics_of(copying)
    params = greedy(max_tokens=100, ignore_eos=True, allowed_token_ids=[70, 72])
    generate(copying, [prompt[:100] for prompt in code_prompts[:2]], params)
    stats, metrics = read_stats(copying), metrics_of(copying)
    copied = stats["copied_tokens_accepted"] - before["copied_tokens_accepted"]
    assert stats["copies"] > before["copies"] > 0
    assert copied > 20  # with asynchronous scheduling, the length of a step may be short
    assert copied <= metrics["num_accepted_tokens"] - verified["num_accepted_tokens"]


def test_samples_follow_the_law(copying: LLM, demo_pair: Path, code_prompts: list[str]) -> None:
    """Copies are certain tokens: a sampled request accepts them by the target's probability."""
    prompt, setting = code_prompts[0][:60] * 3, Setting(0.8, top_k=3)
    model, start = load(demo_pair / "target", prompt)
    params = SamplingParams(temperature=0.8, top_k=3, max_tokens=8, ignore_eos=True)
    before = read_stats(copying)
    outputs = copying.generate([prompt] * 1000, params, use_tqdm=False)
    assert follows(counted(o.outputs[0].token_ids for o in outputs), law_of(model, start, setting))
    stats = read_stats(copying)
    assert stats["copies"] - before["copies"] > 500
    assert stats["copied_tokens_accepted"] > before["copied_tokens_accepted"]
