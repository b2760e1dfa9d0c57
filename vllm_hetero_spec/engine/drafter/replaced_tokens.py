# SPDX-License-Identifier: Apache-2.0
"""Replace first tokens of drafts before their later steps run."""

from collections.abc import Mapping

import numpy as np

from vllm_hetero_spec.engine.drafter.round import Round
from vllm_hetero_spec.engine.drafter.round_plan import Planner
from vllm_hetero_spec.engine.drafter.steps import Steps
from vllm_hetero_spec.engine.drafter.token_healing import HealedStart
from vllm_hetero_spec.staging import Send


def replace_first(
    current: Round, others: Mapping[int, HealedStart], steps: Steps, planner: Planner, send: Send
) -> None:
    """Overwrite picked first tokens on the device; changes the plan and the KV of the rows.

    If a token replaces the last one of its request, the later steps move back by one position.
    """
    picked, plan = steps.picked, current.plan
    forced = {index: other.id for index, other in others.items()}
    for index, chosen in list(forced.items()):  # forks that still follow the chain
        forced |= {at: chosen for at, step in plan.forks_of(index) if step}
    current.known = {index: other.known for index, other in others.items() if other.known}
    moved = list(current.known)
    peaks = np.array([others[index].confidence for index in moved], np.float32)
    lists = [np.array(list(of), np.int64) for of in (forced, forced.values(), moved)]
    rows, ids, lines, confidences = send(*lists, peaks)
    picked.put(0, rows, ids)
    if not moved:
        return
    picked.trust(0, lines, confidences)
    for index in moved:
        current.rows[index].sequence.kv_ids.pop()
    if plan.steps > 1:
        planner.step_back(plan, moved)
        steps.moved()
