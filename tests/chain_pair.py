# SPDX-License-Identifier: Apache-2.0
"""A target and a drafter whose weights are written down: the same on every machine.

Both go through a chain of letters: what a token's last letter is decides, up to what a weak
attention adds of the text before, how likely each token is to follow. Their tokenizers cut the
letters differently, and the drafter knows nothing of two of them. So drafts are accepted and
rejected, translated and corrected, and how often they should be can be computed.
"""

import math
import random
from pathlib import Path
from typing import Any

import torch
from _demo_tokenizers import TokenizerKind, train_tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from vllm_hetero_spec.text.loading import load_tokenizer

LETTERS = "abcdef "
UNKNOWN = "be"  # letters that the drafter never writes
PROMPT = "abd fac dabc fabd cdab fa bdc abcd fab"
_HIDDEN = 64
_NEVER = -30.0
# How likely the next letters in the row of LETTERS follow; no two the same, so that nothing ties.
_STEPS = {1: 0.53, 2: 0.29, 4: 0.17, 5: 0.01}


def build(folder: Path) -> Path:
    """Make `target/`, `drafter/` and `garbled/`, a drafter of random weights, in a folder."""
    _save(folder / "target", "byte_bpe", vocab_size=300, layers=2, without="", seed=1)
    _save(folder / "drafter", "sentencepiece", vocab_size=400, layers=1, without=UNKNOWN, seed=2)
    _save(folder / "garbled", "sentencepiece", vocab_size=400, layers=1, without=None, seed=3)
    return folder


def pieces_of(tokenizer: Any) -> list[str]:
    """The letters of every token; nothing for special tokens and those that stand for bytes."""
    read = load_tokenizer(tokenizer, "chain").token_bytes
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    plain = [not name.startswith("<") for name in names]
    return [data.decode("latin-1") if keep else "" for data, keep in zip(read, plain, strict=True)]


def unknown(folder: Path) -> set[int]:
    """Tokens of a model with a letter that the drafter never writes."""
    pieces = pieces_of(AutoTokenizer.from_pretrained(folder))
    return {token for token, piece in enumerate(pieces) if set(piece) & set(UNKNOWN)}


def _text() -> list[str]:
    """What the tokenizers learn from."""
    draw = random.Random(0)
    place, found = 0, []
    for _ in range(20_000):
        place += draw.choices(list(_STEPS), list(_STEPS.values()))[0]
        found.append(LETTERS[place % len(LETTERS)])
    return ["".join(found[start : start + 500]) for start in range(0, len(found), 500)]


def _likelihood(piece: str, before: int, without: str) -> float:
    """Log-probability of a token's letters after the letter at place `before`."""
    total = 0.0
    for letter in piece:
        if letter not in LETTERS or letter in without:
            return _NEVER
        place = LETTERS.index(letter)
        step = _STEPS.get((place - before) % len(LETTERS), 1e-4)
        # A little of its own for each pair of letters.
        total += math.log(step) + 0.02 * ((3 * place + 5 * before) % 7)
        before = place
    return total if piece else _NEVER


def _save(
    out: Path, kind: TokenizerKind, *, vocab_size: int, layers: int, without: str | None, seed: int
) -> None:
    """Save a model that leaves letters out; random weights where `without` is None."""
    tokenizer = train_tokenizer(kind, _text(), vocab_size)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=_HIDDEN,
        intermediate_size=_HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=2,  # two ranks may share it
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.05)
        if without is not None:
            _write_chain(model, pieces_of(tokenizer), without)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _write_chain(model: LlamaForCausalLM, pieces: list[str], without: str) -> None:
    """The first columns of the hidden state say which letter was the last."""
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.zero_()
        layer.self_attn.o_proj.weight.mul_(0.6)
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    embedding.zero_()
    head.zero_()
    for token, piece in enumerate(pieces):
        embedding[token, max(0, LETTERS.find(piece[-1:] or " "))] = 1.0
        for before in range(len(LETTERS)):
            # The norm before the head makes the hidden state this much longer.
            head[token, before] = _likelihood(piece, before, without) / _HIDDEN**0.5
