# SPDX-License-Identifier: Apache-2.0
"""Trains a small Llama further until it reads long texts, and cuts long prompts from held-out ones.

What a bounded context costs can only be seen where the text far back matters. The models that are
at hand end at 2048 positions: here their rotary base is raised, and they read whole files.

    python scripts/train_long_models.py DRAFTER examples/bench/long/drafter --sequence 8192
    python scripts/train_long_models.py TARGET examples/bench/long/target --sequence 4096 \
        --prompt-lengths 2000 8000
"""

import argparse
import json
import random
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch.nn import functional
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

HELD_OUT = (
    "turtle.py", "unittest/mock.py", "idlelib/undo.py", "idlelib/grep.py", "tkinter/dnd.py",
    "unittest/async_case.py", "multiprocessing/context.py", "distutils/core.py",
)  # fmt: skip
_SHORTEST = 2000  # characters of a text that is read
_PIECE = 1024  # places whose logits are held at a time
_FROM = 200  # tokens of a file in front of its first prompt
_MAX_POSITIONS = 16384


def split_texts(folder: Path, held_out: Sequence[str]) -> tuple[list[str], list[str]]:
    """Texts to read, and those held out, named by the ends of their paths."""
    read, held = list[str](), list[str]()
    for file in sorted(folder.rglob("*.py")):
        path = f"/{file.relative_to(folder).as_posix()}"
        if "/site-packages/" in path or "/test/" in path:
            continue
        ours = any(path.endswith(f"/{name}") for name in held_out)
        text = file.read_text(encoding="utf-8", errors="replace")
        if len(text) > _SHORTEST:
            (held if ours else read).append(text)
    return read, held


def cut_prompts(tokenizer: Any, texts: Sequence[str], length: int, count: int) -> list[str]:
    """Up to `count` pieces of `length` tokens, spread over all texts."""
    found = []
    for text in texts:
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        places = offsets["offset_mapping"]
        for start in range(_FROM, len(places) - length, length + _FROM):
            found.append(text[places[start][0] : places[start + length][0]])
    return found[:: max(1, len(found) // count)][:count]


def sample(texts: Sequence[list[int]], sequence: int) -> torch.Tensor:
    """[1, sequence] ids: a piece of a file, others behind it where that is short; by length."""
    ids: list[int] = []
    while len(ids) < sequence:
        (text,) = random.choices(texts, [len(each) for each in texts])
        start = random.randrange(max(1, len(text) - sequence))
        ids += text[start : start + sequence]
    return torch.tensor([ids[:sequence]])


def backward(model: LlamaForCausalLM, ids: torch.Tensor) -> float:
    """Gradients of the mean loss, which is returned; never the logits of all places at once."""
    hidden = model.model(ids).last_hidden_state[0]
    cut = hidden.detach().requires_grad_()
    places, total = ids.shape[1] - 1, 0.0
    for first in range(0, places, _PIECE):
        end = min(places, first + _PIECE)
        logits = model.lm_head(cut[first:end])
        wanted = ids[0, first + 1 : end + 1]
        loss = functional.cross_entropy(logits, wanted, reduction="sum") / places
        loss.backward()
        total += loss.item()
    hidden.backward(cut.grad)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="folder of a Llama with its tokenizer")
    parser.add_argument("out", type=Path, help="folder of the result; prompts are put beside it")
    parser.add_argument("--texts", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--held-out", nargs="+", default=HELD_OUT, help="ends of paths")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens of a step")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--rope-theta", type=float, default=80000.0)
    parser.add_argument("--prompt-lengths", type=int, nargs="*", default=[], help="in tokens")
    parser.add_argument("--prompts", type=int, default=8, help="of each length")
    arguments = parser.parse_args()
    random.seed(0)
    read, held = split_texts(arguments.texts, arguments.held_out)
    if not read:
        parser.error(f"{arguments.texts} holds no *.py file of {_SHORTEST} characters or more.")
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    config = AutoConfig.from_pretrained(arguments.model)
    config.max_position_embeddings = max(_MAX_POSITIONS, arguments.sequence)
    config.rope_parameters = {"rope_type": "default", "rope_theta": arguments.rope_theta}
    model = LlamaForCausalLM.from_pretrained(arguments.model, config=config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.train().parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    texts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in read]
    console, losses = Console(stderr=True), list[float]()
    for step in track(range(arguments.steps), "steps", console=console, transient=True):
        left = max(0.05, 1 - step / arguments.steps) * min(1.0, (step + 1) / 10)
        for group in optimizer.param_groups:
            group["lr"] = arguments.learning_rate * left
        losses.append(backward(model, sample(texts, arguments.sequence)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    print(f"{arguments.out}: {losses[0]:.2f} nats per token at first, {losses[-1]:.2f} at last")
    for length in arguments.prompt_lengths:
        file = arguments.out.parent / f"prompts-{length}.jsonl"
        prompts = cut_prompts(tokenizer, held, length, arguments.prompts)
        lines = (json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        file.write_text("".join(lines), encoding="utf-8")
        print(f"{file}: {len(prompts)} prompts of {length} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
