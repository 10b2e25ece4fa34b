"""A smaller model drafts a tree: of a fixed shape, or shaped by its own confidence; one forward per level."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from decode_lab import Decoder, Draft, Sampler, draw, residual, to_numpy
from lab.drafters.model import FromModel, fit_row
from lab.support.errors import BadInput, whole


class TreeShape:
    """Which candidates a tree holds: nodes (parent, rank), rank 0 the likeliest child; the root is not a node.

    len(shape) is the number of drafted nodes; a verification sends one more, the root.
    """

    def __init__(self, nodes: Sequence[tuple[int, int]]):
        self.nodes = list(nodes)
        self.children: dict[int, list[int]] = {i: [] for i in range(-1, len(self.nodes))}
        self.depths: list[int] = []
        for i, (parent, rank) in enumerate(self.nodes):
            if not -1 <= parent < i or rank != len(self.children[parent]):
                raise BadInput(f"Tree node {i} = (parent {parent}, rank {rank}) is impossible: the parent comes first "
                               "and its children have ranks 0, 1, 2, … in order.")
            self.children[parent].append(i)
            self.depths.append(self.depths[parent] + 1 if parent >= 0 else 1)

    @classmethod
    def branching(cls, widths: Sequence[int]) -> TreeShape:
        """Every node of level d has widths[d] children: (1, 1, 1) is a chain, (4, 2) has 4 + 8 nodes."""
        widths = [whole(f"the width of level {level}", width, 1) for level, width in enumerate(widths)]
        nodes: list[tuple[int, int]] = []
        level: Sequence[int] = [-1]
        for width in widths:
            first = len(nodes)
            nodes += [(parent, rank) for parent in level for rank in range(width)]
            level = range(first, len(nodes))
        return cls(nodes)

    def __len__(self):
        return len(self.nodes)

    @property
    def depth(self) -> int:
        return max(self.depths, default=0)


class TreeDrafter(FromModel):
    """A smaller model drafts a tree of a fixed shape, one forward per level.

    sample=False: a node's children are the model's most likely next tokens, deterministic candidates. sample=True:
    they are drawn one after another without replacement by `sampler` (None: the target's), each with the
    distribution it was drawn from, which `accept` needs to stay lossless.
    """

    def __init__(self, model: Decoder, shape: TreeShape, sampler: Sampler | None = None, sample: bool = False,
                 name: str | None = None):
        super().__init__(model, sampler, name)
        self.shape, self.sample = shape, sample

    def propose(self, tokens, gamma, rng) -> Draft:
        parents: list[int] = []                                                   # of each drafted node
        draft, gamma = Draft(parents=parents), self._follower.room(tokens, gamma)
        if gamma < 1:
            return draft
        rows = {-1: self._follower.send(self._follower.catch_up(tokens))[-1]}     # node -> logits of what follows it
        first = self.model.length - self.model.committed                          # nodes that the sequence itself takes
        sent = {-1: first - 1}                                                    # draft node -> node of the model
        for level in range(gamma):
            expand = self._level(draft, rows, tokens, rng)
            if not expand or level + 1 == gamma:
                break
            logits = self.model.send([draft.tokens[i] for i in expand], [sent[parents[i]] for i in expand])
            for i in expand:
                sent[i] = first + len(sent) - 1
            rows = dict(zip(expand, logits))
        self.model.rewind(len(tokens))             # the tree goes: what of it is kept is sent again with the next round
        return self._chosen(draft)

    def _level(self, draft, rows, tokens, rng) -> list[int]:
        """Add the children of the nodes in `rows` to the draft -> those to be expanded in turn."""
        if -1 in rows:
            self._at = {-1: -1}                                # draft node -> node of the shape
        expand = []
        for node, row in rows.items():
            children = self.shape.children[self._at[node]]
            for child, (token, q) in zip(children, self._candidates(draft, node, row, tokens, len(children), rng)):
                self._at[len(draft.tokens)] = child
                if self.shape.children[child]:
                    expand.append(len(draft.tokens))
                draft.add(token, q, self.name, node)
        return expand

    def _candidates(self, draft, node, row, tokens, n, rng):
        """Yield n candidates behind a node as (token, the distribution it was drawn from, None without chance)."""
        history = [] if self._sampler.repetition_penalty == 1 else list(tokens) + tokens_to(draft, node)
        if not self.sample:
            for token in likeliest(row, n, self._sampler, history, self._vocab_size):
                yield token, None
            return
        q = self._sampler.probs(fit_row(row, self._vocab_size), history)
        for _ in range(n):
            token = draw(q, rng)
            yield token, q
            q = residual(q, token)                             # without replacement: the rest, renormalised
            if not q.any():
                return

    def _chosen(self, draft):
        return draft


class ConfidentTreeDrafter(TreeDrafter):
    """A tree shaped by the draft's confidence: the n_nodes likeliest paths (EAGLE-2, arXiv 2406.16858, 4.1 and 4.2).

    Each level expands the `width` nodes with the largest product of draft probabilities from the root, each into its
    `width` likeliest children; of all nodes seen, the n_nodes best are sent. Deterministic candidates.
    """

    def __init__(self, model: Decoder, n_nodes: int, depth: int, width: int = 4, name: str | None = None):
        super().__init__(model, TreeShape([]), name=name)
        self.n_nodes, self.depth = whole("n_nodes", n_nodes, 1), whole("depth", depth, 1)
        self.width = whole("width", width, 1)

    def propose(self, tokens, gamma, rng) -> Draft:
        return super().propose(tokens, min(gamma, self.depth), rng)

    def _level(self, draft, rows, tokens, rng):
        if -1 in rows:
            self._scores = {-1: 0.0}
        new = []
        for node, row in rows.items():
            found = [token for token, _ in self._candidates(draft, node, row, tokens, self.width, rng)]
            for token, log_p in zip(found, log_probs(row, found, self._vocab_size)):
                new.append(len(draft.tokens))
                self._scores[new[-1]] = self._scores[node] + log_p
                draft.add(token, None, self.name, node)
        return sorted(self._best(new, self.width))

    def _best(self, nodes, n):
        """The n nodes with the largest scores, ties by lower index."""
        return sorted(nodes, key=lambda i: (-self._scores[i], i))[:n]

    def _chosen(self, draft):
        # A child never scores above its parent and comes after it, so the best nodes form a tree.
        best = sorted(self._best(range(len(draft.tokens)), self.n_nodes))
        place = {-1: -1, **{i: j for j, i in enumerate(best)}}
        return Draft([draft.tokens[i] for i in best], [None] * len(best), [self.name] * len(best),
                     [place[draft.parents[i]] for i in best])


def tokens_to(draft: Draft, node: int) -> list[int]:
    """Tokens from the root of a tree to this node, both ends included; [] for -1."""
    tokens, parents = list[int](), draft.parents or []
    while node >= 0:
        tokens.append(draft.tokens[node])
        node = parents[node]
    return tokens[::-1]


def path_along(draft: Draft, tokens: Sequence[int]) -> list[int]:
    """The nodes that these tokens go down to, from the root on: of the target's own tokens, those that it accepts."""
    children, path = draft.children(), list[int]()
    for token in tokens:
        hits = [i for i in children.get(path[-1] if path else -1, []) if draft.tokens[i] == token]
        if not hits:
            break
        path.append(hits[0])
    return path


def likeliest(row, n: int, sampler: Sampler = Sampler(), history: Sequence[int] = (),
              vocab_size: int | None = None) -> list[int]:
    """The n ids of the largest logits (V',) after the penalty, largest first, ties by lower id.

    vocab_size: ids from there on are left out. Of a tensor without a penalty only n + 1 come to the host, unless the
    last of the n has a tie outside.
    """
    row = row[:vocab_size]
    if n < 1:
        return []
    if hasattr(row, "topk") and (sampler.repetition_penalty == 1 or not len(history)):
        values, ids = row.topk(min(n + 1, len(row)))
        values, ids = to_numpy(values), ids.cpu().numpy()
        if len(row) <= n or values[n - 1] > values[n]:           # topk takes any of those that tie
            return ids[np.lexsort((ids, -values))][:n].tolist()
    scores = sampler.penalised(row, history)
    if n >= len(scores):
        ids = np.arange(len(scores))
    else:
        ids = np.flatnonzero(scores >= np.partition(scores, -n)[-n])
    return ids[np.argsort(-scores[ids], kind="stable")][:n].tolist()


def log_probs(row, ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """log softmax of logits (V',), over the first vocab_size ids, at `ids` (n,) -> (n,) float64."""
    row = row[:vocab_size]
    if hasattr(row, "logsumexp"):
        row = row.float()
        return to_numpy(row[list(ids)] - row.logsumexp(-1))
    row = to_numpy(row)
    top = row.max()
    return row[list(ids)] - top - np.log(np.exp(row - top).sum())
