# SPDX-License-Identifier: Apache-2.0
"""Small tokenizers of every supported family, trained on the standard library's sources."""

import importlib.resources
import importlib.util
import io
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
MULTILINGUAL = [
    "中文字符和一些汉字 한국어 테스트 naïve café Größe Ελληνικά русский текст 🙂👩‍👩‍👧\n"
] * 40


def corpus() -> list[str]:
    sources = sorted(Path(os.__file__).parent.glob("*.py"))[:60]
    return [path.read_text(encoding="utf-8", errors="ignore") for path in sources] + MULTILINGUAL


def split_by(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Byte-level words are the matches of the patterns, and the text between them."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def train_bytes(
    vocab_size: int, special: Sequence[str], words: Any, normalizer: Any = None
) -> Tokenizer:
    """Byte-level BPE with special tokens, and `words` as pre-tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def train_byte_level(vocab_size: int, *, nfc: bool = False) -> Tokenizer:
    """GPT-2's recipe, with special tokens and two added tokens that are ordinary text."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    normalizer = normalizers.NFC() if nfc else None
    tokenizer = train_bytes(vocab_size, ["<|endoftext|>", "<|user|>"], words, normalizer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False, rstrip=True), " " * 17])
    return tokenizer


def train_sentencepiece(vocab_size: int, texts: Sequence[str] = ()) -> Tokenizer:
    """Llama 2's layout: a prepended space, no pre-tokenizer, byte fallback, BOS by template."""
    learner = Tokenizer(models.BPE(unk_token="<unk>"))
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<unk>"], limit_alphabet=120, show_progress=False
    )
    learner.train_from_iterator(texts or corpus(), trainer)
    learned: dict[str, Any] = json.loads(learner.to_str())["model"]
    pieces = sorted(learned["vocab"], key=learned["vocab"].__getitem__)[1:]
    vocabulary = {p: i for i, p in enumerate(["<unk>", "<s>", "</s>", *BYTE_PIECES, *pieces])}
    merges = [tuple(merge) for merge in learned["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    prepend_space = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(prepend_space)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    spec = json.loads(tokenizer.to_str()) | {"post_processor": template}
    return Tokenizer.from_str(json.dumps(spec))


def train_unigram(vocab_size: int, texts: Sequence[str] = ()) -> Tokenizer:
    """A Unigram model with Metaspace, which puts a space before the first text only."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    alphabet = sorted(set("".join(texts or corpus()).replace(" ", "▁")))
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", "</s>"],
        unk_token="<unk>",
        initial_alphabet=alphabet,
        show_progress=False,
    )
    some = texts or [*random.Random(0).sample(corpus()[:20], 8), *MULTILINGUAL]
    tokenizer.train_from_iterator(some, trainer)
    return tokenizer


def build_tiktoken() -> Any:
    tiktoken = pytest.importorskip("tiktoken")
    words = [b" t", b"he", b" the", b"re", b"in", b"  ", "中".encode()[:2], "中".encode()]
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {word: 256 + index for index, word in enumerate(words)}
    return tiktoken.Encoding(
        "handful",
        pat_str=r"""[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+""",
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": len(ranks) + 2},
    )


def build_processor() -> Any:
    """A SentencePiece model of the original library, with byte fallback and a dummy prefix."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(corpus()[:20]).splitlines()),
        model_writer=model,
        vocab_size=800,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def with_byte_fallback(unigram: Tokenizer) -> Tokenizer:
    """A Unigram model that spells characters without a token byte by byte."""
    spec: dict[str, Any] = json.loads(unigram.to_str())
    spec["model"] |= {"byte_fallback": True}
    spec["model"]["vocab"] += [[piece, 0.0] for piece in BYTE_PIECES]
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def in_words(unigram: Tokenizer) -> Tokenizer:
    """T5's layout: NFKC, no runs of spaces, and a space before every word."""
    tokenizer = Tokenizer.from_str(unigram.to_str())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def train_wordpiece(vocab_size: int) -> Tokenizer:
    """BERT's recipe: lowercase, no accents, punctuation separated from words."""
    tokenizer = Tokenizer(models.WordPiece({}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def cased_wordpiece(wordpiece: Tokenizer) -> Tokenizer:
    """WordPiece without normalization, whose words are separated by white space only."""
    tokenizer = Tokenizer.from_str(wordpiece.to_str())
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


def build_characters(**options: Any) -> Tokenizer:
    """One token for each printable ASCII character. With `unk_token`, others are unknown."""
    vocabulary = {piece: i for i, piece in enumerate(["<unk>", *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], **options))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


def build_bytes(merges: str = "", special: Sequence[str] = ()) -> Tokenizer:
    """Byte-level BPE that merges across words: 256 bytes, and merges such as "h e,he l"."""
    pairs = [tuple(merge.split()) for merge in merges.split(",") if merge]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, pairs)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    return tokenizer


def altered(tokenizer: Tokenizer, **sections: Any) -> Tokenizer:
    """Return a copy with other components around the same model."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    for name, component in sections.items():
        setattr(copy, name, component)
    return copy


def mistral_files() -> list[Path]:
    """Return all tokenizer files of mistral_common, or an empty list if it is not installed."""
    if importlib.util.find_spec("mistral_common") is None:
        return []
    data = Path(str(importlib.resources.files("mistral_common"))) / "data"
    return sorted([*data.glob("tekken*.json"), *data.glob("*.model.v*")])
