# SPDX-License-Identifier: Apache-2.0
"""Names of the real models, and helpers of their tests."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import slem
from vllm import SamplingParams

QWEN = "Qwen/Qwen2.5-Coder-0.5B-Instruct"
SMOLLM = "HuggingFaceTB/SmolLM2-135M-Instruct"
GEMMA = "google/gemma-3-270m"

MAX_TOKENS = 48


def hetero(drafter: Path | str, lookahead: int = 4, **changes: Any) -> dict[str, Any]:
    """Return a speculative configuration with room for the KV of a real drafter."""
    return slem(drafter, lookahead, method="hetero", kv_cache_memory_bytes=256 << 20, **changes)


def scored(llm: Any, prompts: Sequence[str]) -> list[tuple[list[int], list[float]]]:
    """Return each prompt's greedy tokens, and the lead of each over the second likeliest, in nats.

    All requests are one batch.
    """
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=2)
    found = []
    for request in llm.generate(list(prompts), params, use_tqdm=False):
        output = request.outputs[0]
        values = [sorted(value.logprob for value in row.values())[-2:] for row in output.logprobs]
        found.append((list(output.token_ids), [best - second for second, best in values]))
    return found


def first_difference(ids: Sequence[int], others: Sequence[int]) -> int | None:
    """Return the first position where two outputs differ, or None if they are equal."""
    pairs = enumerate(zip(ids, others, strict=False))
    shorter = min(len(ids), len(others))
    equal = None if len(ids) == len(others) else shorter
    return next((place for place, (a, b) in pairs if a != b), equal)


def lead_where_they_differ(
    alone: Sequence[tuple[list[int], list[float]]], others: Sequence[list[int]]
) -> float:
    """Return the largest lead, in nats, of a token that the other output replaces; 0 without any.

    Other batch shapes round otherwise, so a near tie may have another result.
    """
    leads = [0.0]
    for (ids, ahead), other in zip(alone, others, strict=True):
        place = first_difference(ids, other)
        if place is not None:
            leads.append(ahead[place] if place < len(ahead) else math.inf)
    return max(leads)
