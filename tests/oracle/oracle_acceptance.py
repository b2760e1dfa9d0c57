# SPDX-License-Identifier: Apache-2.0
"""Drafts of string-level exact match (SLEM) on a pair, without vLLM.

Each draft tokenizes the exact text from scratch for the drafter, drafts greedily and translates the
draft to target ids. Nothing is incremental, so that the engine can be compared with it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from oracle_text import split_complete, token_bytes
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

_STEPS_PER_TARGET_TOKEN = 4  # limit of drafter tokens in a round, per target token proposed


@dataclass(frozen=True)
class Rule:
    """Draft until the text makes K target tokens, at most 4 K drafter tokens."""

    k: int

    def propose(
        self, pieces: Iterator[bytes], translate: Callable[[bytes], list[int]]
    ) -> list[int]:
        """Return at most K target ids from the drafter's tokens, given as bytes one at a time."""
        draft, ids = b"", list[int]()
        for step, piece in enumerate(pieces, start=1):
            draft += piece
            ids = translate(draft)
            if step == self.k * _STEPS_PER_TARGET_TOKEN or len(ids) >= self.k:
                break
        return ids[: self.k]


class Drafter:
    """Drafts greedily from exact text; keeps the KV of the ids that two contexts share."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._table = token_bytes(tokenizer)
        self._cache = DynamicCache()
        self._cached: list[int] = []

    def __call__(self, context: bytes) -> Iterator[bytes]:
        """Yield the bytes of the drafted tokens, one at a time, until EOS.

        Only the bytes after `context` are yielded. If `context` ends in an incomplete character,
        its bytes must be drafted again, and tokens that contradict them are not eligible.
        """
        text, owed = split_complete(context)
        ids = self._tokenizer(text)["input_ids"]
        while True:
            logits = self._logits(ids)
            if owed:
                for index, data in enumerate(self._table):
                    if not data or not (data.startswith(owed) or owed.startswith(data)):
                        logits[index] = -torch.inf
            token = int(logits.argmax())
            if token == self._tokenizer.eos_token_id:
                return
            ids = [*ids, token]
            data = self._table[token]
            known = min(len(owed), len(data))
            owed = owed[known:]
            if data[known:] or not known:
                yield data[known:]

    def _logits(self, ids: list[int]) -> torch.Tensor:
        shared = 0
        for ours, theirs in zip(self._cached, ids[:-1], strict=False):
            if ours != theirs:
                break
            shared += 1
        if shared == 0:
            self._cache = DynamicCache()
        elif shared < len(self._cached):
            self._cache.crop(shared - len(self._cached))
        with torch.inference_mode():
            row = torch.tensor([ids[shared:]], device=self._model.device)
            output = self._model(input_ids=row, past_key_values=self._cache, use_cache=True)
        self._cached = list(ids)
        return output.logits[0, -1, : len(self._table)].clone()


def load(folder: Path) -> tuple[Any, Any]:
    """Return the model in float32, on the GPU if there is one, and the tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device), AutoTokenizer.from_pretrained(folder)
