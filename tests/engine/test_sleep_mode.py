# SPDX-License-Identifier: Apache-2.0
"""Tests of sleep mode: memory tags of the drafter's weights and KV cache.

A sleep of level 2 discards the drafter's KV and keeps its weights, because their tag is "runtime".
A CPU has no sleep mode, so a stand-in for vLLM's allocator records the tags.
"""

import contextlib
import math
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import engine, metrics_of, proposer_of, slem
from scenarios import generate, greedy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from vllm_hetero_spec import read_stats
from vllm_hetero_spec.engine.proposer import HeteroProposer
from vllm_hetero_spec.engine.seam import sleep_mode


class Allocator(TorchDispatchMode):
    """Stand-in for vLLM's allocator that records the memory allocated under each tag."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: dict[str, set[int]] = {}
        self._tag = ""

    @contextlib.contextmanager
    def use_memory_pool(self, tag: str) -> Iterator[None]:
        before, self._tag = self._tag, tag
        with contextlib.nullcontext() if before else self:
            yield
        self._tag = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_iter(found):
            if isinstance(tensor, torch.Tensor):
                held = self.allocated.setdefault(self._tag, set())
                held.add(tensor.untyped_storage().data_ptr())
                held.discard(0)  # address of an empty tensor
        return found


@pytest.mark.full
@pytest.mark.engine
def test_drafter_is_allocated_where_it_outlives_sleep(
    demo_pair: Path, prompts: list, code_prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = Allocator()
    load = HeteroProposer.load_model

    def asleep(proposer: HeteroProposer, *args: Any) -> None:
        proposer.vllm_config.model_config.enable_cumem_allocator = True
        load(proposer, *args)
        proposer.vllm_config.model_config.enable_cumem_allocator = False

    monkeypatch.setattr(HeteroProposer, "load_model", asleep)
    monkeypatch.setattr(sleep_mode, "get_mem_allocator_instance", lambda: allocator)
    on_a_gpu = SimpleNamespace(is_cuda_alike=lambda: True)
    monkeypatch.setattr(sleep_mode, "current_platform", on_a_gpu)
    with engine(demo_pair / "target", slem(demo_pair / "drafter")) as llm:
        model = proposer_of(llm).drafting.source.drafter.model
        layers = model.config.compilation_config.static_forward_context.values()
        tensors = [*model.model.parameters(), *model.model.buffers()]
        assert len(tensors) > 10
        assert set(allocator.allocated) == {"runtime", "kv_cache"}
        kept, dropped = allocator.allocated["runtime"], allocator.allocated["kv_cache"]
        lying = {tensor.untyped_storage().data_ptr() for tensor in tensors} - {0}
        assert lying <= kept
        assert not lying & dropped
        caches = {layer.kv_cache.untyped_storage().data_ptr() for layer in layers}
        assert caches <= dropped
        generate(llm, prompts[:2], greedy())
        assert metrics_of(llm)["num_accepted_tokens"] > 0
        # vLLM may also discard only the KV, without a sleep.
        text = "\n".join(code_prompts)[:1500]
        generate(llm, [text], greedy(max_tokens=8))
        for tags, reuses in ((["weights"], True), (["kv_cache"], False)):
            before = read_stats(llm)["reused_tokens"]
            for cache in model._kv_caches.values() if tags == ["kv_cache"] else ():
                cache.fill_(math.nan)  # memory that was just mapped may contain anything
            llm.collective_rpc("wake_up", args=(tags,))
            assert all(cache.isfinite().all() for cache in model._kv_caches.values())
            generate(llm, [text], greedy(max_tokens=8))
            assert (read_stats(llm)["reused_tokens"] > before) == reuses
        drafter = weakref.ref(model)
        del model, layers, tensors
    assert drafter() is None  # released with the engine, although the LLM object still exists
    assert read_stats(llm)["drafts"] > 0


def test_nothing_is_kept_where_nothing_sleeps() -> None:
    config: Any = SimpleNamespace(model_config=SimpleNamespace(enable_cumem_allocator=False))
    assert isinstance(sleep_mode.kept_in_sleep(config), contextlib.nullcontext)
