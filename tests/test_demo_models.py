# SPDX-License-Identifier: Apache-2.0
"""The demo pair: trained whole or not at all, loadable, of two tokenizer kinds, kept and reused."""

import json
import math
import re
from io import StringIO
from pathlib import Path

import _demo_training
import pytest
import torch
import train_demo_models
from _demo_chat import chat_prompts, conversations
from _demo_corpus import Corpus, standard_library
from _demo_muon import Muon
from _demo_tokenizers import restyled
from _demo_training import Budget, ModelSpec, train
from _demo_widen import widen
from rich.console import Console
from train_demo_models import PairBudget, train_pair
from transformers import AutoModelForCausalLM, AutoTokenizer

TARGET = ModelSpec("byte_bpe", vocab_size=512, layers=1, heads=1)
DRAFTER = ModelSpec("sentencepiece", vocab_size=512, layers=1, heads=1)
BUDGET = PairBudget(Budget(steps=3), Budget(steps=1), Budget(steps=3))
TEXT = "  def naïve(self):\n\treturn '日本 😀'  # ▁ \n"


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    library = standard_library()
    return Corpus(train=library.train[:8], heldout=library.heldout)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    out = tmp_path_factory.mktemp("models") / "pair"
    train_pair(out, TARGET, DRAFTER, BUDGET, corpus=corpus)
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
    assert chat_prompts({"a": text, "b": "x = 1"}) == [{"id": "a", "messages": said[:1]}]
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


def test_a_sentencepiece_vocabulary_must_hold_the_bytes(tmp_path: Path, corpus: Corpus) -> None:
    small = ModelSpec("sentencepiece", vocab_size=300, layers=1, heads=1)
    with pytest.raises(ValueError, match="more than 363 tokens"):
        train_pair(tmp_path / "pair", TARGET, small, BUDGET, corpus=corpus)
    assert list(tmp_path.iterdir()) == []


def test_prompts_are_cut_from_heldout_files(pair: Path, corpus: Corpus) -> None:
    prompts = [json.loads(line) for line in (pair / "prompts.jsonl").read_text().splitlines()]
    assert [prompt["id"] for prompt in prompts] == list(corpus.heldout)
    assert all(prompt["prompt"] in corpus.heldout[prompt["id"]] for prompt in prompts)
    assert all(prompt["prompt"] for prompt in prompts)


def test_chats_are_cut_from_heldout_files(pair: Path, corpus: Corpus) -> None:
    chats = [json.loads(line) for line in (pair / "chats.jsonl").read_text().splitlines()]
    assert chats
    for chat in chats:
        *_, asked = chat["messages"]
        assert asked["role"] == "user"
        assert asked["content"].partition("(")[0] in corpus.heldout[chat["id"]]
        assert chat["prompt"].endswith("<|im_end|>\n" + CHATS["target"][1])


def test_training_learns(tmp_path: Path, corpus: Corpus) -> None:
    def loss(steps: int) -> float:
        figures = train(tmp_path / str(steps), TARGET, corpus, Budget(steps=steps))
        return figures["heldout_nats_per_byte"]

    assert loss(25) < 0.8 * loss(1)


def test_a_step_of_muon_is_pytorchs() -> None:
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in ((64, 128), (128, 64), (64, 128))]
    theirs = [torch.nn.Parameter(matrix.detach().clone()) for matrix in ours]
    muon = Muon(ours, 0.01, torch.float32)
    pytorchs = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for matrix, same in zip(ours, theirs, strict=True):
            matrix.grad = torch.randn_like(matrix)
            same.grad = matrix.grad.clone()
        before = [matrix.detach().clone() for matrix in ours]
        muon.step()
        pytorchs.step()
        for matrix, same, old in zip(ours, theirs, before, strict=True):
            moved = (matrix - old).norm()
            assert (matrix - same).norm() < 0.1 * moved  # PyTorch's multiplies in bfloat16


def test_a_kept_pair_is_reused_and_force_retrains(
    pair: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []
    real = train_demo_models.train
    monkeypatch.setattr(
        train_demo_models, "train", lambda *a, **k: trained.append(a[1]) or real(*a, **k)
    )
    first = json.loads((pair / "manifest.json").read_text())
    assert train_pair(pair, TARGET, DRAFTER, BUDGET, corpus=corpus) == first
    assert trained == []
    train_pair(pair, TARGET, DRAFTER, BUDGET, corpus=corpus, force=True)
    assert trained == [TARGET, DRAFTER]
    other = ModelSpec("sentencepiece", vocab_size=600, layers=1, heads=1)
    train_pair(pair, TARGET, other, BUDGET, corpus=corpus)
    assert trained == [TARGET, DRAFTER, TARGET, other]
    train_pair(pair, TARGET, DRAFTER, BUDGET, corpus=corpus)


def test_an_interrupted_run_leaves_nothing(tmp_path: Path, corpus: Corpus) -> None:
    def interrupt(stage: str, spent: float, status: str) -> None:
        if stage == "drafter":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_pair(tmp_path / "pair", TARGET, DRAFTER, BUDGET, corpus=corpus, report=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_refused(tmp_path: Path, corpus: Corpus) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="no demo pair"):
        train_pair(tmp_path, TARGET, DRAFTER, BUDGET, corpus=corpus)
    assert (tmp_path / "notes.txt").read_text() == "mine"


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


def test_widening_refuses_to_narrow(pair: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be widened"):
        widen(pair / "target", tmp_path / "wide", parameters=1000)


@pytest.mark.parametrize("budget", [{}, {"seconds": 1.0, "steps": 1}])
def test_a_budget_is_of_one_kind(budget: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="either"):
        Budget(**budget)


@pytest.mark.parametrize(("slowest", "steps"), [(1.0, 5), (math.inf, 1)])
def test_a_slow_machine_trains_longer(
    slowest: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that takes ten seconds counts as one."""
    now = [0.0]
    monkeypatch.setattr(_demo_training.time, "monotonic", lambda: now[0])
    taken = 0
    for _ in Budget(seconds=5.0, slowest=slowest).progress():
        now[0] += 10.0
        taken += 1
    assert taken == steps


def test_what_serves_the_pair_is_told(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One command for machines with a GPU and without; for another folder, with its name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    models = json.loads((pair / "manifest.json").read_text())["models"]
    models["target-wide"] = {"parameters": 176_000_000}
    said = {}
    for out in (pair, tmp_path / "vllm_hetero_spec" / "demo"):
        console = Console(file=StringIO())
        train_demo_models._describe(out, models, console)
        said[out] = console.file.getvalue().splitlines()[-1].strip()
    assert list(said.values()) == [
        f"HETERO_SPEC_DEMO={pair} bash examples/serve.sh",
        "bash examples/serve.sh",
    ]
