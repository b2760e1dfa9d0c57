# SPDX-License-Identifier: Apache-2.0
"""Statistics of a pair, compared with brute force, and with known sizes of real pairs."""

import json
import re
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contexts import Family
from hypothesis import given
from hypothesis import strategies as st

from vllm_hetero_spec.text.sample_text import CALIBRATION_TEXT
from vllm_hetero_spec.text.statistics import (
    PairMeter,
    PairStatistics,
    count_vocabulary,
    documents_of,
    length_histogram,
    measure_overlap,
    shared_text,
    straddling,
    unspelled_characters,
)
from vllm_hetero_spec.text.tokenizer import TextTokenizer
from vllm_hetero_spec.text.vocabulary import build_maps

# Number of common tokens of published models: by get_vocab(), with normalized spaces, and by bytes.
# Mixtral-8x22B has Mistral v3's tokenizer, vicuna-68m Llama 2's, and tiny_starcoder StarCoder's.
PUBLISHED = {
    ("llama-3.1", "qwen2"): (109_566, 109_566, 109_566),
    ("mistral-v3-32768", "llama-2"): (24_184, 24_184, 24_088),
    ("mistral-v3-32768", "qwen2"): (10_566, 24_764, 29_237),
    ("phi-3-medium-128k-instruct", "qwen2"): (9_588, 22_290, 26_346),
    ("codellama", "starcoder"): (8_481, 16_513, 18_287),
}


def measure(target: TextTokenizer, drafter: TextTokenizer, *documents: str) -> PairStatistics:
    meter = PairMeter(target, drafter, build_maps(target, drafter))
    for document in documents:
        meter.add([document])
    return meter.statistics()


def strings(shared: Path, name: str) -> set[str]:
    """Return the token strings of a tokenizer.json, as written in the file."""
    spec: dict[str, Any] = json.loads((shared / "tokenizers" / name / "tokenizer.json").read_text())
    return {*spec["model"]["vocab"], *(token["content"] for token in spec["added_tokens"])}


@pytest.mark.parametrize(("pair", "sizes"), PUBLISHED.items(), ids=map("/".join, PUBLISHED))
def test_common_tokens_of_published_pairs(
    real: Family, shared: Path, pair: tuple[str, str], sizes: tuple[int, int, int]
) -> None:
    target, drafter = (real[name] for name in pair)
    overlap = measure_overlap(target, drafter, *(strings(shared, name) for name in pair))
    assert (overlap.get_vocab, overlap.space_normalised, overlap.true_bytes) == sizes
    assert 0 <= overlap.true_bytes - overlap.text_bytes <= 3


@pytest.mark.parametrize(
    "name", ["byte-level", "byte-level-nfc", "sentencepiece", "unigram", "tiktoken", "processor"]
)
def test_ids_by_kind(family: Family, name: str) -> None:
    tokenizer = family[name]
    counts = count_vocabulary(tokenizer)
    assert counts.ids == counts.text + counts.special + counts.holes == tokenizer.vocab_size
    assert counts.special + counts.holes == len(tokenizer.special_ids)
    spelled = [data for data in tokenizer.token_bytes if data]
    assert counts.duplicates == sum(spelled.count(data) > 1 for data in spelled)
    invalid = [data for data in spelled if "\ufffd" in data.decode("utf-8", "replace")]
    assert counts.not_utf8 == len([data for data in invalid if data != "\ufffd".encode()])


def test_readings_of_the_intersection(family: Family) -> None:
    target, drafter = family["sentencepiece"], family["byte-level"]
    overlap = measure_overlap(
        target, drafter, ["▁the", "▁▁", "▁", "a▁b", "x"], ["Ġthe", "ĠĠ", "Ġ", "aĠb", "x"]
    )
    assert overlap.get_vocab == 1
    assert overlap.space_normalised == 4  # a mark inside a token is not normalized
    expected = {data for data in target.token_bytes if data and data in drafter.token_bytes}
    assert shared_text(target, drafter) == expected
    assert overlap.text_bytes == len(expected)
    assert overlap.true_bytes == len(expected)  # no special token of one is a token of the other


def brute_straddling(ends: list[int], others: list[int]) -> int:
    starts = [0, *ends[:-1]]
    return sum(
        any(start < other < end for other in others)
        for start, end in zip(starts, ends, strict=True)
    )


@given(
    left=st.lists(st.integers(0, 4), max_size=12), right=st.lists(st.integers(0, 4), max_size=12)
)
def test_straddling_tokens(left: list[int], right: list[int]) -> None:
    """This holds for any two tokenizations of the same bytes, also with empty tokens."""
    missing = sum(left) - sum(right)
    (right if missing > 0 else left).append(abs(missing))
    ends, others = list(accumulate(left)), list(accumulate(right))
    found = straddling(np.array(ends, np.int64), np.array(others, np.int64))
    assert found == brute_straddling(ends, others)


