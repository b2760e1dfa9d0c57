# SPDX-License-Identifier: Apache-2.0
"""When the drafter's graphs are recorded, and in what memory: after the target's own.

vLLM measures what is left for the target's KV before anything is recorded. What the drafter's
graphs will take is set aside while it measures, and given back just before they are recorded.
"""

import gc
import logging
from collections.abc import Sequence

import torch
from vllm.config.compilation import CompilationMode

from vllm_hetero_spec.engine.drafter.decode_loop import Drafter
from vllm_hetero_spec.engine.drafter.graphs import CudaGraphs
from vllm_hetero_spec.engine.drafter.model import GraphSupport
from vllm_hetero_spec.engine.seam.drafter_config import READ_WIDTH, DraftingMode
from vllm_hetero_spec.errors import ConfigError, one_line

logger = logging.getLogger("vllm.hetero_spec")

# Set aside for all graphs with their tensors, logits apart; a few MiB each, and one forward's
# activations. Twice that where drafts may be trees, since each shape is recorded twice then.
_BYTES = 256 << 20
_LOGITS = 4  # of the largest shape: as they come, kept, of the place before, and beside their best


class Recording:
    """Records the graphs of one drafter, once.

    Args:
        drafter: Whose rounds.
        mode: Whether there are to be graphs.
        measured: Whether vLLM measures the memory that is left.
        later: Bytes that rounds will take beside graphs and forwards, set aside as well.
    """

    def __init__(
        self, drafter: Drafter, mode: DraftingMode, *, measured: bool, later: int = 0
    ) -> None:
        self._drafter, self._mode = drafter, mode
        most = max((requests for requests, _ in mode.shapes), default=0)
        of = drafter.model.config.model_config
        logits = most * of.get_vocab_size() * of.dtype.itemsize
        self._bytes = _BYTES * (2 if drafter.beside else 1) + _LOGITS * logits
        self._done = False
        self._set_aside: torch.Tensor | None = None
        device = drafter.model.device
        self._graphs = CudaGraphs() if mode.graphs and device.type == "cuda" else None
        if measured and device.type != "cpu":
            size = later + (self._bytes if mode.graphs else 0)
            self._set_aside = torch.empty(size, dtype=torch.uint8, device=device)

    def read_most(self, budget: int, requests: int) -> None:
        """The largest forward that there will be, where a later one would come at a bad time.

        vLLM lets no work space grow once it is warm, has measured by then what memory is left, and
        a model is compiled for any number of tokens by a forward of several. Elsewhere a token
        tells whether there is a kernel for its attention.

        Args:
            budget: Most tokens of a forward.
            requests: Most of them.

        Raises:
            ConfigError: The drafter cannot run here.
        """
        model = self._drafter.model
        compiled = model.config.compilation_config.mode != CompilationMode.NONE
        largest = model.device.type != "cpu" or compiled
        try:
            self._drafter.read(min(budget, requests * model.max_length) if largest else 1)
        except torch.OutOfMemoryError:  # what to do about that vLLM's words say
            raise
        except Exception as error:
            raise ConfigError(
                f"the drafter {model.config.model_config.model!r} cannot run on this "
                f"{model.device.type} ({type(error).__name__}: {one_line(error)}); give one that "
                "vLLM can run alone here."
            ) from error
        if self._graphs is not None:
            self._graphs.rehearse(lambda: self._drafter.read(1))

    def record(self) -> int:
        """Record, or say why not. Later calls do nothing.

        Returns:
            Bytes of device memory that the graphs take.
        """
        if self._done:
            return 0
        self._done = True
        self._set_aside = None
        support = self._drafter.model.graph_support if self._mode.graphs else None
        if self._graphs is None or support is None:
            why = self._mode.why or "its attention cannot be recorded"
            logger.info("The drafter runs eagerly: %s.", why)
            return 0
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        collects, frozen = gc.isenabled(), gc.get_freeze_count() > 0
        try:
            if free < self._bytes:
                raise MemoryError(f"{free >> 20} MiB of device memory are left")
            gc.collect()
            # A capture looks at all that lives; one that is interrupted by a collection may break.
            gc.freeze()
            gc.disable()
            shapes = self._record(self._graphs, support)
        except Exception as error:  # the target's own requests must not suffer from it
            logger.warning(
                "The drafter runs eagerly, which is several times slower: its CUDA graphs could "
                "not be recorded (%s: %s).",
                type(error).__name__,
                error,
            )
            return 0
        finally:
            if not frozen:  # vLLM does so in the end
                gc.unfreeze()
            if collects:
                gc.enable()
        taken = max(0, free - torch.cuda.mem_get_info()[0])  # others may have given some back
        logger.info(
            "The drafter runs by CUDA graphs: %d shapes, %d MiB, metadata made %s.",
            len(shapes),
            taken >> 20,
            "in the graphs" if support.in_graph else "on the host",
        )
        return taken

    def _record(self, graphs: CudaGraphs, support: GraphSupport) -> Sequence[tuple[int, int]]:
        """Record the shapes, or those alone that rounds cannot do without; which."""
        shapes: Sequence[tuple[int, int]] = self._mode.shapes
        try:
            self._drafter.record(graphs, shapes, support)
        except Exception as error:
            shapes = [(requests, width) for requests, width in shapes if width < READ_WIDTH]
            if len(shapes) == len(self._mode.shapes):
                raise
            logger.warning(
                "The drafter reads long texts eagerly: the widest of its CUDA graphs could not be "
                "recorded (%s: %s).",
                type(error).__name__,
                error,
            )
            self._drafter.record(graphs, shapes, support)
        return shapes
