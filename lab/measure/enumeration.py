"""Exact distributions by enumeration: every way that the random choices of a run can fall, with its probability.

`outcomes(function)` calls function(rng) once per way; `exact` is what plain sampling gives. So a distribution is
summed, not sampled, and a loop, a rule or a drafter can be shown to be lossless to rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from decode_lab import Sampler, speculative_generate


class _Coin:
    """What `Paths.random` returns: a uniform number of which only `u < threshold` may be asked."""

    def __init__(self, paths):
        self._paths = paths

    def __lt__(self, threshold):
        heads = min(max(float(threshold), 0.0), 1.0)
        return self._paths.draw(np.array([1.0 - heads, heads])) == 1


class Paths:
    """An rng that takes one path through all random choices, and on `advance` the next one."""

    def __init__(self):
        self._trail: list[list] = []                   # [index into options, options, probabilities]
        self._at, self.probability = 0, 1.0

    def random(self):
        return _Coin(self)

    def draw(self, p) -> int:
        """An index of p, with probability p[index]: `decode_lab.draw` asks for it here."""
        p = np.asarray(p, float) / np.sum(p)
        if self._at == len(self._trail):
            self._trail.append([0, np.flatnonzero(p), p])
        index, options, _ = self._trail[self._at]
        self._at += 1
        self.probability *= p[options[index]]
        return int(options[index])

    def advance(self):
        while self._trail and self._trail[-1][0] + 1 == len(self._trail[-1][1]):
            self._trail.pop()
        if not self._trail:
            return False
        self._trail[-1][0] += 1
        self._at, self.probability = 0, 1.0
        return True


def outcomes(function) -> dict:
    """{result: probability} of function(rng), over every way that its draws and acceptance tests can fall."""
    paths = Paths()
    table: dict[Any, float] = {}
    while True:
        result = function(paths)
        table[result] = table.get(result, 0.0) + paths.probability
        if not paths.advance():
            return table


def exact(logits, sampler, prompt, n_new, eos=()):
    """{the n_new tokens: probability} of plain sampling from logits(history); an ended one is shorter."""
    table: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(n_new):
        longer: dict[tuple[int, ...], float] = {}
        for text, weight in table.items():
            if text and text[-1] in eos:
                longer[text] = longer.get(text, 0.0) + weight
                continue
            history = tuple(prompt) + text
            for token, p in enumerate(sampler.probs(logits(history), history)):
                if p > 0:
                    longer[(*text, token)] = weight * p
        table = longer
    return table


def same_distribution(a, b, tolerance=1e-9):
    """The largest difference of two {outcome: probability} tables is below `tolerance`."""
    return max(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in a.keys() | b.keys()) < tolerance


def loop_tv(model, drafter, n_new: int, gamma: int) -> float:
    """Total variation between the n_new tokens that speculation writes behind token 0 and those that the model writes
    alone, both at temperature 1; 0 is lossless.

    model: a lab.measure.exactness.Table. Each text costs a run of the loop: only tiny vocabularies are possible.
    """
    def text(rng):
        return tuple(speculative_generate(model, drafter, [0], n_new, gamma, 1.0, rng)[0][1:].tolist())
    found, right = outcomes(text), exact(lambda history: model.logits[history[-1]], Sampler(1.0), [0], n_new)
    return sum(abs(found.get(key, 0.0) - right.get(key, 0.0)) for key in found.keys() | right.keys()) / 2
