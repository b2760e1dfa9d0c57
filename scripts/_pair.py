# SPDX-License-Identifier: Apache-2.0
"""A pair of models to be served on a CPU: its arguments on the command line, and its engine's."""

import argparse
import sys
from pathlib import Path
from typing import Any

from vllm_hetero_spec.config import ConfigError
from vllm_hetero_spec.inputs.prompts import load_prompts

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 512 << 20,
}


def pair_parser(description: str) -> argparse.ArgumentParser:
    """A parser that knows target, drafter, method, prompts and where to keep results."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help='JSON lines with a "prompt"')
    parser.add_argument("--max-prompt-chars", type=int, default=300)
    parser.add_argument("--method", default="slem")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep everything measured")
    return parser


def prompts_of(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> list[str]:
    """The prompts that were asked for; ends the program where they cannot be read."""
    try:
        texts = load_prompts(arguments.prompts, sys.maxsize)
    except ConfigError as error:
        parser.error(str(error))
    return [text[: arguments.max_prompt_chars] for text in texts]
