# SPDX-License-Identifier: Apache-2.0
"""Configuration: every spelling is understood, every mistake is refused in one sentence."""

import math
from pathlib import Path

import pytest

from vllm_hetero_spec.config import ConfigError, HeteroOptions, RayDrafter, parse, wants_us

GOOD = {"method": "slem", "model": "D", "num_speculative_tokens": 5}
FUZZY = {"method": "tli", "verification": "fuzzy"}
PROCESS, RAY = {"parallel": "process"}, {"parallel": "ray"}


@pytest.mark.parametrize(
    "user",
    [
        GOOD,
        {"method": "slem", "model": "D", "num-speculative-tokens": 5},
        {
            "method": "draft_model",
            "use_heterogeneous_vocab": True,
            "heterogeneous_vocab_method": "slem",
            "model": "D",
            "num_speculative_tokens": 5,
        },
        GOOD | {"num-speculative-tokens": 5},
        GOOD | {"heterogeneous_vocab_method": "slem"},
        GOOD | {"heterogeneous_vocab_method": None, "use_heterogeneous_vocab": None},
    ],
)
def test_spellings_mean_the_same(user: dict) -> None:
    assert wants_us(user)
    assert parse(user) == (HeteroOptions("slem", "D", 5), {})


@pytest.mark.parametrize(
    "user",
    [
        None,
        {},
        {"method": "ngram", "num_speculative_tokens": 3},
        {"model": "D", "num_speculative_tokens": 3},
        {"method": "draft_model", "use_heterogeneous_vocab": True, "model": "D"},
        {"method": "no-such-thing-at-all"},
    ],
)
def test_other_configurations_are_left_alone(user: dict | None) -> None:
    assert not wants_us(user, ("ngram", "draft_model", "eagle"))


