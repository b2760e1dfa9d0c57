# SPDX-License-Identifier: Apache-2.0
"""What a step costs hangs on its new text alone, whatever the text and the tokenizers."""

import pytest
from fuzz_model import separable
from test_retokenization import target_ids

from vllm_hetero_spec.text import cuts
from vllm_hetero_spec.text.bridge import make_bridge
from vllm_hetero_spec.text.retokenization import TextContext
from vllm_hetero_spec.text.tokenizer import TextTokenizer


@pytest.fixture
def normalised(
    variants: dict[str, TextTokenizer],
    family: dict[str, TextTokenizer],
    monkeypatch: pytest.MonkeyPatch,
) -> list[int]:
    """Characters of each text that a drafter of these tests normalises."""
    lengths: list[int] = []
    for drafter in (family["byte-level-nfc"], variants["unigram-words"]):
        own = drafter.raw_normalize

        def noted(text: str, own: object = own) -> str:
            lengths.append(len(text))
            return own(text)  # type: ignore[operator]

        monkeypatch.setattr(drafter, "raw_normalize", noted)
    return lengths


@pytest.mark.parametrize("times", [1, 8])
def test_a_run_of_marks_is_cut_without_a_look_at_all_of_it(
    family: dict[str, TextTokenizer], normalised: list[int], times: int
) -> None:
    tail = "x" + "\u0301" * 1000 * times
    assert cuts.forced_cut(family["byte-level-nfc"], tail) == len(tail) // 2
    assert sum(normalised) < 5_000


@pytest.mark.parametrize("times", [1, 8])
def test_text_that_parts_nowhere_is_cut_after_some_tries(
    variants: dict[str, TextTokenizer], normalised: list[int], times: int
) -> None:
    """A drafter that puts a space before every text: any two parts have one more than the whole."""
    tail = "ab" * 1000 * times
    assert cuts.forced_cut(variants["unigram-words"], tail) == len(tail) // 2
    assert 0 < sum(normalised) < 64 * 3 * 300


@pytest.mark.parametrize("marks", [0, 40, 400])
def test_a_forced_cut_lies_where_the_whole_text_parts(
    family: dict[str, TextTokenizer], marks: int
) -> None:
    """What is near a place tells as much as the whole text; marks of one character do not part."""
    drafter, half = family["byte-level-nfc"], "e\u0301a\u0300" * 300
    tail = half + "\u0301" * marks + "e" + half[:1200]
    parting = [place for place in range(1, len(tail) // 2 + 1) if separable(drafter, tail, place)]
    assert cuts.forced_cut(drafter, tail) == parting[-1]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("wordpiece", "\n" * 4000),
        ("wordpiece", "ab" * 2000),
        ("unigram", "ไทย" * 800),
    ],
)
def test_text_of_few_drafter_ids_keeps_a_short_tail(
    variants: dict[str, TextTokenizer], family: dict[str, TextTokenizer], name: str, text: str
) -> None:
    target, drafter = family["byte-level"], (variants | family)[name]
    context = make_bridge(target, drafter).open(100)
    assert isinstance(context, TextContext)
    ids = target_ids(target, text)
    for at in range(0, len(ids), 20):
        context.append(ids[at : at + 20])
        longest_new = max(len(target.token_bytes[i]) for i in ids[at : at + 20]) * 20
        assert len(context.tail) <= cuts.TAIL_CHARACTERS + longest_new
        assert len(context.target_ids) <= 8 * 100
        assert context.num_target == min(at + 20, len(ids))
    assert not context.broken
