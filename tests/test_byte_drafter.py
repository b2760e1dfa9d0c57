# SPDX-License-Identifier: Apache-2.0
"""A drafter that reads bytes: trained beside a demo pair on demand, and readable by the bridge."""

import json
from pathlib import Path

import pytest
from _demo_corpus import Corpus, standard_library
from _demo_tokenizers import BYTE_VOCABULARY, train_tokenizer
from _demo_training import Budget, ModelSpec
from train_demo_models import PairBudget, train_byte_drafter, train_pair
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_hetero_spec.text.loading import load_tokenizer
from vllm_hetero_spec.text.vocabulary import build_maps

TARGET = ModelSpec("byte_bpe", vocab_size=512, layers=1, heads=1)
DRAFTER = ModelSpec("sentencepiece", vocab_size=512, layers=1, heads=1)
BYTES = ModelSpec("bytes", vocab_size=BYTE_VOCABULARY, layers=1, heads=1)
BUDGET = PairBudget(Budget(steps=3), Budget(steps=1), Budget(steps=3))
TEXT = "  def naïve(self):\n\treturn '日本 😀'  # ▁ <|im_end|>\n"


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    library = standard_library()
    return Corpus(train=library.train[:8], heldout=library.heldout)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    out = tmp_path_factory.mktemp("models") / "pair"
    train_pair(out, TARGET, DRAFTER, BUDGET, corpus=corpus)
    assert {entry.name for entry in out.iterdir() if entry.is_dir()} == {"target", "drafter"}
    train_byte_drafter(out, TARGET, BYTES, BUDGET, corpus=corpus)
    return out


def test_the_folder_loads(pair: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pair / "byte-drafter")
    model = AutoModelForCausalLM.from_pretrained(pair / "byte-drafter")
    assert len(tokenizer) == model.config.vocab_size == 257
    assert model.generation_config.eos_token_id == [256] == [tokenizer.eos_token_id]
    figures = json.loads((pair / "byte-drafter" / "manifest.json").read_text())["figures"]
    assert figures["steps"] == 3
    assert 0 < figures["heldout_nats_per_byte"] < 10


def test_ids_are_bytes(pair: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pair / "byte-drafter")
    assert tokenizer(TEXT)["input_ids"] == list(TEXT.encode())
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT


def test_the_bridge_reads_it(pair: Path) -> None:
    target, drafter = (
        load_tokenizer(AutoTokenizer.from_pretrained(pair / name), name)
        for name in ("target", "byte-drafter")
    )
    assert drafter.token_bytes == [*(bytes([byte]) for byte in range(256)), b""]
    assert drafter.special_ids == {256}
    assert drafter.encode(TEXT) == list(TEXT.encode())
    assert len(build_maps(target, drafter).intersection) == 256


def test_turn_markers_are_text_of_the_targets(pair: Path) -> None:
    said = [{"role": "user", "content": "hi"}]
    rendered = {
        name: AutoTokenizer.from_pretrained(pair / name).apply_chat_template(
            said, add_generation_prompt=True, tokenize=False
        )
        for name in ("target", "byte-drafter")
    }
    assert rendered["target"] == rendered["byte-drafter"]


def test_a_kept_one_is_reused(pair: Path, corpus: Corpus) -> None:
    weights = pair / "byte-drafter" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    kept = train_byte_drafter(pair, TARGET, BYTES, BUDGET, corpus=corpus)
    assert weights.stat().st_mtime_ns == before
    assert kept["spec"]["tokenizer"] == "bytes"
    train_byte_drafter(pair, TARGET, BYTES, BUDGET, corpus=corpus, force=True)
    assert weights.stat().st_mtime_ns > before
    assert {entry.name for entry in pair.parent.iterdir()} == {"pair"}


def test_bytes_are_256() -> None:
    with pytest.raises(ValueError, match="257 tokens, not 300"):
        train_tokenizer("bytes", [], 300)
