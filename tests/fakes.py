"""Scripted models and drafters, and an rng that enumerates: what the tests of the decoding loops are made of.

`FakeDecoder` keeps the `decode_lab.Decoder` protocol to the letter and refuses whoever does not; its logits
are a function of the history alone, so a test knows what every row must be. `ScriptedDrafter` proposes what
it is told to. `outcomes` runs a function once per way that its random choices can fall, so that a
distribution is summed, not sampled.
"""

from __future__ import annotations

import numpy as np

from decode_lab import Draft


class ProtocolError(AssertionError):
    """The caller broke the Decoder protocol: a bug in a loop or in a drafter, never bad input."""


class FakeDecoder:
    """logits(history) -> (V,): a Decoder that computes nothing else.

    history is the tuple of tokens up to and including the one whose row is wanted. Counts `forwards` and
    remembers what every call was (`calls`: name and argument) and the cache length after it (`lengths`).
    """

    def __init__(self, logits, vocab_size, max_length=None, tokenizer=None, name="fake"):
        self._logits, self.vocab_size, self.max_length = logits, vocab_size, max_length
        self.tokenizer, self.name = tokenizer, name
        self.tokens: list[int] = []                    # committed
        self.pending: list[tuple[int, int]] = []       # (token, parent) of the tree sent but not kept
        self.hidden = np.zeros((0, 1))
        self.calls: list[tuple] = []
        self.lengths: list[int] = []

    @property
    def length(self):
        return len(self.tokens)

    @property
    def forwards(self):
        return sum(name in ("extend", "prefill", "extend_tree") for name, _ in self.calls)

    def called(self, name):
        return [argument for other, argument in self.calls if other == name]

    def extend(self, tokens):
        return self._extend("extend", tokens)

    def prefill(self, tokens):
        self._extend("prefill", tokens)

    def rollback(self, length):
        self._require(0 <= length <= self.length, f"rollback to {length}, the cache holds {self.length}")
        self.tokens, self.pending = self.tokens[:length], []
        self._note("rollback", length)

    def extend_tree(self, tokens, parents):
        self._sound(tokens)
        self._require(len(tokens) == len(parents), f"{len(tokens)} nodes and {len(parents)} parents")
        first = len(self.pending)
        for i, parent in enumerate(parents):
            self._require(-1 <= parent < first + i, f"node {first + i} has the parent {parent}")
            self.pending.append((int(tokens[i]), int(parent)))
        self._note("extend_tree", (list(tokens), list(parents)))
        return np.array([self._row(self.tokens + self._path(i)) for i in range(first, len(self.pending))])

    def keep(self, nodes):
        self._require(self.pending, "keep without a tree")
        expected = -1
        for node in nodes:
            self._require(self.pending[node][1] == expected, f"{nodes} is not a path from the root")
            expected = node
        self.tokens += [self.pending[node][0] for node in nodes]
        self.pending = []
        self._note("keep", list(nodes))

    def _extend(self, name, tokens):
        self._require(not self.pending, f"{name} while a tree is pending")
        self._sound(tokens)
        start = self.length
        self.tokens += [int(t) for t in tokens]
        self._note(name, list(tokens))
        return np.array([self._row(self.tokens[:i + 1]) for i in range(start, self.length)])

    def _row(self, history):
        self._require(self.max_length is None or len(history) <= self.max_length,
                      f"{len(history)} tokens in a model that holds {self.max_length}")
        return np.asarray(self._logits(tuple(history)), dtype=np.float32)

    def _path(self, node):
        tokens = []
        while node >= 0:
            token, node = self.pending[node]
            tokens.append(token)
        return tokens[::-1]

    def _sound(self, tokens):
        self._require(len(tokens), "a forward of nothing")
        for t in tokens:
            self._require(0 <= t < self.vocab_size, f"token {t} in a vocabulary of {self.vocab_size}")

    def _note(self, name, argument):
        self.calls.append((name, argument))
        self.lengths.append(self.length)

    def _require(self, holds, otherwise):
        if not holds:
            raise ProtocolError(f"{self.name}: {otherwise}")


def one_hot(token, vocab_size, high=5.0):
    """Logits whose argmax is `token`."""
    z = np.zeros(vocab_size)
    z[token] = high
    return z


def script(text, vocab_size, **options):
    """A decoder whose greedy choice after n tokens is text[n], whatever those tokens were."""
    return FakeDecoder(lambda history: one_hot(text[len(history)], vocab_size), vocab_size, **options)


