# SPDX-License-Identifier: Apache-2.0
"""Process-wide state of vLLM that the drafter replaces while it is built or runs."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.kernel import IrOpPriorityConfig
from vllm.distributed import parallel_state
from vllm.ir.op import IrOp
from vllm.model_executor.layers import rotary_embedding
from vllm.platforms import current_platform

from vllm_hetero_spec.engine.drafter.loading import _own_rotary_embeddings
from vllm_hetero_spec.engine.seam import parallel_state as seam
from vllm_hetero_spec.engine.seam.parallel_state import IsolatedParallelState

FUSED = "kernel_of_a_test"


@pytest.fixture
def norm(monkeypatch: pytest.MonkeyPatch) -> IrOp:
    """vLLM's norm with one more kernel, `FUSED`."""
    current_platform.import_ir_kernels()
    norm = IrOp.registry["rms_norm"]
    monkeypatch.setattr(norm, "impls", dict(norm.impls))
    norm.register_impl(FUSED)(norm.impls["native"].impl_fn)
    return norm


def config(*kernels: str) -> Any:
    priority = IrOpPriorityConfig.with_default(["native"], rms_norm=list(kernels))
    return SimpleNamespace(kernel_config=SimpleNamespace(ir_op_priority=priority))


def test_kernels_are_the_drafters_while_it_runs(
    norm: IrOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: "tensor")
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: "pipeline")
    monkeypatch.setattr(seam, "_solo", lambda group: group)
    alone = IsolatedParallelState(config("native"), config(FUSED, "native"), solo=False)
    with norm.set_priority(["native"]):
        held = parallel_state._TP, parallel_state._EP
        for _ in range(2):
            with alone:
                assert norm.get_priority()[0] == FUSED
                assert (parallel_state._TP, parallel_state._PP) == ("tensor", "pipeline")
                assert parallel_state._EP == "tensor"
            assert norm.get_priority() == ["native"]
            assert held == (parallel_state._TP, parallel_state._EP)
        with pytest.raises(RuntimeError), alone:
            raise RuntimeError
        assert norm.get_priority() == ["native"]


def test_rotary_embeddings_are_the_drafters_own() -> None:
    held = rotary_embedding._ROPE_DICT

    def fail() -> None:
        assert rotary_embedding._ROPE_DICT == {}
        raise RuntimeError

    with pytest.raises(RuntimeError), _own_rotary_embeddings():
        fail()
    assert rotary_embedding._ROPE_DICT is held
