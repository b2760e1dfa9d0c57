# SPDX-License-Identifier: Apache-2.0
"""Reference form of every algorithm in the notation of its paper; the other tests compare with it.

T and D are the vocabularies of target and drafter. p(c) is the target's distribution after the
target tokens c. q(path) is the drafter's distribution after the draft tokens `path` of this round.
An algorithm is a `Stream`: it proposes target tokens K_1, K_2, ... Each comes with psi, its
distribution given all that was revealed before it. `token_rule` and `block_rule` accept or correct
a stream.

Why this is lossless for any two vocabularies: K is emitted with probability psi(K) min(1, p(K) /
psi(K)) = min(psi(K), p(K)). The missing part of p is (p - psi)+, and a correction is sampled from
exactly that. So the output has distribution p for ANY psi that is the true distribution of K.
Correctness does not depend on the map between the vocabularies, nor on how K was found. These
determine psi, and with it the acceptance rate, the sum of min(psi, p). Only psi must be true: a
token that is certain given what was revealed has a one-hot psi. A draft may be shortened by count,
by time, or by what was known before a token was sampled. It is never shortened by the sampled
token itself.

HetVoc: *Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies* (Timor et al., ICML 2025). BV: *Block Verification Accelerates Speculative Decoding*
(Sun et al.). ERSD: *Speculative Decoding via Exponential Races*. FSD: *Fuzzy Speculative Decoding*.
Trees: *SpecInfer*; *Sequoia*; ERSD.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from chance import Chance, law

Row = np.ndarray  # probabilities over T or D; those of a proposal may sum to less than 1
Target = Callable[[tuple[int, ...]], Row]
Drafter = Callable[[tuple[int, ...]], Row]


@dataclass(frozen=True)
class Proposal:
    """A proposed target token (None: no proposal) and the distribution it was sampled from."""

    token: int | None
    row: Row


Stream = Iterator[Proposal]


@dataclass(frozen=True)
class Pair:
    """Two vocabularies as byte strings, and tau, the target's tokenization of any string.

    tau is the tokenization of the real tokenizer, and kappa(d) = tau(str(d)).
    """

    target: Sequence[bytes]
    drafter: Sequence[bytes]
    tau: Callable[[bytes], tuple[int, ...]]

    def kappa(self, d: int) -> tuple[int, ...]:
        return self.tau(self.drafter[d])

    def twin(self, d: int) -> int | None:
        """Return the target token with the bytes of d, or None if d is outside the intersection."""
        kappa = self.kappa(d)
        return kappa[0] if len(kappa) == 1 else None

    def spell(self, path: Sequence[int]) -> bytes:
        return b"".join(self.drafter[d] for d in path)


def one_hot(token: int, size: int) -> Row:
    row = np.zeros(size)
    row[token] = 1.0
    return row


def residual(p: Row, row: Row) -> Row:
    """Return (p - row)+, not normalized."""
    return np.maximum(p - row, 0.0)


# ------------------------------------------------------------------------------- verification


def token_rule(p: Target, c: tuple[int, ...], stream: Stream, chance: Chance) -> tuple[int, ...]:
    """Leviathan et al., token by token: accept K with min(1, p(K) / row(K)), else correct.

    If the proposal is None, the correction is sampled from the same residual. After the last
    proposal the bonus token is sampled from p.
    """
    emitted: tuple[int, ...] = ()
    for proposal in stream:
        row = p(c + emitted)
        k = proposal.token
        if k is not None and chance.flip(row[k] / proposal.row[k]):
            emitted += (k,)
        else:
            return (*emitted, chance.draw(residual(row, proposal.row)))
    return (*emitted, chance.draw(p(c + emitted)))


def block_rule(p: Target, c: tuple[int, ...], stream: Stream, chance: Chance) -> tuple[int, ...]:
    """BV: accept a prefix of the block by its joint probability, then correct.

    P_j = min(P_{j-1} p_j(K_j) / row_j(K_j), 1); S_j = sum (P_j p_{j+1} - row_{j+1})+; h_j = S_j /
    (1 - P_j + S_j); tau = max{j: U_j <= h_j}. The rule accepts at least as many tokens as
    `token_rule`.
    """
    drafts = list(stream)
    tokens = [proposal.token for proposal in drafts]
    length = tokens.index(None) if None in tokens else len(tokens)
    block = tuple(token for token in tokens[:length] if token is not None)
    rows = [proposal.row for proposal in drafts[: length + 1]]
    supports = [1.0]
    for j, k in enumerate(block):
        ratio = p(c + block[:j])[k] / rows[j][k]
        supports.append(min(supports[-1] * ratio, 1.0))
    rest = [
        residual(supports[j] * p(c + block[:j]), rows[j] if j < len(rows) else np.zeros(1))
        for j in range(length + 1)
    ]
    for j in range(length, -1, -1):
        s = rest[j].sum()
        if j == 0 or chance.flip(s / (1.0 - supports[j] + s) if s else 0.0):
            return (*block[:j], chance.draw(rest[j]))
    raise AssertionError("unreachable: the empty prefix is always accepted")


def exact_match(p: Target, c: tuple[int, ...], stream: Stream, chance: Chance) -> tuple[int, ...]:
    """HetVoc, string-level exact match: sample from the target and compare with the proposal."""
    emitted: tuple[int, ...] = ()
    for proposal in stream:
        emitted += (chance.draw(p(c + emitted)),)
        if emitted[-1] != proposal.token:
            return emitted
    return (*emitted, chance.draw(p(c + emitted)))


# ------------------------------------------------------------------------------- trees

# Non-empty paths of target tokens. Each non-empty prefix of a path is a path of the tree too.
Tree = Collection[tuple[int, ...]]


def walk(choose: Callable[[tuple[int, ...]], int], tree: Tree) -> tuple[int, ...]:
    """ERSD Algorithm 5, corrected: emit chosen tokens up to the first one that leaves the tree.

    The tree determines when a step ends, but not which tokens are emitted. If each choice is
    sampled from the target's distribution given tree and past, the output has the target's
    distribution. If each choice depends on u and on noise that the tree cannot change, the output
    is the target's own, token by token. Examples are the first choice, and a race whose clocks
    belong to the depth.
    """
    emitted: tuple[int, ...] = (choose(()),)
    while emitted in tree:
        emitted += (choose(emitted),)
    return emitted


def best_tree(
    value: Callable[[tuple[int, ...]], float], ranks: int, count: int
) -> list[tuple[int, ...]]:
    """ERSD Algorithm 3, corrected: the `count` paths of ranks with the largest sum of values.

    R(j) = P[path j is accepted] falls along paths, so the best candidate always belongs to a best
    tree. The paper adds only the first child and the next sibling of a taken path as candidates.
    This requires that R also falls from sibling to sibling. Here all children are candidates.
    """
    offered: list[tuple[int, ...]] = [(rank,) for rank in range(ranks)]
    tree: list[tuple[int, ...]] = []
    while len(tree) < count:
        tree.append(max(offered, key=value))
        offered.remove(tree[-1])
        offered += [(*tree[-1], rank) for rank in range(ranks)]
    return tree


def tree_rule(
    p: Target,
    c: tuple[int, ...],
    children: Callable[[tuple[int, ...]], tuple[Proposal | None, Collection[int]]],
    chance: Chance,
) -> tuple[int, ...]:
    """Leviathan's rule for a sampled child; a token that is another child also continues the walk.

    This is a tree of SpecInfer or Sequoia without recursive rejection. `children` returns for each
    path the sampled child with its distribution, and the certain children. A sampled child may be
    left out only for reasons that do not depend on the sampled token.
    """
    emitted: tuple[int, ...] = ()
    while True:
        row = p(c + emitted)
        drawn, certain = children(emitted)
        if drawn is None:
            token, goes_on = chance.draw(row), False
        elif drawn.token is not None and chance.flip(row[drawn.token] / drawn.row[drawn.token]):
            token, goes_on = drawn.token, True
        else:
            token, goes_on = chance.draw(residual(row, drawn.row)), False
        emitted += (token,)
        if not goes_on and token not in certain:
            return emitted


# ------------------------------------------------------------------------------- drafting


def sd(q: Drafter, k: int, chance: Chance) -> Stream:
    """Leviathan et al. and Chen et al.: one vocabulary; the drafter's rows are used unchanged."""
    path: tuple[int, ...] = ()
    for _ in range(k):
        row = q(path)
        d = chance.draw(row)
        yield Proposal(d, row)
        path += (d,)


