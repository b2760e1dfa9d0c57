# SPDX-License-Identifier: Apache-2.0
"""Train the small models of this project, without a network.

`pair` trains the demo pair on the Python standard library, in about 80 minutes on one core (Zen 4);
the drafter also learns continuations of the target. `long` trains a Llama further on whole files,
and cuts prompts from other files.

    OMP_NUM_THREADS=1 python scripts/train_models.py pair examples/demo
    python scripts/train_models.py long TARGET examples/bench/long/target --prompt-lengths 2000
"""

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from _demo_corpus import Corpus, conversations, standard_library
from _demo_tokenizers import TokenizerKind, end_ids, restyled, train_tokenizer
from rich.console import Console
from rich.progress import track
from torch.nn import functional
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as Tokenizer

HEAD_DIM = 64  # supported by every attention backend of vLLM
MAX_POSITIONS = 2048
_LONG_POSITIONS, _ROPE_THETA = 16384, 80000.0
_ROWS, _SEQUENCE = 8, 256  # rows per step, and tokens per row
_TEXTS, _PROMPT, _CONTINUATION = 96, 64, 128  # texts per batch; tokens of prompt and continuation
_RATE, _LONG_RATE = 6e-3, 5e-4  # peak learning rates
_WARMUP, _FLOOR = 0.05, 0.02  # share of the steps; share of the peak learning rate
_PROMPTS = 8  # per length
_BEFORE_PROMPT = 200  # tokens of a file before its first prompt, and between prompts
LONG_HELD_OUT = 60  # files; few of them are long enough for a long prompt
_FAST_BFLOAT16 = torch.cpu._is_avx512_bf16_supported()  # other processors emulate it


@dataclass(frozen=True)
class ModelSpec:
    """A tokenizer and a Llama of `heads` * 64 hidden units with tied embeddings."""

    tokenizer: TokenizerKind
    vocab_size: int
    layers: int
    heads: int

    def config(self, tokenizer: Tokenizer) -> LlamaConfig:
        hidden = self.heads * HEAD_DIM
        return LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=hidden, head_dim=HEAD_DIM,
            intermediate_size=math.ceil(hidden * 8 / 3 / 64) * 64, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True, initializer_range=0.05,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip


class Steps(NamedTuple):
    """Optimizer steps of each stage; `continuations` counts batches of texts."""

    target: int
    continuations: int
    drafter: int


TARGET = ModelSpec("byte_bpe", vocab_size=4096, layers=4, heads=4)
DRAFTER = ModelSpec("sentencepiece", vocab_size=2048, layers=2, heads=2)
STEPS = Steps(target=5000, continuations=60, drafter=8000)


def train_pair(
    out: Path, target: ModelSpec, drafter: ModelSpec, steps: Steps, corpus: Corpus | None = None
) -> None:
    """Train a pair, then move it to `out/target` and `out/drafter`, replacing older models."""
    corpus = corpus or standard_library()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".training-") as folder:
        scratch = Path(folder)
        train(scratch / "target", target, corpus, steps.target)
        texts = continuations(scratch / "target", corpus.train, steps.continuations)
        imitate = [restyled(text, target.tokenizer, drafter.tokenizer) for text in texts]
        train(scratch / "drafter", drafter, corpus, steps.drafter, imitate)
        for role in ("target", "drafter"):
            shutil.rmtree(out / role, ignore_errors=True)
            (scratch / role).rename(out / role)


def train(
    out: Path, spec: ModelSpec, corpus: Corpus, steps: int, imitate: Sequence[str] = ()
) -> list[float]:
    """Train `spec` on `corpus`, save model and tokenizer to `out`, and return the losses.

    Conversations in the model's chat template are added to the texts. If there are texts to
    `imitate`, half of every batch is cut from them.
    """
    torch.manual_seed(0)
    tokenizer = train_tokenizer(spec.tokenizer, corpus.train, spec.vocab_size)
    read = with_conversations(tokenizer, corpus.train)
    streams = [token_stream(tokenizer, texts) for texts in (read, imitate) if texts]
    model = LlamaForCausalLM(spec.config(tokenizer)).train()
    # Muon needs a third of the steps that AdamW alone needs on this corpus.
    matrices = [each for each in model.model.layers.parameters() if each.ndim == 2]
    others = [each for each in model.parameters() if all(each is not one for one in matrices)]
    muon = torch.optim.Muon(matrices, lr=_RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    draw = partial(_batch, streams, tokenizer, _ROWS, _SEQUENCE)
    losses = _fit(model, [muon, _adamw(others, _RATE)], draw, steps, out.name)
    model.eval().to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end_ids(spec.tokenizer, tokenizer)
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return losses


def continuations(folder: Path, texts: Sequence[str], batches: int) -> list[str]:
    """Greedy continuations of excerpts of `texts`, for sequence-level distillation."""
    generator = torch.Generator().manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dtype = torch.bfloat16 if _FAST_BFLOAT16 else torch.float32
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    stream = token_stream(tokenizer, with_conversations(tokenizer, texts))
    continued: list[str] = []
    for _ in _track(batches, "continuations"):
        starts = torch.randint(len(stream) - _PROMPT, (_TEXTS, 1), generator=generator)
        prompts = stream[starts + torch.arange(_PROMPT)]
        rows = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=False,
            max_new_tokens=_CONTINUATION, pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        decoded = tokenizer.batch_decode(rows, skip_special_tokens=False)
        continued += [text.replace(tokenizer.eos_token, "") for text in decoded]
    return continued


def train_further(
    folder: Path, out: Path, corpus: Corpus, steps: int, sequence: int
) -> list[float]:
    """Train the Llama in `folder` to read long texts, save it to `out`, and return its losses."""
    torch.manual_seed(0)
    tokenizer, config = AutoTokenizer.from_pretrained(folder), LlamaConfig.from_pretrained(folder)
    config.max_position_embeddings = max(_LONG_POSITIONS, sequence)
    config.rope_parameters = {"rope_type": "default", "rope_theta": _ROPE_THETA}
    model = LlamaForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).train()
    streams = [token_stream(tokenizer, corpus.train)]
    draw = partial(_batch, streams, tokenizer, 1, sequence)
    losses = _fit(model, [_adamw(model.parameters(), _LONG_RATE)], draw, steps, "steps")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return losses


