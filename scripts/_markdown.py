# SPDX-License-Identifier: Apache-2.0
"""Tables in Markdown, with figures beside their standard errors."""

from collections.abc import Sequence

from vllm_hetero_spec.draft.calibration import Estimate


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the rows are as long as the head."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def with_error(estimate: Estimate) -> str:
    """As "0.553 (.012)"."""
    return f"{estimate.value:.3f} ({estimate.error:.3f})".replace("(0.", "(.")


def compared(name: str, first: Estimate, other: str, second: Estimate) -> str:
    """How far the first is from the second, in a clause."""
    gain = first.minus(second)
    share = f", {gain.value / second.value:+.1%}" if second.value else ""
    return f"{name} - {other}: {gain.value:+.3f} (+/- {gain.error:.3f}{share})"


def as_json(estimate: Estimate) -> dict[str, float]:
    """Value and standard error."""
    return {"value": estimate.value, "error": estimate.error}
