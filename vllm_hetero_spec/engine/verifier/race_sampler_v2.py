# SPDX-License-Identifier: Apache-2.0
"""Exponential races on Model Runner V2, with the same output for a seed as on V1.

vLLM's sampler uses its own noise, also in steps without drafts. Races replace it. Seeds and places
are on the device already.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_hetero_spec.fast_argmax import fast_argmax
from vllm_hetero_spec.verify.noise import slices
from vllm_hetero_spec.verify.race import race

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.sample.states import SamplingStates


class RaceSamplerV2:
    """Replacement for `Sampler._sample_random`.

    `places` returns the index in the request's output, int64 [n], of the token after each position.
    Its arguments are int64 [n] requests and int64 [n] positions.
    """

    def __init__(
        self,
        states: "SamplingStates",
        places: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        self._states, self._places = states, places

    def __call__(
        self,
        logits: torch.Tensor,
        requests: torch.Tensor,
        requests_np: np.ndarray,
        positions: torch.Tensor,
        *_: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a token for each row of logits [n, V], and the logits after top-k and top-p.

        vLLM's other arguments select its implementation of these, and differ between releases.
        """
        logits = self._states.apply_top_k_top_p(logits, requests, requests_np)
        return self.winners(logits, requests, positions), logits

    def winners(
        self, logits: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return int64 [n], the token of each row of logits; the likeliest one at temperature 0.

        Args:
            logits: float [n, V], after all sampling parameters.
            requests: int64 [n], index of each row's request in the sampler's states.
            positions: int64 [n], position of the previous token.
        """
        seeds, places = self._states.seeds.gpu[requests], self._places(requests, positions)
        winners = torch.empty_like(seeds)
        for part in slices(*logits.shape):
            probs = logits[part].softmax(-1, dtype=torch.float32)
            winners[part] = race(probs, seeds[part], places[part])
        is_greedy = self._states.temperature.gpu[requests] == 0
        return torch.where(is_greedy, fast_argmax(logits), winners)
