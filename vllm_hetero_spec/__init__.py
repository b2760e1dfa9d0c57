# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding in vLLM with a drafter whose tokenizer differs from the target's."""

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM

__all__ = ["__version__", "read_stats", "register"]
__version__ = "0.2.0"


def register() -> None:
    """Entry point of `vllm.general_plugins`: add our methods to vLLM's `--speculative-config`.

    vLLM calls this in every process, possibly more than once. Engines with other speculative
    configurations do not change, except that `engine.compat.cpu_repair` repairs vLLM's CPU build.
    An exception here does not stop them.
    """
    from vllm_hetero_spec.engine.compat import cpu_repair
    from vllm_hetero_spec.engine.metrics import transport as metrics
    from vllm_hetero_spec.engine.seam import frontend

    for install in (frontend.install, metrics.install, cpu_repair.install):
        try:
            install()
        except Exception as error:
            # Later, our methods are refused, or `metrics.require` warns.
            level = logging.WARNING if install is frontend.install else logging.DEBUG
            logging.getLogger("vllm.hetero_spec").log(
                level, "vllm_hetero_spec cannot be used with this vLLM: %s", error
            )


def read_stats(llm: "LLM") -> dict[str, Any]:
    """Counters of speculation in an engine's workers since their start, summed over the workers.

    Args:
        llm: A `vllm.LLM` (or anything with its `collective_rpc`) running one of our methods.

    Returns:
        The fields of `engine.metrics.counters.DraftStats`. Times are in seconds.
    """
    from vllm_hetero_spec.engine.metrics.counters import RPC, summed

    return summed(llm.collective_rpc(RPC))
