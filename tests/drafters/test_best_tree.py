"""Ranks, accept lengths and the best tree, by hand, by sorting and by trying every tree."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from console import BadInput
from decode_lab import Run, autoregressive_generate, tree_generate
from lab.drafters.best_tree import (
    accept_lengths,
    accept_lengths_to_end,
    best_tree,
    chain_accept_lengths,
    draft_ranks,
    rank_table,
)
from lab.drafters.trees import TreeDrafter, TreeShape
from lab.measure.scripted import random_decoder
from loops import IRREGULAR, one_sentence, quick


@pytest.mark.parametrize("widths, counted", [
    ((1,), 1), ((1, 1), 2), ((1,) * 4, 4), ((1,) * 6, 6), ((2, 2, 2), 14), ((3, 3, 3), 39),
    ((4, 2, 2, 1), 44), ((8, 4, 2, 1), 168), ((4,) * 4, 340), ((4,), 4), ((), 0)])
def test_node_counts(widths, counted):
    tree = TreeShape.branching(widths)
    lengths = accept_lengths(np.zeros(10, int), tree)
    assert len(tree) == counted and len(lengths) == 10 - len(widths) + 1 and (lengths == len(widths)).all()


def test_accept_lengths_by_hand():
    ranks = np.array([0, 1, 0, 2, 0, 0])
    assert accept_lengths(ranks, TreeShape.branching((1, 1))).tolist() == [1, 0, 1, 0, 2]
    assert accept_lengths(ranks, TreeShape.branching((2, 2))).tolist() == [2, 2, 1, 0, 2]
    assert accept_lengths(ranks, TreeShape.branching((4,))).tolist() == [1] * 6
    assert accept_lengths(ranks, TreeShape.branching((3, 1, 1))).tolist() == [1, 2, 1, 3]
    assert accept_lengths(ranks, TreeShape.branching((1,) * 7)).tolist() == []
    # Root: ranks 0 and 1; only rank 1 goes on, with rank 0.
    assert accept_lengths(ranks, TreeShape([(-1, 0), (-1, 1), (1, 0)])).tolist() == [1, 2, 1, 0, 1]
    both = np.stack([ranks, ranks[::-1]])
    assert accept_lengths(both, TreeShape.branching((1, 1))).tolist() == [1, 0, 1, 0, 2] + [2, 1, 0, 1, 0]


def test_accept_lengths_and_rank_table_flatten_leading_axes():
    ranks = np.random.default_rng(0).integers(4, size=(2, 3, 9))
    flat = ranks.reshape(6, 9)
    tree = TreeShape.branching((2, 1))
    assert accept_lengths(ranks, tree).tolist() == accept_lengths(flat, tree).tolist()
    assert rank_table(ranks, 3, 2).tolist() == rank_table(flat, 3, 2).tolist()


def test_draft_ranks():
    logits = np.array([[1.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0], [4.0, 3.0, 2.0, 1.0]])
    assert draft_ranks(logits, np.array([0, 1, 2])).tolist() == [0, 2]
    assert draft_ranks(logits, np.array([0, 3, 0])).tolist() == [1, 0], "ties: the lower id first, as argmax"
    assert draft_ranks(logits, np.array([0, 0, 3])).tolist() == [3, 3]
    both = draft_ranks(np.stack([logits, logits]), np.array([[0, 1, 2], [0, 3, 0]]))
    assert both.tolist() == [[0, 2], [1, 0]]


def test_draft_ranks_by_sorting():
    rng = np.random.default_rng(0)
    logits, tokens = rng.integers(5, size=(4, 30, 12)).astype(float), rng.integers(12, size=(4, 30))
    order = np.argsort(-logits, axis=-1, kind="stable")
    expected = [[int(np.flatnonzero(order[b, t] == tokens[b, t + 1])[0]) for t in range(29)]
                for b in range(4)]
    assert draft_ranks(logits, tokens).tolist() == expected


def test_rank_table_by_hand():
    ranks = np.array([0, 1, 0, 2, 0, 0])                # pairs (0,1) (1,0) (0,2) (2,0) (0,0)
    np.testing.assert_allclose(rank_table(ranks, 2, 1), [[3 / 5], [1 / 3]])
    np.testing.assert_allclose(rank_table(ranks, 2, 2), [[3 / 5, 1 / 5], [2 / 4, 1 / 4]])
    np.testing.assert_allclose(rank_table(np.full(6, 9), 2, 2), np.zeros((2, 2)))


@quick
@given(seed=st.integers(0, 10_000), depth=st.integers(1, 4))
@pytest.mark.slow
def test_rank_table_predicts_a_chain_exactly(seed, depth):
    ranks = np.random.default_rng(seed).geometric(0.5, size=(3, 40)) - 1
    expected = np.cumprod(rank_table(ranks, depth, 1)[:, 0]).sum()
    assert accept_lengths(ranks, TreeShape.branching((1,) * depth)).mean() == pytest.approx(expected)


@pytest.mark.parametrize("widths", [(4,), (1, 1, 1), (2, 2, 1), (3, 1, 2), (), "irregular"])
def test_accept_lengths_are_those_of_a_real_verification(widths):
    """Ranks of the target's greedy text under the draft predict what is accepted from each start."""
    shape = IRREGULAR if widths == "irregular" else TreeShape.branching(widths)
    target, draft = random_decoder(6, 3), random_decoder(6, 4)
    text, _ = autoregressive_generate(target, [0, 1], 40)
    predicted = accept_lengths(draft_ranks(draft.send(text), text), shape)
    for start in range(len(text) - 1 - shape.depth):
        tokens, run = tree_generate(target, TreeDrafter(draft, shape), text[:start + 1], shape.depth + 1)
        if start + len(tokens[start + 1:]) < len(text) and start >= 1:
            assert run.rounds[0].accepted == predicted[start], start
            assert run.rounds[0].drafted == len(shape)


