# SPDX-License-Identifier: Apache-2.0
"""Forwards of a drafter that belong to no request, and the recording of its CUDA graphs.

Idle forwards are for timing, warm-up and compilation. They have the shapes of a round's forwards,
and run on the padding block.

vLLM measures the memory for the target's KV before graphs are recorded. During that measurement
this module reserves the memory of the drafter's graphs. It releases the reservation just before it
records them.
"""

import gc
import logging
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from vllm.config.compilation import CompilationMode

from vllm_hetero_spec.engine.drafter.decode_loop import Drafter
from vllm_hetero_spec.engine.drafter.model import GraphSupport
from vllm_hetero_spec.engine.drafter.recorded_steps import Work
from vllm_hetero_spec.engine.drafter.steps import read_texts
from vllm_hetero_spec.engine.seam.drafter_config import READ_WIDTH, DraftingMode
from vllm_hetero_spec.errors import ConfigError, one_line

logger = logging.getLogger("vllm.hetero_spec")

# bytes; reserved for all graphs and their tensors, without logits: a few MiB per graph, and the
# activations of one forward. Doubled for draft trees, which need two recordings per shape.
_BYTES = 256 << 20
# copies of the largest shape's logits: output, kept, those of the last token, and for their top-k.
_LOGITS = 4
# runs before a recording; they compile kernels, and libraries allocate their workspace.
_WARM_UPS = 2


@torch.inference_mode()
def idle_step(drafter: Drafter, batch: int) -> None:
    """Queue one decode step of a batch size, or a round of a parallel drafter."""
    planner, steps = drafter.planner, drafter.steps
    pending = 1 + drafter.parallel  # the fewest for which there is a graph
    nowhere, shape = planner.nowhere([pending] * batch), steps.shape(batch, pending, pending)
    steps.begin(planner.plan(nowhere, [[0] * pending] * batch, [steps.places] * batch, *shape))


@torch.inference_mode()
def idle_prefill(drafter: Drafter, tokens: int) -> None:
    """Queue a prefill of this many tokens as in a round."""
    planner, steps, longest = drafter.planner, drafter.steps, drafter.max_length
    lengths = [min(longest, tokens - at) for at in range(0, tokens, longest)]
    nowhere, texts = planner.nowhere(lengths), [[0] * length for length in lengths]
    left = read_texts(nowhere, texts, steps, planner, nullcontext())
    shape = steps.shape(len(left), max(map(len, left)), min(lengths))
    steps.begin(planner.plan(nowhere, left, [1] * len(left), *shape))


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
        return graph.replay


class Recording:
    """Records the graphs of one drafter, once.

    Args:
        measured: True if vLLM measures free memory to size the target's KV cache.
        later: Bytes that rounds need besides graphs and forwards. They are reserved as well.
    """

    def __init__(
        self, drafter: Drafter, mode: DraftingMode, *, measured: bool, later: int = 0
    ) -> None:
        self._drafter, self._mode = drafter, mode
        most = max((requests for requests, _ in mode.shapes), default=0)
        of = drafter.model.config.model_config
        logits = most * of.get_vocab_size() * of.dtype.itemsize
        self._bytes = _BYTES * (2 if drafter.rules.beside else 1) + _LOGITS * logits
        self._done = False
        self._set_aside: torch.Tensor | None = None
        device = drafter.model.device
        self._graphs = CudaGraphs() if mode.graphs and device.type == "cuda" else None
        if measured and device.type != "cpu":
            size = later + (self._bytes if mode.graphs else 0)
            self._set_aside = torch.empty(size, dtype=torch.uint8, device=device)

    def read_most(self, budget: int, requests: int) -> None:
        """Run the largest possible forward during start-up.

        vLLM measures free memory and locks the kernel workspace at the end of start-up, so a larger
        forward later would fail. A compiled model needs one forward of several tokens to compile
        for all sizes. On a CPU without compilation, one token is enough to find out if an attention
        kernel exists.

        Raises:
            ConfigError: The drafter cannot run on this device.
        """
        model = self._drafter.model
        compiled = model.config.compilation_config.mode != CompilationMode.NONE
        largest = model.device.type != "cpu" or compiled
        try:
            idle_prefill(self._drafter, min(budget, requests * model.max_length) if largest else 1)
        except torch.OutOfMemoryError:  # vLLM's message has the remedy
            raise
        except Exception as error:
            raise ConfigError(
                f"the drafter {model.config.model_config.model!r} cannot run on this "
                f"{model.device.type} ({type(error).__name__}: {one_line(error)}); give one that "
                "vLLM can run alone here."
            ) from error
        if self._graphs is not None:
            self._graphs.rehearse(lambda: idle_prefill(self._drafter, 1))

    def record(self) -> int:
        """Record the graphs, or log why the drafter runs eagerly. Return their device bytes.

        Later calls do nothing.
        """
        if self._done:
            return 0
        self._done = True
        self._set_aside = None
        support = self._drafter.model.graph_support if self._mode.graphs else None
        if self._graphs is None or support is None:
            why = self._mode.why or "its attention cannot be recorded"
            logger.info("CUDA graphs of the drafter disabled: %s.", why)
            return 0
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        collects, frozen = gc.isenabled(), gc.get_freeze_count() > 0
        try:
            if free < self._bytes:
                raise MemoryError(f"{free >> 20} MiB of device memory are left")
            gc.collect()
            # A garbage collection during a capture may break it. `freeze` shortens the collection
            # that some releases of PyTorch run at the start of each capture.
            gc.freeze()
            gc.disable()
            shapes = self._record(self._graphs, support)
        except Exception as error:  # must not affect the target's requests
            logger.warning(
                "Recording the drafter's CUDA graphs failed (%s: %s). It runs eagerly, which is "
                "several times slower.",
                type(error).__name__,
                error,
            )
            return 0
        finally:
            if not frozen:  # if vLLM froze the heap, vLLM unfreezes it
                gc.unfreeze()
            if collects:
                gc.enable()
        taken = max(0, free - torch.cuda.mem_get_info()[0])  # other code may have freed some
        logger.info(
            "CUDA graphs of the drafter recorded: %d shapes, %d MiB, metadata built %s.",
            len(shapes),
            taken >> 20,
            "in the graphs" if support.in_graph else "on the host",
        )
        return taken

    def _record(self, graphs: CudaGraphs, support: GraphSupport) -> Sequence[tuple[int, int]]:
        """Record all shapes; if this fails, only the narrow ones. Return the recorded shapes."""
        shapes: Sequence[tuple[int, int]] = self._mode.shapes
        try:
            self._drafter.record(graphs.capture, shapes, support)
        except Exception as error:
            shapes = [(requests, width) for requests, width in shapes if width < READ_WIDTH]
            if len(shapes) == len(self._mode.shapes):
                raise
            logger.warning(
                "Recording the widest CUDA graphs of the drafter failed (%s: %s). Long prefills "
                "run eagerly.",
                type(error).__name__,
                error,
            )
            self._drafter.record(graphs.capture, shapes, support)
        return shapes
