# SPDX-License-Identifier: Apache-2.0
"""vLLM's rejection sampler, with its time counted.

Drafts of this release are one-hot rows (`draft_probs=None`): a draft token is accepted with its
target probability, otherwise the target's residual is sampled. That is exactly matching a sample of
the target against the draft, lossless for any way of choosing the draft.
"""

import time
from typing import Any

from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.rejection_sampler import RejectionSampler

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

    def forward(self, *args: Any, **kwargs: Any) -> SamplerOutput:
        """See RejectionSampler.forward."""
        began = time.perf_counter()
        output = super().forward(*args, **kwargs)
        self._stats.verify_seconds += time.perf_counter() - began
        return output
