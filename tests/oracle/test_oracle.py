# SPDX-License-Identifier: Apache-2.0
"""The oracle of drafts: on texts worked out by hand, and on tiny models."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from _demo_corpus import Corpus, standard_library
from oracle_acceptance import Drafter, Rule, load
from oracle_text import Translator, split_complete, token_bytes
from train_models import ModelSpec, train
from transformers import AutoTokenizer

# A target with the vocabulary "ab", "c" and "d". Drafts arrive one letter at a time.
SPLIT = {b"ab": 0, b"c": 1, b"d": 2}


def spell(draft: bytes) -> list[int]:
    ids = []
    while draft:
        size = 2 if draft.startswith(b"ab") else 1
        if draft[:size] not in SPLIT:
            break
        ids.append(SPLIT[draft[:size]])
        draft = draft[size:]
    return ids


def letters(text: bytes) -> Iterator[bytes]:
    return (bytes([letter]) for letter in text)


def test_a_draft_ends_when_it_covers_k_tokens() -> None:
    pieces = letters(b"abcdabcd")
    assert Rule(2).propose(pieces, spell) == [0, 1]  # "abc"
    assert b"".join(pieces) == b"dabcd"


def test_a_draft_that_ends_early_is_proposed() -> None:
    assert Rule(4).propose(letters(b"abc"), spell) == [0, 1]
    assert Rule(4).propose(letters(b""), spell) == []


def test_split_complete_cuts_inside_a_character() -> None:
    assert split_complete("aé".encode()) == ("aé", b"")
    assert split_complete("aé".encode()[:-1]) == ("a", b"\xc3")


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_token_bytes_spell_the_text(demo_pair: Path, role: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_pair / role)
    text = "  def f():\n\treturn '日本 😀'"
    spelled = b"".join(token_bytes(tokenizer)[i] for i in tokenizer(text)["input_ids"])
    assert spelled.decode() == (" " if role == "drafter" else "") + text


@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize(
    ("context", "draft", "whole"),
    [
        (b"def ", b"f(self):\n", b"f(self):\n"),
        (b"retu", b"rn self", b"rn self"),
        (b"self", b" " + "é".encode()[:1], b" "),
        (b"self", "😀".encode()[:3], b""),
        ("é".encode()[:1], "é".encode()[1:], b""),
    ],
)
def test_translations_spell_the_draft(
    demo_pair: Path, role: str, context: bytes, draft: bytes, whole: bytes
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_pair / role)
    table = token_bytes(tokenizer)
    ids = Translator(tokenizer)(context, draft)
    assert b"".join(table[i] for i in ids) in {whole, draft}


def test_a_drafter_s_kept_kv_changes_nothing(demo_pair: Path) -> None:
    model, tokenizer = load(demo_pair / "drafter")
    kept = Drafter(model, tokenizer)
    for context in (b"def f(self):", b"def f(self):\n    return", b"def f", b"import os"):
        fresh = Drafter(model, tokenizer)
        assert [p for p, _ in zip(kept(context), range(8), strict=False)] == [
            p for p, _ in zip(fresh(context), range(8), strict=False)
        ]


def test_a_model_of_bytes_drafting_for_itself_is_always_right(tmp_path: Path) -> None:
    """Without merges a text has one tokenization, so every proposed token is the model's own."""
    library = standard_library()
    corpus = Corpus(train=library.train[:8], heldout=library.heldout)
    train(tmp_path / "model", ModelSpec("byte_bpe", vocab_size=257, layers=1, heads=1), corpus, 30)
    model, tokenizer = load(tmp_path / "model")
    draft, translate = Drafter(model, tokenizer), Translator(tokenizer)
    table, proposed, drafts = token_bytes(tokenizer), 0, 0
    for prompt in [text[500:700] for text in list(library.heldout.values())[:3]]:
        ids = tokenizer(prompt)["input_ids"]
        given = torch.tensor([ids], device=model.device)
        with torch.inference_mode():
            row = model.generate(given, do_sample=False, max_new_tokens=40)[0]
        greedy = row[len(ids) :].tolist()
        for place in range(1, len(greedy) - 4, 5):
            context = prompt.encode() + b"".join(table[i] for i in greedy[:place])
            found = Rule(4).propose(draft(context), partial(translate, context))
            assert found == greedy[place : place + len(found)]
            proposed, drafts = proposed + len(found), drafts + 1
    assert proposed > 3.8 * drafts > 0  # nearly all drafts have four tokens
