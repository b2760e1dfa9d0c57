# SPDX-License-Identifier: Apache-2.0
"""Workers that take each other for another node's, between which rows have two tokens."""

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_hetero_spec.engine.seam import nodes

nodes.in_the_same_node_as = lambda group: [rank == 0 for rank in range(group.size())]
nodes.LIKELIEST = 2


class FarApart(CPUWorker):
    """A rank on a node of its own."""
