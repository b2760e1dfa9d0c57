# SPDX-License-Identifier: Apache-2.0
"""`train_models.py long`: held-out files, prompts, and a model after two training steps."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import _demo_corpus
import pytest
import torch
import train_models
from _demo_corpus import standard_library
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as Fast


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Llama model with one layer, whose tokens are words."""
    words = {word: index for index, word in enumerate(["<unk>", "a", "b", "c", "</s>"])}
    tokenizer = Tokenizer(models.WordLevel(words, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    Fast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>").save_pretrained(
        tmp_path / "model"
    )
    config = LlamaConfig(
        vocab_size=5, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_model_is_trained_further(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "library"
    library.mkdir()
    for number in range(5):
        (library / f"{number}.py").write_text("a b " * 1000)
    paths = SimpleNamespace(get_paths=lambda: {"stdlib": str(library)})
    monkeypatch.setattr(_demo_corpus, "sysconfig", paths)
    monkeypatch.setattr(train_models, "LONG_HELD_OUT", 1)
    (held,) = standard_library(1).heldout
    (library / held).write_text("c b " * 1000)
    out = tmp_path / "long" / "drafter"
    command = ["x", "long", model, out, "--sequence", 1500, "--steps", 2, "--prompt-lengths", 100]
    monkeypatch.setattr(sys, "argv", list(map(str, command)))
    assert train_models.main() == 0
    trained = AutoModelForCausalLM.from_pretrained(out)
    assert trained.config.max_position_embeddings >= 1500
    assert trained.config.rope_parameters["rope_theta"] == 80000
    before = AutoModelForCausalLM.from_pretrained(model)
    assert not torch.equal(trained.lm_head.weight, before.lm_head.weight)
    lines = (tmp_path / "long" / "prompts-100.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"].split() for line in lines]
    assert [len(prompt) for prompt in prompts] == [100] * 6  # 2,000 tokens, 300 for each
    assert {word for prompt in prompts for word in prompt} == {"b", "c"}
