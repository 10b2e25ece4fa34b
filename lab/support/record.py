"""The run of a demo: what it has shown so far, each entry under its id, and the record that this makes."""

import dataclasses
import json
import math
import numbers
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

from lab.support import output
from lab.support.cells import cells
from lab.support.errors import BadInput
from lab.support.files import write_text
from lab.support.host import host, versions
from lab.support.text import kebab

run: "Run | None" = None  # the demo that runs now
redrawing = False  # while a slider draws again what it drew before


class Entries:
    """What a run recorded of one kind, tables say, in order, each under an id of its own."""

    def __init__(self):
        self.by_id: dict[str, dict] = {}
        self.cells: dict[str, int] = {}  # id -> the number of the run of a notebook's cell that wrote the entry

    def place(self, id: str) -> int:
        """Where the entry belongs: at the end, or where it was when its cell of a notebook ran before."""
        name = kebab(id)
        if name in self.by_id and not redrawing and self.cells[name] == output.cell_run():
            raise BadInput(f'the id "{name}" stands twice in this run: each table, observation and figure needs its '
                           "own")
        return list(self.by_id).index(name) if name in self.by_id else len(self.by_id)

    def put(self, id: str, **entry) -> None:
        """Record an entry under its id; BadInput where another one has it."""
        self.place(id)
        self.by_id[kebab(id)] = {"id": kebab(id), **entry}
        self.cells[kebab(id)] = output.cell_run()

    def list(self) -> list[dict]:
        return list(self.by_id.values())


class Run:
    """The state of one demo from its assumptions to its end."""

    def __init__(self, path: Path | None, script: bool, in_process: bool = False):
        self.path, self.script, self.in_process = path, script, in_process
        self.source = ""
        if path is not None:
            with suppress(OSError, UnicodeError):
                self.source = Path(path).read_text(encoding="utf-8")
        # In a notebook Jupyter shows the markdown, and a cell for notebooks only is none of a script's business.
        self.to_narrate = [cell for cell in cells(self.source)
                           if script and cell.markdown and "notebook" not in cell.tags]
        # Jupyter tells a kernel the notebook's path in this variable; there is no __file__ to read it from.
        name = Path(path).name if path else Path(os.environ.get("JPY_SESSION_NAME") or "notebook").name
        number = re.match(r"\d+", name)
        self.demo = number.group() if number else Path(name).stem
        self.assumptions: dict = {}
        self.tables, self.observations, self.figures = Entries(), Entries(), Entries()
        self.samples: dict[str, list] = {}
        self.globals: dict | None = None  # of the demo's top level
        self.json_path: Path | None = None
        self.failed = False
        self.replaced_by: Run | None = None

    def record(self) -> dict:
        """All that was shown, as plain JSON values."""
        return jsonable({
            "demo": self.demo, "assumptions": self.assumptions, "tables": self.tables.list(),
            "observations": self.observations.list(), "figures": self.figures.list(), "samples": self.samples,
            "host": host(), "versions": versions()})

    def next_cells(self, line: float) -> list[str]:
        """The markdown cells above this line that were not shown yet; they then count as shown."""
        found = []
        while self.to_narrate and self.to_narrate[0].line < line:
            found.append(self.to_narrate.pop(0).text)
        return found

    def line(self) -> int:
        """The line of the demo that is running now; 0 outside it."""
        line = 0
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_globals is self.globals and frame.f_code.co_name == "<module>":
                line = frame.f_lineno
            frame = frame.f_back
        return line

    def write(self) -> None:
        """Write the record to where --json asked for it. Raises OSError."""
        if self.json_path is not None:
            write_text(self.json_path, json.dumps(self.record(), indent=1, allow_nan=False) + "\n")


def jsonable(value):
    """`value` as JSON holds it: numpy scalars as numbers, arrays and tuples as lists, NaN and inf as null."""
    if isinstance(value, (bool, str)) or value is None:
        return value
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # numpy arrays and scalars, tensors
        return jsonable(value.tolist())
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return jsonable({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(item) for item in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    return str(value)
