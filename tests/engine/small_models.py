# SPDX-License-Identifier: Apache-2.0
"""Small models of any architecture, with random weights and the demo drafter's tokenizer."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig


def save_model(make: Callable[..., PretrainedConfig], demo_pair: Path, folder: Path) -> Path:
    """Write a model into a folder, and return it. `make` gets `vocab_size` and special ids."""
    tokenizer = AutoTokenizer.from_pretrained(demo_pair / "drafter")
    tokenizer.save_pretrained(folder)
    eos = tokenizer.eos_token_id
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": eos, "pad_token_id": eos}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make(vocab_size=len(tokenizer), **ids))
    for weight in model.parameters():
        if weight.dim() > 1:  # large, so that outputs depend on more than the last token
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(folder)
    return folder
