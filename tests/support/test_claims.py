"""Observations: value and bound, the verdict, and what is printed of them."""

import pytest

from lab.support.claims import claim
from lab.support.errors import BadInput


def of(text, value=None, at_most=None, at_least=None, holds=None, not_judged="", **values):
    return claim("an-id", text, value, at_most, at_least, holds, not_judged, values)


def test_a_bound_is_the_verdict_and_is_printed():
    made = of("Sending {n} tokens costs {x:.1%} more.", 0.0481, at_most=0.05, n=33)
    assert made.holds and made.text == "Sending 33 tokens costs 4.8% more. Expected: at most 5.0%."
    made = of("Sending {n} tokens costs {x:.1%} more.", 0.12, at_most=0.05, n=33)
    assert made.holds is False and made.text == "Sending 33 tokens costs 12.0% more. Expected: at most 5.0%."
    assert made.mark[0] == "[ no ] " and of("{x:.2f}", 2, at_least=1).mark[0] == "[ ok ] "
    assert of("A ratio of {x:.2f}.", 1.2, at_least=0.67, at_most=1.5).text.endswith("Expected: 0.67 to 1.50.")
    assert of("Of {m} texts {x} differ.", 0, at_most=0, m=9).text == "Of 9 texts 0 differ. Expected: 0."


@pytest.mark.parametrize("text, value, bound, shown", [
    ("It keeps {x:.2f}.", 0.9796, 0.98, "It keeps 0.9796. Expected: at least 0.9800."),
    ("It keeps {x:.0%}.", 0.97996, 0.98, "It keeps 97.996%. Expected: at least 98.000%."),
    ("It keeps {x}.", 0.97996, 0.98, "It keeps 0.97996. Expected: at least 0.98000."),
    ("It keeps {x:.2f}.", 0.98, 0.98, "It keeps 0.98. Expected: at least 0.98."),
    ("It keeps {x:.2f}.", 1.03, 0.98, "It keeps 1.03. Expected: at least 0.98."),
])
def test_value_and_bound_have_digits_enough_to_be_told_apart(text, value, bound, shown):
    made = of(text, value, at_least=bound)
    assert made.text == shown and made.holds == (value >= bound)


def test_what_was_not_judged_is_neither_ok_nor_broken():
    made = of("It is {x:.2f} times as fast.", 2.81, at_least=1, not_judged="This machine was busy.")
    assert made.holds is None and made.mark[0] == "[ -- ] "
    assert made.text == "Not judged: This machine was busy. It is 2.81 times as fast. Expected: at least 1.00."
    assert of("All texts agree.", holds=True, not_judged="Busy.").holds is None
    assert of("It is {x:.2f} times as fast.", at_least=1, not_judged="Busy.").holds is None, "nothing was read"


def test_nan_does_not_hold():
    assert of("{x:.2f}", float("nan"), at_least=0).holds is False
    assert of("{x:.2f}", float("nan"), at_most=0).holds is False


def test_a_yes_or_no_is_a_claim_that_may_not_hold():
    assert of("All {n} texts agree.", holds=True, n=3).text == "All 3 texts agree."
    assert of("All {n} texts agree.", holds=False, n=3).text == "Does not hold: All 3 texts agree."
    assert of("It is {x}.", 3, holds=True).text == "It is 3."


def test_arguments_that_do_not_fit():
    for how in ({}, {"value": 1}, {"value": 1, "at_most": 2, "holds": True}, {"at_most": 1}):
        with pytest.raises(BadInput, match='"an-id"'):
            of("It is {x}.", **how)
    with pytest.raises(BadInput, match="cannot be filled in"):
        of("It is {y}.", 1, at_most=2)
    with pytest.raises(BadInput, match="cannot be filled in"):
        of("It is {x", 1, at_most=2)
