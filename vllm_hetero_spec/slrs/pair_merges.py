# SPDX-License-Identifier: Apache-2.0
"""Merges of a pair of tokenizers, in the form that drafting needs."""

from collections.abc import Sequence

import numpy as np
import torch

from vllm_hetero_spec.slrs.merges import Merges
from vllm_hetero_spec.text.tokenizer import TextTokenizer
from vllm_hetero_spec.text.vocabulary import VocabularyMaps


class PairMerges(Merges):
    """Merges and spellings of a pair of tokenizers.

    Attributes:
        mergeable: float32 [V_D], 1 if `goes_on` of the single drafter token, otherwise 0.
    """

    def __init__(
        self,
        target: TextTokenizer,
        drafter: TextTokenizer,
        maps: VocabularyMaps,
        device: torch.device,
    ) -> None:
        super().__init__(target, drafter, maps)
        self.mergeable = torch.from_numpy(self.find_mergeable().astype(np.float32)).to(device)

    def spell(self, d: int) -> Sequence[int]:
        """Return the target tokens that spell a drafter token."""
        return self._maps.target_tokens(d).tolist()

    def rest(self, path: Sequence[int], merged: int) -> Sequence[int]:
        """Return the target tokens of a path's bytes after its first target token `merged`."""
        spelled = self._drafter.decode_bytes(path)
        return self._target.encode_bytes(spelled[len(self._target.token_bytes[merged]) :])
