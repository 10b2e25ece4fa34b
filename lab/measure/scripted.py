"""Scripted models and drafters, for tests of loops and of drafters, and for grading.

`FakeDecoder` keeps the `decode_lab.Decoder` protocol to the letter and refuses any caller who does not; its logits are
a function of the history alone, so a test knows what every row must be. `ScriptedDrafter` proposes what it is told to.
A scripted model is for edges; equality and speed are claimed on trained weights.
"""

from __future__ import annotations

import numpy as np

from decode_lab import Draft


class ProtocolError(AssertionError):
    """The caller broke the Decoder protocol: a bug in a loop or in a drafter, never bad input."""


class FakeDecoder:
    """logits(history) -> (V,): a Decoder that computes nothing else.

    history is the tuple of tokens up to and including the one whose row is wanted. Counts `forwards` and remembers what
    every call was (`calls`: name and argument) and the sequence's length after it (`lengths`). A rewind below what is
    committed, other than to 0, is refused, as by a model with a state. A refused call changes nothing.
    """

    def __init__(self, logits, vocab_size, max_length=None, tokenizer=None, name="fake"):
        self._logits, self.vocab_size, self.max_length = logits, vocab_size, max_length
        self.tokenizer, self.name = tokenizer, name
        self.tokens: list[int] = []                    # committed
        self.pending: list[tuple[int, int]] = []       # (token, parent) of what was sent since
        self.hidden = np.zeros((0, 2))
        self.calls: list[tuple] = []
        self.lengths: list[int] = []

    @property
    def committed(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        return len(self.tokens) + len(self.pending)

    @property
    def forwards(self) -> int:
        return sum(name in ("send", "prefill") for name, _ in self.calls)

    def called(self, name: str) -> list:
        """The arguments of all calls of this method."""
        return [argument for other, argument in self.calls if other == name]

    def send(self, tokens, parents=None):
        self._sound(tokens)
        first, nodes = len(self.pending), list(self.pending)
        if parents is None:
            parents = range(first - 1, first + len(tokens) - 1)
        self._require(len(tokens) == len(parents), f"{len(tokens)} nodes and {len(parents)} parents")
        for token, parent in zip(tokens, parents):
            self._require(-1 <= parent < len(nodes), f"node {len(nodes)} has the parent {parent}")
            nodes.append((int(token), int(parent)))
        histories = [self.tokens + path_of(nodes, i) for i in range(first, len(nodes))]
        rows = np.array([self._row(history) for history in histories])
        self.pending, self.hidden = nodes, np.array([hidden_row(history) for history in histories])
        self._note("send", (list(tokens), list(parents)))
        return rows

    def prefill(self, tokens):
        self._require(not self.pending, "prefill while tokens are pending")
        self._sound(tokens)
        start, text = len(self.tokens), self.tokens + [int(t) for t in tokens]
        self._require(self.max_length is None or len(text) <= self.max_length, "a prefill past the limit")
        self.tokens, self.hidden = text, np.array([hidden_row(text[:i + 1]) for i in range(start, len(text))])
        self._note("prefill", list(tokens))

    def commit(self, nodes):
        self._require(self.pending, "commit of nothing sent")
        nodes, expected = [int(i) for i in nodes], -1
        for node in nodes:
            self._require(0 <= node < len(self.pending) and self.pending[node][1] == expected,
                          f"{nodes} is not a path from the root")
            expected = node
        self.tokens += [self.pending[node][0] for node in nodes]
        self.pending = []
        self._note("commit", nodes)

    def rewind(self, length):
        self._require(length == 0 or self.committed <= length <= self.length,
                      f"rewind to {length}, {self.committed} are committed and {self.length} held")
        if length == 0:
            self.tokens, self.pending = [], []
        else:
            self.pending = self.pending[:length - self.committed]
        self._note("rewind", length)

    def _row(self, history):
        self._require(self.max_length is None or len(history) <= self.max_length,
                      f"{len(history)} tokens in a model that holds {self.max_length}")
        return np.asarray(self._logits(tuple(history)), dtype=np.float32)

    def _sound(self, tokens):
        self._require(len(tokens), "a forward of nothing")
        for t in tokens:
            self._require(0 <= t < self.vocab_size and t == int(t), f"token {t} in a vocabulary of {self.vocab_size}")

    def _note(self, name, argument):
        self.calls.append((name, argument))
        self.lengths.append(self.length)

    def _require(self, holds, otherwise):
        if not holds:
            raise ProtocolError(f"{self.name}: {otherwise}")


def path_of(nodes, node: int) -> list[int]:
    """The tokens of the nodes (token, parent) from the root to this one, both ends included."""
    tokens = []
    while node >= 0:
        token, node = nodes[node]
        tokens.append(token)
    return tokens[::-1]


def hidden_row(history) -> list[float]:
    """What FakeDecoder has for a hidden state: the token's position, counted from 1, and its id."""
    return [float(len(history)), float(history[-1])]


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
        self.paths: list[list[int]] = []               # the accepted nodes of each round
        self.prompts: list[list[int]] = []             # of each run

    def start(self, target, sampler, prompt):
        self.asked, self.told, self.paths = [], [], []
        self.prompts.append(list(prompt))

    def propose(self, tokens, gamma, rng):
        self.asked.append((len(tokens), gamma))
        draft = self.plan(list(tokens), gamma)
        return draft if isinstance(draft, Draft) else chain(draft)

    def verified(self, tokens, path, hidden):
        self.told.append(list(tokens))
        self.paths.append(list(path))


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
