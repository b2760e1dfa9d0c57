# SPDX-License-Identifier: Apache-2.0
"""An engine without a model, run as a child process: its specification selects its behavior."""

import subprocess
import sys
import time
from collections.abc import Callable

from vllm_hetero_spec.bench.child_process import serve
from vllm_hetero_spec.bench.load import Load, Sample, Trace
from vllm_hetero_spec.errors import ConfigError


def build(spec: str) -> Callable[[Load], Sample]:
    if spec == "refuse":
        raise ConfigError("the toy refuses this.")
    if spec == "fail":
        raise RuntimeError("the toy broke")
    if spec == "sleep":
        time.sleep(600)
    if spec == "leave a process":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    return run


def run(load: Load) -> Sample:
    if load.prompts[0] == "refuse":
        raise ConfigError("the toy refuses this load.")
    if load.prompts[0] == "fail":
        raise RuntimeError("the toy broke at work")
    if load.prompts[0] == "sleep":
        time.sleep(600)
    return Sample([Trace([7], p, 0.0, [1.0], [1]) for p in load.prompts], 2.0)


if __name__ == "__main__":
    serve(build)
