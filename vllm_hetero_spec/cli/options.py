# SPDX-License-Identifier: Apache-2.0
"""Shared options of commands, and the suite that these options describe."""

import argparse
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from vllm_hetero_spec.bench.suite import Suite, SuiteDrafter, Target, check_drafter, short_name
from vllm_hetero_spec.errors import ConfigError, Mistake, first_mistake, named, sentence
from vllm_hetero_spec.inputs.prompts import load_prompts

MODEL, DEFAULT = "Hugging Face name or folder", "default: %(default)s"  # help texts
# Options by the field of a suite that they set.
_FIELDS = {"engine": "--engine-args", "speculative": "--speculative-config"} | {
    field: f"--{field.replace('_', '-')}"
    for field in ("engines_at_once", "repeats", "settings", "temperatures")
}
PROMPTS = "prompts"  # name of the dataset in a suite that was made from options


def add_load(parser: argparse.ArgumentParser, longest: int, lookahead: int) -> None:
    """Add options of loads, engines and output; the numbers are defaults."""
    number: dict[str, Any] = {"type": positive, "metavar": "N"}
    parser.add_argument("--prompts", type=Path, metavar="FILE", help='JSONL with "prompt" keys')
    parser.add_argument("--num-prompts", default=8, help=DEFAULT, **number)
    parser.add_argument("--max-tokens", default=longest, help=DEFAULT, **number)
    what = f"longest draft, in target tokens; the controller may draft less far ({DEFAULT})"
    parser.add_argument("--num-speculative-tokens", default=lookahead, help=what, **number)
    table: dict[str, Any] = {"type": dictionary, "default": {}, "metavar": "JSON"}
    what = 'further keys, as {"kv_cache_memory_bytes": "64MiB"}'
    parser.add_argument("--speculative-config", help=what, **table)
    what = 'arguments of vllm.LLM for all runs, as {"tensor_parallel_size": 2}'
    parser.add_argument("--engine-args", help=what, **table)
    parser.add_argument("--json", action="store_true", help="print one JSON object and no table")
    parser.add_argument("--verbose", action="store_true", help="let vLLM write its log to stderr")


def suite_of(
    arguments: argparse.Namespace,
    drafters: Iterable[str],
    methods: Iterable[str],
    batch_sizes: Iterable[int],
    temperatures: Iterable[float],
    **further: Any,
) -> Suite:
    """Build a suite of one target from the options of a command.

    Raises:
        ConfigError, ValidationError: An engine would refuse the suite, or could not run it.
    """
    sizes, methods = sorted(set(batch_sizes)), tuple(dict.fromkeys(methods))
    prompts = load_prompts(arguments.prompts, max(arguments.num_prompts, sizes[-1]))
    if sizes[-1] > len(prompts):
        raise ConfigError(
            f"batch size {sizes[-1]} needs as many prompts, and "
            f"{arguments.prompts or 'the built-in text'} contains {len(prompts)} prompts; give a "
            "longer file with --prompts, or a smaller batch size."
        )
    lookahead = arguments.num_speculative_tokens
    trusted = getattr(arguments, "trust_remote_code", False)
    trust = {"trust_remote_code": True} if trusted else {}
    target = Target(
        name=short_name(arguments.target),
        model=arguments.target,
        drafters=tuple(_drafters(arguments, dict.fromkeys(drafters))),
        datasets=(PROMPTS,),
        engine={**trust, **arguments.engine_args},
    )
    for drafter in target.drafters:
        check_drafter(target, drafter, methods, lookahead)
    return Suite(
        targets=(target,),
        methods=methods,
        prompts={target.name: {PROMPTS: tuple(prompts)}},
        batch_sizes=tuple(sizes),
        temperatures=tuple(sorted(set(temperatures))),
        num_speculative_tokens=(lookahead,),
        max_tokens=arguments.max_tokens,
        **further,
    )


def _drafters(arguments: argparse.Namespace, models: Collection[str]) -> Iterator[SuiteDrafter]:
    """Drafters, named by the last part of the model's name, or all of it if that is ambiguous."""
    shared = Counter(map(short_name, models))
    for model in models:
        short = short_name(model)
        yield SuiteDrafter(
            name=short if shared[short] == 1 else model,
            model=model,
            speculative=arguments.speculative_config,
            settings=getattr(arguments, "settings", {}),
        )


def refusal(error: ValidationError) -> str:
    """Describe the first mistake in a suite that was made from options."""
    place, mistake = first_mistake(error)
    if not isinstance(mistake, Mistake) or not place or place[0] not in _FIELDS:
        return sentence(place, mistake, "the suite")
    keys = tuple(key for key in (*place[1:], *mistake.place) if isinstance(key, str))
    within = f"{named(keys)} of " if keys else ""
    return f"{within}{_FIELDS[str(place[0])]} {mistake}"


def positive(text: str) -> int:
    """Parse a whole number from 1; raises ArgumentTypeError or ValueError, as argparse expects."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def dictionary(text: str) -> dict[str, Any]:
    """Parse a JSON object; raises ArgumentTypeError, as argparse expects."""
    try:
        return TypeAdapter(dict[str, Any]).validate_json(text)
    except ValidationError as error:
        raise argparse.ArgumentTypeError(f"no JSON object: {error.errors()[0]['msg']}") from error
