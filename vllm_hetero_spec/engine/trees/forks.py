# SPDX-License-Identifier: Apache-2.0
"""Draft trees in drafting rounds: forks, and the candidates beside each path.

A fork is a further drafter path of a request, with KV blocks of its own after the shared context.
Fork i has the chain's first i tokens (i = 0, 1, ...), then the second most likely token. Drafters
are wrong most often at the first tokens. The positions are known before drafting, so forks are
planned, sent and captured like chains. Before it leaves the chain, a fork is fed the chain's tokens
into its own KV. Measured on a pair of code models: with two forks, trees accept within 3 % of trees
that feed the best nodes in every step.

A parallel drafter predicts each position from the text alone. Its forks share the chain's later
tokens as well, so they need neither KV nor a forward.
"""

import time
from collections.abc import Sequence

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.engine.drafter.decode_loop import Drafter
from vllm_hetero_spec.engine.drafter.kv_pool import KVPool
from vllm_hetero_spec.engine.drafter.requests import DraftSequence
from vllm_hetero_spec.engine.drafter.round import Round, RoundExtension
from vllm_hetero_spec.engine.drafter.round_plan import Fork
from vllm_hetero_spec.engine.drafter.tasks import (
    DrafterTokens,
    DraftRow,
    DraftTask,
    TopCandidates,
)
from vllm_hetero_spec.engine.metrics.counters import DraftStats
from vllm_hetero_spec.engine.trees.drafts import BranchTokens, DrafterBranch, TreeDrafts
from vllm_hetero_spec.text.bridge import Bridge
from vllm_hetero_spec.trees.growth import Chances

# Column of a fork's own token among the top candidates. Column 0 is the chain's token.
_SECOND = 1
_FED = TopCandidates._fields.index("fed")

_Fork = tuple[DraftSequence, int, int, tuple[int, int] | None]  # a `Fork` without its row


