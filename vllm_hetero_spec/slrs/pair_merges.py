# SPDX-License-Identifier: Apache-2.0
"""Target tokens of several drafter tokens, as drafting asks for them: of two real tokenizers."""

from collections.abc import Sequence

import numpy as np
import torch

from vllm_hetero_spec.slrs.merges import Merges
from vllm_hetero_spec.text.tokenizer import TextTokenizer
from vllm_hetero_spec.text.vocabulary import VocabularyMaps


class PairMerges(Merges):
    """Target tokens of several drafter tokens of a pair.

    Args:
        target: Its tokenizer.
        drafter: Its tokenizer.
        maps: Between their vocabularies, ends of text included.
        device: Where the drafter runs.

    Attributes:
        mergeable: float32 [V_D], 1 where `goes_on` of a single drafter token, else 0.
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
        """Target tokens of a drafter token."""
        return self._maps.target_tokens(d).tolist()

    def rest(self, path: Sequence[int], merged: int) -> Sequence[int]:
        """Target tokens of what a path spells behind the merged token that begins it."""
        spelled = self._drafter.decode_bytes(path)
        return self._target.encode_bytes(spelled[len(self._target.token_bytes[merged]) :])
