# SPDX-License-Identifier: Apache-2.0
"""Tokenizers that change or lose text: the bytes of their ids are known, lost bytes are counted."""

import io
import json
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from contexts import Family, opened
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from laws import TEXTS, assert_lawful
from recipes import altered
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE

from vllm_hetero_spec.text.bridge import make_bridge
from vllm_hetero_spec.text.fast_model import FastModel
from vllm_hetero_spec.text.loading import load_tokenizer
from vllm_hetero_spec.text.model_proto import lossy_reason
from vllm_hetero_spec.text.token_bytes import PieceRule
from vllm_hetero_spec.text.tokenizer import LeadingSpace

VARIANTS = (
    *("unigram-fallback", "unigram-words", "wordpiece", "wordpiece-cased", "characters"),
    *("characters-silent", "bytes", "byte-level-lowercase", "byte-level-words"),
)
# Texts that look like tokens, and a combining mark.
MARKS = ["<0x0A>", "##a", "#", " ", "[UNK]", "<unk>", "<|user|>", "<think>", "\u0338", "▁", "'s"]
SEPARATORS = "keeps at most one space between words"
LOSSY = {
    "unigram-words": ["applies NFKC", "replaces ' {2,}' by ' '", SEPARATORS],
    "wordpiece": [
        "removes control characters",
        "lowercases",
        "strips accents",
        "puts spaces around Chinese characters",
        SEPARATORS,
    ],
    "wordpiece-cased": [SEPARATORS],
    "byte-level-lowercase": ["applies NFKC", "lowercases"],
    "byte-level-words": [SEPARATORS],
}


def spaced(words: list[str]) -> str:
    return "".join(" " + word for word in words)


def bert(text: str) -> str:
    """BERT's published cleaning, lowercasing and splitting, for Latin text and Chinese."""
    kept = "".join(
        " " if c.isspace() else c
        for c in text
        if c in "\t\n\r" or unicodedata.category(c)[0] != "C"
    )
    apart = "".join(f" {c} " if "\u4e00" <= c <= "\u9fff" else c for c in kept)
    bare = "".join(
        c for c in unicodedata.normalize("NFD", apart) if unicodedata.category(c) != "Mn"
    )
    bare = "".join(c.lower() for c in bare)
    words = "".join(
        f" {c} " if unicodedata.category(c)[0] == "P" or c in "$+<=>^`|~" else c for c in bare
    ).split()
    return "".join(word if word in ".?!," else " " + word for word in words)


# Documented normalization of each tokenizer.
DOCUMENTED: dict[str, Callable[[str], str]] = {
    "unigram-fallback": lambda text: text.replace("▁", " "),
    "unigram-words": lambda text: spaced(unicodedata.normalize("NFKC", text).split()),
    "wordpiece": bert,
    "wordpiece-cased": lambda text: spaced(text.replace("#", " # ").split()),
    "characters": str,
    "characters-silent": str,
    "bytes": str,
    "byte-level-lowercase": lambda text: "".join(
        c.lower() for c in unicodedata.normalize("NFKC", text)
    ),
    "byte-level-words": lambda text: "".join(text.split()),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_normalisation_is_the_documented_one(variants: Family, name: str) -> None:
    for text in TEXTS:
        if "<think>" in text:
            continue  # an added token of some tokenizers; see test_added_tokens_stay_whole
        if name == "unigram-words":
            text = text.replace("▁", " ")  # the mark is a word, not white space
        assert variants[name].normalize(text) == DOCUMENTED[name](text)


@pytest.mark.parametrize("name", VARIANTS)
def test_bytes_are_those_of_the_normalised_text(variants: Family, name: str) -> None:
    tokenizer = variants[name]
    for text in TEXTS:
        assert_lawful(tokenizer, text)
    assert tokenizer.lossy_reason == ", ".join(LOSSY.get(name, []))
    batch = [text for text in TEXTS for _ in range(30)]  # so many that the library uses threads
    assert tokenizer.encode_batch(batch) == [tokenizer.encode(text) for text in batch]


@pytest.mark.parametrize("name", VARIANTS)
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    parts=st.lists(
        st.text(max_size=5)
        | st.binary(max_size=4).map(lambda data: data.decode("utf-8", "surrogateescape"))
        | st.sampled_from(MARKS),
        max_size=6,
    )
)
def test_any_text_is_spelled_or_counted(variants: Family, name: str, parts: list[str]) -> None:
    text = "".join(parts)
    assert_lawful(variants[name], "".join(c for c in text if not "\ud800" <= c < "\udc80"))


def test_ids_are_the_librarys_own(variants: Family, variant_backends: dict[str, Tokenizer]) -> None:
    text = "Return the  first value, or None; naïve x_1 = [0] 中文"
    for name, tokenizer in variants.items():
        own = variant_backends[name].encode(text, add_special_tokens=False).ids
        space = " " if tokenizer.leading_space.applies(first=True) else ""
        assert tokenizer.encode(space + text) == own


