# SPDX-License-Identifier: Apache-2.0
"""What the arrivals of a measured load say: how long its steps took, and where drafts held.

Tokens of one step arrive at the same moment, so that moments are steps. A verified draft arrives as
its accepted tokens and one more, so that counts say which places of a text were drafted rightly.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from vllm_hetero_spec.measure.load import Sample, Trace


@dataclass(frozen=True)
class Round:
    """One step of an engine.

    Attributes:
        seconds: It took, drafting included.
        reading: Requests whose first token was yet to come: their prompts were read.
        decoding: Requests that went on.
    """

    seconds: float
    reading: int
    decoding: int


def rounds_of(sample: Sample) -> Iterator[Round]:
    """The steps of a load that gave tokens; one that gave none is part of the next."""
    traces = [trace for trace in sample.traces if trace.times]
    moments = sorted({moment for trace in traces for moment in trace.times})
    for before, now in pairwise([0.0, *moments]):
        yield Round(
            now - before,
            sum(trace.sent < now <= trace.times[0] for trace in traces),
            sum(trace.times[0] < now <= trace.times[-1] for trace in traces),
        )


@dataclass(frozen=True)
class Story:
    """A completion as its drafter saw it.

    Attributes:
        first: Tokens that came with the prompt's step, for which nothing was drafted.
        places: Of every later token, whether what was drafted in its place was right, given that
            all before it was; None where nothing was, behind a draft that was accepted whole.
    """

    first: int
    places: tuple[bool | None, ...]

    @property
    def tokens(self) -> int:
        """Of the whole completion."""
        return self.first + len(self.places)

    def rounds(self, lookahead: int) -> int:
        """Steps behind the prompt's that it takes with drafts of this length, all places known.

        Whether a place is drafted rightly depends on the text before it alone, so that a shorter
        draft ends where it ends, or earlier, and the next begins behind one token more.
        """
        done, count = self.first, 0
        while done < self.tokens:
            room = min(lookahead, self.tokens - done)
            accepted = 0
            while accepted < room and self.places[done + accepted - self.first]:
                accepted += 1
            done = min(done + accepted + 1, self.tokens)
            count += 1
        return count


def story_of(trace: Trace, lookahead: int, longest: int) -> Story:
    """A completion that was drafted `lookahead` tokens ahead wherever it had room for them.

    Nothing is drafted in the last of `longest` places. A draft that was shorter for another reason
    counts as wrong in its next place.
    """
    done = trace.counts[0]
    places: list[bool | None] = []
    for count in trace.counts[1:]:
        room = min(lookahead, longest - done - 1)
        places += [True] * (count - 1)
        places.append(False if count - 1 < room else None)
        done += count
    return Story(trace.counts[0], tuple(places))


def acceptance_of(stories: Sequence[Story], lookahead: int) -> list[tuple[int, int]]:
    """By position in a draft: how often it was tested, and how often its token was accepted.

    A position is tested only where all before it were accepted; otherwise nothing is known of it.
    """
    counts = [[0, 0] for _ in range(lookahead)]
    for story in stories:
        position = 0
        for place in story.places:
            if place is None:
                position = 0
                continue
            counts[position][0] += 1
            counts[position][1] += place
            position = position + 1 if place else 0
    return [(tested, accepted) for tested, accepted in counts]
