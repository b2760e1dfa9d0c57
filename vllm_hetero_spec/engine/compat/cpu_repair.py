# SPDX-License-Identifier: Apache-2.0
"""Repairs of vLLM's CPU build, in every worker in which our plugin is loaded.

These faults also occur without our drafter. Each is repaired only if a small test finds it.

* Without Triton, a C++ kernel for int64 tensors expands sampling parameters to draft rows.
  Temperature, top-p and top-k have other types. The kernel writes them to a converted copy, which
  is lost, and vLLM's own speculation samples with uninitialized parameters.
* If a request with a seed samples before its prompt is complete, as in chunked prefill, vLLM undoes
  the draw by its generator's offset. CPU generators have none, and a RuntimeError ends the engine.
* A row without a LoRA adapter has index -1. In 0.32, this selects the last adapter, so a request
  without an adapter gets another request's weights.
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
    """Repair every worker of this process before it is built. Idempotent."""
    from vllm.v1.worker.worker_base import WorkerBase

    patching.wrap(WorkerBase, "__init__", "cpu repair", _repair_first)


def _repair_first(
    original: patching.Function, self: "WorkerBase", *args: object, **kwargs: object
) -> None:
    # Not earlier, because the CPU kernels to test are loaded when a worker is built.
    try:
        repair()
    except Exception as error:  # a failed repair must not stop an engine that may not need it
        logger.warning("vLLM's CPU sampling could not be repaired: %s", error)
    original(self, *args, **kwargs)


def repair() -> None:
    """Make the repairs that this process needs; none on other platforms."""
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
    if not has_offset(torch.Generator()) and patching.wrap(
        GPUModelRunner, "_sample", "cpu repair", _undoing
    ):
        patching.wrap(GPUModelRunner, "_bookkeeping_sync", "cpu repair", _without_offsets)
        logger.info("Repaired seeded requests with chunked prefill on CPUs.")
    if not leaves_base_rows(lora_ops.bgmv_expand):
        for module in (lora_ops, punica_cpu):  # punica_cpu has imported them by name
            for name in ("bgmv_expand", "bgmv_expand_slice", "bgmv_shrink"):
                patching.wrap(module, name, "cpu repair", without_base_rows)
        logger.info("Repaired batches of requests with and without LoRA adapters on CPUs.")


def expands(function: patching.Function) -> bool:
    """Return True if `function` expands float parameters as documented."""
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
    """Expand [B] values to [num_tokens] rows; `cu_num_tokens[b]` is the end of request b's rows."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    rows = torch.repeat_interleave(x, counts.long(), output_size=num_tokens)
    return rows.masked_fill(rows == replace_from, replace_to)


def has_offset(generator: torch.Generator) -> bool:
    """Return True if vLLM can undo a draw of this generator by its offset."""
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


def without_base_rows(
    original: patching.Function,
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    indices: torch.Tensor,
    *args: object,
    **kwargs: object,
) -> None:
    """Run a LoRA operation whose input is zero in rows without an adapter."""
    inputs = inputs.masked_fill((indices < 0).unsqueeze(1), 0)
    original(inputs, weights, output, indices, *args, **kwargs)


def _undoing(
    original: patching.Function, self: "GPUModelRunner", *args: object, **kwargs: object
) -> "SamplerOutput":
    undone = _discarded(self).values()
    states = [generator.get_state() for generator in undone]
    output = original(self, *args, **kwargs)
    for generator, state in zip(undone, states, strict=True):
        generator.set_state(state)
    return output


def _without_offsets(
    original: patching.Function, self: "GPUModelRunner", *args: object, **kwargs: object
) -> tuple:
    undone = _discarded(self)  # `_undoing` has restored their states already
    generators = self.input_batch.generators
    for index in undone:
        del generators[index]
    try:
        return original(self, *args, **kwargs)
    finally:
        generators.update(undone)


def _discarded(runner: "GPUModelRunner") -> dict[int, torch.Generator]:
    """Return generators by batch index, of requests whose sample of this step is discarded."""
    batch = runner.input_batch
    mask = runner.discard_request_mask.np[: batch.num_reqs]
    return {i: generator for i, generator in batch.generators.items() if mask[i]}
