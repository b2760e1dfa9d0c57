# SPDX-License-Identifier: Apache-2.0
"""A copy of a `tokenizers.Tokenizer` that encodes text only.

The copy has no template, adds no leading space and does not recognize special tokens. Text that
resembles a mark of the model stays text. The model, most of a tokenizer's memory, is shared.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

from vllm_hetero_spec.text.fast_model import FastModel
from vllm_hetero_spec.text.normalization import (
    loses_separators,
    stretch_normalizer,
    text_normalizer,
)
from vllm_hetero_spec.text.token_bytes import SPACE_MARK, PieceRule, components
from vllm_hetero_spec.text.tokenizer import LeadingSpace

Section = dict[str, Any] | None

_NO_WORD = "\U0010ffff none"
# Pre-tokenizers that remove the white space between words.
_SPACES_DROPPED = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit"}
_LITERAL_BYTE = {"Regex": "<0x(?=[0-9A-Fa-f]{2}>)"}


@dataclass(frozen=True)
class Pipeline:
    """Sections of a tokenizer's JSON around its model."""

    normalizer: Section
    pre_tokenizer: Section
    decoder: Section

    @classmethod
    def of(cls, backend: Tokenizer) -> "Pipeline":
        sections = (backend.normalizer, backend.pre_tokenizer, backend.decoder)
        return cls(*(None if s is None else json.loads(s.__getstate__()) for s in sections))

    def leading_space(self, rule: PieceRule) -> LeadingSpace:
        """Return where the tokenizer itself puts a space before text."""
        if rule.continuing is not None:
            return LeadingSpace("first", unless_present=True)
        for part in components(self.normalizer):
            if _prepends_space(part):
                return LeadingSpace("always")
        every_word = False  # if true, only the space before the first word is additional
        for part in components(self.pre_tokenizer):
            every_word |= part["type"] in _SPACES_DROPPED
            if part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never":
                scheme = part.get("prepend_scheme", "always")
                return LeadingSpace("first" if every_word else scheme, unless_present=True)
            if part["type"] == "ByteLevel" and part.get("add_prefix_space"):
                return LeadingSpace("first" if every_word else "always", unless_present=True)
        return LeadingSpace()

    def raw(self, model: FastModel) -> "Pipeline":
        """Return the pipeline without a leading space.

        It also splits text that resembles a byte token or a continuing piece, because the model
        would find that token in its vocabulary.
        """
        normalizers = [part for part in components(self.normalizer) if not _prepends_space(part)]
        pre_tokenizers = components(self.pre_tokenizer)
        every_word = False
        for part in pre_tokenizers:
            every_word |= part["type"] in _SPACES_DROPPED
            if part["type"] == "Metaspace" and not every_word:
                part["prepend_scheme"] = "never"
            elif part["type"] == "ByteLevel" and not every_word:
                part["add_prefix_space"] = False
        if model.rule.byte_fallback and model.looks_words_up:
            pre_tokenizers.append(_split(_LITERAL_BYTE))
        if model.rule.continuing:
            pre_tokenizers.append(_split({"String": model.rule.continuing[0]}))
        return Pipeline(
            _sequence("normalizers", normalizers),
            _sequence("pretokenizers", pre_tokenizers),
            None,
        )

    def build(self) -> Tokenizer:
        """Build a tokenizer of these sections, with a model for which any text is unknown."""
        spec: dict[str, Any] = {
            "version": "1.0",
            "added_tokens": [],
            "normalizer": self.normalizer,
            "pre_tokenizer": self.pre_tokenizer,
            "model": {"type": "WordLevel", "vocab": {_NO_WORD: 0}, "unk_token": _NO_WORD},
        }
        built = Tokenizer.from_str(json.dumps(spec))
        built.encode_special_tokens = True
        return built


@dataclass(frozen=True)
class RawCopy:
    """The copy, its model, its normalization, and the content of its active added tokens."""

    tokenizer: Tokenizer
    model: FastModel
    normalize: Callable[[str], str]
    added: Sequence[str]


def raw_copy(
    pipeline: Pipeline,
    model: FastModel,
    added: Mapping[int, AddedToken],
    special: Mapping[int, str],
    table: list[bytes],
) -> RawCopy:
    """Build the copy, for a pipeline without a leading space.

    The model is copied only if special pieces or dropout must be removed. Added tokens that are
    text stay active, but do not remove the space around them. Those that normalization changes are
    encoded like any text.
    """
    tokenizer = pipeline.build()
    tokenizer.model = model.model
    stretch = stretch_normalizer(tokenizer, model.rule)
    loses = loses_separators(tokenizer, model.rule)
    inert = {
        i
        for i, token in added.items()
        if i in special
        or stretch(token.content).encode() != table[i]
        or (token.normalized and loses)
    }
    _add_tokens(tokenizer, added, inert)

    hidden = {i: piece for i, piece in special.items() if model.model.token_to_id(piece) == i}
    if getattr(model.model, "dropout", None) or _occur(tokenizer, model, hidden):
        model = model.without(hidden)
        tokenizer.model = model.model

    verbatim = {i: token for i, token in added.items() if not token.normalized}
    written = {verbatim[i].content: table[i].decode() for i in verbatim.keys() - inert}
    normalize = stretch
    if written:
        splitter = Pipeline(None, None, None).build()
        _add_tokens(splitter, verbatim, inert)
        normalize = text_normalizer(stretch, splitter, written)
    found = [token.content for i, token in added.items() if i not in inert]
    return RawCopy(tokenizer, model, normalize, found)


def _add_tokens(
    tokenizer: Tokenizer, added: Mapping[int, AddedToken], inert: Collection[int]
) -> None:
    tokenizer.add_tokens(
        [
            AddedToken(
                token.content,
                single_word=token.single_word,
                normalized=token.normalized,
                special=token_id in inert,
            )
            for token_id, token in sorted(added.items())
        ]
    )


def _occur(tokenizer: Tokenizer, model: FastModel, pieces: Mapping[int, str]) -> bool:
    """Return True if encoding text may give one of the pieces."""
    if model.kind == "Unigram":
        return bool(pieces)
    return any(
        i in tokenizer.encode(piece, add_special_tokens=False).ids for i, piece in pieces.items()
    )


def _prepends_space(part: dict[str, Any]) -> bool:
    return part["type"] == "Prepend" and part["prepend"] in (SPACE_MARK, " ")


def _split(pattern: dict[str, str]) -> dict[str, Any]:
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def _sequence(key: str, parts: list[dict[str, Any]]) -> Section:
    if len(parts) < 2:
        return parts[0] if parts else None
    return {"type": "Sequence", key: parts}