def slem(pair: Pair, q: Drafter, k: int) -> Stream:
    """HetVoc Algorithm 2: k greedy draft tokens, tokenized again by the target, one-hot."""
    path: tuple[int, ...] = ()
    for _ in range(k):
        path += (int(np.argmax(q(path))),)
    yield from _revealed(pair, pair.spell(path))


def union(pair: Pair, q: Drafter, k: int, chance: Chance) -> Stream:
    """HetVoc Algorithm 1, the baseline: a draft token without a twin proposes nothing."""
    path: tuple[int, ...] = ()
    for _ in range(k):
        row, d = q(path), chance.draw(q(path))
        yield Proposal(pair.twin(d), _push(pair, row, first_of=_twin_or_none))
        path += (d,)


def tli(pair: Pair, q: Drafter, k: int, chance: Chance) -> Stream:
    """HetVoc Algorithm 4: the drafter's row restricted to the intersection and normalized again."""
    inside = np.array([pair.twin(d) is not None for d in range(len(pair.drafter))])
    path: tuple[int, ...] = ()
    for _ in range(k):
        row = q(path) * inside
        if not row.sum():
            return
        row = row / row.sum()
        d = chance.draw(row)
        yield Proposal(pair.twin(d), _push(pair, row, first_of=_twin_or_none))
        path += (d,)


