"""The acceptance rule, draws, and samplers."""

from itertools import product

import numpy as np
import pytest

import decode_lab as dl
from console import BadInput
from decode_lab import Draft, Sampler, accept, residual, verify
from lab.measure.enumeration import outcomes
from lab.measure.scripted import chain, one_hot, tree
from loops import one_sentence

# -- the rule ------------------------------------------------------------------------------------------------

def distributions(n, size, rng):
    """Random distributions, some with zeros."""
    p = rng.random((n, size)) ** 3
    p[rng.random((n, size)) < 0.25] = 0
    p[np.arange(n), rng.integers(size, size=n)] += 0.1
    return p / p.sum(axis=-1, keepdims=True)


def test_acceptance_probability_overlap_and_residual_by_hand():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    before = p.copy()
    assert dl.acceptance_probability(p, 0, q) == 1.0
    assert dl.acceptance_probability(p, 2, q) == pytest.approx(0.4)
    assert dl.acceptance_probability(p, 2) == pytest.approx(0.2), "a point mass is accepted with p(x)"
    assert dl.overlap(p, q) == pytest.approx(0.7)
    assert residual(p, 2, q).tolist() == [1.0, 0.0, 0.0]
    np.testing.assert_allclose(residual(p, 0), [0, 0.6, 0.4])
    assert residual(p, 0, p).tolist() == [0, 0, 0] and residual(np.array([1.0, 0.0]), 0).tolist() == [0, 0]
    assert (p == before).all() and q.tolist() == [0.2, 0.3, 0.5], "neither p nor q is changed"


def test_one_candidate_is_lossless_and_accepted_with_the_overlap():
    rng = np.random.default_rng(0)
    for p, q in zip(distributions(30, 6, rng), distributions(30, 6, rng)):
        def rule(paths):
            x = dl.draw(q, paths)
            hit, token = accept(p, [x], [q], paths)
            return hit, token

        law = outcomes(rule)
        tokens = [sum(w for (_, t), w in law.items() if t == x) for x in range(6)]
        np.testing.assert_allclose(tokens, p, atol=1e-12)
        assert sum(w for (hit, _), w in law.items() if hit == 0) == pytest.approx(dl.overlap(p, q))


@pytest.mark.parametrize("way", ["with replacement", "without replacement", "different q", "deterministic",
                                 "the same twice", "mixed"])
def test_several_candidates_are_lossless(way):
    rng = np.random.default_rng(1)
    for p, q, other in zip(*(distributions(12, 4, rng) for _ in range(3))):
        def rule(paths):
            if way == "deterministic":
                return accept(p, [2, 0, 1], [None] * 3, paths)[1]
            if way == "the same twice":
                return accept(p, [1, 1, 3], [None] * 3, paths)[1]
            if way == "mixed":
                return accept(p, [2, dl.draw(q, paths), 0], [None, q, None], paths)[1]
            drawn, qs, now = [], [], q
            for _ in range(3):
                if not now.any():
                    break
                drawn.append(dl.draw(now, paths))
                qs.append(now)
                now = {"with replacement": now, "different q": other}.get(way)
                if now is None:
                    now = residual(qs[-1], drawn[-1])
            return accept(p, drawn, qs, paths)[1]

        law = outcomes(rule)
        np.testing.assert_allclose([law.get(t, 0.0) for t in range(4)], p, atol=1e-12)


def test_more_candidates_are_accepted_more_often_than_by_the_naive_rule():
    """The multi-step rule beats sampling from p and looking for it among the candidates (2305.09781)."""
    p, q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.25, 0.25, 0.25, 0.25])

    def multi(paths):
        drawn = [dl.draw(q, paths), dl.draw(q, paths)]
        return accept(p, drawn, [q, q], paths)[0] is not None

    def naive(paths):
        drawn = [dl.draw(q, paths), dl.draw(q, paths)]
        return dl.draw(p, paths) in drawn

    assert outcomes(multi)[True] > outcomes(naive)[True] + 0.1


def test_accept_does_not_write_over_its_arguments():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    for seed in range(20):
        accept(p, [2, 1], [q, None], np.random.default_rng(seed))
    assert p.tolist() == [0.5, 0.3, 0.2] and q.tolist() == [0.2, 0.3, 0.5]


class Fixed:
    """An rng whose uniform numbers are given."""

    def __init__(self, *values):
        self.values = list(values)

    def random(self):
        return self.values.pop(0)


@pytest.mark.parametrize("p", [[0.25, 0.75], [0.0, 0.5, 0.0, 0.5, 0.0], [1.0], [0.0, 1.0], [0.1] * 10])
def test_draw_inverts_the_cumulative_sum_and_never_draws_the_impossible(p):
    p = np.array(p)
    below_one = np.nextafter(1.0, 0.0)
    for u in (0.0, below_one, *np.cumsum(p)[:-1], *np.linspace(0, 0.999, 57)):
        x = dl.draw(p, Fixed(float(min(u, below_one))))
        assert p[x] > 0 and p[:x].sum() <= u + 1e-12 and u <= p[:x + 1].sum() + 1e-12
    assert dl.draw(p, Fixed(0.0)) == np.flatnonzero(p)[0]
    assert dl.draw(p, Fixed(below_one)) == np.flatnonzero(p)[-1]


