"""What a demo calls to show things: assumptions, tables, figures, observations; and the record of its run.

A demo is a Python script in percent format. Its first output is `A = assumptions(Assumptions)`: as a script
the fields of the dataclass are flags, in a notebook (or in a test that imports the file) they keep their
defaults. As a script, the markdown cells of the demo's own file are printed too, each before the first output
that stands below it; in a notebook Jupyter shows them.

Everything printed is 80 columns wide unless a terminal or COLUMNS says otherwise, and a character that the
output's encoding cannot show is written out (`alpha` for the Greek letter). lab/support has what this is made
of. rich, tyro and matplotlib are imported when first needed.
"""

import atexit
import dataclasses
import io
import math
import numbers
import os
import re
import runpy
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from lab.support import layout, output, pace, packages, widgets
from lab.support import record as runs
from lab.support.cells import Cell, cells, demo_card
from lab.support.claims import Claim, claim
from lab.support.errors import HELP, BadInput, nearest, require, unknown
from lab.support.files import reason, writable, writable_folder, write_bytes, write_text
from lab.support.flags import (Alpha, Count, Fraction, NonNegative, OneOf, Positive, Rule, Share, Within, as_words,
                               flags, instance, is_number, parsed)
from lab.support.host import host, versions
from lab.support.output import WIDTH, end_quietly, exit_with, flush, in_notebook, put
from lab.support.text import fmt_bytes, fmt_count, fmt_time, significant
from lab.support.widgets import sliders

__all__ = [
    "Alpha", "BadInput", "Cell", "Claim", "Count", "Fraction", "HELP", "NonNegative", "OUT", "OneOf", "Positive",
    "ROOT", "Rule", "Share", "WIDTH", "WORK", "Within", "assumptions", "cells", "columns", "demo_card", "end_quietly",
    "exit_with", "figure", "flags", "flush", "fmt_bytes", "fmt_count", "fmt_time", "host", "in_notebook", "is_number",
    "nearest", "observe", "out_folder", "print_claim", "print_header", "print_table", "print_text", "progress", "put",
    "record", "record_samples", "require", "run_demo", "sliders", "subplots", "unknown", "versions", "within",
    "write_bytes", "write_text"]

ROOT = Path(__file__).resolve().parent
# Where out/ and results/ go: the lab's folder, or the current one where only an installed copy of the lab is run.
WORK = ROOT if packages.in_project() else Path.cwd()
OUT = Path(os.environ.get("DECODE_LAB_OUT") or WORK / "out").expanduser().absolute()  # where figures go


# ------------------------------------------------------------------------------------------ a demo as a script


def _end(kind, error, trace) -> None:
    """The excepthook of a demo that runs as a script."""
    run = runs.run
    if run is not None:
        run.failed = True
    if issubclass(kind, BadInput):
        exit_with(error)
    importing = not (run and run.assumptions)  # the demo has come no further than its imports
    if issubclass(kind, ModuleNotFoundError) and (importing or packages.command_for(str(error.name))):
        exit_with(packages.not_found(error))
    if issubclass(kind, KeyboardInterrupt):
        raise SystemExit(130)
    if issubclass(kind, BrokenPipeError):  # `| head`: the reader has what it wanted
        end_quietly()
    sys.__excepthook__(kind, error, trace)


def _begin_script() -> None:
    """What the import of this module does for a demo that is the script of this process.

    The demo may be interrupted, or lack a package, in the imports before it comes to assumptions(). And Python puts
    the script's folder first on sys.path, where lab/toy and lab/chat would hide other packages of these names.
    """
    script = Path(getattr(sys.modules.get("__main__"), "__file__", None) or ".").absolute()
    if script.parent.name == "lab" and re.match(r"\d\d_", script.name):
        sys.excepthook = _end
        sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != os.path.realpath(script.parent)]


_begin_script()


