# SPDX-License-Identifier: Apache-2.0
"""Figures as text, with a dash where there is none."""

from vllm_hetero_spec.report.figures import Quantiles, Spread

NONE = "-"
_MIB = 1 << 20


def number(value: float | None, digits: int = 2) -> str:
    """A number with a fixed count of decimals."""
    return NONE if value is None else f"{value:,.{digits}f}"


def count(value: float | None) -> str:
    """A whole number, its thousands set apart."""
    return number(value, 0)


def milliseconds(seconds: float | None) -> str:
    """A time in milliseconds, without the unit."""
    return NONE if seconds is None else number(1e3 * seconds, 1)


def mebibytes(size: float | None) -> str:
    """Bytes in MiB, without the unit."""
    return NONE if size is None else count(size / _MIB)


def percent(share: float | None) -> str:
    """A share of 1 as a percentage."""
    return NONE if share is None else f"{share:.1%}"


def with_error(value: float | None, error: float | None, digits: int = 2) -> str:
    """A value and its standard error, if that is known."""
    if value is None or error is None:
        return number(value, digits)
    return f"{number(value, digits)} ± {number(error, digits)}"


def ratio(found: Spread | None) -> str:
    """A speedup, and its range where there are several rounds."""
    if found is None:
        return NONE
    bounds = f" ({found.low:.2f}-{found.high:.2f})" if found.rounds > 1 else ""
    return f"{found.median:.2f}x{bounds}"


def median(found: Quantiles | None) -> str:
    """The median of latencies, in milliseconds."""
    return milliseconds(found.median if found else None)


def tail(found: Quantiles | None) -> str:
    """The median, p90 and p99 of latencies, in milliseconds."""
    return " / ".join(map(milliseconds, (found.median, found.p90, found.p99))) if found else NONE


def widened(target: str, columns: tuple[int, int]) -> str:
    """What a reader must know of a target that was made slower on purpose."""
    zero, every = columns
    return (
        f"{target} is a model widened with zero MLP columns: {zero:,} of {every:,} add nothing but "
        "cost. Its speeds tell how speculation behaves at that ratio of costs, nothing about a "
        "real pair."
    )
