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
    expected, off, axes = _off(counts, p)
    chi_square = np.divide(off**2, expected, out=np.where(off > 0, np.inf, 0.0), where=expected > 0)
    return total_variation(counts, p), chi_square.sum(axes)


def total_variation(counts, p):
    """The first of `distances`."""
    _, off, axes = _off(counts, p)
    return off.sum(axes) / 2 / np.maximum(np.sum(counts, axes), 1)


def _off(counts, p):
    """(expected counts, how far counts are off, the axes that a distance sums over)."""
    counts, p = np.asarray(counts), np.asarray(p)
    expected = counts.sum(-1, keepdims=True) * p
    return expected, np.abs(counts - expected), tuple(range(-p.ndim, 0))


def against_plain(tokens, p, rng, samples: int = 2000) -> tuple[float, float, float]:
    """`counts_against_plain` of how often each of the sampled tokens followed each other one; p (V, V)."""
    return counts_against_plain(transitions(np.asarray(tokens), len(p)), p, rng, samples)


def counts_against_plain(counts, p, rng, samples: int = 2000) -> tuple[float, float, float]:
    """(TV, noise floor, p-value) of counts, shaped like p, against the distribution or table p of `distances`.

    TV: their total variation. Plain samples of the same size have one, too: the noise floor is its median, the p-value
    the share of them (and of the counts) with at least as large a TV.
    """
    plain = total_variation(rng.multinomial(counts.sum(-1), p, (samples, *np.shape(p)[:-1])), p)
    tv = total_variation(counts, p)
    return float(tv), float(np.median(plain)), float((1 + (plain >= tv).sum()) / (1 + samples))


def several_candidates(p, q, n: int, claimed=None) -> tuple[np.ndarray, float]:
    """(distribution of the token written, chance that a candidate is accepted), over all orders of n candidates.

    They are drawn from q without replacement and tested in turn, each against the q that it was drawn from. claimed:
    a q that all are tested against instead, which is wrong. p, q: (V,), of few tokens.
    """
    if n == 0 or not q.any():
        return p, 0.0
    out, accepted, claim = np.zeros(len(p)), 0.0, q if claimed is None else claimed
    for x in map(int, np.flatnonzero(q)):
        yes = acceptance_probability(p, x, claim)
        rest, later = several_candidates(residual(p, x, claim), residual(q, x), n - 1, claimed)
        out += q[x] * (1 - yes) * rest
        out[x] += q[x] * yes
        accepted += q[x] * (yes + (1 - yes) * later)
    return out, accepted


def next_two(model, prompt, sampler, first) -> np.ndarray:
    """(len(first), V): the probability of each pair of tokens behind a prompt that begins with one of `first`.

    model: a toy model. Pairs of the model's that begin otherwise are left out.
    """
    rows = model.full_logits(np.array([[*prompt, x] for x in first]))[:, -2:]
    return np.array([sampler.probs(one)[x] * sampler.probs(two) for x, (one, two) in zip(first, rows)])


# What may be proposed at a position: [(probability, candidates, the q of each)].
PROPOSALS = {
    "one drawn": lambda q: [(q[x], [x], [q]) for x in np.flatnonzero(q)],
    "two drawn, without replacement": lambda q: [
        (q[x] * rest[y], [x, y], [q, rest]) for x in np.flatnonzero(q) for rest in [residual(q, int(x))]
        for y in np.flatnonzero(rest)],
    "the two likeliest, with q = 1": lambda q: [(1.0, np.argsort(-q)[:2], [None, None])],
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


def off_by(p, q, gamma, proposals) -> float:
    """The largest difference of the probability of gamma + 1 tokens: those that begin with a round, and plain ones."""
    return float(np.abs(joint(p, q, gamma + 1, gamma, proposals) - joint(p, q, gamma + 1, 0, proposals)).max())
