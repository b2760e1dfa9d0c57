# SPDX-License-Identifier: Apache-2.0
"""The Ray cluster that this process uses."""

import os
import re
import socket
from typing import Any

from vllm_hetero_spec.errors import ConfigError, first_line


def join_cluster() -> Any:
    """Ray, connected to the cluster that RAY_ADDRESS names, or that runs on this machine.

    Raises:
        ConfigError: Ray is not installed, or no cluster is there.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "Ray is not installed here; pip install 'vllm-hetero-spec[ray]' on every node."
        ) from error
    try:
        head = re.fullmatch(r"([^/]+):(\d+)", os.environ.get("RAY_ADDRESS", ""))
        if head:  # Ray itself goes on trying for many minutes
            socket.create_connection((head[1], int(head[2])), timeout=10).close()
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster was found ({first_line(error)}); run this on one of its nodes, or "
            "let RAY_ADDRESS name its head, as host:port."
        ) from error
    return ray
