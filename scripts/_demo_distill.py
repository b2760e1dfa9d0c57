# SPDX-License-Identifier: Apache-2.0
"""Texts in the target's own words, for the drafter to learn from.

A drafter is judged by one thing: how often it says what the target says. Greedy continuations of
the target are simpler and more repetitive than the corpus, so a drafter trained on the corpus
alone spends its few parameters on the wrong text (sequence-level distillation).
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from _demo_training import bfloat16_pays, token_stream, with_conversations
from transformers import AutoModelForCausalLM, AutoTokenizer

_ROWS, _PROMPT, _CONTINUATION = 96, 64, 128  # texts of a batch; their lengths in target tokens


def continuations(
    folder: Path,
    texts: Sequence[str],
    batches: int,
    *,
    seed: int = 0,
    report: Callable[[float], None] = lambda spent: None,
) -> list[str]:
    """Cut-outs of `texts` and of conversations, each continued greedily by the model in `folder`.

    Turn markers are the model's own. A batch has 96 texts; `report(spent)` is called before each
    with the fraction that is done.
    """
    generator = torch.Generator().manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dtype = torch.bfloat16 if bfloat16_pays() else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    stream = token_stream(tokenizer, with_conversations(tokenizer, texts))
    continued: list[str] = []
    for batch in range(batches):
        report(batch / batches)
        starts = torch.randint(len(stream) - _PROMPT, (_ROWS, 1), generator=generator)
        rows = model.generate(
            stream[starts + torch.arange(_PROMPT)],
            attention_mask=torch.ones(_ROWS, _PROMPT, dtype=torch.long),
            do_sample=False,
            max_new_tokens=_CONTINUATION,
            pad_token_id=tokenizer.eos_token_id,
        )
        decoded = tokenizer.batch_decode(rows, skip_special_tokens=False)
        continued += [text.replace(tokenizer.eos_token, "") for text in decoded]
    return continued
