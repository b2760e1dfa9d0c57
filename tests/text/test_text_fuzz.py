# SPDX-License-Identifier: Apache-2.0
"""Fuzz tests of the token bridge: any text, any ids and any walk, for all pairs of tokenizers.

HETERO_SPEC_FUZZ=<number of cases> sets the length of the fuzz test. A thousand cases take a few
seconds. ``pytest -s`` prints the counts.
"""

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from contexts import Family
from fuzz_cases import Case
from fuzz_model import Violation
from fuzzing import Checker, fuzz
from recipes import mistral_files, split_by, train_bytes

from vllm_hetero_spec.text.drafts import DraftTranslator
from vllm_hetero_spec.text.loading import load_tokenizer
from vllm_hetero_spec.text.retokenization import TextContext
from vllm_hetero_spec.text.tokenizer import TextTokenizer

LONG = int(os.environ.get("HETERO_SPEC_FUZZ", "0"))
SHORT, FEW = 1500, 300  # cases in the full and in the fast tier
# Characters of a piece of natural text, and pieces per drafter.
PIECE = 1200
PIECES = 40 if LONG else 4


class Loaded(Mapping[str, TextTokenizer]):
    """Tokenizers that are loaded on first use."""

    def __init__(self, loaders: Mapping[str, Callable[[], TextTokenizer]]) -> None:
        self._loaders, self._loaded = loaders, dict[str, TextTokenizer]()

    def __getitem__(self, name: str) -> TextTokenizer:
        if name not in self._loaded:
            self._loaded[name] = self._loaders[name]()
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaders)

    def __len__(self) -> int:
        return len(self._loaders)


def load_mistral(file: Path) -> TextTokenizer:
    """Load a Tekken or SentencePiece file of mistral_common."""
    from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    build = Tekkenizer.from_file if file.suffix == ".json" else SentencePieceTokenizer
    return load_tokenizer(build(str(file)), file.name)


