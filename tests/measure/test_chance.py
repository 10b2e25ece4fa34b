"""Standard errors, and how far off one of several readings may be."""

import numpy as np
import pytest

from decode_lab import Round, Run
from lab.measure.chance import level_each, most_errors, too_few, with_error


def run_of(accepted):
    return Run([Round(3, 3, int(n), 0.0, 0.0) for n in accepted])


def test_the_with_error_of_tau_is_that_of_a_mean():
    accepted = np.random.default_rng(1).integers(4, size=400)
    run = run_of(accepted)
    value, found = with_error(run, lambda run: run.tau, draws=2000)
    assert value == run.tau and found == pytest.approx(accepted.std() / 20, rel=0.05)
    assert (value, found) == with_error(run, lambda run: run.tau, draws=2000)


def test_equal_rounds_have_no_error():
    assert with_error(run_of([2] * 30), lambda run: run.alpha)[1] < 1e-12
    assert with_error(run_of([1]), lambda run: run.tau) == (2, 0)


def test_more_comparisons_allow_more():
    assert level_each(1) == 0.05 and level_each(4) == 0.0125
    assert most_errors(1) == pytest.approx(1.96, abs=0.01) and most_errors(36) == pytest.approx(3.20, abs=0.01)
    largest = np.abs(np.random.default_rng(0).standard_normal((20_000, 19))).max(axis=1)
    assert (largest > most_errors(19)).mean() == pytest.approx(0.05, abs=0.006)


def test_few_rounds_are_not_judged():
    assert too_few([run_of([1] * 30), run_of([1] * 40)]) == ""
    assert "29 rounds" in too_few([run_of([1] * 30), run_of([1] * 29)])
