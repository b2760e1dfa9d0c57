# SPDX-License-Identifier: Apache-2.0
"""Measures what a drafter reads and keeps of long texts, by its `context`: counts, no times.

Many requests of long prompts are served at once, by one engine for each context. What a drafter
holds does not hang on what the target says, so that a random model of one small layer with the
target's tokenizer stands in for it.

    python scripts/measure_context.py --target DIR --drafter DIR --contexts 512 1024 12000
"""

import argparse
import multiprocessing
import os
import sys
import sysconfig
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # steps are taken in this process
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from rich.console import Console
from rich.progress import track

_COLUMNS = ("context", "KV blocks held at most", "MiB of them", "drafter tokens read", "drafts")
_TOKENS = 32  # written by each request


def stand_in(target: Path, folder: str) -> None:
    """A model that costs nothing, with the target's tokenizer and length."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    length = AutoConfig.from_pretrained(target).max_position_embeddings
    tokenizer = AutoTokenizer.from_pretrained(target)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=length,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def long_prompts(target: Path, count: int, length: int) -> list[list[int]]:
    """Token ids of Python's own library, cut into pieces."""
    from transformers import AutoTokenizer

    tokenizer, ids = AutoTokenizer.from_pretrained(target), list[int]()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        ids += tokenizer(file.read_text(errors="replace"), add_special_tokens=False).input_ids
        if len(ids) >= count * length:
            break
    return [ids[start : start + length] for start in range(0, count * length, length)]


def serve(
    target: str, drafter: str, context: int, prompts: list[list[int]], pool: int
) -> list[str]:
    """A line of the table, from an engine in a process of its own."""
    from vllm import LLM, SamplingParams

    from vllm_hetero_spec import read_stats

    speculative = {
        "method": "slem", "model": drafter, "num_speculative_tokens": 4, "controller": "fixed",
        "context": context, "kv_cache_memory_bytes": pool,
    }  # fmt: skip
    length = max(map(len, prompts)) + _TOKENS
    llm = LLM(
        target,
        speculative_config=speculative,
        dtype="float32",
        enforce_eager=True,
        max_model_len=length + 16,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=32768,
        kv_cache_memory_bytes=1 << 30,
    )
    limits = SamplingParams(temperature=0, max_tokens=_TOKENS, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, limits)
    held = 0
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        held = max(held, read_stats(llm)["kv_blocks_held"])
    stats = read_stats(llm)
    taken = held * pool / stats["kv_blocks"] / (1 << 20)
    counts = (held, round(taken), stats["catch_up_tokens"], stats["drafts"])
    return [f"{count:,}" for count in (context, *counts)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", type=Path, required=True, help="its tokenizer and its length")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--contexts", type=int, nargs="+", required=True, help="drafter tokens")
    parser.add_argument("--requests", type=int, default=64, help="at once")
    parser.add_argument("--tokens", type=int, default=8192, help="of each prompt")
    parser.add_argument("--pool", type=int, default=4 << 30, help="bytes of the drafter's KV pool")
    options = parser.parse_args()
    prompts = long_prompts(options.target, options.requests, options.tokens)
    processes = multiprocessing.get_context("spawn")
    console = Console(stderr=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        stand_in(options.target, folder)
        for context in track(options.contexts, "contexts", console=console, transient=True):
            with processes.Pool(1) as pool:
                work = (folder, options.drafter, context, prompts, options.pool)
                rows.append(pool.apply(serve, work))
    for row in (_COLUMNS, ["---"] * len(_COLUMNS), *rows):
        print("| " + " | ".join(row) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
