# SPDX-License-Identifier: Apache-2.0
"""`"method": "hetero"`: the method that fits a pair, chosen at start-up and said.

Requests at temperature 0 and under a grammar are drafted greedily whatever is chosen here, request
by request; the choice is about the others.
"""

import logging

from vllm_hetero_spec.config import METHODS
from vllm_hetero_spec.draft.methods import Choice, order
from vllm_hetero_spec.engine.seam.tokenizers import Pair
from vllm_hetero_spec.text.sample_text import CALIBRATION_TEXT
from vllm_hetero_spec.text.statistics import PairMeter, documents_of
from vllm_hetero_spec.text.vocabulary import VocabularyMaps

logger = logging.getLogger("vllm.hetero_spec")

# The prior order for sampled requests does not depend on how hot they are, above nearly greedy.
_TEMPERATURE = 1.0


def choose(
    pair: Pair, maps: VocabularyMaps | None, *, reproducible: bool, rows_available: bool
) -> Choice:
    """The first method of the prior order that this version runs; logged.

    Args:
        pair: The tokenizers and the bridge between them.
        maps: Between their vocabularies; None where both are the same.
        reproducible: Verification by races, which takes rows of one drafter token at a time.
        rows_available: The drafter's rows are on every rank that verifies.
    """
    if not rows_available:
        choice = Choice("slem", "the drafter's probabilities are on the first rank alone")
    elif maps is None:
        choice = Choice("tli", "both tokenizers are the same: the drafter's rows as they are")
    else:
        meter = PairMeter(pair.target, pair.drafter, maps)
        meter.add(documents_of(CALIBRATION_TEXT))
        known = set(METHODS) - ({"slrs"} if reproducible else set())
        every = order(meter.statistics(), temperature=_TEMPERATURE)
        choice = next(candidate for candidate in every if candidate.method in known)
    logger.info(
        "Method for random requests: %s (%s); greedy and structured ones: slem.",
        choice.method,
        choice.reason,
    )
    return choice
