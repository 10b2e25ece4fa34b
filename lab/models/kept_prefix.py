"""A model that keeps its cache from run to run."""

from __future__ import annotations

from decode_lab import prefill
from lab.models.pending import check_room, check_settled, checked_ids


def same_start(a, b) -> int:
    """How many tokens two sequences share from their start on."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


class KeptPrefix:
    """A decoder whose cache stays from run to run, so that a prompt's prefill sends only what the cache lacks.

    A run empties its target first; here that waits for what comes next. The cache then goes back to where the new
    prompt leaves the old sequence, or all the way where the model cannot go back so far (its `rewind_floor`: a hybrid
    goes back to its last commit; a conversation that only grows needs no such step). Nothing else may use the model
    meanwhile.

    sent: tokens that the run's prefill sent last.
    """

    def __init__(self, model):
        model.rewind(0)
        self.model, self.sent, self._emptied = model, 0, False
        self._tokens: list[int] = []                           # what the cache holds: committed, and sent since

    def __getattr__(self, name):
        return getattr(self.model, name)

    @property
    def length(self) -> int:
        return 0 if self._emptied else self.model.length

    @property
    def committed(self) -> int:
        return 0 if self._emptied else self.model.committed

    def shared(self, tokens) -> int:
        """How many of these tokens, from their start on, the cache holds."""
        return min(same_start(self._tokens, tokens), self.model.committed)

    def rewind(self, length):
        if length == 0:
            self.sent, self._emptied = 0, True
        else:
            self._empty()                                      # what waits to be forgotten is not there to go back to
            self.model.rewind(length)
            del self._tokens[length:]

    def prefill(self, tokens) -> None:
        check_settled(self)
        check_room(self, self.committed + len(tokens))
        tokens = checked_ids(self, tokens).tolist()
        if self._emptied:
            tokens = tokens[self._go_back(tokens):]
        self.sent = len(tokens)
        del self._tokens[self.model.length:]
        prefill(self.model, tokens)
        self._tokens += tokens

    def send(self, tokens, parents=None):
        self._empty()
        del self._tokens[self.model.length:]                   # what another call, such as `show`, made it forget
        rows = self.model.send(tokens, parents)
        self._tokens += [int(t) for t in tokens]
        return rows

    def commit(self, nodes):
        self._empty()
        nodes, first = list(nodes), self.model.committed
        self.model.commit(nodes)
        self._tokens = self._tokens[:first] + [self._tokens[first + i] for i in nodes]

    def _go_back(self, tokens) -> int:
        """Make the cache hold what it shares with these tokens, or nothing -> how many that are."""
        same = self.shared(tokens)
        if same < getattr(self.model, "rewind_floor", self.model.committed):
            same = 0
        self.model.rewind(same)
        self._tokens, self._emptied = tokens[:same], False
        return same

    def _empty(self):
        if self._emptied:
            self._go_back([])
