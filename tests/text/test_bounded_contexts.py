# SPDX-License-Identifier: Apache-2.0
"""Contexts with a bound: the ids that are kept are the last ids of the unbounded context."""

import random

import pytest
from contexts import PAIRS, Family, opened, target_ids, walk

from vllm_hetero_spec.text.bridge import make_bridge
from vllm_hetero_spec.text.context import IdentityContext
from vllm_hetero_spec.text.retokenization import TextContext
from vllm_hetero_spec.text.tokenizer import TextTokenizer

LINES = [
    "def wanted(of, these):",
    "    return [value for value in these if value >= of]  # naïve",
    "",
    "class Wörter(dict):",
    '    """中文字符 and 👍🏽 others."""',
]
TEXT = "\n".join(f"{LINES[n % 5]} {n * 7919 % 1000}" for n in range(300))


@pytest.mark.parametrize("longest", [64, 400])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_bounded_context_is_the_end_of_the_whole(
    family: Family, pair: tuple[str, str], longest: int
) -> None:
    """This holds at every step. The ids that are read again are at most 1.5 times the text."""
    target, drafter = family[pair[0]], family[pair[1]]
    bridge = make_bridge(target, drafter, mode="text")
    ids = target_ids(target, TEXT)
    bounded, whole = bridge.open(longest), bridge.open()
    assert isinstance(bounded, TextContext)
    begins = [drafter.bos_id] if drafter.adds_bos else []
    rng, at, cuts, read = random.Random(0), 0, 0, 0
    while at < len(ids):
        new = ids[at : at + rng.randint(1, 6)]
        at += len(new)
        before, dropped = list(bounded.ids), bounded.num_dropped
        kept = bounded.append(new)
        whole.append(new)
        assert bounded.ids[:kept] == before[:kept]
        count = len(bounded.ids) - len(begins)
        assert count <= longest
        assert bounded.ids == [*begins, *whole.ids[len(whole.ids) - count :]]
        assert bounded.num_dropped == len(whole.ids) - len(bounded.ids)
        assert (bounded.num_target, bounded.held) == (at, whole.held)
        if bounded.num_dropped > dropped:
            cuts, read = cuts + 1, read + count
            assert longest // 2 - 40 < count <= longest // 2
    assert cuts > 5
    assert read < 1.5 * len(whole.ids)
    assert len(bounded.target_ids) < 3 * longest
    assert abs(bounded.ratio - whole.ratio) < 0.5 * whole.ratio


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_only_the_end_of_a_long_prompt_is_encoded(
    family: Family, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = family[pair[0]], family[pair[1]]
    bridge = make_bridge(target, drafter, mode="text")
    ids = target_ids(target, TEXT)
    whole = opened(bridge, ids)
    encoded: list[int] = []
    encode = type(drafter).encode_batch

    def noted(self: TextTokenizer, texts: list[str]) -> list[list[int]]:
        encoded.append(sum(map(len, texts)))
        return encode(self, texts)

    monkeypatch.setattr(type(drafter), "encode_batch", noted)
    bounded = bridge.open(100)
    bounded.append(ids)
    assert sum(encoded) < len(TEXT) / 3
    begins = int(drafter.adds_bos)
    count = len(bounded.ids) - begins
    assert 20 < count <= 100
    assert bounded.ids[begins:] == whole.ids[-count:]
    assert bounded.num_target == len(ids)
    walk(bounded, ids + target_ids(target, TEXT[:2000]), random.Random(1))
    assert len(bounded.ids) <= 101


def test_a_bounded_context_begins_with_a_line(family: Family) -> None:
    target, drafter = family["sentencepiece"], family["byte-level"]
    context = make_bridge(target, drafter).open(200)
    starts = set()
    for token in target_ids(target, TEXT):
        dropped = context.num_dropped
        context.append([token])
        if context.num_dropped > dropped:
            text = drafter.decode_bytes(context.ids).decode()
            starts.add(text.splitlines()[0] in TEXT.splitlines())
    assert starts == {True}


def test_text_without_a_place_to_cut_is_not_lost(family: Family) -> None:
    """A tail that cannot be cut stays whole, even if it is longer than the bound."""
    target, drafter = family["byte-level"], family["byte-level-nfc"]
    context = make_bridge(target, drafter).open(64)
    text = "e\u0301a\u0300" * 600
    ids = target_ids(target, text)
    for at in range(0, len(ids), 50):
        context.append(ids[at : at + 50])
    assert drafter.decode_bytes(context.ids).decode() in "\u00e9\u00e0" * 600
    assert not context.broken
    assert len(context.ids) < 1500


def test_equal_tokenizers() -> None:
    context = IdentityContext(longest=10, bos_id=1)
    ids = [1, *range(100, 130)]
    for at, token in enumerate(ids):
        before = list(context.ids)
        kept = context.append([token])
        assert context.ids[:kept] == before[:kept]
        assert len(context.ids) <= 10
        assert context.ids[0] == 1
        count = len(context.ids) - 1
        assert context.ids[1:] == ids[at + 1 - count : at + 1]
        assert context.num_target == at + 1
    assert context.num_dropped > 15
