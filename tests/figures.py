# SPDX-License-Identifier: Apache-2.0
"""Print how large the project is: lines, options, constants and docstrings.

python tests/figures.py [FOLDER ...]    # checkouts to compare; this one if none is given
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "vllm_hetero_spec"
# Files that decide how far to draft, without optional features.
CONTROL = ("lookahead/", "engine/lookahead_control", "engine/step_timing")
CONTROL += ("engine/request_limits", "engine/waiting_plan")
_CLAUSES = r"(What|Whether|How|Where|Who|Which|When|Why|Of|As|That|Those) "


def lines_of(files: list[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def docstrings(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def constants(file: Path) -> Iterator[str]:
    """Numbers with a name of capitals at the top level."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            names = [name.id for target in node.targets for name in ast.walk(target)
                     if isinstance(name, ast.Name)]  # fmt: skip
            values = [each for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
            numbers = values and all(isinstance(each.value, int | float) for each in values)
            if numbers and not any(isinstance(each, ast.Call) for each in ast.walk(node.value)):
                yield from (name for name in names if name.isupper() or name[1:].isupper())


def documented_keys(checkout: Path) -> int:
    """Keys in the tables of the configuration page, without the table of `debug`."""
    text = (checkout / "examples" / "configuration.md").read_text(encoding="utf-8")
    keys: set[str] = set()
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, *rows = table.splitlines()
        if head.startswith("| key |"):
            keys.update(*(re.findall(r"`(\w+)`", row.split("|")[1]) for row in rows[1:]))
    return len(keys)


def figures(checkout: Path) -> dict[str, int | str]:
    package = sorted((checkout / PACKAGE).rglob("*.py"))
    texts = [text for file in package for text in docstrings(file)]
    rooms = Counter[str]()
    for file in package:
        room = file.relative_to(checkout / PACKAGE).parent.as_posix()
        rooms[f"{PACKAGE}/{room}".rstrip("./")] += lines_of([file])
    found: dict[str, int | str] = dict(sorted(rooms.items()))
    found["package, lines"] = lines_of(package)
    found["package, files"] = len(package)
    scripts = [file for file in (checkout / "scripts").iterdir() if file.suffix in (".py", ".sh")]
    found["scripts, lines"] = lines_of(scripts)
    found["scripts, files"] = len(scripts)
    found["tests, lines"] = lines_of(list((checkout / "tests").rglob("*.py")))
    found["documented keys"] = documented_keys(checkout)
    found["numbers that decide how far to draft"] = sum(
        len(list(constants(file)))
        for file in package
        if file.relative_to(checkout / PACKAGE).as_posix().startswith(CONTROL)
    )
    share = sum(len(text.splitlines()) for text in texts) / lines_of(package)
    found["docstring lines"] = f"{share:.1%}"
    found["docstrings"] = len(texts)
    found["docstrings that are clauses"] = sum(bool(re.match(_CLAUSES, text)) for text in texts)
    found['docstrings that say "See"'] = sum(text.startswith("See ") for text in texts)
    return found


def main() -> None:
    checkouts = [Path(name) for name in sys.argv[1:]] or [Path(__file__).resolve().parent.parent]
    every = [figures(checkout) for checkout in checkouts]
    print("| |" + "".join(f" {checkout} |" for checkout in checkouts))
    print("|---|" + "---|" * len(checkouts))
    for name in sorted({name for found in every for name in found}, key=lambda n: (n[0] != "v", n)):
        print(f"| {name} |" + "".join(f" {found.get(name, '')} |" for found in every))


if __name__ == "__main__":
    main()
