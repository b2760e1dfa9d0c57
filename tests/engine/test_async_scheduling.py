# SPDX-License-Identifier: Apache-2.0
"""Asynchronous scheduling: the data that the scheduler receives, and when it is enabled."""

import inspect
import logging
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.mamba1_attn import Mamba1AttentionMetadataBuilder
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.worker_base import WorkerWrapperBase

from vllm_hetero_spec.engine.compat import patching
from vllm_hetero_spec.engine.seam import async_scheduling
from vllm_hetero_spec.engine.seam.async_scheduling import AsyncStepInfo, buckets, buckets_of
from vllm_hetero_spec.engine.seam.spec_config import install_hooks
from vllm_hetero_spec.engine.trees import scratch
from vllm_hetero_spec.errors import ConfigError

NAME = "build_dynamic_sd_schedule_lookup"


@pytest.mark.parametrize(("longest", "expected"), [(1, [0, 1]), (2, [0, 1, 2]), (5, [0, 3, 5])])
def test_a_few_lookaheads_are_named(longest: int, expected: list[int]) -> None:
    assert buckets(longest, longest) == expected


def test_chains_are_not_padded_to_the_rows_of_trees(device: None) -> None:
    assert buckets(16, 5) == [0, 3, 5, 8, 16]
    config = config_of()
    config.speculative_config.num_speculative_tokens = 12  # as `scratch.reserve_rows` leaves it
    named = [(1, 1, 0), (2, 2, 2), (3, 3, 4), (4, 4, 6), (5, async_scheduling._MANY, 12)]
    assert configured(config).seen == [False, named]
    assert buckets_of(config) == [0, 2, 4, 6, 12]


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Asynchronous scheduler that records the outputs which it passes on to vLLM's method."""
    async_scheduling.install(scratch.reserve_rows)
    told: list[Any] = []
    monkeypatch.setattr(
        Scheduler, "update_from_output", lambda self, output, _: told.append(output)
    )
    made: Any = object.__new__(AsyncScheduler)
    made.dynamic_sd_lookup, made.told = [4, 0, 2, 2], told
    made.log_stats, made.num_spec_tokens = True, 4
    made.requests = {"a": SimpleNamespace(spec_decode_metrics=None)}
    return made


def test_the_scheduler_hears_what_a_step_tells(scheduler: Any) -> None:
    result = SimpleNamespace()
    AsyncStepInfo(2, {"a": 1, "b": 3}).put_on(result)
    # A grammar has cut the draft of b, including its padding, and the draft of c.
    output = SimpleNamespace(num_invalid_spec_tokens={"b": 4, "c": 2})
    scheduler.update_from_output(output, result)
    assert scheduler.dynamic_sd_lookup == [2] * 4
    assert scheduler.told == [output]
    assert output.num_invalid_spec_tokens == {"a": 1, "b": 4, "c": 2}


def test_a_step_that_tells_nothing_changes_nothing(scheduler: Any) -> None:
    output = SimpleNamespace(num_invalid_spec_tokens=None)
    scheduler.update_from_output(output, SimpleNamespace())
    assert scheduler.dynamic_sd_lookup == [4, 0, 2, 2]
    assert output.num_invalid_spec_tokens is None


def test_padding_alone_is_no_draft(scheduler: Any) -> None:
    def counted(stats: Any, padding: int) -> Any:
        return scheduler.make_spec_decoding_stats(stats, 4, 1, {"a": padding}, "a")

    assert counted(None, 4) is None
    stats = counted(None, 3)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (1, 1, 1)
    assert counted(stats, 4) is stats
    assert stats.num_drafts == 1


def test_padding_alone_is_no_draft_of_its_request(scheduler: Any) -> None:
    """vLLM calls `observe()` with the request's own figures directly afterwards."""
    own = scheduler.requests["a"].spec_decode_metrics = RequestSpecDecodeMetrics.new(4)
    others = RequestSpecDecodeMetrics.new(4)
    for padding, accepted in ((4, 0), (3, 1), (4, 0), (1, 0)):
        scheduler.make_spec_decoding_stats(None, 4, accepted, {"a": padding}, "a")
        for of in (own, others):
            of.observe(num_draft_tokens=4 - padding, num_accepted=accepted, detailed=True)
    assert (own.histogram, own.num_draft_tokens) == ([1, 1, 0, 0, 0], 4)
    assert own.per_step_drafted == [1, 3]
    assert sum(others.histogram) == 4
    assert vars(own).keys() == vars(others).keys()


