"""Values as JSON holds them; entries under their ids."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from console import BadInput
from lab.support import output
from lab.support import record as runs


def test_values_become_json():
    @dataclass
    class Point:
        x: float

    value = {"a": np.int64(3), "b": np.array([1.5, np.inf]), "c": (True, np.bool_(False)),
             "d": Point(-math.inf), "e": {2, 1}, "f": Path("x"), 1: np.float32(0.5)}
    assert runs.jsonable(value) == {"a": 3, "b": [1.5, None], "c": [True, False], "d": {"x": None},
                                        "e": [1, 2], "f": "x", "1": 0.5}


def test_a_cell_of_a_notebook_may_run_again_and_an_id_may_not_stand_in_two_lines_of_it(monkeypatch):
    run = 0
    monkeypatch.setattr(output, "cell_run", lambda: run)
    entries = runs.Entries()
    for run in (1, 2):
        entries.put("first", n=run)
        entries.put("second", n=run)
        assert entries.list() == [{"id": "first", "n": run}, {"id": "second", "n": run}]
        with pytest.raises(BadInput, match='"first" stands twice'):
            entries.put("first", n=3)
    monkeypatch.setattr(runs, "redrawing", True)  # a slider draws many times in one cell
    entries.put("first", n=4)
    assert entries.place("first") == 0 and entries.place("third") == 2
