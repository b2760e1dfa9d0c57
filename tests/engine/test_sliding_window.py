# SPDX-License-Identifier: Apache-2.0
"""Drafters with sliding windows, whose layers share KV blocks with full attention."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness import engine, metrics_of, slem, with_config
from scenarios import Outputs, generate, greedy
from small_models import save_model
from transformers import (
    AutoTokenizer,
    Gemma3TextConfig,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
)

from vllm_hetero_spec import read_stats
from vllm_hetero_spec.errors import ConfigError

pytestmark = pytest.mark.engine

WINDOW = 24
KINDS = ("sliding_attention", "full_attention")
_SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "sliding_window": WINDOW,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def gemma(demo_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 model. Every second layer has a sliding window."""
    own = {"query_pre_attn_scalar": 64, "layer_types": [*KINDS, *KINDS]}
    make = partial(Gemma3TextConfig, **_SHAPE, **own)
    return save_model(make, demo_pair, tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def mistral(demo_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mistral model. All layers have a sliding window."""
    make = partial(MistralConfig, **_SHAPE)
    return save_model(make, demo_pair, tmp_path_factory.mktemp("mistral"))


def everywhere(gemma: Path, out: Path, kind: str) -> Path:
    """Return a copy of the model with one kind of attention in all layers."""
    layers = json.loads((gemma / "config.json").read_text())["layer_types"]
    return with_config(gemma, out, layer_types=[kind] * len(layers))


@pytest.fixture(scope="module")
def gemma_alone(gemma: Path, texts: list[str]) -> Outputs:
    with engine(gemma) as llm:
        return generate(llm, texts, greedy())


def accepted(llm: Any) -> float:
    metrics = metrics_of(llm)
    return metrics["num_accepted_tokens"] / metrics["num_draft_tokens"]


@pytest.mark.full
def test_drafts_for_another_target(
    demo_pair: Path, gemma: Path, texts: list, alone: Outputs
) -> None:
    with engine(demo_pair / "target", slem(gemma)) as llm:
        assert generate(llm, texts, greedy()) == alone
        assert metrics_of(llm)["num_draft_tokens"] > 100
        assert "drafter_error" not in read_stats(llm)["skipped"]


@pytest.mark.full
def test_drafts_look_back_as_far_as_the_target(
    gemma: Path, texts: list, gemma_alone: Outputs
) -> None:
    """All draft tokens are accepted, so the drafter has the windows of vLLM's target."""
    tokenizer = AutoTokenizer.from_pretrained(gemma)
    assert min(len(tokenizer(text)["input_ids"]) for text in texts) > 2 * WINDOW
    with engine(gemma, slem(gemma)) as llm:
        assert generate(llm, texts, greedy()) == gemma_alone
        assert accepted(llm) == 1


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_other_windows_are_other_drafts(
    gemma: Path, texts: list, gemma_alone: Outputs, kind: str, tmp_path: Path
) -> None:
    """Without this, the test above could pass with any windows."""
    with engine(gemma, slem(everywhere(gemma, tmp_path / kind, kind))) as llm:
        assert generate(llm, texts, greedy()) == gemma_alone
        assert metrics_of(llm)["num_draft_tokens"] > 100
        assert accepted(llm) < 0.8


@pytest.mark.full
def test_one_window_is_each_models_own(mistral: Path, texts: list, tmp_path: Path) -> None:
    """All draft tokens are accepted only if both models have the window."""
    near, far = mistral, with_config(mistral, tmp_path / "far", sliding_window=None)
    for target, drafter in ((near, near), (near, far), (far, near)):
        with engine(target, slem(drafter)) as llm:
            generate(llm, texts, greedy())
            assert metrics_of(llm)["num_draft_tokens"] > 100
            assert (accepted(llm) == 1) == (target == drafter), (target.name, drafter.name)


def test_state_that_cannot_be_rolled_back_is_refused(demo_pair: Path, tmp_path: Path) -> None:
    """A recurrent state has no entry per token, so rejected draft tokens would stay in it."""
    tokenizer = AutoTokenizer.from_pretrained(demo_pair / "drafter")
    tokenizer.save_pretrained(tmp_path)
    config = MambaConfig(vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    with (
        pytest.raises(ConfigError, match="MambaForCausalLM, which keeps a recurrent state"),
        engine(demo_pair / "target", slem(tmp_path)),
    ):
        pass
