# SPDX-License-Identifier: Apache-2.0
"""The acceptance oracle, on drafts with answers worked out by hand and on a tiny trained pair."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from _demo_corpus import Corpus, standard_library
from oracle_acceptance import DRAFTING, Counts, Drafter, Rule, load, measure, walk
from oracle_text import Translator, split_complete, token_bytes
from train_models import ModelSpec, Steps, train, train_pair
from transformers import AutoTokenizer

# A target with the vocabulary "ab", "c" and "d". Drafts arrive one letter at a time.
TABLE = [b"ab", b"c", b"d"]
SPLIT = {b"ab": 0, b"c": 1, b"d": 2}


def spell(context: bytes, draft: bytes) -> list[int]:
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


@pytest.mark.parametrize(
    ("drafting", "proposed"),
    [
        ("exactly-k-drafter-tokens", [0]),  # "ab"
        ("cover", [0, 1]),  # "abc"
        ("cover-and-one-more", [0, 1]),  # "abcd", shortened to two tokens
    ],
)
def test_rules_stop_where_they_say(drafting: str, proposed: list[int]) -> None:
    taken: list[bytes] = []
    pieces = (taken.append(piece) or piece for piece in letters(b"abcdabcd"))  # type: ignore[func-returns-value]
    assert Rule(2, drafting).propose(pieces, lambda text: spell(b"", text)) == proposed
    lengths = {"exactly-k-drafter-tokens": 2, "cover": 3, "cover-and-one-more": 4}
    assert len(taken) == lengths[drafting]


def test_a_draft_that_ends_early_is_proposed() -> None:
    assert Rule(4).propose(letters(b"abc"), lambda text: spell(b"", text)) == [0, 1]
    assert Rule(4).propose(letters(b""), lambda text: spell(b"", text)) == []


def test_drop_last_withholds_one_unless_it_is_the_only_one() -> None:
    rule = Rule(4, drop_last=True)
    assert rule.propose(letters(b"abcd"), lambda text: spell(b"", text)) == [0, 1]
    assert rule.propose(letters(b"ab"), lambda text: spell(b"", text)) == [0]


def test_walk_counts_by_hand() -> None:
    greedy = [0, 1, 2, 0, 1, 2, 0]  # ab c d ab c d ab; the first one has no draft
    drafts = {4: b"cdc", 8: b"cc", 10: b"c"}  # by the number of context bytes

    def draft(context: bytes) -> Iterator[bytes]:
        return letters(drafts[len(context)])

    # After "xxab": c and d are right, the next c is wrong, the bonus token is ab. After "xxabcdab":
    # c is right, the second c is wrong, the bonus token is d. The last token has no draft.
    counts = Counts()
    walk(b"xx", greedy, TABLE, draft, spell, Rule(3), max_tokens=7, counts=counts)
    assert counts == Counts(rounds=3, drafts=2, proposed=5, accepted=3)
    assert counts.acceptance_length == 2.5


def test_rounds_without_a_proposal_are_no_drafts() -> None:
    counts = Counts()
    walk(b"", [1, 1, 1], TABLE, lambda c: letters(b""), spell, Rule(4), 3, counts)
    assert counts == Counts(rounds=2, drafts=0, proposed=0, accepted=0)
    assert counts.acceptance_length == 1.0


def test_split_complete_cuts_inside_a_character() -> None:
    assert split_complete("aé".encode()) == ("aé", b"")
    assert split_complete("aé".encode()[:-1]) == ("a", b"\xc3")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = standard_library()
    corpus = Corpus(train=library.train[:8], heldout=library.heldout)
    out = tmp_path_factory.mktemp("oracle") / "pair"
    target = ModelSpec("byte_bpe", vocab_size=512, layers=1, heads=1)
    drafter = ModelSpec("sentencepiece", vocab_size=512, layers=1, heads=1)
    train_pair(out, target, drafter, Steps(30, 1, 30), corpus=corpus)
    return out


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_token_bytes_spell_the_text(pair: Path, role: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pair / role)
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
    pair: Path, role: str, context: bytes, draft: bytes, whole: bytes
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pair / role)
    table = token_bytes(tokenizer)
    ids = Translator(tokenizer)(context, draft)
    assert b"".join(table[i] for i in ids) in {whole, draft}


def test_a_drafter_s_kept_kv_changes_nothing(pair: Path) -> None:
    model, tokenizer = load(pair / "drafter")
    kept = Drafter(model, tokenizer)
    for context in (b"def f(self):", b"def f(self):\n    return", b"def f", b"import os"):
        fresh = Drafter(model, tokenizer)
        assert [p for p, _ in zip(kept(context), range(8), strict=False)] == [
            p for p, _ in zip(fresh(context), range(8), strict=False)
        ]


def test_a_model_of_bytes_drafting_for_itself_is_always_right(tmp_path: Path) -> None:
    # Without merges a text has one tokenization, so every proposed token is accepted.
    library = standard_library()
    corpus = Corpus(train=library.train[:8], heldout=library.heldout)
    letters_only = ModelSpec("byte_bpe", vocab_size=257, layers=1, heads=1)
    train(tmp_path / "model", letters_only, corpus, 30)
    prompts = [text[500:700] for text in list(library.heldout.values())[:3]]
    folder = tmp_path / "model"
    rules = [Rule(4, drafting) for drafting in DRAFTING]
    for counts in measure(folder, folder, prompts, 40, rules):
        assert counts.accepted == counts.proposed
        assert counts.acceptance_length > 4.8  # of K + 1 = 5; the last round is shorter
    (dropped,) = measure(folder, folder, prompts, 40, [Rule(4, DRAFTING[0], drop_last=True)])
    assert dropped.accepted == dropped.proposed
    assert 3.8 < dropped.acceptance_length <= 4.0


def test_a_real_drafter_is_measured(pair: Path) -> None:
    prompts = [text[500:900] for text in list(standard_library().heldout.values())[:3]]
    rules = [Rule(4, drafting) for drafting in DRAFTING]
    for counts in measure(pair / "target", pair / "drafter", prompts, 20, rules):
        assert counts.accepted <= counts.proposed <= 4 * counts.drafts
        assert counts.rounds + counts.accepted >= 3 * 19