def test_text_that_looks_like_a_mark_stays_text(variants: Family) -> None:
    fallback, cased = variants["unigram-fallback"], variants["wordpiece-cased"]
    first = fallback.byte_ids["☃".encode()[0]]
    assert first in fallback.encode("☃")
    assert first not in fallback.encode("<0xE2>")
    (going_on,) = [i for i, data in enumerate(cased.token_bytes) if data == b"ing"]
    assert going_on not in cased.encode("##ing")
    assert cased.special_id_of["[SEP]"] not in cased.encode("a [SEP] b")


def test_text_before_the_first_letter_may_be_lost(backends: dict[str, Any]) -> None:
    scripts = pre_tokenizers.Sequence(
        [pre_tokenizers.UnicodeScripts(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer = load_tokenizer(altered(backends["byte-level"], pre_tokenizer=scripts), "scripts")
    assert tokenizer.lossy_reason == SEPARATORS
    for text in ("    return 1", "return 1"):
        assert_lawful(tokenizer, text)


def test_a_normalizer_may_write_bytes_as_characters(backends: dict[str, Any]) -> None:
    parts = {
        "normalizer": normalizers.ByteLevel(),
        "pre_tokenizer": pre_tokenizers.Split("zzz", "isolated"),
    }
    backend = altered(backends["byte-level"], **parts)
    tokenizer = load_tokenizer(backend, "normalizer")
    for text in TEXTS:
        assert_lawful(tokenizer, text)
    text = "héllo  wörld"
    assert tokenizer.encode(text) == backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode_bytes(tokenizer.encode(text)) == text.encode()


def test_added_tokens_stay_whole(backends: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(backends["byte-level-nfc"])
    think = backends["byte-level-nfc"].token_to_id("<think>")
    text = "<think>\u0338 >\u0338"  # a combining stroke, which composes with the second ">" only
    assert tokenizer.encode(text)[0] == think
    assert tokenizer.normalize(text) == "<think>\u0338 \u226f"
    assert tokenizer.decode_bytes(tokenizer.encode(text)) == "<think>\u0338 \u226f".encode()


def test_added_tokens_that_normalisation_would_change_are_spelled(backends: dict[str, Any]) -> None:
    lowercase = altered(backends["byte-level"], normalizer=normalizers.Lowercase())
    lowercase.add_tokens([AddedToken("<Loud>", normalized=False), AddedToken("<Mid>")])
    tokenizer = load_tokenizer(lowercase)
    for text in ("a <Loud> b", "a <LOUD> b", "<mid><Mid>"):
        assert tokenizer.decode_bytes(tokenizer.encode(text)) == text.lower().encode()


def test_added_tokens_that_are_pieces_of_the_model(backends: dict[str, Any]) -> None:
    """In a byte-level vocabulary "é" is a byte and "Ġthe" has a space, also as added tokens."""
    edited = altered(backends["byte-level"])
    edited.add_tokens([AddedToken("é"), AddedToken("Ġthe", normalized=False)])
    tokenizer = load_tokenizer(edited)
    assert tokenizer.token_bytes[edited.token_to_id("é")] == b"\xe9"
    assert tokenizer.encode(" the") == [edited.token_to_id("Ġthe")]
    for text in ("in the café", "Ġthe"):
        assert_lawful(tokenizer, text)
        assert tokenizer.normalize(text) == text


def test_unknown_tokens_stay_and_are_counted(variants: Family) -> None:
    known, silent = variants["characters"], variants["characters-silent"]
    a, space, b = (known.byte_ids[byte] for byte in b"a b")
    assert known.unknown_id == 0
    assert 0 in known.special_ids
    for tokenizer, ids in ((known, [a, 0, space, b]), (silent, [a, space, b])):
        for text, lost in (("aé b", 2), ("a中 b", 3)):
            assert tokenizer.encode(text) == ids
            assert tokenizer.lost_bytes(text, ids) == lost
        assert tokenizer.lost_bytes("b", tokenizer.encode("b")) == 0


def test_counting_lost_bytes_normalises_only_unspelled_text(
    variants: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    for name in ("characters", "wordpiece", "unigram-fallback"):
        tokenizer = variants[name]
        normalize = tokenizer.raw_normalize
        monkeypatch.setattr(
            tokenizer, "raw_normalize", lambda text, own=normalize: asked.append(text) or own(text)
        )
        for text in ("return the value", " the"):
            assert not tokenizer.lost_bytes(text, tokenizer.encode(text))
    assert not asked
    assert variants["characters"].lost_bytes("é", [0]) == 2
    assert asked == ["é"]


def test_unknown_tokens_are_context_but_never_proposed(variants: Family, family: Family) -> None:
    characters, byte_level = variants["characters"], family["byte-level"]
    bridge = make_bridge(byte_level, characters)
    context = opened(bridge, byte_level.encode("a中b"))
    assert context.ids == [characters.byte_ids[97], 0, characters.byte_ids[98]]
    assert bridge.failures == {"unencodable": 3}

    bridge = make_bridge(characters, byte_level)
    context = opened(bridge, characters.encode("x"))
    (proposal,) = bridge.to_target([context], [byte_level.encode(" yé z")], [9])
    assert characters.decode_bytes(proposal) == b" y"
    assert 0 not in proposal


@pytest.mark.parametrize("step", [1, 4, 10_000])
@pytest.mark.parametrize("name", ["characters", "characters-silent"])
def test_each_byte_is_lost_once(variants: Family, family: Family, name: str, step: int) -> None:
    """This holds for steps of any size, and if a control token ends the text."""
    target, drafter = family["byte-level"], variants[name]
    text = "naïve café costs 5 € – déjà vu, über all. " * 8 + "中文" * 700
    ids = [*target.encode(text), 1, *target.encode("é" * 5)]
    bridge = make_bridge(target, drafter, target_eos=[1], drafter_eos=[drafter.byte_ids[0]])
    context = bridge.open()
    for at in range(0, len(ids), step):
        bridge.extend([context], [ids[at : at + step]])
    lost = sum(len(char.encode()) for char in text + "é" * 5 if not char.isascii())
    assert bridge.failures == {"unencodable": lost}


@pytest.mark.parametrize("name", ["wordpiece", "unigram-words", "byte-level-lowercase"])
def test_a_lossy_drafter_drafts(variants: Family, family: Family, name: str) -> None:
    """Lowercase words without punctuation come back as the target's own tokens."""
    target, drafter = family["byte-level"], variants[name]
    ids = target.encode("return the first value in this list of names")
    bridge = make_bridge(target, drafter)
    context = bridge.open()
    for end in range(1, len(ids)):
        bridge.extend([context], [ids[end - 1 : end]])
        rest = target.decode_bytes(ids[end:])
        if rest.startswith(b" "):
            assert bridge.to_target([context], [drafter.encode_bytes(rest)], [99]) == [ids[end:]]
    assert not bridge.failures


def test_words_start_with_their_space(variants: Family) -> None:
    """The space before the first word is not part of the text. A decoder omits it."""
    for name in ("wordpiece", "wordpiece-cased", "unigram-words"):
        assert variants[name].leading_space == LeadingSpace("first", unless_present=True)
        assert variants[name].normalize("no spaces") == " no spaces"


def test_dropout_is_switched_off_in_the_copy_alone(backends: dict[str, Any]) -> None:
    spec = json.loads(backends["byte-level"].to_str())
    spec["model"]["dropout"] = 0.5
    original = Tokenizer.from_str(json.dumps(spec))
    tokenizer = load_tokenizer(original)
    text = "return the first value " * 5
    assert {tuple(tokenizer.encode(text)) for _ in range(20)} == {
        tuple(backends["byte-level"].encode(text).ids)
    }
    assert original.model.dropout == 0.5


def test_a_special_token_that_merges_lead_to() -> None:
    """The merges of a hidden piece go with it. Without them, `tokenizers` refuses the model."""
    vocabulary = {"<": 0, "s": 1, ">": 2, "s>": 3, "<s>": 4, "a": 5, "a<": 6}
    model = FastModel(BPE(vocabulary, [("s", ">"), ("<", "s>"), ("a", "<")]), PieceRule())
    hidden = model.without({4: "<s>", 6: "a<"})
    assert [token.value for token in hidden.model.tokenize("a<s>")] == ["a", "<", "s>"]
    assert [token.value for token in model.model.tokenize("a<s>")] == ["a", "<s>"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"normalization_rule_name": "identity", "remove_extra_whitespaces": False}, ""),
        ({"normalization_rule_name": "nmt_nfkc_cf"}, "applies nmt_nfkc_cf, removes white space"),
    ],
)
def test_losses_of_sentencepiece_files(settings: dict[str, Any], reason: str) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20),
        model_writer=model,
        vocab_size=420,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    assert lossy_reason(model.getvalue()).startswith(reason)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    tokenizer = load_tokenizer(processor, "trained")
    assert bool(tokenizer.lossy_reason) == bool(reason)
    for text in TEXTS:
        assert_lawful(tokenizer, text)
    assert tokenizer.normalize(" Ａ  B ") == ("a b" if reason else " Ａ  B ")


def test_undecodable_bytes_after_composed_text(family: Family) -> None:
    """In a text of any length, no character is split before it is composed."""
    tokenizer = family["byte-level-nfc"]
    for count in range(1, 40):
        jamo = "\u1100\u1161\u11a8" * count
        ids = tokenizer.encode_bytes(jamo.encode() + b"\xc3")
        assert tokenizer.decode_bytes(ids) == "각".encode() * count + b"\xc3"