class TreeBranches(RoundExtension):
    """Drafts the forks of each round, and adds their tokens to the drafts.

    Args:
        chances: Values the tokens of raced trees.
    """

    def __init__(
        self, drafter: Drafter, pool: KVPool, bridge: Bridge, stats: DraftStats, chances: Chances
    ) -> None:
        self._drafter, self._pool, self._stats = drafter, pool, stats
        self._chances = chances
        self._trees = TreeDrafts(bridge, drafter.rules.sampling, stats)
        self._forks: dict[str, list[_Fork]] = {}  # by request, for the next `forks`
        self._lent: list[DraftSequence] = []
        self._found: dict[str, BranchTokens] = {}
        self.completed, self.seconds = 0, 0.0

    def admit(self, rows: Sequence[DraftRow]) -> None:
        """Allocate the KV of forks, as far as blocks are free.

        If buffers or graphs have no room for all forks, the rows with the most get fewer.
        """
        self._forks, self._lent, self._found = {}, [], {}
        if self._drafter.parallel or all(row.task.paths <= 1 for row in rows):
            return
        # Forks of sampled requests draw in the same batch, so all these rows must end together.
        together = len({row.steps for row in rows if row.task.draw is not None and row.steps}) == 1
        able = (row.task.draw is None or together for row in rows)
        # A fork that leaves the chain at the last token would not be fed.
        most = [max(0, min(row.task.paths, row.steps) - 1) for row in rows]
        most = [count * can for count, can in zip(most, able, strict=True)]
        wanted = most
        while any(wanted) and not self._has_room(len(rows) + sum(wanted)):
            wanted = [min(count, max(wanted) - 1) for count in wanted]
        for row, count in zip(rows, wanted, strict=True):
            if count:
                self._forks[row.task.req_id] = self._forked(row, count)
        self._stats.paths_without_room += sum(most) - len(self._lent)

    def forks(self, rows: Sequence[DraftRow]) -> Sequence[Fork]:
        forks, self._forks = self._forks, {}  # a round that continues drafts has none
        return [
            Fork(index, *fork)
            for index, row in enumerate(rows)
            for fork in forks.get(row.task.req_id, ())
        ]

    def after_step(self, current: Round, number: int) -> None:
        """Let forks leave the chain; those of raced requests leave with an arrival."""
        plan, own, steps = current.plan, current.own, self._drafter.steps
        if not (plan.forks[1] >= number).any():
            return
        draws, drawn = own.draws, len(own.drawn)
        if draws is None or not own.forked:
            steps.picked.branch_off(number, plan.count, steps.forks)
            return
        ids, places = steps.picked.ids(number, own.forked[-1] + 1), draws.index[drawn:]
        if number:
            draws.skip(drawn, ids[places], -1)
        steps.picked.branch_off(number, plan.count, steps.forks)
        draws.skip(drawn, ids[places])

    def collect(self, current: Round, drafted: list[DrafterTokens]) -> None:
        for index, (row, tokens) in enumerate(zip(current.rows, drafted, strict=True)):
            if tokens.beside is None:
                continue
            found = self._found.setdefault(row.task.req_id, BranchTokens(row.task))
            found.chain += tokens.tokens
            found.beside.append(tokens.beside)
            if self._drafter.parallel:
                found.forks = _beside_a_parallel_draft(row.task, tokens.tokens, tokens.beside)
            elif current.plan.forks.size and index not in current.shortened:
                found.forks = _branches(current, index)
                own = [len(branch.tokens) - branch.leaves for branch in found.forks]
                self._stats.drafter_tokens += sum(own)
        for sequence in self._lent:
            self._pool.close(sequence.table)
        self._lent = []

    def complete(self, drafts: list[Draft]) -> list[Draft]:
        if not self._found:
            return drafts
        began = time.perf_counter()
        found = [draft for draft in drafts if draft.req_id in self._found]
        greedy = [draft for draft in found if draft.draft_probs is None]
        trees = {
            draft.req_id: self._trees.raced(self._found[draft.req_id], draft, self._chances)
            for draft in found
            if draft.draft_probs is not None
        }
        if greedy:
            followed = [self._found[draft.req_id] for draft in greedy]
            trees |= {tree.req_id: tree for tree in self._trees.greedy(followed, greedy)}
        self.completed += len(trees)
        self.seconds += time.perf_counter() - began
        return [trees.get(draft.req_id, draft) for draft in drafts]

    def _forked(self, row: DraftRow, count: int) -> list[_Fork]:
        forks: list[_Fork] = []
        length = len(row.sequence.kv_ids) + len(row.pending)
        column = _SECOND
        if row.task.draw is not None:
            column += _FED * self._drafter.rules.beside
        for leaves in range(count):
            fork = self._pool.fork(row.sequence.table, length)
            if fork is None:
                break
            if not self._pool.grow(fork.table, length + row.steps):
                self._pool.close(fork.table)
                break
            sequence = DraftSequence(fork.table)
            self._lent.append(sequence)
            forks.append((sequence, leaves, column, fork.copy))
        return forks

    def _has_room(self, places: int) -> bool:
        """Return True if a round of this many requests and forks fits buffers and graphs."""
        steps = self._drafter.steps
        size, recorded = steps.picked.packet.shape[2], steps.shape(1, 1, 1).size > 0
        return places <= size and (not recorded or steps.shape(places, 1, 1).size > 0)


def _beside_a_parallel_draft(
    task: DraftTask, chain: Sequence[int], beside: TopCandidates
) -> list[DrafterBranch]:
    """Return the branches that have the second candidate in the place of one chain token."""
    others = list(map(int, (beside.tokens if task.draw is None else beside.fed)[:, _SECOND]))
    return [
        DrafterBranch([*chain[:leaves], others[leaves], *chain[leaves + 1 :]], beside, leaves)
        for leaves in range(min(task.paths, len(chain)) - 1)
        if others[leaves] != chain[leaves]
    ]


def _branches(current: Round, index: int) -> list[DrafterBranch]:
    """Return the branches of a request whose own first tokens were fed."""
    picked, wanted = current.picked, min(current.rows[index].steps, current.taken)
    assert picked is not None
    return [
        DrafterBranch(picked.ids[at][:sound], picked.beside(at, sound), leaves)
        for at, leaves in current.plan.forks_of(index)
        if wanted > leaves + 1 and (sound := min(wanted, picked.sound[at])) > leaves + 1
    ]
