# SPDX-License-Identifier: Apache-2.0
"""Target tokens of several drafter tokens, as drafting asks for them: of two real tokenizers."""

from collections.abc import Sequence

import numpy as np
import torch

from vllm_hetero_spec.text.merges import Merges
from vllm_hetero_spec.text.tokenizer import TextTokenizer
from vllm_hetero_spec.text.vocabulary import VocabularyMaps


class PairMerges:
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
        self._target, self._drafter, self._maps = target, drafter, maps
        self._merges = Merges(target, drafter, maps)
        self.mergeable = torch.from_numpy(self._merges.mergeable().astype(np.float32)).to(device)

    def goes_on(self, path: Sequence[int]) -> bool:
        """Whether some target token spells the tokens of a path and goes on."""
        return self._merges.goes_on(path)

    def among(self, path: Sequence[int], e_ids: np.ndarray) -> np.ndarray:
        """For each e the target token that it ends or holds the end of, -1 where there is none.

        It begins where the path does and is longer than the path.
        """
        return self._merges.among(path, e_ids)

    def spell(self, d: int) -> Sequence[int]:
        """Target tokens of a drafter token."""
        return self._maps.target_tokens(d).tolist()

    def rest(self, path: Sequence[int], merged: int) -> Sequence[int]:
        """Target tokens of what a path spells behind the merged token that begins it."""
        spelled = self._drafter.decode_bytes(path)
        return self._target.encode_bytes(spelled[len(self._target.token_bytes[merged]) :])
