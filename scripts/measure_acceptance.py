# SPDX-License-Identifier: Apache-2.0
"""Measures how much of whole drafts a running vLLM accepts, method by method.

Every prompt is completed several times with seeds of its own; vLLM's counters are read per prompt,
so that errors are those of prompts, and differences of methods those of pairs. One engine at a
time, in a process of its own.

    python scripts/measure_acceptance.py --target DIR --drafters DIR ... --prompts FILE.jsonl
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from _markdown import as_json, compared, markdown_table, with_error
from rich.console import Console
from rich.progress import Progress

from vllm_hetero_spec.config import METHODS, VERIFICATIONS, ConfigError
from vllm_hetero_spec.draft.calibration import Estimate
from vllm_hetero_spec.inputs.prompts import load_prompts
from vllm_hetero_spec.measure.load import Load, MeasurementError, Sample
from vllm_hetero_spec.measure.vllm_engine import EngineSpec, VllmEngine

# In the order of the theory: each of the first five should accept no less than the one before.
DEFAULT_METHODS = ("union", "tli", "push_forward", "slrs", "slrs:8", "slem", "hetero")


@dataclass(frozen=True)
class Cell:
    """One method at one temperature.

    Attributes:
        drafter: Name of its folder.
        method: Ours; "slrs:8" is slrs with 8 merge candidates.
        temperature: Of the target.
        samples: One per prompt.
    """

    drafter: str
    method: str
    temperature: float
    samples: Sequence[Sample]

    @property
    def accepted(self) -> Estimate:
        """Accepted tokens per draft; the acceptance length is 1 more."""
        return self._per_draft([sample.accepted_tokens for sample in self.samples])

    @property
    def proposed(self) -> Estimate:
        """Target tokens per draft."""
        return self._per_draft([sample.draft_tokens for sample in self.samples])

    @property
    def drafted(self) -> Estimate:
        """Drafter tokens per draft."""
        return self._per_draft([sample.worker["drafter_tokens"] for sample in self.samples])

    @property
    def drafts(self) -> int:
        """Drafts of all prompts."""
        return sum(sample.drafts for sample in self.samples)

    @property
    def by_position(self) -> list[float]:
        """Share of drafts whose first, second, ... token was accepted."""
        columns = zip(*(sample.accepted_per_position for sample in self.samples), strict=True)
        return [sum(column) / self.drafts for column in columns]

    @property
    def undrafted(self) -> dict[str, int]:
        """Requests left without a draft in a step, by reason."""
        found: dict[str, int] = {}
        for sample in self.samples:
            for reason, count in sample.worker["skipped"].items():
                found[reason] = found.get(reason, 0) + count
        return {reason: count for reason, count in found.items() if count}

    def _per_draft(self, counts: Sequence[int]) -> Estimate:
        drafts = torch.tensor([sample.drafts for sample in self.samples])
        return Estimate.of(torch.tensor(counts), drafts)

    def as_data(self) -> dict[str, Any]:
        """All figures."""
        return {
            "drafter": self.drafter,
            "method": self.method,
            "temperature": self.temperature,
            "drafts": self.drafts,
            "acceptance_length": as_json(self.accepted) | {"value": 1 + self.accepted.value},
            "accepted": as_json(self.accepted),
            "proposed": as_json(self.proposed),
            "drafter_tokens": as_json(self.drafted),
            "accepted_by_position": self.by_position,
            "undrafted": self.undrafted,
        }


def measure(arguments: argparse.Namespace, prompts: Sequence[str]) -> Iterator[Cell]:
    """Every cell, as it ends.

    Raises:
        ConfigError: vLLM or the plugin refused the models.
        MeasurementError: An engine failed.
    """
    for drafter in arguments.drafters:
        for method in arguments.methods:
            config = {
                **_keys_of(method),
                "model": str(drafter),
                "num_speculative_tokens": arguments.num_speculative_tokens,
                "verification": arguments.verification,
                "controller": "fixed",
            }
            spec = EngineSpec(str(arguments.target), config, max_batch_size=arguments.samples)
            with VllmEngine(spec) as engine:
                for temperature in arguments.temperatures:
                    samples = [
                        engine.run(_load(arguments, prompt, index, temperature))
                        for index, prompt in enumerate(prompts)
                    ]
                    yield Cell(drafter.name, method, temperature, samples)


def _keys_of(method: str) -> dict[str, Any]:
    """A method's keys of the speculative configuration."""
    name, _, candidates = method.partition(":")
    return {"method": name} | ({"merge_candidates": int(candidates)} if candidates else {})


def _method(text: str) -> str:
    """A method as `Cell.method` has it.

    Raises:
        ValueError: It is none.
    """
    if _keys_of(text)["method"] not in METHODS:
        raise ValueError(text)
    return text


def _load(arguments: argparse.Namespace, prompt: str, index: int, temperature: float) -> Load:
    count = arguments.samples
    return Load(
        [prompt] * count,
        max_tokens=arguments.max_tokens,
        batch_size=count,
        temperature=temperature,
        seed=arguments.seed + index * count,
    )


def report(cells: Sequence[Cell]) -> str:
    """A table, and every method beside greedy drafts and the baseline."""
    head = (
        "drafter",
        "temperature",
        "method",
        "acceptance length",
        "accepted per draft",
        "proposed per draft",
        "drafter tokens per draft",
        "drafts",
        "accepted at position 1, 2, ...",
        "undrafted",
    )
    rows = []
    for cell in cells:
        accepted = cell.accepted
        rows.append(
            [
                cell.drafter,
                f"{cell.temperature:g}",
                cell.method,
                with_error(Estimate(1 + accepted.value, accepted.influence)),
                with_error(accepted),
                f"{cell.proposed.value:.2f}",
                f"{cell.drafted.value:.2f}",
                f"{cell.drafts:,}",
                " ".join(f"{share:.3f}" for share in cell.by_position),
                ", ".join(f"{why} {count}" for why, count in cell.undrafted.items()) or "-",
            ]
        )
    lines = [markdown_table(head, rows), ""]
    for cell in cells:
        others = {
            other.method: other
            for other in cells
            if (other.drafter, other.temperature) == (cell.drafter, cell.temperature)
        }
        gains = [
            compared(cell.method, cell.accepted, name, others[name].accepted)
            for name in ("slem", "union", "push_forward")
            if name in others and name != cell.method
        ]
        if gains:
            lines.append(f"* {cell.drafter}, {cell.temperature:g}: {'; '.join(gains)}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafters", type=Path, nargs="+", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help='JSON lines with a "prompt"')
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4, help="completions of each prompt")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--methods", nargs="+", type=_method, default=list(DEFAULT_METHODS))
    parser.add_argument("--verification", choices=VERIFICATIONS[:3], default="token")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--num-speculative-tokens", type=int, default=4, metavar="K")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    count = len(arguments.drafters) * len(arguments.methods) * len(arguments.temperatures)
    try:
        prompts = load_prompts(arguments.prompts, arguments.num_prompts)
        cells = []
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("methods", total=count)
            for cell in measure(arguments, prompts):
                cells.append(cell)
                progress.advance(task)
        data = [cell.as_data() for cell in cells]
        print(json.dumps(data, indent=2) if arguments.json else report(cells))
    except (ConfigError, MeasurementError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
