# SPDX-License-Identifier: Apache-2.0
"""Tokenizers for the tests: trained ones of every family, and real ones if their files exist."""

from pathlib import Path
from typing import Any

import pytest
import recipes
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from vllm_hetero_spec.text.loading import load_tokenizer
from vllm_hetero_spec.text.tokenizer import TextTokenizer


@pytest.fixture(scope="session")
def backends() -> dict[str, Any]:
    """Tokenizer object of its library, by family."""
    return {
        "byte-level": recipes.train_byte_level(1500),
        "byte-level-nfc": recipes.train_byte_level(700, nfc=True),
        "sentencepiece": recipes.train_sentencepiece(900),
        "unigram": recipes.train_unigram(900),
        "tiktoken": recipes.build_tiktoken(),
        "processor": recipes.build_processor(),
    }


@pytest.fixture(scope="session")
def family(backends: dict[str, Any]) -> dict[str, TextTokenizer]:
    """`TextTokenizer` by family."""
    return {name: load_tokenizer(backend, name) for name, backend in backends.items()}


@pytest.fixture(scope="session")
def variant_backends(backends: dict[str, Any]) -> dict[str, Tokenizer]:
    """Tokenizers that drafters rarely have: lossy, incomplete or without merges."""
    byte_level, unigram = backends["byte-level"], backends["unigram"]
    wordpiece = recipes.train_wordpiece(1200)
    lowercase = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    words = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return {
        "unigram-fallback": recipes.with_byte_fallback(unigram),
        "unigram-words": recipes.in_words(unigram),
        "wordpiece": wordpiece,
        "wordpiece-cased": recipes.cased_wordpiece(wordpiece),
        "characters": recipes.build_characters(unk_token="<unk>"),
        "characters-silent": recipes.build_characters(),
        "bytes": recipes.build_bytes(),
        "byte-level-lowercase": recipes.altered(byte_level, normalizer=lowercase),
        "byte-level-words": recipes.altered(byte_level, pre_tokenizer=words),
    }


@pytest.fixture(scope="session")
def variants(variant_backends: dict[str, Tokenizer]) -> dict[str, TextTokenizer]:
    """`TextTokenizer` of each variant."""
    return {name: load_tokenizer(backend, name) for name, backend in variant_backends.items()}


@pytest.fixture(scope="session")
def real(shared: Path) -> dict[str, TextTokenizer]:
    """Real tokenizers, each loaded on first use."""

    class Loaded(dict[str, TextTokenizer]):
        def __missing__(self, name: str) -> TextTokenizer:
            file = shared / "tokenizers" / name / "tokenizer.json"
            if not file.is_file():
                pytest.skip(f"needs {file}")
            self[name] = load_tokenizer(Tokenizer.from_file(str(file)), name)
            return self[name]

    return Loaded()
