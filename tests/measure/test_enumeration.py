"""lab.measure.enumeration: how far a drafter's output is from its target's, without sampling."""

import numpy as np
import pytest

from lab.drafters.model import ModelDrafter
from lab.measure.enumeration import loop_tv
from lab.measure.exactness import Misreporting, Table

P, Q, R = np.array([[0.5, 0.5], [0.2, 0.8]]), np.array([[0.9, 0.1], [0.6, 0.4]]), np.array([[0.7, 0.3], [0.4, 0.6]])


def test_a_right_drafter_leaves_the_distribution_as_it_is():
    assert loop_tv(Table(P), ModelDrafter(Table(Q)), 3, 2) == pytest.approx(0, abs=1e-12)


def test_a_wrong_q_moves_it():
    """Token 0 is drawn with 0.9, said to be with 0.7, kept with 5/7; 1 is drawn with 0.1 and kept."""
    assert loop_tv(Table(P), Misreporting(ModelDrafter(Table(Q)), R), 2, 1) == pytest.approx(0.9 * 5 / 7 - 0.5)
