# SPDX-License-Identifier: Apache-2.0
"""The method of a deployment: its row in the table of methods, made ready for its pair of models.

Requests at temperature 0 and under a grammar are drafted greedily whatever the method is, request
by request; the method is about the others.
"""

import logging
from dataclasses import replace

import numpy as np
import torch

from vllm_hetero_spec.draft.methods import HETERO, METHODS, SLEM, Choice, order, span, spell_same
from vllm_hetero_spec.draft.sampling import SampledMethod
from vllm_hetero_spec.draft.sparse_rows import SPARSE_TOP_K
from vllm_hetero_spec.draft.token_map import TokenMap
from vllm_hetero_spec.engine.seam.tokenizers import TokenizerPair
from vllm_hetero_spec.options import HeteroOptions
from vllm_hetero_spec.slrs.pair_merges import PairMerges
from vllm_hetero_spec.slrs.slrs import MergeSpan
from vllm_hetero_spec.text.sample_text import CALIBRATION_TEXT
from vllm_hetero_spec.text.statistics import PairMeter, documents_of
from vllm_hetero_spec.text.vocabulary import VocabularyMaps, build_maps, default_cache

logger = logging.getLogger("vllm.hetero_spec")

# The order of methods for sampled requests is the same at all temperatures above nearly greedy.
_TEMPERATURE = 1.0


def sampling_of(
    options: HeteroOptions,
    pair: TokenizerPair,
    width: int,
    device: torch.device,
    ranks: int,
    likeliest: int | None = None,
) -> SampledMethod | None:
    """How drafts are sampled; None for a method that is always greedy.

    Args:
        options: The user's; `method` decides, or is decided on here.
        pair: The tokenizers and the bridge between them.
        width: Columns of the target's logits.
        device: Where the drafter runs.
        ranks: That draft together.
        likeliest: From how many of the likeliest drafter tokens drafts are drawn; None for all.
            Rows of SLRS-n have more target tokens than that: it is `push_forward` then.
    """
    maps, size = None, pair.drafter.vocab_size
    if options.method != SLEM and not pair.bridge.identity:
        maps = build_maps(pair.target, pair.drafter, cache=default_cache())
        maps = maps.with_control(pair.bridge.special)
    if options.method == HETERO:
        # Races take the row of one drafter token at a time; and what looks further waits for the
        # device at every token.
        merges = options.verification != "race" and device.type == "cpu" and likeliest is None
        choice = _choose(pair, maps, merges=merges, ranks=ranks)
    else:
        choice = Choice(options.method, METHODS[options.method].summary)
    logger.info("Method for random requests: %s (%s); greedy and structured ones: slem.", *choice)
    method = METHODS[choice.method]
    if method.spelling is None:
        return None
    spelling = spell_same(size, width) if maps is None else method.spelling(maps)
    first, lengths = (
        torch.from_numpy(array.astype(np.int64)).to(device)
        for array in (spelling.first, spelling.lengths)
    )
    # Where both tokenizers are the same, all methods are: the drafter's rows as they are.
    tokens = TokenMap(first, width, maps is None or method.renormalise)
    sampled = SampledMethod(tokens, lengths, spelling.tokens, likeliest=likeliest)
    if likeliest is not None:
        logger.info("Drafts are drawn from the drafter's %d likeliest tokens.", likeliest)
    if maps is None or not method.merges or not options.merge_candidates or likeliest is not None:
        return sampled
    merging = PairMerges(pair.target, pair.drafter, maps, device)
    return replace(
        sampled, merging=merging, merge_span=MergeSpan(span(size), options.merge_candidates)
    )


def first_token_sampling(tokens: TokenMap, device: torch.device) -> SampledMethod:
    """What a drafter samples by that knows nothing of target tokens but the first of each draw."""
    first = tokens.first.to(device)
    map_there = TokenMap(first, tokens.width, tokens.renormalise)
    spell = lambda drawn: tokens.first[drawn : drawn + 1].tolist()  # noqa: E731
    return SampledMethod(map_there, torch.ones_like(first), spell, likeliest=SPARSE_TOP_K)


def _choose(
    pair: TokenizerPair, maps: VocabularyMaps | None, *, merges: bool, ranks: int
) -> Choice:
    """The first method in the order for a pair that a deployment can run.

    Args:
        pair: The tokenizers and the bridge between them.
        maps: Between their vocabularies; None where both are the same.
        merges: Whether it may be a method that looks beyond a drafter token.
        ranks: That draft together; where they are several, all would have to draw the same.
    """
    if ranks > 1:
        return Choice(SLEM, "a drafter that is split over ranks drafts greedily")
    if maps is None:
        return Choice("tli", "both tokenizers are the same: the drafter's rows as they are")
    meter = PairMeter(pair.target, pair.drafter, maps)
    meter.add(documents_of(CALIBRATION_TEXT))
    choices = order(meter.statistics(), temperature=_TEMPERATURE)
    return next(choice for choice in choices if merges or not METHODS[choice.method].merges)
