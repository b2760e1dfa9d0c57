# SPDX-License-Identifier: Apache-2.0
"""How much of what drafts were drawn from travels between ranks.

Within a node whole rows do: one number for each token of the target's vocabulary. Between nodes
that is megabytes for each request and step, so drafts are drawn from a few likeliest tokens there,
and those travel with their probabilities.
"""

from typing import TYPE_CHECKING

from vllm.distributed.parallel_state import in_the_same_node_as

from vllm_hetero_spec.draft.sparse_rows import SPARSE_TOP_K

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator


def likeliest_between(group: "GroupCoordinator") -> int | None:
    """From how many of the likeliest drafter tokens drafts are drawn; None for all.

    All ranks have to call it.

    Args:
        group: The target's tensor parallel group.
    """
    if group.world_size == 1 or all(in_the_same_node_as(group.cpu_group)):
        return None
    return SPARSE_TOP_K
