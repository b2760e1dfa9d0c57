# SPDX-License-Identifier: Apache-2.0
"""Translation of drafts: text that the target wrote comes back as its own tokens."""

import json
import random
from collections.abc import Sequence

import pytest
from contexts import REAL_PAIRS, Family, opened, target_ids
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from vllm_hetero_spec.text.bridge import Bridge, make_bridge
from vllm_hetero_spec.text.context import Context
from vllm_hetero_spec.text.loading import load_tokenizer
from vllm_hetero_spec.text.tokenizer import TextTokenizer

PAIRS = [
    ("byte-level", "sentencepiece"),
    ("sentencepiece", "byte-level"),
    ("byte-level", "tiktoken"),
    ("processor", "byte-level"),
    ("sentencepiece", "processor"),
]
WORDS = [
    *["the", "return", "value", "don't", "snake_case", "self", "x", "123", "in"],
    *["中文字", "한국어", "naïve", "👩‍👩‍👧", "(", ");", ":", ",", "=", "=="],
    *["\n", "\n    ", "\n        ", "\n\n"],
]
texts = st.lists(st.sampled_from(WORDS), min_size=2, max_size=30).map(" ".join)
quick = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))


def one(bridge: Bridge, context: Context, draft: Sequence[int], limit: int = 9999) -> list[int]:
    return bridge.to_target([context], [draft], [limit])[0]


def assert_round_trip(target: TextTokenizer, drafter: TextTokenizer, text: str) -> None:
    """At several splits, the rest of the target's ids comes back if the drafter drafts it."""
    ids = target_ids(target, text)
    bridge = make_bridge(target, drafter, mode="text")
    splits = sorted(random.Random(text).sample(range(len(ids)), min(12, len(ids))))
    for split in splits:
        rest = target.decode_bytes(ids[split:])
        if split == 0:  # use the drafter's rule for a leading space
            rest = rest.removeprefix(b" " * target.leading_space.applies(first=True))
            rest = b" " * drafter.leading_space.applies(first=True) + rest
        context = opened(bridge, ids[:split])
        drafted = drafter.encode_bytes(context.held + rest)
        assert one(bridge, context, drafted) == ids[split:], (split, text)
        last = target.token_bytes[ids[split - 1]] if split else b""
        if known := max(0, len(last) - len(context.held)):  # drafted one target token earlier
            earlier = drafter.encode_bytes(last + rest)
            assert bridge.to_target([context], [earlier], [9999], [known])[0] == ids[split:]
    assert not bridge.failures.total()


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@quick
@given(text=texts)
def test_target_tokens_come_back(family: Family, pair: tuple[str, str], text: str) -> None:
    assert_round_trip(family[pair[0]], family[pair[1]], text)


@quick
@given(text=texts)
def test_real_target_tokens_come_back(real: Family, text: str) -> None:
    for pair in REAL_PAIRS[:5]:
        assert_round_trip(real[pair[0]], real[pair[1]], text)


def test_a_dummy_prefix_fails_the_same_check(
    family: Family, backends: dict[str, Tokenizer]
) -> None:
    """Negative oracle: a SentencePiece tokenizer's own encode() of a draft gives other tokens."""
    target, drafter = family["sentencepiece"], family["byte-level"]
    text = "def f(self):\n    return self.value"
    ids = target.encode(" " + text)
    naive = [
        backends["sentencepiece"].encode(rest.decode(), add_special_tokens=False).ids
        for rest in (target.decode_bytes(ids[split:]) for split in range(1, len(ids)))
    ]
    assert all(own != ids[split:] for split, own in enumerate(naive, 1))
    assert_round_trip(target, drafter, text)


def test_encoding_the_draft_alone_fails_the_same_check(real: Family) -> None:
    """Negative oracle: the pre-tokenizer's splits of a draft depend on the text before it."""
    target, drafter = real["qwen2"], real["llama-2"]
    known, rest = "        if '%", "(default)' not in help"
    ids = target.encode(known + rest)
    split = len(target.encode(known))
    assert target.decode_bytes(ids[:split]).decode() == known
    assert target.encode(rest) != ids[split:]
    bridge = make_bridge(target, drafter)
    assert one(bridge, opened(bridge, ids[:split]), drafter.encode(rest)) == ids[split:]


def test_a_draft_that_would_be_merged_into_the_text(family: Family) -> None:
    """If known text and draft would join to one token, the draft is encoded alone."""
    target, drafter = family["byte-level"], family["sentencepiece"]
    (whole,) = target.encode(" return")
    head = target.encode(" ret")
    bridge = make_bridge(target, drafter)
    draft = one(bridge, opened(bridge, [*target.encode("x"), *head]), drafter.encode("urn"))
    assert whole not in draft
    assert target.decode_bytes(draft) == b"urn"


def test_characters_cut_at_every_byte(family: Family) -> None:
    target, drafter = family["byte-level"], family["sentencepiece"]
    bridge = make_bridge(target, drafter)
    known, data = target.encode("so "), "👍é中".encode()
    for count in range(len(data) + 1):
        drafted = drafter.encode_bytes(data[:count])
        complete = data[:count].decode("utf-8", "ignore").encode()
        draft = one(bridge, opened(bridge, known), drafted)
        assert target.decode_bytes(draft) == complete


def test_held_bytes_are_completed(family: Family) -> None:
    target, drafter = family["byte-level"], family["sentencepiece"]
    data = "👍".encode()
    for count in (1, 2, 3):
        bridge = make_bridge(target, drafter)
        ids = [*target.encode("so "), *(target.byte_ids[byte] for byte in data[:count])]
        context = opened(bridge, ids)
        draft = one(bridge, context, drafter.encode("👍 ok"))
        assert target.decode_bytes(ids + draft) == "so 👍 ok".encode()
        assert not bridge.failures.total()
        assert one(bridge, context, drafter.encode("no")) == []
        assert bridge.failures["held_mismatch"] == 1


