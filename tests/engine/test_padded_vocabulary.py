# SPDX-License-Identifier: Apache-2.0
"""Ids that only an embedding table or only its tokenizer has are never drafted."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import engine, metrics_of, proposer_of, slem
from scenarios import Outputs, generate, greedy
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_hetero_spec import read_stats
from vllm_hetero_spec.errors import ConfigError

PADDING = 64


def padded(model: Path, out: Path, strength: float) -> Path:
    """Return a copy of a model whose embedding and output layers have 64 more rows.

    The larger `strength` is, the more often one of them has the largest logit. They form pairs of
    opposite sign, so one logit of each pair is positive.
    """
    shutil.copytree(model, out)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(0)
    for layer in (loaded.get_input_embeddings(), loaded.get_output_embeddings()):
        own = layer.weight.detach()
        rows = torch.randn(PADDING // 2, own.shape[1]) * strength
        layer.weight = torch.nn.Parameter(torch.cat([own, rows, -rows]))
    loaded.config.vocab_size += PADDING
    loaded.config.tie_word_embeddings = False
    loaded.save_pretrained(out)
    return out


def tokens_of(model: Path) -> int:
    return len(AutoTokenizer.from_pretrained(model))


class Watch:
    """Counts the drafter's argmaxes that are padding, and records the drafted ids."""

    def __init__(self, llm: Any, patch: pytest.MonkeyPatch, size: int) -> None:
        self.ids: set[int] = set()
        self.steps = self.padding_won = 0
        drafter = proposer_of(llm).drafting.source.drafter
        forward, finish = drafter.model.forward, drafter.finish

        def watched_forward(*args: Any) -> torch.Tensor:
            logits = forward(*args)
            self.steps += len(logits)
            self.padding_won += int((logits.argmax(-1) >= size).sum())
            return logits

        def watched_finish() -> Any:
            drafted = finish()
            self.ids |= {i for row in drafted for i in row.tokens}
            return drafted

        patch.setattr(drafter.model, "forward", watched_forward)
        patch.setattr(drafter, "finish", watched_finish)


@pytest.mark.full
@pytest.mark.engine
def test_padded_rows_of_the_drafter_are_never_drafted(
    demo_pair: Path, texts: list, alone: Outputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = tokens_of(demo_pair / "drafter")
    drafter = padded(demo_pair / "drafter", tmp_path / "drafter", strength=100.0)
    with engine(demo_pair / "target", slem(drafter)) as llm:
        watch = Watch(llm, monkeypatch, size)
        assert generate(llm, texts, greedy()) == alone
        assert set(read_stats(llm)["skipped"]) <= {"catching_up"}
        assert metrics_of(llm)["num_accepted_tokens"] > 0
    assert watch.padding_won > watch.steps * 0.9  # otherwise the test shows nothing
    assert watch.ids
    assert max(watch.ids) < size


@pytest.mark.full
@pytest.mark.engine
def test_prompts_may_name_rows_that_only_the_target_has(demo_pair: Path, tmp_path: Path) -> None:
    """Both have the same tokenizer, so ids are not translated. The target has more rows."""
    model = demo_pair / "drafter"
    target = padded(model, tmp_path / "target", strength=1e-3)
    size = tokens_of(model)
    prompts = [
        {"prompt_token_ids": [1, *range(300, 300 + n), size, size + PADDING - 1]}
        for n in (3, 40, 200)
    ]
    penalised = greedy(repetition_penalty=1.2, presence_penalty=0.5)
    with engine(target) as llm:
        alone = [generate(llm, prompts, params) for params in (greedy(), penalised)]
    with engine(target, slem(model)) as llm:
        assert [generate(llm, prompts, params) for params in (greedy(), penalised)] == alone
        assert set(read_stats(llm)["skipped"]) <= {"catching_up"}
        assert metrics_of(llm)["num_drafts"] > 0


def with_token(model: Path, out: Path, content: str, *, special: bool) -> Path:
    """Return a copy whose tokenizer has one more token than the model has rows."""
    shutil.copytree(model, out)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([AddedToken(content, special=special)], special_tokens=special)
    tokenizer.save_pretrained(out)
    assert tokens_of(out) == tokens_of(model) + 1
    return out


@pytest.mark.full
@pytest.mark.engine
def test_special_tokens_without_a_row_are_left_out(
    demo_pair: Path, texts: list, alone: Outputs, tmp_path: Path
) -> None:
    drafter = with_token(demo_pair / "drafter", tmp_path / "drafter", "<|pad|>", special=True)
    with engine(demo_pair / "target", slem(drafter)) as llm:
        assert generate(llm, texts, greedy()) == alone
        assert set(read_stats(llm)["skipped"]) <= {"catching_up"}
        assert metrics_of(llm)["num_accepted_tokens"] > 0


def test_text_tokens_without_a_row_are_refused(demo_pair: Path, tmp_path: Path) -> None:
    import vllm_hetero_spec

    vllm_hetero_spec.register()
    from vllm.engine.arg_utils import EngineArgs

    drafter = with_token(demo_pair / "drafter", tmp_path / "drafter", "<think>", special=False)
    args = EngineArgs(str(demo_pair / "target"), speculative_config=slem(drafter))
    with pytest.raises(ConfigError, match="have no row in the model's embedding") as refused:
        args.create_engine_config()
    assert "\n" not in str(refused.value)
