# SPDX-License-Identifier: Apache-2.0
"""Exponential races in vLLM: one seed, one output, whatever drafts.

Every random token of every request is the winner of a race that hangs on the request's seed and
the token's place in its output, also in steps without drafts: vLLM's last step of sampling is
replaced, as well as the rule of verification.
"""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_hetero_spec.verify.drafts import DraftBatch, Verdict
from vllm_hetero_spec.verify.noise import Noise
from vllm_hetero_spec.verify.race import race
from vllm_hetero_spec.verify.rules import race_rule

# The sampler may have to return what it drew from; see vLLM's `logprobs_mode`.
_PROCESSED = {
    "processed_logits": lambda logits: logits,
    "processed_logprobs": lambda logits: logits.log_softmax(-1),
}


class RaceSeeds:
    """Seeds of the requests' races.

    Args:
        runner: The model runner, for its requests and its batch.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._seeds: dict[str, int] = {}

    def seed(self, req_id: str) -> int:
        """The seed of a request's races: its own, or one made of the engine's and its id.

        Nothing is drawn: ranks that verify together get the same.
        """
        if req_id not in self._seeds:
            given = self._runner.requests[req_id].sampling_params.seed
            if given is None:
                name = f"{self._runner.model_config.seed} {req_id}".encode()
                made = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 3
            # Odd seeds are given ones, so that made ones never coincide with them.
            self._seeds[req_id] = made << 1 if given is None else given << 1 | 1
        return self._seeds[req_id]

    def keep(self, live: Collection[str]) -> None:
        """Forget the requests that are gone."""
        for req_id in self._seeds.keys() - live:
            del self._seeds[req_id]

    def batch(self, size: int, drafted: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [B] seeds, and places of the next token in each request's output, behind its draft.

        Args:
            size: Of the batch; vLLM profiles with requests that do not exist, which all race alike.
            drafted: Draft tokens of each request; none where empty.
        """
        req_ids = self._runner.input_batch.req_ids
        if not req_ids:
            nothing = torch.zeros(size, dtype=torch.int64, device=self._runner.device)
            return nothing, nothing.clone()
        requests = self._runner.requests
        seeds = [self.seed(req_id) for req_id in req_ids]
        places = [len(requests[req_id].output_token_ids) for req_id in req_ids]
        if drafted:
            places = list(map(sum, zip(places, drafted, strict=True)))
        device = self._runner.device
        return torch.tensor(seeds).to(device), torch.tensor(places).to(device)

    def rule(
        self,
        drafts: DraftBatch,
        target_probs: torch.Tensor,
        bonus: torch.Tensor,
        noise: Noise,
    ) -> Verdict:
        """Accept while the draft is what the target's own race gives (`verify.rules`)."""
        return race_rule(drafts, target_probs, bonus, *self.batch(drafts.size))


class RacingSampler(torch.nn.Module):
    """vLLM's top-k and top-p sampler with races as its randomness.

    Args:
        seeds: Of the requests' races.
        logprobs_mode: vLLM's, of the sampler whose part this is.
    """

    def __init__(self, seeds: RaceSeeds, logprobs_mode: str) -> None:
        super().__init__()
        self._seeds = seeds
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
        seeds, places = self._seeds.batch(len(logits), self._drafted)
        return race(logits.softmax(-1), seeds, places), self._processed(logits)
