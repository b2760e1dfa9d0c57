# SPDX-License-Identifier: Apache-2.0
"""Train a small causal language model further, until it writes a whole draft in one forward.

A parallel drafter (PARD, arXiv 2504.18583) reads mask tokens behind the text. The logits of the
last token and of S - 1 masks predict the next S tokens. Training cuts a text at many places,
appends masks to each cut, and hides the cuts from each other. The weight of a prediction falls with
its place. The model also trains on the text itself, so that it still reads text as before.

    python examples/parallel/adapt.py DRAFTER OUT --texts FOLDER --target TARGET --steps 3000

`--texts` are files, or folders whose .py, .md and .txt files are read. With `--target`, half of
each batch are continuations that the target writes: the drafter has to predict such texts.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

ROWS, SEQUENCE, CUTS = 8, 256, 40  # texts per step, tokens per text, cuts per text
FALL = 0.8  # weight of a place, relative to the one before
PROMPT, CONTINUATION, TEXTS = 64, 128, 96  # tokens of both; continuations in one batch
KINDS = {".py", ".md", ".txt"}


def read(paths: Sequence[Path]) -> list[str]:
    """Read the named files, and the text files of folders at any depth."""
    found = {path for path in paths if path.is_file()}
    found |= {file for path in paths for file in path.rglob("*") if file.suffix in KINDS}
    texts = [file.read_text(encoding="utf-8", errors="ignore") for file in sorted(found)]
    if not any(texts):
        sys.exit("error: --texts contains no text; name files, or folders with .py, .md or .txt")
    return texts


def stream(tokenizer: Any, texts: Sequence[str]) -> torch.Tensor:
    """Join all texts to one int64 vector [tokens], with an end token behind each."""
    encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in (*ids, tokenizer.eos_token_id)])


def cut(tokens: torch.Tensor, length: int, rows: int) -> torch.Tensor:
    """Cut ids [rows, length] at random offsets."""
    starts = torch.randint(len(tokens) - length, (rows, 1))
    return tokens[starts + torch.arange(length)]


def continuations(folder: str, texts: Sequence[str], batches: int) -> list[str]:
    """Return texts that the target writes behind excerpts, half greedily and half sampled."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens, found = stream(tokenizer, texts), list[str]()
    for batch in track(range(batches), "texts of the target"):
        prompts = cut(tokens, PROMPT, TEXTS)
        rows = target.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=batch % 2 == 1,
            max_new_tokens=CONTINUATION, pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        found += tokenizer.batch_decode(rows, skip_special_tokens=True)
    return found


def add_mask(model: Any, tokenizer: Any, given: int | None) -> int:
    """Return the id of the mask token; by default a new one, which may need an embedding row."""
    mask = len(tokenizer) if given is None else given
    if model.get_input_embeddings().num_embeddings <= mask:
        model.resize_token_embeddings(mask + 1)
    model.config.pard_token = mask
    return mask


def layout(cuts: torch.Tensor, length: int, places: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions [N] and visibility [N, N] of a text and of the masks behind each cut.

    `cuts` has the index of the last token in front of each cut. The text comes first.
    """
    text, masks = torch.arange(length), places - 1
    behind = cuts[:, None] + torch.arange(1, places)
    positions = torch.cat([text, behind.flatten()])
    last = torch.cat([text, cuts.repeat_interleave(masks)])  # last token of the text that is seen
    of = torch.cat([torch.full((length,), -1), torch.arange(len(cuts)).repeat_interleave(masks)])
    seen_text = (of == -1)[None] & (positions[None] <= last[:, None])
    seen_masks = (of[:, None] == of[None]) & (of != -1)[None]
    return positions, seen_text | (seen_masks & (positions[None] <= positions[:, None]))


def losses(model: Any, rows: torch.Tensor, mask: int, places: int) -> torch.Tensor:
    """Return the mean loss at each place, [places], in nats per token, for texts [rows, length]."""
    count, length = rows.shape
    cuts = torch.randperm(length - places)[:CUTS]
    positions, seen = layout(cuts, length, places)
    ids = torch.cat([rows, torch.full((count, len(cuts) * (places - 1)), mask)], 1)
    logits = model(
        input_ids=ids, position_ids=positions.expand(count, -1),
        attention_mask=seen.expand(count, 1, -1, -1), use_cache=False,
    ).logits.float()  # fmt: skip
    own = functional.cross_entropy(logits[:, : length - 1].flatten(0, 1), rows[:, 1:].flatten())
    wanted = rows[:, cuts[:, None] + torch.arange(2, places + 1)]  # [rows, cuts, places - 1]
    masked = logits[:, length:].flatten(0, 1)
    each = functional.cross_entropy(masked, wanted.flatten(), reduction="none")
    return torch.cat([own[None], each.view(-1, places - 1).mean(0)])


def optimizers(model: Any, rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for all other parameters."""
    ends = {id(of.weight) for of in (model.get_input_embeddings(), model.get_output_embeddings())}
    inner = [each.ndim == 2 and id(each) not in ends for each in model.parameters()]
    matrices = [each for each, is_inner in zip(model.parameters(), inner, strict=True) if is_inner]
    others = [
        each for each, is_inner in zip(model.parameters(), inner, strict=True) if not is_inner
    ]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, weight_decay=0.0, fused=True),
    ]


def draws(streams: Sequence[torch.Tensor], steps: int) -> Iterator[torch.Tensor]:
    """Yield batches of texts, an equal share of each stream."""
    for _ in range(steps):
        yield torch.cat([cut(tokens, SEQUENCE, ROWS // len(streams)) for tokens in streams])


def adapt(given: argparse.Namespace) -> torch.Tensor:
    """Train, save the drafter, and return its mean losses by place over the last tenth."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(given.drafter)
    model = AutoModelForCausalLM.from_pretrained(given.drafter, dtype=torch.float32).train()
    texts = read(given.texts)
    written = continuations(given.target, texts, given.batches) if given.target else []
    streams = [stream(tokenizer, each) for each in (texts, written) if each]
    mask, weights = add_mask(model, tokenizer, given.mask), FALL ** torch.arange(given.places)
    fitters, warm = optimizers(model, given.rate), max(1, given.steps // 20)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            each, lambda at: min((at + 1) / warm, max(0.02, 1 - (at - warm) / given.steps))
        )
        for each in fitters
    ]
    kept = []
    for rows in track(draws(streams, given.steps), "steps", given.steps):
        loss = losses(model, rows, mask, given.places)
        (loss @ weights / weights.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in (*fitters, *schedules):
            each.step()
        model.zero_grad()
        kept.append(loss.detach())
    model.eval().to(torch.bfloat16).save_pretrained(given.out)
    tokenizer.save_pretrained(given.out)
    return torch.stack(kept[-max(1, len(kept) // 10) :]).mean(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("drafter", help="folder or name of a causal language model")
    parser.add_argument("out", type=Path, help="folder of the parallel drafter")
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--target", help="folder or name of the target")
    parser.add_argument("--places", type=int, default=8, help="tokens of one forward")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batches", type=int, default=40, help="of the target's texts")
    parser.add_argument("--mask", type=int, help="id of a token that no text contains")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    found = adapt(parser.parse_args())
    print("nats per token, by place:", " ".join(f"{loss:.2f}" for loss in found.tolist()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
