# SPDX-License-Identifier: Apache-2.0
"""Build a target and a drafter with computed weights, which are the same on every machine.

Both are Markov chains of letters: the last letter decides the next one, with a weak influence of
earlier text through attention. Their tokenizers split letters differently, and the drafter never
writes two of the letters. So some drafts are rejected, and the exact probabilities can be computed.
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
# Distance in LETTERS -> probability of the next letter. All differ, so that there are no ties.
_STEPS = {1: 0.53, 2: 0.29, 4: 0.17, 5: 0.01}


def build(folder: Path) -> Path:
    """Write `target/`, `drafter/`, `garbled/` with random weights, and a drafter in `parallel/`.

    The parallel drafter reads a mask as the first letter; its later predictions are seldom right.
    """
    _save(folder / "target", "byte_bpe", vocab_size=300, layers=2, without="", seed=1)
    _save(folder / "drafter", "sentencepiece", vocab_size=400, layers=1, without=UNKNOWN, seed=2)
    _save(folder / "garbled", "sentencepiece", vocab_size=400, layers=1, without=None, seed=3)
    _save(
        folder / "parallel", "sentencepiece", 400, layers=1, without=UNKNOWN, seed=4, parallel=True
    )
    return folder


def pieces_of(tokenizer: Any) -> list[str]:
    """Return the letters of each token; "" for special tokens and byte tokens."""
    read = load_tokenizer(tokenizer, "chain").token_bytes
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    plain = [not name.startswith("<") for name in names]
    return [data.decode("latin-1") if keep else "" for data, keep in zip(read, plain, strict=True)]


def unknown(folder: Path) -> set[int]:
    """Return the tokens of a model that contain a letter which the drafter never writes."""
    pieces = pieces_of(AutoTokenizer.from_pretrained(folder))
    return {token for token, piece in enumerate(pieces) if set(piece) & set(UNKNOWN)}


def _text() -> list[str]:
    """Return the text from which the tokenizers are trained."""
    draw = random.Random(0)
    place, found = 0, []
    for _ in range(20_000):
        place += draw.choices(list(_STEPS), list(_STEPS.values()))[0]
        found.append(LETTERS[place % len(LETTERS)])
    return ["".join(found[start : start + 500]) for start in range(0, len(found), 500)]


def _likelihood(piece: str, before: int, without: str) -> float:
    """Return the log probability of a token's letters after the letter at place `before`."""
    total = 0.0
    for letter in piece:
        if letter not in LETTERS or letter in without:
            return _NEVER
        place = LETTERS.index(letter)
        step = _STEPS.get((place - before) % len(LETTERS), 1e-4)
        # A small term that depends on the pair of letters.
        total += math.log(step) + 0.02 * ((3 * place + 5 * before) % 7)
        before = place
    return total if piece else _NEVER


def _save(
    out: Path,
    kind: TokenizerKind,
    vocab_size: int,
    *,
    layers: int,
    without: str | None,
    seed: int,
    parallel: bool = False,
) -> None:
    """Save a model that never writes the letters of `without`; None gives random weights."""
    tokenizer = train_tokenizer(kind, _text(), vocab_size)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + parallel,
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
        **({"pard_token": len(tokenizer)} if parallel else {}),
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
    """Write weights for which the first columns of the hidden state encode the last letter."""
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.zero_()
        layer.self_attn.o_proj.weight.mul_(0.6)
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    embedding.zero_()
    head.zero_()
    embedding[len(pieces) :, 0] = 1.0  # a mask is read as the first letter
    for token, piece in enumerate(pieces):
        embedding[token, max(0, LETTERS.find(piece[-1:] or " "))] = 1.0
        for before in range(len(LETTERS)):
            # The norm before the head scales the hidden state by this factor.
            head[token, before] = _likelihood(piece, before, without) / _HIDDEN**0.5