def test_draw_from_a_generator_has_the_distribution():
    p, rng = np.array([0.1, 0.0, 0.55, 0.35]), np.random.default_rng(3)
    counts = np.bincount([dl.draw(p, rng) for _ in range(20000)], minlength=4)
    assert counts[1] == 0 and np.abs(counts / 20000 - p).max() < 0.015      # four standard deviations


def test_acceptance_compares_strictly():
    """random() can be 0: a candidate with probability 0 is still refused, one with probability 1 never is."""
    p = np.array([0.0, 1.0])
    assert accept(p, [0], [None], Fixed(0.0, 0.5)) == (None, 1)
    assert accept(p, [1], [None], Fixed(np.nextafter(1.0, 0.0))) == (0, 1)
    assert accept(p, [], [], Fixed(0.5)) == (None, 1), "without candidates, a draw from p"


def test_verify_reads_the_rows_of_the_path():
    """Two siblings, the second accepted, its child refused: rows 0 and 2 decide; `tested` counts levels."""
    draft = tree([1, 2, 3, 4], [-1, -1, 0, 1])
    rows = np.array([one_hot(t, 6) for t in (2, 3, 5, 0, 1)])
    assert verify(draft, rows, Sampler(), [0], None) == ([1], 5, 2)
    rows[2] = one_hot(4, 6)
    assert verify(draft, rows, Sampler(), [0], None) == ([1, 3], 1, 2)
    rows[0] = one_hot(0, 6)
    assert verify(draft, rows, Sampler(), [0], None) == ([], 0, 1)
    assert verify(Draft(), rows[:1], Sampler(), [0], None) == ([], 0, 0)


def test_verify_takes_tensors():
    import torch
    draft, rows = chain([2, 3]), np.array([one_hot(t, 6, 60.0) for t in (2, 3, 5)])
    for dtype in (torch.float32, torch.bfloat16):
        for sampler in (Sampler(), Sampler(1.0), Sampler(repetition_penalty=1.1), Sampler(1.0, top_k=2)):
            got = verify(draft, torch.tensor(rows, dtype=dtype), sampler, [0], np.random.default_rng(0))
            assert got == ([0, 1], 5, 2)


# -- samplers ------------------------------------------------------------------------------------------------

FILTERS = ((0, 1.0, 0.0), (5, 1.0, 0.0), (1, 1.0, 0.0), (0, 0.6, 0.0), (0, 0.01, 0.0), (0, 1.0, 0.15),
           (7, 0.8, 0.05), (99, 0.9, 0.0))

WARPED = [dict(temperature=t, top_k=k, top_p=p, min_p=m, repetition_penalty=r)
          for t, (k, p, m), r in product((1.0, 0.4, 2.5), FILTERS, (1.0, 1.4, 0.7))]


def test_samplers_equal_those_of_transformers():
    import torch
    from transformers import (
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )
    rng = np.random.default_rng(0)
    for options in WARPED:
        sampler = Sampler(**options)
        for _ in range(6):
            logits, history = 3 * rng.standard_normal(40), rng.integers(40, size=12)
            scores, ids = torch.tensor(logits)[None], torch.tensor(history)[None]
            if sampler.repetition_penalty != 1:
                scores = RepetitionPenaltyLogitsProcessor(sampler.repetition_penalty)(ids, scores)
            scores = TemperatureLogitsWarper(sampler.temperature)(ids, scores)
            if sampler.top_k:
                scores = TopKLogitsWarper(sampler.top_k)(ids, scores)
            if sampler.top_p < 1:
                scores = TopPLogitsWarper(sampler.top_p)(ids, scores)
            if sampler.min_p:
                scores = MinPLogitsWarper(sampler.min_p)(ids, scores)
            ours, before = sampler.probs(logits, history), logits.copy()
            np.testing.assert_allclose(ours, scores.softmax(-1)[0].numpy(), rtol=1e-9, atol=1e-15)
            assert ours.dtype == np.float64 and (logits == before).all()


def test_greedy_probs_are_a_point_mass_on_the_first_maximum():
    z = np.array([1.0, 3.0, 3.0, -np.inf], np.float32)
    assert Sampler().probs(z).tolist() == [0, 1, 0, 0] and Sampler().argmax(z) == 1
    assert Sampler(repetition_penalty=2.0).probs(z, [1]).tolist() == [0, 0, 1, 0]
    assert Sampler().greedy and not Sampler(0.1).greedy


def test_filters_keep_a_token_and_a_distribution():
    z = np.array([0.0, 10.0, -np.inf, 9.0], np.float32)
    for sampler in (Sampler(1.0, top_k=1), Sampler(1.0, top_p=1e-9), Sampler(1.0, min_p=0.999),
                    Sampler(1e-3)):
        assert sampler.probs(z).tolist() == [0, 1, 0, 0]
    p = Sampler(5.0, 3, 0.999, 1e-6).probs(z)
    assert p.sum() == pytest.approx(1) and p[2] == 0


@pytest.mark.parametrize("options", [dict(temperature=-1), dict(temperature=float("nan")), dict(top_k=-1),
                                     dict(top_p=0), dict(top_p=1.1), dict(min_p=1.0), dict(min_p=-0.1),
                                     dict(repetition_penalty=0)])
def test_impossible_samplers_are_refused(options):
    with pytest.raises(BadInput) as error:
        Sampler(**options)
    assert next(iter(options)) in one_sentence(error)
