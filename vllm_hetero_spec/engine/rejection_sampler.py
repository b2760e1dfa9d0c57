# SPDX-License-Identifier: Apache-2.0
"""vLLM's rejection sampler, with its time counted.

Drafts of this release are one-hot rows (`draft_probs=None`): a draft token is accepted with its
target probability, otherwise the target's residual is sampled. That is exactly matching a sample of
the target against the draft, lossless for any way of choosing the draft.

vLLM calls it in every step. Where no request has a draft, as in prefill, the stock one works on
empty tensors, on which top-k fails on CPU (`max(): Expected reduction dim to be specified`) and
ends the engine; such a step is the plain sampler's.
"""

import time
from typing import Any

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_hetero_spec.engine.stats import DraftStats


class HeteroRejectionSampler(RejectionSampler):
    """The stock sampler of the running vLLM, timed.

    Args:
        stats: Where `verify_seconds` is counted.
        args: What RejectionSampler takes.
    """

    def __init__(self, stats: DraftStats, *args: Any) -> None:
        super().__init__(*args)
        self._stats = stats

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """See RejectionSampler.forward."""
        if not metadata.max_spec_len:
            rows = logits[metadata.bonus_logits_indices]
            return self.sampler(logits=rows, sampling_metadata=sampling_metadata)
        began = time.perf_counter()
        output = super().forward(metadata, draft_probs, logits, sampling_metadata)
        self._stats.verify_seconds += time.perf_counter() - began
        return output
