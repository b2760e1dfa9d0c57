# SPDX-License-Identifier: Apache-2.0
"""Which adapter reads which tokenizer object."""

from typing import Any

from vllm_hetero_spec.text import adapters, fast_adapter
from vllm_hetero_spec.text.tokenizer import TextTokenizer, UnsupportedTokenizer


def load_tokenizer(tokenizer: Any, name: str = "") -> TextTokenizer:
    """The bridge's view of a tokenizer object.

    Accepts a transformers fast tokenizer (or vLLM's cached subclass of one), a
    ``tokenizers.Tokenizer``, mistral_common's Tekken and SentencePiece tokenizers (bare, or in
    vLLM's or transformers' wrapper), a ``tiktoken.Encoding``, a
    ``sentencepiece.SentencePieceProcessor``, and slow transformers tokenizers holding one of the
    last two in ``.tokenizer`` or ``.sp_model``.

    Raises UnsupportedTokenizer where the exact bytes of its tokens cannot be known.
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
            return build(tokenizer, label)
    raise UnsupportedTokenizer(
        f"{label}: a {type(tokenizer).__name__} is not a tokenizer whose bytes can be read; use a "
        "model with a tokenizer.json, a tekken.json, a SentencePiece model or a tiktoken encoding."
    )
