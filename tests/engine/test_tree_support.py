# SPDX-License-Identifier: Apache-2.0
"""Tests of the conditions for draft trees in an engine, with plain values instead of a runner."""

import logging
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_hetero_spec.engine.seam.step_view import TreeRoom
from vllm_hetero_spec.engine.trees import branches as branches_module
from vllm_hetero_spec.engine.trees.attention_v1 import BranchSequencesV1
from vllm_hetero_spec.engine.trees.branches import BACKENDS, BranchSequences

ROOM = TreeRoom(nodes=8, rows=16, branches=4)
GRAPHS_V1, GRAPHS_V2 = BranchSequencesV1.graphs, (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Function that sets the verdicts of the target's other ranks. At first there are none."""

    def ranks(*others: bool) -> None:
        given = SimpleNamespace(world_size=1 + len(others), cpu_group="of ranks")
        monkeypatch.setattr(branches_module, "get_tp_group", lambda: given)

        def all_reduce(said: torch.Tensor, op: Any, group: str) -> None:
            assert (op, group) == (torch.distributed.ReduceOp.MIN, "of ranks")
            asked.append(bool(said[0]))
            said.clamp_(max=min(map(int, others)))

        monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)

    asked: list[bool] = []
    ranks.asked = asked  # type: ignore[attr-defined]
    ranks()
    return ranks


def agreed(
    *backends: str,
    room: TreeRoom | None = ROOM,
    graphs: Collection[CUDAGraphMode] = GRAPHS_V2,
    mode: CUDAGraphMode = CUDAGraphMode.NONE,
) -> bool:
    """Return the verdict for an engine with these attention backends in its second KV group."""

    def groups(names: Sequence[str]) -> list[Any]:
        backends = [SimpleNamespace(get_name=lambda name=name: name) for name in names]
        return [SimpleNamespace(backend=backend) for backend in backends]

    compilation = SimpleNamespace(cudagraph_mode=mode)
    runner = SimpleNamespace(
        device=torch.device("cpu"),
        speculative_config=SimpleNamespace(num_speculative_tokens=16),
        attn_groups=[groups(BACKENDS[:1]), groups(backends)],
        vllm_config=SimpleNamespace(compilation_config=compilation),
    )
    branches: Any = BranchSequences(runner)
    branches.room, branches.graphs = lambda requests, rows: room, graphs
    return bool(branches.agree())


def test_backends_are_those_of_vllm() -> None:
    for name in BACKENDS:
        assert AttentionBackendEnum[name].get_class().get_name() == name


def test_trees_on_tested_backends(caplog: pytest.LogCaptureFixture) -> None:
    assert agreed(*BACKENDS)
    assert agreed(room=ROOM._replace(branches=1))
    assert not caplog.messages


@pytest.mark.parametrize("untested", ["FLASH_ATTN", "TRITON_MLA"])
def test_chains_where_any_layer_has_another_backend(
    untested: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert not agreed(BACKENDS[0], untested)
    (said,) = caplog.messages
    for word in ("Draft trees disabled", untested, *BACKENDS, "--attention-backend"):
        assert word in said


def test_chains_without_room(caplog: pytest.LogCaptureFixture) -> None:
    assert not agreed(room=None)
    assert "Draft trees disabled: the KV cache" in caplog.text
    assert not agreed(room=ROOM._replace(branches=0))
    assert "Draft trees disabled: one request alone leaves no sequence" in caplog.text


@pytest.mark.parametrize(
    ("mode", "graphs", "none"),
    [
        ("NONE", GRAPHS_V1, False),
        ("PIECEWISE", GRAPHS_V1, False),
        ("FULL_AND_PIECEWISE", GRAPHS_V1, False),
        ("FULL", GRAPHS_V1, True),
        ("FULL", GRAPHS_V2, False),
        ("FULL_DECODE_ONLY", GRAPHS_V1, True),
        ("FULL_DECODE_ONLY", GRAPHS_V2, True),
    ],
)
def test_it_is_said_where_trees_have_no_graphs(
    mode: str, graphs: Any, none: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vllm.hetero_spec"):
        assert agreed(graphs=graphs, mode=CUDAGraphMode[mode])
    assert (f"without CUDA graphs, since cudagraph_mode is {mode};" in caplog.text) is none


@pytest.mark.parametrize("backend", [BACKENDS[0], "FLASH_ATTN"])
@pytest.mark.parametrize("others", [(True, True), (True, False)])
def test_ranks_agree(group: Any, backend: str, others: tuple[bool, ...]) -> None:
    """Each rank takes part in the reduction, also if its own verdict is negative."""
    group(*others)
    supported = backend in BACKENDS
    assert agreed(backend) is (supported and all(others))
    assert group.asked == [supported]
