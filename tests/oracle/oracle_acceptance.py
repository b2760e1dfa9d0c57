# SPDX-License-Identifier: Apache-2.0
"""Acceptance length that string-level exact match (SLEM) reaches on a pair, without vLLM.

The target's greedy continuation is computed once. Each round tokenizes the exact text from scratch
for the drafter, drafts greedily and translates the draft to target ids. It compares these ids with
the continuation. Nothing is incremental, so that the engine can be compared with it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from oracle_text import Translator, split_complete, token_bytes
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

DRAFTING = ("exactly-k-drafter-tokens", "cover", "cover-and-one-more")
_STEPS_PER_TARGET_TOKEN = 4  # limit of drafter tokens in a round, per target token proposed

Draft = Callable[[bytes], Iterator[bytes]]
Translate = Callable[[bytes, bytes], list[int]]


@dataclass(frozen=True)
class Rule:
    """Draft length of a round, and the part of the draft that is proposed.

    `exactly-k-drafter-tokens` drafts K drafter tokens. `cover` drafts until the text makes K target
    tokens, at most 4 K drafter tokens. `cover-and-one-more` drafts one token more, so that the text
    after the K-th target token is known when it is tokenized. `drop_last` withholds the last target
    token of the draft unless it is the only one, because more text could have split it differently.
    """

    k: int
    drafting: str = "cover"
    drop_last: bool = False

    def propose(
        self, pieces: Iterator[bytes], translate: Callable[[bytes], list[int]]
    ) -> list[int]:
        """Return at most K target ids from the drafter's tokens, given as bytes one at a time."""
        draft, ids, covered = b"", [], 0
        exact = self.drafting == "exactly-k-drafter-tokens"
        limit = self.k if exact else self.k * _STEPS_PER_TARGET_TOKEN
        for step, piece in enumerate(pieces, start=1):
            draft += piece
            if exact and step < limit:
                continue
            ids = translate(draft)
            covered += len(ids) >= self.k + self.drop_last
            if step == limit or covered > (self.drafting == "cover-and-one-more"):
                break
        else:
            ids = translate(draft)  # the drafter ended its text
        if self.drop_last and len(ids) > 1:
            ids = ids[:-1]
        return ids[: self.k]


@dataclass
class Counts:
    """Sums over rounds; `drafts` counts the rounds with at least one proposed token."""

    rounds: int = 0
    drafts: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens per draft round, the bonus token included."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0


def walk(
    prompt: bytes,
    greedy: Sequence[int],
    table: Sequence[bytes],
    draft: Draft,
    translate: Translate,
    rule: Rule,
    max_tokens: int,
    counts: Counts,
) -> None:
    """Add to `counts` the rounds that emit `max_tokens` of the target ids `greedy`.

    As in an engine, the first token comes from the prompt without a draft. Nothing is proposed
    after `max_tokens`, and the last token is always a bonus token. `table` holds the bytes of each
    target id.
    """
    done = 1
    while done < min(max_tokens, len(greedy)):
        context = prompt + b"".join(table[i] for i in greedy[:done])
        ids = rule.propose(draft(context), partial(translate, context))[: max_tokens - done - 1]
        accepted = 0
        while accepted < min(len(ids), len(greedy) - done):
            if ids[accepted] != greedy[done + accepted]:
                break
            accepted += 1
        counts.rounds += 1
        counts.drafts += bool(ids)
        counts.proposed += len(ids)
        counts.accepted += accepted
        done += accepted + 1


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


def greedy_decode(model: Any, ids: list[int], new_tokens: int, eos: set[int]) -> list[int]:
    """Return up to `new_tokens` ids after `ids`, including a final EOS."""
    out: list[int] = []
    cache, row = DynamicCache(), torch.tensor([ids], device=model.device)
    with torch.inference_mode():
        while len(out) < new_tokens and (not out or out[-1] not in eos):
            logits = model(input_ids=row, past_key_values=cache, use_cache=True).logits
            out.append(int(logits[0, -1].argmax()))
            row = torch.tensor([[out[-1]]], device=model.device)
    return out


def load(folder: Path) -> tuple[Any, Any]:
    """Return the model in float32, on the GPU if there is one, and the tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device), AutoTokenizer.from_pretrained(folder)


def measure(
    target: Path,
    drafter: Path,
    prompts: Sequence[str],
    max_tokens: int,
    rules: Sequence[Rule],
) -> list[Counts]:
    """Return the counts of each rule on the same greedy continuations of `prompts`."""
    target_model, target_tokenizer = load(target)
    draft = Drafter(*load(drafter))
    table, translate = token_bytes(target_tokenizer), Translator(target_tokenizer)
    eos = target_model.generation_config.eos_token_id
    stops = set(eos if isinstance(eos, list) else [eos])
    counts = [Counts() for _ in rules]
    for prompt in prompts:
        ids = target_tokenizer(prompt)["input_ids"]
        greedy = greedy_decode(target_model, ids, max_tokens, stops)
        for rule, sums in zip(rules, counts, strict=True):
            walk(prompt.encode(), greedy, table, draft, translate, rule, max_tokens, sums)
    return counts
