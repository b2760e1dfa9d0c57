# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding in vLLM with a drafter whose tokenizer differs from the target's."""

import logging

__version__ = "0.1.0"


def register() -> None:
    """Entry point of `vllm.general_plugins`: teach vLLM's front end our `--speculative-config`.

    vLLM calls this in every process, possibly more than once. Nothing changes for an engine whose
    speculative configuration does not ask for one of our methods, but for the faults of vLLM's CPU
    build that `engine.compat.cpu_repair` mends. Nothing that fails here fails that engine.
    """
    from vllm_hetero_spec.engine.compat import cpu_repair
    from vllm_hetero_spec.engine.metrics import transport as metrics
    from vllm_hetero_spec.engine.seam import frontend

    for install in (frontend.install, metrics.install, cpu_repair.install):
        try:
            install()
        except Exception as error:
            # Those who ask for us are told by a refusal, or by `metrics.require`.
            level = logging.WARNING if install is frontend.install else logging.DEBUG
            logging.getLogger("vllm.hetero_spec").log(
                level, "vllm_hetero_spec cannot be used with this vLLM: %s", error
            )
