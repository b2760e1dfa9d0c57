# SPDX-License-Identifier: Apache-2.0
"""Tests of the resources of draft trees: supported configurations, rows and scratch blocks."""

import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_hetero_spec.engine.trees import scratch
from vllm_hetero_spec.engine.trees.scratch import (
    branches_per_request,
    nodes_of,
    reserve_rows,
    scratch_of,
)

FULL = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
ROOM: dict[str, Any] = {
    "max_num_seqs": 40,
    "max_num_batched_tokens": 40 * 17,
    "max_num_scheduled_tokens": None,
    "long_prefill_token_threshold": 0,
}
SCHEDULER: dict[str, Any] = ROOM | {"get_scheduler_cls": lambda: AsyncScheduler}
RECURRENT = MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,))


def config_of(nodes: int = 8, lookahead: int = 5, **changes: Any) -> Any:
    plain = {
        "speculative_config": SimpleNamespace(
            hetero=SimpleNamespace(num_speculative_tokens=lookahead, tree_nodes=nodes),
            num_speculative_tokens=lookahead,
        ),
        "model_config": SimpleNamespace(
            max_model_len=160,
            uses_mrope=False,
            is_mm_prefix_lm=False,
            rswa_window=None,
            is_hybrid=False,
            is_attention_free=False,
            is_moe=True,
            logits_processors=None,
        ),
        "parallel_config": SimpleNamespace(
            pipeline_parallel_size=1, data_parallel_size=1, use_ubatching=False
        ),
        "cache_config": SimpleNamespace(kv_sharing_fast_prefill=False),
        "scheduler_config": SimpleNamespace(**SCHEDULER),
        "kv_transfer_config": None,
        "lora_config": None,
        "use_v2_model_runner": True,
    }
    return SimpleNamespace(**(plain | changes))


def cache_of(num_blocks: int, *specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs or (FULL,))]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.mark.parametrize(
    ("num_blocks", "specs", "kept"),
    [
        (10_000, (), 64),  # two blocks for each of 32 branches
        (400, (), 20),  # one block in 20
        (11, (), 0),  # no block is left beside a request of full length
        (10_000, (FULL, FULL), 128),
        (10_000, (FULL, RECURRENT), 0),
    ],
)
def test_the_last_blocks_are_kept(num_blocks: int, specs: Any, kept: int) -> None:
    cache = cache_of(num_blocks, *specs)
    assert scratch_of(config_of(), cache) == range(num_blocks - kept, num_blocks)
    assert not scratch_of(config_of(nodes=0), cache)


@pytest.mark.parametrize(("inner", "kept"), [(FULL, 64), (RECURRENT, 0)])
def test_scheduler_and_workers_count_alike(inner: Any, kept: int) -> None:
    """If layers of one type have several specs, workers have all specs and the scheduler one."""
    layers = {"layer 0": inner, "layer 1": inner}
    workers = cache_of(10_000, UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=layers))
    scheduler = generate_scheduler_kv_cache_config([workers])
    assert type(scheduler.kv_cache_groups[0].kv_cache_spec) is type(inner)
    ranges = [scratch_of(config_of(), cache) for cache in (workers, scheduler)]
    assert ranges == [range(10_000 - kept, 10_000)] * 2


def test_the_scheduler_does_not_know_them() -> None:
    """The scheduler's KV cache has no scratch blocks; the workers' has."""
    told: list[Any] = []
    wrapped = partial(scratch._init_scheduler, lambda self, *args, **kwargs: told.append(args))
    cache = cache_of(400)
    wrapped(object(), vllm_config=config_of(), kv_cache_config=cache, block_size=16)
    wrapped(object(), vllm_config=config_of(nodes=0), kv_cache_config=cache, block_size=16)
    assert [config.num_blocks for _, config in told] == [380, 400]
    assert cache.num_blocks == 400


