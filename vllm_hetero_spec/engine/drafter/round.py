# SPDX-License-Identifier: Apache-2.0
"""A round of drafting that has begun."""

from dataclasses import dataclass, field

from vllm_hetero_spec.engine.drafter.round_plan import RoundPlan
from vllm_hetero_spec.engine.drafter.tasks import DrafterTokens, DraftRow
from vllm_hetero_spec.engine.drafter.token_choice import OwnPicks
from vllm_hetero_spec.staging import Fetched


@dataclass
class Round:
    """A round on its way.

    Attributes:
        rows: Its requests, those with more steps first, those drafted by SLRS-n last.
        order: Where each came from.
        plan: Where everything goes.
        own: What is not the drafter's best.
        taken: Steps that were queued, catching up included; 0 where nothing is drafted.
        candidates: int32 [n, 8], the drafter's best first ids, on their way, best first.
        fetched: What was picked, on its way.
        stand_ins: See `DrawBatch`, on their way.
        spans: What SLRS-n drafted, already there.
    """

    rows: list[DraftRow]
    order: list[int]
    plan: RoundPlan
    own: OwnPicks
    taken: int = 0
    candidates: Fetched | None = None
    fetched: Fetched | None = None
    stand_ins: Fetched | None = None
    spans: list[DrafterTokens] = field(default_factory=list)
