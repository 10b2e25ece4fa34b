"""Figures that several demos may draw."""

import math

import pytest

from lab.support.charts import against_measured, draft_tree, heat_map, log_log


def test_a_heat_map_shows_each_value_and_what_is_absent():
    fig = heat_map([[1.0, 2.5], [1.25, math.nan]], ("batch", [1, 2]), ("context", [512, 4096]), "T", "times", "too big")
    axis, bar = fig.axes
    assert [text.get_text() for text in axis.texts] == ["1.00", "2.50", "1.25", "too big"]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["512", "4096"]
    assert (axis.get_title(), axis.get_xlabel(), bar.get_ylabel()) == ("T", "batch", "times")


def test_a_heat_map_of_nothing_is_still_a_figure():
    assert [text.get_text() for text in heat_map([[math.nan]], ("x", [1]), ("y", [1]), "", "").axes[0].texts] == ["-"]


def test_predictions_stand_over_what_was_measured():
    axis, = against_measured("T", ([1, 2], [0.1, 0.2]), {"a": ([1, 3], [0.1, 0.1]), "b": ([2, 2], [0.0, 0.3])}).axes
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["predicted = measured", "a", "b"]
    assert [bars.lines[0].get_ydata().tolist() for bars in axis.containers] == [[1, 3], [2, 2]]
    assert all(bars.has_xerr and bars.has_yerr for bars in axis.containers)


def test_a_tree_stands_level_by_level_with_its_path_in_green():
    axis, = draft_tree([-1, -1, 0, 0], ["root", "a", "b", "c", "d"], [0, 3], "T").axes
    places = {text.get_text(): text.get_position() for text in axis.texts}
    assert [places[name][0] for name in ("root", "a", "b", "c", "d")] == [0, 1, 1, 2, 2]
    assert len({y for x, y in places.values() if x}) == 4 and places["a"][1] == (places["c"][1] + places["d"][1]) / 2
    assert sorted(line.get_color() for line in axis.lines) == ["0.8", "0.8", "C2", "C2"]


def test_points_have_their_quartiles_and_lines_run_beside_them():
    fig = log_log({1: [2.0, 3.0, 4.0], 8: [6.0, 6.0, 6.0]}, {"double": lambda x: 2 * x}, "tokens", "time, s", "T")
    axis, = fig.axes
    assert (axis.get_xscale(), axis.get_yscale(), axis.get_title()) == ("log", "log", "T")
    points, *_ = axis.containers[0]
    assert points.get_xdata().tolist() == [1, 8] and points.get_ydata().tolist() == [3.0, 6.0]
    bars = axis.containers[0][2][0].get_segments()
    assert bars[0][:, 1].tolist() == [2.5, 3.5] and bars[1][:, 1].tolist() == [6.0, 6.0]
    line = next(line for line in axis.lines if line.get_label() == "double")
    assert line.get_ydata()[-1] == pytest.approx(16)
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["double", "measured, with quartiles"]