def push_forward(pair: Pair, q: Drafter, k: int, chance: Chance) -> Stream:
    """SLRS with lookahead 1: K = kappa(d)_1, psi(t) = q{d: kappa(d)_1 = t}; the rest is known."""
    path: tuple[int, ...] = ()
    for _ in range(k):
        row = q(path)
        d = chance.draw(row)
        first, *rest = pair.kappa(d)
        yield Proposal(first, _push(pair, row))
        yield from (_known(pair, t) for t in rest)
        path += (d,)


def slrs(pair: Pair, q: Drafter, k: int, psi: Row, chance: Chance) -> Stream:
    """HetVoc Algorithm 3 with psi of `slrs_psi`; the tokens after the first one are revealed."""
    first, *rest = _draft(pair, q, k, chance)
    yield Proposal(first, psi)
    yield from (_known(pair, t) for t in rest)


def slrs_psi(pair: Pair, q: Drafter, k: int) -> Row:
    """psi(t) = P[tau(draft)_1 = t] over all drafts of k tokens.

    This is the distribution of the first target token of the WHOLE draft. Drafts that are longer
    than t are included. The sum over drafts that spell exactly t is another distribution, and
    verification with it is biased.
    """
    psi = np.zeros(len(pair.target))
    for t, probability in law(lambda chance: _draft(pair, q, k, chance)[0]).items():
        psi[t] = probability
    return psi


def slrs_n(pair: Pair, q: Drafter, k: int, n: int, chance: Chance, m: int = 1) -> Stream:
    """Push-forward that also proposes target tokens made of up to n draft tokens.

    Before sampling, a chain c_1 c_2 ... is laid. Each c_j is the likeliest token of the row after
    the one before, while the chain spells the beginning of a longer target token. c_1 is the
    likeliest token that can merge. The next m - 1 such tokens are laid beside it as paths of one
    token. d_1, d_2, ... are sampled from the rows after these paths, until one leaves them. K is
    the longest target token that tau finds along the sampled tokens. psi is a sum over all tokens
    that may leave the paths: each adds its probability to its K.

    The tokens sampled after K are discarded. The next token is sampled again from the known row at
    that place, without the tokens that would have made K longer. Any row would be correct, because
    nothing depends on the discarded tokens. It would be biased to keep the token and verify it with
    the plain row.
    """
    path: tuple[int, ...] = ()
    row, left = q(path), k
    while left > 0:
        chain = _chain(pair, q, path, row, min(n, left) - 1)
        laid = [chain[:j] for j in range(len(chain) + 1)]
        laid += [(d,) for d in _beginners(pair, row)[1:m] if chain]
        rows = {x: q(path + x) if x else row for x in laid}
        psi, follow = np.zeros(len(pair.target)), dict.fromkeys(laid, 1.0)
        for x, behind in rows.items():
            for d, probability in enumerate(behind):
                longer = (*x, d)
                if longer in rows:
                    follow[longer] = follow[x] * probability
                else:
                    psi[_longest(pair, longer)[0]] += follow[x] * probability
        drawn: tuple[int, ...] = ()
        while drawn in rows:
            drawn += (chance.draw(rows[drawn]),)
        token, used = _longest(pair, drawn)
        yield Proposal(token, psi)
        yield from _revealed(pair, pair.spell(drawn[:used])[len(pair.target[token]) :])
        path, left = path + drawn[:used], left - used
        if used == len(drawn):
            row = q(path)
        else:
            every = range(len(pair.drafter))
            behind = rows[drawn[:used]]
            row = behind * [_longest(pair, (*drawn[:used], d))[1] == used for d in every]
            row = row / row.sum()


# ------------------------------------------------------------------------------- other verifiers