def test_invalid_bytes_never_raise(family: Family) -> None:
    rng = random.Random(0)
    for target_name, drafter_name in PAIRS:
        target, drafter = family[target_name], family[drafter_name]
        bridge = make_bridge(target, drafter, target_eos=[1], drafter_eos=[1])
        for _ in range(100):
            ids = [rng.randrange(target.vocab_size) for _ in range(rng.randint(0, 9))]
            spelled = [i for i in drafter.byte_ids if i >= 0]
            draft = [rng.choice([*spelled, drafter.vocab_size + 9]) for _ in range(8)]
            context = opened(bridge, ids)
            proposal = one(bridge, context, draft, 5)
            drafted = drafter.decode_bytes([i for i in draft if i < drafter.vocab_size])
            body = target.decode_bytes([i for i in proposal if i != 1])
            assert len(proposal) <= 5
            continued = drafted.removeprefix(context.held).removeprefix(b" ")
            assert continued.startswith(body.removeprefix(b" "))
        assert not bridge.failures["draft_error"]


def test_a_failing_draft_fails_alone(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = family["byte-level"], family["sentencepiece"]
    encode = target.raw_encode_batch

    def failing(batch: Sequence[str]) -> list[list[int]]:
        if any("POISON" in text for text in batch):
            raise RuntimeError("no")
        return encode(batch)

    bridge = make_bridge(target, drafter)
    contexts = [opened(bridge, target.encode("in")) for _ in range(3)]
    drafts = [drafter.encode(text) for text in (" the", " POISON", " value")]
    monkeypatch.setattr(target, "raw_encode_batch", failing)
    proposals = bridge.to_target(contexts, drafts, [9] * 3)
    assert [target.decode_bytes(ids) for ids in proposals] == [b" the", b"", b" value"]
    assert bridge.failures["draft_error"] == 1


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 9])
def test_eos_by_role(family: Family, limit: int) -> None:
    target, drafter = family["byte-level"], family["sentencepiece"]
    bridge = make_bridge(target, drafter, target_eos=[0], drafter_eos=[2])
    context = opened(bridge, target.encode("in the"))
    text_ids = target.encode(" value")
    draft = [*drafter.encode(" value"), 2, *drafter.encode(" more")]
    assert one(bridge, context, draft, limit) == [*text_ids, 0][:limit]
    assert one(bridge, context, [2], limit) == [0][:limit]
    # Any other special token of the drafter ends the draft and proposes nothing.
    assert one(bridge, context, [*drafter.encode(" value"), 1], 9) == text_ids


def test_text_is_never_proposed_as_special_tokens(family: Family) -> None:
    target, drafter = family["byte-level"], family["sentencepiece"]
    bridge = make_bridge(target, drafter)
    draft = one(bridge, opened(bridge, target.encode("x")), drafter.encode(" <|endoftext|>"))
    assert target.special_ids.isdisjoint(draft)
    assert target.decode_bytes(draft) == b" <|endoftext|>"


def test_an_eos_with_text_is_proposed_by_role_only(family: Family) -> None:
    """Phi-3 lists </s> among its ordinary added tokens."""
    target, drafter = family["byte-level"], family["sentencepiece"]
    (think,) = target.encode("<think>")
    bridge = make_bridge(target, drafter, target_eos=[think], drafter_eos=[2])
    context = opened(bridge, target.encode("x"))
    assert one(bridge, context, drafter.encode("<think>")) == []
    assert bridge.failures["unencodable"] == 1
    assert one(bridge, context, [2]) == [think]


def test_the_draft_ends_before_normalised_text(family: Family) -> None:
    target, drafter = family["byte-level-nfc"], family["byte-level"]
    bridge = make_bridge(target, drafter)
    draft = one(bridge, opened(bridge, target.encode("in")), drafter.encode(" the e\u0301 x"))
    assert target.decode_bytes(draft).rstrip() == b" the"


def test_modes(family: Family) -> None:
    one_tokenizer, other = family["byte-level"], family["sentencepiece"]
    assert make_bridge(one_tokenizer, one_tokenizer).identity
    assert not make_bridge(one_tokenizer, one_tokenizer, mode="text").identity
    assert not make_bridge(one_tokenizer, other).identity
    with pytest.raises(ValueError, match="differ"):
        make_bridge(one_tokenizer, other, mode="identity")


def test_identity_needs_equal_merges(backends: dict[str, Tokenizer]) -> None:
    text = backends["sentencepiece"].to_str()
    original = load_tokenizer(Tokenizer.from_str(text))
    again = load_tokenizer(Tokenizer.from_str(text))
    assert make_bridge(original, again).identity
    spec = json.loads(text)
    merges = spec["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]
    edited = load_tokenizer(Tokenizer.from_str(json.dumps(spec)))
    assert not make_bridge(original, edited).identity


def test_identity_passes_ids_through(family: Family) -> None:
    bridge = make_bridge(
        family["byte-level"], family["byte-level"], target_eos=[0], drafter_eos=[0]
    )
    context = bridge.open()
    assert bridge.extend([context], [[7, 8, 9]]) == [0]
    assert bridge.extend([context], [[10]]) == [3]
    assert context.ids == [7, 8, 9, 10]
    assert bridge.to_target([context], [[5, 0, 6]], [9]) == [[5, 0]]
    assert bridge.to_target([context], [[5, 4, 6]], [2]) == [[5, 4]]
