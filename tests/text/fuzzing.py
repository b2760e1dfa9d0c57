# SPDX-License-Identifier: Apache-2.0
"""Cases for the token bridge, what has to hold in each of them, and a driver for any number.

A case is a target sequence (canonical ids of a text, arbitrary ids, or both) for one pair of
tokenizers and a walk over it: append, roll back, draft. After every step the context is compared
with a model that reads the whole sequence from scratch, and a draft of what follows is translated.
"""

import random
from codecs import utf_8_decode
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from unicodedata import combining

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from vllm_hetero_spec.text import context as context_module
from vllm_hetero_spec.text import drafts as drafts_module
from vllm_hetero_spec.text.bridge import TextBridge, make_bridge
from vllm_hetero_spec.text.context import TextContext
from vllm_hetero_spec.text.special_tokens import UNKNOWN_ID, SpecialTokens
from vllm_hetero_spec.text.tokenizer import TextTokenizer

# Cases of one hypothesis run: it remembers all it has tried, so a long run is many short ones.
CHUNK = 400
# Bytes of a repeated piece at most: more than a tail may have characters.
LONGEST = 1300
# Target ids drafted ahead at each step.
AHEAD = 24
DOCUMENTED_FAILURES = {"unknown_id", "held_mismatch", "unencodable"}
# What makes a context cut early and often, so that short texts meet every kind of cut.
EAGER_LIMITS = {
    "TAIL_TOKENS": 2,
    "SPACELESS_TOKENS": 12,
    "SPACELESS_KEEP": 5,
    "TAIL_CHARACTERS": 60,
}

CODE = [
    *["def f(self, x):\n", "    return", "\n        ", "self.value", " = ", "==", "x", "in", "the"],
    *[
        "snake_case",
        "camelCase",
        "don't",
        "'s",
        "(",
        ");",
        "{}",
        '"',
        "#",
        "//",
        "0x1F",
        "3.14e-10",
    ],
    *[
        "12345678901234",
        "import numpy as np\n",
        "\tif a:\n\t\tb",
        "https://a.b/c?d=e&f",
        " ret",
        "urn",
    ],
    *[
        "New York",
        "imp",
        "ort",
        " quick brown fox",
        ".",
        ",",
        ":",
        "...",
        "!!",
        " a",
        " b",
        "=" * 40,
    ],
]
SCRIPTS = [
    *[
        "中文字符",
        "和一些汉字。",
        "，",
        "日本語テキスト",
        "한국어 테스트",
        "русский текст",
        "Ελληνικά",
        "ไทย",
    ],
    *["العربية", "עברית", "हिन्दी", "naïve café", "Größe", "ﬁ", "Ⅷ", "①", "ſ", "İ", "ß", "Å"],
]
COMBINING = [
    *["cafe\u0301", "caf\u00e9", "A\u030a\u0323", "\u1e9b\u0323", "\u0301", "q\u0307\u0323"],
    *["\u1100\u1161\u11a8", "\uac01", "\u1100", "\u1161", "\u11a8", "\u09c7\u09be", "\u09be"],
    *["\u304b\u3099", "\u0344", "\u212b", "\u0958", "o" + "\u0336\u0301" * 9, "\u0316\u0301" * 4],
]
EMOJI = [
    *[
        "🙂",
        "👩‍👩‍👧‍👦",
        "👍🏽",
        "🇫🇷",
        "❤\ufe0f",
        "\u200d",
        "\ufe0f",
        "🏳️‍🌈",
        "🇫",
        "\U000e0067\U000e007f",
    ],
]
SPACES = [
    *[" ", " ", "  ", "   ", "    ", " " * 8, " " * 16, " " * 17, " " * 40, "\n", "\n\n", "\n\n\n"],
    *[
        "\r\n",
        "\r",
        "\t",
        "\t\t",
        " \n",
        "\n ",
        "\n    ",
        " \t ",
        "\u00a0",
        "\u3000",
        "\u2028",
        "\u200b",
    ],
    *["\x0b", "\x0c", "\x1c", "\x85", "\ufeff", "\u2009 ", " \u00a0", "\n" * 20],
]
LOOKALIKES = [
    *[
        "<|endoftext|>",
        "</s>",
        "<s>",
        "<unk>",
        "<|im_start|>user\n",
        "<|im_end|>",
        "[INST]",
        "[/INST]",
    ],
    *[
        "<0x0A>",
        "<0xE4>",
        "<think>",
        "</think>   ",
        "<|user|>",
        "<|eot_id|>",
        "[PAD]",
        "[UNK]",
        "##ing",
    ],
    *[
        "<|endof",
        "text|>",
        "<",
        "|>",
        "\u2581",
        "\u2581the",
        "Ġthe",
        "Ċ",
        "<fim_prefix>",
        "<｜User｜>",
    ],
]
CONTROLS = [chr(code) for code in (*range(32), 0x7F, 0x80, 0x9F)]
# Characters cut at every byte, from either end, and bytes that begin no character.
TRUNCATED = [
    piece
    for char in ("é", "中", "한", "👍", "\u0301", "\u2581", "\ufeff")
    for data in [char.encode()]
    for at in range(1, len(data))
    for piece in (data[:at], data[at:])
] + [b"\xff", b"\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80" * 5, b"\xe4\xb8 "]

