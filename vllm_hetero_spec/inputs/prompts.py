# SPDX-License-Identifier: Apache-2.0
"""Prompts for measurements, from a JSONL file or built in."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_hetero_spec.errors import ConfigError

BUILT_IN = (
    "The history of the printing press begins in the fifteenth century, when",
    "def binary_search(items, wanted):\n    low, high = 0, len(items) - 1\n    while",
    "To bake a simple loaf of bread you need flour, water, salt and yeast. First,",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "A question often asked about the night sky is why it is dark. The answer",
    "import json\n\n\ndef load_settings(path):\n    with open(path) as file:\n",
    "Dear Ms Okafor,\n\nthank you for your letter of 3 May. We have looked into",
    "for number in range(1, 101):\n    if number % 15 == 0:\n        print(",
)


def load_prompts(file: Path | None, count: int | None = None) -> list[str]:
    """Return the first `count` prompts: values of "prompt" in a JSONL file, or built-in ones.

    Raises:
        ConfigError: The file cannot be read, or a line has no such value, or it is not Unicode.
    """
    if file is None:
        return list(BUILT_IN[:count])
    rows = list(json_lines(file))
    for number, row in rows:
        if not isinstance(row.get("prompt"), str):
            raise ConfigError(f'{file}, line {number} has no text under "prompt".')
        if re.search("[\ud800-\udfff]", row["prompt"]):
            raise ConfigError(
                f"the text in {file} holds half a surrogate pair; it must be Unicode."
            )
    if not rows:
        raise ConfigError(f"{file} contains no prompts.")
    return [row["prompt"] for _, row in rows[:count]]


def json_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number and object of each line of a JSONL file that is not blank.

    Raises:
        ConfigError: The file cannot be read, or a line is not a JSON object.
    """
    try:
        # "utf-8-sig" removes the byte order mark of some editors. `splitlines` would also split at
        # characters that a JSON string may contain.
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prompts in {file}: {error}.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ConfigError(f"{file}, line {number} is not a JSON object.")
        yield number, row