SEQUOIA = (0.60, 0.15, 0.07, 0.04, 0.02)


def test_best_tree_reproduces_the_published_numbers():
    """FACTS: the root counts as a node there, and is not among the drafted nodes here."""
    published = {1: 1, 2: 1.6, 3: 1.96, 4: 2.176, 5: 2.326, 8: 2.6356, 16: 3.076, 32: 3.498, 64: 3.8942}
    for n, expected in published.items():
        shape, value = best_tree(SEQUOIA, n - 1)
        assert len(shape) == n - 1 and value == pytest.approx(expected, abs=6e-4 if n > 8 else 1e-9)
        assert tree_value(shape, np.tile(SEQUOIA, (64, 1))) == pytest.approx(value)
    chains = {1: 1, 2: 1.6, 3: 1.96, 4: 2.176, 5: 2.3056, 8: 2.458, 16: 2.4993, 32: 2.5, 64: 2.5}
    for n, expected in chains.items():
        shape, value = best_tree(SEQUOIA[:1], n - 1)
        assert shape.depth == n - 1 and value == pytest.approx(expected, abs=6e-5)


def tree_value(shape, table):
    """1 + the sum over nodes of the product of probabilities from the root."""
    reach = {-1: 1.0}
    for i, (parent, rank) in enumerate(shape.nodes):
        reach[i] = reach[parent] * table[shape.depths[i] - 1][rank]
    return sum(reach.values())


def all_trees(n, depth, width):
    """Every tree of n nodes, at most `depth` deep, no node with more than `width` children: nested tuples."""
    if n == 0:
        return [()]
    if depth == 0 or width == 0:
        return []
    found = []
    for first in range(1, n + 1):                           # nodes of the first child, itself included
        for below in all_trees(first - 1, depth - 1, WIDEST):
            found += [((below,) + rest) for rest in all_trees(n - first, depth, width - 1)]
    return found


WIDEST = 3


def value_of(children, table, depth=0):
    return sum(table[depth][k] * (1.0 + value_of(child, table, depth + 1))
               for k, child in enumerate(children))


@quick
@given(seed=st.integers(0, 10_000), n=st.integers(0, 6), depth=st.integers(1, 4), ordered=st.booleans())
def test_best_tree_beats_every_other_tree(seed, n, depth, ordered):
    table = np.random.default_rng(seed).dirichlet(np.ones(WIDEST + 1), size=depth)[:, :WIDEST]
    if ordered:
        table = -np.sort(-table, axis=1)
    every = all_trees(n, depth, WIDEST)
    shape, value = best_tree(table, n)
    assert shape.depth <= depth and len(shape) <= n
    assert tree_value(shape, table) == pytest.approx(value)
    if every:
        assert value == pytest.approx(1 + max(value_of(t, table) for t in every)) and len(shape) == n
    else:                                                   # no room for n nodes: the fullest tree
        assert len(shape) == sum(WIDEST ** d for d in range(1, depth + 1))


def test_best_tree_of_one_row_goes_as_deep_as_it_likes():
    assert best_tree([0.9], 6)[0].depth == 6 and best_tree([[0.9]] * 2, 6)[0].depth == 2
    assert best_tree([0.5, 0.5], 2)[0].depths in ([1, 1], [1, 2])
    assert best_tree([0.3, 0.3], 2)[0].depths == [1, 1]
    np.testing.assert_allclose(best_tree(np.tile(SEQUOIA, (20, 1)), 20)[1], best_tree(SEQUOIA, 20)[1])


@pytest.mark.parametrize("probabilities, n", [([0.5], -1), ([0.6, 0.5], 3), ([-0.1], 3), ([], 3),
                                              ([[[0.5]]], 3)])
def test_best_tree_refuses_the_impossible(probabilities, n):
    with pytest.raises(BadInput) as error:
        best_tree(probabilities, n)
    one_sentence(error)


def test_shapes_and_ranks_that_do_not_fit_are_refused():
    with pytest.raises(BadInput):
        draft_ranks(np.zeros((3, 5)), [1, 2])
    with pytest.raises(BadInput):
        accept_lengths([0, -1, 0], TreeShape.branching((1, 1)))
    with pytest.raises(BadInput):
        best_tree([np.nan], 3)
    assert np.isnan(Run().tau) and np.isnan(Run().ttft)


@pytest.mark.parametrize("widths", [(1, 1, 1), (1,), (2, 1), ()])
def test_accept_lengths_to_the_end_by_hand(widths):
    """At each start: walk on while the next token is on the tree, but leave the text's last token to the target."""
    shape, ranks = TreeShape.branching(widths), np.random.default_rng(3).integers(3, size=40)
    for text in (ranks, ranks[:1], np.zeros(5, int)):
        expected = []
        for i in range(len(text)):
            deep = min(len(widths), len(text) - 1 - i)
            expected.append(next((d for d in range(deep) if text[i + d] >= widths[d]), deep))
        assert accept_lengths_to_end(text, shape).tolist() == expected


def test_a_chain_on_several_texts_ends_with_each_of_them():
    ranks = [[0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]
    assert chain_accept_lengths(ranks, 2).tolist() == [2, 1, 0, 1, 0, 2, 2, 2, 1, 0]
    assert chain_accept_lengths(ranks[0], 2).tolist() == [2, 1, 0, 1, 0]
