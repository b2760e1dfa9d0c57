# SPDX-License-Identifier: Apache-2.0
"""Record device work once and replay it without Python: CUDA graphs.

Recorded work reads and writes tensors that keep their address. A replay does not repeat what Python
computed during the recording. Tests implement `Graphs` on a CPU.
"""

from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], None]

# runs before a recording; they compile kernels, and libraries allocate their workspace.
_WARM_UPS = 2


class Graphs(Protocol):
    """Records work."""

    def capture(self, work: Work) -> Work:
        """Record the operations of `work`; return a function that replays them and keeps `work`."""


class CudaGraphs:
    """CUDA graphs of one drafter, in a pool of their own: vLLM may discard the target's graphs."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def rehearse(self, work: Work) -> None:
        """Run `work` on the recording stream, and wait for it.

        Kernels may allocate workspace per stream, and vLLM locks the workspace after warm-up.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        self._stream.synchronize()

    def capture(self, work: Work) -> Work:
        """Record on a separate stream. Replays run on the current stream."""
        for _ in range(_WARM_UPS):
            self.rehearse(work)
        graph = torch.cuda.CUDAGraph()
        with (  # the first restores the current stream if a capture fails
            torch.cuda.stream(self._stream),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream),
        ):
            work()

        def replay() -> None:
            graph.replay()

        replay.work = work  # type: ignore[attr-defined] # its tensors must outlive the recording
        return replay
