# SPDX-License-Identifier: Apache-2.0
"""Entry point of `vllm-hetero-spec`: subcommands, and one sentence for wrong input."""

import argparse
import sys
from collections.abc import Sequence

from pydantic import ValidationError

from vllm_hetero_spec import __version__
from vllm_hetero_spec.bench.yaml_file import refusal
from vllm_hetero_spec.cli import advise, bench, compare, doctor, inspect
from vllm_hetero_spec.config import ConfigError
from vllm_hetero_spec.measure.load import MeasurementError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 0 on success, 1 where an engine failed, 2 for wrong input.
    """
    parser = argparse.ArgumentParser(
        prog="vllm-hetero-spec",
        description="Lossless speculative decoding in vLLM across different tokenizers.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    compare.add_parser(commands)
    bench.add_parser(commands)
    inspect.add_parser(commands)
    advise.add_parser(commands)
    doctor.add_parser(commands)
    parsed = parser.parse_args(arguments)
    try:
        parsed.run(parsed)
    except (ConfigError, ValidationError) as error:
        sentence = refusal(error) if isinstance(error, ValidationError) else error
        print(f"error: {sentence}", file=sys.stderr)
        return 2
    except doctor.Unsound:
        return 1
    except MeasurementError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
