# SPDX-License-Identifier: Apache-2.0
"""Recordings of real pairs: the format of their files, and the texts and costs in them.

A file is one JSON object:

* `about`: pair, machine, date.
* `calibration`: costs that an engine times at its start, as arguments of `CostModel`.
* `texts`: by subject and temperature, the requests; of each request its rounds; of each round
  the number of accepted tokens, then the confidences of all proposed tokens.
* `steps`: by temperature, requests, rows and seconds of each target step.
* `rounds`: by temperature, mean requests, forwards, tokens of the longest draft, seconds of the
  forwards, seconds of the rest and context tokens of each round of drafting.
"""

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

LONGEST = 8  # target tokens of a recorded draft
HERE = Path(__file__).parent


class Text:
    """A circular text of one subject, with the draft that begins behind each of its tokens.

    A recorded round covers the accepted tokens and the first rejected position. Because accepted
    tokens are true text, a round may begin inside a recorded draft and use the rest of it. The
    bonus token after a wholly accepted draft was not predicted, and is left out.

    Attributes:
        random: True for sampled requests.
        drafts: Confidences of the `LONGEST` tokens proposed at each position.
        accepted: Leading tokens of these that the target accepts, at most `LONGEST`.
        starts: Positions of the first tokens of the recorded requests.
    """

    def __init__(self, requests: Iterable[Sequence[Sequence[float]]], random: bool) -> None:
        confidences: list[float] = []
        accepts: list[bool] = []
        tails: dict[int, list[float]] = {}  # what was proposed behind a rejected token
        self.random, self.starts = random, []
        for request in requests:
            self.starts.append(len(confidences))
            for accepted, *draft in request:
                for place, confidence in enumerate(draft[: int(accepted) + 1]):
                    accepts.append(place < accepted)
                    confidences.append(confidence)
                if len(draft) > accepted:
                    tails[len(confidences) - 1] = draft[int(accepted) + 1 :]
        self.drafts: list[list[float]] = []
        self.accepted: list[int] = []
        count = len(confidences)
        if not any(tails):
            raise ValueError("a text without a rejected token")
        for position in range(count):
            places = [(position + step) % count for step in range(LONGEST)]
            rejected = next((i for i, place in enumerate(places) if not accepts[place]), LONGEST)
            draft = [confidences[place] for place in places[: rejected + 1]]
            if len(draft) < LONGEST:
                tail = tails[places[rejected]] or draft[-1:]
                draft += [tail[i % len(tail)] for i in range(LONGEST - len(draft))]
            self.drafts.append(draft)
            self.accepted.append(rejected)

    def __len__(self) -> int:
        return len(self.drafts)


class Costs:
    """Seconds by size: monotone medians of measurements, linear between the sizes measured.

    Beyond the largest size, they are proportional to it.
    """

    def __init__(self, measured: Iterable[tuple[float, float]]) -> None:
        by_size = defaultdict(list)
        for size, seconds in measured:
            by_size[size].append(seconds)
        # Neighbors that fall are pooled: the monotone fit with the least squares.
        pools: list[tuple[list[float], float, int]] = []
        for size in sorted(by_size):
            pool = [size], median(by_size[size]), len(by_size[size])
            while pools and pools[-1][1] > pool[1]:
                sizes, seconds, count = pools.pop()
                weight = count + pool[2]
                mean = (seconds * count + pool[1] * pool[2]) / weight
                pool = sizes + pool[0], mean, weight
            pools.append(pool)
        self._sizes = [size for sizes, _, _ in pools for size in sizes]
        self._seconds = [seconds for sizes, seconds, _ in pools for _ in sizes]

    def __call__(self, size: float) -> float:
        sizes, seconds = self._sizes, self._seconds
        if size >= sizes[-1]:
            return seconds[-1] * size / sizes[-1]
        at = bisect_left(sizes, size)
        if at == 0:
            return seconds[0]
        share = (size - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
        return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])


class Recording(NamedTuple):
    """A recording in memory; fields as in the file."""

    about: dict[str, str]
    calibration: dict[str, Any]
    texts: dict[str, list[list[list[float]]]]
    steps: dict[str, list[list[float]]]
    rounds: dict[str, list[list[float]]]

    @classmethod
    def read(cls, name: str) -> "Recording":
        """Read the recording of a pair in this folder."""
        return cls(**json.loads((HERE / f"{name}.json").read_text(encoding="utf-8")))

    def write(self, file: Path) -> None:
        """Write it, one request per line."""
        text = json.dumps(self._asdict(), separators=(",", ":"))
        file.write_text(text.replace("]],", "]],\n") + "\n", encoding="utf-8")

    def text(self, subject: str, temperature: int) -> Text:
        return Text(self.texts[f"{subject} {temperature}"], temperature > 0)


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit y = extra + each * x with the least squares; extra is at least 0."""
    count = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    each = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else mean_y
    extra = max(0.0, mean_y - each * mean_x)
    return extra, (mean_y - extra) / mean_x
