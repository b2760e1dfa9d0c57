# SPDX-License-Identifier: Apache-2.0
"""vLLM's workers load shells where this is their extension, in whatever process they are."""

import _shell

from vllm_hetero_spec.bench.vllm_engine import DeviceMemory

_shell.register()


class ShellWorker(DeviceMemory):
    """Mixed into a worker's class by vLLM."""
