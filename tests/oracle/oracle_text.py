# SPDX-License-Identifier: Apache-2.0
"""Bytes of tokens and target ids of drafted text, each time from scratch.

Written apart from the plugin's own incremental translation so that each can check the other.
"""

import json
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

_MARK = "▁"


def token_bytes(tokenizer: Any) -> list[bytes]:
    """The exact bytes each id of a byte-level or SentencePiece-style tokenizer adds to a text.

    Special tokens add none. Raises ValueError for a tokenizer of neither kind.
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
    """The longest prefix of `data` that is whole UTF-8, and the bytes after it.

    Bytes that cannot begin any character end the prefix too.
    """
    try:
        return data.decode(), b""
    except UnicodeDecodeError as error:
        return data[: error.start].decode(), data[error.start :]


class Translator:
    """Target ids of drafted bytes, anchored on the text before them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bytes = token_bytes(tokenizer)

    def __call__(self, context: bytes, draft: bytes) -> list[int]:
        """Ids whose bytes are those of `draft`, less an incomplete character at its end.

        The whole text is encoded and cut at the end of `context`. Where a token straddles that
        point, the draft is encoded alone: the target has committed to a boundary there.
        """
        text, _ = split_complete(context + draft)
        size = len(text.encode())
        if size <= len(context):
            return []
        ids = self._tokenizer(text)["input_ids"]
        # Count from the end: what is in front (BOS, dummy prefix) differs between tokenizers.
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
            return []  # the draft starts inside a character: no text of its own
        ids = self._tokenizer(drafted, add_special_tokens=False)["input_ids"]
        if b"".join(self._bytes[i] for i in ids) == drafted.encode():
            return ids
        # A dummy prefix came in front: ask the model below the normalizer.
        model = self._tokenizer.backend_tokenizer.model
        return [token.id for token in model.tokenize(drafted.replace(" ", _MARK))]
