# SPDX-License-Identifier: Apache-2.0
"""Entry point of `vllm-hetero-spec`: parse the subcommand, and report errors in one sentence."""

import argparse
import io
import os
import sys
from collections.abc import Sequence

from pydantic import ValidationError

from vllm_hetero_spec import __version__
from vllm_hetero_spec.bench.load import MeasurementError
from vllm_hetero_spec.cli import advise, bench, compare, doctor, inspect
from vllm_hetero_spec.cli.options import refusal
from vllm_hetero_spec.engine.compat.releases import INSTALL
from vllm_hetero_spec.errors import ConfigError, first_line

_HUNG_UP = 141  # exit code that a shell reports after SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 on success, 1 if an engine, the machine or a check failed, 2 for wrong input, 130 after
    Ctrl-C, 141 if the reader of the output has ended.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # the locale may lack characters of a completion
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as ended:
        # rich converts a BrokenPipeError to SystemExit.
        if not any(isinstance(each, BrokenPipeError) for each in (ended, ended.__context__)):
            raise
        # Without it Python's final flush of the output would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _HUNG_UP


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="vllm-hetero-spec",
        description="Lossless speculative decoding in vLLM across different tokenizers.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (compare, bench, inspect, advise, doctor):
        command.add_parser(commands)
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
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "vllm"):
            raise
        print(f"error: vLLM is not installed; {INSTALL}.", file=sys.stderr)
        return 1
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"error: {first_line(error)}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
