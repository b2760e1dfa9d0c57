# SPDX-License-Identifier: Apache-2.0
"""First draft tokens: the target may write them after its last token."""

import random
from pathlib import Path

import pytest
import recipes
from contexts import Family, opened

from vllm_hetero_spec.text import drafts
from vllm_hetero_spec.text.bridge import TextBridge, make_bridge
from vllm_hetero_spec.text.drafts import FirstToken
from vllm_hetero_spec.text.loading import load_tokenizer

BOOKS = ("books_children_fairytales_en.txt", "tinystories_small.txt")
PIECE = 60  # characters


def texts_of(source: str, shared: Path | None) -> list[str]:
    """Return books or the standard library's sources. Skip the test if the books do not exist."""
    if source == "sources":
        return [text[:60_000] for text in recipes.corpus()[:8]]
    folder = shared / "data" / "corpora" if shared else Path("nowhere")
    if not all((folder / name).is_file() for name in BOOKS):
        pytest.skip("needs the corpora of the shared folder")
    return [(folder / name).read_text(encoding="utf-8")[:150_000] for name in BOOKS]


@pytest.mark.parametrize("source", ["sources", "books"])
@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_rejected_candidates_are_joined_by_the_target(
    family: Family, shared_or_none: Path | None, source: str, kind: str
) -> None:
    """A candidate is rejected only if the target's encoding of the whole text spans that place.

    This holds for Unigram, and for BPE without a pre-tokenizer that examines more than spaces. Ties
    are left out: l|ll and ll|l have the same score, so the surrounding text decides.
    """
    texts = texts_of(source, shared_or_none)
    train = {"unigram": recipes.train_unigram, "bpe": recipes.train_sentencepiece}[kind]
    target = load_tokenizer(train(1200, [text[:100_000] for text in texts]), kind)
    drafter = family["byte-level"]
    bridge = make_bridge(target, drafter)
    assert isinstance(bridge, TextBridge)
    rng = random.Random(0)
    safe = drafter.encode("\n\n")[0]
    turned_down = 0
    for text in texts:
        for start in range(0, 12_000, 8 * PIECE):
            ids = target.encode(text[start : start + PIECE])
            for place in range(1, len(ids)):
                context = opened(bridge, ids[:place])
                known, rest = (target.decode_bytes(part) for part in (ids[:place], ids[place:]))
                likely = [rng.randrange(3, drafter.vocab_size) for _ in range(3)]
                for candidate in [*drafter.encode_bytes(rest)[:1], *likely]:
                    data = known + drafter.token_bytes[candidate]
                    whole = target.encode_bytes(data)
                    if target.decode_bytes(whole) != data:
                        continue  # not UTF-8, or the target lacks some of its characters
                    ends = {len(target.decode_bytes(whole[:n])) for n in range(len(whole))}
                    turned = bridge.first_choice(context, [candidate, safe]).id != candidate
                    pair = target.encode_bytes(
                        target.token_bytes[ids[place - 1]] + drafter.token_bytes[candidate]
                    )
                    tie = sorted(whole[-len(pair) :]) == sorted(pair)
                    assert tie or not (turned and len(known) in ends), (known, data)
                    turned_down += turned
    assert turned_down > 20


def test_first_choice_is_not_joined_to_the_last_token(family: Family) -> None:
    """A target that ended a token after half a word does not continue with the other half."""
    target, drafter = family["byte-level"], family["sentencepiece"]
    bridge = make_bridge(target, drafter, mode="text")
    left, half = next(
        (left, half[0])
        for data in target.token_bytes
        if data.isalpha() and data.isascii() and len(data) > 3
        for left in [target.encode(data[:-2].decode())]
        for half in [drafter.encode(data[-2:].decode())]
        if len(left) == len(half) == len(target.encode(data.decode())) == 1
    )
    other = drafter.encode("(")[0]
    context = opened(bridge, [*target.encode("x = "), *left])
    assert bridge.first_choice(context, [half, other]) == FirstToken(other)
    # The drafter's best candidate if none may follow.
    assert bridge.first_choice(context, [half]).id == half
    safe = drafter.encode("\n")[0]
    assert bridge.first_choices(context, [half, other, safe]) == [other, safe]
    assert bridge.first_choices(context, [half, half]) == [half]
    assert not bridge.may_follow(context, half, 0)
    assert bridge.may_follow(context, other, 0)
    rest = drafter.token_bytes[half]
    longer = next(
        token for token, data in enumerate(drafter.token_bytes) if data[1:].endswith(rest)
    )
    assert not bridge.may_follow(context, longer, len(drafter.token_bytes[longer]) - len(rest))


def test_first_choice_is_the_space_of_the_next_word(family: Family) -> None:
    """After an indentation, the target continues with a word and the space before it."""
    target, drafter = family["byte-level"], family["sentencepiece"]
    bridge = make_bridge(target, drafter, mode="text")
    ids = target.encode("x    return")
    assert [target.token_bytes[i] for i in ids] == [b"x", b"   ", b" return"]
    assert b"    " in target.token_bytes  # at the end of a text, all four are one token
    space, bracket = drafter.token_bytes.index(b" "), drafter.encode("(")[0]
    context = opened(bridge, ids[:2])
    assert not bridge.may_follow(context, bracket)  # it would include the last of the three
    assert bridge.first_choice(context, [bracket, space]).id == space


