"""One sentence for a value that cannot be used, whatever it is."""

import numpy as np
import pytest

from lab.support.errors import BadInput, brief, checked, cut, nearest, require


def test_require_names_the_value_and_what_would_be_right():
    require(True, "gamma", 3, "at least 1")
    with pytest.raises(BadInput, match="^gamma is 0 but must be at least 1\\.$"):
        require(0 >= 1, "gamma", 0, "at least 1")


def test_checked_takes_numbers_and_arrays():
    assert checked("x", 3, 1, whole=True) == 3 and checked("x", 3, 1, whole=True).dtype == np.int64
    assert checked("x", [0.5, 1], 0, 1).tolist() == [0.5, 1.0]


@pytest.mark.parametrize("value, options, words", [
    (0, dict(low=0, above=True), "x is 0 but must be a number above 0"),
    ([1, 1.5], dict(low=1, whole=True), "x is 1.5 but must be a whole number of at least 1"),
    (np.nan, dict(), "x is nan but must be a number"), (2, dict(low=0, high=1), "of at least 0 and at most 1"),
    ("high", dict(), "x is 'high' but must be a number"), (10**400, dict(), "but must be a number")])
def test_checked_refuses_in_one_sentence(value, options, words):
    with pytest.raises(BadInput) as caught:
        checked("x", value, **options)
    assert words in str(caught.value) and len(str(caught.value)) < 150


def test_long_values_are_cut():
    assert cut("short") == "short" and len(cut("x" * 5000)) < 70 and "5,000" in cut("x" * 5000)
    assert len(brief(10**1000)) < 70 and brief(0.5) == "0.5"


def test_a_number_that_python_does_not_write_out_is_refused_all_the_same():
    with pytest.raises(BadInput, match="x is a number of thousands of digits but must be a number"):
        checked("x", 10**5000)


@pytest.mark.parametrize("name, known, expected", [
    ("h1000", ["v100", "t4", "h100-sxm", "h100-pcie", "h200"], ["h100-sxm", "h100-pcie"]),
    ("--bacth", ["--batch", "--json", "--alpha"], ["--batch"]),
    ("h100-sxn", ["h100-sxm", "l4"], ["h100-sxm"]),
])
def test_the_nearest_names_begin_alike_or_have_the_same_letters(name, known, expected):
    assert nearest(name, known) == expected
