# SPDX-License-Identifier: Apache-2.0
"""The repair of CPU sampling for vLLM's own speculative methods, on request.

Our proposer repairs the process that it is built in. Where vLLM's own methods are measured beside
ours there is none, so the environment asks for the repair and every process looks there.
"""

import os
from typing import Any

from vllm_hetero_spec.engine.compat import cpu_expand, patching

VARIABLE = "HETERO_SPEC_REPAIR_CPU_SAMPLING"


def install() -> None:
    """Hook the rejection sampler in this process where `VARIABLE` is "1". Idempotent."""
    if os.environ.get(VARIABLE) != "1":
        return
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    patching.replace(RejectionSampler, "__init__", "cpu sampling", _repair_first)


def _repair_first(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # Not before a sampler is built: until then vLLM has no CPU kernels that could be tested.
        cpu_expand.repair()
        original(self, *args, **kwargs)

    return __init__
