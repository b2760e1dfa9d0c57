# SPDX-License-Identifier: Apache-2.0
"""Measures what bridging the chat templates of a pair is worth to the drafter.

The target answers each conversation greedily. The drafter's loss on that answer, in nats per byte,
is taken behind the prompt as bridged and behind the same prompt with the target's own markers.
Plain transformers forwards; no vLLM.

    python scripts/measure_chat_bridge.py TARGET DRAFTER PROMPTS.jsonl

A line of PROMPTS holds "messages", or a "prompt" that becomes a user's turn.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from oracle_acceptance import greedy_decode, load
from rich.console import Console
from rich.progress import track
from torch.nn import functional
from transformers.utils.logging import disable_progress_bar

from vllm_hetero_spec.text.bridge import Bridge, make_bridge
from vllm_hetero_spec.text.chat_template import chat_of
from vllm_hetero_spec.text.loading import load_tokenizer


def reply_loss(model: Any, bridge: Bridge, prompt: Sequence[int], reply: Sequence[int]) -> float:
    """The drafter's loss in nats on the target's `reply`, behind the target's `prompt`."""
    context = bridge.open()
    context.append(prompt)
    kept = context.append(reply)
    row = torch.tensor([context.ids], device=model.device)
    with torch.inference_mode():
        logits = model(input_ids=row, use_cache=False).logits[0].float()
    loss = functional.cross_entropy(logits[kept - 1 : -1], row[0, kept:], reduction="sum")
    return loss.item()


def messages_of(line: str) -> list[dict[str, str]]:
    """The conversation on a line of prompts."""
    entry = json.loads(line)
    return entry.get("messages") or [{"role": "user", "content": entry["prompt"]}]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("prompts", type=Path, help='JSON lines with "messages" or a "prompt"')
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=96)
    arguments = parser.parse_args()
    disable_progress_bar()
    target_model, target = load(arguments.target)
    drafter_model, drafter = load(arguments.drafter)
    pair = load_tokenizer(target, "target"), load_tokenizer(drafter, "drafter")
    eos, drafter_eos = (
        [found] if isinstance(found := model.generation_config.eos_token_id, int) else found
        for model in (target_model, drafter_model)
    )
    bridges = {
        name: make_bridge(*pair, mode="text", target_eos=eos, drafter_eos=drafter_eos, chats=chats)
        for name, chats in (("bridged", (chat_of(target), chat_of(drafter))), ("unbridged", None))
    }
    chat = bridges["bridged"].chat
    if not chat.active:
        parser.error(str(chat))
    nats = dict.fromkeys(bridges, 0.0)
    prompt_bytes = reply_bytes = prompts = 0
    lines = arguments.prompts.read_text(encoding="utf-8").splitlines()[: arguments.num_prompts]
    progress = Console(stderr=True)
    for line in track(lines, "prompts", console=progress, transient=True):
        rendered = target.apply_chat_template(
            messages_of(line), add_generation_prompt=True, tokenize=False
        )
        ids = target.encode(rendered, add_special_tokens=False)
        reply = greedy_decode(target_model, ids, arguments.max_tokens, set(eos))
        reply = [token_id for token_id in reply if token_id not in eos]
        if not reply:
            continue
        for name, bridge in bridges.items():
            nats[name] += reply_loss(drafter_model, bridge, ids, reply)
        prompts += 1
        prompt_bytes += len(rendered.encode())
        reply_bytes += len(pair[0].decode_bytes(reply))
    console = Console(highlight=False)
    console.print(f"{prompts} prompts of {prompt_bytes:,} bytes, {reply_bytes:,} bytes of replies")
    console.print(
        f"markers that became the drafter's: {chat.counts['bytes']:,} bytes, "
        f"{chat.counts['bytes'] / prompt_bytes:.1%} of the prompts"
    )
    for name, loss in nats.items():
        console.print(f"drafter's loss on the replies, {name}: {loss / reply_bytes:.4f} nats/byte")
    return 0


if __name__ == "__main__":
    sys.exit(main())
