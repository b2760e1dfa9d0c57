# SPDX-License-Identifier: Apache-2.0
"""Types of command-line options that several commands have."""

import argparse
import json
from typing import Any

# Help of an option whose name says all but its default.
DEFAULT = "default: %(default)s"


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
