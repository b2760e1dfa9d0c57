# SPDX-License-Identifier: Apache-2.0
"""The findings of `inspect` as a picture."""

import importlib.util
import os
from pathlib import Path

from vllm_hetero_spec.cli.inspection import Inspection
from vllm_hetero_spec.config import ConfigError

_COLOURS = {"target": "#4477aa", "drafter": "#ccbb44", "shared": "#228833"}


def check(file: Path) -> None:
    """Refuse what `draw` could not do, before there is anything to draw.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: `pip install matplotlib`.")
    if file.suffix.lower() != ".png":
        raise ConfigError(f"--plot is {file}; it must be a name that ends in .png.")
    if not file.parent.is_dir():
        raise ConfigError(f"--plot is {file}; the folder {file.parent} does not exist.")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"--plot is {file}, which cannot be written.")


def draw(found: Inspection, file: Path) -> None:
    """Write a PNG: the intersection by reading, and token lengths.

    Raises:
        ConfigError: The file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    bars, lengths = figure.subplots(1, 2, width_ratios=[2, 3])
    overlap = found.overlap
    readings = {
        "get_vocab()": overlap.strings,
        "spaces normalised": overlap.space_normalised,
        "bytes": overlap.true_bytes,
    }
    sizes = {
        "target": len(found.target.opened.strings),
        "drafter": len(found.drafter.opened.strings),
    }
    drawn = bars.bar(
        [*sizes, *readings],
        [*sizes.values(), *readings.values()],
        color=[*map(_COLOURS.__getitem__, sizes), *[_COLOURS["shared"]] * len(readings)],
    )
    bars.bar_label(drawn, fmt="{:,.0f}", fontsize="small")
    bars.set_title("tokens, and tokens of both by reading")
    bars.tick_params(axis="x", labelrotation=20)
    for index, (name, counts) in enumerate(found.lengths.items()):
        positions = [length + 0.27 * (index - 1) for length in range(1, len(counts) + 1)]
        lengths.bar(positions, counts, width=0.27, label=name, color=_COLOURS[name])
    longest = len(found.lengths["shared"])
    ticks = range(1, longest + 1)
    lengths.set_xticks(list(ticks), [*map(str, ticks[:-1]), f"{longest}+"])
    lengths.set_xlabel("bytes of a token")
    lengths.set_title("distinct byte strings by length")
    lengths.legend()
    names = (Path(side.opened.name).name for side in (found.target, found.drafter))
    figure.suptitle("target {}    drafter {}".format(*names), parse_math=False)
    try:
        figure.savefig(file, dpi=120, format="png")
    except OSError as error:
        raise ConfigError(f"cannot write the plot to {file}: {error.strerror}.") from error
