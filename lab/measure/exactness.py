"""Models small enough to enumerate: next-token tables, and exact distributions of a round of two of them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from decode_lab import acceptance_probability, residual
from lab.models.pending import Pending


class Table:
    """A decoder whose next token depends on the last one alone: probs (V, V)."""

    def __init__(self, probs):
        self.vocab_size, self.committed = len(probs), 0
        self._pending = Pending(self)
        with np.errstate(divide="ignore"):
            self.logits = np.log(probs)

    @property
    def length(self):
        return self.committed + len(self._pending)

    def send(self, tokens, parents=None):
        return self.logits[self._pending.add(tokens, parents)]

    def commit(self, nodes):
        self.committed += len(self._pending.path(nodes))
        self._pending.clear()

    def rewind(self, length):
        if length == 0:
            self.committed = 0
        self._pending.cut(0 if length == 0 else self._pending.rewound(length))


class Misreporting:
    """Wrong: a drafter that reports the q of a table (V, V) for tokens that `drafter` drew from something else."""

    def __init__(self, drafter, q):
        self.drafter, self.q, self.name = drafter, q, drafter.name

    def start(self, target, sampler, prompt):
        self.drafter.start(target, sampler, prompt)

    def propose(self, tokens, gamma, rng):
        draft = self.drafter.propose(tokens, gamma, rng)
        draft.q = [self.q[last] for last in [tokens[-1], *draft.tokens][:-1]]
        return draft

    def verified(self, tokens, path, hidden):
        self.drafter.verified(tokens, path, hidden)


def transitions(tokens, vocab_size):
    """How often each token (row) was followed by each (column): ids (n,) -> counts (V, V)."""
    counts = np.zeros((vocab_size, vocab_size), int)
    np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    return counts


def distances(counts, p):
    """(total variation, Pearson's chi-square) of counts (..., *p.shape) from p.

    p: a distribution (k,), or a table (V, V) of one in each row; a row then weighs by its share of the counts. What p
    holds impossible and was counted makes chi-square infinite. Without any counts both are 0.
    """
    counts, p = np.asarray(counts), np.asarray(p)
    axes = tuple(range(-p.ndim, 0))
    expected = counts.sum(-1, keepdims=True) * p
    off = np.abs(counts - expected)
    chi_square = np.divide(off**2, expected, out=np.where(off > 0, np.inf, 0.0), where=expected > 0)
    return off.sum(axes) / 2 / np.maximum(counts.sum(axes), 1), chi_square.sum(axes)


# What may be proposed at a position: [(probability, candidates, the q of each)].
PROPOSALS = {
    "one drawn": lambda q: [(q[x], [x], [q]) for x in np.flatnonzero(q)],
    "two drawn, without replacement": lambda q: [
        (q[x] * rest[y], [x, y], [q, rest]) for x in np.flatnonzero(q) for rest in [residual(q, int(x))]
        for y in np.flatnonzero(rest)],
    "the two likeliest, without chance": lambda q: [(1.0, np.argsort(-q)[:2], [None, None])],
    "WRONG: the likeliest, said to be drawn": lambda q: [(1.0, [q.argmax()], [q])],
}


def joint(p, q, n, gamma, proposals):
    """(V ** n,): distribution of the n tokens after token 0, the first gamma of them drafted in one round."""
    @lru_cache(None)
    def after(last, n, depth):
        if n == 0:
            return np.ones(1)
        out = np.zeros((len(p), len(p) ** (n - 1)))
        for chance, candidates, qs in proposals(q[last]) if depth > 0 else [(1.0, [], [])]:
            left = p[last]
            for x, q_x in zip(candidates, qs):
                accept = acceptance_probability(left, x, q_x)
                out[x] += chance * accept * after(int(x), n - 1, depth - 1)
                left, chance = residual(left, x, q_x), chance * (1 - accept)
            for x in np.flatnonzero(left):           # none accepted: the target's own token ends the round
                out[x] += chance * left[x] * after(int(x), n - 1, 0)
        return out.ravel()
    return after(0, n, gamma)


def exact_acceptance(p, q, gamma):
    """(acceptance at positions 1 to gamma, accepted over tested) of an endless run with these tables."""
    accepted, reached = np.minimum(p, q), [np.eye(len(p))]
    for _ in range(gamma):
        reached.append(reached[-1] @ accepted)
    next_start = sum(reached[:-1]) @ (p - accepted) + reached[-1] @ p
    start = np.linalg.matrix_power((next_start + np.eye(len(p))) / 2, 10_000)[0]
    alive = np.array([start @ r.sum(1) for r in reached])
    return alive[1:] / np.maximum(alive[:-1], 1e-300), alive[1:].sum() / alive[:-1].sum()
