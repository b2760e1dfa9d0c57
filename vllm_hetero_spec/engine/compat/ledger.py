# SPDX-License-Identifier: Apache-2.0
"""Check of `ledger.toml`, which lists every vLLM symbol in use, against vLLM's sources.

The sources are parsed, not imported. A release can therefore be checked from its wheel on a machine
that cannot run it.
"""

import ast
import re
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from vllm_hetero_spec.engine.compat.releases import series_of
from vllm_hetero_spec.errors import ConfigError

_ABOVE = "as above"  # an entry with the text of the row above it


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
    seams: list[Seam] = []
    above: list[str] = []
    for file, entries in files.items():
        only = entries.pop("only", "")
        for name, row in entries.items():
            above = [above[i] if text == _ABOVE else text for i, text in enumerate(row)]
            seams.append(Seam(file, name, only, *above))
    return tuple(seams)


LEDGER = _load()


@dataclass(frozen=True)
class Change:
    """A symbol of the ledger that a vLLM lacks, or that lacks a parameter or a member."""

    seam: Seam
    what: str

    def __str__(self) -> str:
        return f"{self.seam.file}:{self.seam.name}: {self.what}"


def changes(vllm_root: Path | zipfile.Path, release: str) -> Iterator[Change]:
    """Yield the symbols, parameters and members of the ledger that a vLLM source tree lacks.

    `vllm_root` is the folder `vllm` of an installation or of a wheel. `release` is its series, such
    as "0.33".
    """
    used = (seam for seam in LEDGER if seam.release in ("", release))
    for name, seams in groupby(used, attrgetter("file")):
        file = vllm_root / name
        tree = ast.parse(file.read_text(encoding="utf-8")) if file.is_file() else None
        for seam in seams:
            node = None if tree is None else _find(tree, seam.name.split("."))
            if node is None:
                yield Change(seam, f"no file {name}" if tree is None else "not found")
                continue
            known = _names_of(node)
            yield from (Change(seam, f"no {n!r}") for n in seam.names.split() if n not in known)


def changes_in_wheel(wheel: Path) -> tuple[str, str, list[Change]]:
    """Return a wheel's version of vLLM, the series whose rows are checked, and the changes.

    An unsupported release is checked with the rows of the nearest older series.

    Raises:
        ConfigError: The file is no wheel of vLLM.
    """
    try:
        names = zipfile.ZipFile(wheel).namelist()
    except zipfile.BadZipFile as error:
        raise ConfigError(f"{wheel} is no wheel; name a wheel of vLLM.") from error
    metadata = [re.fullmatch(r"vllm\w*-(.+)\.dist-info/METADATA", name) for name in names]
    versions = [match[1] for match in metadata if match]
    if not versions:
        raise ConfigError(f"{wheel} contains another package; name a wheel of vLLM.")
    series = "{}.{}".format(*series_of(versions[0], versions[0]))
    return versions[0], series, list(changes(zipfile.Path(wheel, "vllm/"), series))


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
        match child:
            case (
                ast.AnnAssign(target=ast.Name(id=name))
                | ast.FunctionDef(name=name)
                | ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self"))
            ):
                names.add(name)
    return names
