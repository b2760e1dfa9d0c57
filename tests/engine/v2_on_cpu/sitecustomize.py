# SPDX-License-Identifier: Apache-2.0
"""Model Runner V2 without a GPU: with this folder on PYTHONPATH and TRITON_INTERPRET=1.

V2 needs Triton, which has no published backend for CPUs. Triton's interpreter runs V2's kernels
slowly; `lanes.py` runs all programs of a launch at once. This file registers a fake backend.
With V2_AHEAD=1, engines with this plugin use asynchronous scheduling, as on a GPU.
"""

import gc
import importlib.abc
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any


class _Loaded(importlib.abc.MetaPathFinder):
    """Import hook that overrides some values of one module when it is loaded."""

    def __init__(self, module: str, **values: Any) -> None:
        self._module, self._values = module, values

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            module.__dict__.update(self._values)

        loader.exec_module = exec_module
        return spec


def _masks_are_bools(store: Any) -> Any:
    """Wrap the interpreter's `store`, which refuses some masks that compiled kernels accept."""

    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, policy: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return store(self, pointers, value, mask, policy)

    return create_masked_store


gc.set_threshold(100_000, 50, 1000)  # as in `any_process`, whose file this one replaces
if os.environ.get("TRITON_INTERPRET") == "1":
    import lanes
    from triton.backends import backends
    from triton.runtime.interpreter import InterpreterBuilder

    store = InterpreterBuilder.create_masked_store
    InterpreterBuilder.create_masked_store = _masks_are_bools(store)
    lanes.install()
    driver = SimpleNamespace(is_active=lambda: True)
    backends["cpu"] = SimpleNamespace(compiler=None, driver=driver)
    # The interpreter cannot run the kernel of top-k and top-p.
    sys.meta_path.insert(0, _Loaded("vllm.v1.sample.ops.topk_topp_sampler", HAS_TRITON=False))
    if os.environ.get("V2_AHEAD") == "1":
        ahead = "vllm_hetero_spec.engine.seam.async_scheduling"
        sys.meta_path.insert(0, _Loaded(ahead, platform_can=lambda: True))
