# SPDX-License-Identifier: Apache-2.0
"""`vllm-hetero-spec doctor`: check the installation and print fixes of its faults."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from vllm_hetero_spec.bench.tables import drawn, print_json, say
from vllm_hetero_spec.cli.health import Finding, examine
from vllm_hetero_spec.cli.nodes import COLUMNS, ask_nodes, faults


class Unsound(Exception):
    """A check failed; the findings are already printed."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check the installation, and run a tiny pair of models",
        description="Checks versions, plugin, hooks and platform, and generates with a tiny pair "
        "of models made on the spot. Each failing check names its fix.",
    )
    what = "check the nodes of a Ray cluster instead: versions, and whether DRAFTER is there"
    parser.add_argument("--ray", nargs="?", const="", metavar="DRAFTER", help=what)
    what = "check a wheel of vLLM that is not installed instead: symbols that are gone or changed"
    parser.add_argument("--wheel", type=Path, metavar="FILE", help=what)
    parser.add_argument("--no-run", action="store_true", help="leave out the tiny pair of models")
    parser.add_argument("--json", action="store_true", help="print one JSON object and no table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Check and print; raise Unsound if a check failed."""
    console = Console(highlight=False, emoji=False, soft_wrap=True)
    if arguments.ray is not None:
        _run_nodes(console, arguments.ray or None, as_json=arguments.json)
        return
    if arguments.wheel is not None:
        _run_wheel(console, arguments.wheel, as_json=arguments.json)
        return
    findings: list[Finding] = []
    progress = Console(stderr=True)
    with progress.status("checking ..."):
        for finding in examine(run=not arguments.no_run):
            findings.append(finding)
            if not arguments.json:
                _show(console, finding)
    good = all(finding.good for finding in findings)
    if arguments.json:
        print_json({"good": good, "findings": findings})
    if not good:
        raise Unsound


def _run_wheel(console: Console, wheel: Path, *, as_json: bool) -> None:
    """Print the changed symbols of a wheel, grouped by what the package uses them for."""
    from vllm_hetero_spec.engine.compat.ledger import LEDGER, changes_in_wheel

    version, series, found = changes_in_wheel(wheel)
    groups: dict[tuple[str, str], list[str]] = {}
    for change in found:
        groups.setdefault((change.seam.why, change.seam.symptom), []).append(str(change))
    if as_json:
        rows = [{"purpose": w, "symptom": s, "symbols": each} for (w, s), each in groups.items()]
        print_json({"good": not found, "vllm": version, "changes": rows})
    else:
        for (why, symptom), symbols in groups.items():
            console.print(f"[red]BAD [/] {escape(why)}")
            for line in (f"symptom: {symptom}", *symbols):
                console.print(f"     {escape(line)}")
        used = sum(seam.release in ("", series) for seam in LEDGER)
        gone = len({change.seam for change in found})
        say(console, f"vLLM {version}: {gone} of {used} symbols in use are gone or changed")
    if found:
        raise Unsound


def _run_nodes(console: Console, drafter: str | None, *, as_json: bool) -> None:
    nodes = ask_nodes(drafter)
    said = list(faults(nodes, drafter))
    if as_json:
        print_json({"good": not said, "nodes": nodes, "faults": said})
    else:
        columns = COLUMNS if drafter else COLUMNS[:-1]
        answers = [
            [name, *(node[column] or "MISSING" for column in columns)]
            for name, node in nodes.items()
            if not isinstance(node, str)
        ]
        console.print(drawn(("node", *columns), answers), soft_wrap=False)
        for sentence in said:
            console.print(f"[red]BAD [/] {escape(sentence)}")
    if said:
        raise Unsound


def _show(console: Console, finding: Finding) -> None:
    mark = "[green]ok  [/]" if finding.good else "[red]BAD [/]"
    console.print(f"{mark} {finding.check:15} {escape(finding.found)}")
    if not finding.good and finding.fix:
        console.print(f"     fix: {escape(finding.fix)}")