@pytest.mark.parametrize(
    ("target", "drafter"),
    [("byte-level", "sentencepiece"), ("sentencepiece", "tiktoken"), ("processor", "byte-level")],
)
def test_shares_of_a_text(family: Family, target: str, drafter: str) -> None:
    theirs, ours = family[target], family[drafter]
    documents = documents_of(CALIBRATION_TEXT)
    found = measure(theirs, ours, *documents)
    target_ids = [theirs.encode(document) for document in documents]
    drafter_ids = [ours.encode(document) for document in documents]
    tokens = [theirs.token_bytes[i] for ids in target_ids for i in ids]
    writable = {data for data in ours.token_bytes if data}
    begun = {theirs.token_bytes[ids[0]] for data in writable if (ids := theirs.encode_bytes(data))}
    assert found.target_tokens == len(tokens)
    assert found.drafter_tokens == sum(map(len, drafter_ids))
    assert found.text_bytes == len(CALIBRATION_TEXT.encode())
    assert found.omega_t == pytest.approx(sum(t in writable for t in tokens) / len(tokens))
    assert found.omega_k >= found.omega_t
    # A common token is its own first token, even if the target would split it.
    reachable = sum(token in begun | writable for token in tokens)
    assert found.omega_k == pytest.approx(reachable / len(tokens))
    ends = [
        [list(accumulate(len(side.token_bytes[i]) for i in ids)) for ids in encoded]
        for side, encoded in ((theirs, target_ids), (ours, drafter_ids))
    ]
    crossed = sum(map(brute_straddling, *ends))
    assert found.target_straddle == pytest.approx(crossed / len(tokens))
    assert found.drafter_straddle == pytest.approx(
        sum(map(brute_straddling, *reversed(ends))) / found.drafter_tokens
    )
    assert (found.target_failures, found.drafter_failures) == (0, 0)


def test_a_tokenizer_shares_everything_with_itself(family: Family) -> None:
    tokenizer = family["sentencepiece"]
    found = measure(tokenizer, tokenizer, CALIBRATION_TEXT)
    assert (found.omega_t, found.omega_k) == (1, 1)
    assert (found.target_straddle, found.drafter_straddle, found.failure_share) == (0, 0, 0)
    assert found.drafter_vocabulary == len({data for data in tokenizer.token_bytes if data})


def test_only_lines_at_fault_count_as_changed(family: Family) -> None:
    """The lines around a changed line are still compared."""
    exact, composing = family["byte-level"], family["byte-level-nfc"]
    rewritten, good = "cafe\u0301 au lait\n", "def mean(values):\n"
    found = measure(composing, exact, good * 2 + rewritten + "\n" + good)
    assert found.lines == 4
    assert (found.target_failures, found.drafter_failures) == (1, 0)
    assert found.failure_share == 0.25
    assert measure(exact, composing, good + rewritten).drafter_failures == 1
    undisturbed = measure(composing, exact, good * 2, "\n" + good)
    assert found.target_straddle == undisturbed.target_straddle
    assert found.drafter_straddle == undisturbed.drafter_straddle > 0


def test_documents_in_any_portions(family: Family) -> None:
    target, drafter = family["byte-level"], family["unigram"]
    documents = documents_of(CALIBRATION_TEXT)
    meter = PairMeter(target, drafter, build_maps(target, drafter))
    meter.add(documents)
    assert meter.statistics() == measure(target, drafter, *documents)


def test_characters_without_a_token(family: Family) -> None:
    text = Counter("in the snow ☃☃ and 𝄞")
    assert unspelled_characters(family["unigram"], text) == {"☃": 2, "𝄞": 1}
    assert not unspelled_characters(family["byte-level"], text)


def test_lengths() -> None:
    assert length_histogram([b"", b"a", b"b", b"abc", b"abcde", b"abcd"], 4) == [2, 0, 1, 2]


def test_the_builtin_text_is_of_many_kinds() -> None:
    documents = documents_of(CALIBRATION_TEXT)
    assert "".join(documents) == CALIBRATION_TEXT
    assert len(documents) > 30
    for script in ("[a-z]", "[а-я]", "[一-鿿]", "[ぁ-ん]", "[가-힣]", "\t", "🙂", "```python"):
        assert re.search(script, CALIBRATION_TEXT)


def test_composing_characters_is_not_lossy(family: Family) -> None:
    documents = documents_of(CALIBRATION_TEXT)
    found = measure(family["byte-level"], family["byte-level-nfc"], *documents)
    assert found.drafter_failures == 1
    assert found.failure_share <= 0.01
