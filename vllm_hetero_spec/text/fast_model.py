# SPDX-License-Identifier: Apache-2.0
"""Properties of a model of `tokenizers`: the text it can spell, and its unknown token."""

import json
from codecs import charmap_decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from vllm_hetero_spec.text.token_bytes import (
    BYTE_CHARACTERS,
    UTF8_BYTES,
    PieceRule,
    byte_level_piece,
    fallback_byte,
    single_byte_ids,
)

# Name of a hidden piece. The noncharacter does not occur in text, nor a space in a pre-token.
_HIDDEN = "\U0010ffff hidden {}"


class FastModel:
    """A BPE, Unigram, WordPiece or WordLevel model of `tokenizers`, and its decoder's rule."""

    def __init__(self, model: Any, rule: PieceRule) -> None:
        self.model, self.rule = model, rule
        self.kind = type(model).__name__

    @cached_property
    def serialized(self) -> bytes:
        """The model as JSON, with everything that determines its ids."""
        data: bytes = self.model.__getstate__()
        return data

    @cached_property
    def unknown(self) -> tuple[int, str] | None:
        """Id and piece of the unknown token."""
        if self.kind == "Unigram":
            state = json.loads(self.serialized)
            index = state["unk_id"]
            return None if index is None else (index, state["vocab"][index][0])
        piece = self.model.unk_token
        token_id = self.model.token_to_id(piece) if piece else None
        return None if token_id is None else (token_id, piece)

    @cached_property
    def spells_all(self) -> bool:
        """True if the model has pieces for the bytes of any text."""
        affixes = ("continuing_subword_prefix", "end_of_word_suffix")
        if self.kind not in ("BPE", "Unigram") or any(
            getattr(self.model, affix, None) for affix in affixes
        ):
            return False
        if self.rule.byte_level:
            pieces = [BYTE_CHARACTERS[byte] for byte in UTF8_BYTES]
        elif self.rule.byte_fallback and b'"byte_fallback":true' in self.serialized:
            pieces = [f"<0x{byte:02X}>" for byte in UTF8_BYTES]
        else:
            return False
        return all(self.model.token_to_id(piece) is not None for piece in pieces)

    @property
    def fails(self) -> bool:
        """True if the model raises an error for some text."""
        if self.spells_all or self.unknown is not None:
            return False
        return self.kind != "BPE" or self.model.unk_token is not None

    @property
    def looks_words_up(self) -> bool:
        """True if any piece that text contains may be used, even if no merges lead to it."""
        return self.kind != "BPE" or self.model.ignore_merges

    def byte_ids(self, table: Sequence[bytes]) -> tuple[int, ...]:
        """Return, for each byte, the id that spells it alone, or -1. `<0xNN>` pieces come first."""
        single = [(i, data) for i, data in enumerate(table) if len(data) == 1]
        pieces = {i: self.model.id_to_token(i) for i, _ in single}
        own = [(i, data) for i, data in single if pieces[i] is not None]
        if self.rule.byte_fallback:
            own.sort(key=lambda entry: fallback_byte(pieces[entry[0]]) is None)
        return single_byte_ids(own)

    def speller(self) -> Callable[[bytes], list[int]] | None:
        """Return a function from bytes, as one word, to ids. None if not byte-level."""
        if not self.rule.byte_level:
            return None
        tokenize = self.model.tokenize

        def spell(data: bytes) -> list[int]:
            return [
                token.id for token in tokenize(charmap_decode(data, "strict", BYTE_CHARACTERS)[0])
            ]

        return spell

    def without(self, hidden: Mapping[int, str]) -> "FastModel":
        """Return a copy that never uses the `hidden` pieces and has no BPE dropout."""
        state = json.loads(self.serialized)
        names = {piece: _HIDDEN.format(token_id) for token_id, piece in hidden.items()}
        if self.kind == "Unigram":
            state["vocab"] = [[names.get(piece, piece), score] for piece, score in state["vocab"]]
        else:
            state["vocab"] = {names.get(piece, piece): i for piece, i in state["vocab"].items()}
            state["unk_token"] = names.get(state["unk_token"], state["unk_token"])
        if self.kind == "BPE":
            state["dropout"] = None
            start = len(state["continuing_subword_prefix"] or "")  # of the second piece in a merge
            state["merges"] = [
                (first, second)
                for first, second in state["merges"]
                if names.keys().isdisjoint((first, second, first + second[start:]))
            ]
        copy = type(self.model)()
        copy.__setstate__(json.dumps(state).encode())
        return FastModel(copy, self.rule)


def byte_table(
    vocabulary: Mapping[str, int],
    model: FastModel,
    added: Mapping[int, str],
    special: Iterable[int],
) -> list[bytes]:
    """Return [largest id + 1] the bytes of each token, b"" for special tokens and holes.

    The vocabulary includes added tokens. A byte-level tokenizer stores their content as plain text,
    not in its byte alphabet, unless the model has the same piece.
    """
    rule = model.rule
    table = [b""] * (max(vocabulary.values()) + 1)
    write = byte_level_piece if rule.byte_level else rule.piece
    for piece, token_id in vocabulary.items():
        table[token_id] = write(piece)
    if rule.byte_level:
        for token_id, content in added.items():
            if model.model.token_to_id(content) is None:
                table[token_id] = content.encode()
    for token_id in special:
        table[token_id] = b""
    return table
