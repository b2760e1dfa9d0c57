# SPDX-License-Identifier: Apache-2.0
"""Load a model's weights, and refuse parameters that no tensor filled.

vLLM's own check skips layers with a quantization method if the model is not quantized, so a missing
`lm_head.weight` stays uninitialized memory. A check of names also misses a fused parameter that
lacks one of its parts. Therefore this module counts the written elements.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader import get_model_loader

from vllm_hetero_spec.errors import ConfigError

_NAMED = 8  # parameter names; limit of an error message
_FROM_CONFIG = {"g_idx", "input_scale_ub"}  # quantized layers compute these from their config


def load_filled(config: VllmConfig) -> torch.nn.Module:
    """Load the model of `config`, in any format that vLLM reads.

    Loaders that do not call the model's `load_weights` are not checked, such as those of dummy
    weights or sharded states.

    Raises:
        ConfigError: No tensor fills a parameter, or a part of a fused one.
    """
    loader = get_model_loader(config.load_config)
    read = loader.load_weights

    def load_weights(model: torch.nn.Module, model_config: ModelConfig) -> None:
        model.load_weights = _checked(model, model_config.model)
        try:
            read(model, model_config)
        finally:
            del model.load_weights

    loader.load_weights = load_weights
    return loader.load_model(vllm_config=config, model_config=config.model_config)


def _checked(model: torch.nn.Module, name: str) -> Callable[..., Any]:
    """Return the model's `load_weights`, followed by the check."""
    original: Any = model.load_weights
    before = {path: _storage(param) for path, _, param in _parameters(model)}

    def load_weights(*args: Any, **kwargs: Any) -> Any:
        with _Writes() as writes:
            loaded = original(*args, **kwargs)
        blank = []
        for path, module, param in _parameters(model):
            if before.get(path) != _storage(param):  # replaced by a filled parameter
                continue
            found = writes.counts[_storage(param)]
            if not found:
                blank.append(path)
            elif found < param.numel() and isinstance(module, LinearBase):
                blank.append(f"a part of {path}")
        if blank:
            more = f" and {len(blank) - _NAMED} others" if len(blank) > _NAMED else ""
            raise ConfigError(
                f"the drafter {name!r} cannot be loaded: its files have no tensor for "
                f"{', '.join(blank[:_NAMED])}{more}; get all of its files, or correct its "
                "config.json (tie_word_embeddings, if lm_head.weight alone is missing)."
            )
        return loaded

    return load_weights


def _parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, torch.Tensor]]:
    """Yield path, module and data of each parameter that only a tensor can fill."""
    for path, module in model.named_modules():
        if isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod):
            continue  # scales of the KV cache have defaults
        for name, param in module.named_parameters(recurse=False):
            # Subclasses of `Tensor` keep their elements in other tensors.
            if name not in _FROM_CONFIG and param.numel() and type(param.data) is torch.Tensor:
                yield f"{path}.{name}".lstrip("."), module, param


def _storage(tensor: torch.Tensor) -> int:
    """Return an identity of the tensor's memory, valid while a tensor uses it; also on meta."""
    return tensor.untyped_storage()._cdata


class _Writes(TorchDispatchMode):
    """Counts by storage the elements that operations write inside this context."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[int] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):
            self.counts[_storage(args[0])] += args[0].numel()
        return func(*args, **kwargs or {})
