# SPDX-License-Identifier: Apache-2.0
"""Training for long texts: what is held out, how prompts are cut, and a model of two steps."""

import json
import sys
from pathlib import Path

import pytest
import torch
import train_long_models
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as Fast


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Llama of one layer, whose tokens are words."""
    words = {word: index for index, word in enumerate(["<unk>", "a", "b", "c"])}
    tokenizer = Tokenizer(models.WordLevel(words, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    Fast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path / "model")
    config = LlamaConfig(
        vocab_size=4, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_model_is_trained_further(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = tmp_path / "texts"
    (texts / "test").mkdir(parents=True)
    (texts / "read.py").write_text("a b " * 1000)
    (texts / "held.py").write_text("c b " * 1000)
    (texts / "test" / "other.py").write_text("c " * 2000)
    (texts / "short.py").write_text("c")
    assert train_long_models.split_texts(texts, ["held.py"]) == (["a b " * 1000], ["c b " * 1000])
    out = tmp_path / "long" / "drafter"
    command = ["x", model, out, "--texts", texts, "--held-out", "held.py", "--sequence", 1500]
    command += ["--steps", 2, "--rope-theta", 5000, "--prompt-lengths", 100, "--prompts", 3]
    monkeypatch.setattr(sys, "argv", list(map(str, command)))
    assert train_long_models.main() == 0
    trained = AutoModelForCausalLM.from_pretrained(out)
    assert trained.config.max_position_embeddings >= 1500
    assert trained.config.rope_parameters["rope_theta"] == 5000
    before = AutoModelForCausalLM.from_pretrained(model)
    assert not torch.equal(trained.lm_head.weight, before.lm_head.weight)
    lines = (tmp_path / "long" / "prompts-100.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"].split() for line in lines]
    assert [len(prompt) for prompt in prompts] == [100] * 3
    assert {word for prompt in prompts for word in prompt} == {"b", "c"}


def test_gradients_are_those_of_the_mean_loss(model: Path) -> None:
    """Pieces of the logits add up to the loss that the model itself computes."""
    found = LlamaForCausalLM.from_pretrained(model)
    ids = torch.randint(4, (1, 2 * 1024 + 7), generator=torch.Generator().manual_seed(0))
    loss = train_long_models.backward(found, ids)
    own = {name: each.grad.clone() for name, each in found.named_parameters()}
    found.zero_grad()
    expected = found(input_ids=ids, labels=ids).loss
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for name, each in found.named_parameters():
        torch.testing.assert_close(own[name], each.grad, rtol=1e-3, atol=1e-6)
