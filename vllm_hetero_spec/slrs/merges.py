# SPDX-License-Identifier: Apache-2.0
"""Merges: pairs of drafter tokens that the target writes as one longer token first.

For example, the drafter writes "New" and "York", and the target has "NewYork". For drafter tokens
d and e, mu(d, e) is the first target token of their joined bytes if it is longer than d. Instead
of d, mu also takes a path of several tokens. The target's vocabulary bounds the candidates, and its
tokenizer decides. Most tokenizers join the last space of a run to the next word, so a word is
appended to joined bytes that end in space.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_hetero_spec.text.cuts import ANY_WORD
from vllm_hetero_spec.text.tokenizer import TextTokenizer
from vllm_hetero_spec.text.vocabulary import Ids, VocabularyMaps, encode_strings

MEMO_PAIRS = 1 << 18  # cached values of mu, about 200 bytes each
MEMO_RANGES = 1 << 14  # cached candidate ranges of paths, a few numbers each


class Merges:
    """Computes mu on demand, and caches it.

    The bytes of mu(d, e) must begin the joined bytes and end inside e or at its end. mu is
    undefined for control tokens, for tokens that the target cannot spell, and for d outside the
    intersection of the vocabularies. In a path, only the first token must be in the intersection.

    Args:
        maps: Maps that include control tokens.
        device: Device of `mergeable`.

    Attributes:
        mergeable: float32 [V_D], 1 if `goes_on` of the single drafter token, otherwise 0.
    """

    def __init__(
        self,
        target: TextTokenizer,
        drafter: TextTokenizer,
        maps: VocabularyMaps,
        device: torch.device | str = "cpu",
    ) -> None:
        self._target, self._drafter, self._maps = target, drafter, maps
        self._target_strings = sorted({data for data in target.token_bytes if data})
        order = [d for d in range(drafter.vocab_size) if self._is_text(d)]
        order.sort(key=drafter.token_bytes.__getitem__)
        self._strings = [drafter.token_bytes[d] for d in order]
        self._place = np.full(drafter.vocab_size, -1, np.int32)  # of each drafter id in _strings
        self._place[order] = np.arange(len(order))
        self._ranges = lru_cache(MEMO_RANGES)(self._find_ranges)
        self._pairs: dict[tuple[bytes, int], int] = {}
        mergeable = np.zeros(drafter.vocab_size, np.float32)
        for d in order:
            mergeable[d] = self.goes_on((d,))
        self.mergeable = torch.from_numpy(mergeable).to(device)

    def goes_on(self, path: Sequence[int]) -> bool:
        """Return True if the bytes of a path are a proper prefix of some target token."""
        data = self._joined(path)
        after = bisect_right(self._target_strings, data)
        longer = self._target_strings[after : after + 1]
        return bool(data) and bool(longer) and longer[0].startswith(data)

    def among(self, path: Sequence[int], drafter_ids: Ids) -> Ids:
        """Return mu(path, e) for each e of `drafter_ids`; -1 if it is undefined."""
        result = np.full(len(drafter_ids), -1, np.int32)
        data = self._joined(path)
        ranges = self._ranges(data)
        places = self._place[drafter_ids]
        index = np.searchsorted(ranges[0], places, "right") - 1
        possible = np.flatnonzero(index >= 0)
        possible = possible[places[possible] < ranges[1][index[possible]]]

        asked = drafter_ids[possible].tolist()
        unknown = [e for e in set(asked) if (data, e) not in self._pairs]
        if len(self._pairs) + len(unknown) > MEMO_PAIRS:
            self._pairs.clear()
            unknown = list(set(asked))
        merged = self._merged(data, np.array(unknown, np.int32))
        self._pairs |= {(data, e): t for e, t in zip(unknown, merged.tolist(), strict=True)}
        result[possible] = [self._pairs[data, e] for e in asked]
        return result

    def spell(self, d: int) -> Sequence[int]:
        """Return the target tokens that spell a drafter token."""
        return self._maps.target_tokens(d).tolist()

    def rest(self, path: Sequence[int], merged: int) -> Sequence[int]:
        """Return the target tokens of a path's bytes after its first target token `merged`."""
        spelled = self._drafter.decode_bytes(path)
        return self._target.encode_bytes(spelled[len(self._target.token_bytes[merged]) :])

    def _joined(self, path: Sequence[int]) -> bytes:
        """Return the bytes of a path; empty if mu is undefined for it."""
        if self._maps.d2t[path[0]] < 0 or any(self._place[d] < 0 for d in path):
            return b""
        return b"".join([self._drafter.token_bytes[d] for d in path])

    def _find_ranges(self, data: bytes) -> NDArray[np.int32]:
        """Return ascending begins and ends of the ranges of `_strings` that may merge, [2, n]."""
        strings = self._target_strings
        ranges = []
        index = bisect_right(strings, data) if data else len(strings)
        while index < len(strings) and strings[index].startswith(data):
            rest = strings[index][len(data) :]
            begin = bisect_left(self._strings, rest)
            end = _end_of_range(self._strings, rest, begin)
            if begin < end:
                ranges.append((begin, end))
            # Target tokens that begin with this one allow no further e.
            index = _end_of_range(strings, strings[index], index)
        return np.array(ranges, np.int32).reshape(-1, 2).T.copy()

    def _merged(self, data: bytes, drafter_ids: Ids) -> Ids:
        joined = [data + self._drafter.token_bytes[e] for e in drafter_ids.tolist()]
        texts = [text + ANY_WORD.encode() if text[-1:].isspace() else text for text in joined]
        merged = np.full(len(joined), -1, np.int32)
        for index, ids in enumerate(encode_strings(self._target, texts)):
            first = self._target.token_bytes[ids[0]] if ids else b""
            # If a normalizer changed the beginning, the token does not have these bytes.
            if len(first) > len(data) and joined[index].startswith(first):
                merged[index] = ids[0]
        return merged

    def _is_text(self, drafter_id: int) -> bool:
        """Return True if the target spells the token's bytes; False if mapped by role, as EOS."""
        data = self._drafter.token_bytes[drafter_id]
        row = self._maps.target_tokens(drafter_id)
        return len(row) > 0 and self._target.decode_bytes(row.tolist()) == data != b""


def _end_of_range(strings: Sequence[bytes], prefix: bytes, begin: int) -> int:
    """Return the end of the range of sorted strings that start with `prefix`, from `begin` on."""
    stem = prefix.rstrip(b"\xff")
    if not stem:
        return len(strings)
    return bisect_left(strings, stem[:-1] + bytes([stem[-1] + 1]), begin)
