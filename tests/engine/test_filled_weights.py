# SPDX-License-Identifier: Apache-2.0
"""Start-up names each parameter of the drafter without a tensor; complete checkpoints load."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs

from vllm_hetero_spec.engine.drafter.filled_weights import load_filled
from vllm_hetero_spec.engine.drafter.loading import faults_named
from vllm_hetero_spec.errors import ConfigError

Tensors = dict[str, torch.Tensor]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ATTENTION, MLP = "model.layers.1.self_attn.", "model.layers.1.mlp."


@pytest.fixture(scope="module", autouse=True)
def _ranks(demo_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of one rank, as in a worker on a CPU, without a cache of an accelerator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        meeting = f"file://{tmp_path_factory.mktemp('ranks')}/rendezvous"
        with set_current_vllm_config(EngineArgs(str(demo_pair / "drafter")).create_engine_config()):
            init_distributed_environment(1, 0, meeting, 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
        yield
        cleanup_dist_env_and_memory()


def load(folder: Path, dtype: str = "bfloat16", **arguments: Any) -> None:
    config = EngineArgs(
        str(folder), dtype=dtype, enforce_eager=True, **arguments
    ).create_engine_config()
    with set_current_vllm_config(config):
        load_filled(config)


def blank(folder: Path, **arguments: Any) -> str:
    """Return the parameters that the refusal names."""
    with pytest.raises(ConfigError) as refused:
        load(folder, **arguments)
    said = re.fullmatch(
        r"the drafter '.*' cannot be loaded: its files have no tensor for (.*); get all of its "
        r"files, or correct its config\.json \(tie_word_embeddings, if lm_head\.weight alone is "
        r"missing\)\.",
        str(refused.value),
    )
    assert said is not None, refused.value
    return said[1]


def without(*names: str) -> Callable[[Tensors], Any]:
    return lambda tensors: [tensors.pop(name) for name in names]


UNCHANGED = without()


def written(
    folder: Path, demo_pair: Path, change: Callable[[Tensors], Any] = UNCHANGED, **config: Any
) -> Path:
    """A copy of the demo drafter with changed weights or configuration."""
    shutil.copytree(demo_pair / "drafter", folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


@pytest.mark.parametrize(
    ("config", "change", "named"),
    [
        ({"tie_word_embeddings": False}, UNCHANGED, HEAD),
        ({}, without("model.norm.weight"), "model.norm.weight"),
        ({}, without(f"{MLP}down_proj.weight"), f"{MLP}down_proj.weight"),
        ({}, without(f"{ATTENTION}k_proj.weight"), f"a part of {ATTENTION}qkv_proj.weight"),
        ({}, without(f"{MLP}up_proj.weight"), f"a part of {MLP}gate_up_proj.weight"),
        ({"attention_bias": True}, UNCHANGED,
            "{0}qkv_proj.bias, {0}o_proj.bias, {1}qkv_proj.bias, {1}o_proj.bias"),
    ],
)  # fmt: skip
def test_parameters_without_a_tensor_are_named(
    config: dict, change: Callable, named: str, demo_pair: Path, tmp_path: Path
) -> None:
    folder = written(tmp_path / "drafter", demo_pair, change, **config)
    assert blank(folder) == named.format(ATTENTION.replace("1", "0"), ATTENTION)


def test_a_missing_file_of_several_is_refused(demo_pair: Path, tmp_path: Path) -> None:
    """The checkpoint has no index that lists the missing file."""
    names = load_file(demo_pair / "drafter" / "model.safetensors").keys() - {EMBEDDING}
    found = blank(written(tmp_path / "drafter", demo_pair, without(*names)))
    assert found.startswith("model.layers.0.self_attn.qkv_proj.weight, ")
    assert found.endswith(", model.layers.1.self_attn.o_proj.weight and 5 others")


def test_complete_checkpoints_load(demo_pair: Path, tmp_path: Path) -> None:
    """Tied and separate heads, all file formats, and a load format that reads no tensors."""

    def with_head(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()

    load(demo_pair / "drafter")
    load(written(tmp_path / "tied", demo_pair, with_head))
    load(written(tmp_path / "untied", demo_pair, with_head, tie_word_embeddings=False))
    load(written(tmp_path / "dummy", demo_pair, tie_word_embeddings=False), load_format="dummy")
    files = written(tmp_path / "files", demo_pair)
    tensors = load_file(files / "model.safetensors")
    (files / "model.safetensors").unlink()
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = files / f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, file, metadata={"format": "pt"})
    load(files)
    load(files, model_loader_extra_config={"enable_multithread_load": True})
    for file in files.glob("*.safetensors"):
        file.unlink()
    torch.save(tensors, files / "pytorch_model.bin")
    load(files)


def _int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def _gptq(rows: int, columns: int) -> Tensors:
    scales = torch.ones(columns // 32, rows, dtype=torch.float16)
    groups = (torch.arange(columns) // 32).int()
    packed = {"qweight": _int32(columns // 8, rows), "qzeros": _int32(columns // 32, rows // 8)}
    return packed | {"scales": scales, "g_idx": groups}


def _four_bits(rows: int, columns: int) -> Tensors:
    scale = torch.ones(rows, columns // 32)
    shape = torch.tensor([rows, columns])
    return {"weight_packed": _int32(rows, columns // 8), "weight_scale": scale} | {
        "weight_shape": shape
    }


def _eight_bits(rows: int, columns: int) -> Tensors:
    weight = torch.zeros(rows, columns, dtype=torch.int8)
    return {"weight": weight, "weight_scale": torch.ones(rows, 1)}


def _compressed(form: str, weights: dict, inputs: dict | None, **more: Any) -> dict[str, Any]:
    common = {"type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": common | {"dynamic": False} | weights,
        "input_activations": inputs and common | inputs,
    }
    named = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    return named | {"config_groups": {"group_0": group}} | more


_ROWS = (
    {"num_bits": 8, "strategy": "channel"},
    {"num_bits": 8, "strategy": "token", "dynamic": True},
)
_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
_QUANTISED: dict[str, tuple[dict[str, Any], Callable[[int, int], Tensors], str]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True,
              "lm_head": False}, _gptq, "qweight"),
    "w4a16": (_compressed("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32},
                          None), _four_bits, "weight_scale"),
    "w8a8": (_compressed("int-quantized", *_ROWS), _eight_bits, "weight_scale"),
    "kv cache": (_compressed("int-quantized", *_ROWS, kv_cache_scheme=_CACHE), _eight_bits,
                 "weight"),
}  # fmt: skip


@pytest.mark.parametrize("kind", _QUANTISED)
def test_quantised_checkpoints(kind: str, demo_pair: Path, tmp_path: Path) -> None:
    """They load without scales of the KV cache. Other parameters without a tensor are named."""
    quantisation, parts_of, part = _QUANTISED[kind]

    def quantise(tensors: Tensors) -> None:
        for name in [name for name in tensors if "_proj." in name]:
            stem = name.removesuffix("weight")
            found = parts_of(*tensors.pop(name).shape)
            tensors.update({f"{stem}{part}": tensor for part, tensor in found.items()})

    def fewer(tensors: Tensors) -> None:
        quantise(tensors)
        del tensors[f"{MLP}down_proj.{part}"], tensors[f"{MLP}up_proj.{part}"]

    config: dict[str, Any] = {"quantization_config": quantisation}
    load(written(tmp_path / "whole", demo_pair, quantise, **config))
    untied = config | {"tie_word_embeddings": False}
    assert blank(written(tmp_path / "untied", demo_pair, quantise, **untied)) == HEAD
    named = f"a part of {MLP}gate_up_proj.{part}, {MLP}down_proj.{part}"
    assert blank(written(tmp_path / "fewer", demo_pair, fewer, **config)) == named


def test_checkpoints_that_are_quantised_while_they_load(demo_pair: Path, tmp_path: Path) -> None:
    online = {"quantization": "int8_per_channel_weight_only"}
    load(demo_pair / "drafter", **online)
    gone = without(f"{ATTENTION}k_proj.weight", f"{ATTENTION}o_proj.weight")
    named = f"a part of {ATTENTION}qkv_proj.weight, {ATTENTION}o_proj.weight"
    assert blank(written(tmp_path / "drafter", demo_pair, gone), **online) == named


def test_a_quantisation_without_kernels_is_named(demo_pair: Path) -> None:
    config = EngineArgs(str(demo_pair / "drafter"), quantization="fp8").create_engine_config()
    with (
        pytest.raises(ConfigError, match=r"quantization 'fp8' on this cpu \(Runt.*, or none\.$"),
        faults_named(config.model_config),
        set_current_vllm_config(config),
    ):
        load_filled(config)
    config.model_config.quantization = None
    with pytest.raises(LookupError), faults_named(config.model_config):
        raise LookupError