def race(row: Row, arrivals: Row) -> int:
    """ERSD: return the first arrival of exponential clocks with rates `row`; `arrivals`: Exp(1)."""
    with np.errstate(divide="ignore"):
        return int(np.argmin(np.where(row > 0, arrivals / row, np.inf)))


def race_acceptance(p: Row, psi: Row) -> float:
    """ERSD: exact P[race(p, E) = race(psi, E)] = sum_i 1 / sum_j max(p_j / p_i, psi_j / psi_i)."""
    both = np.flatnonzero((p > 0) & (psi > 0))
    return float(sum(1.0 / np.maximum(p / p[i], psi / psi[i]).sum() for i in both))


def jensen_shannon(p: Row, psi: Row) -> float:
    """Return the divergence of two rows in nats, at most log 2."""
    middle = (p + psi) / 2
    parts = (np.sum(x[x > 0] * np.log(x[x > 0] / middle[x > 0])) for x in (p, psi))
    return float(sum(parts)) / 2


def fuzzy_rule(
    p: Target, c: tuple[int, ...], stream: Stream, theta: float, chance: Chance
) -> tuple[int, ...]:
    """FSD, lossy: accept a sampled draft token if its row is within theta of the target's row.

    One-hot rows and tokens that the target excludes are never accepted this way. If the fuzzy test
    fails, the strict test decides, so theta = 0 is lossless.
    """
    emitted: tuple[int, ...] = ()
    for proposal in stream:
        row, k = p(c + emitted), proposal.token
        sampled = np.count_nonzero(proposal.row) > 1
        near = sampled and jensen_shannon(row, proposal.row) < theta
        if k is not None and ((near and row[k] > 0) or chance.flip(row[k] / proposal.row[k])):
            emitted += (k,)
        else:
            return (*emitted, chance.draw(residual(row, proposal.row)))
    return (*emitted, chance.draw(p(c + emitted)))


# ------------------------------------------------------------------------------- shared pieces


def _draft(pair: Pair, q: Drafter, k: int, chance: Chance) -> tuple[int, ...]:
    """Return k sampled draft tokens, tokenized by the target."""
    path: tuple[int, ...] = ()
    for _ in range(k):
        path += (chance.draw(q(path)),)
    return pair.tau(pair.spell(path))


def _twin_or_none(pair: Pair, d: int) -> int | None:
    return pair.twin(d)


def _first(pair: Pair, d: int) -> int | None:
    return pair.kappa(d)[0]


def _push(pair: Pair, row: Row, first_of: Callable[[Pair, int], int | None] = _first) -> Row:
    """Return the distribution of the target token that is proposed for a token drawn from `row`."""
    pushed = np.zeros(len(pair.target))
    for d, probability in enumerate(row):
        t = first_of(pair, d)
        if t is not None:
            pushed[t] += probability
    return pushed


def _known(pair: Pair, t: int) -> Proposal:
    return Proposal(t, one_hot(t, len(pair.target)))


def _revealed(pair: Pair, text: bytes) -> Stream:
    return (_known(pair, t) for t in pair.tau(text))


def _chain(pair: Pair, q: Drafter, path: tuple[int, ...], row: Row, length: int) -> tuple[int, ...]:
    """Return up to `length` draft tokens, each the likeliest; the first one must merge."""
    chain: tuple[int, ...] = ()
    longer = tuple(_beginners(pair, row)[:1])
    while len(chain) < length and longer and begins_longer(pair, longer):
        chain = longer
        longer = (*chain, int(np.argmax(q(path + chain))))
    return chain


def _beginners(pair: Pair, row: Row) -> list[int]:
    """Return the draft tokens with which a longer target token begins, the likeliest first."""
    order = (int(d) for d in np.argsort(-row, kind="stable") if row[d] > 0)
    return [d for d in order if begins_longer(pair, (d,))]


def begins_longer(pair: Pair, path: Sequence[int]) -> bool:
    """Return True if the first token has a twin and a longer target token begins with the path."""
    text = pair.spell(path)
    longer = any(len(t) > len(text) and t.startswith(text) for t in pair.target)
    return longer and pair.twin(path[0]) is not None


def _longest(pair: Pair, drawn: tuple[int, ...]) -> tuple[int, int]:
    """Return the longest target token along the sampled tokens, and the number that it uses.

    The first j tokens make one target token if tau's first token is longer than the first j - 1.
    """
    token, used = pair.kappa(drawn[0])[0], 1
    for j in range(2, len(drawn) + 1):
        first = pair.tau(pair.spell(drawn[:j]))[0]
        if len(pair.target[first]) > len(pair.spell(drawn[: j - 1])):
            token, used = first, j
    return token, used
