# SPDX-License-Identifier: Apache-2.0
"""Whether a target's drafts may be trees, with rows in place of the target's."""

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.layers.attention.mla_attention import QueryLenSupport
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, MLAAttentionSpec

from vllm_hetero_spec.engine.seam import tree_check
from vllm_hetero_spec.engine.seam.step_view import TreeRoom
from vllm_hetero_spec.verify.tree_rows import TreeRows

WIDTH = 8
KV: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL, LATENT = FullAttentionSpec(**KV), MLAAttentionSpec(**KV)
ROOM = TreeRoom(nodes=8, rows=16, sides=4)


def row_of(path: Sequence[int]) -> torch.Tensor:
    seed = sum((place + 1) * 31 * token for place, token in enumerate(path))
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))


class Right(tree_check.Trial):
    """A target that computes trees as it computes their paths."""

    def __init__(self, runner: Any, sides: Any) -> None:
        self.runner, self.root = runner, 0

    _behind_prompt = _put = _sampled_from = None  # type: ignore[assignment]

    def rows(self, draft: Sequence[int], tree: TreeRows | None) -> torch.Tensor:
        paths: list[list[int]] = [[]]
        for place, token in enumerate(draft):
            parent = place - 1 if tree is None else tree.parents[place]
            paths.append([*(paths[parent + 1] if parent >= 0 else []), token])
        return self.changed(torch.stack([row_of(path) for path in paths]), tree)

    def changed(self, rows: torch.Tensor, tree: TreeRows | None) -> torch.Tensor:
        return rows


class Wrong(Right):
    """The last row of a tree is another."""

    def changed(self, rows: torch.Tensor, tree: TreeRows | None) -> torch.Tensor:
        return rows if tree is None else torch.cat([rows[:-1], 2 * rows[-1:]])


class NoNumber(Right):
    """So is the first, and no number."""

    def changed(self, rows: torch.Tensor, tree: TreeRows | None) -> torch.Tensor:
        return rows if tree is None else torch.cat([rows[:1], rows[1:2] * float("nan"), rows[2:]])


class Raises(Right):
    def changed(self, rows: torch.Tensor, tree: TreeRows | None) -> torch.Tensor:
        raise ValueError("no such kernel")


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The ranks of the target: this one alone, or beside others of these verdicts."""

    def ranks(*others: bool) -> None:
        given = SimpleNamespace(world_size=1 + len(others), cpu_group="of ranks")
        monkeypatch.setattr(tree_check, "get_tp_group", lambda: given)

        def all_reduce(said: torch.Tensor, op: Any, group: str) -> None:
            assert (op, group) == (torch.distributed.ReduceOp.MIN, "of ranks")
            asked.append(bool(said[0]))
            said.clamp_(max=min(map(int, others)))

        monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)

    asked: list[bool] = []
    ranks.asked = asked  # type: ignore[attr-defined]
    ranks()
    return ranks


class Group(NamedTuple):
    """Layers that attend by one backend."""

    kv_cache_spec: AttentionSpec
    support: QueryLenSupport | None = None  # None where a backend does not say

    def get_metadata_builder(self) -> Any:
        said = {} if self.support is None else {"query_len_support": self.support}
        return SimpleNamespace(**said)


def agreed(
    trial: type = Right,
    room: TreeRoom | None = ROOM,
    groups: Sequence[Group] = (Group(FULL),),
    mode: CUDAGraphMode = CUDAGraphMode.NONE,
) -> bool:
    compilation = SimpleNamespace(cudagraph_mode=mode)
    runner = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=16),
        device=torch.device("cpu"),
        attn_groups=[[Group(FULL)], groups],
        vllm_config=SimpleNamespace(compilation_config=compilation),
    )
    sides: Any = SimpleNamespace(room=lambda requests, rows: room)
    return tree_check.agree(runner, sides, trial)


def test_right_rows_are_trees(caplog: pytest.LogCaptureFixture) -> None:
    assert agreed()
    assert not caplog.messages


@pytest.mark.parametrize(
    ("trial", "reason"),
    [
        (Wrong, "differ from those of its paths by 1 of their length"),
        (NoNumber, "differ from those of its paths by nan of their length"),
        (Raises, "a first one ended with ValueError: no such kernel"),
    ],
)
def test_chains_where_rows_are_not_right(
    trial: type, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert not agreed(trial)
    (said,) = caplog.messages
    assert said.startswith("Drafts are chains, not trees: ")
    assert reason in said


def test_chains_without_scratch(caplog: pytest.LogCaptureFixture) -> None:
    assert not agreed(room=None)
    assert "Drafts are chains, not trees: the KV cache" in caplog.text


def test_chains_where_no_request_may_have_a_side_path(caplog: pytest.LogCaptureFixture) -> None:
    assert not agreed(room=ROOM._replace(sides=0))
    assert "Drafts are chains, not trees: one request alone leaves no sequence" in caplog.text
    caplog.clear()
    assert agreed(room=ROOM._replace(sides=1))
    assert not caplog.messages


@pytest.mark.parametrize("support", [None, *QueryLenSupport])
def test_chains_where_mla_guesses_contexts(
    support: QueryLenSupport | None, caplog: pytest.LogCaptureFixture
) -> None:
    varlen = support is QueryLenSupport.VARLEN
    assert agreed(groups=[Group(LATENT, support)]) is varlen
    assert ("Drafts are chains, not trees: its MLA backend" in caplog.text) is not varlen


@pytest.mark.parametrize(
    ("mode", "graphs", "none"),
    [
        ("NONE", "V1", False),
        ("PIECEWISE", "V1", False),
        ("FULL_AND_PIECEWISE", "V1", False),
        ("FULL", "V1", True),
        ("FULL", "V2", False),
        ("FULL_DECODE_ONLY", "V1", True),
        ("FULL_DECODE_ONLY", "V2", True),
    ],
)
def test_it_is_said_where_trees_have_no_graphs(
    mode: str, graphs: str, none: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class OfRunner(Right):
        pass

    OfRunner.graphs = {"V1": tree_check.TrialV1, "V2": tree_check.TrialV2}[graphs].graphs
    with caplog.at_level(logging.INFO, "vllm.hetero_spec"):
        assert agreed(OfRunner, mode=CUDAGraphMode[mode])
    assert (f"without CUDA graphs, since cudagraph_mode is {mode};" in caplog.text) is none


@pytest.mark.parametrize("trial", [Right, Wrong, Raises])
@pytest.mark.parametrize("others", [(True, True), (True, False)])
def test_ranks_agree(group: Any, trial: type, others: tuple[bool, ...]) -> None:
    """All of them say what they have found, whatever that is."""
    group(*others)
    assert agreed(trial) is (trial is Right and all(others))
    assert group.asked == [trial is Right]