def cut_prompts(folder: Path, texts: Iterable[str], length: int) -> list[str]:
    """Cut up to 8 prompts of `length` tokens of the model in `folder`, spread over all texts."""
    tokenizer, found = AutoTokenizer.from_pretrained(folder), list[str]()
    for text in texts:
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        places = offsets["offset_mapping"]
        for start in range(_BEFORE_PROMPT, len(places) - length, length + _BEFORE_PROMPT):
            found.append(text[places[start][0] : places[start + length][0]])
    return found[:: max(1, len(found) // _PROMPTS)][:_PROMPTS]


def with_conversations(tokenizer: Tokenizer, texts: Sequence[str]) -> list[str]:
    """Add conversations, cut from the texts and rendered in the tokenizer's chat template."""
    rendered = (tokenizer.apply_chat_template(m, tokenize=False) for m in conversations(texts))
    return [*texts, *map(str, rendered)]


def token_stream(tokenizer: Tokenizer, texts: Sequence[str]) -> torch.Tensor:
    """Join all texts to one int64 vector [tokens], with an EOS token after each."""
    encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in (*ids, tokenizer.eos_token_id)])


def _batch(
    streams: Sequence[torch.Tensor], tokenizer: Tokenizer, rows: int, sequence: int
) -> torch.Tensor:
    """Cut ids [rows, sequence] at random offsets, an equal share from each stream."""
    parts = []
    for stream in streams:
        starts = torch.randint(len(stream) - sequence, (rows // len(streams), 1))
        parts.append(stream[starts + torch.arange(sequence)])
    batch = torch.cat(parts)
    if tokenizer("")["input_ids"]:  # it adds a BOS token, with which prompts begin
        batch[:, 0] = tokenizer.bos_token_id
    return batch


def _fit(
    model: LlamaForCausalLM,
    optimizers: Sequence[torch.optim.Optimizer],
    draw: Callable[[], torch.Tensor],
    steps: int,
    name: str,
) -> list[float]:
    """Train on the rows that `draw` returns; return the loss of each step in nats per token."""
    groups = [(group, group["lr"]) for each in optimizers for group in each.param_groups]
    losses = []
    for step in _track(steps, name):
        for group, peak in groups:
            group["lr"] = peak * _schedule(step / steps)
        rows = draw()
        with torch.autocast("cpu", torch.bfloat16, enabled=_FAST_BFLOAT16):
            logits = model(input_ids=rows, use_cache=False).logits
        loss = functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _schedule(spent: float) -> float:
    """Learning rate as a share of its peak: linear warm-up, then a cosine down to a floor."""
    if spent < _WARMUP:
        return (spent + 1e-3) / (_WARMUP + 1e-3)
    cosine = (1 + math.cos(math.pi * (spent - _WARMUP) / (1 - _WARMUP))) / 2
    return _FLOOR + (1 - _FLOOR) * cosine


def _adamw(parameters: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def _track(steps: int, name: str) -> Iterable[int]:
    return track(range(steps), name, console=Console(stderr=True), transient=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    pair = commands.add_parser("pair", help="the two models of the demo")
    pair.add_argument("out", type=Path, help="gets target/ and drafter/")
    long = commands.add_parser("long", help="a model that reads long texts, and prompts for it")
    long.add_argument("model", type=Path, help="folder of a Llama with its tokenizer")
    long.add_argument("out", type=Path, help="folder of the result; prompts are put beside it")
    long.add_argument("--sequence", type=int, default=4096, help="tokens of a step")
    long.add_argument("--steps", type=int, default=150)
    long.add_argument("--prompt-lengths", type=int, nargs="*", default=[], help="in tokens")
    given = parser.parse_args()
    if given.command == "pair":
        train_pair(given.out, TARGET, DRAFTER, STEPS)
        return 0
    corpus = standard_library(LONG_HELD_OUT)
    losses = train_further(given.model, given.out, corpus, given.steps, given.sequence)
    print(f"{given.out}: {losses[0]:.2f} nats per token at first, {losses[-1]:.2f} at last")
    for length in given.prompt_lengths:
        prompts = cut_prompts(given.out, corpus.heldout.values(), length)
        file = given.out.parent / f"prompts-{length}.jsonl"
        file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
        print(f"{file}: {len(prompts)} prompts of {length} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
