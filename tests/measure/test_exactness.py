"""The tables that are small enough to enumerate: transitions, their distances, and a drafter that reports another q."""

import numpy as np
import pytest

from decode_lab import Sampler, autoregressive_generate, speculative_generate
from lab.drafters.model import ModelDrafter
from lab.measure.exactness import (
    PROPOSALS,
    Misreporting,
    Table,
    against_plain,
    counts_against_plain,
    distances,
    next_two,
    off_by,
    several_candidates,
    transitions,
)
from lab.toy.transformer import QCFG, TransformerLM, init_params

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


@pytest.mark.slow
def test_a_misreporting_drafter_changes_what_is_reported_and_not_what_is_drawn():
    right, wrong = ModelDrafter(Table(Q)), Misreporting(ModelDrafter(Table(Q)), P)
    for drafter in (right, wrong):
        drafter.start(Table(P), Sampler(1.0), [1])
    one, other = (drafter.propose([1], 4, np.random.default_rng(5)) for drafter in (right, wrong))
    assert one.tokens == other.tokens and np.allclose(one.q, [Q[t] for t in [1, *one.tokens[:-1]]])
    assert np.allclose(other.q, [P[t] for t in [1, *one.tokens[:-1]]])
    tokens, _ = speculative_generate(Table(P), wrong, [0], 20_000, 3, 1.0)
    assert distances(transitions(tokens, 3), P)[0] > 0.05, "the text is bent"


def test_plain_samples_look_plain_and_others_do_not():
    rng = np.random.default_rng(0)
    p_values = []
    for _ in range(40):
        plain, _ = autoregressive_generate(Table(P), [0], 300, 1.0, rng)
        tv, floor, p_value = against_plain(plain, P, rng, samples=200)
        assert 0 < tv < 3 * floor
        p_values.append(p_value)
    assert 0.3 < np.mean(p_values) < 0.7 and min(p_values) > 1e-3
    other, _ = autoregressive_generate(Table(Q), [0], 300, 1.0, rng)
    tv, floor, p_value = against_plain(other, P, rng, samples=200)
    assert tv > 3 * floor and p_value == pytest.approx(1 / 201)


def test_only_the_wrong_proposals_change_a_distribution():
    off = {name: off_by(P, Q, 2, proposals) for name, proposals in PROPOSALS.items()}
    *right, wrong = off
    assert wrong.startswith("WRONG") and off[wrong] > 0.01
    assert all(off[name] < 1e-15 for name in right)


def test_counts_of_one_distribution_have_a_p_value():
    rng, p = np.random.default_rng(0), np.array([0.5, 0.3, 0.2])
    tv, floor, p_value = counts_against_plain(np.array([52, 29, 19]), p, rng)
    assert tv == pytest.approx(0.02) and tv < floor and p_value > 0.5
    assert counts_against_plain(np.array([20, 30, 50]), p, rng)[2] == pytest.approx(1 / 2001)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_several_candidates_write_p_and_the_wrong_rule_does_not(n):
    p, q = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.4, 0.3, 0.2, 0.1])
    out, accepted = several_candidates(p, q, n)
    assert out == pytest.approx(p, abs=1e-15)
    assert accepted >= np.minimum(p, q).sum() - 1e-15 and (n > 1 or accepted == pytest.approx(np.minimum(p, q).sum()))
    wrong, _ = several_candidates(p, q, n, claimed=q)
    assert wrong.sum() == pytest.approx(1) and (abs(wrong - p).max() > 1e-3) == (n > 1)


def test_pairs_have_the_probability_of_one_token_after_the_other():
    model, sampler = TransformerLM(init_params(QCFG, 0), QCFG, "toy"), Sampler(1.0, top_k=3)
    p = sampler.probs(model.full_logits(np.array([[5, 6]]))[0, -1])
    first = np.flatnonzero(p)
    pairs = next_two(model, [5, 6], sampler, first)
    assert pairs.shape == (3, QCFG.vocab_size) and pairs.sum(1) == pytest.approx(p[first]) and (pairs > 0).sum() == 9
