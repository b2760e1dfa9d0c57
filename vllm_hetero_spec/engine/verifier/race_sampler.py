# SPDX-License-Identifier: Apache-2.0
"""Exponential races in vLLM: one seed, one output, whatever drafts.

Every random token of every request is the winner of a race that hangs on the request's seed and
the token's place in its output, also in steps without drafts: vLLM's last step of sampling is
replaced, as well as the rule of verification.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_hetero_spec.engine.seam.step_view import BatchView
from vllm_hetero_spec.verify.drafts import DraftBatch, Verdict
from vllm_hetero_spec.verify.noise import Noise
from vllm_hetero_spec.verify.race import race
from vllm_hetero_spec.verify.rules import race_rule

# The sampler may have to return what it drew from; see vLLM's `logprobs_mode`.
_PROCESSED = {
    "processed_logits": lambda logits: logits,
    "processed_logprobs": lambda logits: logits.log_softmax(-1),
}


class Races:
    """The races of the batch that tokens are being chosen for.

    Args:
        batch: Gives that batch.
        device: Where the target runs.
    """

    def __init__(self, batch: Callable[[], BatchView], device: torch.device) -> None:
        self._batch, self._device = batch, device

    def seeds_and_places(
        self, size: int, drafted: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [B] seeds, and places of the next token in each request's output, behind its draft.

        Args:
            size: Of the batch; vLLM profiles with requests that do not exist, which all race alike.
            drafted: Draft tokens of each request; none where empty.
        """
        batch = self._batch()
        if not batch.req_ids:
            nothing = torch.zeros(size, dtype=torch.int64, device=self._device)
            return nothing, nothing.clone()
        places = batch.num_output_tokens
        if drafted:
            places = list(map(sum, zip(places, drafted, strict=True)))
        seeds = torch.tensor(batch.race_seeds).to(self._device)
        return seeds, torch.tensor(places).to(self._device)

    def rule(
        self,
        drafts: DraftBatch,
        target_probs: torch.Tensor,
        bonus: torch.Tensor,
        noise: Noise,
    ) -> Verdict:
        """Accept while the draft is what the target's own race gives (`verify.rules`)."""
        return race_rule(drafts, target_probs, bonus, *self.seeds_and_places(drafts.size))


class RacingSampler(torch.nn.Module):
    """vLLM's top-k and top-p sampler with races as its randomness.

    Args:
        races: Of the batch.
        logprobs_mode: vLLM's, of the sampler whose part this is.
    """

    def __init__(self, races: Races, logprobs_mode: str) -> None:
        super().__init__()
        self._races = races
        self._drafted: Sequence[int] = ()
        self._processed = _PROCESSED.get(logprobs_mode, lambda logits: None)

    @contextmanager
    def behind(self, drafted: Sequence[int]) -> Iterator[None]:
        """While entered, tokens are drawn behind so many draft tokens of each request.

        vLLM's sampler hands on logits and sampling parameters alone, so that where its tokens are
        to stand has to be said around the call.
        """
        before, self._drafted = self._drafted, drafted
        try:
            yield
        finally:
            self._drafted = before

    def forward(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One token for each request of the batch, behind its draft if it has one."""
        logits = apply_top_k_top_p(logits, k, p)
        seeds, places = self._races.seeds_and_places(len(logits), self._drafted)
        return race(logits.softmax(-1), seeds, places), self._processed(logits)
