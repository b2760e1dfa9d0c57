# SPDX-License-Identifier: Apache-2.0
"""Libraries that only some benchmarks need."""

import importlib
from typing import Any

from vllm_hetero_spec.errors import ConfigError


def optional(module: str, purpose: str) -> Any:
    """An installed library.

    Raises:
        ConfigError: It is not installed; the message says how to get it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ConfigError(f"{purpose} needs {package}: `pip install {package}`.") from error
