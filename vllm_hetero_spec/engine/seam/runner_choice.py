# SPDX-License-Identifier: Apache-2.0
"""Choice of the model runner: V2 whenever vLLM would choose it without a drafter.

vLLM supports `custom_class` only on V1. In every process that reads the configuration, this module
removes ours from vLLM's list of unsupported features, and gives V2 our speculator.
"""

import sys
from typing import TYPE_CHECKING, Any

from vllm_hetero_spec.engine.compat import patching
from vllm_hetero_spec.engine.compat.releases import model_runner

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

_CUSTOM = "speculative method 'custom_class'"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner"


def install() -> None:
    """Install the choice in this process. Idempotent; inert for other drafters."""
    import vllm.v1.worker.gpu.spec_decode as v2
    from vllm.config import VllmConfig

    patching.wrap(VllmConfig, "_get_v2_model_runner_unsupported_features", "runner", _features)
    patching.wrap(v2, "init_speculator", "speculator", _init_speculator)
    if _RUNNER_V2 in sys.modules:  # it has imported the original function by name
        patching.wrap(sys.modules[_RUNNER_V2], "init_speculator", "speculator", _init_speculator)


def describe(config: "VllmConfig") -> str:
    """Return the model runner of a configuration with our drafter, and the reason."""
    runner, why = model_runner(config._get_v2_model_runner_unsupported_features())
    return f"Model Runner {runner} ({why})"


def _features(original: patching.Function, config: "VllmConfig") -> list[str]:
    unsupported: list[str] = original(config)
    if not hasattr(config.speculative_config, "hetero"):
        return unsupported
    return [feature for feature in unsupported if feature != _CUSTOM] + _unsupported(config)


def _unsupported(config: "VllmConfig") -> list[str]:
    """Return the features that V2 supports, but not with this package."""
    from vllm.utils.platform_utils import is_uva_available

    found = []
    if getattr(config, "watermark_config", None) is not None:
        found.append("watermarking with vllm_hetero_spec")
    if config.parallel_config.enable_batch_sharded_sampling:
        found.append("batch-sharded sampling with vllm_hetero_spec")
    if not is_uva_available():
        found.append("vllm_hetero_spec without pinned host memory")
    return found


def _init_speculator(
    original: patching.Function,
    vllm_config: "VllmConfig",
    device: "torch.device",
    *args: Any,
    **kwargs: Any,
) -> object:
    if not hasattr(vllm_config.speculative_config, "hetero"):
        return original(vllm_config, device, *args, **kwargs)
    from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer

    from vllm_hetero_spec.engine.seam.speculator_v2 import HeteroSpeculator

    return HeteroSpeculator(create_custom_proposer(vllm_config))
