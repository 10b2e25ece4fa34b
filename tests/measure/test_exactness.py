"""The tables that are small enough to enumerate: transitions, their distances, and a drafter that reports another q."""

import numpy as np
import pytest

from decode_lab import Sampler, speculative_generate
from lab.drafters.model import ModelDrafter
from lab.measure.exactness import Misreporting, Table, distances, transitions

P = np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]])
Q = np.array([[0.2, 0.4, 0.4], [0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])


def test_transitions_are_counted_by_row_and_column():
    assert transitions(np.array([0, 1, 1, 2, 0, 1]), 3).tolist() == [[0, 2, 0], [0, 1, 1], [1, 0, 0]]


def test_distances_by_hand():
    counts = np.array([[7, 3, 0], [0, 10, 0], [0, 0, 0]])          # a row never seen weighs nothing
    tv, chi_square = distances(counts, P)
    assert chi_square == pytest.approx(0 + 1 / 2 + 1 + 1 + 4 / 8 + 1)
    assert tv == pytest.approx((0 + 1 + 1 + 1 + 2 + 1) / 2 / 20)
    several = distances(np.array([counts, 2 * counts]), P)
    assert several[0] == pytest.approx([tv, tv]) and several[1][1] == pytest.approx(2 * chi_square)
    assert distances(100 * P, P) == pytest.approx((0, 0))
    tv, chi_square = distances(np.array([[5, 3, 2], [8, 2, 0], [0, 0, 10]]), np.array([0.5, 0.3, 0.2]))
    np.testing.assert_allclose(tv, [0, 0.3, 0.8])                  # of one distribution, several samples
    np.testing.assert_allclose(chi_square, [0, 9 / 5 + 1 / 3 + 2, 5 + 3 + 32])


@pytest.mark.filterwarnings("error")
def test_impossible_tokens_and_no_tokens_have_a_distance_without_a_warning():
    p = np.array([0.5, 0.5, 0.0])
    assert distances(np.array([5, 5, 0]), p) == (0, 0)
    assert distances(np.array([5, 4, 1]), p) == (pytest.approx(0.1), np.inf)
    assert distances(np.zeros(3, int), p) == (0, 0)
    tv, chi_square = distances(np.zeros((2, 3, 3), int), P)
    assert tv.tolist() == chi_square.tolist() == [0, 0]


def test_a_misreporting_drafter_changes_what_is_reported_and_not_what_is_drawn():
    right, wrong = ModelDrafter(Table(Q)), Misreporting(ModelDrafter(Table(Q)), P)
    for drafter in (right, wrong):
        drafter.start(Table(P), Sampler(1.0), [1])
    one, other = (drafter.propose([1], 4, np.random.default_rng(5)) for drafter in (right, wrong))
    assert one.tokens == other.tokens and np.allclose(one.q, [Q[t] for t in [1, *one.tokens[:-1]]])
    assert np.allclose(other.q, [P[t] for t in [1, *one.tokens[:-1]]])
    tokens, _ = speculative_generate(Table(P), wrong, [0], 20_000, 3, 1.0)
    assert distances(transitions(tokens, 3), P)[0] > 0.05, "the text is bent"