ROOM: dict[str, Any] = {
    "max_num_batched_tokens": 64,
    "max_num_scheduled_tokens": None,
    "long_prefill_token_threshold": 0,
}
HETERO = SimpleNamespace(num_speculative_tokens=4, tree_nodes=0)


def config_of(asked: bool | None = None, **changes: Any) -> Any:
    plain = {
        "speculative_config": SimpleNamespace(
            hetero=HETERO, num_speculative_tokens=4, num_speculative_tokens_per_batch_size=None
        ),
        "scheduler_config": SimpleNamespace(async_scheduling=asked, **ROOM),
        "parallel_config": SimpleNamespace(data_parallel_size=1, distributed_executor_backend="mp"),
        "use_v2_model_runner": True,
    }
    return SimpleNamespace(**(plain | changes))


def configured(config: Any) -> Any:
    """Return the configuration after `__post_init__`; `seen` is what vLLM's own checks received."""
    seen: list[Any] = []

    def checks(self: Any) -> None:
        spec = self.speculative_config
        seen.append(self.scheduler_config.async_scheduling)
        seen.append(getattr(spec, "num_speculative_tokens_per_batch_size", None))

    async_scheduling._post_init(lambda config: None, checks, config)
    config.seen = seen
    return config


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_scheduling, "platform_can", lambda: True)


@pytest.mark.parametrize("asked", [None, True])
def test_steps_are_scheduled_ahead_where_they_can_be(device: None, asked: bool | None) -> None:
    config = configured(config_of(asked))
    named = [(1, 1, 0), (2, 2, 2), (3, async_scheduling._MANY, 4)]
    assert config.seen == [False, named]
    assert config.scheduler_config.async_scheduling
    assert buckets_of(config) == [0, 2, 4]


