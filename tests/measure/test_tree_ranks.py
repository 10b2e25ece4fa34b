"""Ranks, and what trees accept by them."""

import numpy as np
import pytest

from lab import toy
from lab.drafters.trees import TreeDrafter, TreeShape
from lab.measure import tree_ranks
from lab.measure.tree_ranks import (
    check_trees,
    deepest_start,
    lengths_by_start,
    new_token_ranks,
    other_texts,
    round_starts,
    rounds_off,
    run_trees,
    tau_of_all_starts,
    toy_draft,
)
from lab.support.errors import BadInput


def test_tau_counts_the_levels_that_are_gone_down_from_every_start():
    ranks = np.array([[0, 1, 0, 0, 2, 0, 0, 0]])
    chain, tree = TreeShape.branching((1, 1)), TreeShape.branching((2, 1))
    assert lengths_by_start(ranks, chain, depth=2).tolist() == [[1, 0, 2, 1, 0, 2, 2]]
    assert tau_of_all_starts(ranks, chain, depth=2) == pytest.approx(1 + 8 / 7)
    assert lengths_by_start(ranks, tree, depth=2).tolist() == [[1, 2, 2, 1, 0, 2, 2]]


def test_all_trees_are_asked_at_the_same_starts():
    ranks = np.random.default_rng(0).integers(4, size=(3, 20))
    sizes = {lengths_by_start(ranks, shape).shape for shape in tree_ranks.TREES.values()}
    assert sizes == {(3, 20 - tree_ranks.DEEPEST + 1)}


def test_rounds_end_with_the_text():
    starts = round_starts(np.array([0, 0, 3, 0, 0, 0]), TreeShape.branching((1, 1)))
    assert starts == [0, 3, 6]


def test_a_target_agrees_with_its_own_text():
    texts = tree_ranks.greedy_texts("small", "code", 2, 12)
    assert texts.shape == (2, tree_ranks.PROMPT + 12)
    assert (new_token_ranks(toy.load("small"), texts) == 0).all()
    assert not (new_token_ranks(toy_draft("first layer", "small"), texts) == 0).all()


def test_an_unknown_draft_is_refused():
    with pytest.raises(BadInput, match="first layer"):
        toy_draft("last layer", "small")


def test_other_texts_have_other_prompts():
    own, others = tree_ranks.greedy_texts("small", "code", 5, 8), other_texts("small", "code", 5, 8)
    assert others.shape == (4, tree_ranks.PROMPT + 8)
    assert not {tuple(row[:tree_ranks.PROMPT]) for row in own} & {tuple(row[:tree_ranks.PROMPT]) for row in others}


def test_runs_are_held_against_the_text_and_the_ranks():
    texts, draft = tree_ranks.greedy_texts("small", "code", 3, 12), toy_draft("first layer", "small")
    shape, ranks = TreeShape.branching((2, 2)), new_token_ranks(draft, texts)
    runs, other = run_trees(toy.load("small"), TreeDrafter(draft, shape), texts)
    assert other == 0 and rounds_off(runs, ranks, shape) == 0
    assert sum(run.n_tokens for run in runs) == 36 and any(run.accepted for run in runs)
    wrong = texts.copy()
    wrong[1, -1] += 1
    assert run_trees(toy.load("small"), TreeDrafter(draft, shape), wrong)[1] == 1
    assert rounds_off(runs, ranks + 5, shape) > 0
    rounds, texts_off, off = check_trees(toy.load("small"), draft, wrong[:2])
    assert rounds > 9 * 2 and (texts_off, off) == (9, 0)


def test_the_deepest_start_is_the_one_with_the_largest_ranks():
    ranks = np.array([[0, 0, 3, 0, 0, 3, 0, 3, 3], [3, 1, 0, 3, 3, 3, 3, 3, 3]])
    assert deepest_start(ranks, TreeShape.branching((2, 2))) == (1, 1)
    assert deepest_start(ranks, TreeShape.branching((1, 1))) == (0, 0)