@pytest.fixture(scope="session")
def by_class() -> TextTokenizer:
    """Llama 3's and Qwen's pre-tokenizer, whose splits depend on the characters before a place.

    A single punctuation mark is joined to the letters after it. The last one of several is not.
    """
    classes = (
        r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return load_tokenizer(train_bytes(1200, ["<|endoftext|>"], split_by(classes)), "by-class")


@pytest.fixture(scope="session")
def trained(family: Family, variants: Family, by_class: TextTokenizer) -> Family:
    return family | variants | {"by-class": by_class}


@pytest.fixture(scope="session")
def everything(
    trained: Family, request: pytest.FixtureRequest, shared_or_none: Path | None
) -> Mapping[str, TextTokenizer]:
    """All available tokenizers: trained ones, real ones, and those of mistral_common."""
    loaders: dict[str, Callable[[], TextTokenizer]] = {
        name: (lambda name=name: trained[name]) for name in trained
    }
    if shared_or_none is not None:
        real = request.getfixturevalue("real")
        for file in sorted(shared_or_none.glob("tokenizers/*/tokenizer.json")):
            name = file.parent.name
            loaders[f"real {name}"] = lambda name=name: real[name]
    return Loaded(loaders | {file.name: partial(load_mistral, file) for file in mistral_files()})


def natural_texts(shared: Path | None, pieces: int, rng: random.Random) -> list[str]:
    """Return pieces of the standard library's sources and, if they exist, of prompts and books."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in rng.sample(files, 12)]
    if shared is not None:
        for path in sorted(shared.glob("data/prompts/*.jsonl")):
            lines = path.read_text(encoding="utf-8").splitlines()
            prompts = [json.loads(line)["prompt"] for line in rng.sample(lines, min(9, len(lines)))]
            texts.append("\n\n".join(prompts))
        for path in sorted(shared.glob("data/corpora/*.txt")):
            texts.append(path.read_text(encoding="utf-8", errors="ignore"))
    cut = []
    for text in rng.choices(texts, k=pieces):
        start = rng.randrange(max(1, len(text) - PIECE))
        cut.append(text[start : start + PIECE])
    return cut


@pytest.mark.timeout(0 if LONG else 600)
def test_fuzz(
    everything: Mapping[str, TextTokenizer],
    record_property: Callable[[str, object], None],
    pytestconfig: pytest.Config,
) -> None:
    """Random cases of all pairs. `Walk` in `fuzzing.py` contains the invariants."""
    count = LONG or (SHORT if pytestconfig.getoption("--full") else FEW)
    checker = Checker(everything)
    counts = fuzz(checker, count)
    record_property("fuzz", str(counts))
    print(f"\nfuzz: {counts}")
    assert counts.cases >= count
    assert counts.seen["round trips"] > count // 2
    if count >= 30 * len(checker.pair_names):
        assert counts.pairs == set(checker.pair_names)


@pytest.mark.full
@pytest.mark.timeout(0 if LONG else 600)
def test_natural_text(
    everything: Mapping[str, TextTokenizer],
    shared_or_none: Path | None,
    record_property: Callable[[str, object], None],
) -> None:
    """With natural text, nearly all contexts equal the whole text encoded, and drafts come back."""
    rng = random.Random(0)
    checker = Checker(everything)
    targets = [name for name, tokenizer in everything.items() if not tokenizer.lossy_reason]
    for drafter in everything:
        for text in natural_texts(shared_or_none, PIECES, rng):
            steps = tuple(rng.choice([1, 1, 1, 2, 3, -1, -4]) for _ in range(24))
            pair = (rng.choice(targets), drafter)
            checker.check(Case(pair, stretches=(text.encode(),), steps=steps, limit=6))
    counts = checker.counts
    record_property("natural text", str(counts))
    print(f"\nnatural text: {counts}")
    assert counts.share("contexts that differ", "contexts") < 0.01
    assert counts.share("round trips that differ", "round trips") < 0.002


# Cases that failed once.
FOUND = {
    "a candidate that is no token": Case(
        ("byte-level", "tiktoken"), (b"",), (), noise=(("beyond", 0),)
    ),
    "spaces at the start of a text": Case(("unigram", "byte-level"), (b"    return",), (0,)),
    "a special token inside a character": Case(
        ("processor", "sentencepiece"), ((("byte", 0xC2), ("special", 0)),), ()
    ),
    "a forced cut inside a syllable": Case(
        ("byte-level", "byte-level-nfc"),
        (("\u1100\u1161\u11a8" * 21).encode(),),
        (1, 1),
        eager=True,
    ),
    "a mark that moves before the cut": Case(
        ("byte-level", "byte-level-nfc"),
        (("x" + "\u0301" * 70 + "\u0316" * 9).encode(),),
        (16, 16, 16, 4, 2, 1),
    ),
    "two words that become one": Case(
        ("byte-level", "wordpiece"),
        (b"https://a.b/c?d=e&f" + b"\x0b" * 936 + b"def f(self, x):\n",),
        (1, 1, 1, 1),
        eager=True,
    ),
    "white space that the target has no token for": Case(
        ("unigram-words", "byte-level-words"), (b"def f(self, x):\n" * 3,), (1, 1)
    ),
    "a last token made longer across a control token": Case(
        ("sentencepiece", "wordpiece"),
        (b"def t", (("id", 0),)),
        (99,),
        noise=tuple(("id", token_id) for token_id in range(150, 250)),  # " th", " to" among them
    ),
}


@pytest.mark.parametrize("found", FOUND)
def test_earlier_failures_stay_fixed(trained: Family, found: str) -> None:
    Checker(trained).check(FOUND[found])


# ---- Negative oracles: the checks above must fail with a wrong bridge.


def cut_anywhere(self: TextContext, at: int, tail_ids: Sequence[int]) -> bool:
    """Wrong `_cut_at`: cuts at any character, without a check."""
    at = len(self.tail) * 2 // 3
    left, right = self._drafter.encode_batch([self.tail[:at], self.tail[at:]])
    self._replace_tail([*left, *right])
    self._cut, self.tail = self._cut + len(left), self.tail[at:]
    return True


def no_anchor(self: DraftTranslator, ids: Sequence[int], job: Any) -> None:
    """Wrong `_boundary`: always None, so the draft is encoded without the text before it."""


def all_of_it(
    self: DraftTranslator, ids: Sequence[int], job: Any, limit: int
) -> tuple[list[int], bool]:
    """Wrong `_checked`: does not compare the proposal with the drafted bytes."""
    return list(ids[:limit]), True


SOURCE = b"        return ~(self.value) if '%(default)' not in help  # why"
ACCENT = (("byte", 0x65), ("byte", 0xCC), ("byte", 0x81))  # a pair that NFC composes
ONES = (1,) * 40
WRONG: dict[str, tuple[type, str, Callable[..., Any], Case]] = {
    "frozen ids|kept": (
        TextContext,
        "_cut_at",
        cut_anywhere,
        Case(("byte-level", "sentencepiece"), (SOURCE,), ONES),
    ),
    "round trip": (
        DraftTranslator,
        "_boundary",
        no_anchor,
        Case(("by-class", "byte-level"), (SOURCE,), ONES),
    ),
    "round trip.*": (
        DraftTranslator,
        "_anchor",
        lambda *_: [],
        Case(("by-class", "byte-level"), (SOURCE,), ONES),
    ),
    "drafted bytes": (
        DraftTranslator,
        "_checked",
        all_of_it,
        Case(("byte-level-nfc", "byte-level"), (b"x",), (), noise=ACCENT),
    ),
}


@pytest.mark.parametrize("caught_as", WRONG)
def test_a_wrong_bridge_is_caught(
    trained: Family, monkeypatch: pytest.MonkeyPatch, caught_as: str
) -> None:
    owner, name, wrong, case = WRONG[caught_as]
    Checker(trained).check(case)
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(Violation, match=caught_as):
        Checker(trained).check(case)


@pytest.mark.parametrize("side", ["target", "drafter"])
def test_display_strings_are_caught(family: Family, backends: dict[str, Any], side: str) -> None:
    """A byte table of display strings, as ``get_vocab`` returns them, violates an invariant."""
    table = [b""] * family["byte-level"].vocab_size
    for piece, token_id in backends["byte-level"].get_vocab().items():
        if token_id not in family["byte-level"].special_ids:
            table[token_id] = piece.encode()
    shown = replace(family["byte-level"], token_bytes=table, fingerprint="shown")
    names = ("shown", "tiktoken") if side == "target" else ("tiktoken", "shown")
    checker = Checker(family | {"shown": shown})
    with pytest.raises(Violation, match=r"bytes|round trip"):
        checker.check(Case(names, stretches=(b"def f(x):\n    return x",), steps=(9, 9, 9)))
