# SPDX-License-Identifier: Apache-2.0
"""Tokenizers written by hand: a list of byte strings, joined in the order of their ids."""

import hashlib
from collections.abc import Callable, Sequence
from itertools import pairwise

from vllm_hetero_spec.text.token_bytes import single_byte_ids
from vllm_hetero_spec.text.tokenizer import TextTokenizer


def toy(
    pieces: Sequence[bytes],
    encode: Callable[[str], list[int]] | None = None,
    eos: int | None = None,
) -> TextTokenizer:
    """Return a tokenizer with these pieces. b"" is a special token.

    The default encoder is BPE by id: it begins with single bytes, and joins the neighbours whose
    joined piece has the smallest id first. Of equal pieces, only the first one is emitted.
    """
    ids = {data: token_id for token_id, data in reversed(list(enumerate(pieces)))}

    def bpe(text: str) -> list[int]:
        parts = [bytes([byte]) for byte in text.encode()]
        while joins := [
            (ids[left + right], place)
            for place, (left, right) in enumerate(pairwise(parts))
            if left + right in ids
        ]:
            _, place = min(joins)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        return [ids[part] for part in parts if part in ids]

    encoder = encode or bpe
    return TextTokenizer(
        name="toy",
        token_bytes=list(pieces),
        special_text={i: f"<{i}>" for i, data in enumerate(pieces) if not data},
        byte_ids=single_byte_ids(enumerate(pieces)),
        fingerprint=hashlib.sha256(repr((pieces, encode)).encode()).hexdigest(),
        raw_encode=encoder,
        raw_encode_batch=lambda texts: [encoder(text) for text in texts],
        eos_id=eos,
    )
