# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding in vLLM with a drafter whose tokenizer differs from the target's."""

import contextlib

__version__ = "0.1.0"


def register() -> None:
    """Entry point of `vllm.general_plugins`: teach vLLM's front end our `--speculative-config`.

    vLLM calls this in every process, possibly more than once. Nothing changes for an engine whose
    speculative configuration does not ask for one of our methods.
    """
    from vllm_hetero_spec.engine.compat import cpu_sampling
    from vllm_hetero_spec.engine.metrics import transport as metrics
    from vllm_hetero_spec.engine.seam import frontend

    frontend.install()
    with contextlib.suppress(Exception):  # said, by `metrics.require`, to those who ask for us
        metrics.install()
    cpu_sampling.install()
