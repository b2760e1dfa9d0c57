# SPDX-License-Identifier: Apache-2.0
"""The demo pair: training, tokenizers, shipped models, and the demo folder."""

import json
import re
import shutil
from pathlib import Path

import make_demo
import pytest
import torch
import train_models
from _demo_corpus import Corpus, conversations, standard_library
from _demo_tokenizers import restyled
from make_demo import widen
from train_models import ModelSpec, Steps, train, train_pair
from transformers import AutoModelForCausalLM, AutoTokenizer

TARGET = ModelSpec("byte_bpe", vocab_size=512, layers=1, heads=1)
DRAFTER = ModelSpec("sentencepiece", vocab_size=512, layers=1, heads=1)
STEPS = Steps(3, 1, 3)
TEXT = "  def naïve(self):\n\treturn '日本 😀'  # ▁ \n"


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    library = standard_library()
    return Corpus(train=library.train[:8], heldout=library.heldout)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    out = tmp_path_factory.mktemp("models") / "pair"
    train_pair(out, TARGET, DRAFTER, STEPS, corpus)
    return out


def test_heldout_files_are_not_trained_on() -> None:
    library = standard_library(heldout=20)
    assert len(library.heldout) == 20
    assert not set(library.heldout.values()) & set(library.train)
    assert library.heldout.keys() == standard_library(heldout=20).heldout.keys()


CHATS = {
    "target": (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n",
        "<|im_start|>assistant\n",
    ),
    "drafter": ("<|user|>\nhi<|end|>\n<|assistant|>\nho<|end|>\n", "<|assistant|>\n"),
}


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_a_trained_folder_loads(pair: Path, role: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pair / role)
    model = AutoModelForCausalLM.from_pretrained(pair / role)
    assert len(tokenizer) == model.config.vocab_size == 512
    assert model.config.head_dim == 64
    turn_end = {"target": "<|im_end|>", "drafter": "<|end|>"}[role]
    ends = [tokenizer.eos_token, turn_end]
    assert tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id) == ends


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_turns_are_marked_by_special_tokens(pair: Path, role: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pair / role)
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    rendered, prompt = CHATS[role]
    assert tokenizer.apply_chat_template(said, tokenize=False) == rendered
    asked = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    assert asked == rendered + prompt
    added = tokenizer.added_tokens_decoder.values()
    special = {token.content for token in added if token.special}
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(rendered)["input_ids"])
    found = [token for token in tokens if token in special and token != tokenizer.bos_token]
    assert found == re.findall(r"<\|\w+\|>", rendered)


def test_a_conversation_is_restyled_marker_by_marker() -> None:
    (target, _), (drafter, _) = CHATS["target"], CHATS["drafter"]
    assert restyled(target, "byte_bpe", "sentencepiece") == drafter
    assert restyled(drafter.replace("|>", "|> "), "sentencepiece", "byte_bpe") == target


def test_conversations_are_cut_from_the_texts() -> None:
    text = '''class A:
    def double(self, x):
        """Twice x.

        More of it.
        """
        # why
        y = 2 * x
        return y

    def bare(self):
        return 1
'''
    head = 'def double(self, x):\n    """Twice x."""'
    said = [
        {"role": "user", "content": head},
        {"role": "assistant", "content": "y = 2 * x\nreturn y"},
    ]
    assert conversations([text], share=1.0) == [said]
    assert conversations([text], share=0.0) == []
    assert conversations(["def broken(:"], share=1.0) == []
    corpus = standard_library().train[:40]
    cut = conversations(corpus)
    size = sum(len(message["content"]) for messages in cut for message in messages)
    assert 0.1 < size / sum(map(len, corpus)) < 0.2