@pytest.mark.parametrize(
    ("nodes", "lookahead", "rows"), [(0, 5, 5), (2, 5, 5), (8, 5, 16), (64, 4, 128)]
)
def test_rows_of_drafts(nodes: int, lookahead: int, rows: int) -> None:
    config = config_of(nodes, lookahead)
    reserve_rows(config)
    reserve_rows(config)
    assert config.speculative_config.num_speculative_tokens == rows


REFUSED = [
    ("a KV connector", {"kv_transfer_config": "some"}),
    ("pipeline", {"parallel_config": "pipeline_parallel_size"}),
    ("data parallelism", {"parallel_config": "data_parallel_size"}),
    ("microbatches", {"parallel_config": "use_ubatching"}),
    ("M-RoPE", {"model_config": "uses_mrope"}),
    ("image", {"model_config": "is_mm_prefix_lm"}),
    ("window grows", {"model_config": "rswa_window"}),
    ("recurrent states", {"model_config": "is_hybrid"}),
    ("recurrent states", {"model_config": "is_attention_free"}),
    ("logits processors", {"model_config": "logits_processors"}),
    *((f"{key} of at least 17", {"scheduler_config": key}) for key in list(ROOM)[1:]),
    ("kv_sharing_fast_prefill", {"cache_config": "kv_sharing_fast_prefill"}),
]


@pytest.mark.parametrize(("reason", "change"), REFUSED, ids=[reason for reason, _ in REFUSED])
def test_chains_elsewhere(
    reason: str, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of()
    for name, value in change.items():
        held = getattr(config, name)
        if isinstance(held, SimpleNamespace):
            setattr(held, value, 2)
        else:
            setattr(config, name, value)
    with caplog.at_level(logging.WARNING, "vllm.hetero_spec"):
        reserve_rows(config)
    assert nodes_of(config) == 0
    assert config.speculative_config.num_speculative_tokens == 5
    (said,) = caplog.messages
    assert said.startswith("Draft trees disabled: ")
    assert reason in said


def test_other_schedulers_and_drafters_have_no_trees() -> None:
    assert nodes_of(config_of(speculative_config=SimpleNamespace(method="eagle"))) == 0
    assert nodes_of(config_of(speculative_config=None)) == 0
    config = config_of()
    config.scheduler_config.get_scheduler_cls = lambda: object
    assert nodes_of(config) == 0


def test_processors_that_are_installed_are_read_by_v2_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Installed logits processors exclude trees on V2 only. V1 disables them with speculation."""
    found: dict[str, list[str]] = {"vllm.logits_processors": []}
    monkeypatch.setattr(scratch, "entry_points", lambda group: found[group])
    assert nodes_of(config_of()) == 8
    found["vllm.logits_processors"].append("some")
    assert nodes_of(config_of()) == 0
    assert nodes_of(config_of(use_v2_model_runner=False)) == 8


def test_adapters_need_room_for_all_rows(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM checks this before `reserve_rows` adds the rows of trees; the plugin checks it again."""
    adapters = {"lora_config": "some"}
    assert nodes_of(config_of(**adapters)) == 8
    tight = {
        "scheduler_config": SimpleNamespace(**SCHEDULER | {"max_num_batched_tokens": 40 * 17 - 1})
    }
    assert nodes_of(config_of(**tight)) == 8
    config = config_of(**tight, **adapters)
    reserve_rows(config)
    assert config.speculative_config.num_speculative_tokens == 5
    assert "trees of this size need max_num_batched_tokens of at least 680, 17 for each of" in (
        caplog.text
    )


@pytest.mark.parametrize(
    ("requests", "scratch", "branches"),
    [(1, 64, 32), (4, 64, 8), (4, 15, 1), (8, 15, 0), (40, 64, 0)],
)
def test_sides_are_shared_out(requests: int, scratch: int, branches: int) -> None:
    """Each branch takes two scratch blocks, and a step has at most 40 sequences."""
    assert branches_per_request(config_of(), [16], scratch, requests) == branches
