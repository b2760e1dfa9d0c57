# SPDX-License-Identifier: Apache-2.0
"""Faults of vLLM's CPU build that the plugin repairs, each compared with vLLM's own behavior."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import engine, metrics_of, slem
from vllm import SamplingParams
from vllm.platforms import current_platform

from vllm_hetero_spec.engine.compat import cpu_repair, patching
from vllm_hetero_spec.engine.compat.releases import installed

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="the faults and their repairs are the CPU build's"
)
WHOLE, CHUNKED = 1024, 64  # tokens; `max_num_batched_tokens`
LENGTH = 24


def test_expansion_is_right_and_the_stock_one_is_told_apart() -> None:
    from vllm.v1.sample import rejection_sampler

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    assert cpu_repair.expands(cpu_repair.expand)
    ends = torch.tensor([1, 1, 4], dtype=torch.int32)
    rows = cpu_repair.expand(torch.tensor([5, -1, 7]), ends, 4, -1, 9)
    assert rows.tolist() == [5, 7, 7, 7]
    stock = rejection_sampler.expand_batch_to_tokens
    stock = getattr(stock, "__wrapped__", stock)
    # When this fails, the repair is no longer needed.
    assert not cpu_repair.expands(stock)


def test_cpu_generators_cannot_be_set_back() -> None:
    # When this fails, the repair is no longer needed.
    assert not cpu_repair.has_offset(torch.Generator())


def test_rows_without_adapter_are_left_alone() -> None:
    from vllm.lora.ops.torch_ops import lora_ops

    repaired = partial(cpu_repair.without_base_rows, lora_ops.bgmv_shrink)
    inputs, weights, output = torch.ones(3, 2), torch.rand(2, 4, 2), torch.zeros(3, 4)
    repaired(inputs, weights, output, torch.tensor([1, -1, 0]), 0.5)
    torch.testing.assert_close(output[[0, 2]], 0.5 * weights.sum(2)[[1, 0]])
    assert not output[1].any()
    stock = getattr(lora_ops.bgmv_expand, "__wrapped__", lora_ops.bgmv_expand)
    assert cpu_repair.leaves_base_rows(partial(cpu_repair.without_base_rows, stock))
    # When this fails on all supported releases, the repair is no longer needed.
    assert cpu_repair.leaves_base_rows(stock) is (installed() >= (0, 33))


def test_nothing_is_repaired_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(patching, "replace", lambda *_: pytest.fail("replaced something"))
    cpu_repair.repair()


def _sampled(model: Path, spec: dict[str, Any] | None, budget: int, prompt: str) -> dict[str, Any]:
    """Return outputs of seeded and unseeded requests: one after the other, then in one batch."""
    params = {
        name: SamplingParams(temperature=1.0, seed=seed, max_tokens=LENGTH, ignore_eos=True)
        for name, seed in (("a", 7), ("b", 8), ("a again", 7), ("unseeded", None))
    }
    limits = {"max_num_batched_tokens": budget, "enable_prefix_caching": False}
    with engine(model, spec, **limits) as llm:
        assert len(llm.get_tokenizer().encode(prompt)) > 2 * CHUNKED
        found = {
            name: llm.generate([prompt], one, use_tqdm=False)[0].outputs[0].token_ids
            for name, one in params.items()
        }
        together = llm.generate([prompt] * len(params), list(params.values()), use_tqdm=False)
        drafts = metrics_of(llm).get("num_drafts", 0)
    outputs = [list(request.outputs[0].token_ids) for request in together]
    return {"one by one": found, "together": outputs, "drafts": drafts}


@pytest.mark.full
@pytest.mark.engine
def test_seeded_requests_live_through_chunked_prefill(
    demo_pair: Path, code_prompts: list[str]
) -> None:
    """Without the repair the engine ends; with it the outputs equal those of whole prompts."""
    target, prompt = demo_pair / "target", "".join(code_prompts)[:900]
    whole = _sampled(target, None, WHOLE, prompt)
    chunked = _sampled(target, None, CHUNKED, prompt)
    alone = chunked["one by one"]
    assert [len(ids) for ids in alone.values()] == [LENGTH] * 4
    assert alone["a"] == alone["a again"] != alone["b"]
    assert (alone["a"], alone["b"]) == (whole["one by one"]["a"], whole["one by one"]["b"])
    assert chunked["together"][:3] == [list(alone[name]) for name in ("a", "b", "a again")]
    assert all(len(ids) == LENGTH for ids in chunked["together"])


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.parametrize("verification", ["token", "race"])
def test_and_with_a_drafter(demo_pair: Path, code_prompts: list[str], verification: str) -> None:
    target, prompt = demo_pair / "target", "".join(code_prompts)[:900]
    spec = slem(demo_pair / "drafter", verification=verification)
    chunked = _sampled(target, spec, CHUNKED, prompt)
    found = chunked["one by one"]
    assert chunked["drafts"] > 0
    assert found["a"] != found["b"]
    assert all(len(ids) == LENGTH for ids in [*found.values(), *chunked["together"]])
    if verification == "race":  # only with this rule is a seeded output independent of the drafter
        whole = _sampled(target, spec, WHOLE, prompt)["one by one"]
        assert found["a"] == found["a again"] == whole["a"]
        assert found["b"] == whole["b"]
