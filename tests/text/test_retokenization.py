# SPDX-License-Identifier: Apache-2.0
"""Contexts that grow step by step: they equal the drafter's encoding of the whole text."""

import copy
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import recipes
from contexts import PAIRS, REAL_PAIRS, Family, opened, target_ids, walk
from fuzz_model import endings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_hetero_spec.text.bridge import make_bridge
from vllm_hetero_spec.text.cuts import TAIL_TOKENS
from vllm_hetero_spec.text.loading import load_tokenizer
from vllm_hetero_spec.text.retokenization import TextContext
from vllm_hetero_spec.text.tokenizer import TextTokenizer

PIECES = [
    *["the", "return", "value", "in", "don't", "snake_case", "camelCase", "x", "12345", "3.14"],
    *["中文", "字符。", "한국어", "naïve", "cafe\u0301", "👩‍👩‍👧", "👍🏽", "\u3000", "\u00a0"],
    *[" ", " ", " ", "  ", "    ", " " * 17, "\n", "\n\n", "\r\n", "\t", "\n    "],
    *[".", ",", "(", ");", "==", "</s>", "<|endoftext|>", "<think>", "{", "}", '"', "'s"],
]
texts = st.lists(st.sampled_from(PIECES), max_size=60).map("".join)
quick = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


def whole(target: TextTokenizer, drafter: TextTokenizer, ids: Sequence[int]) -> list[list[int]]:
    """Return the drafter's encodings of the target's whole text: at its end, and before a word."""
    data = target.decode_bytes(ids)
    data = data.removeprefix(b" ") if target.leading_space.applies(first=True) else data
    text = data.decode("utf-8", "ignore")
    leading = drafter.leading_space
    if leading.applies(first=True) and text and not (leading.unless_present and text[0] == " "):
        text = " " + text
    bos = [drafter.bos_id] if drafter.adds_bos and drafter.bos_id is not None else []
    return [[*bos, *found] for found in endings(drafter, text)]


def assert_incremental(
    target: TextTokenizer, drafter: TextTokenizer, text: str, seed: int
) -> TextContext:
    ids = target_ids(target, text)
    context = make_bridge(target, drafter, mode="text").open()
    assert isinstance(context, TextContext)
    walk(context, ids, random.Random(seed))
    assert context.held in (b"", b" ")
    assert context.ids in whole(target, drafter, ids)
    return context


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@quick
@given(text=texts, seed=st.integers(0, 2**16))
def test_steps_equal_whole(family: Family, pair: tuple[str, str], text: str, seed: int) -> None:
    target, drafter = family[pair[0]], family[pair[1]]
    assert_incremental(target, drafter, text, seed)


@pytest.mark.full
@quick
@given(text=texts, seed=st.integers(0, 2**16))
def test_steps_equal_whole_for_real_tokenizers(real: Family, text: str, seed: int) -> None:
    for pair in REAL_PAIRS:
        assert_incremental(real[pair[0]], real[pair[1]], text, seed)


def test_real_text(real: Family) -> None:
    with open(random.__file__, encoding="utf-8") as source:
        text = source.read()[:20_000]
    for pair in REAL_PAIRS:
        context = assert_incremental(real[pair[0]], real[pair[1]], text, 0)
        tail = real[pair[1]].encode(context.tail)
        assert len(tail) <= 10 * TAIL_TOKENS, "the open tail must stay short"


def test_text_without_spaces_keeps_a_short_tail(family: Family) -> None:
    target, drafter = family["byte-level"], family["sentencepiece"]
    context = assert_incremental(target, drafter, "中文字符和一些汉字" * 200, 0)
    assert len(drafter.encode(context.tail)) < 200


def test_normalised_text_without_spaces_is_cut_by_force(family: Family) -> None:
    """With NFC, ids and text differ everywhere, so no cut can be checked."""
    target, drafter = family["byte-level"], family["byte-level-nfc"]
    context = make_bridge(target, drafter).open()
    text = "e\u0301a\u0300" * 6000
    ids = target_ids(target, text)
    for at in range(0, len(ids), 500):
        context.append(ids[at : at + 500])
    assert isinstance(context, TextContext)
    assert len(context.tail) < 3_000
    assert drafter.decode_bytes(context.ids).decode() == "\u00e9\u00e0" * 6000


