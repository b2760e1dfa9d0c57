# SPDX-License-Identifier: Apache-2.0
"""Other paths of a round's requests: each has KV of its own behind the text that they share.

Each leaves the chain one token later than the one before, with the second likeliest token there:
the first of them at once, the next behind the chain's first token. That is where a drafter is wrong
most often, and known before anything is drafted: so they are planned, sent and recorded as the
chains are. Up to where it leaves, a path is fed what the chain is, into its own KV. Measured on a
pair of code models, with two of them trees accept within 3 % of what they do where every step feeds
the best nodes wherever they are.
"""

from collections.abc import Callable, Sequence

from vllm_hetero_spec.engine.drafter.kv_pool import KVPool
from vllm_hetero_spec.engine.drafter.requests import DraftSequence
from vllm_hetero_spec.engine.drafter.tasks import DraftRow
from vllm_hetero_spec.engine.metrics.counters import DraftStats


class Forks:
    """Lends and takes back the KV of other paths.

    Args:
        pool: Whose blocks they have.
        stats: Where paths that there is no room for are counted.
    """

    def __init__(self, pool: KVPool, stats: DraftStats) -> None:
        self._pool, self._stats = pool, stats
        self._lent: list[DraftSequence] = []

    def lend(self, rows: Sequence[DraftRow], has_room: Callable[[int], bool]) -> list[DraftRow]:
        """The rows of a round with as many forks as they are to have, while blocks last.

        Args:
            rows: Of the round.
            has_room: Whether a round may have so many rows and forks; else each row has fewer.
        """
        self._lent, rows = [], list(rows)
        if all(row.task.paths <= 1 for row in rows):
            return rows
        # Forks of drawn requests draw beside these, which may not end sooner.
        together = len({row.steps for row in rows if row.task.draw is not None and row.steps}) == 1
        able = (row.task.draw is None or together for row in rows)
        # A path that leaves with the last token is not gone along.
        most = [max(0, min(row.task.paths, row.steps) - 1) for row in rows]
        most = [count * can for count, can in zip(most, able, strict=True)]
        wanted = most
        while any(wanted) and not has_room(len(rows) + sum(wanted)):
            wanted = [min(count, max(wanted) - 1) for count in wanted]
        for place, (row, count) in enumerate(zip(rows, wanted, strict=True)):
            forks, copies = list[DraftSequence](), list[tuple[int, int]]()
            length = len(row.sequence.kv_ids) + len(row.pending)
            for _ in range(count):
                fork = self._pool.fork(row.sequence.table, length)
                if fork is None:
                    break
                if not self._pool.grow(fork.table, length + row.steps):
                    self._pool.close(fork.table)
                    break
                forks.append(DraftSequence(fork.table))
                copies += [fork.copy] if fork.copy else []
            self._lent += forks
            rows[place] = row._replace(forks=forks, copies=copies)
        self._stats.paths_without_room += sum(most) - len(self._lent)
        return rows

    def close(self) -> None:
        """The round has ended."""
        for sequence in self._lent:
            self._pool.close(sequence.table)
        self._lent = []
