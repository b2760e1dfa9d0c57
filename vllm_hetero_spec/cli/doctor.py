# SPDX-License-Identifier: Apache-2.0
"""`vllm-hetero-spec doctor`: is the installation sound, and if not, what mends it."""

import argparse
from typing import Any

from rich.console import Console
from rich.markup import escape

from vllm_hetero_spec.cli.health import Finding, examine
from vllm_hetero_spec.report.tables import print_json


class Unsound(Exception):
    """Some check failed; what and why has been printed."""


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser(
        "doctor",
        help="check the installation, and run a tiny pair of models",
        description="Checks versions, plugin, hooks and platform, and generates with a tiny pair "
        "of models made on the spot. Each failing check names its fix.",
    )
    parser.add_argument("--no-run", action="store_true", help="leave out the tiny pair of models")
    parser.add_argument("--json", action="store_true", help="print one JSON object and no table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Check and print.

    Raises:
        Unsound: A check failed.
    """
    console = Console()
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


def _show(console: Console, finding: Finding) -> None:
    mark = "[green]ok  [/]" if finding.good else "[red]BAD [/]"
    line = f"{mark} {finding.check:15} {escape(finding.found)}"
    console.print(line, highlight=False, soft_wrap=True)
    if not finding.good and finding.fix:
        console.print(f"     fix: {escape(finding.fix)}", highlight=False, soft_wrap=True)
