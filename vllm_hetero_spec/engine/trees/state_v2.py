# SPDX-License-Identifier: Apache-2.0
"""Model state of Model Runner V2 that adds branches of draft trees to the attention metadata."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from vllm_hetero_spec.engine.compat import patching
from vllm_hetero_spec.engine.trees.attention_v2 import BranchSequencesV2
from vllm_hetero_spec.engine.trees.scratch import nodes_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

logger = logging.getLogger("vllm.hetero_spec")


class TreeModelState(DefaultModelState):
    """State of a target whose drafts may be trees."""

    branches: "BranchSequencesV2 | None" = None  # set by `branches_of`

    def prepare_attn(
        self,
        input_batch: "InputBatch",
        cudagraph_mode: "CUDAGraphMode",
        block_tables: Sequence[torch.Tensor],
        slot_mappings: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if self.branches is not None:
            input_batch, block_tables = self.branches.expand(
                input_batch, block_tables, slot_mappings
            )
        metadata: dict[str, Any] = super().prepare_attn(
            input_batch, cudagraph_mode, block_tables, slot_mappings, *args, **kwargs
        )
        return metadata


def trees_of(runner: "GPUModelRunner") -> BranchSequencesV2 | None:
    """Create a runner's draft trees; return None, and log why if its target supports none."""
    if not nodes_of(runner.vllm_config):
        return None
    state = runner.model_state
    if not isinstance(state, TreeModelState):
        logger.warning("Draft trees disabled: %s prepares attention.", type(state).__name__)
        return None
    state.branches = BranchSequencesV2(runner)
    return state.branches


def install() -> None:
    """Patch the model states of this process. Idempotent; no effect without trees."""
    import vllm.v1.worker.gpu.model_states as states

    patching.replace(states, "resolve_model_state_cls", "trees", _wrap_resolve)


def _wrap_resolve(original: patching.Function) -> patching.Function:
    def resolve_model_state_cls(config: "VllmConfig", model: torch.nn.Module) -> type:
        found: type = original(config, model)
        return TreeModelState if found is DefaultModelState and nodes_of(config) else found

    return resolve_model_state_cls
