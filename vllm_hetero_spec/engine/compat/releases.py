# SPDX-License-Identifier: Apache-2.0
"""Which vLLM releases are supported, and what differs between them."""

import os
from types import ModuleType

from vllm_hetero_spec.errors import ConfigError

SUPPORTED = ((0, 32), (0, 33))
OVERRIDE = "HETERO_SPEC_ALLOW_VLLM"


def installed() -> tuple[int, int]:
    """The supported series that the installed vLLM is, or is to be treated as.

    Raises:
        ConfigError: The release is not supported and the user did not override the check.
    """
    from vllm.version import __version__ as found

    return series_of(found, os.environ.get(OVERRIDE))


def series_of(found: str, override: str | None = None) -> tuple[int, int]:
    """The supported series of vLLM version `found`, such as "0.32.0+cpu".

    Args:
        found: Version string of a vLLM.
        override: Version or series to take for the nearest older supported one.

    Raises:
        ConfigError: It is neither supported nor overridden.
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
    """The module of vLLM that lays out KV tensors; 0.33 moved its functions as they are."""
    if installed() < (0, 33):
        from vllm.v1.core import kv_cache_utils

        return kv_cache_utils
    from vllm.v1.core import kv_cache_planning  # type: ignore[attr-defined,unused-ignore]

    planning: ModuleType = kv_cache_planning
    return planning
