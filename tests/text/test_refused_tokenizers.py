# SPDX-License-Identifier: Apache-2.0
"""Tokenizers whose bytes cannot be determined: they are refused with one sentence."""

import json
import random
from typing import Any

import pytest
from laws import TEXTS, assert_lawful
from recipes import altered, build_characters
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from vllm_hetero_spec.text.loading import load_tokenizer
from vllm_hetero_spec.text.tokenizer import UnsupportedTokenizer


def refused(tokenizer: Any, sentence: str) -> None:
    with pytest.raises(UnsupportedTokenizer, match=sentence) as error:
        load_tokenizer(tokenizer, "given")
    assert str(error.value).startswith("given: ")
    assert "\n" not in str(error.value)


def test_decoders_that_do_not_give_bytes_are_refused() -> None:
    plain = build_characters(unk_token="<unk>")
    for decoder, sentence in (
        (decoders.BPEDecoder(), "its decoder has a BPEDecoder step"),
        (decoders.CTC(), "its decoder has a CTC step"),
        (decoders.Strip(" ", 1, 0), "its decoder has a Strip step"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "b")]), "across tokens"),
        (decoders.Replace(Regex("a+"), "b"), "its decoder has a Replace step"),
    ):
        refused(altered(plain, decoder=decoder), sentence)
    spec = json.loads(plain.to_str()) | {"decoder": None}
    refused(Tokenizer.from_str(json.dumps(spec)), "it has no decoder")


def test_a_decoder_of_another_family_is_refused(backends: dict[str, Any]) -> None:
    for decoder in (decoders.Fuse(), decoders.WordPiece(cleanup=False)):
        refused(altered(backends["byte-level"], decoder=decoder), "do not spell the text")
    refused(altered(backends["sentencepiece"], decoder=decoders.Fuse()), "do not spell the text")


def test_contractions_that_depend_on_their_word_are_refused() -> None:
    words = ["[UNK]", *"abcdefghijklmnopqrstuvwxyz':.,1234567890", "'s"]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece()
    refused(tokenizer, 'joins contractions such as "\'s"')
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    refused(tokenizer, "cannot spell ordinary text")  # single letters are not words


def test_vocabularies_that_cannot_be_used_are_refused() -> None:
    refused(altered(Tokenizer(models.BPE()), decoder=decoders.Fuse()), "its vocabulary is empty")
    sparse = Tokenizer(models.BPE({"a": 0, "b": 4_294_967_295}, []))
    sparse.decoder = decoders.Fuse()
    refused(sparse, "different ids up to 4294967295")
    twice = Tokenizer(models.BPE({"a": 0, "b": 0}, []))
    twice.decoder = decoders.Fuse()
    refused(twice, "2 tokens have 1 different ids")
    few = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    few.decoder = decoders.Fuse()
    refused(few, "cannot spell ordinary text: 3. of the 37 bytes")
    unigram = Tokenizer(models.Unigram([("a", -1.0)]))
    unigram.decoder = decoders.Metaspace()
    refused(unigram, "its Unigram model has no unknown token")
    nameless = Tokenizer(models.WordPiece({"a": 0}, unk_token="[UNK]"))
    nameless.decoder = decoders.WordPiece()
    refused(nameless, "its WordPiece model has no unknown token")
    refused(build_characters(unk_token="<missing>"), "its BPE model has no unknown token")
    refused({}, "a dict is not a tokenizer")


def test_errors_of_the_library_are_refusals(backends: dict[str, Any]) -> None:
    class Custom:
        def pre_tokenize(self, pretok: Any) -> None:
            raise RuntimeError("out of order")

    broken = altered(
        backends["byte-level"], pre_tokenizer=pre_tokenizers.PreTokenizer.custom(Custom())
    )
    refused(broken, "reading its tokens failed")


def test_random_damage_is_survived_or_refused(variant_backends: dict[str, Tokenizer]) -> None:
    """If parts of its JSON are missing, a tokenizer is either refused or still correct."""
    rng = random.Random(0)
    outcomes = {"loaded": 0, "refused": 0}
    for name in ("bytes", "wordpiece", "unigram-fallback", "characters"):
        text = variant_backends[name].to_str()
        for _ in range(40):
            spec = json.loads(text)
            for _ in range(rng.randint(1, 3)):
                damage(spec, rng)
            backend = Tokenizer.from_str(json.dumps(spec))
            try:
                tokenizer = load_tokenizer(backend, name)
            except UnsupportedTokenizer:
                outcomes["refused"] += 1
                continue
            outcomes["loaded"] += 1
            for sample in TEXTS[:4]:
                assert_lawful(tokenizer, sample)
    assert min(outcomes.values()) >= 10, outcomes


def damage(spec: dict[str, Any], rng: random.Random) -> None:
    section = rng.choice(["decoder", "normalizer", "pre_tokenizer", "added_tokens", "model"])
    part = spec[section]
    if section == "added_tokens":
        spec[section] = part[: rng.randrange(len(part) + 1)]
    elif section != "model" or not isinstance(part["vocab"], dict):
        spec[section] = None if section != "model" else part | {"unk_id": None}
    else:
        pieces = sorted(part["vocab"])
        for piece in rng.sample(pieces, len(pieces) // rng.choice([2, 10, 50])):
            del part["vocab"][piece]
