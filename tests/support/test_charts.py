"""Figures that several demos may draw."""

import math

from lab.support.charts import heat_map


def test_a_heat_map_shows_each_value_and_what_is_absent():
    fig = heat_map([[1.0, 2.5], [1.25, math.nan]], ("batch", [1, 2]), ("context", [512, 4096]), "T", "times", "too big")
    axis, bar = fig.axes
    assert [text.get_text() for text in axis.texts] == ["1.00", "2.50", "1.25", "too big"]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["512", "4096"]
    assert (axis.get_title(), axis.get_xlabel(), bar.get_ylabel()) == ("T", "batch", "times")


def test_a_heat_map_of_nothing_is_still_a_figure():
    assert [text.get_text() for text in heat_map([[math.nan]], ("x", [1]), ("y", [1]), "", "").axes[0].texts] == ["-"]
