# SPDX-License-Identifier: Apache-2.0
"""Trains one tiny Llama on a corpus, and saves it whole."""

import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from _demo_chat import conversations
from _demo_corpus import Corpus
from _demo_muon import Muon
from _demo_tokenizers import TokenizerKind, end_ids, train_tokenizer
from torch.nn import functional
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

HEAD_DIM = 64  # every vLLM attention backend takes it
MAX_POSITIONS = 2048
_TOKENS = 2048  # of a step
_SEQUENCE = 256  # a row
_WARMUP, _FLOOR = 0.05, 0.02  # share of the steps; share of the peak learning rate
_HELDOUT_CHARACTERS = 2_000  # of each held-out text, for the loss


@dataclass(frozen=True)
class ModelSpec:
    """What to train: a tokenizer, and a Llama of `heads` * 64 hidden units with tied embeddings."""

    tokenizer: TokenizerKind
    vocab_size: int
    layers: int
    heads: int
    learning_rate: float = 6e-3

    def config(self, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
        hidden = self.heads * HEAD_DIM
        return LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=math.ceil(hidden * 8 / 3 / 64) * 64,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            head_dim=HEAD_DIM,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True,
            initializer_range=0.05,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )


def train(
    out: Path,
    spec: ModelSpec,
    corpus: Corpus,
    steps: int,
    *,
    imitate: Sequence[str] = (),
    seed: int = 0,
    report: Callable[[float, float], None] = lambda spent, loss: None,
) -> dict[str, Any]:
    """Train `spec` on `corpus`, save model and tokenizer to `out`, and return the figures.

    A small share of what it reads are conversations in its own chat template.

    Where there are texts to `imitate`, half of every batch is cut from them.
    `report(spent, loss)` is called after each step with the fraction of steps done and the step's
    loss in nats per token. The figures contain the parameter count, the steps, and the loss on the
    held-out texts in nats per byte, which compares across tokenizers.
    """
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(spec.tokenizer, corpus.train, spec.vocab_size)
    read = with_conversations(tokenizer, corpus.train)
    streams = [token_stream(tokenizer, texts) for texts in (read, imitate) if texts]
    model = LlamaForCausalLM(spec.config(tokenizer)).train()
    dtype = torch.bfloat16 if bfloat16_pays() else torch.float32
    optimizers = _optimizers(model, spec.learning_rate, dtype)
    for step in range(steps):
        spent = step / steps
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = spec.learning_rate * _schedule(spent)
        rows = _batch(streams, tokenizer, _SEQUENCE)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = model(input_ids=rows, use_cache=False).logits
        loss = functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        report(spent, loss.item())
    model.eval().to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=end_ids(spec.tokenizer, tokenizer),
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return {
        "spec": asdict(spec),
        "parameters": model.num_parameters(),
        "steps": steps,
        "tokens": steps * _TOKENS,
        "heldout_nats_per_byte": heldout_loss(model, tokenizer, corpus.heldout.values()),
    }


def _optimizers(
    model: LlamaForCausalLM, learning_rate: float, dtype: torch.dtype
) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings and norms.

    On this corpus Muon reaches in a third of the steps the loss that AdamW alone reaches; with
    minutes to train in, that is the difference between plausible code and word salad.
    """
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
    return [
        Muon(matrices, learning_rate, dtype),
        torch.optim.AdamW(
            others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        ),
    ]


@functools.cache
def bfloat16_pays() -> bool:
    """Whether this machine multiplies bfloat16 matrices faster than float32 ones.

    Processors with AVX512-BF16 or AMX do, several times over; others emulate it and lose.
    """

    def seconds(dtype: torch.dtype) -> float:
        left, right = torch.ones(1024, 256, dtype=dtype), torch.ones(256, 512, dtype=dtype)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            left @ right
            times.append(time.perf_counter() - start)
        return min(times)

    return seconds(torch.bfloat16) < 0.8 * seconds(torch.float32)


def heldout_loss(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]
) -> float:
    """Mean loss of `model` on the head of each text, in nats per byte of UTF-8."""
    model = model.float().eval()
    nats, size = 0.0, 0
    with torch.inference_mode():
        for text in texts:
            head = text[:_HELDOUT_CHARACTERS]
            ids = tokenizer(head, add_special_tokens=False)["input_ids"]
            # The start token makes the first piece of text a prediction too.
            row = torch.tensor([[tokenizer.bos_token_id, *ids][:MAX_POSITIONS]])
            logits = model(input_ids=row, use_cache=False).logits
            nats += functional.cross_entropy(logits[0, :-1], row[0, 1:], reduction="sum").item()
            size += len(head.encode())
    return nats / size


def _schedule(spent: float) -> float:
    """Learning rate as a fraction of its peak: linear warm-up, then a cosine down to a floor."""
    if spent < _WARMUP:
        return (spent + 1e-3) / (_WARMUP + 1e-3)
    cosine = (1 + math.cos(math.pi * (spent - _WARMUP) / (1 - _WARMUP))) / 2
    return _FLOOR + (1 - _FLOOR) * cosine


def with_conversations(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[str]:
    """The texts, and conversations cut from them in the tokenizer's chat template."""
    rendered = (tokenizer.apply_chat_template(m, tokenize=False) for m in conversations(texts))
    return [*texts, *map(str, rendered)]


def token_stream(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> torch.Tensor:
    """All texts as one int64 vector, an end-of-sequence token after each."""
    ids: list[int] = []
    for encoded in tokenizer(list(texts), add_special_tokens=False)["input_ids"]:
        ids.extend(encoded)
        ids.append(tokenizer.eos_token_id)
    return torch.tensor(ids)


def _batch(
    streams: Sequence[torch.Tensor], tokenizer: PreTrainedTokenizerFast, sequence: int
) -> torch.Tensor:
    """Rows from random offsets, [batch, sequence], an equal share from each stream.

    Where the tokenizer starts every text with a BOS token, so does every row: a model meets the
    cut-out text of a prompt behind that token and must have learned to.
    """
    parts = []
    for stream in streams:
        share = _TOKENS // sequence // len(streams)
        starts = torch.randint(len(stream) - sequence, (share, 1))
        parts.append(stream[starts + torch.arange(sequence)])
    rows = torch.cat(parts)
    if tokenizer("")["input_ids"]:
        rows[:, 0] = tokenizer.bos_token_id
    return rows