@pytest.mark.parametrize("batch", [1, 2, 64])
def test_graphs_of_all_tiers_are_captured(
    device: None, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in batches smaller than the number of tiers. Other schedules keep vLLM's choice."""

    class Manager(CudaGraphManager):
        _init_candidates = CudaGraphManager._init_candidates

    module = ModuleType("cudagraph_utils")
    monkeypatch.setattr(module, NAME, build_dynamic_sd_schedule_lookup, raising=False)
    monkeypatch.setattr(module, "CudaGraphManager", Manager, raising=False)
    async_scheduling.capture_all_tiers(module)
    assert patching.standing(Manager, "_init_candidates")
    lookup = getattr(module, NAME)

    def captured(schedule: list[tuple[int, int, int]]) -> set[int]:
        return set(lookup(schedule, vllm_max_batch_size=batch, vllm_num_speculative_tokens=4)[1:])

    ours = configured(config_of(None)).speculative_config.num_speculative_tokens_per_batch_size
    assert captured(ours) == {0, 2, 4}
    assert captured([(1, 1, 4), (2, 64, 1)]) == ({4} if batch == 1 else {4, 1})


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("longest", [3, 5])
@pytest.mark.parametrize("most", [16, 64, 256])
def test_every_batch_of_a_tier_has_a_full_graph(
    device: None, longest: int, most: int, waits: bool
) -> None:
    """Without the patch, vLLM's dispatch finds no full graph for some batches.

    With synchronous scheduling (`waits`), it has none for steps without drafts.
    """
    named = [0, longest] if waits else buckets(longest, longest)
    schedule = None if waits else async_scheduling._schedule(named)
    sizes = {
        1,
        2,
        4,
        *range(8, 257, 8),
        *(n * (1 + bucket) for bucket in named for n in (1, 2, 4, 8)),
    }

    def without(init: Any) -> list[tuple[int, int]]:
        manager: Any = object.__new__(CudaGraphManager)
        spec = SimpleNamespace(
            hetero=HETERO,
            num_speculative_tokens=longest,
            num_speculative_tokens_per_batch_size=schedule,
        )
        spec.uses_dynamic_speculative_decoding = lambda: bool(
            spec.num_speculative_tokens_per_batch_size
        )
        vars(manager).update(
            vllm_config=SimpleNamespace(
                speculative_config=spec,
                num_speculative_tokens=longest,
                cache_config=SimpleNamespace(use_kda_recoverssm=False),
            ),
            compilation_config=SimpleNamespace(
                cudagraph_capture_sizes=sorted(sizes), max_cudagraph_capture_size=256
            ),
            max_num_reqs=most,
            decode_query_len=1 + longest,
            varlen_decode=False,
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
            ubatch_runner=None,
            lora_capture_cases=[0],
            _lora_dispatch_map={},
            _max_lora_case=0,
            _candidates={},
            _capture_descs={},
            _graphs_captured=True,
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(async_scheduling, "_needs_whole_drafts", lambda config: False)
            lookup = partial(async_scheduling._lookup, build_dynamic_sd_schedule_lookup)
            patch.setattr(cudagraph_utils, NAME, lookup)
            init(inspect.unwrap(CudaGraphManager._init_candidates), manager)
        assert spec.num_speculative_tokens_per_batch_size == schedule
        missed = []
        for bucket in named:
            for batch in range(1, min(most, 240 // (1 + bucket)) + 1):
                tokens = batch * (1 + bucket)
                found = manager.dispatch(batch, tokens, 1 + bucket, 0)
                if found.cg_mode != CUDAGraphMode.FULL:
                    missed.append((batch, bucket))
                else:
                    assert found in manager._capture_descs[CUDAGraphMode.FULL]
                    assert (found.uniform_token_count, found.num_ubatches) == (1 + bucket, 1)
                    assert found.num_tokens >= tokens
        return missed

    assert without(lambda original, manager: original(manager))
    assert not without(async_scheduling._init_candidates)


def test_stages_without_a_drafter_have_the_same_graphs() -> None:
    """All stages of a pipeline pass rows on, and unpickle the configuration."""
    install_hooks()
    worker = WorkerWrapperBase()
    worker.worker = SimpleNamespace(init_device=lambda: None)
    worker.vllm_config = SimpleNamespace(use_v2_model_runner=True)
    worker.init_device()
    assert patching.standing(CudaGraphManager, "_init_candidates") == "nearest graphs"


@pytest.mark.parametrize(
    ("builder", "whole"),
    [
        (Mamba1AttentionMetadataBuilder, True),
        (Mamba2AttentionMetadataBuilder, True),
        (GDNAttentionMetadataBuilder, False),
        (TritonAttentionMetadataBuilder, False),
    ],
)
def test_layers_that_are_captured_with_whole_drafts_only(
    builder: type, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = SimpleNamespace(get_builder_cls=lambda: builder)
    layers = {"layer": SimpleNamespace(get_attn_backend=lambda: backend)}
    monkeypatch.setattr("vllm.config.get_layers_from_vllm_config", lambda *_: layers)
    assert async_scheduling._needs_whole_drafts(SimpleNamespace()) is whole


def test_other_drafters_are_left_alone(device: None) -> None:
    other = SimpleNamespace(method="eagle")
    config = configured(config_of(True, speculative_config=other))
    assert config.seen == [True, None]
    assert config.scheduler_config.async_scheduling


ONE_BY_ONE = [
    {"asked": False},
    {"use_v2_model_runner": False},
    {"parallel_config": SimpleNamespace(data_parallel_size=2)},
]


@pytest.mark.parametrize("changes", ONE_BY_ONE)
def test_steps_follow_one_another_elsewhere(
    device: None, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vllm.hetero_spec"):
        config = configured(config_of(**changes))
        configured(config)  # an engine core runs `__post_init__` again
    assert config.seen == [False, None]
    assert not config.scheduler_config.async_scheduling
    assert buckets_of(config) == []
    first, second = caplog.messages
    assert "Asynchronous scheduling disabled" in first
    assert first == second


@pytest.mark.parametrize("changes", ONE_BY_ONE[1:])
def test_what_cannot_be_had_is_refused(device: None, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"async_scheduling=True is not possible.*Leave"):
        configured(config_of(True, **changes))


@pytest.mark.parametrize("key", ROOM)
def test_a_step_has_room_for_a_draft(device: None, key: str) -> None:
    """With synchronous scheduling vLLM pads a waiting request with one token to all rows."""
    for room in (5, 4):
        limits = {"scheduler_config": SimpleNamespace(async_scheduling=None, **ROOM | {key: room})}
        configured(config_of(**limits))
    limits["scheduler_config"].async_scheduling = False
    with pytest.raises(ConfigError, match=f"{key} is 4, too few for drafts of 4 .* at least 5,"):
        configured(config_of(**limits))


def test_nothing_is_ahead_of_a_cpu() -> None:
    assert not async_scheduling.platform_can()
