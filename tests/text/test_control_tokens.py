# SPDX-License-Identifier: Apache-2.0
"""Control tokens that both tokenizers have: they are read and drafted as control tokens."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from contexts import Family, opened
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from toys import toy

from vllm_hetero_spec.slrs.merges import Merges
from vllm_hetero_spec.text.bridge import TextBridge, make_bridge
from vllm_hetero_spec.text.loading import load_tokenizer
from vllm_hetero_spec.text.special_tokens import UNKNOWN_ID, SpecialTokens
from vllm_hetero_spec.text.tokenizer import TextTokenizer
from vllm_hetero_spec.text.vocabulary import build_maps

# Control tokens that all tokenizers of `chatty` have, under different ids.
SHARED = ["</think>", "<tool_call>", "<|turn|>"]
NAMES = ("byte-level", "byte-level-nfc", "sentencepiece", "unigram")
texts = st.text("ab c\n(", max_size=12).map(lambda text: f"in{text}x")
quick = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def chatty(backends: dict[str, Tokenizer]) -> Family:
    """Tokenizers with control tokens of equal content under different ids."""
    found = {}
    for place, name in enumerate(NAMES):
        backend = Tokenizer.from_str(backends[name].to_str())
        contents = [f"<|own of {name}|>", *SHARED[place:], *SHARED[:place]]
        backend.add_tokens([AddedToken(content, special=True) for content in contents])
        found[name] = load_tokenizer(backend, name)
    return found


def ids_of(tokenizer: TextTokenizer, parts: Sequence[str], *, behind: bool) -> list[int]:
    """Return ids of alternating texts and control tokens, with the tokenizer's leading spaces.

    `behind`: other text comes before the first text.
    """
    ids: list[int] = []
    leading = tokenizer.leading_space
    for place, part in enumerate(parts):
        if place % 2:
            ids.append(tokenizer.special_id_of[part])
        elif part:
            spaced = (
                leading.applies(first=False)
                if place
                else not behind and leading.applies(first=True)
            )
            ids += tokenizer.encode(" " * spaced + part)
    return ids


@pytest.mark.parametrize("names", [p for p in product(NAMES, NAMES) if p[0] != p[1]], ids="-".join)
@quick
@given(first=texts, rest=st.lists(st.tuples(st.sampled_from(SHARED), texts), max_size=4))
def test_drafted_control_tokens_are_translated(
    chatty: Family, names: tuple[str, str], first: str, rest: list[tuple[str, str]]
) -> None:
    target, drafter = (chatty[name] for name in names)
    bridge = make_bridge(target, drafter)
    known = opened(bridge, [*ids_of(target, ["in the ("], behind=False)])
    parts = [first, *(part for pair in rest for part in pair)]
    draft, expected = (ids_of(side, parts, behind=True) for side in (drafter, target))
    (proposal,) = bridge.to_target([known], [draft], [999])
    # The ids of the first text depend on the anchor. Therefore only its bytes are compared.
    assert target.decode_bytes(proposal) == target.decode_bytes(expected)
    control = bridge.special.target_control
    tail = expected[expected.index(target.special_id_of[rest[0][0]]) :] if rest else []
    assert proposal[len(proposal) - len(tail) :] == tail
    assert [i for i in proposal if i in control] == [i for i in tail if i in control]
    for limit in range(len(proposal)):
        assert bridge.to_target([known], [draft], [limit]) == [proposal[:limit]]
    assert not bridge.failures.total()

    needed = bridge.ids_covering(draft, proposal)
    for token_id, count in zip(proposal, needed, strict=True):
        twin = bridge.special.to_drafter(token_id) if token_id in control else None
        assert twin is None or draft[count - 1] == twin
    assert needed == sorted(needed)
    assert needed[-1] == len(draft)


@quick
@given(first=texts, rest=st.lists(st.tuples(st.sampled_from(SHARED), texts), max_size=4))
def test_contexts_have_the_drafters_control_tokens(
    chatty: Family, first: str, rest: list[tuple[str, str]]
) -> None:
    parts = [first, *(part for pair in rest for part in pair)]
    for target, drafter in product(chatty.values(), repeat=2):
        context = opened(
            make_bridge(target, drafter, mode="text"), ids_of(target, parts, behind=False)
        )
        bos = [drafter.bos_id] if drafter.adds_bos else []
        assert context.ids == [*bos, *ids_of(drafter, parts, behind=False)]


def test_proposed_and_banned_control_tokens(chatty: Family) -> None:
    target, drafter = chatty["byte-level"], chatty["sentencepiece"]
    special = SpecialTokens(target, drafter, [0], [2])
    for content in SHARED:
        assert special.proposed[drafter.special_id_of[content]] == target.special_id_of[content]
    assert special.proposed[2] == 0  # EOS by role
    own = drafter.special_id_of["<|own of sentencepiece|>"]
    assert own in special.banned
    assert special.banned == drafter.special_ids - special.proposed.keys()
    assert special.to_drafter(UNKNOWN_ID) == b""
    bridge = make_bridge(target, drafter, target_eos=[0], drafter_eos=[2])
    assert bridge.banned == special.banned
    context = opened(bridge, target.encode("in"))
    assert bridge.to_target([context], [[*drafter.encode("x"), own, 5]], [9]) == [
        target.encode("x")
    ]


def test_an_unknown_token_is_no_role() -> None:
    """It replaces text that its vocabulary lacks, and the other vocabulary lacks other text."""
    target, drafter = toy([b"a", b""]), toy([b"ab", b""])
    assert SpecialTokens(target, drafter, [], []).proposed == {1: 1}
    drafter.unknown_id = 1
    assert SpecialTokens(target, drafter, [], []).banned == {1}


def test_common_ends_keep_their_identity() -> None:
    target, drafter = toy([b"a", b"", b"", b""]), toy([b"ab", b"", b"", b"", b""])
    special = SpecialTokens(target, drafter, [3, 2], [2, 4, 3])
    assert special.proposed == {1: 1, 2: 2, 3: 3, 4: 3}
    assert SpecialTokens(target, drafter, [], [4, 3]).proposed == {1: 1, 2: 2}
    assert [special.to_drafter(t) for t in (1, 2, 3)] == [1, 2, 3]


def test_the_end_of_the_tokenizer_is_preferred() -> None:
    """A chat model may list the end of its base model before its own."""
    target, drafter = toy([b"a", b"", b"", b""], eos=2), toy([b"ab", b""], eos=1)
    assert SpecialTokens(target, drafter, [3, 2], [1]).proposed == {1: 2}
    assert SpecialTokens(target, drafter, [3], [1]).proposed == {1: 3}


@pytest.mark.parametrize("mode", ["auto", "text"])
def test_equal_tokenizers_ban_nothing(chatty: Family, mode: str) -> None:
    tokenizer = chatty["byte-level"]
    bridge = make_bridge(tokenizer, tokenizer, mode=mode, target_eos=[0], drafter_eos=[0])
    assert not bridge.banned
    marks = [i for i in sorted(tokenizer.special_ids) if i]
    ids = [*tokenizer.encode("in the"), *marks, *tokenizer.encode("(x"), 0]
    context = opened(bridge, tokenizer.encode("x = "))
    assert bridge.to_target([context], [ids], [99]) == [ids]
    assert opened(bridge, ids).ids == ids
    assert bridge.ids_covering(ids, ids) == list(range(1, len(ids) + 1))
    # Different EOS ids do not matter, because each id is its own translation.
    for ends in ({"target_eos": [marks[0]]}, {"drafter_eos": []}):
        bridge = make_bridge(tokenizer, tokenizer, mode=mode, **ends)
        assert not bridge.banned
        assert opened(bridge, ids).ids == ids


def test_an_unnamed_id_of_equal_tokenizers() -> None:
    """An id without a token has logits like any other id, so a target may sample it."""
    tokenizer = toy([b"a", b"", b"ab"])
    tokenizer.special_text = {}
    bridge = make_bridge(tokenizer, tokenizer, mode="text")
    assert not bridge.banned
    assert opened(bridge, [0, 1, 2]).ids == [0, 1, 2]
    assert bridge.to_target([bridge.open()], [[2, 1, 0]], [9]) == [[2, 1, 0]]


def test_no_control_token_inside_a_character(chatty: Family) -> None:
    target, drafter = chatty["byte-level"], chatty["sentencepiece"]
    bridge = make_bridge(target, drafter)
    marker, own = (
        drafter.special_id_of[content] for content in (SHARED[0], "<|own of sentencepiece|>")
    )
    context = opened(bridge, target.encode("in"))
    assert bridge.first_choice(context, [own, marker]).id == marker
    begun = opened(bridge, [target.byte_ids[0xC3]])
    lead = drafter.byte_ids[0xC3]
    assert bridge.first_choice(begun, [marker, lead]).id == lead
    assert bridge.to_target([begun], [[marker]], [9]) == [[]]


def test_maps_contain_control_tokens_and_merges_do_not(chatty: Family) -> None:
    target, drafter = chatty["byte-level"], chatty["byte-level-nfc"]
    bridge = make_bridge(target, drafter)
    assert isinstance(bridge, TextBridge)
    plain = build_maps(target, drafter)
    maps = plain.with_control(bridge.special)
    marks = np.array([drafter.special_id_of[content] for content in SHARED], np.int32)
    twins = [target.special_id_of[content] for content in SHARED]
    assert maps.d2t[marks].tolist() == maps.kappa_first[marks].tolist() == twins
    assert [maps.target_tokens(d).tolist() for d in marks] == [[t] for t in twins]
    assert maps.d2t[list(bridge.banned)].tolist() == [-1] * len(bridge.banned)
    text = sorted(set(range(drafter.vocab_size)) - drafter.special_ids)
    assert np.array_equal(maps.d2t[text], plain.d2t[text])
    for d in text[::97]:
        assert np.array_equal(maps.target_tokens(d), plain.target_tokens(d))

    merges = Merges(target, drafter, maps)
    space = drafter.token_bytes.index(b" ")
    mergeable = merges.mergeable.numpy()
    assert mergeable[space]
    assert not mergeable[marks].any()
    assert merges.among((space,), marks).tolist() == [-1] * len(marks)
    everything = np.arange(drafter.vocab_size, dtype=np.int32)
    for path in ((marks[0],), (space, marks[0]), (marks[0], space)):
        assert not merges.goes_on(path)
        assert set(merges.among(path, everything).tolist()) == {-1}
