# SPDX-License-Identifier: Apache-2.0
"""Choice of vLLM's model runner for an engine, with its reason."""

from collections.abc import Sequence


def choice(unsupported: Sequence[str] = ()) -> tuple[str, str]:
    """Return ("V1" or "V2", reason), as vLLM chooses; V2 lacks the `unsupported` features."""
    import vllm.envs as envs
    from vllm.triton_utils.importing import HAS_TRITON

    asked = envs.VLLM_USE_V2_MODEL_RUNNER
    if asked is not None:
        return ("V2" if asked else "V1"), f"VLLM_USE_V2_MODEL_RUNNER={asked:d}"
    if not HAS_TRITON:
        return "V1", "V2 needs Triton, which has no backend here"
    if unsupported:
        return "V1", f"V2 does not support {', '.join(unsupported)}"
    return "V2", "vLLM's default"
