# SPDX-License-Identifier: Apache-2.0
"""Rows of a target and a drafter behind the same text, at places where the target's tokens end.

A drafter's tokens of the text before a place are not the first ones of its tokens of a longer text:
what comes behind may join the last of them. So the drafter reads the text up to each place by
itself, as the bridge gives it; the target's rows come from one forward over its tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from vllm_hetero_spec.draft.merging import PairMerging
from vllm_hetero_spec.draft.rows import TokenMap
from vllm_hetero_spec.text.bridge import make_bridge
from vllm_hetero_spec.text.loading import load_tokenizer
from vllm_hetero_spec.text.vocabulary import build_maps, default_cache

# As in the engine: the first greedy token is chosen from so many candidates.
_CANDIDATES = 8
# Drafter tokens of a greedy draft, of which the first target token counts: enough to settle it.
_GREEDY_TOKENS = 12
# Target tokens of a text before its first place.
_LEAST_CONTEXT = 8


@dataclass(frozen=True)
class TextRows:
    """What both models expect at n places of a text.

    Attributes:
        p: float32 [n, V_T], the target's logits.
        q: float32 [n, V_D], the drafter's; -inf for tokens that are never drafted.
        contexts: The drafter's ids of the text before each place.
        greedy: The first target token of a greedy draft, -1 where it gave none.
    """

    p: torch.Tensor
    q: torch.Tensor
    contexts: list[list[int]]
    greedy: list[int]


class PairRows:
    """Reads texts with a pair of models.

    Args:
        target: Model and tokenizer, of transformers.
        drafter: The same of the drafter, on the same device.
    """

    def __init__(self, target: tuple[Any, Any], drafter: tuple[Any, Any]) -> None:
        (self._target_model, self._encode), (self._drafter_model, _) = target, drafter
        self._device = self._target_model.device
        self.target, self.drafter = (
            load_tokenizer(tokenizer, role).limited_to(model.get_input_embeddings().num_embeddings)
            for role, (model, tokenizer) in (("target", target), ("drafter", drafter))
        )
        self._bridge = make_bridge(
            self.target,
            self.drafter,
            target_eos=_ends(self._target_model),
            drafter_eos=_ends(self._drafter_model),
        )
        banned = sorted(self.drafter.special_ids - self._bridge.drafter_eos)
        self._banned = torch.tensor(banned, dtype=torch.long, device=self._device)
        maps = build_maps(self.target, self.drafter, cache=default_cache())
        self.maps = maps.with_ends(self._bridge.special)
        width = self._target_model.get_output_embeddings().weight.shape[0]
        self.twins, self.firsts = (
            TokenMap(torch.from_numpy(first).long().to(self._device), width)
            for first in (self.maps.d2t, self.maps.kappa_first)
        )
        self.merging = PairMerging(self.target, self.drafter, self.maps, self._device)

    @torch.inference_mode()
    def read(
        self, text: str, count: int, longest: int, generator: torch.Generator
    ) -> TextRows | None:
        """At most `count` places of a text, chosen by chance; None where it is too short.

        Args:
            text: What both models read.
            count: Places.
            longest: Target tokens that are read.
            generator: Chooses the places.
        """
        ids = self._encode(text)["input_ids"][:longest]
        ends = self._choose(ids, count, generator)
        if not ends:
            return None
        row = torch.tensor([ids], device=self._device)
        p = self._target_model(input_ids=row, use_cache=False).logits[0].float()
        q, contexts, greedy = [], [], []
        for end in ends:
            context = self._bridge.open()
            context.append(ids[:end])
            contexts.append(list(context.ids))
            q.append(self.behind(context.ids))
            candidates = q[-1].topk(min(_CANDIDATES, len(q[-1]))).indices.tolist()
            first = self._bridge.first_choice(context, candidates)
            (tokens,) = self._bridge.to_target([context], [self._draft(context.ids, first)], [1])
            greedy.append(tokens[0] if tokens else -1)
        return TextRows(
            p[torch.tensor(ends, device=self._device) - 1], torch.stack(q), contexts, greedy
        )

    @torch.inference_mode()
    def behind(self, ids: Sequence[int]) -> torch.Tensor:
        """float32 [V_D], the drafter's logits behind its ids; -inf for what is never drafted."""
        row = torch.tensor([list(ids)], device=self._device)
        logits = self._drafter_model(input_ids=row, use_cache=False).logits[0, -1].float()
        return logits[: self.drafter.vocab_size].index_fill(0, self._banned, float("-inf"))

    def _choose(self, ids: Sequence[int], count: int, generator: torch.Generator) -> list[int]:
        """Lengths of prefixes that the drafter can read: whole characters, all of them."""
        context = self._bridge.open()
        able = []
        for end, token_id in enumerate(ids, 1):
            context.append([token_id])
            if end >= _LEAST_CONTEXT and context.ids and not context.held and not context.broken:
                able.append(end)
        picked = torch.randperm(len(able), generator=generator)[:count]
        return sorted(able[i] for i in picked.tolist())

    def _draft(self, ids: Sequence[int], first: int) -> list[int]:
        ends = self._bridge.special.drafter_control
        if first in ends:
            return [first]
        rest = greedy_decode(self._drafter_model, [*ids, first], _GREEDY_TOKENS - 1, set(ends))
        return [first, *rest]


def greedy_decode(model: Any, ids: list[int], new_tokens: int, eos: set[int]) -> list[int]:
    """Up to `new_tokens` ids after `ids`, the EOS that ends them included."""
    out: list[int] = []
    cache, row = DynamicCache(), torch.tensor([ids], device=model.device)
    with torch.inference_mode():
        while len(out) < new_tokens and (not out or out[-1] not in eos):
            logits = model(input_ids=row, past_key_values=cache, use_cache=True).logits
            out.append(int(logits[0, -1].argmax()))
            row = torch.tensor([[out[-1]]], device=model.device)
    return out


def _ends(model: Any) -> list[int] | None:
    """All ids that end the model's texts, the preferred one first."""
    found = model.generation_config.eos_token_id
    return [found] if isinstance(found, int) else found
