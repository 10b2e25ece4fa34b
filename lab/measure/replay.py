"""Decoders that spare a model its forwards: a text known beforehand, a cache that is kept, forwards remembered.

The loops of decode_lab run on both as on any model, so what they count is what a run would have counted.
"""

from __future__ import annotations

import numpy as np

from console import BadInput
from decode_lab import checked_ids, checked_path, go_back, tree_layout


class KnownText:
    """A decoder whose greedy continuation is a text known beforehand, whatever the tokens it is sent.

    A greedy text depends on the target alone, not on how it was drafted. So the rounds that a drafter makes on it can be
    counted from the text, without a forward of the target; only the rows on the text's own path are ever read.

    text: ids, prompt and continuation. model: the decoder that wrote it, whose vocabulary and names are taken over.
    """

    def __init__(self, text, model):
        self.text, self.length, self._parents = [int(t) for t in text], 0, []
        self.name, self.vocab_size = model.name, model.vocab_size
        self.tokenizer = getattr(model, "tokenizer", None)

    def extend(self, tokens):
        n = len(checked_ids(self, tokens))
        rows = self._rows(np.arange(self.length, self.length + n))
        self.length += n
        return rows

    def rollback(self, length):
        self.length, self._parents = length, []

    def extend_tree(self, tokens, parents):
        self._parents, depth, _ = tree_layout(self, self._parents, parents, len(tokens))
        return self._rows(self.length + depth)

    def keep(self, nodes):
        self.length += len(checked_path(self, self._parents, nodes))
        self._parents = []

    def _rows(self, at):
        rows = np.zeros((len(at), self.vocab_size), np.float32)
        inside = np.flatnonzero(at + 1 < len(self.text))
        rows[inside, [self.text[i + 1] for i in at[inside]]] = 1.0
        return rows


def same_start(a, b) -> int:
    """How many tokens two sequences share from their start on."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


class KeptPrefix:
    """A model that keeps its cache from run to run, so that a prompt's prefill sends only what the cache lacks.

    A run empties its target first; here that waits for what comes next. The cache then goes back to where the new
    prompt leaves the old sequence, or all the way where it holds a state that cannot go back so far (a hybrid's, before
    its last commit; a conversation that only grows needs no such step). Nothing else may extend the model meanwhile.

    sent: tokens that the run's prefill sent last.
    """

    def __init__(self, model):
        model.rollback(0)
        self.model, self.sent, self._emptied = model, 0, False
        self._tokens: list[int] = []                           # what the cache holds
        self._nodes: list[int] = []                            # of the tree not yet kept

    def __getattr__(self, name):
        return getattr(self.model, name)

    @property
    def length(self) -> int:
        return 0 if self._emptied else self.model.length

    def shared(self, tokens) -> int:
        """How many of these tokens, from their start on, the cache holds."""
        return min(same_start(self._tokens, tokens), self.model.length)

    def rollback(self, length):
        self._emptied = length == 0
        if length == 0:
            self.sent = 0
        else:
            self.model.rollback(length)
            del self._tokens[length:]
        self._nodes = []

    def prefill(self, tokens) -> None:
        tokens = [int(t) for t in tokens]
        if self._emptied:
            tokens = tokens[self._go_back(tokens):]
        self.sent = len(tokens)
        if tokens:
            getattr(self.model, "prefill", self.model.extend)(tokens)
            self._tokens += tokens

    def extend(self, tokens):
        self._empty()
        rows = self.model.extend(tokens)
        self._tokens += [int(t) for t in tokens]
        return rows

    def extend_tree(self, tokens, parents):
        self._empty()
        rows = self.model.extend_tree(tokens, parents)
        self._nodes += [int(t) for t in tokens]
        return rows

    def keep(self, nodes):
        self.model.keep(nodes)
        self._tokens += [self._nodes[i] for i in nodes]
        self._nodes = []

    def _go_back(self, tokens) -> int:
        """Make the cache hold what it shares with these tokens, or nothing -> how many that are."""
        same = go_back(self.model, self.shared(tokens))
        self._tokens, self._emptied = tokens[:same], False
        return same

    def _empty(self):
        if self._emptied:
            self._go_back([])


class Remembered:
    """A decoder that runs each forward once: the same tokens behind the same sequence give the rows of the first time.

    For many sampled runs from one prompt, whose forwards repeat. The model catches up with the sequence when a forward
    is not known yet. Nothing else may use the model meanwhile.

    shared: for a draft that reads its target's cache, the Remembered target, which is made to hold the sequence first.
    """

    def __init__(self, model, shared: Remembered | None = None):
        self.model, self._shared, self._known = model, shared, {}
        self.name, self.vocab_size = model.name, model.vocab_size
        self.tokenizer, self.max_length = getattr(model, "tokenizer", None), getattr(model, "max_length", None)
        self._inside: list[int] = []                           # what the model's own cache holds
        model.rollback(0)
        self.rollback(0)

    @property
    def length(self) -> int:
        return len(self._tokens)

    def prefill(self, tokens) -> None:
        self._no_tree()
        self._tokens += checked_ids(self, tokens).tolist()

    def extend(self, tokens):
        self._no_tree()
        tokens = checked_ids(self, tokens).tolist()
        rows = self._remember(("chain", *tokens), lambda: self.model.extend(tokens))
        self._tokens += tokens
        return rows

    def rollback(self, length):
        self._tokens = self._tokens[:length] if length else []
        self._nodes, self._parents = [], []

    def extend_tree(self, tokens, parents):
        tokens = checked_ids(self, tokens).tolist()
        self._parents = tree_layout(self, self._parents, parents, len(tokens))[0]
        self._nodes += tokens
        # All nodes of the tree are sent at once, those of earlier calls too, so that the key says all there is to know.
        rows = self._remember((*self._nodes, *self._parents),
                              lambda: self.model.extend_tree(self._nodes, self._parents))
        return rows[len(self._nodes) - len(tokens):]

    def keep(self, nodes):
        self._tokens += [self._nodes[i] for i in checked_path(self, self._parents, nodes)]
        self._nodes, self._parents = [], []

    def _remember(self, key, forward):
        key = tuple(self._tokens), key
        if key not in self._known:
            holder = self._shared or self
            holder._hold(self._tokens)
            self.model.rollback(holder.model.length)           # of a draft on the holder's cache: what it had sent
            self._known[key] = forward()
            self.model.rollback(holder.model.length if self._shared else len(self._tokens))
        return self._known[key]

    def _hold(self, tokens):
        """Make the model's cache hold these tokens, from as far back as they differ."""
        same = go_back(self.model, same_start(self._inside, tokens))
        if tokens[same:]:
            getattr(self.model, "prefill", self.model.extend)(tokens[same:])
        self._inside = list(tokens)

    def _no_tree(self):
        if self._nodes:
            raise BadInput(f"{self.name}: a tree is pending; keep a path or roll back before extending")
