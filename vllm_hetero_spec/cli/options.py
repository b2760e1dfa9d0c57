# SPDX-License-Identifier: Apache-2.0
"""Command-line options that several commands have, and their types."""

import argparse
import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vllm_hetero_spec.errors import Mistake, first_mistake, named, sentence

# Help of an option whose name says all but its default.
DEFAULT = "default: %(default)s"
# The options from which fields of a suite come.
_FIELDS = {"engine": "--engine-args", "speculative": "--speculative-config"} | {
    field: f"--{field.replace('_', '-')}"
    for field in ("engines_at_once", "repeats", "settings", "temperatures")
}
# Help of an argument that names a model.
MODEL = "Hugging Face name or folder"


def add_load(parser: argparse.ArgumentParser, longest: int) -> None:
    """Options of what is generated; `longest` tokens of each prompt by default."""
    parser.add_argument("--prompts", type=Path, metavar="FILE", help='JSONL with "prompt" keys')
    parser.add_argument("--num-prompts", type=positive, default=8, metavar="N", help=DEFAULT)
    parser.add_argument("--max-tokens", type=positive, default=longest, metavar="N", help=DEFAULT)


def add_engines(parser: argparse.ArgumentParser) -> None:
    """Options of the engines that are measured."""
    parser.add_argument(
        "--speculative-config",
        type=dictionary,
        default={},
        metavar="JSON",
        help='further keys, as {"kv_cache_memory_bytes": "64MiB"}',
    )
    parser.add_argument(
        "--engine-args",
        type=dictionary,
        default={},
        metavar="JSON",
        help='arguments of vllm.LLM for all runs, as {"tensor_parallel_size": 2}',
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """Options of what is printed."""
    parser.add_argument("--json", action="store_true", help="print one JSON object and no table")
    parser.add_argument("--verbose", action="store_true", help="let vLLM write its log to stderr")


def refusal(error: ValidationError) -> str:
    """The first mistake in a suite that was made from options."""
    place, mistake = first_mistake(error)
    if not isinstance(mistake, Mistake) or not place or place[0] not in _FIELDS:
        return sentence(place, mistake, "the suite")
    keys = tuple(key for key in (*place[1:], *mistake.place) if isinstance(key, str))
    within = f"{named(keys)} of " if keys else ""
    return f"{within}{_FIELDS[str(place[0])]} {mistake}"


def positive(text: str) -> int:
    """A whole number from 1.

    Raises:
        ArgumentTypeError: It is less.
        ValueError: It is no whole number.
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def dictionary(text: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ArgumentTypeError: It is none.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return found