@quick
@given(seed=st.integers(0, 2**16))
def test_any_target_ids(family: Family, seed: int) -> None:
    """The ids include cut characters, invalid bytes, special tokens and unknown ids."""
    rng = random.Random(seed)
    for target_name, drafter_name in PAIRS[:5]:
        target, drafter = family[target_name], family[drafter_name]
        bridge = make_bridge(target, drafter, target_eos=[1], drafter_eos=[1])
        singles = [i for i in target.byte_ids[128:] if i >= 0]
        pools = [singles, range(target.vocab_size), [0, 1, target.vocab_size + 5]]
        ids = [rng.choice(rng.choices(pools, [6, 5, 1])[0]) for _ in range(60)]
        stepwise, at_once = bridge.open(), bridge.open()
        assert isinstance(stepwise, TextContext)
        walk(stepwise, ids, rng)
        bridge.extend([at_once], [ids])
        assert stepwise.ids == at_once.ids
        assert stepwise.held == at_once.held
        assert not at_once.broken


def test_characters_split_at_every_byte(family: Family) -> None:
    target, drafter = family["byte-level"], family["sentencepiece"]
    text = "x👍中é"
    data = text.encode()
    ids = [target.byte_ids[byte] for byte in data]
    context = make_bridge(target, drafter).open()
    for count, token_id in enumerate(ids, 1):
        context.append([token_id])
        complete = data[:count].decode("utf-8", "ignore")
        assert context.held == data[len(complete.encode()) : count]
        assert context.ids == [drafter.bos_id, *drafter.encode(" " + complete)]


def test_extend_is_append_for_many(family: Family) -> None:
    target, drafter = family["byte-level"], family["sentencepiece"]
    bridge = make_bridge(target, drafter)
    all_ids = [target.encode(text) for text in ("def f(x):", "中文 👍 ok", "", "a  b\n" * 40)]
    batched = [bridge.open() for _ in all_ids]
    single = [bridge.open() for _ in all_ids]
    for at in range(0, 200, 3):
        steps = [ids[at : at + 3] for ids in all_ids]
        kept = bridge.extend(batched, steps)
        assert kept == [context.append(ids) for context, ids in zip(single, steps, strict=True)]
    assert [context.ids for context in batched] == [context.ids for context in single]


def test_special_tokens_by_role(family: Family) -> None:
    target, drafter = family["byte-level"], family["sentencepiece"]
    user = target.special_id_of["<|user|>"]
    bridge = make_bridge(target, drafter, target_eos=[0], drafter_eos=[2])
    context = opened(bridge, [*target.encode("hi there"), 0, user, *target.encode("ok")])
    # EOS becomes EOS. A special token that the drafter lacks becomes text. Text after a special
    # token gets a leading space again.
    assert context.ids == [1, *drafter.encode(" hi there"), 2, *drafter.encode(" <|user|>ok")]


def test_equal_content_is_the_same_token(family: Family) -> None:
    target, drafter = family["byte-level"], family["byte-level-nfc"]
    user = target.special_id_of["<|user|>"]
    context = opened(make_bridge(target, drafter, target_eos=[0]), [user, *target.encode("in")])
    assert context.ids == [drafter.special_id_of["<|user|>"], *drafter.encode("in")]


def test_bos_follows_the_drafter(family: Family) -> None:
    spm, plain = family["sentencepiece"], family["byte-level"]
    forth = opened(make_bridge(spm, plain), [1, *spm.encode(" in the")])
    assert forth.ids == plain.encode("in the")
    back = make_bridge(plain, spm).open()
    assert back.ids == [1]
    back.append(plain.encode("in the"))
    assert back.ids == [1, *spm.encode(" in the")]