def test_first_choice_completes_a_character(family: Family) -> None:
    target, drafter = family["byte-level"], family["sentencepiece"]
    bridge = make_bridge(target, drafter, mode="text")
    context = opened(bridge, [target.byte_ids[byte] for byte in "é".encode()[:1]])
    assert context.held == "é".encode()[:1]
    right, wrong = drafter.byte_ids[0xC3], drafter.byte_ids[0x61]
    assert bridge.first_choice(context, [wrong, right]).id == right


def test_first_choice_of_equal_tokenizers(family: Family) -> None:
    tokenizer = family["byte-level"]
    for mode in ("text", "identity"):
        bridge = make_bridge(tokenizer, tokenizer, mode=mode)
        context = opened(bridge, tokenizer.encode("x = ret"))
        half = tokenizer.encode("urn")[0]
        assert bridge.first_choice(context, [half, tokenizer.encode("(")[0]]).id == half


def test_a_draft_replaces_half_a_word(family: Family) -> None:
    """The target's text ends inside a word that is one token of the drafter."""
    target, drafter = family["sentencepiece"], family["byte-level"]
    bridge = make_bridge(target, drafter)
    for word in (data for data in drafter.token_bytes if data[:1] == b" " and data[1:].isalpha()):
        ids = target.encode_bytes(b"x =" + word)
        last = drafter.encode_bytes(b"x =" + word[: -len(target.token_bytes[ids[-1]])])
        if len(target.encode_bytes(word)) > 1 and len(drafter.token_bytes[last[-1]]) > 1:
            break
    context = opened(bridge, ids[:-1])
    assert context.ids == last
    whole, shorter = drafter.token_bytes.index(word), context.ids[-1]
    known = len(drafter.token_bytes[shorter])
    other, begun = drafter.encode("(")[0], drafter.encode("\n")[0]
    nothing = [other, begun]
    assert bridge.first_choice(context, nothing) == FirstToken(other)
    assert bridge.first_choice(context, nothing, [begun, whole, shorter]) == (whole, known, [1, 2])
    assert bridge.first_choice(context, nothing, [shorter, whole]) == FirstToken(other)
    assert bridge.first_choice(context, nothing, [begun]) == FirstToken(other)
    draft = [whole, other]
    (proposal,) = bridge.to_target([context], [draft], [9], [known])
    assert target.decode_bytes(proposal) == word[known:] + b"("
    assert proposal[0] == ids[-1]
    assert bridge.ids_covering(draft, proposal, known) == [1, 2]
    # Here the text already has the whole word.
    joined = opened(bridge, target.encode_bytes(b"x =" + word))
    assert bridge.longer_last(joined, [whole]) is None


@pytest.mark.parametrize("why", ["", "no text", "half a character", "equal tokenizers"])
def test_a_last_token_is_not_replaced(
    family: Family, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an obstacle, the first longer token that may follow is chosen."""
    monkeypatch.setattr(drafts.DraftTranslator, "may_follow", lambda *_: True)
    target = family["byte-level"]
    drafter = target if why == "equal tokenizers" else family["sentencepiece"]
    bridge = make_bridge(target, drafter, mode="text")
    r, half = target.byte_ids[0x72], target.byte_ids[0xC3]
    ids = {"no text": [], "half a character": [r, half]}.get(why, [r])
    context, table = opened(bridge, ids), drafter.token_bytes
    last = (table[context.ids[-1]] if context.ids else b"") or b"r"
    longer = [i for i, data in enumerate(table) if data.startswith(last) and data != last]
    assert longer
    found = bridge.longer_last(context, longer)
    assert found == (None if why else (longer[0], len(last), list(range(len(longer)))))
    assert not bridge.failures


def test_the_cache_of_first_choices_is_bounded(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choices do not depend on the size of the cache."""
    pair = family["byte-level"], family["sentencepiece"]
    remembers_all = make_bridge(*pair)
    monkeypatch.setattr(drafts, "MEMO_PAIRS", 16)
    remembers_few = make_bridge(*pair)
    rng = random.Random(3)
    asked: list[tuple[list[int], list[int]]] = []
    for _ in range(200):
        candidates = [rng.randrange(3, pair[1].vocab_size) for _ in range(4)]
        asked.append(([rng.randrange(3, pair[0].vocab_size)], candidates))

    def advice(bridge: TextBridge) -> list[int]:
        found = []
        for ids, candidates in [*asked, *asked]:
            context = opened(bridge, ids)
            found.append(bridge.first_choice(context, candidates).id)
        return found

    assert advice(remembers_few) == advice(remembers_all)
    kept = [bridge._drafts._parted.cache_info() for bridge in (remembers_few, remembers_all)]
    assert (kept[0].maxsize, kept[0].currsize) == (16, 16)
    assert kept[0].misses > kept[1].misses == kept[1].currsize > 16
