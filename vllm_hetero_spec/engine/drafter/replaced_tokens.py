# SPDX-License-Identifier: Apache-2.0
"""Replace first tokens of drafts before the steps that follow them."""

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
    """Write the replaced tokens to the device, in place of the picked ones.

    A token that replaces the last one of the text moves the steps of its request back by one.

    Args:
        current: The round; its plan and the KV of its rows change.
        others: At least one replaced token, by row.
        steps: The drafter's steps.
        planner: The planner that made the round's plan.
        send: Sends arrays to the device.
    """
    picked, plan = steps.picked, current.plan
    forced = {index: other.id for index, other in others.items()}
    for index, chosen in list(forced.items()):  # what follows the chain at first, too
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
