# SPDX-License-Identifier: Apache-2.0
"""Random cases for the token bridge: texts of every kind, arbitrary ids, and a walk over them."""

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from vllm_hetero_spec.text.tokenizer import TextTokenizer

# Largest size of a repeated piece, in bytes: more than TAIL_CHARACTERS of `text/cuts.py`.
LONGEST = 1300

CODE = [
    *["def f(self, x):\n", "    return", "\n        ", "self.value", " = ", "==", "x", "in", "the"],
    *["snake_case", "camelCase", "don't", "'s", "(", ");", "{}", '"', "#", "//", "0x1F", "3.1e-10"],
    *["'%(default)s'", "((a", "...b", "->c", "$d", "::e", "\\n\\", "``f``", "__init__", "f'{x!r}'"],
    *["12345678901234", "import numpy as np\n", "\tif a:\n\t\tb", "https://a.b/c?d=e&f", " ret"],
    *["urn", "New York", "imp", "ort", " quick brown fox", ".", ",", ":", "...", "!!", " a", " b"],
    "=" * 40,
]
SCRIPTS = [
    *["中文字符", "和一些汉字。", "，", "日本語テキスト", "한국어 테스트", "русский текст"],
    *["Ελληνικά", "ไทย", "العربية", "עברית", "हिन्दी", "naïve café", "Größe", "ß", "Å", "İ"],
    *["ﬁ", "Ⅷ", "①", "ſ"],
]
COMBINING = [
    *["cafe\u0301", "caf\u00e9", "A\u030a\u0323", "\u1e9b\u0323", "\u0301", "q\u0307\u0323"],
    *["\u1100\u1161\u11a8", "\uac01", "\u1100", "\u1161", "\u11a8", "\u09c7\u09be", "\u09be"],
    *["\u304b\u3099", "\u0344", "\u212b", "\u0958", "o" + "\u0336\u0301" * 9, "\u0316\u0301" * 4],
]
EMOJI = [
    *["🙂", "👩‍👩‍👧‍👦", "👍🏽", "🇫🇷", "🇫", "❤\ufe0f", "\u200d", "\ufe0f", "🏳️‍🌈"],
    "\U000e0067\U000e007f",
]
SPACES = [
    *[" ", " ", "  ", "   ", "    ", " " * 8, " " * 16, " " * 17, " " * 40, "\n", "\n\n"],
    *["\n\n\n", "\r\n", "\r", "\t", "\t\t", " \n", "\n ", "\n    ", " \t ", "\n" * 20, "\u00a0"],
    *["\u3000", "\u2028", "\u200b", "\x0b", "\x0c", "\x1c", "\x85", "\ufeff", "\u2009 ", " \u00a0"],
]
LOOKALIKES = [
    *["<|endoftext|>", "</s>", "<s>", "<unk>", "<|im_start|>user\n", "<|im_end|>", "[INST]"],
    *["[/INST]", "<0x0A>", "<0xE4>", "<think>", "</think>   ", "<|user|>", "<|eot_id|>", "[PAD]"],
    *["[UNK]", "##ing", "<|endof", "text|>", "<", "|>", "\u2581", "\u2581the", "Ġthe", "Ċ"],
    *["<fim_prefix>", "<｜User｜>"],
]
CONTROLS = [chr(code) for code in (*range(32), 0x7F, 0x80, 0x9F)]
# Both parts of characters cut at every byte, and bytes that begin no character.
TRUNCATED = [
    piece
    for char in ("é", "中", "한", "👍", "\u0301", "\u2581", "\ufeff")
    for data in [char.encode()]
    for at in range(1, len(data))
    for piece in (data[:at], data[at:])
] + [b"\xff", b"\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80" * 5, b"\xe4\xb8 "]
# In 64ths of the sequence. Positive: append. Negative: a new context of a shorter text.
# 0: append nothing.
STEPS = (1, 1, 1, 2, 2, 3, 4, 6, 9, 20, 64, 0, -1, -1, -2, -3, -5, -9, -20, -64)


@dataclass(frozen=True)
class Case:
    """One target sequence for one pair of tokenizers, and one walk over it.

    Attributes:
        pair: Names of the target and of the drafter.
        stretches: Bytes, which the target encodes, or tuples of (kind, value) for `arbitrary_id`.
        steps: See STEPS.
        limit: Largest number of target tokens in a draft.
        noise: Arbitrary drafter ids, which are also drafted.
        eager: Use EAGER_LIMITS, which cut contexts early.
    """

    pair: tuple[str, str]
    stretches: tuple[bytes | tuple[tuple[str, int], ...], ...]
    steps: tuple[int, ...]
    limit: int = 99
    noise: tuple[tuple[str, int], ...] = ()
    eager: bool = False


def _fragments() -> st.SearchStrategy[bytes]:
    pools = [CODE, SCRIPTS, COMBINING, EMOJI, SPACES, SPACES, CODE, LOOKALIKES, CONTROLS]
    encoded = [[text.encode() for text in pool] for pool in pools]
    pieces = [piece for pool in encoded for piece in pool]
    return st.one_of(
        *(st.sampled_from(pool) for pool in encoded),
        st.sampled_from(TRUNCATED),
        st.binary(max_size=6),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=6).map(str.encode),
        st.builds(repeated, st.sampled_from([*pieces, *TRUNCATED]), st.integers(1, LONGEST)),
    )


def repeated(piece: bytes, size: int) -> bytes:
    """Return about ``size`` bytes of repeated copies of a piece, at least one copy."""
    return piece * max(1, size // len(piece))


_arbitrary = st.lists(
    st.tuples(st.sampled_from(["id", "id", "byte", "special", "beyond"]), st.integers(0, 1 << 20)),
    max_size=8,
).map(tuple)
_texts = st.lists(_fragments(), min_size=3, max_size=40).map(b"".join)


def cases(pairs: Sequence[tuple[str, str]]) -> st.SearchStrategy[Case]:
    """Cases, evenly distributed over ``pairs`` of names (target, drafter)."""
    stretches = st.lists(st.one_of(_texts, _texts, _texts, _arbitrary), min_size=1, max_size=3)
    return st.builds(
        Case,
        pair=st.sampled_from(pairs),
        stretches=st.one_of(_texts.map(lambda text: (text,)), stretches.map(tuple)),
        steps=st.lists(st.sampled_from(STEPS), min_size=2, max_size=10).map(tuple),
        limit=st.sampled_from([99, 99, 99, 5, 1, 0, -1]),
        noise=_arbitrary,
        eager=st.booleans(),
    )


def arbitrary_id(tokenizer: TextTokenizer, kind: str, value: int) -> int:
    """Return an id of a kind.

    "id": any id, or one of a few negative ones. "beyond": no id of the vocabulary. "byte": a token
    of a single byte. "special": a special token, if the tokenizer has any.
    """
    size = tokenizer.vocab_size
    if kind == "beyond":
        return size + value % 9
    if kind == "byte":
        return tokenizer.byte_ids[value % 256]  # -1 if the byte has no token
    if kind == "special" and tokenizer.special_ids:
        return sorted(tokenizer.special_ids)[value % min(9, len(tokenizer.special_ids))]
    return value % (size + 4) - 4
