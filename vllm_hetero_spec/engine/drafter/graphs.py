# SPDX-License-Identifier: Apache-2.0
"""Work that is recorded once and replayed without Python: CUDA graphs.

What is recorded reads and writes tensors that are made once and stay where they are; nothing that
Python computes while recording is computed again. `Graphs` is the border: a test has another
implementation, which replays the very operations on a CPU.
"""

from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], None]

# Runs before the recording: kernels are compiled and libraries make their work space.
_WARM_UPS = 2


class Graphs(Protocol):
    """Records work."""

    def capture(self, work: Work) -> Work:
        """What replays the operations that `work` queues; whatever `work` holds is kept alive."""


class CudaGraphs:
    """Graphs of one drafter, in a memory pool of their own.

    The target's graphs may be replayed, or thrown away, while ours wait.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def rehearse(self, work: Work) -> None:
        """Run it where graphs are recorded.

        Kernels may keep work space for each stream, and vLLM lets none be made once it is warm.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        self._stream.synchronize()

    def capture(self, work: Work) -> Work:
        """Record on a stream of its own; replays run on the current one."""
        for _ in range(_WARM_UPS):
            self.rehearse(work)
        graph = torch.cuda.CUDAGraph()
        with (  # the first one: a capture that fails leaves its stream the current one
            torch.cuda.stream(self._stream),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream),
        ):
            work()

        def replay() -> None:
            graph.replay()

        replay.work = work  # type: ignore[attr-defined] # its tensors must outlive the recording
        return replay