def test_own_keys_reach_the_options() -> None:
    options, vllm_keys = parse(
        GOOD
        | {
            "tokenizer": "T",
            "revision": "r1",
            "trust-remote-code": True,
            "quantization": "fp8",
            "dtype": "bfloat16",
            "max_model_len": 512,
            "enforce_eager": False,
            "chat_template": "off",
            "kv_cache_memory_bytes": "64MiB",
            "draft_tensor_parallel_size": 2,
            "rejection_sample_method": "standard",
        },
        target_tensor_parallel=2,
    )
    assert options == HeteroOptions(
        "slem",
        "D",
        5,
        tokenizer="T",
        revision="r1",
        trust_remote_code=True,
        quantization="fp8",
        dtype="bfloat16",
        context=512,
        enforce_eager=False,
        kv_cache_memory_bytes=64 << 20,
        tensor_parallel="sharded",
        chat_template="off",
    )
    assert vllm_keys == {"rejection_sample_method": "standard"}


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
        ({"tree_nodes": 8, "tree_width": 5}, ["tree_width is 5", "from 1 to 4"]),
        ({"tree_nodes": 8, "tree_values": "ranks"}, ["did you mean 'rank'", "learnt, rank"]),
        ({"tree_values": "rank"}, ["tree_values", "tree_nodes"]),
        ({"tree_nodes": 0, "tree_width": 1}, ["tree_width", "tree_nodes"]),
        ({"num_speculative_tokens": "five"}, ["num_speculative_tokens is 'five'"]),
        ({"num_speculative_tokens": "2.5"}, ["num_speculative_tokens is '2.5'", "from 1 to 64"]),
        ({"num_speculative_tokens": True}, ["num_speculative_tokens is True", "from 1 to 64"]),
        ({"context": 63}, ["context is 63"]),
        ({"max_model_len": 63}, ["max_model_len is 63", "from 64"]),
        ({"max-model-len": "long"}, ["max_model_len is 'long'", "whole number"]),
        ({"kv_cache_memory_bytes": "lots"}, ["kv_cache_memory_bytes is 'lots'", "64MiB"]),
        ({"kv_cache_memory_bytes": "0.5"}, ["kv_cache_memory_bytes is '0.5'", "from 1"]),
        ({"kv_cache_memory_bytes": 0.5}, ["kv_cache_memory_bytes is 0.5", "from 1"]),
        ({"kv_cache_memory_bytes": 0}, ["kv_cache_memory_bytes is 0", "from 1"]),
        ({"kv_cache_memory_bytes": "9" * 400}, ["kv_cache_memory_bytes is '999", "below 2^63"]),
        ({"kv_cache_memory_bytes": 1 << 63}, ["kv_cache_memory_bytes is 9223", "below 2^63"]),
        ({"kv_cache_memory_bytes": "9000000TiB"}, ["is '9000000TiB'", "below 2^63"]),
        (FUZZY | {"threshold": math.nan}, ["threshold is nan", "finite", "0.1"]),
        (FUZZY | {"threshold": math.inf}, ["threshold is inf", "finite", "0.1"]),
        (FUZZY | {"threshold": 10**400}, ["threshold is 1000", "finite", "0.1"]),
        (FUZZY | {"threshold": -1}, ["threshold is -1", "at least 0"]),
        (FUZZY | {"threshold": None}, ["threshold is None", "at least 0"]),
        ({"heterogeneous_vocab_method": "bogus"}, ["method='bogus' does not exist", "slem, "]),
        ({"heterogeneous_vocab_method": "slam"}, ["did you mean 'slem'"]),
        ({"heterogeneous_vocab_method": "tli"}, ["'tli' and method='slem' name two", "leave one"]),
        ({"num-speculative-tokens": 4}, ["num_speculative_tokens is given twice", "5 and 4"]),
        ({"translation": "txt"}, ["translation is 'txt'", "did you mean 'text'"]),
        ({"chat_template": "of"}, ["chat_template is 'of'", "did you mean 'off'", "auto, off"]),
        ({"parallel": "thread"}, ["parallel is 'thread'", "off, process, ray"]),
        ({"drafter_device": "1"}, ["drafter_device", '"parallel": "process"']),
        (PROCESS | {"method": "slrs"}, ["'slrs'", "slem, push_forward, tli", "hetero"]),
        (PROCESS | {"method": "union"}, ["'union'", "slem, push_forward, tli"]),
        (PROCESS | {"method": "tli", "verification": "race"}, ["'tli'", "race", "slem"]),
        (PROCESS | {"tree_nodes": 8}, ["tree_nodes is 8", "chains"]),
        (PROCESS | {"controller": "confidence", "method": "slem"}, ["controller is 'confidence'"]),
        (PROCESS | {"drafter_device": "1-"}, ["drafter_device is '1-'", "2-3,6", "cuda:1"]),
        (PROCESS | {"drafter_device": "5-2"}, ["drafter_device is '5-2'", "smaller number"]),
        (PROCESS | {"drafter_device": "1,5-2"}, ["drafter_device is '1,5-2'", "smaller number"]),
        (RAY | {"drafter_device": "1"}, ["drafter_device", '"parallel": "process"']),
        (PROCESS | {"ray_drafter": {}}, ["ray_drafter", '"parallel": "ray"']),
        (RAY | {"tree_nodes": 8}, ["tree_nodes is 8", '"parallel": "ray"']),
        (RAY | {"ray_drafter": 1}, ["ray_drafter is 1", "num_gpus, num_cpus, share"]),
        (RAY | {"ray_drafter": {"gpus": 1}}, ["num_gpus, num_cpus, share"]),
        (RAY | {"ray_drafter": {"num_cpus": -1}}, ["num_cpus of ray_drafter is -1"]),
        (RAY | {"ray_drafter": {"num_gpus": True}}, ["num_gpus of ray_drafter is True"]),
        (RAY | {"ray_drafter": {"num_gpus": 1.5}}, ["num_gpus of ray_drafter is 1.5", "whole"]),
        (RAY | {"ray_drafter": {"num_gpus": 1e-5}}, ["ray_drafter is 1e-05", "0.0001"]),
        (RAY | {"ray_drafter": {"num_cpus": math.inf}}, ["num_cpus of ray_drafter is inf"]),
        (RAY | {"ray_drafter": {"num_cpus": math.nan}}, ["num_cpus of ray_drafter is nan"]),
        (RAY | {"ray_drafter": {"share": "a b"}}, ["share of ray_drafter is 'a b'"]),
        ({"tensor_parallel": "rank1"}, ["did you mean 'rank0'", "sharded"]),
        ({"draft_tensor_parallel_size": 3}, ["draft_tensor_parallel_size=3", "1"]),
        ({"max_model_len": 512, "context": 256}, ["max_model_len=512", "context is 256"]),
        ({"controller": "godput"}, ["controller is 'godput'", "did you mean 'goodput'"]),
        ({"merge_candidates": 4}, ["merge_candidates belongs to", "slrs"]),
        ({"method": "slrs", "merge_candidates": 99}, ["is 99", "from 0 to 16"]),
        ({"confidence_threshold": 0.5}, ["confidence_threshold belongs to", "controller"]),
        ({"controller": "confidence", "confidence_threshold": 2}, ["is 2", "from 0 to 1"]),
        ({"calibrate": "no"}, ["calibrate is 'no'", "true or false"]),
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
        ({"tree_nodes": 8}, "tree_width", "2", 2),
        ({}, "context", "1024", 1024),
        ({"method": "slrs"}, "merge_candidates", "4", 4),
        ({}, "kv_cache_memory_bytes", "67108864", 64 << 20),
        (FUZZY, "threshold", "1e-1", 0.1),
        ({"controller": "confidence"}, "confidence_threshold", "0.5", 0.5),
    ],
)
def test_numbers_may_be_text(options: dict, key: str, text: str, value: float) -> None:
    found = getattr(parse(GOOD | options | {key: text})[0], key)
    assert found == value
    assert type(found) is type(value)