def test_a_failing_context_is_broken_alone(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = family["byte-level"], family["sentencepiece"]
    encode = drafter.raw_encode_batch

    def failing(batch: Sequence[str]) -> list[list[int]]:
        if any("POISON" in text for text in batch):
            raise RuntimeError("no")
        return encode(batch)

    monkeypatch.setattr(drafter, "raw_encode_batch", failing)
    monkeypatch.setattr(drafter, "raw_encode", lambda text: failing([text])[0])
    bridge = make_bridge(target, drafter)
    contexts = [bridge.open() for _ in range(3)]
    bridge.extend(contexts, [target.encode(text) for text in ("fine one", "POISON", "fine two")])
    assert [context.broken for context in contexts] == [False, True, False]
    assert contexts[2].ids == [1, *drafter.encode(" fine two")]
    assert bridge.failures["context_error"] == 1
    assert bridge.to_target(contexts, [drafter.encode(" in")] * 3, [4] * 3)[1] == []


def tekken_of(encoding: Any) -> Any:
    """Return an encoding in the form of mistral_common, in which special tokens come first."""
    return SimpleNamespace(
        _model=encoding,
        num_special_tokens=3,
        n_words=3 + len(encoding._mergeable_ranks),
        bos_id=1,
        eos_id=2,
        id_to_piece="<{}>".format,
        is_special=None,
    )


@pytest.mark.parametrize("kind", ["tiktoken", "tekken", "real"])
def test_a_panic_of_tiktoken_breaks_one_context(family: Family, kind: str) -> None:
    """A panic is not an `Exception`. The text that caused it is not encoded again."""
    target, encoding = family["byte-level"], recipes.build_tiktoken()
    own, tried = encoding.encode_ordinary, list[int]()
    real = kind == "real"
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})

    def encode(text: str) -> list[int]:
        tried.append(len(text))
        if not real and len(text) > 1000:
            raise panic("StackOverflow")
        ids: list[int] = own(text)
        return ids

    encoding.encode_ordinary = encode
    drafter = load_tokenizer(tekken_of(encoding) if kind == "tekken" else encoding, "handful")
    bridge = make_bridge(target, drafter)
    contexts = [bridge.open() for _ in range(3)]
    space = max(filter(bytes.isspace, target.token_bytes), key=lambda data: data.count(b" "))
    long = [target.token_bytes.index(space)] * (1_000_000 if real else 2000)
    fine = target.encode("fine one")
    bridge.extend(contexts, [fine, [*long, *fine], fine])
    if real and not contexts[1].broken:
        pytest.skip("this tiktoken takes all texts")
    assert [context.broken for context in contexts] == [False, True, False]
    assert bridge.failures == {"context_error": 1}
    tried.clear()
    bridge.extend(contexts, [fine] * 3)
    assert max(tried) < 1000
    begins = [drafter.bos_id] if drafter.adds_bos else []
    assert contexts[2].ids == [*begins, *drafter.encode("fine onefine one")]


def test_other_base_exceptions_are_raised() -> None:
    encoding = recipes.build_tiktoken()
    own = encoding.encode_ordinary

    def interrupted(text: str) -> list[int]:
        if text == "stop":
            raise KeyboardInterrupt
        ids: list[int] = own(text)
        return ids

    encoding.encode_ordinary = interrupted
    drafter = load_tokenizer(encoding, "handful")
    with pytest.raises(KeyboardInterrupt):
        drafter.encode("stop")


def test_runs_of_spaces_are_split_as_by_the_target(family: Family) -> None:
    """Encoded at the end of a text, the run would be one token."""
    tokenizer = family["byte-level"]
    word = tokenizer.encode("class")
    split = tokenizer.encode("value\n\nclass")[: -len(word)]
    merged = tokenizer.encode("value\n\n")
    assert split != merged
    bridge = make_bridge(tokenizer, tokenizer, mode="text")
    for ids in (split, merged):  # behind a paragraph, a word is likely
        context = opened(bridge, ids)
        assert context.ids == split
        context.append(word)
        assert context.ids == tokenizer.encode("value\n\nclass")
    indented = tokenizer.encode("x:\n  value\n\n")
    assert opened(bridge, indented).ids == indented


def test_an_unknown_token_does_not_split_a_run_of_spaces(family: Family) -> None:
    """An unknown token has no bytes, whatever the last token of the vocabulary is."""
    tokenizer = copy.copy(family["byte-level"])
    tokenizer.token_bytes = (*tokenizer.token_bytes[:-1], b"\n")
    bridge = make_bridge(tokenizer, family["byte-level"], mode="text")
    context = opened(bridge, tokenizer.encode("x:\n  value\n\n"))
    before = list(context.ids)
    context.append([tokenizer.vocab_size])
    assert context.ids == before


def test_a_space_is_held_for_the_next_word(family: Family) -> None:
    """The target writes an indentation apart, and the drafter's next token begins with a space."""
    target = load_tokenizer(recipes.build_bytes("Ġ Ġ,ĠĠ ĠĠ"), "runs of spaces")
    drafter = family["byte-level"]
    bridge = make_bridge(target, drafter)
    start, line = "if x:\n    ", "return value"
    context = opened(bridge, target.encode(start))
    whole = drafter.encode(start + line)
    assert context.held == b" "
    assert whole[: len(context.ids)] == context.ids != drafter.encode(start)
    rest = whole[len(context.ids) :]
    draft, none = bridge.to_target([context] * 2, [rest, drafter.encode("x")], [99] * 2)
    assert (target.decode_bytes(draft), none) == (line.encode(), [])
    assert not bridge.failures.total()
    context.append(target.encode(line))
    assert (context.held, context.ids) == (b"", whole)
    ours = make_bridge(drafter, family["sentencepiece"])
    assert opened(ours, drafter.encode(start)).held == b""
