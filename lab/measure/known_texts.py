"""Decoders that save a model its forwards: a text known beforehand, and forwards that are remembered.

The loops of decode_lab run on both as on any model, so what they count is what a run would have counted.
"""

from __future__ import annotations

import numpy as np

from decode_lab import name_of, prefill
from lab.models.kept_prefix import same_start
from lab.models.pending import Pending, check_settled


class _Held:
    """A decoder that holds a sequence and no cache: what KnownText and Remembered share.

    model: whose vocabulary and names it takes over. Committed tokens lie in `_tokens`, sent ones in `_pending`.
    """

    rewind_floor = 0

    def __init__(self, model):
        self.name, self.vocab_size = name_of(model, "model"), model.vocab_size
        self.tokenizer, self.max_length = getattr(model, "tokenizer", None), getattr(model, "max_length", None)
        self._tokens: list[int] = []
        self._pending = Pending(self)

    @property
    def committed(self) -> int:
        return len(self._tokens)

    @property
    def length(self) -> int:
        return self.committed + len(self._pending)

    def commit(self, nodes):
        self._tokens += [self._pending.tokens[i] for i in self._pending.path(nodes)]
        self._pending.clear()

    def rewind(self, length):
        self._pending.cut(max(self._pending.rewound(length), 0))
        del self._tokens[length:]

    def prefill(self, tokens):
        check_settled(self)
        n = len(self._pending.add(tokens))
        self.commit(range(n))


class KnownText(_Held):
    """A decoder whose greedy continuation is a text known beforehand, whatever the tokens it is sent.

    A greedy text depends on the target alone, not on how it was drafted. So the rounds that a drafter makes on it can
    be counted from the text, without a forward of the target; only the rows on the text's own path are ever read.

    text: ids, prompt and continuation. model: the decoder that wrote it, whose vocabulary and names are taken over.
    """

    def __init__(self, text, model):
        super().__init__(model)
        self.text, self.max_length = [int(t) for t in text], None

    def send(self, tokens, parents=None):
        at = self._pending.positions(len(self._pending.add(tokens, parents)))
        rows = np.zeros((len(at), self.vocab_size), np.float32)
        inside = np.flatnonzero(at + 1 < len(self.text))
        rows[inside, [self.text[i + 1] for i in at[inside]]] = 1.0
        return rows


class Remembered(_Held):
    """A decoder that runs each forward once: the same tokens behind the same sequence give the rows of the first time.

    For many sampled runs from one prompt, whose forwards repeat. The model catches up with the sequence when a forward
    is not known yet. Nothing else may use the model meanwhile.

    shared: for a draft that reads its target's cache, the Remembered target, which is made to hold the sequence first.
    """

    def __init__(self, model, shared: Remembered | None = None):
        super().__init__(model)
        self.model, self._shared = model, shared
        self._known: dict[tuple, np.ndarray] = {}
        self._inside: list[int] = []                           # what the model's own cache has committed
        self._nodes: list[tuple[int, int]] = []                # and what it was sent since: (token, parent)
        model.rewind(0)

    def send(self, tokens, parents=None):
        n = len(self._pending.add(tokens, parents))
        nodes = list(zip(self._pending.tokens, self._pending.parents))
        key = tuple(self._tokens), tuple(nodes), n
        if key not in self._known:
            self._known[key] = self._forward(nodes, n)
        return self._known[key]

    def _forward(self, nodes, n):
        """Make the model hold the sequence, then send of `nodes` what it does not have -> rows of the last n."""
        holder = self._shared or self
        if holder is not self:
            holder._drop_nodes()                               # a draft on its cache cannot read there meanwhile
        holder._hold(self._tokens)
        if self.model.length - self.model.committed != len(self._nodes):      # its target has moved
            self._nodes = []
        have = min(same_start(self._nodes, nodes), len(nodes) - n)
        self.model.rewind(self.model.committed + have)
        rows = self.model.send(*zip(*nodes[have:]))
        self._nodes = nodes
        return rows[len(rows) - n:]

    def _hold(self, tokens):
        """Make the model's cache hold these tokens, committed, from as far back as they differ."""
        if self._inside == list(tokens):
            return
        same = same_start(self._inside, tokens)
        if same < getattr(self.model, "rewind_floor", self.model.committed):
            same = 0
        self.model.rewind(same)
        prefill(self.model, tokens[same:])
        self._inside, self._nodes = list(tokens), []

    def _drop_nodes(self):
        if self._nodes:
            self.model.rewind(self.model.committed)
            self._nodes = []
