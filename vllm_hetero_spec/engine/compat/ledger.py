# SPDX-License-Identifier: Apache-2.0
"""Check of `ledger.toml`, which lists every vLLM symbol in use, against vLLM's sources.

The sources are parsed, not imported. A release can therefore be checked from its unpacked wheel on
a machine that cannot run it.
"""

import ast
import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Seam:
    """One symbol of vLLM.

    Attributes:
        file: Path in the folder `vllm`.
        name: "Name" or "Class.member".
        release: vLLM series that has the symbol; empty if all supported ones have it.
        how: "wrap", "replace", "extend", "subclass", "call", "build" or "read".
        names: Used parameters (of a function) or members (of a class), separated by spaces.
        why: Purpose of the use.
        symptom: What a user observes if the symbol changes.
        remove: Condition under which the entry can be removed.
    """

    file: str
    name: str
    release: str
    how: str
    names: str
    why: str
    symptom: str
    remove: str = "never"


def _load() -> tuple[Seam, ...]:
    files = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return tuple(
        Seam(file, name, entries.get("only", ""), *row)
        for file, entries in files.items()
        for name, row in entries.items()
        if name != "only"
    )


LEDGER = _load()


def missing(vllm_root: Path, release: str) -> list[str]:
    """Return the symbols, parameters and members of the ledger that a vLLM source tree lacks.

    `vllm_root` is the folder `vllm` of an installation or an unpacked wheel. `release` is its
    series, such as "0.33".
    """
    faults = []
    for seam in LEDGER:
        if seam.release not in ("", release):
            continue
        symbol, file = f"{seam.file}:{seam.name}", vllm_root / seam.file
        if not file.is_file():
            faults.append(f"{symbol}: no file {seam.file}")
            continue
        node = _find(ast.parse(file.read_text()), seam.name.split("."))
        if node is None:
            faults.append(f"{symbol}: not found")
            continue
        known = _names_of(node)
        faults += [f"{symbol}: no {used!r}" for used in seam.names.split() if used not in known]
    return faults


def _find(tree: ast.AST, path: list[str]) -> ast.AST | None:
    for step in path:
        found = None
        for node in ast.iter_child_nodes(tree):
            targets = (
                node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            )
            if getattr(node, "name", None) == step or any(
                isinstance(t, ast.Name) and t.id == step for t in targets
            ):
                found = node
        if found is None:
            return None
        tree = found
    return tree


def _names_of(node: ast.AST) -> set[str]:
    """Return a function's parameters, or a class's fields, methods and `self.` attributes."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = node.args
        return {a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs}
    names = {
        target.id
        for child in ast.iter_child_nodes(node)
        if isinstance(child, ast.Assign)
        for target in child.targets
        if isinstance(target, ast.Name)
    }
    for child in ast.walk(node):
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            names.add(child.target.id)
        elif isinstance(child, ast.FunctionDef):
            names.add(child.name)
        elif (
            isinstance(child, ast.Attribute)
            and isinstance(child.ctx, ast.Store)
            and isinstance(child.value, ast.Name)
            and child.value.id == "self"
        ):
            names.add(child.attr)
    return names
