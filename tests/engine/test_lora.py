# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter changes only the target; greedy output equals that of the adapted target."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import engine, metrics_of, proposer_of, slem
from safetensors.torch import save_file
from scenarios import Outputs, greedy

from vllm_hetero_spec.engine.seam.runner_v2 import RunnerV2

pytestmark = [pytest.mark.full, pytest.mark.engine]

RANK = 4


@pytest.fixture(scope="module")
def adapter(demo_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter with random weights for attention and head that changes the target's output."""
    config = json.loads((demo_pair / "target" / "config.json").read_text())
    hidden, draw = config["hidden_size"], torch.Generator().manual_seed(0)
    layers = range(config["num_hidden_layers"])
    stems = {
        f"model.layers.{layer}.self_attn.{name}": (hidden, 0.05)
        for layer in layers
        for name in ("q_proj", "v_proj")
    } | {"lm_head": (config["vocab_size"], 0.01)}
    weights = {}
    for name, (width, size) in stems.items():
        stem = f"base_model.model.{name}"
        weights[f"{stem}.lora_A.weight"] = torch.randn(RANK, hidden, generator=draw)
        weights[f"{stem}.lora_B.weight"] = size * torch.randn(width, RANK, generator=draw)
    folder = tmp_path_factory.mktemp("adapter")
    save_file(weights, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    described |= {"target_modules": ["q_proj", "v_proj", "lm_head"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def generate(llm: Any, prompts: list[str], *adapters: Path | None) -> Outputs:
    """Return the outputs. Requests use the adapters in turn; `None` stands for no adapter."""
    from vllm.lora.request import LoRARequest

    known = [a and LoRARequest("random", 1, str(a)) for a in adapters]
    lora = [known[i % len(known)] for i in range(len(prompts))]
    outputs = llm.generate(prompts, greedy(), lora_request=lora, use_tqdm=False)
    return {str(i): list(o.outputs[0].token_ids) for i, o in enumerate(outputs)}


def test_same_tokens_as_the_adapted_target(
    demo_pair: Path, code_prompts: list[str], adapter: Path
) -> None:
    target, prompts = demo_pair / "target", code_prompts[:8]
    limits = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    with engine(target, **limits) as llm:
        plain, adapted = generate(llm, prompts, None), generate(llm, prompts, adapter)
        mixed = {i: (adapted if int(i) % 2 else plain)[i] for i in plain}
        assert generate(llm, prompts, None, adapter) == mixed
    assert plain != adapted
    with engine(target, slem(demo_pair / "drafter"), **limits) as llm:
        assert isinstance(proposer_of(llm).seam, RunnerV2) is ("TRITON_INTERPRET" in os.environ)
        assert generate(llm, prompts, None) == plain
        before = metrics_of(llm)["num_drafts"]
        assert generate(llm, prompts, adapter) == adapted
        assert metrics_of(llm)["num_drafts"] > before
        assert generate(llm, prompts, None, adapter) == mixed
