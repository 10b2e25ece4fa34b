"""What a decoder has sent and not yet committed: the bookkeeping that every implementation of Decoder needs."""

from __future__ import annotations

import numpy as np

from decode_lab import name_of
from lab.support.errors import BadInput


def checked_ids(model, tokens) -> np.ndarray:
    """Token ids (n,) as int64, n >= 1, all in the model's vocabulary; BadInput otherwise."""
    ids, name = np.asarray(tokens), name_of(model, "the model")
    if ids.ndim != 1 or ids.size == 0:
        raise BadInput(f"{name}: expected a non-empty list of token ids, got shape {ids.shape}.")
    if ids.dtype.kind not in "iu":
        raise BadInput(f"{name}: expected token ids, which are whole numbers, got {ids.dtype}.")
    ids = ids.astype(np.int64)
    if ids.min() < 0 or ids.max() >= model.vocab_size:
        bad = ids[(ids < 0) | (ids >= model.vocab_size)][0]
        raise BadInput(f"{name}: token id {bad} is outside the vocabulary, 0 to {model.vocab_size - 1}.")
    return ids


class Pending:
    """The nodes that a decoder has sent since its last commit (see `decode_lab.Decoder`).

    model: has vocab_size and committed; name and max_length are optional. tokens, parents, depths: of each node, in the
    order sent; the depth of a node whose parent is the last committed token is 0. is_chain: each node's parent is the
    one before it. Every method raises BadInput, and changes nothing, for what cannot be.
    """

    def __init__(self, model):
        self.model = model
        self.clear()

    def __len__(self) -> int:
        return len(self.tokens)

    def clear(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.is_chain = True

    def add(self, tokens, parents=None) -> np.ndarray:
        """Note that tokens (n,) are sent -> their ids (n,) int64. parents: as `Decoder.send` takes them."""
        ids, first = checked_ids(self.model, tokens), len(self)
        if parents is None:
            parents = range(first - 1, first + len(ids) - 1)
        parents = [int(parent) for parent in parents]
        if len(parents) != len(ids) or any(not -1 <= p < first + i for i, p in enumerate(parents)):
            raise BadInput(f"{self._name}: each of the {len(ids)} tokens sent needs one parent, -1 or an earlier node; "
                           f"got {parents}.")
        depths = list(self.depths)
        for parent in parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        check_room(self.model, self.model.committed + max(depths) + 1)
        self.is_chain = self.is_chain and parents == list(range(first - 1, first + len(ids) - 1))
        self.tokens += ids.tolist()
        self.parents += parents
        self.depths = depths
        return ids

    def positions(self, n: int) -> np.ndarray:
        """(n,) positions in the sequence of the last n nodes (SpecInfer, arXiv 2305.09781, 4.2)."""
        return self.model.committed + np.array(self.depths[len(self) - n:], np.int64)

    def visible(self, n: int) -> np.ndarray:
        """(n, all nodes) bool: which nodes the last n see, themselves and their ancestors."""
        every = len(self)
        if self.is_chain:
            return np.tri(n, every, every - n, dtype=bool)
        seen = np.eye(every, dtype=bool)
        for i, parent in enumerate(self.parents):
            if parent >= 0:
                seen[i] |= seen[parent]
        return seen[every - n:]

    def path(self, nodes) -> list[int]:
        """Nodes of a path as a list: root first, each the child of the one before."""
        nodes = [int(i) for i in nodes]
        if any(not 0 <= i < len(self) for i in nodes) or [self.parents[i] for i in nodes] != [-1, *nodes][:len(nodes)]:
            raise BadInput(f"{self._name}: {nodes} is not a path, from the root on, of the {len(self)} tokens sent "
                           "since the last commit.")
        return nodes

    def cut(self, n: int) -> None:
        """Forget all nodes but the first n."""
        del self.tokens[n:], self.parents[n:], self.depths[n:]
        self.is_chain = self.parents == list(range(-1, n - 1))

    def rewound(self, length: int) -> int:
        """How many nodes `Decoder.rewind(length)` leaves, length not being 0; below 0 where committed tokens go too."""
        committed = self.model.committed
        least = getattr(self.model, "rewind_floor", committed)
        if not least <= length <= committed + len(self):
            raise BadInput(f"{self._name}: cannot rewind to {length}: from {least} to the {committed + len(self)} "
                           "tokens it holds, or 0, would be right.")
        return int(length) - committed

    @property
    def _name(self) -> str:
        return name_of(self.model, "the model")


def check_settled(model) -> None:
    """BadInput where a model holds tokens that are sent and not committed: a prefill would have to commit them too."""
    if model.length != model.committed:
        raise BadInput(f"{name_of(model, 'the model')}: {model.length - model.committed} tokens are sent and not "
                       "committed: commit or rewind before a prefill.")


def check_room(model, n_tokens: int) -> None:
    """BadInput where a sequence of n_tokens is longer than the model holds."""
    limit = getattr(model, "max_length", None)
    if limit is not None and n_tokens > limit:
        raise BadInput(f"{name_of(model, 'the model')}: {n_tokens} tokens are more than the {limit} that it holds.")
