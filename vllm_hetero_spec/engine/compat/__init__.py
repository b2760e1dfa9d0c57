# SPDX-License-Identifier: Apache-2.0
"""One module per supported vLLM release; `release()` is the one of the installed vLLM."""

import importlib
import os
from collections.abc import Sequence
from typing import Any, Protocol

from vllm_hetero_spec.config import ConfigError

SUPPORTED = {(0, 32): "v0_32", (0, 33): "v0_33"}
OVERRIDE = "HETERO_SPEC_ALLOW_VLLM"


class Release(Protocol):
    """What differs between vLLM releases, as each module of this folder provides it."""

    @staticmethod
    def plan_kv_cache(vllm_config: Any, kv_cache_spec: dict[str, Any], memory: int) -> Any:
        """The KVCacheConfig for one worker whose layers may use `memory` bytes."""


def release() -> Release:
    """The module for the installed vLLM.

    Raises:
        ConfigError: The release is not supported and the user did not override the check.
    """
    from vllm.version import __version__ as found

    return importlib.import_module(f"{__name__}.{module_for(found)}")  # type: ignore[return-value]


def module_for(found: str, override: str | None = None) -> str:
    """The module name for vLLM version `found`, such as "0.32.0+cpu".

    Args:
        found: Version string of the installed vLLM.
        override: Version to allow in spite of the check; read from the environment where None.
    """
    override = os.environ.get(OVERRIDE) if override is None else override
    series = _series(found)
    if series in SUPPORTED:
        return SUPPORTED[series]
    if override and override in (found, ".".join(map(str, series))):
        return SUPPORTED[max((s for s in SUPPORTED if s <= series), default=min(SUPPORTED))]
    supported = " and ".join(f"{major}.{minor}" for major, minor in sorted(SUPPORTED))
    raise ConfigError(
        f"vllm_hetero_spec supports vLLM {supported}, found {found}; install a supported release, "
        f"or set {OVERRIDE}={found} to try this one at your own risk."
    )


def _series(version: str) -> tuple[int, int]:
    parts: Sequence[str] = version.split("+")[0].split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        return (0, 0)
