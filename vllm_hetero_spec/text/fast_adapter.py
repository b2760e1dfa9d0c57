# SPDX-License-Identifier: Apache-2.0
"""``tokenizers.Tokenizer`` and transformers' fast tokenizers as a ``TextTokenizer``."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer

from vllm_hetero_spec.text.token_bytes import (
    SPACE_MARK,
    byte_alphabet,
    byte_level_piece,
    component_types,
    components,
    fallback_byte,
    sentencepiece_piece,
    single_byte_ids,
)
from vllm_hetero_spec.text.tokenizer import LeadingSpace, TextTokenizer, UnsupportedTokenizer

_SENTENCEPIECE_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
_PROBE = "The cats' 12 dogs"
# Characters from which a batch goes to the thread pool. The tails and drafts of a decoding step are
# short: waking threads for them saves little and, where other work keeps the cores busy, waits.
_THREADS_FROM = 16_384
_UNMATCHABLE = "\U0010ffff"  # a noncharacter: never in text


def is_transformers_fast(tokenizer: object) -> bool:
    return isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer)


def is_tokenizers(tokenizer: object) -> bool:
    return isinstance(tokenizer, Tokenizer)


def from_transformers(tokenizer: Any, name: str) -> TextTokenizer:
    """A transformers fast tokenizer: its backend, with the wrapper's notion of special tokens."""
    with_special = tokenizer.encode("a", add_special_tokens=True)
    bos_id = tokenizer.bos_token_id
    return _build(
        tokenizer.backend_tokenizer,
        name,
        also_special=tokenizer.all_special_ids,
        bos_id=bos_id,
        adds_bos=bos_id is not None and with_special[:1] == [bos_id],
        eos_id=tokenizer.eos_token_id,
    )


def from_tokenizers(tokenizer: Tokenizer, name: str) -> TextTokenizer:
    """A bare ``tokenizers.Tokenizer``: BOS and EOS are what its post-processor adds."""
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
    spec: dict[str, Any] = json.loads(backend.to_str())
    promoted = set(also_special)
    for token in spec["added_tokens"]:
        token["special"] = token["special"] or token["id"] in promoted
    special_text = {t["id"]: t["content"] for t in spec["added_tokens"] if t["special"]}
    unknown = _unknown_token(spec, backend)
    if unknown is not None:
        special_text.setdefault(*unknown)

    leading_space = _leading_space(spec)
    fingerprint = _fingerprint(spec)
    table = _byte_table(spec, backend, special_text, name)
    raw = _raw_copy(spec)

    def encode(text: str) -> list[int]:
        ids: list[int] = raw.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(texts: Sequence[str]) -> list[list[int]]:
        if len(texts) == 1 or sum(map(len, texts)) < _THREADS_FROM:
            return [raw.encode(text, add_special_tokens=False).ids for text in texts]
        batch = raw.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    built = TextTokenizer(
        name=name,
        token_bytes=table,
        special_text=special_text,
        special_ids=frozenset(i for i, data in enumerate(table) if not data),
        byte_ids=_byte_ids(spec, backend, table),
        fingerprint=fingerprint,
        raw_encode=encode,
        raw_encode_batch=encode_batch,
        bos_id=bos_id,
        adds_bos=adds_bos,
        eos_id=eos_id,
        leading_space=leading_space,
    )
    if built.decode_bytes(built.encode(_PROBE)) != _PROBE.encode():
        raise UnsupportedTokenizer(
            f"{name}: its {spec['model']['type']} tokens do not spell the text they encode: it "
            "drops or rewrites characters; use a model whose tokenizer keeps text as it is."
        )
    return built


def _unknown_token(spec: dict[str, Any], backend: Tokenizer) -> tuple[int, str] | None:
    model = spec["model"]
    if model.get("unk_id") is not None:
        return model["unk_id"], model["vocab"][model["unk_id"]][0]
    content = model.get("unk_token")
    token_id = backend.token_to_id(content) if content else None
    return None if token_id is None else (token_id, content)


def _byte_fallback(spec: dict[str, Any]) -> bool:
    return "ByteFallback" in component_types(spec["decoder"])


def _is_byte_level(spec: dict[str, Any], name: str) -> bool:
    decoders = set(component_types(spec["decoder"]))
    if not decoders:
        decoders = {"ByteLevel"} & set(component_types(spec["pre_tokenizer"]))
    marks = [
        part.get("pattern", {}).get("String") == SPACE_MARK and part.get("content") == " "
        for part in components(spec["decoder"])
        if part["type"] == "Replace"
    ]
    if decoders == {"ByteLevel"}:
        return True
    if decoders and decoders <= _SENTENCEPIECE_DECODERS and all(marks):
        return False
    raise UnsupportedTokenizer(
        f"{name}: its decoder ({', '.join(sorted(decoders)) or 'none'}) does not give exact bytes; "
        "supported are byte-level BPE and SentencePiece-style decoders, so use such a model."
    )


