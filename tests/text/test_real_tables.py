# SPDX-License-Identifier: Apache-2.0
"""Byte tables of real tokenizers, from the shared folder or from an installed library."""

import json
from pathlib import Path

import pytest
from contexts import Family
from laws import TEXTS, assert_exact, assert_written_as_by_the_decoder, not_text
from recipes import mistral_files
from tokenizers import Tokenizer

from vllm_hetero_spec.text.loading import load_tokenizer


def real_names(shared: Path) -> list[str]:
    return sorted(path.parent.name for path in shared.glob("tokenizers/*/tokenizer.json"))


def test_bytes_of_real_tokenizers(real: Family, shared: Path) -> None:
    for tokenizer in map(real.__getitem__, real_names(shared)):
        for text in TEXTS:
            assert_exact(tokenizer, text)
            assert not tokenizer.lost_bytes(text, tokenizer.encode(text))
        assert not tokenizer.lossy_reason


def test_bytes_of_sentencepiece_files(shared: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    files = sorted(shared.glob("tokenizers/*/tokenizer.model"))
    for file in files:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
        tokenizer = load_tokenizer(processor, f"{file.parent.name}.model")
        for text in TEXTS:
            assert_exact(tokenizer, text)
    assert len(files) >= 2


@pytest.mark.parametrize("file", mistral_files(), ids=lambda file: file.name)
def test_bytes_of_mistral_files(file: Path) -> None:
    mistral = pytest.importorskip("mistral_common.tokens.tokenizers.mistral")
    original = mistral.MistralTokenizer.from_file(str(file))
    tokenizer = load_tokenizer(original, file.name)
    for text in TEXTS:
        assert_exact(tokenizer, text)
    core = original.instruct_tokenizer.tokenizer
    text = "Hello, wide world: 中文\n"
    own = core.encode(text, bos=True, eos=False)
    prefix = " " * tokenizer.leading_space.applies(first=True)
    assert own == [tokenizer.bos_id, *tokenizer.encode(prefix + text)]
    assert tokenizer.adds_bos
    assert not tokenizer.lossy_reason
    assert [i for i, data in enumerate(tokenizer.token_bytes) if data] == [
        i for i in range(core.n_words) if i not in tokenizer.special_text
    ]


def test_raw_ids_are_the_tokenizers_own(real: Family, shared: Path) -> None:
    """Raw encoding returns the library's own ids. Only the dummy prefix is added separately."""
    for name in real_names(shared)[::3]:
        tokenizer = real[name]
        backend = Tokenizer.from_file(str(shared / "tokenizers" / name / "tokenizer.json"))
        for text in ("The quick brown fox 中文 👍", "x = [1, 2]\n\n    y\t= x"):
            prefix = " " if tokenizer.leading_space.applies(first=True) else ""
            own = backend.encode(text, add_special_tokens=False).ids
            assert tokenizer.encode(prefix + text) == own
            assert tokenizer.encode_batch([prefix + text] * 900) == [own] * 900


# Ids without text. Each run has its first id and the id after its last one.
SPECIAL_IDS = {
    "codellama": [(0, 3), (32007, 32011)],
    "deepseek-r1-distill-qwen": [(151643, 151644), (151646, 151647), (151650, 151657)],
    "gpt2": [(50256, 50257)],
    "llama-2": [(0, 3)],
    "llama-3.1": [(128000, 128256)],
    "mistral-v3-32768": [(0, 771)],
    "phi-3-medium-128k-instruct": [(0, 2), (32000, 32011)],
    "phi-4": [(100256, 100352)],
    "qwen2": [(151643, 151646)],
    "qwen2.5": [(151643, 151657)],
    "starcoder": [(0, 19)],
    "starcoder2": [(0, 38)],
    "tinyllamas-512": [(0, 3)],
}


@pytest.mark.parametrize("name", SPECIAL_IDS)
def test_every_id_is_text_or_special(real: Family, shared: Path, name: str) -> None:
    tokenizer = real[name]
    runs = [range(*run) for run in SPECIAL_IDS[name]]
    assert tokenizer.special_ids == {i for run in runs for i in run} == set(tokenizer.special_text)
    assert [i for i, data in enumerate(tokenizer.token_bytes) if not data] == sorted(
        tokenizer.special_ids
    )
    spec = json.loads((shared / "tokenizers" / name / "tokenizer.json").read_text())
    for token in spec["added_tokens"]:
        if token["special"]:
            assert tokenizer.special_text[token["id"]] == token["content"]
        else:
            assert tokenizer.token_bytes[token["id"]] == token["content"].encode()
            assert tokenizer.encode(token["content"]) == [token["id"]]


@pytest.mark.parametrize("name", ["qwen2.5", "phi-3-medium-128k-instruct", "mistral-v3-32768"])
def test_real_tokens_are_written_as_by_the_decoder(real: Family, shared: Path, name: str) -> None:
    backend = Tokenizer.from_file(str(shared / "tokenizers" / name / "tokenizer.json"))
    assert_written_as_by_the_decoder(real[name], backend, "x", step=7)


@pytest.mark.parametrize("name", ["qwen2", "llama-3.1", "gpt2", "phi-4", "starcoder2"])
def test_parts_of_characters_in_real_vocabularies(real: Family, name: str) -> None:
    """Each one is encoded to itself. At most two that begin or end in punctuation are not."""
    tokenizer = real[name]
    broken = not_text(tokenizer)
    other = 0
    for token_id in broken:
        ids = tokenizer.encode_bytes(tokenizer.token_bytes[token_id])
        assert tokenizer.decode_bytes(ids) == tokenizer.token_bytes[token_id]
        other += ids != [token_id]
    assert len(broken) > 300
    assert other <= 2


def test_transformers_wrappers(shared: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name in ("tinyllamas-512", "phi-3-medium-128k-instruct", "starcoder"):
        wrapper = transformers.AutoTokenizer.from_pretrained(shared / "tokenizers" / name)
        tokenizer = load_tokenizer(wrapper)
        assert (tokenizer.bos_id, tokenizer.eos_id) == (wrapper.bos_token_id, wrapper.eos_token_id)
        own = wrapper.encode("Hello world\n", add_special_tokens=True)
        bos = [tokenizer.bos_id] if tokenizer.adds_bos else []
        space = " " if tokenizer.leading_space.applies(first=True) else ""
        assert own == [*bos, *tokenizer.encode(space + "Hello world\n")]
        assert tokenizer.special_ids >= set(wrapper.all_special_ids)
