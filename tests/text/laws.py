# SPDX-License-Identifier: Apache-2.0
"""Assertions that hold for every accepted tokenizer, and texts for them."""

import unicodedata

from tokenizers import Tokenizer

from vllm_hetero_spec.text.tokenizer import TextTokenizer

TEXTS = [
    "def f(x):\n    return  x+1\t# comment\r\n\r\n\tend",
    "中文字符，没有空格。한국어 테스트 русский",
    "emoji 👩‍👩‍👧‍👦 👍🏽 🇫🇷 and cafe\u0301 nai\u0308ve A\u030a \u1e9b\u0323",
    "runs:" + " " * 17 + "x" + " " * 40 + "\n\n\n\n   \n\t\t\t y",
    "control \x01\x07\x1b[0m\x7f\0 end",
    "<|endoftext|> </s><s> <unk> <|im_start|>user [INST] <0x0A> <think> x",
    "don't 12345 3.14159e-10 snake_case __init__ https://a.b/c?d=e&f",
    " leading and trailing ",
    "\u00a0no-break\u3000wide\u2028line\u200bzero ﬁ Ⅷ ẞ",
    "##a @@b ▁x [UNK] [SEP] <0xE4> \u0338 x",
    "",
]


def expected(text: str, tokenizer: TextTokenizer) -> str:
    """Return the documented normalization of ``text``, computed without the package."""
    if any(mark in tokenizer.name for mark in ("nfc", "qwen")):
        return unicodedata.normalize("NFC", text)
    marks = ("sentencepiece", "unigram", "processor", "llama-2", "mistral", "phi-3", "model")
    if any(mark in tokenizer.name for mark in (*marks, "codellama", "tinyllamas")):
        return text.replace("▁", " ")
    return text


def encoded(tokenizer: TextTokenizer, text: str) -> tuple[bytes, int]:
    """Return the bytes of a text's ids, and the reported number of lost bytes.

    None of the ids may be special, except the unknown token.
    """
    ids = tokenizer.encode(text)
    assert tokenizer.special_ids.isdisjoint(set(ids) - {tokenizer.unknown_id})
    return tokenizer.decode_bytes(ids), tokenizer.lost_bytes(text, ids)


def assert_exact(tokenizer: TextTokenizer, text: str) -> None:
    spelled, dropped = encoded(tokenizer, text)
    assert tokenizer.normalize(text) == expected(text, tokenizer)
    whole = expected(text, tokenizer).encode("utf-8", "surrogateescape")
    assert len(spelled) + dropped == len(whole)
    if dropped:
        assert not tokenizer.spells_all
        rest = iter(whole)
        assert all(byte in rest for byte in spelled)
    else:
        assert spelled == whole


def assert_lawful(tokenizer: TextTokenizer, text: str) -> None:
    """The ids spell the normalized text without the lost bytes, and these are counted."""
    spelled, dropped = encoded(tokenizer, text)
    whole = tokenizer.normalize(text).encode("utf-8", "surrogateescape")
    rest = iter(whole)
    assert len(spelled) + dropped == len(whole)
    assert all(byte in rest for byte in spelled)
    assert not (dropped and tokenizer.spells_all)


def assert_written_as_by_the_decoder(
    tokenizer: TextTokenizer, backend: Tokenizer, anchor: str, step: int = 1
) -> None:
    """Each token has the bytes with which the library decodes it behind the token `anchor`."""
    first = backend.token_to_id(anchor)
    ids = [i for i, data in enumerate(tokenizer.token_bytes) if data][::step]
    alone = backend.decode([first], skip_special_tokens=False)
    decoded = backend.decode_batch([[first, i] for i in ids], skip_special_tokens=False)
    for token_id, text in zip(ids, decoded, strict=True):
        written = alone.encode() + tokenizer.token_bytes[token_id]
        assert written.decode("utf-8", "replace") == text, token_id


def not_text(tokenizer: TextTokenizer) -> list[int]:
    """Return the ids whose bytes alone are not valid UTF-8."""
    return [
        i
        for i, data in enumerate(tokenizer.token_bytes)
        if data.decode("utf-8", "ignore").encode() != data
    ]
