# SPDX-License-Identifier: Apache-2.0
"""Small models of any kind, with random weights and the demo drafter's tokenizer."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig


def save_model(make: Callable[..., PretrainedConfig], demo_pair: Path, folder: Path) -> Path:
    """Write one into a folder, which is given back.

    Args:
        make: Its configuration, of `vocab_size` and the ids of the tokenizer.
        demo_pair: Has the tokenizer.
        folder: Where to.
    """
    tokenizer = AutoTokenizer.from_pretrained(demo_pair / "drafter")
    tokenizer.save_pretrained(folder)
    eos = tokenizer.eos_token_id
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": eos, "pad_token_id": eos}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make(vocab_size=len(tokenizer), **ids))
    for weight in model.parameters():
        if weight.dim() > 1:  # large enough that the context decides, and not the last token
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(folder)
    return folder