def _finish(run: runs.Run) -> None:
    """What a normal end still owes: the markdown below the last output, and the record."""
    if run.failed:
        return
    try:
        _narrate(everything=True)
        run.write()
        flush()
    except KeyboardInterrupt:
        os._exit(130)
    except OSError as error:  # too late for the exit status by any gentler way
        if not isinstance(error, BrokenPipeError):
            print(f"error: the record could not be written: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def run_demo(path, argv: Sequence[str] = ()) -> dict:
    """Run a demo file in this process, as a script with the flags `argv`, and return its record.

    Its output goes to sys.stdout. Raises what the demo raises (BadInput for a bad flag) and SystemExit for --help.
    """
    before, argv_before = runs.run, sys.argv
    started = runs.run = runs.Run(None, script=True, in_process=True)
    sys.argv = [str(path), *map(str, argv)]
    try:
        runpy.run_path(str(path), run_name="__main__")
        ended = started.replaced_by or started
        _finish(ended)
        return ended.record()
    finally:
        runs.run, sys.argv = before, argv_before


def record() -> dict:
    """The record of the current demo so far, as plain JSON values (see --json); {} before any demo began."""
    return runs.run.record() if runs.run is not None else {}


# ------------------------------------------------------------------------------------------------- assumptions


def assumptions(cls):
    """Return an instance of the frozen dataclass `cls` and print its values, those that were changed marked.

    As a script the fields are flags (`--batch 32`, `--gammas 1 3 5`, `--trained` / `--no-trained`), beside
    `--json FILE`, which writes the record of the run. Anywhere else the instance holds the defaults.

    Fields may be int, float, str, bool and tuples of them, annotated with Count, Positive and the like, which are
    checked for defaults too; a __post_init__ may check several together and names the flags. Raises BadInput (a
    sentence on stderr and exit status 2 in a script).
    """
    run = _begin_run(sys._getframe(1).f_globals)
    _check_folder(run.path)
    values = None
    if run.script and run.path is not None:
        title = demo_card(run.path).get("title", "")
        try:
            command = f"python {Path(sys.argv[0]).as_posix()}"
            values = parsed(cls, sys.argv[1:], command, title, run.source, with_json=True)
        except SystemExit:  # after --help: there is nothing to narrate or record
            run.failed = True
            raise
        path = values.pop("json")
        run.json_path = writable("--json", path) if path else None
    chosen = instance(cls, values)
    run.assumptions = {field.name: getattr(chosen, field.name) for field in dataclasses.fields(cls)}
    _print_assumptions(run, cls)
    return chosen


def _begin_run(globals: dict) -> runs.Run:
    """The run of the demo whose top level has these globals; it takes the place of the one before."""
    path = globals.get("__file__")
    script = globals.get("__name__") == "__main__" and path is not None and not in_notebook()
    inside = runs.run if runs.run is not None and runs.run.in_process else None
    run = runs.run = runs.Run(Path(path) if path else None, script=script, in_process=inside is not None)
    run.globals = globals
    if inside is not None:
        inside.replaced_by = run
    elif script:  # errors as one sentence, and the record at a normal exit, for the rest of this process
        sys.excepthook = _end
        atexit.register(_finish, run)
    return run


def _print_assumptions(run: runs.Run, cls) -> None:
    from lab.support.flags import field_docs

    docs, default, rows = field_docs(cls, run.source), cls(), []
    for name, value in run.assumptions.items():
        changed = value != getattr(default, name)
        was = f"(default {as_words(getattr(default, name))})" if changed else ""
        rows.append([("* " if changed else "  ") + name, as_words(value), f"{docs.get(name, '')} {was}".strip()])
    _narrate()
    if run.path is not None and output.on_terminal():  # elsewhere the text is the same in each run
        print_text(pace.sentence(demo_card(run.path)["takes"], pace.slowness()))
    if rows:
        heading = "Assumptions, * changed" if any(row[0].startswith("*") for row in rows) else "Assumptions"
        layout.draw_table(["  assumption", "value", "meaning"], rows, heading, right=[False, False, False])


def _check_folder(path: Path | None) -> None:
    """Raise BadInput in a copy of the lab that would run the modules of another one (an editable install)."""
    root = Path.cwd().parent if in_notebook() else Path(path or __file__).resolve().parent.parent
    theirs = root / "console.py"
    if theirs.is_file() and (root / "lab").is_dir() and not theirs.samefile(__file__):
        raise BadInput(f'the code is taken from "{ROOT}", but this demo lies in "{root}": make setup '
                       f"(or pip install -e .) in that folder would be right")


def _narrate(everything: bool = False) -> None:
    """Print the markdown cells that stand above the line of the demo that is running now."""
    if runs.run is not None and runs.run.to_narrate:
        for text in runs.run.next_cells(math.inf if everything else runs.run.line()):
            layout.draw_markdown(text)


# --------------------------------------------------------------------------------------------- tables and text


def print_header(title: str) -> None:
    """Print a section title between blank lines, underlined."""
    from rich.text import Text

    _narrate()
    title = output.shown(title)
    output.gap()
    output.emit(Text(title, style="bold"), "-" * min(len(title), output.width()), "")


def print_table(id: str, columns: Sequence[str], rows: Iterable[Sequence], *, title: str = "",
                formats: dict | None = None, measured: Sequence[str] = ()) -> None:
    """Print a table and record it.

    id: what the record calls it, such as "speed"; no other table of the run may have it, and it is not printed.
    rows hold numbers (recorded as numbers), strings, booleans ("yes", "no") or None ("-"). formats: column ->
    format spec such as ".2f" or a function of the value that returns text; without one, integers are printed
    as they are and floats with three significant digits. measured: the columns that hold readings of the
    machine (times, rates).

    A table too wide for the output gets its headers and texts wrapped, then is printed in parts that repeat the
    first column; numbers are never broken or cut. Raises BadInput when a row's length, or a name in formats or
    measured, fits no column.
    """
    columns, rows, formats = [str(c) for c in columns], [list(row) for row in rows], dict(formats or {})
    measured = [measured] if isinstance(measured, str) else list(measured)
    for row in rows:
        if len(row) != len(columns):
            raise BadInput(f'table "{id}" has {len(columns)} columns but a row of {len(row)} cells: {row}')
    for name in [*formats, *measured]:
        if name not in columns:
            raise unknown(f'column in table "{id}"', name, columns)
    _narrate()
    if runs.run is not None:
        runs.run.tables.put(id, title=title, columns=columns, measured=measured, rows=runs.jsonable(rows))
    texts = [[_cell(value, formats.get(column)) for column, value in zip(columns, row)] for row in rows]
    # A column is one of numbers, to the right, when no cell of it is text.
    right = [all(_is_numeric(row[i]) for row in rows) and any(row[i] is not None for row in rows)
             for i in range(len(columns))]
    layout.draw_table(columns, texts, title, right)


def _is_numeric(value) -> bool:
    if hasattr(value, "dtype"):  # a numpy scalar or a tensor
        return getattr(value, "ndim", 1) == 0 and str(value.dtype) not in ("bool", "torch.bool")
    return value is None or (isinstance(value, numbers.Number) and not isinstance(value, bool))


def _cell(value, spec) -> str:
    if value is None:
        return "-"
    if callable(spec):
        return str(spec(value))
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if spec:
        return format(value, spec)
    return significant(value) if isinstance(value, float) else str(value)


def print_text(text: str) -> None:
    """Print plain text, wrapped; nothing is recorded. Of an empty text nothing is seen."""
    if not text:
        return
    _narrate()
    layout.draw_hanging("", "", text)


def columns() -> int | None:
    """Width of the terminal behind sys.stdout, as far as it is used; None in a pipe, a file or a notebook."""
    return output.width() if output.on_terminal() else None


# ------------------------------------------------------------------------------------ observations and samples


def observe(id: str, text: str, /, *, value=None, at_most=None, at_least=None, holds=None, measured: bool = False,
            not_judged: str = "", **values) -> None:
    """Print and record a sentence, and whether what it says is as expected in this run.

    id: what the record calls it, such as "never-slower"; no other observation of the run may have it. text: filled in
    from `values`, and {x} (with a format spec) from `value`, which is held against at_most and at_least: both are
    printed with enough digits to tell them apart. A yes or no without a value is `holds`. The sentence should be
    true whichever way it turns out. measured: it rests on a reading of the machine. not_judged: why such a reading is
    not good enough, as a sentence; it is then neither ok nor broken. BadInput when the text names a missing value.
    """
    made = claim(id, text, value, at_most, at_least, holds, not_judged, values)
    _narrate()
    if runs.run is not None:
        given = {"value": value, "at_most": at_most, "at_least": at_least, "not_judged": not_judged or None}
        runs.run.observations.put(id, text=made.sentence, holds=made.holds, measured=bool(measured),
                                  **{name: x for name, x in given.items() if x is not None})
    print_claim(made)


def print_claim(made: Claim) -> None:
    """Print a sentence marked as one that holds, does not hold or was not judged; nothing is recorded."""
    layout.draw_hanging(*made.mark, made.text)


def record_samples(name: str, values) -> None:
    """Keep the raw readings behind a measured table in the record, in the order taken; nothing is printed."""
    if runs.run is not None:
        runs.run.samples[name] = runs.jsonable(values)


# --------------------------------------------------------------------------------------- figures, and what moves


def subplots(rows: int = 1, cols: int = 1, size: tuple[float, float] = (7.0, 4.0), **options):
    """A figure and its axes as matplotlib's pyplot.subplots gives them, made without a display or a window.

    size: width and height in inches. options go to Figure.subplots (sharex and the like).
    """
    from matplotlib.figure import Figure

    fig = Figure(figsize=size, layout="constrained")
    return fig, fig.subplots(rows, cols, **options)


def figure(id: str, fig, name: str = "") -> None:
    """Save a matplotlib figure as out/NN-k.png (k-th figure of demo NN), record its path, and close it.

    id: what the record calls it, such as "roofline"; no other figure of the run may have it. It needs no display.
    In a notebook the figure appears once, below the cell. `name` is printed beside the path. The environment
    variable DECODE_LAB_OUT names another folder than out/; a path outside the project is recorded whole. Where the
    file cannot be written one line says so, and nothing is recorded.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    _narrate()
    run = runs.run if runs.run is not None else runs.Run(None, script=False)
    path = OUT / f"{run.demo}-{run.figures.place(id) + 1}.png"
    buffer = io.BytesIO()
    FigureCanvasAgg(fig).print_figure(buffer, format="png", dpi=120, metadata={"Software": None})
    caption, saved = f"Figure{': ' + name if name else ''} ({within(path)})", True
    try:
        OUT.mkdir(parents=True, exist_ok=True)
        write_bytes(path, buffer.getvalue())
        run.figures.put(id, path=within(path))
    except OSError as error:
        caption, saved = f"figure not saved: {reason(error)}: {within(OUT)}", False
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close(fig)  # also keeps Jupyter from showing the figure a second time
    if in_notebook():
        _display(buffer.getvalue(), caption)
        return
    output.gap()
    if saved:
        output.emit(output.shown(caption), "")
    else:
        output.write(f"{caption}\n\n")  # whole, however long the path is


def _display(png: bytes, caption: str) -> None:
    import base64
    from IPython.display import display

    display({"image/png": base64.b64encode(png).decode(), "text/plain": caption}, raw=True,
            metadata={"image/png": {"alt": caption}})


def out_folder() -> Path:
    """The folder for what demos leave behind, made if need be; BadInput that names DECODE_LAB_OUT where that fails."""
    return writable_folder(OUT, "DECODE_LAB_OUT")


def within(path) -> str:
    """A path as text, relative to the project's folder where it lies in it."""
    path = Path(path)
    return (path.relative_to(ROOT) if path.is_relative_to(ROOT) else path).as_posix()


def progress(iterable: Iterable, label: str, total: int | None = None,
             state: Callable[[], tuple[float, str]] | None = None) -> typing.Iterator:
    """Yield from `iterable`; work of over two seconds shows a bar on a terminal, and nothing in a pipe.

    state: returns how much is done, from 0 to 1, and the label, for work whose items do not tell.
    """
    _narrate()
    yield from widgets.progress_bar(iterable, label, total, state) if output.on_terminal() else iterable
