# SPDX-License-Identifier: Apache-2.0
"""Cost of a step of translation: it depends only on the new text, for all tokenizers."""

import pytest
from contexts import Family, target_ids
from fuzz_model import separable

from vllm_hetero_spec.text import cuts
from vllm_hetero_spec.text.bridge import make_bridge
from vllm_hetero_spec.text.retokenization import TextContext


@pytest.fixture
def normalised(variants: Family, family: Family, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Length in characters of each text that a drafter of these tests normalizes."""
    lengths: list[int] = []
    for drafter in (family["byte-level-nfc"], variants["unigram-words"]):
        own = drafter.raw_normalize

        def noted(text: str, own: object = own) -> str:
            lengths.append(len(text))
            return own(text)  # type: ignore[operator]

        monkeypatch.setattr(drafter, "raw_normalize", noted)
    return lengths


@pytest.mark.parametrize("times", [1, 8])
def test_a_long_run_of_marks_is_cut_at_constant_cost(
    family: Family, normalised: list[int], times: int
) -> None:
    tail = "x" + "\u0301" * 1000 * times
    assert cuts.forced_cut(family["byte-level-nfc"], tail) == len(tail) // 2
    assert sum(normalised) < 5_000


@pytest.mark.parametrize("times", [1, 8])
def test_inseparable_text_is_cut_after_some_tries(
    variants: Family, normalised: list[int], times: int
) -> None:
    """The drafter puts a space before every text, so two parts have one more than the whole."""
    tail = "ab" * 1000 * times
    assert cuts.forced_cut(variants["unigram-words"], tail) == len(tail) // 2
    # FORCED_TRIES, texts per try, characters per text: more than 2 * FORCED_NEAR + 1.
    assert 0 < sum(normalised) < 64 * 3 * 300


@pytest.mark.parametrize("marks", [0, 40, 400])
def test_a_forced_cut_separates_the_whole_text(family: Family, marks: int) -> None:
    """The marks of one character are not separated."""
    drafter, half = family["byte-level-nfc"], "e\u0301a\u0300" * 300
    tail = half + "\u0301" * marks + "e" + half[:1200]
    parting = [place for place in range(1, len(tail) // 2 + 1) if separable(drafter, tail, place)]
    assert cuts.forced_cut(drafter, tail) == parting[-1]


@pytest.mark.parametrize(
    ("name", "text"),
    [("wordpiece", "\n" * 4000), ("wordpiece", "ab" * 2000), ("unigram", "ไทย" * 800)],
)
def test_text_of_few_drafter_ids_keeps_a_short_tail(
    variants: Family, family: Family, name: str, text: str
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


@pytest.mark.parametrize("pair", [("byte-level", "sentencepiece"), ("sentencepiece", "byte-level")])
def test_a_prompt_is_read_in_runs_between_control_tokens(
    family: Family, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text between control tokens is read at once, with the same ids as token by token."""
    target, drafter = family[pair[0]], family[pair[1]]
    bridge = make_bridge(target, drafter, target_eos=[1], drafter_eos=[2])
    end, unknown, cut = 1, target.vocab_size + 5, target_ids(target, "中")[:-1]
    text = target_ids(target, "def wanted(of):\n    return 中文 and 👍🏽  # naïve\n" * 30)
    ids = [end, *text, unknown, end, *text, *cut, end, *text, *cut]
    stepwise, at_once = bridge.open(), bridge.open()
    for token_id in ids:
        stepwise.append([token_id])
    taken: list[bytes] = []
    take = TextContext._take_bytes

    def noted(self: TextContext, data: bytes) -> None:
        taken.append(data)
        take(self, data)

    monkeypatch.setattr(TextContext, "_take_bytes", noted)
    at_once.append(ids)
    assert len(taken) <= 10
    assert isinstance(stepwise, TextContext)
    assert isinstance(at_once, TextContext)
    assert at_once.ids == stepwise.ids
    assert at_once.target_ids == stepwise.target_ids
    assert (at_once.held, at_once.untouched) == (stepwise.held, stepwise.untouched)
