# SPDX-License-Identifier: Apache-2.0
"""Target tokens of several drafter tokens, as drafting asks for them: of two real tokenizers."""

from collections.abc import Sequence

import numpy as np
import torch

from vllm_hetero_spec.text.merges import Merges
from vllm_hetero_spec.text.tokenizer import TextTokenizer
from vllm_hetero_spec.text.vocabulary import VocabularyMaps


class PairMerges:
    """Target tokens of several drafter tokens of a pair (`draft.slrs.Merging`).

    Args:
        target: Its tokenizer.
        drafter: Its tokenizer.
        maps: Between their vocabularies, ends of text included.
        device: Where the drafter runs.
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
        return self._merges.goes_on(path)

    def among(self, path: Sequence[int], e_ids: np.ndarray) -> np.ndarray:
        return self._merges.among(path, e_ids)

    def spell(self, d: int) -> Sequence[int]:
        return self._maps.target_tokens(d).tolist()

    def rest(self, path: Sequence[int], merged: int) -> Sequence[int]:
        spelled = self._drafter.decode_bytes(path)
        return self._target.encode_bytes(spelled[len(self._target.token_bytes[merged]) :])
