# SPDX-License-Identifier: Apache-2.0
"""Choice of what ranks exchange about sampled drafts: whole probability rows or the top k.

Within a node, ranks exchange whole rows, one number for each token of the target's vocabulary.
Between nodes this would be megabytes per request and step. Drafts are then sampled from the
likeliest tokens only, and ranks exchange those with their probabilities.
"""

from typing import TYPE_CHECKING

from vllm.distributed.parallel_state import in_the_same_node_as

from vllm_hetero_spec.draft.sparse_rows import SPARSE_TOP_K

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator


def likeliest_between(group: "GroupCoordinator") -> int | None:
    """Return the number of likeliest drafter tokens to sample from; None for all. Collective."""
    if group.world_size == 1 or all(in_the_same_node_as(group.cpu_group)):
        return None
    return SPARSE_TOP_K
