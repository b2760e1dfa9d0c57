# SPDX-License-Identifier: Apache-2.0
"""Maps from drafter ids to target ids, as arrays for whole rows of logits or probabilities.

`d2t` is the target id with the same bytes. `kappa` are the target ids that spell a drafter id. On
the intersection of the vocabularies both are the same, even if the target's encoder would split the
bytes: a part of a character, or a token that its normalizer makes unreachable. A row mapped by
kappa therefore covers at least the tokens of a row restricted to the intersection. The output stays
correct, because a token that the target never writes is never accepted.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vllm_hetero_spec.paths import cache_folder
from vllm_hetero_spec.text.special_tokens import SpecialTokens
from vllm_hetero_spec.text.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

Ids = NDArray[np.int32]

FORMAT = 1  # version of the maps' content and file format, part of the cache key
BATCH = 4096  # strings encoded at a time: enough for all threads, with little memory


@dataclass(frozen=True, eq=False)
class VocabularyMaps:
    """Maps from drafter ids to target ids. Control tokens are absent until `with_control`.

    Attributes:
        d2t: [V_D] target id with the same bytes, -1 outside the intersection.
        kappa_ptr: [V_D + 1] start of each drafter id's target ids in `kappa_ids`, if it has any.
        kappa_ids: [n] target ids.
        target_size: Number of ids of the target's tokenizer, without padding rows of the model.
    """

    d2t: Ids
    kappa_ptr: Ids
    kappa_ids: Ids
    target_size: int

    @property
    def drafter_size(self) -> int:
        return len(self.d2t)

    @cached_property
    def kappa_first(self) -> Ids:
        """[V_D] first target id of each drafter token, or -1."""
        first = np.full(self.drafter_size, -1, np.int32)
        spelled = self.kappa_ptr[1:] > self.kappa_ptr[:-1]
        first[spelled] = self.kappa_ids[self.kappa_ptr[:-1][spelled]]
        return first

    def target_tokens(self, drafter_id: int) -> Ids:
        """Return [k] target ids that spell a drafter token."""
        return self.kappa_ids[self.kappa_ptr[drafter_id] : self.kappa_ptr[drafter_id + 1]]

    def with_control(self, special: SpecialTokens) -> "VocabularyMaps":
        """Return these maps with the target ids that the drafter's control tokens propose.

        Other control tokens have no target ids, even if an EOS is an ordinary token with bytes.
        """
        control = np.zeros(self.drafter_size, bool)
        control[[d for d in special.drafter_control if 0 <= d < self.drafter_size]] = True
        d2t = np.where(control, np.int32(-1), self.d2t)
        for drafter_id, target_id in special.proposed.items():
            if 0 <= drafter_id < self.drafter_size and 0 <= target_id < self.target_size:
                d2t[drafter_id] = target_id

        lengths = np.diff(self.kappa_ptr)
        is_text = ~np.repeat(control, lengths)
        lengths[control] = d2t[control] >= 0
        ids = np.repeat(d2t, lengths)
        ids[~np.repeat(control, lengths)] = self.kappa_ids[is_text]
        return VocabularyMaps(d2t, _pointers(lengths), ids, self.target_size)


def default_cache() -> Path | None:
    """Return the folder that stores maps between runs, or None for a user without a home."""
    folder = cache_folder()
    return folder / "maps" if folder is not None else None


def build_maps(
    target: TextTokenizer, drafter: TextTokenizer, *, cache: Path | None = None
) -> VocabularyMaps:
    """Load the maps of a pair from `cache`, or build and store them.

    If several target ids have the same bytes, the map uses the one that the target's encoder gives
    for them, or the smallest. A token outside the intersection maps to the target's encoding of its
    bytes. If that encoding has other bytes, the token is spelled byte by byte.
    """
    key = hashlib.sha256(
        f"{FORMAT} {target.fingerprint} {drafter.fingerprint}".encode()
    ).hexdigest()
    path = cache / f"{key}.npz" if cache is not None else None
    maps = _load(path, key, target.vocab_size, drafter.vocab_size) if path is not None else None
    if maps is None:
        maps = _build(target, drafter)
        if path is not None:
            _save(maps, path, key)
    return maps


def encode_strings(tokenizer: TextTokenizer, strings: Sequence[bytes]) -> list[list[int]]:
    """Apply `tokenizer.encode_bytes` to each string. Strings that are text are batched."""
    encoded: list[list[int]] = [[] for _ in strings]
    for start in range(0, len(strings), BATCH):
        texts = {}
        for index in range(start, min(start + BATCH, len(strings))):
            try:
                texts[index] = strings[index].decode()
            except UnicodeDecodeError:
                encoded[index] = tokenizer.encode_bytes(strings[index])
        batch = tokenizer.encode_batch(list(texts.values()))
        for index, ids in zip(texts, batch, strict=True):
            encoded[index] = ids
    return encoded


def _build(target: TextTokenizer, drafter: TextTokenizer) -> VocabularyMaps:
    same: dict[bytes, list[int]] = {}
    for target_id, data in enumerate(target.token_bytes):
        if data:
            same.setdefault(data, []).append(target_id)

    rows: dict[bytes, list[int]] = {}
    unsure: dict[bytes, None] = {}
    for data in drafter.token_bytes:
        ids = same.get(data, [])
        if len(ids) == 1:
            rows[data] = ids
        elif data:
            unsure[data] = None
    encoded = encode_strings(target, list(unsure))
    for data, ids in zip(unsure, encoded, strict=True):
        if data in same:
            rows[data] = ids if len(ids) == 1 and ids[0] in same[data] else same[data][:1]
        elif target.decode_bytes(ids) == data:
            rows[data] = ids
        else:
            single = [target.byte_ids[byte] for byte in data]
            rows[data] = single if min(single) >= 0 else []
    rows[b""] = []

    lengths = np.fromiter((len(rows[data]) for data in drafter.token_bytes), np.int64)
    ids_of_all = (target_id for data in drafter.token_bytes for target_id in rows[data])
    d2t = [rows[data][0] if data in same else -1 for data in drafter.token_bytes]
    return VocabularyMaps(
        np.array(d2t, np.int32),
        _pointers(lengths),
        np.fromiter(ids_of_all, np.int32, lengths.sum()),
        target.vocab_size,
    )


def _pointers(lengths: NDArray[np.integer]) -> Ids:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _load(path: Path, key: str, target_size: int, drafter_size: int) -> VocabularyMaps | None:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as held:
            known, d2t, ptr, ids = (held[name] for name in ("key", "d2t", "kappa_ptr", "kappa_ids"))
    except FileNotFoundError:
        return None
    except Exception:
        logger.debug("%s cannot be read; building the maps again", path, exc_info=True)
        return None
    sound = (
        known.tolist() == key
        and all(array.dtype == np.int32 and array.ndim == 1 for array in (d2t, ptr, ids))
        and (len(d2t), len(ptr)) == (drafter_size, drafter_size + 1)
        and (ptr[0], ptr[-1]) == (0, len(ids))
        and bool((np.diff(ptr) >= 0).all())
        and all(((a >= low) & (a < target_size)).all() for a, low in ((d2t, -1), (ids, 0)))
    )
    if not sound:
        logger.debug("%s contains other maps; building them again", path)
        return None
    return VocabularyMaps(d2t, ptr, ids, target_size)


def _save(maps: VocabularyMaps, path: Path, key: str) -> None:
    """Write a temporary file and rename it, so that no reader gets an incomplete file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".new", delete=False) as file:
            try:
                np.savez(
                    file,
                    key=np.array(key),
                    d2t=maps.d2t,
                    kappa_ptr=maps.kappa_ptr,
                    kappa_ids=maps.kappa_ids,
                )
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError:
        logger.debug("maps cannot be stored in %s", path.parent, exc_info=True)
