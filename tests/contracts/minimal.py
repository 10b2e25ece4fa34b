"""One class of each kind that has exactly what its protocol names, and nothing optional: it runs in every loop."""

import numpy as np

from console import BadInput
from decode_lab import Draft
from lab.measure.scripted import table_logits


class MinimalDecoder:
    """vocab_size, length, committed, send, commit and rewind; no name, no limit, no prefill, no hidden states."""

    def __init__(self, vocab_size=12, seed=1, logits=None):
        self.vocab_size, self._logits = vocab_size, logits or table_logits(vocab_size, seed)
        self._tokens, self._nodes = [], []                     # committed; and (token, parent) of what was sent since

    @property
    def length(self):
        return len(self._tokens) + len(self._nodes)

    @property
    def committed(self):
        return len(self._tokens)

    def send(self, tokens, parents=None):
        tokens, first = list(tokens), len(self._nodes)
        parents = range(first - 1, first + len(tokens) - 1) if parents is None else list(parents)
        known = all(0 <= t < self.vocab_size and t == int(t) for t in tokens)
        earlier = all(-1 <= parent < first + i for i, parent in enumerate(parents))
        if not tokens or len(tokens) != len(parents) or not known or not earlier:
            raise BadInput(f"{tokens} with parents {parents} cannot be sent.")
        self._nodes += zip(tokens, parents)
        return np.array([self._logits((*self._tokens, *self._path(i))) for i in range(first, len(self._nodes))])

    def commit(self, nodes):
        nodes = list(nodes)
        if any(not 0 <= i < len(self._nodes) for i in nodes) or [self._nodes[i][1] for i in nodes] != [-1, *nodes][:-1]:
            raise BadInput(f"{nodes} is not a path.")
        self._tokens += [self._nodes[i][0] for i in nodes]
        self._nodes = []

    def rewind(self, length):
        if length != 0 and not self.committed <= length <= self.length:
            raise BadInput(f"{length} is not a length to go back to.")
        self._nodes = self._nodes[:max(length - self.committed, 0)]
        self._tokens = self._tokens[:length]

    def _path(self, node):
        path = []
        while node >= 0:
            token, node = self._nodes[node]
            path.insert(0, token)
        return path


class MinimalDrafter:
    """start, propose and verified; no name, no hidden states. Drafts the last token again, or nothing behind id 0."""

    def start(self, target, sampler, prompt):
        self.seen = len(prompt)

    def propose(self, tokens, gamma, rng):
        n = min(gamma, 2) if tokens[-1] else 0
        return Draft([int(tokens[-1])] * n, [None] * n, ["again"] * n)

    def verified(self, tokens, path, hidden):
        assert hidden is None and len(tokens) > self.seen
        self.seen = len(tokens)
