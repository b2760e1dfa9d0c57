# SPDX-License-Identifier: Apache-2.0
"""The drafter's configuration: it is derived from the target's, which must not change."""

from dataclasses import is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import engine, metrics_of, slem, with_config
from huggingface_hub import constants
from scenarios import generate, greedy
from vllm.config import LoadConfig, VllmConfig
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from vllm.config.kernel import IrOpPriorityConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.offloader import NoopOffloader, get_offloader, set_offloader
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_hetero_spec.engine.drafter.model import DrafterModel, ForwardBatch
from vllm_hetero_spec.engine.proposer import HeteroProposer
from vllm_hetero_spec.engine.seam.drafter_config import (
    drafter_vllm_config,
    drafting_mode,
    kv_budget,
)
from vllm_hetero_spec.engine.seam.drafter_model import drafter_model_config, parallel_mask
from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.options import HeteroOptions


def frozen(value: Any) -> Any:
    """Return a copy of a configuration's values, without copies of models and other objects."""
    if is_dataclass(value):
        return type(value), {name: frozen(part) for name, part in vars(value).items()}
    if isinstance(value, dict):
        return {key: frozen(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set):
        return [frozen(part) for part in value]
    return frozen(value.to_dict()) if hasattr(value, "to_dict") else value


def target_config(demo_pair: Path, **changes: Any) -> VllmConfig:
    """Return a target's configuration: neither eager nor compiled, and marked as a MoE model."""
    arguments = {"dtype": "float32", "compilation_config": {"mode": 0}} | changes
    config = EngineArgs(str(demo_pair / "target"), **arguments).create_engine_config()
    config.parallel_config.is_moe_model = True
    return config


def options(demo_pair: Path, **changes: Any) -> HeteroOptions:
    return HeteroOptions("slem", str(demo_pair / "drafter"), 4, **changes)


def drafter_config(target: VllmConfig, options: HeteroOptions, *, solo: bool = False) -> VllmConfig:
    model = drafter_model_config(options, target.model_config)
    return drafter_vllm_config(target, model, options, solo=solo)


@pytest.mark.parametrize("solo", [False, True])
@pytest.mark.parametrize("enforce_eager", [None, True, False])
def test_target_configuration_is_left_alone(
    demo_pair: Path, enforce_eager: bool | None, solo: bool
) -> None:
    target = target_config(demo_pair)
    before = frozen(target)
    assert target.kernel_config.enable_jit_warmup
    chosen = options(demo_pair, enforce_eager=enforce_eager)
    drafter = drafter_config(target, chosen, solo=solo)
    assert frozen(target) == before
    assert not drafter.parallel_config.is_moe_model
    shared = {
        name
        for name, part in vars(target).items()
        if is_dataclass(part) and part is getattr(drafter, name)
    }
    assert not shared


def test_a_compiled_targets_kernels_are_not_the_drafters(
    demo_pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are native. The drafter chooses its own, except kernels that a user has named."""

    def chosen(self: Any, config: VllmConfig) -> IrOpPriorityConfig:
        compiled = config.compilation_config.mode != CompilationMode.NONE
        return IrOpPriorityConfig.with_default(["native"] if compiled else ["vllm_c", "native"])

    monkeypatch.setattr(type(current_platform), "get_default_ir_op_priority", chosen)
    theirs = {"ir_op_priority": {"fused_add_rms_norm": ["oink"]}}
    target = target_config(demo_pair, compilation_config={"mode": 3}, kernel_config=theirs)
    before = target.kernel_config.ir_op_priority
    assert before.rms_norm == ["native"]
    assert before.fused_add_rms_norm == ["oink", "native"]
    for eager, kernels in ((None, ["vllm_c", "native"]), (False, ["native"])):
        drafter = drafter_config(target, options(demo_pair, enforce_eager=eager))
        found = drafter.kernel_config.ir_op_priority
        assert found.rms_norm == kernels
        assert found.fused_add_rms_norm == ["oink", *kernels]


def test_what_is_said_of_the_target_is_not_said_of_the_drafter(demo_pair: Path) -> None:
    """A user or vLLM has set these. The KV dtype is that of sparse attention."""
    target = target_config(demo_pair, block_size=64)
    changes: dict[str, dict[str, Any]] = {
        "attention_config": {"backend": AttentionBackendEnum.FLASHMLA, "flash_attn_version": 4},
        "kernel_config": {
            "moe_backend": "deep_gemm",
            "linear_backend": "cutlass",
            "linear_backend_per_quant": {"fp8": "cutlass"},
        },
        "load_config": {"load_format": "mistral", "model_loader_extra_config": {"num_threads": 4}},
        "cache_config": {
            "cache_dtype": "fp8_ds_mla",
            "kv_cache_dtype_skip_layers": ["0"],
            "sliding_window": 511,
            "mamba_block_size": target.model_config.max_model_len,
            "enable_prefix_caching": False,
            "use_replayssm": True,
        },
    }
    for part, fields in changes.items():
        for name, value in fields.items():
            setattr(getattr(target, part), name, value)
    drafter = drafter_config(target, options(demo_pair))
    attention, cache = drafter.attention_config, drafter.cache_config
    assert (attention.backend, attention.flash_attn_version) == (None, None)
    assert (cache.cache_dtype, cache.sliding_window) == ("auto", None)
    assert not cache.kv_cache_dtype_skip_layers
    assert not cache.user_specified_block_size
    load = drafter.load_config
    assert (load.load_format, load.model_loader_extra_config) == ("auto", {})
    kernels = drafter.kernel_config
    assert kernels.moe_backend == kernels.linear_backend == "auto"
    assert kernels.linear_backend_per_quant is None


@pytest.mark.parametrize("load_format", ["auto", "dummy", "runai_streamer", "a plugin's"])
def test_weights_are_read_as_the_targets(demo_pair: Path, load_format: str) -> None:
    target = target_config(demo_pair)
    target.load_config = LoadConfig(load_format, model_loader_extra_config={"concurrency": 4})
    found = drafter_config(target, options(demo_pair)).load_config
    assert found.load_format == load_format
    assert found.model_loader_extra_config == {"concurrency": 4}


@pytest.mark.parametrize("load_format", ["fastsafetensors", "instanttensor", "runai_streamer"])
def test_one_rank_reads_weights_alone(demo_pair: Path, load_format: str) -> None:
    """These formats let all ranks read together, and would wait for ranks without a drafter."""
    target = target_config(demo_pair)
    extra = {"distributed": True}
    target.load_config = LoadConfig(load_format, model_loader_extra_config=extra)
    found = drafter_config(target, options(demo_pair)).load_config
    streams = load_format == "runai_streamer"
    assert found.load_format == (load_format if streams else "auto")
    assert found.model_loader_extra_config == {}
    assert target.load_config.model_loader_extra_config == extra


def test_own_attention_and_kv(demo_pair: Path) -> None:
    chosen = options(demo_pair, attention_backend="TRITON_ATTN", kv_cache_dtype="fp8")
    target = target_config(demo_pair)
    found = drafter_config(target, chosen, solo=True)
    assert found.attention_config.backend == AttentionBackendEnum.TRITON_ATTN
    assert found.cache_config.cache_dtype == "fp8"
    for key, value, supported in (
        ("attention_backend", "FLASH_ATN", "FLASH_ATTN"),
        ("kv_cache_dtype", "fp7", "'auto', 'float16'"),
    ):
        with pytest.raises(ConfigError, match=f"^{key} is '{value}': .*{supported}"):
            drafter_model_config(options(demo_pair, **{key: value}), target.model_config)


@pytest.mark.parametrize(
    ("explicit", "device", "found"),
    [(None, 80 << 30, 4 << 30), (None, 24 << 30, 3 << 29), (40 << 30, 80 << 30, 10 << 30)],
)
def test_the_pool_leaves_the_target_its_memory(
    demo_pair: Path, monkeypatch: pytest.MonkeyPatch, explicit: int | None, device: int, found: int
) -> None:
    """On a small device 4 GiB would be most of the memory that the weights leave."""
    monkeypatch.setattr(type(current_platform), "get_device_total_memory", lambda *_: device)
    target = target_config(demo_pair, kv_cache_memory_bytes=explicit)

    def bytes_for(tokens: int) -> int:
        return tokens << 14  # bytes; about those of a drafter with 0.5B parameters

    assert kv_budget(options(demo_pair), target, 1 << 20, bytes_for) == found
    assert kv_budget(options(demo_pair), target, 1, bytes_for) < 1 << 24


def test_a_dtype_that_the_drafter_cannot_have(
    demo_pair: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The target's dtype is only a default. A dtype that the user names is refused."""
    own = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "dtype": "bfloat16"}
    name = str(with_config(demo_pair / "drafter", tmp_path, **own))
    target = target_config(demo_pair, dtype="float16").model_config
    with caplog.at_level("INFO", logger="vllm.hetero_spec"):
        found = drafter_model_config(HeteroOptions("slem", name, 4), target)
    assert found.dtype == torch.bfloat16
    assert "The drafter runs in torch.bfloat16, the target in torch.float16" in caplog.text
    assert "does not support float16" in caplog.text
    named = HeteroOptions("slem", name, 4, dtype="float16")
    with pytest.raises(ConfigError, match="does not support float16"):
        drafter_model_config(named, target)


@pytest.mark.parametrize("key", ["pard_token", "ptd_token_id", "mask_token_id"])
def test_a_parallel_drafter_is_recognized(demo_pair: Path, tmp_path: Path, key: str) -> None:
    name = str(with_config(demo_pair / "drafter", tmp_path, **{key: 7}))
    target = target_config(demo_pair).model_config

    def mask(method: str = "hetero", **keys: Any) -> int | None:
        given = HeteroOptions(method, name, 4, **keys)
        return parallel_mask(drafter_model_config(given, target), given)

    assert mask() == mask(parallel_drafting=True) == 7
    assert mask(parallel_drafting=False) is None
    assert mask("slrs", parallel_drafting=False) is None
    with pytest.raises(ConfigError, match=r"^method 'slrs' looks ahead .* parallel drafter"):
        mask("slrs")


def test_a_parallel_drafter_that_cannot_be(demo_pair: Path, tmp_path: Path) -> None:
    target = target_config(demo_pair).model_config
    given = options(demo_pair, parallel_drafting=True)
    with pytest.raises(ConfigError, match=r"^parallel_drafting is true, but .* no mask token"):
        parallel_mask(drafter_model_config(given, target), given)
    name = str(with_config(demo_pair / "drafter", tmp_path, pard_token=9999))
    given = HeteroOptions("slem", name, 4)
    with pytest.raises(ConfigError, match="mask token 9999 and embeddings of 2048"):
        parallel_mask(drafter_model_config(given, target), given)


def test_a_drafter_of_hidden_states_is_refused(demo_pair: Path, tmp_path: Path) -> None:
    eagle = ["LlamaForCausalLMEagle3"]
    name = str(with_config(demo_pair / "drafter", tmp_path, architectures=eagle))
    target = target_config(demo_pair).model_config
    with pytest.raises(ConfigError, match="LlamaForCausalLMEagle3, which reads the hidden states"):
        drafter_model_config(HeteroOptions("hetero", name, 4), target)


def test_a_name_is_a_folder_while_the_hub_is_offline(
    demo_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a hub name vLLM would search the hub for weights and log errors."""
    repository = tmp_path / "models--some--drafter"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(demo_pair / "drafter")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    target = target_config(demo_pair).model_config
    found = drafter_model_config(HeteroOptions("slem", "some/drafter", 4), target)
    assert (found.model, found.tokenizer) == (str(snapshot), str(snapshot))
    with pytest.raises(ConfigError, match="the drafter 'other/drafter' cannot be used"):
        drafter_model_config(HeteroOptions("slem", "other/drafter", 4), target)


def test_drafter_waits_for_no_other_engine(demo_pair: Path) -> None:
    """With data parallelism a forward would wait for the forwards of the other engines."""
    target = target_config(demo_pair)
    target.parallel_config.data_parallel_size = 2
    target.parallel_config.enable_expert_parallel = True  # refused for a model without experts
    parallel = drafter_config(target, options(demo_pair)).parallel_config
    assert parallel.data_parallel_size == 1
    assert target.parallel_config.data_parallel_size == 2
    model = drafter_model_config(options(demo_pair), target.model_config)
    mixture = SimpleNamespace(is_moe=True)
    assert not model.is_moe
    with pytest.raises(ConfigError, match="drafter' is a mixture of experts"):
        drafter_vllm_config(target, mixture, options(demo_pair), solo=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(("solo", "ranks"), [(True, 1), (False, 2)])
def test_drafter_has_one_stage(demo_pair: Path, solo: bool, ranks: int) -> None:
    """This is the last of four ranks: the second rank of the second pipeline stage."""
    target = target_config(demo_pair)
    parallel = target.parallel_config
    parallel.pipeline_parallel_size = parallel.tensor_parallel_size = 2
    parallel.world_size, parallel.rank = 4, 3
    found = drafter_config(target, options(demo_pair), solo=solo).parallel_config
    assert found.pipeline_parallel_size == 1
    assert found.world_size == found.tensor_parallel_size == ranks
    assert found.rank == ranks - 1


@pytest.mark.full
@pytest.mark.engine
def test_target_is_left_alone_by_loading(
    demo_pair: Path, prompts: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading the drafter in a worker must change neither the configuration nor the offloader."""
    seen = []
    load = HeteroProposer.load_model

    class Offloader(NoopOffloader):
        def wrap_modules(self, *args: Any, **kwargs: Any) -> list:
            raise AssertionError("the drafter's layers are offloaded as the target's")

    def observed(proposer: HeteroProposer, *args: Any) -> None:
        config, offloader, held = proposer.vllm_config, Offloader(), get_offloader()
        config.parallel_config.is_moe_model = True
        before = frozen(config)
        set_offloader(offloader)
        load(proposer, *args)
        seen.append((before, frozen(config), get_offloader() is offloader))
        set_offloader(held)

    monkeypatch.setattr(HeteroProposer, "load_model", observed)
    changes = {"enforce_eager": False, "compilation_config": {"mode": 0}}
    with engine(demo_pair / "target", slem(demo_pair / "drafter"), **changes) as llm:
        ((before, after, kept),) = seen
        assert after == before
        assert kept
        generate(llm, prompts[:2], greedy())
        assert metrics_of(llm)["num_accepted_tokens"] > 0


@pytest.mark.full
@pytest.mark.engine
def test_largest_forward_comes_first(
    demo_pair: Path, prompts: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs before any request. Its texts are no longer than the drafter's context."""
    batches: list[ForwardBatch] = []
    forward = DrafterModel.forward

    def observed(model: DrafterModel, batch: ForwardBatch) -> torch.Tensor:
        batches.append(batch)
        return forward(model, batch)

    monkeypatch.setattr(DrafterModel, "forward", observed)
    changes = {"compilation_config": {"mode": 1}, "enforce_eager": False}
    changes |= {"max_model_len": 200, "max_num_batched_tokens": 512}
    spec = slem(demo_pair / "drafter", enforce_eager=False, context=180)
    with engine(demo_pair / "target", spec, **changes) as llm:
        (first,) = batches
        assert len(first.ids) == 512
        assert first.lengths.tolist() == [180, 180, 152]
        assert int(first.positions.max()) == 179
        generate(llm, [prompt[:100] for prompt in prompts[:2]], greedy())
        assert metrics_of(llm)["num_accepted_tokens"] > 0
        # A model compiled for one dtype would misread ids of another dtype.
        assert {batch.ids.dtype for batch in batches} == {torch.int32}
        assert {batch.positions.dtype for batch in batches} == {torch.int64}
        assert len(batches) > 10


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make vLLM build configurations as on an NVIDIA GPU, as far as possible without one."""
    for name in ("is_cuda", "support_static_graph_mode"):
        monkeypatch.setattr(current_platform, name, lambda: True)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(current_platform, "check_and_update_config", lambda config: None)


@pytest.mark.usefixtures("cuda")
def test_graphs_by_default_on_cuda(demo_pair: Path) -> None:
    """By default the drafter is not compiled. Decoding is captured, with sufficient buffers."""
    target = target_config(demo_pair, max_num_seqs=48)
    mode = drafting_mode(options(demo_pair), target)
    assert mode.graphs
    assert not mode.compiled
    assert [b for b, width in mode.shapes if width == 1] == [1, 2, 4, 8, 16, 32, 48]
    assert {width for _, width in mode.shapes} == {1, 4, 8, 32, 128}
    drafter = drafter_config(target, options(demo_pair))
    found = drafter.compilation_config
    assert not drafter.model_config.enforce_eager
    assert (found.mode, found.cudagraph_mode) == (
        CompilationMode.NONE,
        CUDAGraphMode.FULL_DECODE_ONLY,
    )
    tokens = [b * width for b, width in mode.shapes]
    assert found.max_cudagraph_capture_size == max(tokens)
    assert set(found.cudagraph_capture_sizes) == set(tokens)


@pytest.mark.usefixtures("cuda")
def test_graphs_stay_small_on_cuda(demo_pair: Path) -> None:
    """Wide shapes are only for small batches: attention's buffers grow with the largest graph."""
    mode = drafting_mode(options(demo_pair), target_config(demo_pair, max_num_seqs=1000))
    assert max(mode.shapes) == (256, 1)
    assert max(b * width for b, width in mode.shapes) == 512
    target = target_config(demo_pair, max_num_seqs=16, max_num_batched_tokens=16)
    mode = drafting_mode(options(demo_pair), target)
    assert max(b * width for b, width in mode.shapes) == 16
    assert drafter_config(target, options(demo_pair)).compilation_config.cudagraph_capture_sizes


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("enforce_eager", "target_eager", "graphs", "compiled"),
    [
        (None, True, False, False),
        (True, False, False, False),
        (False, False, True, True),
        (False, True, True, True),
    ],
)
def test_enforce_eager_on_cuda(
    demo_pair: Path, enforce_eager: bool | None, target_eager: bool, graphs: bool, compiled: bool
) -> None:
    target = target_config(demo_pair, enforce_eager=target_eager, compilation_config={"mode": 3})
    chosen = options(demo_pair, enforce_eager=enforce_eager)
    mode = drafting_mode(chosen, target)
    assert (mode.graphs, mode.compiled) == (graphs, compiled)
    assert bool(mode.why) != graphs
    if enforce_eager is None:  # as with -O0
        without = target_config(demo_pair, compilation_config={"mode": 0, "cudagraph_mode": "NONE"})
        assert drafting_mode(chosen, without).why == "the target runs without them"
    drafter = drafter_config(target, chosen)
    found, scheduler = drafter.compilation_config, drafter.scheduler_config
    # A round adds up to one token per request to its budget of context tokens.
    added = scheduler.max_num_batched_tokens - target.scheduler_config.max_num_batched_tokens
    assert added == (scheduler.max_num_seqs if compiled else 0)
    assert (found.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY) == graphs
    expected = target.compilation_config.mode if compiled else CompilationMode.NONE
    assert found.mode == expected
    assert sorted(found.compile_sizes) == ([1, 2, 4, 8] if compiled else [])
    assert set(found.compile_sizes) <= set(found.cudagraph_capture_sizes)


@pytest.mark.parametrize("enforce_eager", [None, True, False])
def test_no_graphs_without_cuda(demo_pair: Path, enforce_eager: bool | None) -> None:
    target = target_config(demo_pair, compilation_config={"mode": 3})
    chosen = options(demo_pair, enforce_eager=enforce_eager)
    mode = drafting_mode(chosen, target)
    assert not mode.graphs
    assert "NVIDIA" in mode.why
    drafter = drafter_config(target, chosen)
    compiled = enforce_eager is False
    assert drafter.model_config.enforce_eager != compiled
    assert (drafter.compilation_config.mode != CompilationMode.NONE) == compiled
    assert drafter.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
    assert not drafter.compilation_config.compile_sizes