def test_the_target_tokenizer_keeps_every_byte(pair: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT


def test_the_drafter_tokenizer_is_sentencepiece_like(pair: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pair / "drafter")
    ids = tokenizer(TEXT.replace("▁", ""))["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT.replace("▁", "")
    assert tokenizer.convert_ids_to_tokens(tokenizer("é😀")["input_ids"])[-4:] == [
        f"<0x{byte:02X}>" for byte in "😀".encode()
    ]
    bos, first = tokenizer.convert_ids_to_tokens(tokenizer("self")["input_ids"])[:2]
    assert bos == "<s>"
    assert first.startswith("▁")


def test_shipped_models_fit_the_script() -> None:
    """Shapes, dtype and file size are those of the script. A changed spec needs new weights."""
    size = 0
    for role, spec in (("target", train_models.TARGET), ("drafter", train_models.DRAFTER)):
        folder = make_demo.SHIPPED / role
        size += (folder / "model.safetensors").stat().st_size
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.dtype == torch.bfloat16
        wanted = spec.config(tokenizer)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"):
            assert getattr(model.config, name) == getattr(wanted, name)
    assert size <= 12e6


def test_shipped_chats_end_with_a_user_in_the_target_s_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_demo.SHIPPED / "target")
    lines = (make_demo.SHIPPED / "chats.jsonl").read_text().splitlines()
    for chat in map(json.loads, lines):
        assert chat["messages"][-1]["role"] == "user"
        rendered = tokenizer.apply_chat_template(
            chat["messages"], add_generation_prompt=True, tokenize=False
        )
        assert chat["prompt"] == rendered


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_the_shipped_models_write_python(role: str) -> None:
    """More than a third of the lines of greedy continuations are code, and as many differ."""
    folder = make_demo.SHIPPED / role
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    lines = (make_demo.SHIPPED / "prompts.jsonl").read_text().splitlines()
    written = []
    for line in lines[:4]:
        ids = torch.tensor([tokenizer(json.loads(line)["prompt"])["input_ids"]])
        with torch.inference_mode():
            row = model.generate(ids, do_sample=False, max_new_tokens=48)[0, ids.shape[1] :]
        written += tokenizer.decode(row, skip_special_tokens=True).splitlines()
    code = re.compile(
        r"\s*(#|@|[\w.]+\(|return|raise|if|for|while|else|try|with|def|class|\w.* = )"
    )
    assert sum(bool(code.match(line)) for line in written) > len(written) / 3
    assert len(set(written)) > len(written) / 3


def test_training_learns(tmp_path: Path, corpus: Corpus) -> None:
    losses = train(tmp_path / "model", TARGET, corpus, 50)
    assert losses[-1] < 0.8 * losses[0]


def test_an_interrupted_run_leaves_nothing(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train_models, "continuations", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train_pair(tmp_path / "pair", TARGET, DRAFTER, STEPS, corpus)
    assert list((tmp_path / "pair").iterdir()) == []


@pytest.fixture
def shipped(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny pair that replaces the one in the repository."""
    folder = tmp_path / "shipped"
    shutil.copytree(pair, folder)
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.setattr(make_demo, "SHIPPED", folder)
    return folder


def test_the_demo_folder_is_made_once_and_again_for_other_weights(
    shipped: Path, tmp_path: Path
) -> None:
    out = tmp_path / "cache" / "demo"
    assert make_demo.make_demo(out, 2e6)
    assert {entry.name for entry in out.iterdir()} == {
        "target", "target-wide", "drafter", "prompts.jsonl"
    }  # fmt: skip
    assert not make_demo.make_demo(out, 2e6)
    (shipped / "prompts.jsonl").write_text('{"prompt": "b"}\n')
    assert make_demo.make_demo(out, 2e6)
    assert (out / "prompts.jsonl").read_text() == '{"prompt": "b"}\n'
    shutil.rmtree(out / "target-wide")
    (out / "prompts.jsonl").write_text("")
    with pytest.raises(FileExistsError, match="no demo pair"):
        make_demo.make_demo(out, 2e6)
    assert list(out.parent.iterdir()) == [out]


def test_a_folder_of_something_else_is_refused(shipped: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="no demo pair"):
        make_demo.make_demo(out)
    assert (out / "notes.txt").read_text() == "mine"


def test_widening_keeps_the_logits(pair: Path, tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    count = widen(pair / "target", wide, parameters=2e6)
    narrow_model = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32)
    wide_model = AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32)
    assert wide_model.num_parameters() == count
    assert 2e6 - 64 * 3 * 64 < count <= 2e6  # one step of 64 columns in the one layer
    row = torch.arange(1, 100)[None]
    with torch.inference_mode():
        assert torch.allclose(wide_model(row).logits, narrow_model(row).logits, atol=1e-5)
    assert AutoTokenizer.from_pretrained(wide)("self")["input_ids"]