def _byte_table(
    spec: dict[str, Any], backend: Tokenizer, special_text: dict[int, str], name: str
) -> list[bytes]:
    byte_level = _is_byte_level(spec, name)
    fallback = _byte_fallback(spec)
    alphabet = byte_alphabet()
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    added = {token["id"] for token in spec["added_tokens"]}
    table = [b""] * (max(vocabulary.values()) + 1)
    for piece, token_id in vocabulary.items():
        if token_id in special_text:
            continue
        if not byte_level:
            table[token_id] = sentencepiece_piece(piece, byte_fallback=fallback)
        elif token_id in added:
            table[token_id] = piece.encode()
        else:
            table[token_id] = byte_level_piece(piece, alphabet)
    return table


def _byte_ids(spec: dict[str, Any], backend: Tokenizer, table: list[bytes]) -> tuple[int, ...]:
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=False)
    fallback = _byte_fallback(spec)
    spelled = {
        i for piece, i in vocabulary.items() if fallback and fallback_byte(piece) is not None
    }
    order = sorted(vocabulary.values(), key=lambda i: (i not in spelled, i))
    return single_byte_ids((i, table[i]) for i in order)


def _leading_space(spec: dict[str, Any]) -> LeadingSpace:
    """Where the tokenizer puts a space of its own before text."""
    for part in components(spec["normalizer"]):
        if part["type"] == "Prepend" and part["prepend"] in (SPACE_MARK, " "):
            return LeadingSpace("always")
    for part in components(spec["pre_tokenizer"]):
        if part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never":
            return LeadingSpace(part.get("prepend_scheme", "always"), unless_present=True)
        if part["type"] == "ByteLevel" and part.get("add_prefix_space"):
            return LeadingSpace("always", unless_present=True)
    return LeadingSpace()


def _raw_copy(spec: dict[str, Any]) -> Tokenizer:
    """A copy that adds nothing: no templates, no leading space, special tokens inert.

    Added tokens that are ordinary text stay active, but no longer swallow the space around them,
    so that the bytes of the ids remain the bytes of the text.
    """
    raw = dict(spec, post_processor=None, truncation=None, padding=None)
    raw["normalizer"] = _without_leading_space(spec["normalizer"])
    raw["pre_tokenizer"] = _without_leading_space(spec["pre_tokenizer"])
    added = [token | {"lstrip": False, "rstrip": False} for token in spec["added_tokens"]]
    if spec["model"]["type"] == "Unigram":
        # Unigram finds any piece of its vocabulary in the text, special ones too: rename those.
        pieces = list(spec["model"]["vocab"])
        hidden = [token["id"] for token in added if token["special"] and token["id"] < len(pieces)]
        for token_id in hidden:
            pieces[token_id] = [f"{_UNMATCHABLE}{token_id}", pieces[token_id][1]]
        added = [token for token in added if token["id"] not in hidden]
        raw["model"] = spec["model"] | {"vocab": pieces}
    raw["added_tokens"] = added
    copy = Tokenizer.from_str(json.dumps(raw))
    copy.encode_special_tokens = True
    return copy


def _without_leading_space(section: dict[str, Any] | None) -> dict[str, Any] | None:
    kept = []
    for part in components(section):
        if part["type"] == "Prepend" and part["prepend"] in (SPACE_MARK, " "):
            continue
        if part["type"] == "Metaspace":
            part["prepend_scheme"] = "never"
        elif part["type"] == "ByteLevel":
            part["add_prefix_space"] = False
        kept.append(part)
    if len(kept) < 2:
        return kept[0] if kept else None
    inner = "normalizers" if section and "normalizers" in section else "pretokenizers"
    return {"type": "Sequence", inner: kept}


def _fingerprint(spec: dict[str, Any]) -> str:
    """Digest of everything that decides ids and bytes; templates and offsets do not."""

    def essential(section: dict[str, Any] | None) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in part.items() if key != "trim_offsets"}
            for part in components(section)
        ]

    behaviour = {
        "model": spec["model"],
        "normalizer": essential(spec["normalizer"]),
        "pre_tokenizer": essential(spec["pre_tokenizer"]),
        "decoder": component_types(spec["decoder"]),
        "added_tokens": sorted(spec["added_tokens"], key=lambda token: token["id"]),
    }
    return hashlib.sha256(json.dumps(behaviour, sort_keys=True).encode()).hexdigest()
