# SPDX-License-Identifier: Apache-2.0
"""Hooks in vLLM's model runner, installed by the proposer in the worker that needs them.

vLLM's `custom_class` calls `propose` without request ids. The hook on `propose_draft_token_ids`
hands our proposer the runner and the scheduler's output instead.
"""

from collections.abc import Iterator
from typing import Any

from vllm_hetero_spec.engine.compat import patching


def install() -> None:
    """Hook every model runner class of this process. Idempotent; inert for other drafters."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    for runner_class in _family(GPUModelRunner):
        if "load_model" in vars(runner_class):
            patching.replace(runner_class, "load_model", "bind drafter", _wrap_load)
    patching.replace(GPUModelRunner, "propose_draft_token_ids", "propose", _wrap_propose)


def _family(base: Any) -> Iterator[Any]:
    yield base
    for derived in base.__subclasses__():
        yield from _family(derived)


def _wrap_load(original: Any) -> Any:
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        if drafter := _ours(self):
            drafter.bind(self)
        return original(self, *args, **kwargs)

    return load_model


def _wrap_propose(original: Any) -> Any:
    def propose_draft_token_ids(
        self: Any, scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        drafter = _ours(self)
        if drafter is None:
            return original(self, scheduler_output, sampled_token_ids, *args, **kwargs)
        self._draft_probs = None
        self._draft_prob_req_ids = None
        return drafter.propose_batch(scheduler_output, sampled_token_ids)

    return propose_draft_token_ids


def _ours(runner: Any) -> Any | None:
    from vllm_hetero_spec.engine.proposer import HeteroProposer

    drafter = getattr(runner, "drafter", None)
    return drafter if isinstance(drafter, HeteroProposer) else None
