# SPDX-License-Identifier: Apache-2.0
"""Adapters from `tokenizers.Tokenizer` and fast tokenizers of transformers to `TextTokenizer`."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from vllm_hetero_spec.text.fast_model import FastModel, byte_table
from vllm_hetero_spec.text.normalization import lossy_reason
from vllm_hetero_spec.text.raw_copy import Pipeline, raw_copy
from vllm_hetero_spec.text.token_bytes import (
    CONTRACTIONS,
    PieceRule,
    UnknownDecoder,
    components,
    decoder_rule,
)
from vllm_hetero_spec.text.tokenizer import TextTokenizer, UnsupportedTokenizer, unchanged
from vllm_hetero_spec.text.words import encoder

# Characters; a larger batch uses the thread pool. The tails and drafts of a decode step are short:
# threads would save little time, and on busy cores it takes long to wake them.
_THREADS_FROM = 16_384
_FEW_IDS = 1 << 16  # ids without a token that any vocabulary may have


def is_transformers_fast(tokenizer: object) -> bool:
    return isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer)


def is_tokenizers(tokenizer: object) -> bool:
    return isinstance(tokenizer, Tokenizer)


def from_transformers(tokenizer: Any, name: str) -> TextTokenizer:
    """Adapt a fast tokenizer of transformers: its backend and the wrapper's special tokens."""
    bos_id = tokenizer.bos_token_id
    return _build(
        tokenizer.backend_tokenizer,
        name,
        also_special=tokenizer.all_special_ids,
        bos_id=bos_id,
        adds_bos=tokenizer.encode("a", add_special_tokens=True)[:1] == [bos_id],
        eos_id=tokenizer.eos_token_id,
    )


def from_tokenizers(tokenizer: Tokenizer, name: str) -> TextTokenizer:
    """Adapt a bare `tokenizers.Tokenizer`. BOS and EOS are the tokens its post-processor adds."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    start = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
    before, after = full[:start], full[start + len(plain) :]
    return _build(
        tokenizer,
        name,
        bos_id=before[0] if before else None,
        adds_bos=bool(before),
        eos_id=after[-1] if after else None,
    )


def _build(
    backend: Tokenizer,
    name: str,
    *,
    bos_id: int | None,
    adds_bos: bool,
    eos_id: int | None,
    also_special: Iterable[int] = (),
) -> TextTokenizer:
    pipeline = Pipeline.of(backend)
    rule = _rule(pipeline, name)
    model = FastModel(backend.model, rule)
    if model.fails:
        raise UnsupportedTokenizer(
            f"{name}: its {model.kind} model has no unknown token and fails on text it cannot "
            "spell; use a model whose tokenizer has one."
        )
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
    promoted = {*also_special}
    special = {i: t.content for i, t in added.items() if t.special or i in promoted}
    if model.unknown is not None:
        special.setdefault(*model.unknown)
    _check_vocabulary(vocabulary, special, rule, name)
    table = byte_table(vocabulary, model, {i: t.content for i, t in added.items()}, special)

    around = pipeline.raw(model)
    raw = raw_copy(around, model, added, special, table)
    if any(raw.tokenizer.token_to_id(token.content) != i for i, token in added.items()):
        raise UnsupportedTokenizer(
            f"{name}: the ids of its added tokens do not follow those of its vocabulary; save it "
            "anew with the library that made it."
        )
    reason = lossy_reason(around.normalizer, raw.tokenizer, rule)
    keeps_all = rule.byte_level and not reason and around.normalizer is None
    encode, run_batch = encoder(raw, around, table), raw.tokenizer.encode_batch_fast

    def encode_batch(texts: Sequence[str]) -> list[list[int]]:
        if len(texts) == 1 or sum(map(len, texts)) < _THREADS_FROM:
            return [encode(text) for text in texts]
        return [encoding.ids for encoding in run_batch(list(texts), add_special_tokens=False)]

    return TextTokenizer(
        name=name,
        token_bytes=table,
        special_text=special,
        byte_ids=model.byte_ids(table),
        fingerprint=_fingerprint(model, pipeline, added, special),
        raw_encode=encode,
        raw_encode_batch=encode_batch,
        raw_normalize=unchanged if keeps_all else raw.normalize,
        lossy_reason=reason,
        spell_word=raw.model.speller(),
        spells_all=model.spells_all,
        unknown_id=None if model.unknown is None else model.unknown[0],
        bos_id=bos_id,
        adds_bos=adds_bos,
        eos_id=eos_id,
        leading_space=pipeline.leading_space(rule),
    )


def _rule(pipeline: Pipeline, name: str) -> PieceRule:
    try:
        return decoder_rule(pipeline.decoder, pipeline.pre_tokenizer)
    except UnknownDecoder as error:
        raise UnsupportedTokenizer(
            f"{name}: {error}, which does not determine the bytes of its tokens; supported are "
            "byte-level, SentencePiece-style and WordPiece decoders, so use such a model."
        ) from error


def _check_vocabulary(
    vocabulary: Mapping[str, int], special: Mapping[int, str], rule: PieceRule, name: str
) -> None:
    ids = set(vocabulary.values())
    if not ids:
        raise UnsupportedTokenizer(f"{name}: its vocabulary is empty; use one that has tokens.")
    if len(ids) < len(vocabulary) or max(ids) > 2 * len(ids) + _FEW_IDS:
        raise UnsupportedTokenizer(
            f"{name}: its {len(vocabulary)} tokens have {len(ids)} different ids up to {max(ids)}; "
            "every token needs an id of its own, and most ids a token."
        )
    words = (p for p, i in vocabulary.items() if i not in special and p.startswith(CONTRACTIONS))
    if rule.cleanup and (unsafe := next(words, None)):
        raise UnsupportedTokenizer(
            f"{name}: its WordPiece decoder joins contractions such as {unsafe!r} to the word "
            "before, so that bytes depend on more than the token; use a tokenizer whose decoder "
            "does not clean up."
        )


def _fingerprint(
    model: FastModel,
    pipeline: Pipeline,
    added: Mapping[int, AddedToken],
    special: Mapping[int, str],
) -> str:
    """Return a digest of everything that determines ids and bytes: no templates or offsets."""
    around = [
        {key: value for key, value in part.items() if key != "trim_offsets"}
        for section in (pipeline.normalizer, pipeline.pre_tokenizer)
        for part in [{"type": ""}, *components(section)]
    ]
    tokens = [(i, repr(token), i in special) for i, token in sorted(added.items())]
    digest = hashlib.sha256(model.serialized)
    digest.update(json.dumps(around, sort_keys=True).encode())
    digest.update(repr((model.rule, tokens)).encode())
    return digest.hexdigest()
