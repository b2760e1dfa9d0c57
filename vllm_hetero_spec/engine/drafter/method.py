# SPDX-License-Identifier: Apache-2.0
"""Sampled drafting for a pair of models: what drafter tokens propose, and who is drawn for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from vllm_hetero_spec.config import HeteroOptions
from vllm_hetero_spec.draft.drawing import SampledMethod
from vllm_hetero_spec.draft.methods import span
from vllm_hetero_spec.draft.pair_merges import PairMerges
from vllm_hetero_spec.draft.slrs import MergeSpan
from vllm_hetero_spec.draft.token_map import TokenMap
from vllm_hetero_spec.engine.drafter.method_choice import choose
from vllm_hetero_spec.engine.seam.tokenizers import Pair
from vllm_hetero_spec.text.vocabulary import VocabularyMaps, build_maps, default_cache


@dataclass(frozen=True)
class Sampling:
    """Sampled drafting of one pair.

    Attributes:
        method: What the drafter's tokens propose first.
        spell: All target tokens that a drafter token proposes.
    """

    method: SampledMethod
    spell: Callable[[int], Sequence[int]]


def sampling_of(
    options: HeteroOptions, pair: Pair, width: int, device: torch.device, ranks: int
) -> Sampling | None:
    """How drafts are sampled; None for a method that is always greedy.

    Args:
        options: The user's; `method` decides, or is decided on here.
        pair: The tokenizers and the bridge between them.
        width: Columns of the target's logits.
        device: Where the drafter runs.
        ranks: That verify together.
    """
    if options.method == "slem":
        return None
    maps = None if pair.bridge.identity else _maps(pair)
    method = options.method
    if method == "hetero":
        races = options.verification == "race"
        method = choose(pair, maps, reproducible=races, rows_available=ranks == 1).method
        if method == "slem":
            return None
    if maps is None:
        first = np.arange(pair.drafter.vocab_size)
        first[first >= width] = -1
        return _sampling(first, np.ones_like(first), width, device, lambda d: (d,))
    if method in ("push_forward", "slrs"):
        lengths = np.diff(maps.kappa_ptr)
        found = _sampling(
            maps.kappa_first, lengths, width, device, lambda d: maps.target_tokens(d).tolist()
        )
        if method == "push_forward" or not options.merge_candidates:
            return found
        merging = PairMerges(pair.target, pair.drafter, maps, device)
        merge_span = MergeSpan(span(pair.drafter.vocab_size), options.merge_candidates)
        return replace(found, method=replace(found.method, merging=merging, merge_span=merge_span))
    twins = maps.d2t.tolist()
    return _sampling(
        maps.d2t,
        np.ones_like(maps.d2t),
        width,
        device,
        lambda d: twins[d : d + 1] if twins[d] >= 0 else (),
        renormalise=method != "union",
    )


def _maps(pair: Pair) -> VocabularyMaps:
    maps = build_maps(pair.target, pair.drafter, cache=default_cache())
    return maps.with_control(pair.bridge.special)


def _sampling(
    first: np.ndarray,
    lengths: np.ndarray,
    width: int,
    device: torch.device,
    spell: Callable[[int], Sequence[int]],
    *,
    renormalise: bool = True,
) -> Sampling:
    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device)

    return Sampling(
        SampledMethod(TokenMap(tensor(first), width, renormalise), tensor(lengths)), spell
    )
