# SPDX-License-Identifier: Apache-2.0
"""Train tokenizers of the two kinds that real models use.

`byte_bpe` is GPT-2's scheme: BPE merges bytes, which are written as printable letters.
`sentencepiece` is Llama-2's scheme: a space becomes "▁", and one "▁" is put in front of the text. A
character outside the vocabulary falls back to its UTF-8 bytes `<0x00>`..`<0xFF>`.
"""

import json
import re
from collections.abc import Sequence
from typing import Literal, get_args

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)  # fmt: skip
from transformers import PreTrainedTokenizerFast

TokenizerKind = Literal["byte_bpe", "sentencepiece"]
KINDS: tuple[TokenizerKind, ...] = get_args(TokenizerKind)

_END_OF_TEXT = "<|endoftext|>"
_UNK, _BOS, _EOS = "<unk>", "<s>", "</s>"
_BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
ROLES = ("system", "user", "assistant")
# Text before and after the role's name at the start of a turn, and the end of a turn.
_TURNS: dict[TokenizerKind, tuple[str, str, str]] = {
    "byte_bpe": ("<|im_start|>", "\n", "<|im_end|>"),
    "sentencepiece": ("<|", "|>\n", "<|end|>"),
}
_ALPHABET = 100  # characters with a token of their own; other characters fall back to bytes
# Pieces that SentencePiece training does not merge: words keep one leading space, as in " self",
# and the last space of an indentation belongs to the next word.
_PIECES = Regex(r"▁?\p{L}+|▁?\p{N}|▁?[^\n▁\p{L}\p{N}]+|\n+▁*(?=▁)|▁+(?=▁)|\n+|▁")


def train_tokenizer(
    kind: TokenizerKind, texts: Sequence[str], vocab_size: int
) -> PreTrainedTokenizerFast:
    """Train a tokenizer with up to `vocab_size` ids on `texts`."""
    build = _byte_bpe if kind == "byte_bpe" else _sentencepiece
    tokenizer, names = build(texts, vocab_size)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        chat_template=_chat_template(kind),
        **names,
    )


def turn_end(kind: TokenizerKind) -> str:
    return _TURNS[kind][2]


def end_ids(kind: TokenizerKind, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Ids that end a generation: the end of text and the end of a turn."""
    return tokenizer.convert_tokens_to_ids([tokenizer.eos_token, turn_end(kind)])


def restyled(text: str, source: TokenizerKind, kind: TokenizerKind) -> str:
    """Replace the turn markers of one kind in a rendered conversation by those of another."""
    if source == "sentencepiece":  # decoding keeps the space that was put in front of text
        text = re.sub(r"(<\|\w+\|>) ", r"\1", text)
    for role in ROLES:
        text = text.replace(_header(source, role), _header(kind, role))
    return text.replace(turn_end(source), turn_end(kind))


def _header(kind: TokenizerKind, role: str) -> str:
    before, after, _ = _TURNS[kind]
    return before + role + after


def _chat_template(kind: TokenizerKind) -> str:
    before, after, end = map(repr, _TURNS[kind])
    return (
        "{% for message in messages %}"
        f"{{{{ {before} + message['role'] + {after} + message['content'] + {end} + '\\n' }}}}"
        "{% endfor %}{% if add_generation_prompt %}"
        f"{{{{ {before} + 'assistant' + {after} }}}}"
        "{% endif %}"
    )


def _byte_bpe(texts: Sequence[str], vocab_size: int) -> tuple[Tokenizer, dict[str, str]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END_OF_TEXT, *_TURNS["byte_bpe"][::2]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer, {"bos_token": _END_OF_TEXT, "eos_token": _END_OF_TEXT}


def _sentencepiece(texts: Sequence[str], vocab_size: int) -> tuple[Tokenizer, dict[str, str]]:
    headers = [_header("sentencepiece", role).strip() for role in ROLES]
    special = [_UNK, _BOS, _EOS, *headers, turn_end("sentencepiece")]
    reserved = [*special, *_BYTE_TOKENS]
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizer
    learner.pre_tokenizer = pre_tokenizers.Split(_PIECES, "isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(reserved), limit_alphabet=_ALPHABET, show_progress=False
    )
    learner.train_from_iterator(texts, trainer)
    learned = json.loads(learner.to_str())["model"]
    pieces = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    # As in Llama-2's file, the tokenizer has no pre-tokenizer: only the vocabulary limits merges,
    # so a character may change the tokens of the text before it.
    model = models.BPE(
        vocab={piece: index for index, piece in enumerate([*reserved, *pieces])},
        merges=[tuple(merge) for merge in learned["merges"]],
        unk_token=_UNK, fuse_unk=True, byte_fallback=True,
    )  # fmt: skip
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.normalizer = normalizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_BOS} $A",
        pair=f"{_BOS} $A {_BOS} $B:1",
        special_tokens=[(_BOS, tokenizer.token_to_id(_BOS))],
    )
    return tokenizer, {"unk_token": _UNK, "bos_token": _BOS, "eos_token": _EOS}
