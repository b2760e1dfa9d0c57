# SPDX-License-Identifier: Apache-2.0
"""What scripts of drafts that are made ahead are told of the pair and its texts."""

import argparse
import os
from pathlib import Path

from vllm_hetero_spec.errors import ConfigError
from vllm_hetero_spec.inputs.prompts import load_prompts


def pair_parser(description: str) -> argparse.ArgumentParser:
    """A parser of what all of them are told."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help='JSON lines with a "prompt"')
    parser.add_argument("--max-prompt-chars", type=int, default=400)
    parser.add_argument("--target-ms", type=float, default=40.0, help="a step of a target")
    parser.add_argument("--drafter-ms", type=float, default=5.0, help="a forward, at least")
    parser.add_argument("--cores", type=int, nargs=2, default=[0, 1], help="ours, the drafter's")
    parser.add_argument("--requests", type=int, default=4, help="of a round, each its own prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of each request")
    return parser


def parsed(
    parser: argparse.ArgumentParser, most: int | None
) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the prompts.

    Args:
        parser: From `pair_parser`.
        most: Prompts to take; None for one for each request.
    """
    options = parser.parse_args()
    try:
        texts = load_prompts(options.prompts, options.requests if most is None else most)
    except ConfigError as error:
        parser.error(str(error))
    options.target, options.drafter = map(os.path.abspath, (options.target, options.drafter))
    return options, [text[: options.max_prompt_chars] for text in texts]
