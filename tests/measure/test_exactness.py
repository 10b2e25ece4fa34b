"""The tables that are small enough to enumerate: transitions, their distances, and a drafter that reports another q."""

import numpy as np
import pytest

from decode_lab import Sampler, speculative_generate
from lab.drafters.model import ModelDrafter
from lab.measure.exactness import Misreporting, Table, transition_distances, transitions

P = np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]])
Q = np.array([[0.2, 0.4, 0.4], [0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])


def test_transitions_are_counted_by_row_and_column():
    assert transitions(np.array([0, 1, 1, 2, 0, 1]), 3).tolist() == [[0, 2, 0], [0, 1, 1], [1, 0, 0]]


def test_distances_by_hand():
    counts = np.array([[7, 3, 0], [0, 10, 0], [0, 0, 0]])          # a row never seen weighs nothing
    chi_square, tv = transition_distances(counts, P)
    assert chi_square == pytest.approx(0 + 1 / 2 + 1 + 1 + 4 / 8 + 1)
    assert tv == pytest.approx((0 + 1 + 1 + 1 + 2 + 1) / 2 / 20)
    several = transition_distances(np.array([counts, 2 * counts]), P)
    assert several[1] == pytest.approx([tv, tv]) and several[0][1] == pytest.approx(2 * chi_square)
    assert transition_distances(100 * P, P) == pytest.approx((0, 0))


def test_a_misreporting_drafter_changes_what_is_reported_and_not_what_is_drawn():
    right, wrong = ModelDrafter(Table(Q)), Misreporting(ModelDrafter(Table(Q)), P)
    for drafter in (right, wrong):
        drafter.start(Table(P), Sampler(1.0), [1])
    one, other = (drafter.propose([1], 4, np.random.default_rng(5)) for drafter in (right, wrong))
    assert one.tokens == other.tokens and np.allclose(one.q, [Q[t] for t in [1, *one.tokens[:-1]]])
    assert np.allclose(other.q, [P[t] for t in [1, *one.tokens[:-1]]])
    tokens, _ = speculative_generate(Table(P), wrong, [0], 20_000, 3, 1.0)
    assert transition_distances(transitions(tokens, 3), P)[1] > 0.05, "the text is bent"
