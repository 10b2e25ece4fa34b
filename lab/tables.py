"""Models small enough to enumerate: next-token tables, and exact distributions of a round of two of them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from decode_lab import acceptance_probability, residual


class Table:
    """A decoder whose next token depends on the last one alone: probs (V, V)."""

    def __init__(self, probs):
        self.vocab_size, self.length = len(probs), 0
        with np.errstate(divide="ignore"):
            self.logits = np.log(probs)

    def extend(self, tokens):
        self.length += len(tokens)
        return self.logits[np.asarray(tokens)]

    def rollback(self, length):
        self.length = length


# What may be proposed at a position: [(probability, candidates, the q of each)].
PROPOSALS = {
    "one drawn": lambda q: [(q[x], [x], [q]) for x in np.flatnonzero(q)],
    "two drawn, without replacement": lambda q: [
        (q[x] * rest[y], [x, y], [q, rest]) for x in np.flatnonzero(q) for rest in [residual(q, x)]
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
