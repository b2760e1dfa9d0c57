# SPDX-License-Identifier: Apache-2.0
"""Options: accepted spellings, and refusals in one sentence."""

import copy
import json
import math
from pathlib import Path

import pytest

from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.options import (
    ConfidenceOptions,
    Debug,
    FuzzyOptions,
    HeteroOptions,
    _log_once,
    parse,
    wants_us,
)

GOOD = {"method": "slem", "model": "D", "num_speculative_tokens": 5}
AHEAD = {"draft_ahead": True}


def fuzzy(**keys: object) -> dict:
    return {"method": "tli", "verification": {"fuzzy": keys}}


def debug(**keys: object) -> dict:
    return {"debug": keys}


@pytest.mark.parametrize(
    "user",
    [
        GOOD,
        {"method": "slem", "model": "D", "num-speculative-tokens": 5},
        GOOD | {"num-speculative-tokens": 5},
    ],
)
def test_spellings_mean_the_same(user: dict) -> None:
    assert wants_us(user)
    assert parse(user) == HeteroOptions("slem", "D", 5)


@pytest.mark.parametrize(
    "user",
    [
        {},
        {"method": "ngram", "num_speculative_tokens": 3},
        {"model": "D", "num_speculative_tokens": 3},
        {"method": "draft_model", "use_heterogeneous_vocab": True, "model": "D"},
        {"method": "no-such-thing-at-all"},
    ],
)
def test_other_configurations_are_left_alone(user: dict) -> None:
    assert not wants_us(user, ("ngram", "draft_model", "eagle"))


