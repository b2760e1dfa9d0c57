# SPDX-License-Identifier: Apache-2.0
"""Contexts of the bridge for tests: pairs of trained tokenizers, and steps over target ids."""

import random
from collections.abc import Sequence

from vllm_hetero_spec.text.bridge import Bridge
from vllm_hetero_spec.text.context import Context
from vllm_hetero_spec.text.tokenizer import TextTokenizer

Family = dict[str, TextTokenizer]  # tokenizers by name

PAIRS = [
    ("byte-level", "sentencepiece"),
    ("sentencepiece", "byte-level"),
    ("byte-level", "byte-level-nfc"),
    ("byte-level-nfc", "tiktoken"),
    ("tiktoken", "processor"),
    ("processor", "unigram"),
    ("sentencepiece", "processor"),
]
# The first five are also used for drafts.
REAL_PAIRS = [
    ("qwen2", "llama-2"),
    ("llama-2", "qwen2"),
    ("mistral-v3-32768", "starcoder2"),
    ("llama-3.1", "tinyllamas-512"),
    ("phi-3-medium-128k-instruct", "byte-level"),
    ("byte-level", "phi-4"),
    ("codellama", "gpt2"),
]


def target_ids(target: TextTokenizer, text: str) -> list[int]:
    """Return a target's ids of a text, with the dummy prefix of its tokenizer."""
    return target.encode(" " * target.leading_space.applies(first=True) + text)


def opened(bridge: Bridge, ids: Sequence[int]) -> Context:
    """Return a new context that has read these target ids."""
    context = bridge.open()
    bridge.extend([context], [ids])
    assert not context.broken
    return context


def walk(context: Context, ids: list[int], rng: random.Random) -> None:
    """Append ids in random pieces. Check the number of kept ids at every step."""
    while context.num_target < len(ids):
        before, at = list(context.ids), context.num_target
        kept = context.append(ids[at : at + rng.randint(1, 6)])
        assert 0 <= kept <= min(len(before), len(context.ids))
        assert context.ids[:kept] == before[:kept]
