"""Readings that differ too much from repetition to repetition are not judged."""

import numpy as np

from lab.measure.spread import disturbed


def test_equal_readings_are_judged_and_a_single_pause_does_not_count():
    seconds = np.array([[1.0, 2.0, 3.0], [1.1, 2.2, 3.3]])
    assert disturbed(seconds) == "" and disturbed(seconds[:1]) == ""
    seconds[0, 1] = 50.0
    assert disturbed(seconds) == ""


def test_readings_of_a_busy_machine_are_not_judged():
    why = disturbed([[1.0, 2.0], [2.0, 4.0]], "c")
    assert why == "This machine was busy: readings of c differed by a factor of 2.0."
    assert disturbed([[1.0, 2.0], [1.3, 2.6]]) == "" and disturbed([[1.0, 2.0], [1.3, 2.6]], most=1.2)
