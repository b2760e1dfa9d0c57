# SPDX-License-Identifier: Apache-2.0
"""Preparation of graph recording, fallbacks if it fails, and the width of block tables."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.compilation import CompilationMode

from vllm_hetero_spec.engine.drafter import recording
from vllm_hetero_spec.engine.drafter.model import DrafterModel, GraphSupport
from vllm_hetero_spec.engine.drafter.recording import Recording
from vllm_hetero_spec.engine.drafter.round_plan import Planner, table_width
from vllm_hetero_spec.engine.seam.drafter_config import DraftingMode

Shapes = tuple[tuple[int, int], ...]


def recording_of(shapes: Shapes, record: Callable[..., None] | None = None) -> Recording:
    """Return the recording of a drafter on a device that is not used."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: 1000, dtype=torch.bfloat16),
        compilation_config=SimpleNamespace(mode=CompilationMode.NONE),
    )
    support = GraphSupport(in_graph=True, several_tokens=True)
    model = SimpleNamespace(
        device=torch.device("cuda"), config=config, max_length=8, graph_support=support
    )
    drafter: Any = SimpleNamespace(model=model, rules=SimpleNamespace(beside=0), record=record)
    return Recording(drafter, DraftingMode(shapes, False, ""), measured=False)


class Graphs:
    """A stand-in for CUDA graphs that records the current stream."""

    capture = None

    def __init__(self) -> None:
        self.stream = "the usual"

    def rehearse(self, work: Callable[[], None]) -> None:
        self.stream = "graphs'"
        work()
        self.stream = "the usual"


@pytest.mark.parametrize("shapes", [((1, 1), (4, 1)), ()])
def test_the_stream_of_graphs_has_run_before_memory_is_measured(
    shapes: Shapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels may allocate work space for each stream; vLLM allows no allocations later."""
    graphs, read = Graphs(), list[tuple[str, int]]()
    monkeypatch.setattr(recording, "CudaGraphs", lambda: graphs)
    monkeypatch.setattr(
        recording, "idle_prefill", lambda _, tokens: read.append((graphs.stream, tokens))
    )
    recording_of(shapes).read_most(64, 4)
    assert read == [("the usual", 32), *[("graphs'", 1)] * bool(shapes)]


@pytest.mark.parametrize(("widest", "recorded"), [(128, 3), (8, 2), (1, 0)])
def test_if_the_widest_graphs_fail_the_others_are_recorded(
    widest: int, recorded: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without graphs, rounds take several times as long; without the widest, only prefills do."""

    def record(graphs: Any, shapes: Any, support: Any) -> None:
        if max(width for _, width in shapes) > widest:
            raise RuntimeError("out of luck")
        done.append(len(shapes))

    done: list[int] = []
    monkeypatch.setattr(recording, "CudaGraphs", Graphs)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 40, 1 << 40))
    with caplog.at_level("INFO", "vllm.hetero_spec"):
        recording_of(((1, 1), (1, 8), (1, 128)), record).record()
    assert done == [recorded] * bool(recorded)
    said = caplog.text
    assert ("Long prefills run eagerly" in said) == (widest < 128)
    assert ("runs eagerly, which is" in said) == (not recorded)
    assert (f"drafter recorded: {recorded} shapes" in said) == bool(recorded)


@pytest.mark.parametrize(("size", "width"), [(16, 8), (32, 4), (128, 1), (48, 8), (256, 1)])
def test_tables_are_as_wide_as_whole_128_tokens(size: int, width: int) -> None:
    for blocks in range(1, 20):
        found = table_width(blocks, size)
        assert found >= blocks > found - width
        assert found * size % 128 == 0
    planner = Planner(size, vocab_size=8)
    table = planner.table(planner.nowhere([3 * size, size]))
    assert table.shape == (2, table_width(3, size))


@pytest.mark.parametrize("kernel", [None, "trtllm-gen"])
def test_metadata_waits_until_the_last_one_is_copied(
    kernel: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer's own kernels plan each forward in one host buffer. TensorRT-LLM's do not wait."""
    seen: list[str] = []

    class Event:
        def synchronize(self) -> None:
            seen.append("wait")

        def record(self) -> None:
            seen.append("copied so far")

    class Group:
        layer_names = ("a layer",)

        def get_metadata_builder(self) -> Any:
            return SimpleNamespace(flashinfer_trtllm_api_decode_kernel=kernel)

        def build_metadata(self, common: Any) -> str:
            seen.append("plan")
            return "metadata"

    monkeypatch.setattr(torch.cuda, "Event", Event)
    loaded = SimpleNamespace(
        model=None, num_blocks=2, block_size=16, groups=[Group()], layers=[], kv_caches={}
    )
    monkeypatch.setattr("vllm_hetero_spec.engine.drafter.model.load_drafter", lambda *_: loaded)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=64),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    model = DrafterModel(config, torch.device("cpu"), lambda _: 0)
    one = torch.ones(1, dtype=torch.int32)
    batch: Any = SimpleNamespace(
        ids=one, starts=one, starts_cpu=one, lengths=one, lengths_cpu=one, table=one[None],
        slots=one, max_query=1, max_length=1,
    )  # fmt: skip
    assert model.metadata(batch) == model.metadata(batch) == {"a layer": "metadata"}
    assert seen == (["plan"] * 2 if kernel else ["wait", "plan", "copied so far"] * 2)