def test_numbers_under_other_names_may_be_text() -> None:
    options, _ = parse(GOOD | {"max_model_len": "1024", "context": 1024})
    assert options.context == 1024
    size = {"draft_tensor_parallel_size": "2"}
    assert parse(GOOD | size, target_tensor_parallel=2)[0].tensor_parallel == "sharded"
    wanted = {"num_gpus": "0.5", "num_cpus": "2"}
    options, _ = parse(GOOD | RAY | {"method": "slem", "ray_drafter": wanted})
    assert options.ray_drafter == RayDrafter(num_gpus=0.5, num_cpus=2)


def test_home_folders_are_found() -> None:
    """In JSON no shell does it."""
    options, _ = parse(GOOD | {"model": "~/D", "tokenizer": "~/T"})
    assert (options.model, options.tokenizer) == (str(Path.home() / "D"), str(Path.home() / "T"))


def test_an_actor_asks_for_what_the_user_says() -> None:
    wanted = {"num_gpus": 0.5, "num_cpus": None, "share": "night"}
    options, _ = parse(GOOD | RAY | {"method": "slem", "ray_drafter": wanted})
    assert options.ray_drafter == RayDrafter(num_gpus=0.5, share="night")


@pytest.mark.parametrize("wanted", [{"num_gpus": 0}, {"num_gpus": 2.0}, {"num_cpus": 1.5}])
def test_quantities_that_ray_takes(wanted: dict) -> None:
    options, _ = parse(GOOD | RAY | {"method": "slem", "ray_drafter": wanted})
    assert options.ray_drafter == RayDrafter(**wanted)


def test_a_split_drafter_does_not_draw() -> None:
    split = {"tensor_parallel": "sharded"}
    with pytest.raises(ConfigError, match=r"'tli' does not run with .*sharded.*rank0"):
        parse(GOOD | split | {"method": "tli"}, target_tensor_parallel=2)
    assert parse(GOOD | split | {"method": "hetero"}, target_tensor_parallel=2)
    assert parse(GOOD | {"method": "tli"}, target_tensor_parallel=2)


def test_upstreams_spelling_and_ours_do_not_contradict_each_other() -> None:
    """Null is none of them."""
    sharded = {"draft_tensor_parallel_size": 2, "max_model_len": 512}
    for change in ({}, {"tensor_parallel": None, "context": None}, {"context": 512}):
        options, _ = parse(GOOD | sharded | change, target_tensor_parallel=2)
        assert (options.tensor_parallel, options.context) == ("sharded", 512)
    with pytest.raises(ConfigError, match=r"=2 means tensor_parallel='sharded', .* is 'rank0'"):
        parse(GOOD | sharded | {"tensor_parallel": "rank0"}, target_tensor_parallel=2)
    one = {"draft_tensor_parallel_size": 1, "tensor_parallel": "sharded"}
    assert parse(GOOD | one)[0].tensor_parallel == "sharded"


def test_misspelt_method_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'slem'"):
        wants_us({"method": "slen", "model": "D"}, ("eagle", "ngram"))
    with pytest.raises(ConfigError, match=r"heterogeneous_vocab_method='slam'.*'slem'"):
        wants_us({"use_heterogeneous_vocab": True, "heterogeneous_vocab_method": "slam"})
    with pytest.raises(ConfigError, match="use_heterogeneous_vocab=true"):
        wants_us({"heterogeneous_vocab_method": "slem"})
    # A misspelt method of vLLM's is vLLM's to refuse.
    assert not wants_us({"method": "eagel"}, ("eagle", "ngram"))
