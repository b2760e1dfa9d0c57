# SPDX-License-Identifier: Apache-2.0
"""Choice of the adapter for a tokenizer object."""

from typing import Any

from vllm_hetero_spec.errors import one_line
from vllm_hetero_spec.text import adapters, fast_adapter
from vllm_hetero_spec.text.tokenizer import TextTokenizer, UnsupportedTokenizer

# Texts on which every tokenizer is checked. It must spell at least half of the ordinary one.
_ORDINARY = "The cats' 12 dogs: it is what we have"
_PROBES = (
    _ORDINARY,
    "def f(x):\n\treturn  x+1  # don't",
    "Déjà vu, ÉCOLE naïve Ж 中文字符 한국어 🙂",
    "##a @@b </s> <unk> <0x0A> [UNK]",
)


def load_tokenizer(tokenizer: Any, name: str = "") -> TextTokenizer:
    """Adapt a tokenizer object for the bridge.

    Supported are fast tokenizers of transformers (also vLLM's cached subclass),
    `tokenizers.Tokenizer`, `tiktoken.Encoding`, `sentencepiece.SentencePieceProcessor`, and slow
    tokenizers of transformers that wrap one of the last two. Tekken and SentencePiece tokenizers of
    mistral_common are supported, also in a wrapper of vLLM or transformers.

    Raises:
        UnsupportedTokenizer: The exact bytes of its tokens cannot be determined.
    """
    label = name or str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
    for accepts, build in (
        (fast_adapter.is_transformers_fast, fast_adapter.from_transformers),
        (fast_adapter.is_tokenizers, fast_adapter.from_tokenizers),
        (adapters.is_tiktoken, adapters.from_tiktoken),
        (adapters.is_sentencepiece, adapters.from_sentencepiece),
        (adapters.is_mistral, adapters.from_mistral),
        (adapters.is_slow_wrapper, adapters.from_slow_wrapper),
    ):
        if accepts(tokenizer):
            try:
                built = build(tokenizer, label)
                _check_spelling(built)
                return built
            except UnsupportedTokenizer:
                raise
            except Exception as error:  # the libraries raise plain `Exception` for broken files
                raise UnsupportedTokenizer(
                    f"{label}: reading its tokens failed ({one_line(error)[:200]}); "
                    "check that its tokenizer files are whole and belong to this model."
                ) from error
    raise UnsupportedTokenizer(
        f"{label}: a {type(tokenizer).__name__} is not a tokenizer whose bytes can be read; use a "
        "model with a tokenizer.json, a tekken.json, a SentencePiece model or a tiktoken encoding."
    )


def _check_spelling(built: TextTokenizer) -> None:
    """Raise if ids do not spell the normalized text, except for bytes that `lost_bytes` counts."""
    for text in _PROBES:
        expected, ids = built.normalize(text).encode(), built.encode(text)
        spelled, lost = built.decode_bytes(ids), built.lost_bytes(text, ids)
        rest = iter(expected)
        exact = len(spelled) + lost == len(expected) and all(byte in rest for byte in spelled)
        if not exact or (text == _ORDINARY and _has_marks(expected)):
            raise UnsupportedTokenizer(
                f"{built.name}: its tokens do not spell the text they encode: {text!r} becomes "
                f"{spelled.decode('utf-8', 'replace')!r}; use a model whose tokenizer and decoder "
                "belong together."
            )
        if text == _ORDINARY and 2 * lost > len(expected):
            raise UnsupportedTokenizer(
                f"{built.name}: its vocabulary cannot spell ordinary text: {lost} of the "
                f"{len(expected)} bytes of {text!r} are lost; use a model whose tokenizer can."
            )


def _has_marks(normalized: bytes) -> bool:
    """Return True if characters of a display alphabet remain that no decoder removes."""
    return not set(normalized.lower()) <= set(_ORDINARY.lower().encode())