def table_logits(vocab_size, seed, scale=1.5, order=2):
    """Random logits that depend on the last `order` tokens: a function of the history, always the same."""
    rng = np.random.default_rng(seed)
    table = (scale * rng.standard_normal((vocab_size + 1,) * order + (vocab_size,))).astype(np.float32)

    def logits(history):
        known = (vocab_size,) * order + tuple(history)
        return table[known[len(known) - order:]]

    return logits


def random_decoder(vocab_size, seed, scale=1.5, order=2, **options):
    return FakeDecoder(table_logits(vocab_size, seed, scale, order), vocab_size, **options)


class ScriptedDrafter:
    """Proposes by `plan(tokens, gamma) -> Draft or list of tokens`; remembers what it was told."""

    name = "scripted"

    def __init__(self, plan):
        self.plan = plan
        self.asked: list[tuple[int, int]] = []         # (tokens so far, gamma) of each proposal
        self.told: list[list[int]] = []                # the sequence after each round
        self.resets = 0

    def reset(self, target, sampler):
        self.asked, self.told, self.resets = [], [], self.resets + 1

    def propose(self, tokens, gamma, rng):
        self.asked.append((len(tokens), gamma))
        draft = self.plan(list(tokens), gamma)
        return draft if isinstance(draft, Draft) else chain(draft)

    def kept(self, tokens):
        self.told.append(list(tokens))


def chain(tokens, q=None, sources=None):
    """A chain without probabilities, unless q is given."""
    tokens = list(tokens)
    n = len(tokens)
    return Draft(tokens, [None] * n if q is None else list(q), sources or ["scripted"] * n)


def tree(tokens, parents, q=None):
    tokens = list(tokens)
    n = len(tokens)
    return Draft(tokens, [None] * n if q is None else list(q), ["scripted"] * n, list(parents))


def from_text(text, wrong=(), vocab_size=None):
    """A drafter that knows the target's text, but for the positions in `wrong`: there it says the next id."""
    wrong = set(wrong)

    def plan(tokens, gamma):
        at = range(len(tokens), min(len(tokens) + gamma, len(text)))
        return [(text[i] + 1) % vocab_size if i in wrong else text[i] for i in at]

    return ScriptedDrafter(plan)


# -- enumeration ---------------------------------------------------------------------------------------------

class _Coin:
    """What `Paths.random` returns: a uniform number of which only `u < threshold` may be asked."""

    def __init__(self, paths):
        self._paths = paths

    def __lt__(self, threshold):
        heads = min(max(float(threshold), 0.0), 1.0)
        return self._paths.choose(np.array([1.0 - heads, heads])) == 1


class Paths:
    """An rng that takes one path through all random choices, and on `advance` the next one."""

    def __init__(self):
        self._trail: list[list] = []                   # [index into options, options, probabilities]
        self._at, self.probability = 0, 1.0

    def random(self):
        return _Coin(self)

    def choose(self, p):
        """An index of p, with probability p[index]; in place of `decode_lab.draw`."""
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


def outcomes(monkeypatch, function):
    """{result: probability} of function(rng), over every way that its draws and acceptance tests can fall."""
    import decode_lab
    monkeypatch.setattr(decode_lab, "draw", lambda p, rng: rng.choose(p))
    paths, table = Paths(), {}
    while True:
        result = function(paths)
        table[result] = table.get(result, 0.0) + paths.probability
        if not paths.advance():
            return table


def exact(logits, sampler, prompt, n_new, eos=()):
    """{the n_new tokens: probability} of plain sampling from logits(history); an ended one is shorter."""
    table = {(): 1.0}
    for _ in range(n_new):
        longer = {}
        for text, weight in table.items():
            if text and text[-1] in eos:
                longer[text] = longer.get(text, 0.0) + weight
                continue
            history = tuple(prompt) + text
            for token, p in enumerate(sampler.probs(logits(history), history)):
                if p > 0:
                    longer[text + (token,)] = weight * p
        table = longer
    return table


def same_distribution(a, b, tolerance=1e-9):
    """The largest difference of two {outcome: probability} tables is below `tolerance`."""
    return max(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in a.keys() | b.keys()) < tolerance


class Counted(list):
    """A list that counts the elements read of all such lists; a test sets `Counted.reads` to 0 first."""

    reads = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        Counted.reads += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self):
        Counted.reads += len(self)
        return super().__iter__()
