# SPDX-License-Identifier: Apache-2.0
"""Hugging Face as a peer: the same greedy tokens as vLLM, and figures with the same meaning."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from goodness import follows
from target_law import Setting, law_of
from target_law import load as load_model

from vllm_hetero_spec.bench.huggingface_engine import (
    Generator,
    HuggingFaceEngine,
    HuggingFaceSpec,
    counts,
)
from vllm_hetero_spec.bench.load import Load, Sample
from vllm_hetero_spec.bench.vllm_engine import EngineSpec, VllmEngine
from vllm_hetero_spec.errors import ConfigError

pytestmark = pytest.mark.full

LOOKAHEAD = 4


def tokens(sample: Sample) -> list[list[int]]:
    return [trace.token_ids for trace in sample.traces]


@pytest.fixture(scope="module")
def load(demo_pair: Path) -> Load:
    lines = (demo_pair / "prompts.jsonl").read_text().splitlines()[:8]
    return Load([json.loads(line)["prompt"] for line in lines], max_tokens=24)


@pytest.fixture(scope="module")
def alone(demo_pair: Path, load: Load) -> Sample:
    with HuggingFaceEngine(HuggingFaceSpec(str(demo_pair / "target"))) as engine:
        return engine.run(load)


@pytest.fixture(scope="module")
def assisted(demo_pair: Path) -> Iterator[HuggingFaceEngine]:
    spec = HuggingFaceSpec(
        str(demo_pair / "target"), str(demo_pair / "drafter"), num_assistant_tokens=LOOKAHEAD
    )
    with HuggingFaceEngine(spec) as engine:
        yield engine


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_both_models_run_in_one_dtype(demo_pair: Path, dtype: str) -> None:
    """The dtype and the tokenizer are those that vLLM is given, whatever the files contain."""
    spec = HuggingFaceSpec(
        str(demo_pair / "target"),
        str(demo_pair / "drafter"),
        dtype=dtype,
        tokenizer=str(demo_pair / "drafter"),
    )
    generator = Generator(spec)
    assistant = generator._assistant(sampled=False)
    models = generator._target, assistant["assistant_model"]
    wanted = torch.float32 if dtype == "auto" and generator._device == "cpu" else torch.bfloat16
    assert {model.dtype for model in models} == {wanted}
    assert "assistant_tokenizer" not in assistant  # the drafter's tokenizer serves both models


def test_an_unknown_dtype_is_refused(demo_pair: Path) -> None:
    with pytest.raises(ConfigError, match="dtype is 'int4'; it can be auto, half"):
        Generator(HuggingFaceSpec(str(demo_pair / "target"), dtype="int4"))


def test_counts_of_drafts() -> None:
    assert counts([(3, 1), (0, 0), (2, 2), (4, 0)]) == {
        "drafts": 3,
        "draft_tokens": 9,
        "accepted_tokens": 3,
        "accepted_per_position": [2, 1, 0, 0],
    }
    assert counts([(0, 0)])["accepted_per_position"] == []


def test_the_target_alone(alone: Sample, load: Load) -> None:
    assert len(alone.traces) == len(load.prompts)
    assert alone.acceptance_length is None
    for trace in alone.traces:
        assert set(trace.counts) == {1}
        assert len(trace.token_ids) == len(trace.times) <= load.max_tokens
        assert trace.times == sorted(trace.times)
    ends = [trace.times[-1] for trace in alone.traces]
    assert all(end <= after.sent for end, after in zip(ends, alone.traces[1:], strict=False))
    assert alone.seconds >= ends[-1]
    assert alone.peak_memory_bytes > 10 << 20


@pytest.mark.engine
def test_greedy_tokens_agree_with_vllm(demo_pair: Path, load: Load, alone: Sample) -> None:
    with VllmEngine(EngineSpec(str(demo_pair / "target"))) as engine:
        sample = engine.run(load)
    pairs = list(zip(alone.traces, sample.traces, strict=True))
    # Kernels differ, so a near tie may have another result.
    assert sum(a.token_ids == b.token_ids for a, b in pairs) >= len(pairs) - 1
    assert all(a.text == b.text for a, b in pairs if a.token_ids == b.token_ids)


def test_an_assistant_of_another_tokenizer(
    assisted: HuggingFaceEngine, alone: Sample, load: Load
) -> None:
    sample = assisted.run(load)
    assert tokens(sample) == tokens(alone)
    assert sample.acceptance_length is not None
    assert 1.05 < sample.acceptance_length <= LOOKAHEAD + 1
    # Every token comes from a draft or from its verification.
    arrivals = sum(len(trace.counts) for trace in sample.traces)
    assert arrivals + sample.accepted_tokens == sample.tokens
    assert sum(sample.accepted_per_position) == sample.accepted_tokens


def test_sampled_loads_do_not_change_greedy_ones(
    assisted: HuggingFaceEngine, alone: Sample, load: Load
) -> None:
    before = assisted.run(load)
    sampled = Load(load.prompts, max_tokens=24, temperature=1.0, seed=3)
    first, again = (assisted.run(sampled) for _ in range(2))
    assert tokens(first) == tokens(again) != tokens(alone)
    after = assisted.run(load)
    assert tokens(after) == tokens(alone)
    assert after.accepted_tokens == before.accepted_tokens


def test_sampling_across_tokenizers_follows_the_targets_law(
    demo_pair: Path, assisted: HuggingFaceEngine, load: Load
) -> None:
    """The second token is verified against the draft, or follows a rejected one."""
    temperature, count = 0.8, 600
    prompt = load.prompts[0][:200]
    model, start = load_model(demo_pair / "target", prompt)

    def law_with(nucleus: float) -> dict[tuple[int, ...], float]:
        return law_of(model, start, Setting(temperature, top_p=nucleus), 2, rare=0.0)

    # The entropy depends on the training, so take the narrowest nucleus that leaves a choice.
    nucleus = next(share / 20 for share in range(10, 20) if len(law_with(share / 20)) > 4)
    law = law_with(nucleus)
    options = {"temperature": temperature, "top_p": nucleus, "seed": 0, "ignore_eos": True}
    sample = assisted.run(Load([prompt] * count, max_tokens=3, **options))
    assert 0 < sample.accepted_tokens < sample.draft_tokens
    found = Counter(tuple(ids[:2]) for ids in tokens(sample))
    assert found.keys() <= law.keys()
    assert follows(found, law)


def test_a_missing_model_is_refused(tmp_path: Path, demo_pair: Path) -> None:
    for spec in (
        HuggingFaceSpec(str(tmp_path / "absent")),
        HuggingFaceSpec(str(demo_pair / "target"), str(tmp_path / "absent")),
    ):
        with pytest.raises(ConfigError, match=r"^Hugging Face refuses .*absent"):
            HuggingFaceEngine(spec)