# Appends (positive) and roll backs (negative) in units of a 64th of the sequence, 0: nothing new.
STEPS = (1, 1, 1, 2, 2, 3, 4, 6, 9, 20, 64, 0, -1, -1, -2, -3, -5, -9, -20, -64)


class Violation(AssertionError):
    """An invariant of the bridge does not hold."""


def require(holds: bool, what: str, *details: object) -> None:
    if not holds:
        raise Violation(f"{what}: " + ", ".join(map(repr, details)))


@dataclass(frozen=True)
class Case:
    """One text, one pair and one walk.

    ``stretches``: bytes are encoded by the target; a tuple of (kind, value) is arbitrary ids, see
    ``arbitrary_id``. ``steps``: see STEPS. ``noise``: arbitrary ids that are drafted, too.
    ``eager``: with EAGER_LIMITS.
    """

    pair: tuple[str, str]
    stretches: tuple[bytes | tuple[tuple[str, int], ...], ...]
    steps: tuple[int, ...]
    limit: int = 99
    noise: tuple[tuple[str, int], ...] = ()
    eager: bool = False


@dataclass
class Counts:
    """What a run has seen."""

    cases: int = 0
    pairs: set[tuple[str, str]] = field(default_factory=set)
    seen: Counter[str] = field(default_factory=Counter)

    def share(self, part: str, whole: str) -> float:
        return self.seen[part] / max(1, self.seen[whole])

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {count}" for name, count in sorted(self.seen.items()))
        return f"{self.cases} cases, {len(self.pairs)} pairs, {figures}"


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
    """A piece over and over, ``size`` bytes of it."""
    return piece * max(1, size // len(piece))


_arbitrary = st.lists(
    st.tuples(st.sampled_from(["id", "id", "byte", "special", "beyond"]), st.integers(0, 1 << 20)),
    max_size=8,
).map(tuple)
_texts = st.lists(_fragments(), min_size=3, max_size=40).map(b"".join)


def cases(pairs: Sequence[tuple[str, str]]) -> st.SearchStrategy[Case]:
    """Cases spread evenly over ``pairs``, which name (target, drafter)."""
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
    """An id by kind: any (and a few negative ones), none at all, a single byte, a special one."""
    size = tokenizer.vocab_size
    if kind == "beyond":
        return size + value % 9
    if kind == "byte":
        return tokenizer.byte_ids[value % 256]  # -1 where there is none
    if kind == "special" and tokenizer.special_ids:
        return sorted(tokenizer.special_ids)[value % min(9, len(tokenizer.special_ids))]
    return value % (size + 4) - 4


class Scratch(NamedTuple):
    """A target sequence read from scratch: what a context of it stands for."""

    closed: list[tuple[str, int]]  # texts that end in a special token of the drafter, and that
    text: str  # after the last of them
    held: bytes
    untouched: tuple[bool, bool]


class Pair:
    """A bridge with the model it is compared with."""

    def __init__(self, target: TextTokenizer, drafter: TextTokenizer) -> None:
        bridge = make_bridge(target, drafter, mode="text")
        assert isinstance(bridge, TextBridge)
        self.bridge, self.target, self.drafter = bridge, target, drafter
        self.special = SpecialTokens(target, drafter, None, None)

    def ids_of(self, case: Case) -> list[int]:
        """The target sequence of a case, with the spaces its tokenizer itself puts before text."""
        ids: list[int] = []
        for stretch in case.stretches:
            if isinstance(stretch, bytes):
                last = ids[-1] if ids else None
                begins = last is None or last in self.special.target_control
                leading = self.target.leading_space
                present = leading.unless_present and stretch.startswith(b" ")
                if begins and not present and leading.applies(first=last is None):
                    stretch = b" " + stretch
                encoded = self.target.encode_bytes(stretch)
                require_spelled(self.target, encoded, stretch.decode("utf-8", "surrogateescape"))
                ids += encoded
            else:
                ids += [arbitrary_id(self.target, *drawn) for drawn in stretch]
        return ids

    def scratch(self, target_ids: Sequence[int]) -> Scratch:
        """The model: stretches of text between control tokens, each encoded as a whole."""
        target, drafter = self.target, self.drafter
        strip = target.leading_space.applies(first=True)
        add = drafter.leading_space.applies(first=True)
        closed: list[tuple[str, int]] = []
        data = b""
        for place, token_id in enumerate(target_ids):
            known = token_id if 0 <= token_id < target.vocab_size else UNKNOWN_ID
            mapped: int | bytes = b""
            if known not in self.special.target_control:
                mapped = target.token_bytes[known]
            elif place == 0 and known == target.bos_id:
                continue
            else:
                mapped = self.special.to_drafter(known)
            if isinstance(mapped, int):
                text = self._text(data.decode("utf-8", "surrogateescape"), add)
                closed.append((text, mapped))
                data, add = b"", drafter.leading_space.applies(first=False)
            elif mapped:
                data += mapped.removeprefix(b" ") if strip else mapped
                strip = False
            if known in self.special.target_control:
                strip = target.leading_space.applies(first=False)
        held = incomplete(data)
        complete = data[: len(data) - len(held)].decode("utf-8", "surrogateescape")
        text = self._text(complete, add)
        return Scratch(closed, text, held, (strip, add and not complete))

    def first_ids(self) -> list[int]:
        """Drafter ids before any text."""
        bos = self.drafter.bos_id
        return [bos] if self.drafter.adds_bos and bos is not None else []

    def whole(self, scratch: Scratch) -> list[int]:
        """The drafter ids of it."""
        ids = self.first_ids()
        for text, control in scratch.closed:
            ids += [*self.drafter.encode(text), control]
        return ids + self.drafter.encode(scratch.text)

    def _text(self, text: str, add: bool) -> str:
        present = self.drafter.leading_space.unless_present and text.startswith(" ")
        return " " + text if add and text and not present else text


def require_spelled(tokenizer: TextTokenizer, ids: Sequence[int], *texts: str) -> None:
    """The bytes of the ids are those of the texts, as far as the vocabulary can spell them."""
    spelled = tokenizer.decode_bytes(ids)
    expected = "".join(map(tokenizer.normalize, texts)).encode("utf-8", "surrogateescape")
    if tokenizer.lossless and spelled != expected:
        # Long words with undecodable bytes are encoded in pieces: order their combining marks.
        composed = tokenizer.normalize(spelled.decode("utf-8", "surrogateescape"))
        spelled = composed.encode("utf-8", "surrogateescape")
    if tokenizer.spells_all:
        require(spelled == expected, "bytes of the ids", spelled, expected)
    else:
        rest = iter(expected)
        require(all(byte in rest for byte in spelled), "bytes of the ids", spelled, expected)


def incomplete(data: bytes) -> bytes:
    """The beginning of a character at the end of ``data``."""
    return data[utf_8_decode(data, "surrogateescape", False)[1] :]


class Checker:
    """Checks cases of any pairs of the given tokenizers and counts what it has seen."""

    def __init__(self, tokenizers: Mapping[str, TextTokenizer]) -> None:
        self.tokenizers = tokenizers
        self.counts = Counts()
        self._pairs: dict[tuple[str, str], Pair] = {}

    @property
    def pair_names(self) -> list[tuple[str, str]]:
        return [(target, drafter) for target in self.tokenizers for drafter in self.tokenizers]

    def pair(self, names: tuple[str, str]) -> Pair:
        if names not in self._pairs:
            self._pairs[names] = Pair(self.tokenizers[names[0]], self.tokenizers[names[1]])
        return self._pairs[names]

    def check(self, case: Case) -> None:
        """All invariants of one case; raises Violation."""
        before = {name: getattr(context_module, name) for name in EAGER_LIMITS}
        try:
            for name, value in EAGER_LIMITS.items() if case.eager else ():
                setattr(context_module, name, value)
            Walk(self.pair(case.pair), case, self.counts.seen).run()
        finally:
            for name, value in before.items():
                setattr(context_module, name, value)
        self.counts.cases += 1
        self.counts.pairs.add(case.pair)


class Walk:
    """One case under way."""

    def __init__(self, pair: Pair, case: Case, seen: Counter[str]) -> None:
        self.pair, self.case, self.seen = pair, case, seen
        self.bridge = pair.bridge
        self.ids = pair.ids_of(case)
        self.canonical = all(isinstance(stretch, bytes) for stretch in case.stretches)
        self.noise = [arbitrary_id(pair.drafter, *drawn) for drawn in case.noise]
        self.context = self.bridge.open()

    def run(self) -> None:
        self.bridge.failures.clear()
        unit = max(1, len(self.ids) // 64)
        for step in self.case.steps:
            self.step(step * unit)
        self.step(len(self.ids))
        require(
            DOCUMENTED_FAILURES.issuperset(self.bridge.failures), "failures", self.bridge.failures
        )

    def step(self, amount: int) -> None:
        """Append or roll back, then compare everything there is."""
        context, at = self.context, self.context.num_target
        before = list(context.ids)
        if amount < 0:
            kept = context.rollback(max(0, at + amount))
        else:
            kept = self.bridge.extend([context], [self.ids[at : at + amount]])[0]
        at = min(len(self.ids), max(0, at + amount))
        require(not context.broken, "broken", self.bridge.failures)
        require(context.num_target == at, "number of target ids", context.num_target, at)
        known = [i if 0 <= i < self.pair.target.vocab_size else UNKNOWN_ID for i in self.ids[:at]]
        require(context.target_ids == known, "target ids", context.target_ids)
        require(0 <= kept <= min(len(before), len(context.ids)), "kept", kept)
        require(context.ids[:kept] == before[:kept], "ids that were to be kept", kept)
        scratch = self.pair.scratch(self.ids[:at])
        self.compare(context, scratch)
        if amount < 0:
            fresh = self.bridge.open()
            self.bridge.extend([fresh], [self.ids[:at]])
            self.compare(fresh, scratch)
        self.drafts(scratch)

    def compare(self, context: TextContext, scratch: Scratch) -> None:
        """A context is the whole text encoded, or differs where the drafter itself would."""
        drafter = self.pair.drafter
        whole = self.pair.whole(scratch)
        require(context.held == scratch.held, "held", context.held, scratch.held)
        require(context.untouched == scratch.untouched, "untouched", context.untouched)
        require(scratch.text.endswith(context.tail), "tail", context.tail)
        self.seen["contexts"] += 1
        inseparable = False
        if context.ids != whole:
            self.seen["contexts that differ"] += 1
            inseparable = explain_difference(self.pair, context, scratch)
        if inseparable:
            self.seen["contexts with other bytes"] += 1
        else:
            spelled = drafter.decode_bytes(context.ids)
            require(spelled == drafter.decode_bytes(whole), "bytes differ from scratch", spelled)
            texts = [text for text, _ in scratch.closed]
            require_spelled(drafter, context.ids, *texts, scratch.text)

    def drafts(self, scratch: Scratch) -> None:
        """The target's own next ids drafted, the same with an end cut off, and noise."""
        target, drafter, context = self.pair.target, self.pair.drafter, self.context
        at, limit = context.num_target, self.case.limit
        control = self.pair.special.target_control
        following = self.ids[at : at + AHEAD]
        text = next((i for i, t in enumerate(following) if t in control or t < 0), len(following))
        following = following[:text]
        if max(following, default=0) >= target.vocab_size:
            following = []
        while following and incomplete(scratch.held + target.decode_bytes(following)):
            following.pop()
        strip, add = context.untouched
        rest = scratch.held + target.decode_bytes(following)
        begins = not strip or rest.startswith(b" ")
        if strip:
            rest = rest.removeprefix(b" ")
        spaced = drafter.leading_space.unless_present and rest.startswith(b" ")
        if add and rest and not spaced:
            rest = b" " + rest
        ours = drafter.encode_bytes(rest)
        half = ours[: (len(ours) + 1) // 2]
        drafts = [ours, half, [*half, *self.noise, *ours], self.noise]
        proposals = self.bridge.to_target([context] * 4, drafts, [limit] * 4)
        require(len(proposals) == 4, "as many proposals as drafts", proposals)
        for draft, proposal in zip(drafts, proposals, strict=True):
            self.proposal(draft, proposal, scratch)
        exact = drafter.decode_bytes(ours) == rest and not (spaced and add)
        if following and begins and rest and exact and self.case.limit > 0:
            self.round_trip(following, proposals[0])
        candidates = [*self.noise, *ours[-2:], *ours[:2]]
        if candidates:
            choice = self.bridge.first_choice(context, candidates)
            require(choice in candidates, "first choice", choice, candidates)

    def proposal(self, draft: list[int], proposal: list[int], scratch: Scratch) -> None:
        """What holds for any draft: a prefix of the drafted bytes, no control id, the limit."""
        target, special = self.pair.target, self.pair.special
        require(len(proposal) <= max(0, self.case.limit), "limit", proposal)
        data, ended = drafted(self.pair, draft)
        data = respaced(self.pair, data, scratch.untouched)
        body = list(proposal)
        if body and body[-1] in special.target_control:
            require(ended and body.pop() == special.target_eos, "control id", proposal)
            spelled = target.decode_bytes(body)
            require(scratch.held + spelled == data, "text before EOS", spelled, data)
        require(special.target_control.isdisjoint(body), "control id", proposal)
        require(all(0 <= i < target.vocab_size for i in body), "ids", body)
        spelled = target.decode_bytes(body)
        if body:
            require(data.startswith(scratch.held + spelled), "drafted bytes", spelled, data)
        self.seen["proposals"] += bool(proposal)

    def round_trip(self, following: list[int], proposal: list[int]) -> None:
        """The target's own ids come back where its tokenizer has them so, read from the anchor."""
        known = self.ids[: self.context.num_target]
        anchor = anchor_of(self.pair, known)
        here = proposal == following[: self.case.limit]
        if self.canonical and following:
            self.seen["round trips"] += 1
            self.seen["round trips that differ"] += not here
        if not here:
            again = self.pair.target.encode_bytes(self.pair.target.decode_bytes(anchor + following))
            require(again != anchor + following, "round trip", anchor, following, proposal)


def anchor_of(pair: Pair, known: Sequence[int]) -> list[int]:
    """The documented anchor: back to a word, a control token or ANCHOR_TOKENS ids."""
    table = pair.target.token_bytes
    start = len(known)
    for start in range(len(known), max(0, len(known) - drafts_module.ANCHOR_TOKENS) - 1, -1):
        before = known[start - 1] if start else UNKNOWN_ID
        if not 0 <= before < len(table) or before in pair.special.target_control:
            break
        begins_word = start < len(known) and table[known[start]].startswith(b" ")
        if begins_word and not table[before][-1:].isspace():
            break
    while start < len(known) and 0x80 <= table[known[start]][0] < 0xC0:
        start += 1
    return list(known[start:])


def drafted(pair: Pair, draft: Sequence[int]) -> tuple[bytes, bool]:
    """Bytes of a draft up to the first id that is no text, and whether that one is an EOS."""
    table, control = pair.drafter.token_bytes, pair.special.drafter_control
    for place, token_id in enumerate(draft):
        if not 0 <= token_id < len(table) or token_id in control:
            spelled = b"".join(table[i] for i in draft[:place])
            return spelled, token_id in pair.special.drafter_eos
    return pair.drafter.decode_bytes(draft), False


def respaced(pair: Pair, data: bytes, untouched: tuple[bool, bool]) -> bytes:
    """Drafted bytes with the target's leading space in the place of the drafter's."""
    strip, add = untouched
    data = data.removeprefix(b" ") if add else data
    return b" " + data if strip and data else data


def explain_difference(pair: Pair, context: TextContext, scratch: Scratch) -> bool:
    """Ids that are not those of the whole text: every piece must be the drafter's own.

    Returns whether the text was so long without a place that normalisation does not look across
    (a run of combining marks, a word of a tokenizer that writes a space before each) that it was
    cut where it does.

    The ids between two cuts are those that the drafter gave for the text as it was when the second
    cut was made, and a cut was made only where it then gave the same ids for what followed; so the
    drafter, given more text, has changed its mind about what lies before the cut.
    """
    drafter, ids = pair.drafter, context.ids
    marks = [(mark, pair.scratch(context.target_ids[: mark.num_target])) for mark in context._marks]
    at, inseparable = len(pair.first_ids()), False
    for place, (text, control) in enumerate([*scratch.closed, (scratch.text, None)]):
        start = 0
        for mark, then in marks:
            if len(then.closed) == place:
                tail = then.text[start:]
                left, right = tail[: len(tail) - len(mark.tail)], mark.tail
                piece = ids[at : mark.cut]
                require(tail == left + right, "tail of a mark", tail, right)
                checked = piece + drafter.encode(right) in endings(drafter, tail)
                forced = len(tail) > context_module.TAIL_CHARACTERS
                whatever = forced and piece == drafter.encode(left)
                require(checked or whatever, "frozen ids", left, right, piece)
                if whatever and not separable(drafter, tail, len(left)):
                    places = range(1, len(left))
                    others = [place for place in places if separable(drafter, tail, place)]
                    others = [place for place in others if drafter.normalize(tail[:place])]
                    require(not others, "a better place to cut", left, right, others)
                    inseparable = True
                at, start = at + len(piece), start + len(left)
        rest = text[start:]
        if control is None:
            require(ids[at:] in endings(drafter, rest), "ids of the tail", rest, ids[at:])
        else:
            expected = [*drafter.encode(rest), control]
            require(ids[at : at + len(expected)] == expected, "ids before", control, rest)
            at += len(expected)
    return inseparable


def separable(tokenizer: TextTokenizer, text: str, at: int) -> bool:
    """Whether normalisation does not look across this place, whatever follows."""
    parts = tokenizer.normalize(text[:at]) + tokenizer.normalize(text[at:])
    return parts == tokenizer.normalize(text) and not combining(text[at])


def endings(drafter: TextTokenizer, text: str) -> list[list[int]]:
    """Ids of a text, and, where it ends in space, its ids as if a word followed."""
    found = [drafter.encode(text)]
    if text and text[-1].isspace():
        *followed, word = drafter.encode(text + "x")
        if drafter.token_bytes[word] == b"x":
            found.append(followed)
    return found


def fuzz(checker: Checker, count: int, *, start: int = 0) -> Counts:
    """Check ``count`` cases, spread over all pairs; the same ``start`` gives the same cases.

    Raises Violation, with the smallest such case that was found.
    """
    pairs = random.Random(start).sample(checker.pair_names, len(checker.pair_names))
    chunks = -(-count // CHUNK)
    goal, number = checker.counts.cases + count, start
    while checker.counts.cases < goal:
        some = pairs[number % chunks :: chunks] or [pairs[number % len(pairs)]]
        _chunk(checker.check, some, min(CHUNK, goal - checker.counts.cases), number)
        number += 1
    return checker.counts


def _chunk(
    check: Callable[[Case], None],
    pairs: Sequence[tuple[str, str]],
    count: int,
    run_seed: int,
) -> None:
    @seed(run_seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases(pairs))
    def run(case: Case) -> None:
        check(case)

    run()
