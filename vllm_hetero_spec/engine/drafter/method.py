# SPDX-License-Identifier: Apache-2.0
"""Select and build the sampling method of a deployment.

Requests at temperature 0 and requests with structured output are drafted greedily, independent of
the method. The method applies to all other requests.
"""

import logging

import numpy as np
import torch

from vllm_hetero_spec.draft.draft import SPARSE_TOP_K
from vllm_hetero_spec.draft.methods import HETERO, METHODS, SLEM, Choice, order, span, spell_same
from vllm_hetero_spec.draft.sampling import SampledMethod
from vllm_hetero_spec.draft.token_map import TokenMap
from vllm_hetero_spec.engine.seam.tokenizers import TokenizerPair
from vllm_hetero_spec.options import HeteroOptions
from vllm_hetero_spec.slrs.merges import Merges
from vllm_hetero_spec.slrs.slrs import MergeSpan, SlrsMethod
from vllm_hetero_spec.text.sample_text import CALIBRATION_TEXT
from vllm_hetero_spec.text.statistics import PairMeter, documents_of
from vllm_hetero_spec.text.vocabulary import VocabularyMaps, build_maps, default_cache

logger = logging.getLogger("vllm.hetero_spec")

# The order of methods is the same at all temperatures that are not nearly 0.
_TEMPERATURE = 1.0


def sampling_of(
    options: HeteroOptions,
    pair: TokenizerPair,
    width: int,
    device: torch.device,
    ranks: int,
    likeliest: int | None = None,
    *,
    merges: bool = True,
) -> SampledMethod | None:
    """Return the method of sampled drafts; None for a method that is always greedy.

    Args:
        options: The user's options. Method `hetero` is resolved here.
        width: Columns of the target's logits.
        ranks: Number of ranks that share the drafter.
        likeliest: Number of top drafter tokens that sampling is limited to; None for all. SLRS-n
            then becomes `push_forward`, because its rows have more target tokens than this.
        merges: Allow methods that look beyond one drafter token.
    """
    maps, size = None, pair.drafter.vocab_size
    if options.method != SLEM and not pair.bridge.identity:
        maps = build_maps(pair.target, pair.drafter, cache=default_cache())
        maps = maps.with_control(pair.bridge.special)
    if options.method == HETERO:
        # SLRS-n cannot be combined with race verification, which needs the row of one drafter token
        # at a time. On a device it would synchronize at every token.
        merges &= options.verification != "race" and device.type == "cpu" and likeliest is None
        choice = _choose(pair, maps, merges=merges, ranks=ranks)
    else:
        choice = Choice(options.method, METHODS[options.method].summary)
    logger.info(
        "Method for sampled requests: %s (%s). Greedy and structured requests use slem.", *choice
    )
    method = METHODS[choice.method]
    if method.spelling is None:
        return None
    spelling = spell_same(size, width) if maps is None else method.spelling(maps)
    first, lengths = (
        torch.from_numpy(array.astype(np.int64)).to(device)
        for array in (spelling.first, spelling.lengths)
    )
    # With equal tokenizers all methods are the same: they use the drafter's rows unchanged.
    tokens = TokenMap(first, width, maps is None or method.renormalise)
    sampled = SampledMethod(tokens, lengths, spelling.tokens, likeliest=likeliest)
    if likeliest is not None:
        logger.info("Drafts are sampled from the drafter's top %d tokens.", likeliest)
    if maps is None or not method.merges or not options.merge_candidates or likeliest is not None:
        return sampled
    return SlrsMethod(
        tokens,
        lengths,
        spelling.tokens,
        merging=Merges(pair.target, pair.drafter, maps, device),
        merge_span=MergeSpan(span(size), options.merge_candidates),
    )


def first_token_sampling(tokens: TokenMap, device: torch.device) -> SampledMethod:
    """Return a sampling method that only uses the first target token of each drafter token."""
    first = tokens.first.to(device)
    map_there = TokenMap(first, tokens.width, tokens.renormalise)
    spell = lambda drawn: tokens.first[drawn : drawn + 1].tolist()  # noqa: E731
    return SampledMethod(map_there, torch.ones_like(first), spell, likeliest=SPARSE_TOP_K)


def _choose(
    pair: TokenizerPair, maps: VocabularyMaps | None, *, merges: bool, ranks: int
) -> Choice:
    """Return the best method for a pair that the deployment can run.

    `maps` is None if both tokenizers are the same; `merges` is as in `sampling_of`.
    """
    if ranks > 1:
        return Choice(SLEM, "a drafter that is split over ranks drafts greedily")
    if maps is None:
        return Choice("tli", "both tokenizers are the same: the drafter's rows as they are")
    meter = PairMeter(pair.target, pair.drafter, maps)
    meter.add(documents_of(CALIBRATION_TEXT))
    choices = order(meter.statistics(), temperature=_TEMPERATURE)
    return next(choice for choice in choices if merges or not METHODS[choice.method].merges)
