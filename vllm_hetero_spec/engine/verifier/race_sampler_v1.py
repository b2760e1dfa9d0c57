# SPDX-License-Identifier: Apache-2.0
"""Exponential races on Model Runner V1: output depends on the seed, not on the drafts.

Every random token is the winner of a race, which depends on the request's seed and the token's
place in its output. This also holds in steps without drafts. vLLM's last step of sampling is
therefore replaced, in addition to the verification rule.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from vllm_hetero_spec.engine.seam.step_view import BatchView
from vllm_hetero_spec.engine.verifier.cpu_rows_v1 import apply_top_k_top_p
from vllm_hetero_spec.staging import Send, on_host
from vllm_hetero_spec.verify.drafts import DraftBatch
from vllm_hetero_spec.verify.race import race

# With these values of vLLM's `logprobs_mode`, the sampler also returns its processed logits.
_PROCESSED = {
    "processed_logits": lambda logits: logits,
    "processed_logprobs": lambda logits: logits.log_softmax(-1),
}


class RaceSamplerV1(torch.nn.Module):
    """vLLM's top-k and top-p sampler with races as its randomness."""

    def __init__(
        self,
        batch: Callable[[], BatchView],
        logprobs_mode: str,
        send: Send = on_host,
    ) -> None:
        super().__init__()
        self._batch, self._send = batch, send
        self._drafts: DraftBatch | None = None
        self._processed = _PROCESSED.get(logprobs_mode, lambda logits: None)

    @contextmanager
    def behind(self, drafts: DraftBatch) -> Iterator[None]:
        """Within this context, sample the token after each request's draft.

        vLLM's sampler does not pass places on, so they are set around its call.
        """
        before, self._drafts = self._drafts, drafts
        try:
            yield
        finally:
            self._drafts = before

    def forward(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sample one token for each request of the batch, after its draft if it has one."""
        logits = apply_top_k_top_p(logits, k, p)
        seeds, places = self._seeds_and_places(len(logits))
        return race(logits.softmax(-1), seeds, places), self._processed(logits)

    def _seeds_and_places(self, size: int) -> list[torch.Tensor]:
        """Return seeds and places, int64 [B] each; zeros for the dummy requests of profiling."""
        if self._drafts is not None:
            return [self._drafts.seeds, self._drafts.places + self._drafts.counts]
        view = self._batch()
        seeds, places = view.noise_seeds or [0] * size, view.num_output_tokens or [0] * size
        return self._send(np.array(seeds, np.int64), np.array(places, np.int64))
