# SPDX-License-Identifier: Apache-2.0
"""Build a target and a parallel drafter that both write one text, which their positions decide.

The text consists of words of two letters. A token of the target is a space and a word; a token of
the drafter is one letter or a space. The position of a token alone decides the next one, so a mask
at its right position predicts the right token, and the drafter is always right.
"""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

LETTERS = "abcd"
WORDS = 320  # of the text
_SPACE = "\u0120"  # in the byte-level alphabet
_HIDDEN, _POSITIONS = 64, 1024
_LOUD = 30.0  # weight of the position in the hidden state; that of the token is 1


def text() -> str:
    """Return the text: ` ab dc ...`."""
    draw = random.Random(3)
    return "".join(f" {draw.choice(LETTERS)}{draw.choice(LETTERS)}" for _ in range(WORDS))


def build(folder: Path) -> Path:
    """Write `target/` and `parallel/`."""
    pairs = [(a, b) for a in LETTERS for b in LETTERS]
    words = [(a, b) for a, b in pairs] + [(_SPACE, a + b) for a, b in pairs]
    _save(folder / "target", _tokenizer(words))
    _save(folder / "parallel", _tokenizer([]), parallel=True)
    return folder


def _tokenizer(merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges), "<end>"]
    of = Tokenizer(models.BPE({name: id for id, name in enumerate(names)}, merges))
    of.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    of.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=of, eos_token="<end>", bos_token="<end>")


def _save(out: Path, tokenizer: PreTrainedTokenizerFast, *, parallel: bool = False) -> None:
    """Save a model with attention and MLP of zeros: its hidden state is token plus position."""
    ids = tokenizer.encode(text(), add_special_tokens=False)
    used = sorted(set(ids))
    more = {"pard_token": len(tokenizer)} if parallel else {}
    config = GPT2Config(
        vocab_size=len(tokenizer) + parallel, n_positions=_POSITIONS, n_embd=_HIDDEN,
        n_layer=1, n_head=1, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, **more,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for part in (model.transformer.h[0].attn.c_proj, model.transformer.h[0].mlp.c_proj):
            part.weight.zero_()
            part.bias.zero_()
        tokens, places = model.transformer.wte.weight, model.transformer.wpe.weight
        tokens.zero_()
        places.zero_()
        tokens[used, range(len(used))] = 1.0
        for place, following in enumerate(ids[1:]):
            places[place, used.index(following)] = _LOUD
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
