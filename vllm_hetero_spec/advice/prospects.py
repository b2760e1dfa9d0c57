# SPDX-License-Identifier: Apache-2.0
"""Whether draft trees or a drafter in a process of its own may pay, from what was measured.

Both are bounds: what they would bring at best. Only a measurement says what they do bring.
"""

from collections.abc import Sequence

from vllm_hetero_spec.bench.figures import Row

# Share of the time below which drafting leaves nothing to hide behind the target's steps.
_LEAST_SHARE = 0.02


def trees(row: Row, small: Row, large: Row) -> str:
    """What trees may bring, in a sentence; "" where it is not known.

    A row beside a draft brings one token at most, and only where the draft's first token was
    rejected; its price is what a batch adds to the target's step.

    Args:
        row: Of a drafter, under the load of `small`.
        small: Of the target alone, at the smallest batch.
        large: Of the target alone, at a larger one.
    """
    shares, length = row.figures.acceptance_per_position, row.figures.acceptance_length
    few, many = small.cell.batch_size, large.cell.batch_size
    if not shares or length is None or few == many:
        return ""
    one, more = (
        each.cell.batch_size / each.figures.tokens_per_second.median for each in (small, large)
    )
    price = max(0.0, more / one - 1) / (many - few)
    gain = (1 - shares[0]) / length
    found = (
        f"Draft trees: one more row costs the target {price:.1%} of its step (batch {many} beside "
        f"{few}), and brings at most {gain:.1%} more tokens"
    )
    if price < gain:
        return f'{found}: measure them with --settings \'{{"tree": {{"tree_nodes": 8}}}}\'.'
    return f"{found}: they cannot pay here; where rows cost less, they may."


def own_process(row: Row) -> str:
    """What a process of its own may bring a drafter, in a sentence; "" where it is not known."""
    seconds = row.figures.propose_seconds
    if seconds is None or not row.figures.drafts:
        return ""
    share = min(seconds / row.figures.seconds, 0.99)
    found = f"A process of its own: drafting takes {share:.1%} of the time"
    if share < _LEAST_SHARE:
        return f"{found}, which leaves nothing to hide."
    return (
        f"{found}, so that drafting while the target verifies, on cores or a device that the "
        f"target does not use, is at most {1 / (1 - share):.2f}x as fast: measure it with "
        '--settings \'{"process": {"parallel": "process"}}\'.'
    )


def prospects(rows: Sequence[Row], of: Sequence[Row], config: dict[str, object]) -> list[str]:
    """What may be worth measuring next, a sentence each.

    Args:
        rows: Of all that was measured.
        of: Those of one drafter.
        config: Its `--speculative-config`: where it has one of the two, the other, which does not
            go with it, is not proposed either.
    """
    if config.get("tree_nodes") or config.get("parallel", "off") != "off":
        return []
    row = min(of, key=lambda each: (each.cell.batch_size, each.cell.temperature))
    same = [
        each
        for each in rows
        if each.cell.engine.drafter is None and each.cell.temperature == row.cell.temperature
    ]
    small, large = (pick(same, key=lambda each: each.cell.batch_size) for pick in (min, max))
    return [sentence for sentence in (trees(row, small, large), own_process(row)) if sentence]
