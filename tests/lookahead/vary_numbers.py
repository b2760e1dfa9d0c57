# SPDX-License-Identifier: Apache-2.0
"""Double and halve each number that decides how far to draft, and find a test that notices it.

`python tests/lookahead/vary_numbers.py [NAME ...]` copies the repository to a temporary folder,
changes one number, and runs the controller's tests until one fails. It prints a table, and ends
with exit code 1 if a change was not noticed.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(REPO / "tests"))

from figures import CONTROL, PACKAGE, constants  # noqa: E402

COPIED = (PACKAGE, "tests", "scripts", "examples")
# By module; those of all others are in tests/lookahead.
TESTS = {
    "prober": ["tests/lookahead", "tests/engine/test_unread_steps.py"],
    "request_limits": ["tests/engine/test_lookahead_control.py"],
    "step_timing": ["tests/engine/test_step_timing.py"],
    "waiting_plan": ["tests/engine/test_lookahead_control.py"],
}
NO_NUMBERS = {"VERSION", "_ENDED"}  # the version of a format, and a mark


class Number(NamedTuple):
    """A number with a name; one of several if a name has some."""

    file: Path
    name: str
    index: int
    line: int
    start: int
    end: int
    value: float

    def changed(self, text: str, factor: float) -> str:
        """Return the file's text with `factor` times the number, or its difference from 1."""
        lines = text.splitlines(keepends=True)
        line = lines[self.line - 1]
        value = self.value * factor
        if isinstance(self.value, int):
            value = round(value)
        elif 0.5 < self.value < 1.5:  # a share or a ratio
            value = 1.0 + (self.value - 1.0) * factor
        lines[self.line - 1] = f"{line[: self.start]}{value}{line[self.end :]}"
        return "".join(lines)


def numbers() -> Iterator[Number]:
    """Yield all numbers."""
    for file in sorted((REPO / PACKAGE).rglob("*.py")):
        if not file.relative_to(REPO / PACKAGE).as_posix().startswith(CONTROL):
            continue
        named = set(constants(file)) - NO_NUMBERS
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.Assign):
                continue
            names = [each.id for each in ast.walk(node.targets[0]) if isinstance(each, ast.Name)]
            if not named.issuperset(names):
                continue
            values = [each for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
            for index, each in enumerate(values):
                end = each.end_col_offset or 0
                place = each.lineno, each.col_offset, end, each.value
                yield Number(file, names[min(index, len(names) - 1)], index, *place)


def noticed_by(number: Number, factor: float) -> str:
    """Return the test that fails first if the number is changed; empty if none does."""
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            shutil.copytree(REPO / name, Path(folder, name), ignore=shutil.ignore_patterns("__*__"))
        shutil.copy(REPO / "pyproject.toml", folder)
        file = Path(folder, number.file.relative_to(REPO))
        file.write_text(number.changed(file.read_text(encoding="utf-8"), factor), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "2"]
        done = subprocess.run(
            [*command, *TESTS.get(number.file.stem, ["tests/lookahead"])],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": folder},
            capture_output=True,
            text=True,
        )
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.MULTILINE)
    assert failed or done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return failed[1] if failed else ""


def main() -> None:
    missed = 0
    print("| number | halved | doubled |\n|---|---|---|")
    for number in numbers():
        if sys.argv[1:] and number.name not in sys.argv[1:]:
            continue
        found = [noticed_by(number, factor) for factor in (0.5, 2.0)]
        missed += found.count("")
        tests = " | ".join(each and f"`{each.rpartition('/')[2]}`" for each in found)
        print(f"| `{number.file.stem}.{number.name}` {number.value} | {tests} |", flush=True)
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
