"""Which tree is worth verifying: where the target's choices rank in a draft's list, and the best tree for those ranks.

Source: Sequoia, arXiv 2402.12374 (candidates without replacement, the best tree by dynamic programming).
"""

from __future__ import annotations

import numpy as np

from lab.drafters.trees import TreeShape
from lab.support.errors import BadInput


def draft_ranks(logits, tokens) -> np.ndarray:
    """Rank of each next token in the draft's logits: (T, V) and (T,) -> (T - 1,) of tokens[1:], 0 the likeliest.

    Leading axes are kept, (n, T, V) and (n, T) -> (n, T - 1). Ties count as `argmax` breaks them, lower id first.
    """
    logits, tokens = np.asarray(logits), np.asarray(tokens)
    if logits.shape[:-1] != tokens.shape:
        raise BadInput(f"draft_ranks got logits of shape {logits.shape} and tokens of shape {tokens.shape}: "
                       "(…, T, V) and (…, T) would be right.")
    logits, tokens = logits[..., :-1, :], tokens[..., 1:, None]
    value = np.take_along_axis(logits, tokens, axis=-1)
    earlier = np.arange(logits.shape[-1]) < tokens
    return ((logits > value) | ((logits == value) & earlier)).sum(axis=-1)


def accept_lengths(ranks, shape: TreeShape) -> np.ndarray:
    """Accept length of a tree drafted greedily at each start: ranks (..., T) -> T - depth + 1 per row, flattened.

    From start t the walk takes the child of rank ranks[t], then ranks[t + 1], … as long as the tree has it. On the
    target's own greedy text these are the lengths that verification accepts there.
    """
    ranks = np.reshape(ranks, (-1, np.shape(ranks)[-1]))
    if ranks.size and ranks.min() < 0:
        raise BadInput(f"accept_lengths got the rank {ranks.min()}: 0, the likeliest, or more would be right.")
    widest = max((len(c) for c in shape.children.values()), default=0)
    step = np.full((len(shape) + 1, widest + 1), -1)           # row 0 is the root, row 1 + i node i; -1: no such child
    for parent, children in shape.children.items():
        step[parent + 1, :len(children)] = np.array(children) + 1
    starts = max(ranks.shape[-1] - shape.depth + 1, 0)
    at, lengths = np.zeros((len(ranks), starts), int), np.zeros((len(ranks), starts), int)
    for d in range(shape.depth):
        at = np.where(at >= 0, step[at, np.minimum(ranks[:, d:d + starts], widest)], -1)
        lengths += at >= 0
    return lengths.reshape(-1)


def accept_lengths_to_end(ranks, shape: TreeShape) -> np.ndarray:
    """`accept_lengths` behind every token of one text: ranks (n,) -> (n,), where starts near the end are counted too.

    There drafts are cut short, as the text's last token is the target's own: at most n - 1 - i at start i.
    """
    n = len(ranks)
    padded = np.append(ranks, np.full(shape.depth, np.iinfo(np.int64).max))      # past the end nothing is accepted
    return np.minimum(accept_lengths(padded, shape)[:n], np.arange(n)[::-1])


def chain_accept_lengths(ranks, gamma: int) -> np.ndarray:
    """`accept_lengths_to_end` of a greedy chain of gamma tokens: ranks (texts, n) or (n,) -> as many, flattened."""
    chain, ranks = TreeShape.branching((1,) * gamma), np.asarray(ranks)
    return np.concatenate([accept_lengths_to_end(row, chain) for row in ranks.reshape(-1, ranks.shape[-1])])


def rank_table(ranks, depth: int, width: int) -> np.ndarray:
    """(depth, width): at draft position i + 1, the share of starts whose next token has rank k, given that the
    positions before it had ranks below `width` (were on the tree). The rest of each row is a refusal."""
    ranks = np.reshape(ranks, (-1, np.shape(ranks)[-1]))
    starts = max(ranks.shape[-1] - depth + 1, 0)
    alive, table = np.ones((len(ranks), starts), bool), np.zeros((depth, width))
    for d in range(depth):
        now = ranks[:, d:d + starts]
        for k in range(width):
            table[d, k] = (now[alive] == k).mean() if alive.any() else 0.0
        alive &= now < width
    return table


def best_tree(probabilities, n_nodes: int) -> tuple[TreeShape, float]:
    """The tree of n_nodes drafted nodes with the most expected tokens, the target's own included.

    probabilities: (width,) or (depth, width): the chance that the k-th candidate of a level is the accepted one,
    given that its parent is. Dynamic programming as Sequoia's (arXiv 2402.12374, 4.1), with one table per level, so
    depth is bounded by the rows given (a single row is used at every depth).
    """
    table = np.asarray(probabilities, float)
    if n_nodes < 0 or table.ndim not in (1, 2) or table.size == 0 or not (table >= 0).all() \
            or (table.sum(axis=-1) > 1 + 1e-9).any():
        raise BadInput(f"best_tree needs n_nodes >= 0 and probabilities whose rows sum to at most 1; got {n_nodes} "
                       "nodes.")
    same_everywhere = table.ndim == 1
    rows = table[None] if same_everywhere else table
    if same_everywhere:                                        # no deeper than there are nodes
        rows = np.repeat(rows, max(n_nodes, 1), axis=0)
    # below[d][m]: most expected accepted tokens with m nodes under a node of depth d; split[d][k][m]: the nodes that
    # the k-th child takes (itself included) when m are left for children k, k + 1, …
    n, width = n_nodes, rows.shape[1]
    below, splits = np.zeros(n + 1), []
    for p in rows[::-1]:
        own = np.concatenate([[0.0], 1.0 + below[:n]])         # value of a child that takes m nodes, once accepted
        rest, split = np.zeros(n + 1), np.zeros((width, n + 1), int)
        for k in reversed(range(width)):
            choice = np.full((n + 1, n + 1), -1.0)             # [m left, m taken]; taking none ends the siblings
            for m in range(n + 1):
                choice[m, 1:m + 1] = p[k] * own[1:m + 1] + rest[m - np.arange(1, m + 1)]
                choice[m, 0] = 0.0
            split[k] = choice.argmax(axis=1)
            rest = choice.max(axis=1)
        below = rest
        splits.append(split)
    splits = splits[::-1]
    nodes, queue = list[tuple[int, int]](), [(-1, 0, n)]
    for parent, depth, left in queue:                          # the queue grows while it is read: level by level
        for k in range(width if depth < len(splits) else 0):
            taken = int(splits[depth][k][left])
            if taken == 0:
                break
            queue.append((len(nodes), depth + 1, taken - 1))
            nodes.append((parent, k))
            left -= taken
    return TreeShape(nodes), 1.0 + float(below[n])
