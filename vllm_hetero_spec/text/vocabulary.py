# SPDX-License-Identifier: Apache-2.0
"""What each drafter token is in the target's vocabulary, as arrays a whole row is mapped by.

Two maps, both by bytes and with the target's real tokenizer:

* `d2t`: the target id with the same bytes, for the drafter ids of the intersection;
* `kappa`: the target ids that spell the token, for every drafter id whose bytes the target has.

On the intersection kappa is that one id, also where the target's encoder would split the string:
part of a character, which it spells byte by byte when it stands alone, or a token that its
normaliser or pre-tokenizer makes unreachable. The intersection is defined by bytes, and with kappa
the identity on it a row pushed through kappa covers at least what a row restricted to the
intersection covers. Correctness does not depend on the map: a token that the target never writes is
merely never accepted.
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

# Counts up with every change of what the maps hold or of how they are stored.
FORMAT = 1
# Strings encoded at a time: enough for all threads, few enough that encodings take little memory.
BATCH = 4096


@dataclass(frozen=True, eq=False)
class VocabularyMaps:
    """Drafter ids as target ids; `with_control` adds control tokens, which are in neither map.

    Attributes:
        d2t: [V_D] target id with the same bytes, -1 outside the intersection.
        kappa_ptr: [V_D + 1] where in `kappa_ids` the target ids of each drafter id begin; none
            where the target cannot spell its bytes.
        kappa_ids: [n] target ids.
        target_size: Ids in the target's vocabulary; padding of a model's rows is not counted.
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
        """[V_D] first target id of each drafter token, -1 where there is none."""
        first = np.full(self.drafter_size, -1, np.int32)
        spelled = self.kappa_ptr[1:] > self.kappa_ptr[:-1]
        first[spelled] = self.kappa_ids[self.kappa_ptr[:-1][spelled]]
        return first

    @cached_property
    def intersection(self) -> Ids:
        """Drafter ids that have a target id of their own bytes, ascending."""
        return np.flatnonzero(self.d2t >= 0).astype(np.int32)

    def target_tokens(self, drafter_id: int) -> Ids:
        """The target ids that spell a drafter token."""
        return self.kappa_ids[self.kappa_ptr[drafter_id] : self.kappa_ptr[drafter_id + 1]]

    def with_control(self, special: SpecialTokens) -> "VocabularyMaps":
        """These maps with the drafter's control tokens as what they propose.

        A control token that proposes nothing, or an id that is not in the target's vocabulary, maps
        to nothing; so does the text of an EOS that is an ordinary token.
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
    """Folder where maps are kept between runs, None for a user without a home."""
    folder = cache_folder()
    return folder / "maps" if folder is not None else None


def build_maps(
    target: TextTokenizer, drafter: TextTokenizer, *, cache: Path | None = None
) -> VocabularyMaps:
    """The maps of a pair of tokenizers.

    Where several target ids have the same bytes, the one the target emits for them is taken, and
    the smallest if it emits none of them alone. A token outside the intersection is what the
    target's encoder makes of its bytes; where those would be rewritten (a normaliser) or are not
    text, it is spelled byte by byte, so that the bytes agree in every row.

    Args:
        target: Its tokenizer.
        drafter: Its tokenizer.
        cache: Folder that is looked in first and written to (`default_cache`); it need not exist,
            and maps that cannot be read from it are built. None keeps nothing.
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
    """`tokenizer.encode_bytes` of each string, in batches where they are text."""
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
        logger.debug("%s cannot be read and is built anew", path, exc_info=True)
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
        logger.debug("%s holds other maps and is built anew", path)
        return None
    return VocabularyMaps(d2t, ptr, ids, target_size)


def _save(maps: VocabularyMaps, path: Path, key: str) -> None:
    """Written beside `path` and renamed, so that no reader sees half a file."""
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
        logger.debug("maps cannot be kept in %s", path.parent, exc_info=True)
