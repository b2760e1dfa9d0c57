# SPDX-License-Identifier: Apache-2.0
"""Bytes of tokens and target ids of drafted text, computed from scratch each time.

This code is independent of the plugin's incremental translation, so that each can check the other.
"""

import json
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

_MARK = "▁"


def token_bytes(tokenizer: Any) -> list[bytes]:
    """Return the exact bytes that each id adds to a text.

    The tokenizer must be byte-level or SentencePiece-style; others raise ValueError. Special tokens
    add no bytes.
    """
    backend = tokenizer.backend_tokenizer
    described = json.loads(backend.to_str())
    decoder = json.dumps(described["decoder"])
    if '"ByteLevel"' in decoder:
        letters = {letter: byte for byte, letter in bytes_to_unicode().items()}

        def convert(piece: str) -> bytes:
            return bytes(letters[letter] for letter in piece)
    elif '"ByteFallback"' in decoder:

        def convert(piece: str) -> bytes:
            if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                return bytes([int(piece[3:5], 16)])
            return piece.replace(_MARK, " ").encode()
    else:
        raise ValueError("neither a byte-level nor a SentencePiece-style tokenizer")
    added = {token["id"]: token for token in described["added_tokens"]}
    table = [b""] * len(tokenizer)
    for piece, index in backend.get_vocab(with_added_tokens=True).items():
        if index not in added:
            table[index] = convert(piece)
        elif not added[index]["special"]:
            table[index] = added[index]["content"].encode()
    return table


def split_complete(data: bytes) -> tuple[str, bytes]:
    """Return the longest prefix of `data` that is complete UTF-8, and the bytes after it.

    The prefix also ends at bytes that cannot begin any character.
    """
    try:
        return data.decode(), b""
    except UnicodeDecodeError as error:
        return data[: error.start].decode(), data[error.start :]


class Translator:
    """Translates drafted bytes to target ids, given the text before them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bytes = token_bytes(tokenizer)

    def __call__(self, context: bytes, draft: bytes) -> list[int]:
        """Return ids with the bytes of `draft`, without an incomplete character at its end.

        The whole text is encoded and split at the end of `context`. If a token lies across that
        point, the draft is encoded alone, because the target has already fixed a token boundary
        there.
        """
        text, _ = split_complete(context + draft)
        size = len(text.encode())
        if size <= len(context):
            return []
        ids = self._tokenizer(text)["input_ids"]
        # Count from the end, because the first ids (BOS, dummy prefix) differ between tokenizers.
        left, start = size - len(context), len(ids)
        while left > 0:
            start -= 1
            left -= len(self._bytes[ids[start]])
        if left == 0:
            return ids[start:]
        return self._alone(context, text)

    def _alone(self, context: bytes, text: str) -> list[int]:
        try:
            drafted = text.encode()[len(context) :].decode()
        except UnicodeDecodeError:
            return []  # the draft starts inside a character and has no text of its own
        ids = self._tokenizer(drafted, add_special_tokens=False)["input_ids"]
        if b"".join(self._bytes[i] for i in ids) == drafted.encode():
            return ids
        # A dummy prefix was added, so call the model below the normalizer.
        model = self._tokenizer.backend_tokenizer.model
        return [token.id for token in model.tokenize(drafted.replace(" ", _MARK))]
