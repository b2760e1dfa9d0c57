# SPDX-License-Identifier: Apache-2.0
"""Exponential races in vLLM: one seed, one output, whatever drafts.

Every random token of every request is the winner of a race that hangs on the request's seed and
the token's place in its output, also in steps without drafts: vLLM's last step of sampling is
replaced, as well as the rule of verification.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from vllm_hetero_spec.engine.seam.step_view import BatchView
from vllm_hetero_spec.engine.verifier.top_k_top_p_v1 import apply_top_k_top_p
from vllm_hetero_spec.staging import Send, on_host
from vllm_hetero_spec.verify.drafts import DraftBatch
from vllm_hetero_spec.verify.race import race

# The sampler may have to return what it drew from; see vLLM's `logprobs_mode`.
_PROCESSED = {
    "processed_logits": lambda logits: logits,
    "processed_logprobs": lambda logits: logits.log_softmax(-1),
}


class RaceSamplerV1(torch.nn.Module):
    """vLLM's top-k and top-p sampler with races as its randomness.

    Args:
        batch: Gives the batch that tokens are being chosen for.
        logprobs_mode: vLLM's, of the sampler whose part this is.
        send: Brings arrays to the device (`staging.Sender`).
    """

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
        """While entered, tokens are drawn behind the requests' drafts.

        vLLM's sampler hands on logits and sampling parameters alone, so that where its tokens are
        to stand has to be said around the call.
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
        """One token for each request of the batch, behind its draft if it has one."""
        logits = apply_top_k_top_p(logits, k, p)
        seeds, places = self._seeds_and_places(len(logits))
        return race(logits.softmax(-1), seeds, places), self._processed(logits)

    def _seeds_and_places(self, size: int) -> list[torch.Tensor]:
        """int64 [B] each. vLLM profiles with requests that do not exist, which all race alike."""
        if self._drafts is not None:
            return [self._drafts.seeds, self._drafts.places + self._drafts.counts]
        view = self._batch()
        seeds, places = view.noise_seeds or [0] * size, view.num_output_tokens or [0] * size
        return self._send(np.array(seeds, np.int64), np.array(places, np.int64))
