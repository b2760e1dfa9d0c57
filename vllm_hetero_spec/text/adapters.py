# SPDX-License-Identifier: Apache-2.0
"""Adapters from tiktoken, SentencePiece and mistral_common tokenizers to `TextTokenizer`.

A tokenizer is recognized by its methods, so that none of these libraries has to be installed.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from vllm_hetero_spec.text.model_proto import NO_DUMMY_PREFIX, lossy_reason
from vllm_hetero_spec.text.token_bytes import SPACE_MARK, UTF8_BYTES, single_byte_ids
from vllm_hetero_spec.text.tokenizer import LeadingSpace, TextTokenizer, UnsupportedTokenizer

T = TypeVar("T", str, bytes)

_MISTRAL_CORE = ("_model", "is_special", "id_to_piece")
_RUST = "pyo3_runtime"  # module of the exception that Python raises for a Rust panic


def is_tiktoken(tokenizer: object) -> bool:
    return _has(tokenizer, "encode_ordinary", "decode_single_token_bytes", "n_vocab")


def is_sentencepiece(tokenizer: object) -> bool:
    return _has(tokenizer, "serialized_model_proto", "id_to_piece", "is_control")


def is_mistral(tokenizer: object) -> bool:
    return _has(_mistral_core(tokenizer), *_MISTRAL_CORE)


def is_slow_wrapper(tokenizer: object) -> bool:
    return _wrapped(tokenizer) is not None


def from_tiktoken(encoding: Any, name: str) -> TextTokenizer:
    """Adapt a `tiktoken.Encoding`. Its EOS is `<|endoftext|>`, if it has that token."""
    special = {encoding.encode_single_token(text): text for text in encoding.special_tokens_set}
    table = [b""] * encoding.n_vocab
    for token_id in range(encoding.n_vocab):
        if token_id not in special:
            try:
                table[token_id] = encoding.decode_single_token_bytes(token_id)
            except KeyError:
                continue
    return _assemble(
        name,
        table,
        special,
        _without_panics(encoding.encode_ordinary),
        kind=f"tiktoken {getattr(encoding, '_pat_str', '')}",
        spell_word=_without_panics(encoding._encode_single_piece),
        eos_id=encoding.eot_token if "<|endoftext|>" in encoding.special_tokens_set else None,
    )


def from_sentencepiece(model: Any, name: str) -> TextTokenizer:
    """Adapt a `sentencepiece.SentencePieceProcessor`. A copy without dummy prefix encodes."""
    proto: bytes = model.serialized_model_proto()
    raw = type(model)()
    raw.LoadFromSerializedProto(proto + NO_DUMMY_PREFIX)
    if _pieces_text(raw, "a") != "a":
        raise UnsupportedTokenizer(
            f"{name}: this SentencePiece model always puts a space before the text, and this "
            "cannot be disabled; convert it to a tokenizer.json and load that."
        )
    ids = range(model.get_piece_size())
    special = {i: model.id_to_piece(i) for i in ids if model.is_control(i) or model.is_unknown(i)}
    own_bytes = [i for i in ids if model.is_byte(i)]
    table = [
        b""
        if i in special or model.is_unused(i)
        else model.id_to_piece(i).replace(SPACE_MARK, " ").encode()
        for i in ids
    ]
    for i in own_bytes:
        table[i] = bytes.fromhex(model.id_to_piece(i)[3:5])  # the piece is `<0xNN>`
    bos_id, eos_id = model.bos_id(), model.eos_id()
    reason = lossy_reason(proto)

    def normalize(text: str) -> str:
        normalized: str = raw.normalize(text) if reason else text
        return normalized.replace(SPACE_MARK, " ")

    return _assemble(
        name,
        table,
        special,
        raw.encode,
        kind="sentencepiece " + hashlib.sha256(proto).hexdigest(),
        own_bytes=own_bytes,
        bos_id=bos_id if bos_id >= 0 else None,
        eos_id=eos_id if eos_id >= 0 else None,
        leading_space=LeadingSpace("always" if _pieces_text(model, "a") == " a" else "none"),
        raw_normalize=normalize,
        lossy_reason=reason,
        spells_all={table[i][0] for i in own_bytes} >= UTF8_BYTES,
        unknown_id=model.unk_id(),
    )


def from_mistral(tokenizer: Any, name: str) -> TextTokenizer:
    """Adapt a Tekken or SentencePiece tokenizer of mistral_common, which always adds BOS."""
    core = _mistral_core(tokenizer)
    model = core._model
    if is_sentencepiece(model):
        return replace(from_sentencepiece(model, name), adds_bos=True)
    offset = core.num_special_tokens
    special = {i: core.id_to_piece(i) for i in range(offset)}
    table = [b""] * offset
    table += [model.decode_single_token_bytes(i) for i in range(core.n_words - offset)]

    def shifted(encode: Callable[[T], list[int]]) -> Callable[[T], list[int]]:
        guarded = _without_panics(encode)
        return lambda text: [token_id + offset for token_id in guarded(text)]

    return _assemble(
        name,
        table,
        special,
        shifted(model.encode_ordinary),
        kind=f"tekken {model._pat_str}",
        spell_word=shifted(model._encode_single_piece),
        bos_id=core.bos_id,
        adds_bos=True,
        eos_id=core.eos_id,
    )


def from_slow_wrapper(tokenizer: Any, name: str) -> TextTokenizer:
    """Adapt a slow transformers tokenizer that wraps a tiktoken or SentencePiece model.

    The ids of the wrapper must be those of the model. A token that the wrapper adds becomes a
    special token if it is marked so. Otherwise it is text that encoding does not produce.
    """
    inner = _wrapped(tokenizer)
    build = from_tiktoken if is_tiktoken(inner) else from_sentencepiece
    built = build(inner, name)
    if is_sentencepiece(inner):
        sample = range(0, inner.get_piece_size(), max(1, inner.get_piece_size() // 64))
        if any(tokenizer.convert_ids_to_tokens(i) != inner.id_to_piece(i) for i in sample):
            raise UnsupportedTokenizer(
                f"{name}: the ids of this slow tokenizer are not those of its SentencePiece model; "
                "convert it to a tokenizer.json and load that."
            )
    table, special = list(built.token_bytes), dict(built.special_text)
    for token_id, token in sorted(getattr(tokenizer, "added_tokens_decoder", {}).items()):
        table += [b""] * (token_id + 1 - len(table))
        if token.special:
            table[token_id], special[token_id] = b"", str(token)
        elif token_id not in special:
            table[token_id] = str(token).encode()
    bos_id = tokenizer.bos_token_id
    return replace(
        built,
        token_bytes=table,
        special_text=special,
        bos_id=bos_id,
        adds_bos=tokenizer.encode("a", add_special_tokens=True)[:1] == [bos_id],
        eos_id=tokenizer.eos_token_id,
        fingerprint=_digest(built.fingerprint, table, special),
    )


def _assemble(
    name: str,
    table: list[bytes],
    special: dict[int, str],
    encode: Callable[[str], list[int]],
    *,
    kind: str,
    own_bytes: Sequence[int] = (),
    **others: Any,
) -> TextTokenizer:
    """Return a tokenizer with the attributes `others`.

    `own_bytes` are ids of byte pieces. They come first, because a character of one byte may have
    the same bytes.
    """
    return TextTokenizer(
        name=name,
        token_bytes=table,
        special_text=special,
        byte_ids=single_byte_ids((i, table[i]) for i in (*own_bytes, *range(len(table)))),
        fingerprint=_digest(kind, table, special),
        raw_encode=encode,
        raw_encode_batch=lambda texts: [encode(text) for text in texts],
        **others,
    )


def _without_panics(encode: Callable[[T], list[int]]) -> Callable[[T], list[int]]:
    """Raise ValueError instead of a Rust panic of tiktoken.

    Its patterns panic on about a million consecutive spaces (a few thousand ids). A panic is not an
    `Exception`, so the handlers that isolate one request's failure would not catch it.
    """

    def guarded(text: T) -> list[int]:
        try:
            return encode(text)
        except BaseException as error:
            if type(error).__module__ != _RUST:
                raise
            raise ValueError(f"tiktoken failed to encode: {error}") from error

    return guarded


def _digest(kind: str, table: Iterable[bytes], special: Mapping[int, str]) -> str:
    digest = hashlib.sha256(kind.encode())
    for data in table:
        digest.update(len(data).to_bytes(4, "little") + data)
    digest.update(repr(sorted(special.items())).encode())
    return digest.hexdigest()


def _pieces_text(model: Any, text: str) -> str:
    return "".join(model.encode(text, out_type=str)).replace(SPACE_MARK, " ")


def _has(tokenizer: object, *names: str) -> bool:
    return all(hasattr(tokenizer, name) for name in names)


def _mistral_core(tokenizer: Any) -> Any:
    """Remove at most three wrappers from the object whose `_model` encodes."""
    for _ in range(3):
        if _has(tokenizer, *_MISTRAL_CORE):
            break
        inner = getattr(tokenizer, "instruct_tokenizer", None)
        tokenizer = inner or getattr(tokenizer, "tokenizer", None)
    return tokenizer


def _wrapped(tokenizer: Any) -> Any:
    held = (getattr(tokenizer, name, None) for name in ("sp_model", "tokenizer", "model"))
    return next((model for model in held if is_tiktoken(model) or is_sentencepiece(model)), None)