def test_own_keys_reach_the_options() -> None:
    unchanged = {"tokenizer": "T", "revision": "r1", "quantization": "fp8", "dtype": "bfloat16"}
    unchanged |= {"context": 512, "enforce_eager": False, "tensor_parallel": "sharded"}
    read = {"trust-remote-code": True, "debug": {"chat-template": "off", "calibrate": None}}
    read |= {"kv_cache_memory_bytes": "64MiB", "rejection_sample_method": "standard"}
    assert parse(GOOD | unchanged | read, target_tensor_parallel=2) == HeteroOptions(
        "slem",
        "D",
        5,
        **unchanged,
        trust_remote_code=True,
        kv_cache_memory_bytes=64 << 20,
        debug=Debug(chat_template="off"),
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_speculative_token": 3}, ["num_speculative_token'", "did you mean"]),
        ({"drafter": "d"}, ["drafter is no key", 'write "model"']),
        ({"model": None}, ["needs a drafter", "model"]),
        ({"model": 1.5}, ["model is 1.5", "string", "Hugging Face name or folder"]),
        ({"model": ["D"]}, ["model is ['D']", "Hugging Face name or folder"]),
        ({"attention_backend": ["FLASH_ATTN"]}, ["attention_backend is ['FLASH", "a string"]),
        ({"attention_backend": False}, ["attention_backend is False", '"FLASH_ATTN"']),
        ({"num_speculative_tokens": 0}, ["num_speculative_tokens is 0", "from 1 to 64"]),
        ({"num_speculative_tokens": 65}, ["num_speculative_tokens is 65", "from 1 to 64"]),
        ({"num_speculative_tokens": None}, ["num_speculative_tokens is missing"]),
        ({"tree_nodes": -1}, ["tree_nodes is -1", "from 0 to 64"]),
        ({"tree_nodes": 65}, ["tree_nodes is 65"]),
        ({"tree_nodes": 8} | debug(tree_width=5), ["tree_width is 5", "from 1 to 4"]),
        ({"tree_nodes": 0} | debug(tree_width=1), ["tree_width", "tree_nodes"]),
        ({"num_speculative_tokens": "five"}, ["num_speculative_tokens is 'five'"]),
        ({"num_speculative_tokens": "2.5"}, ["num_speculative_tokens is '2.5'", "from 1 to 64"]),
        ({"num_speculative_tokens": True}, ["num_speculative_tokens is True", "from 1 to 64"]),
        ({"context": 63}, ["context is 63"]),
        ({"context": "long"}, ["context is 'long'", "whole number"]),
        ({"max-model-len": 512}, ["max_model_len is no key", 'write "context"']),
        ({"kv_cache_memory_bytes": "lots"}, ["kv_cache_memory_bytes is 'lots'", "64MiB"]),
        ({"kv_cache_memory_bytes": "0.5"}, ["kv_cache_memory_bytes is '0.5'", "from 1"]),
        ({"kv_cache_memory_bytes": 0.5}, ["kv_cache_memory_bytes is 0.5", "from 1"]),
        ({"kv_cache_memory_bytes": 0}, ["kv_cache_memory_bytes is 0", "from 1"]),
        ({"kv_cache_memory_bytes": "9" * 400}, ["kv_cache_memory_bytes is '999", "below 2^63"]),
        ({"kv_cache_memory_bytes": 1 << 63}, ["kv_cache_memory_bytes is 9223", "below 2^63"]),
        ({"kv_cache_memory_bytes": "9000000TiB"}, ["is '9000000TiB'", "below 2^63"]),
        (fuzzy(threshold=math.nan), ["threshold is nan", "finite", "0.1"]),
        (fuzzy(threshold=math.inf), ["threshold is inf", "finite", "0.1"]),
        (fuzzy(threshold=10**400), ["threshold is 1000", "finite", "0.1"]),
        (fuzzy(threshold=-1), ["threshold is -1", "at least 0"]),
        (fuzzy(threshold=None), ["verification.fuzzy.threshold is missing", "at least 0"]),
        ({"method": "tli", "verification": "fuzzy"}, ["threshold is missing", "0.1"]),
        (fuzzy(threshold=0.1, divergence="jd"), ["fuzzy.divergence is 'jd'", "js, tv, kl"]),
        (fuzzy(treshold=0.1), ["verification.fuzzy has an unknown key", "mean 'threshold'?"]),
        (fuzzy(threshold=0.1) | {"method": "slem"}, ["needs sampled drafts", "tli"]),
        ({"verification": {"race": {}}}, ["verification is {'race': {}}", "token, block, race"]),
        ({"use_heterogeneous_vocab": True}, ["use_heterogeneous_vocab is no key", "leave it out"]),
        ({"heterogeneous_vocab_method": "tli"}, ["vocab_method is no key", 'write "method"']),
        ({"num-speculative-tokens": 4}, ["num_speculative_tokens is given twice", "5 and 4"]),
        (debug(translation="txt"), ["translation is 'txt'", "did you mean 'text'"]),
        (debug(chat_template="of"), ["chat_template is 'of'", "did you mean 'off'", "auto, off"]),
        ({"debug": "text"}, ["debug is 'text'", "a mapping of keys"]),
        (debug(translate="text"), ["debug has an unknown key 'translate'", "'translation'"]),
        ({"draft_ahead": "yes"}, ["draft_ahead is 'yes'", "true or false"]),
        ({"parallel": "thread"}, ["parallel is 'thread'", '"draft_ahead": true']),
        ({"parallel": "ray"}, ["parallel is 'ray'", 'write "draft_ahead": true']),
        ({"parallel": "ray", "ray_drafter": {}}, ["ray_drafter is no key", "leave it out"]),
        ({"pipeline": "one_batch"}, ["pipeline is no key", "leave it out", "Model Runner V2"]),
        ({"drafter_device": "1"}, ["drafter_device", '"draft_ahead": true']),
        (AHEAD | {"method": "slrs"}, ["'slrs'", "slem, push_forward, tli", "hetero"]),
        (AHEAD | {"method": "union"}, ["'union'", "slem, push_forward, tli"]),
        (AHEAD | {"method": "tli", "verification": "race"}, ["'tli'", "race", "slem"]),
        (AHEAD | {"tree_nodes": 8}, ["tree_nodes is 8", "chains"]),
        (AHEAD | {"controller": "confidence", "method": "slem"}, ["controller is 'confidence'"]),
        (AHEAD | {"drafter_device": "1-"}, ["drafter_device is '1-'", "2-3,6", "cuda:1"]),
        (AHEAD | {"drafter_device": "5-2"}, ["drafter_device is '5-2'", "smaller number"]),
        (AHEAD | {"drafter_device": "1,5-2"}, ["drafter_device is '1,5-2'", "smaller number"]),
        ({"tensor_parallel": "rank1"}, ["did you mean 'rank0'", "sharded"]),
        ({"draft_tensor_parallel_size": 1}, ["is no key", 'write "tensor_parallel": "rank0"']),
        ({"controller": "godput"}, ["controller is 'godput'", "did you mean 'goodput'"]),
        ({"merge_candidates": 4}, ["merge_candidates belongs to", "slrs"]),
        ({"method": "slrs", "merge_candidates": 99}, ["is 99", "from 0 to 16"]),
        ({"confidence_threshold": 0.5}, ["confidence_threshold needs", "controller"]),
        ({"threshold": 0.5}, ["threshold needs verification.fuzzy"]),
        ({"divergence": "js", "verification": "race"}, ["divergence needs verification"]),
        ({"translation": "text"} | debug(translation="auto"), ["debug.translation", "leave"]),
        ({"parallel": "off"} | AHEAD, ["parallel and draft_ahead", "two values"]),
        ({"controller": {"confidence": {"threshold": 2}}}, ["threshold is 2", "from 0 to 1"]),
        (debug(calibrate="no"), ["calibrate is 'no'", "true or false"]),
        ({"enforce_eager": "yes"}, ["enforce_eager is 'yes'", "true or false"]),
        ({"rejection_sample_method": "synthetic"}, ["synthetic", "'standard'"]),
        ({"rejection_sample_method": "block"}, ["block", "'standard'"]),
    ],
)
def test_mistakes_are_refused_in_one_sentence(change: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(GOOD | change)
    message = str(refused.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("options", "key", "text", "value"),
    [
        ({}, "num_speculative_tokens", "7", 7),
        ({}, "num_speculative_tokens", "7.0", 7),
        ({}, "num_speculative_tokens", 7.0, 7),
        ({}, "tree_nodes", " 8 ", 8),
        ({}, "context", "1024", 1024),
        ({"method": "slrs"}, "merge_candidates", "4", 4),
        ({}, "kv_cache_memory_bytes", "67108864", 64 << 20),
    ],
)
def test_numbers_may_be_text(options: dict, key: str, text: str, value: float) -> None:
    found = getattr(parse(GOOD | options | {key: text}), key)
    assert found == value
    assert type(found) is type(value)


def test_numbers_of_tables_may_be_text() -> None:
    text = {"tree_nodes": 8, "controller": {"confidence": {"threshold": "0.5"}}}
    options = parse(GOOD | fuzzy(threshold="1e-1") | debug(tree_width="2") | text)
    assert options.verification == FuzzyOptions(0.1)
    assert options.controller == ConfidenceOptions(0.5)
    assert options.debug == Debug(tree_width=2)


def test_a_word_stands_for_its_table() -> None:
    options = parse(GOOD | {"controller": "confidence"})
    assert options.controller == ConfidenceOptions(0.4)


@pytest.mark.parametrize(
    ("old", "today"),
    [
        ({"parallel": "process"}, AHEAD),
        ({"parallel": "off"}, {"draft_ahead": False}),
        ({"translation": "text", "calibrate": False}, debug(translation="text", calibrate=False)),
        ({"tree-width": 2, "tree_nodes": 8}, {"tree_nodes": 8} | debug(tree_width=2)),
        (
            {"method": "tli", "verification": "fuzzy", "threshold": "0.1", "divergence": "tv"},
            fuzzy(threshold="0.1", divergence="tv"),
        ),
        (fuzzy(threshold=0.1) | {"divergence": "kl"}, fuzzy(threshold=0.1, divergence="kl")),
        (
            {"controller": "confidence", "confidence_threshold": 0.3},
            {"controller": {"confidence": {"threshold": 0.3}}},
        ),
        ({"calibrate": True} | debug(calibrate=True), debug(calibrate=True)),
    ],
)
def test_earlier_spellings_are_read_and_logged_once(
    old: dict, today: dict, caplog: pytest.LogCaptureFixture
) -> None:
    _log_once.cache_clear()
    user = copy.deepcopy(GOOD | old)
    for _ in range(2):
        assert parse(GOOD | old) == parse(GOOD | today)
    assert user == GOOD | old
    (line,) = caplog.messages
    new = {key: value for key, value in today.items() if key not in ("method", "tree_nodes")}
    assert line.endswith(f". Release 0.3 will refuse them; write {json.dumps(new)}.")


def test_an_earlier_null_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert parse(GOOD | {"parallel": None, "threshold": None}) == parse(GOOD)
    assert caplog.messages == []


def test_home_folders_are_expanded() -> None:
    """No shell expands `~` inside JSON."""
    options = parse(GOOD | {"model": "~/D", "tokenizer": "~/T"})
    assert (options.model, options.tokenizer) == (str(Path.home() / "D"), str(Path.home() / "T"))


def test_a_split_drafter_does_not_sample() -> None:
    split = {"tensor_parallel": "sharded"}
    with pytest.raises(ConfigError, match=r"'tli' does not run with .*sharded.*rank0"):
        parse(GOOD | split | {"method": "tli"}, target_tensor_parallel=2)
    assert parse(GOOD | split | {"method": "hetero"}, target_tensor_parallel=2)
    assert parse(GOOD | {"method": "tli"}, target_tensor_parallel=2)


def test_our_method_under_vllms_name_is_refused() -> None:
    """vLLM's refusal of the key would not name our method."""
    user = {"method": "draft_model", "use_heterogeneous_vocab": True, "model": "D"}
    assert wants_us(user | {"heterogeneous_vocab_method": "slem"}, ("draft_model",))
    with pytest.raises(ConfigError, match=r"use_heterogeneous_vocab is no key"):
        parse(user | {"heterogeneous_vocab_method": "slem"})


def test_misspelt_method_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'slem'"):
        wants_us({"method": "slen", "model": "D"}, ("eagle", "ngram"))
    # vLLM refuses a misspelt name of its own methods.
    assert not wants_us({"method": "eagel"}, ("eagle", "ngram"))
