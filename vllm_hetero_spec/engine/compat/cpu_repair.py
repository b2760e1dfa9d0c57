# SPDX-License-Identifier: Apache-2.0
"""Repairs of vLLM's CPU build, in every worker where our plugin is loaded.

vLLM has faults on CPUs that need no drafter of ours. Each is repaired only where a small test finds
it, and nothing is touched on other platforms.

* Without Triton, a C++ kernel that takes int64 tensors expands sampling parameters to draft rows.
  Float temperatures, top-p and top-k are written to a converted copy and lost: vLLM's own
  speculation samples at temperatures that are uninitialised memory.
* A request with a seed that samples before its prompt is read, as every chunk of a prompt does,
  has that draw undone by setting its generator's offset back. CPU generators have none: the
  RuntimeError ends the engine.
* The index of a row without LoRA adapter is -1, which the operations of 0.32 take for the last
  adapter: a request without one gets its weights if another request of the batch has an adapter.
"""

import logging
from typing import TYPE_CHECKING

import torch

from vllm_hetero_spec.engine.compat import patching

if TYPE_CHECKING:
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerBase

logger = logging.getLogger("vllm.hetero_spec")


def install() -> None:
    """Let every worker of this process repair it before it is built. Idempotent."""
    from vllm.v1.worker.worker_base import WorkerBase

    patching.replace(WorkerBase, "__init__", "cpu repair", _repair_first)


def _repair_first(original: patching.Function) -> patching.Function:
    def __init__(self: "WorkerBase", *args: object, **kwargs: object) -> None:
        # Not earlier: until a worker is built, vLLM has no CPU kernels that could be tested.
        try:
            repair()
        except Exception as error:  # engines that need no repair must not fail for it
            logger.warning("vLLM's CPU sampling could not be repaired: %s", error)
        original(self, *args, **kwargs)

    return __init__


def repair() -> None:
    """Make the repairs that this process needs; none where the platform is not CPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not expands(rejection_sampler.expand_batch_to_tokens) and patching.replace(
        rejection_sampler, "expand_batch_to_tokens", "cpu repair", lambda _: expand
    ):
        logger.info("Repaired vLLM's CPU expansion of sampling parameters to draft rows.")
    if not has_offset(torch.Generator()) and patching.replace(
        GPUModelRunner, "_sample", "cpu repair", _undoing
    ):
        patching.replace(GPUModelRunner, "_bookkeeping_sync", "cpu repair", _without_offsets)
        logger.info("Repaired seeded requests with chunked prefill on CPUs.")
    if not leaves_base_rows(lora_ops.bgmv_expand):
        for module in (lora_ops, punica_cpu):  # which imports them by name
            for name in ("bgmv_expand", "bgmv_expand_slice", "bgmv_shrink"):
                patching.replace(module, name, "cpu repair", without_base_rows)
        logger.info("Repaired batches of requests with and without LoRA adapters on CPUs.")


def expands(function: patching.Function) -> bool:
    """Whether `function` expands float parameters as documented."""
    per_request = torch.tensor([0.5, 0.0, 2.0])
    ends = torch.tensor([2, 2, 3], dtype=torch.int32)
    found = function(per_request, ends, 3, 0, 1)
    return torch.equal(found, torch.tensor([0.5, 0.5, 2.0]))


def expand(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """[B] values to [num_tokens] rows, `cu_num_tokens[b]` being the end of request b's rows."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    rows = torch.repeat_interleave(x, counts.long(), output_size=num_tokens)
    if replace_from != replace_to:
        rows = torch.where(rows == replace_from, torch.full_like(rows, replace_to), rows)
    return rows


def has_offset(generator: torch.Generator) -> bool:
    """Whether vLLM can undo a draw of this generator as it means to."""
    try:
        generator.set_offset(generator.get_offset())
    except RuntimeError:
        return False
    return True


def leaves_base_rows(function: patching.Function) -> bool:
    """Return True if a `bgmv_expand` adds nothing to a row without adapter."""
    output = torch.zeros(1, 1)
    function(torch.ones(1, 1), torch.ones(1, 1, 1), output, torch.tensor([-1]))
    return not output.any()


def without_base_rows(original: patching.Function) -> patching.Function:
    """Let a LoRA operation multiply zeros in rows without adapter."""

    def bgmv(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        indices: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> None:
        inputs = inputs.masked_fill((indices < 0).unsqueeze(1), 0)
        original(inputs, weights, output, indices, *args, **kwargs)

    return bgmv


def _undoing(original: patching.Function) -> patching.Function:
    def _sample(self: "GPUModelRunner", *args: object, **kwargs: object) -> "SamplerOutput":
        undone = _discarded(self).values()
        states = [generator.get_state() for generator in undone]
        output = original(self, *args, **kwargs)
        for generator, state in zip(undone, states, strict=True):
            generator.set_state(state)
        return output

    return _sample


def _without_offsets(original: patching.Function) -> patching.Function:
    def _bookkeeping_sync(self: "GPUModelRunner", *args: object, **kwargs: object) -> tuple:
        undone = _discarded(self)  # by `_sample` above: nothing is left to be set back
        generators = self.input_batch.generators
        for index in undone:
            del generators[index]
        try:
            return original(self, *args, **kwargs)
        finally:
            generators.update(undone)

    return _bookkeeping_sync


def _discarded(runner: "GPUModelRunner") -> dict[int, torch.Generator]:
    """By batch index, the generators of requests whose sample of this step is discarded."""
    batch = runner.input_batch
    mask = runner.discard_request_mask.np[: batch.num_reqs]
    return {i: generator for i, generator in batch.generators.items() if mask[i]}
