"""What a demo shows and leaves behind: assumptions, tables, figures, observations, and the record of a run.

A demo is a Python script in percent format. Its first output is `A = assumptions(Assumptions)`: as a script
the fields of the dataclass are flags, in a notebook (or in a test that imports the file) they keep their
defaults. As a script, the markdown cells of the demo's own file are printed too, each before the first output
that stands below it; in a notebook Jupyter shows them.

Everything printed is 80 columns wide unless a terminal says otherwise, and a character that the output's
encoding cannot show is written out (`alpha` for the Greek letter). rich does the drawing, tyro reads the
flags; both, and matplotlib, are imported when first needed.
"""

import ast
import atexit
import dataclasses
import difflib
import inspect
import io
import json
import math
import numbers
import os
import platform
import re
import runpy
import sys
import tempfile
import textwrap
import time
import typing
import unicodedata
from pathlib import Path
from typing import Annotated, Any, Callable, Iterable, Sequence

ROOT = Path(__file__).resolve().parent
OUT = Path(os.environ.get("DECODE_LAB_OUT") or ROOT / "out").absolute()  # where figures go
WIDTH = 80
SHOW_PROGRESS_AFTER = 2.0  # seconds
HELP = " (--help lists them)"
BREAK_FROM = 24  # characters: a longer word of a text column is broken if the table does not fit otherwise


class BadInput(ValueError):
    """Input that cannot be used, in one sentence that names the value and what would be right.

    A demo run as a script prints it to stderr as "error: ..." and exits with status 2.
    """


def nearest(name: str, names: Iterable[str], n: int = 3) -> list[str]:
    """The up to n names most like `name`, best first: alike in their letters, or in how they begin."""
    def likeness(known: str) -> float:
        shared = len(os.path.commonprefix([name.lower(), known.lower()]))
        alike = difflib.SequenceMatcher(None, name.lower(), known.lower()).ratio()
        return alike + 2 * shared / max(len(name), 1)

    name, names = str(name), [str(known) for known in names]
    best = sorted(names, key=likeness, reverse=True)
    close = [known for known in best if likeness(known) >= 0.6 * likeness(best[0]) and likeness(known) > 0.5]
    return close[:n] or (sorted(names) if len(names) <= 12 else best[:n])


def unknown(kind: str, name: str, names: Iterable[str]) -> BadInput:
    """The BadInput for a name that is none of `names`: raise unknown("chip", "h1000", CHIPS)."""
    return BadInput(f'unknown {kind} "{name}"; {_nearest_words(name, names)}')


def _nearest_words(name: str, names: Iterable[str]) -> str:
    close = nearest(name, names)
    return f"the nearest {'is' if len(close) == 1 else 'are'} {_listed(close)}"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else "none"


# ----------------------------------------------------------------------------------------------- assumptions


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a value of an annotated field must be: put it into Annotated[type, Rule(words, test)]."""

    words: str
    test: Callable[[Any], bool]
    names: tuple[str, ...] = ()


# The bounds far off keep products of several assumptions finite, and quotients too.
Count = Annotated[int, Rule("a whole number of at least 1 and at most 1e12", lambda x: 1 <= x <= 10**12)]
NonNegative = Annotated[int, Rule("a whole number of at least 0 and at most 1e12",
                                  lambda x: 0 <= x <= 10**12)]
Positive = Annotated[float, Rule("a number above 0, from 1e-9 to 1e12", lambda x: 1e-9 <= x <= 1e12)]
Fraction = Annotated[float, Rule("a number from 0 to 1", lambda x: 0 <= x <= 1)]
Share = Annotated[float, Rule("a number above 0 and at most 1", lambda x: 0 < x <= 1)]
Alpha = Annotated[float, Rule("at least 0 and below 1", lambda x: 0 <= x < 1)]


def Within(low, high):
    """The type of a field that holds a number from low to high, whole when both are: windows: Within(1, 100) = 6."""
    kind = int if isinstance(low, int) and isinstance(high, int) else float
    words = f"a {'whole ' if kind is int else ''}number from {low:g} to {high:g}"
    return Annotated[kind, Rule(words, lambda x: low <= x <= high)]


def OneOf(*names: str):
    """The type of a field that holds one of these names: chip: OneOf(*CHIPS) = "h100-sxm".

    A flag may spell a name with other capitals, and with spaces or underscores for hyphens.
    """
    return Annotated[str, Rule("one of the known names", lambda x: x in names, tuple(names))]


def assumptions(cls):
    """Return an instance of the frozen dataclass `cls` and print its values, those that were changed marked.

    As a script the fields are flags (`--batch 32`, `--gammas 1 3 5`, `--trained` / `--no-trained`), beside
    `--json FILE`, which writes the record of the run. Anywhere else the instance holds the defaults.

    Fields may be int, float, str, bool and tuples of them, annotated with Count, Positive and the like, which
    are checked for defaults too. Raises BadInput (a sentence on stderr and exit status 2 in a script).
    """
    global _run
    frame = inspect.currentframe().f_back
    path = frame.f_globals.get("__file__")
    script = frame.f_globals.get("__name__") == "__main__" and path is not None and not in_notebook()
    inside = _run if _run is not None and _run.in_process else None
    _run = _Run(Path(path) if path else None, script=script, in_process=inside is not None)
    _run.globals = frame.f_globals
    if inside is not None:
        inside.replaced_by = _run
    if script and not _run.in_process:
        _run.install()
    _check_folder(path)
    values = None
    if script:
        card = demo_card(_run.path) if _run.path else {}
        values = _parse_flags(cls, sys.argv[1:], f"python {Path(sys.argv[0]).as_posix()}", card.get("title", ""), True)
        path = values.pop("json")
        _run.json_path = _writable("--json", Path(path)) if path else None
    checked = _instance(cls, values, as_flags=script)
    default = cls()
    _run.assumptions = {field.name: getattr(checked, field.name) for field in dataclasses.fields(cls)}

    docs = _field_docs(cls)
    rows = []
    for name, value in _run.assumptions.items():
        changed = value != getattr(default, name)
        doc = docs.get(name, "")
        if changed:
            doc = f"{doc} (default {_shown(getattr(default, name))})".strip()
        rows.append([("* " if changed else "  ") + name, _shown(value), doc])
    _narrate()
    if rows:
        heading = "Assumptions, * changed" if any(row[0].startswith("*") for row in rows) else "Assumptions"
        _draw_table(["  assumption", "value", "meaning"], rows, heading, right=[False, False, False])
    return checked


def _check_folder(path: str | None) -> None:
    """Raise BadInput in a copy of the lab that would run the modules of another one (an editable install)."""
    root = Path.cwd().parent if in_notebook() else Path(path or __file__).resolve().parent.parent
    theirs = root / "console.py"
    if theirs.is_file() and (root / "lab").is_dir() and not theirs.samefile(__file__):
        raise BadInput(f'the code is taken from "{ROOT}", but this demo lies in "{root}": make setup '
                       f"(or pip install -e .) in that folder would be right")


def _shown(value) -> str:
    if isinstance(value, (tuple, list)):
        return " ".join(_shown(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return repr(value) if isinstance(value, float) else str(value) or '""'


def _instance(cls, values: dict | None, as_flags: bool):
    hints = typing.get_type_hints(cls, include_extras=True)
    values = {name: _spelled(value, hints[name]) for name, value in (values or {}).items()}
    made = cls(**values)
    for field in dataclasses.fields(cls):
        # An impossible default stands in the class: it was given by no flag.
        given = as_flags and values[field.name] != field.default
        _check(_flag(field.name) if given else field.name, getattr(made, field.name), hints[field.name])
    return made


def _spelled(value, hint):
    """`value` as the OneOf in `hint` spells it, if it is one: h100-sxm for "H100 SXM"."""
    if isinstance(value, tuple):
        return tuple(_spelled(item, typing.get_args(_bare(hint))[0]) for item in value)
    names = [name for rule in getattr(hint, "__metadata__", ()) for name in getattr(rule, "names", ())]
    alike = [name for name in names if re.sub(r"[ _]", "-", f"{value}".lower()) == name.lower()]
    return alike[0] if alike and value not in names else value


def _check(label: str, value, hint) -> None:
    rules = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Rule)]
    base = _bare(hint)
    if typing.get_origin(base) is tuple and isinstance(value, tuple):
        inner = typing.get_args(base)
        for i, item in enumerate(value):
            _check(label, item, inner[0] if inner[-1] is Ellipsis else inner[min(i, len(inner) - 1)])
    if isinstance(value, float) and not math.isfinite(value):
        raise BadInput(f"{label} must be a finite number, not {value}")
    for rule in rules:
        if rule.test(value):
            continue
        if rule.names:
            raise BadInput(f'{label} has no choice "{value}"; {_nearest_words(value, rule.names)}'
                           + (HELP if label.startswith("--") else ""))
        raise BadInput(f"{label} must be {rule.words}, not {_shown(value)}")


def _bare(hint):
    return typing.get_args(hint)[0] if hasattr(hint, "__metadata__") else hint


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def flags(cls, argv: Sequence[str], prog: str, title: str = ""):
    """An instance of the frozen dataclass `cls` from flags, checked as `assumptions` does; nothing is printed.

    prog: the command as a user types it. BadInput for flags that cannot be read, SystemExit(0) after --help.
    """
    return _instance(cls, _parse_flags(cls, list(argv), prog, title), as_flags=True)


def _parse_flags(cls, argv: list[str], prog: str, title: str, with_json: bool = False) -> dict:
    """{field: value} of the flags in argv, "json" among them if asked for; BadInput, or exit 0 after --help."""
    import tyro

    # A class of its own, with --json and with the docs as help. It lacks the __post_init__ of `cls`, which
    # runs when _instance builds that.
    hints, docs, fields = typing.get_type_hints(cls, include_extras=True), _field_docs(cls), []
    for field in dataclasses.fields(cls):
        names = [name for extra in getattr(hints[field.name], "__metadata__", ()) if isinstance(extra, Rule)
                 for name in extra.names]
        words = " ".join([docs.get(field.name, ""), f"One of: {', '.join(names)}." if names else ""]).strip()
        fields.append((field.name, Annotated[hints[field.name], tyro.conf.arg(help=words)],
                       dataclasses.field(default=field.default, default_factory=field.default_factory)))
    if with_json:
        fields.append(("json", Annotated[str, tyro.conf.arg(
            help="write the record of the run to this file", metavar="FILE", help_behavior_hint="")],
            dataclasses.field(default="")))
    flags = dataclasses.make_dataclass(cls.__name__, fields, frozen=True)
    flags.__doc__ = ""
    helping = any(arg in ("-h", "--help") for arg in argv)
    if not helping:
        _check_flags(argv, flags)
    text = io.StringIO()
    stdout, stderr = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = text
    try:
        found = tyro.cli(flags, args=argv, prog=prog, description=title, config=(tyro.conf.OmitArgPrefixes,))
    except SystemExit as end:
        sys.stdout, sys.stderr = stdout, stderr
        if end.code in (0, None):
            _write(_fit(text.getvalue()))
            if _run is not None:
                _run.failed = True  # no demo was run: there is nothing to narrate or record
            raise
        raise BadInput(f"these flags cannot be read: {' '.join(argv)}{HELP}") from None
    finally:
        sys.stdout, sys.stderr = stdout, stderr
    return vars(found)


def _writable(flag: str, path: Path) -> Path:
    """`path`, absolute, if write_bytes can write there; BadInput for a folder, a device and the like."""
    try:
        if path.exists() and not path.is_file():
            raise BadInput(f'{flag} cannot write "{path}", which is no regular file: give the name of a file')
        target = Path(os.path.realpath(path))
        # Only trying tells: root may write into /proc by its mode, and still cannot.
        tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name + ".").close()
    except OSError as error:
        raise BadInput(f'{flag} cannot write "{path}" ({error.strerror}): give the name of a file in a '
                       "folder that exists and that you may write to") from None
    return path.absolute()


def _check_flags(argv: list[str], cls) -> None:
    """Raise BadInput for the first argument that tyro would refuse (its own report takes several lines)."""
    hints = typing.get_type_hints(cls, include_extras=True)
    known = {}
    for field in dataclasses.fields(cls):
        known[_flag(field.name)] = hint = _bare(hints[field.name])
        if hint is bool:
            known["--no-" + _flag(field.name)[2:]] = hint
    at = 0
    while at < len(argv):
        name, equals, value = argv[at].partition("=")
        at += 1
        if not name.startswith("-") or is_number(name):
            raise BadInput(f'unexpected "{name}": a value follows its flag, as in {_example(known)}')
        flag = "--" + name.lstrip("-").replace("_", "-") if name.startswith("--") else name
        if flag not in known:
            raise BadInput(f"unknown flag {name}; {_nearest_words(flag, known)}{HELP}")
        values = [value] if equals else []
        while not equals and at < len(argv) and (not argv[at].startswith("-") or is_number(argv[at])):
            values.append(argv[at])
            at += 1
        hint = known[flag]
        many = typing.get_origin(hint) is tuple
        if hint is bool:
            if values:
                raise BadInput(f'{flag} takes no value, so "{values[0]}" is not possible there')
        elif not values or values == [""]:
            raise BadInput(f"{flag} needs a value")
        elif len(values) > 1 and not many:
            raise BadInput(f'{flag} takes one value, so "{values[1]}" is not possible there')
        kind = _bare(typing.get_args(hint)[0]) if many else hint
        for value in values:
            if kind is int and not re.fullmatch(r"[+-]?\d+", value):
                more = ", several separated by spaces" if many else ""
                raise BadInput(f'{flag} must be a whole number{more}, not "{value}"')
            if kind is float and not is_number(value):
                more = ", several separated by spaces" if many else ""
                raise BadInput(f'{flag} must be a number{more}, not "{value}"')


def _example(known: dict) -> str:
    flag = next((flag for flag, hint in known.items() if hint in (int, float)), "--json")
    return f"{flag} 1" if flag != "--json" else "--json FILE"


def is_number(text: str) -> bool:
    """Whether a word of the command line is a number, as "-0.1" is, and so no flag."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _field_docs(cls) -> dict[str, str]:
    """The doc of each field: the string below it, or the comment beside it or above it."""
    for source in _sources(cls):
        try:
            tree = ast.parse(source)
        except SyntaxError:  # a notebook cell with a magic command
            continue
        found = [node for node in ast.walk(tree)
                 if isinstance(node, ast.ClassDef) and node.name == cls.__name__]
        if not found:
            continue
        lines, docs, body = source.splitlines(), {}, found[-1].body
        for node, after in zip(body, body[1:] + [None]):
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            beside = re.search(r"\s#\s*(.*)$", lines[node.end_lineno - 1][node.end_col_offset:])
            above = re.match(r"\s*#\s*(.*)$", lines[node.lineno - 2])
            if isinstance(after, ast.Expr) and isinstance(getattr(after.value, "value", None), str):
                docs[node.target.id] = " ".join(after.value.value.split())
            elif beside or above:
                docs[node.target.id] = (beside or above).group(1).strip()
        return docs
    return {}


def _sources(cls) -> Iterable[str]:
    if _run is not None and _run.path is not None:
        yield _run.source
    if in_notebook():
        yield from reversed(sys.modules["IPython"].get_ipython().user_ns.get("In", []))
    try:
        yield textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        pass


# ------------------------------------------------------------------------------------- the demo file and the
# run


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of a percent file; `line` is where its "# %%" stands, counted from 1."""

    line: int
    markdown: bool
    tags: tuple[str, ...]
    text: str


def cells(source: str) -> list[Cell]:
    """The cells of a demo's source, in order; the text of a markdown cell without its comment marks."""
    found, lines = [], source.splitlines()
    starts = [i for i, line in enumerate(lines) if re.match(r"# %%(\s|$)", line)]
    for start, end in zip(starts, starts[1:] + [len(lines)]):
        markdown = "[markdown]" in lines[start]
        tags = re.search(r"tags=\[([^\]]*)\]", lines[start])
        body = lines[start + 1:end]
        if markdown:
            body = [re.sub(r"^# ?", "", line) for line in body]
        names = tuple(re.findall(r"[\w-]+", tags.group(1))) if tags else ()
        found.append(Cell(start + 1, markdown, names, "\n".join(body).strip()))
    return found


def demo_card(path: Path) -> dict[str, str]:
    """Number, title, question, takes ("about 3 s") and needs ("numpy") of a demo: its first markdown cell.

    The cell begins with "# 05. Title" and has paragraphs that begin with "**Question.**" and "**Takes.**";
    the latter reads "about 3 s; needs numpy, matplotlib." What is missing is an empty string.
    """
    path = Path(path)
    first = next((cell.text for cell in cells(path.read_text(encoding="utf-8")) if cell.markdown), "")
    heading = re.search(r"^#\s+(.*)$", first, re.M)
    paragraphs = {}
    for block in re.split(r"\n\s*\n", first):
        match = re.match(r"\*\*(\w+)(?: for)?\.\*\*\s*(.*)", " ".join(block.split()))
        if match:
            paragraphs[match.group(1).lower()] = match.group(2)
    takes, _, needs = paragraphs.get("takes", "").rstrip(".").partition("; needs ")
    number = re.match(r"\d+", path.name)
    return {"number": number.group() if number else path.stem,
            "title": heading.group(1) if heading else path.stem, "question": paragraphs.get("question", ""),
            "watch": paragraphs.get("watch", ""),
            "takes": takes, "needs": needs}


class _Run:
    """The state of one demo from its assumptions to its end."""

    def __init__(self, path: Path | None, script: bool, in_process: bool = False):
        self.path, self.script, self.in_process = path, script, in_process
        self.source = ""
        if path is not None:
            try:
                self.source = Path(path).read_text(encoding="utf-8")
            except (OSError, UnicodeError):
                pass
        # In a notebook Jupyter shows the markdown, and a cell for notebooks only is none of a script's
        # business.
        self.to_narrate = [cell for cell in cells(self.source)
                           if script and cell.markdown and "notebook" not in cell.tags]
        # Jupyter tells a kernel the notebook's path in this variable; there is no __file__ to read it from.
        name = Path(path).name if path else Path(os.environ.get("JPY_SESSION_NAME") or "notebook").name
        number = re.match(r"\d+", name)
        self.demo = number.group() if number else Path(name).stem
        self.assumptions: dict = {}
        self.tables: list[dict] = []
        self.observations: list[dict] = []
        self.figures: list[str] = []
        self.samples: dict[str, list] = {}
        self.globals: dict | None = None  # of the demo's top level
        self.json_path: Path | None = None
        self.failed = False
        self.replaced_by: "_Run | None" = None

    def record(self) -> dict:
        return _jsonable({
            "demo": self.demo, "assumptions": self.assumptions, "tables": self.tables,
            "observations": self.observations, "figures": self.figures, "samples": self.samples,
            "host": host(), "versions": versions()})

    def install(self) -> None:
        """Errors as one sentence, and the record at a normal exit, for the rest of this process."""
        sys.excepthook = _end
        atexit.register(self.finish)

    def finish(self) -> None:
        """What a normal end still owes: the markdown below the last output, and the record."""
        if self.failed:
            return
        try:
            _narrate(everything=True)
            if self.json_path is not None:
                write_text(self.json_path, json.dumps(self.record(), indent=1, allow_nan=False) + "\n")
            flush()
        except KeyboardInterrupt:
            os._exit(130)
        except OSError as error:  # too late for the exit status by any gentler way
            if not isinstance(error, BrokenPipeError):
                print(f"error: the record could not be written: {error}", file=sys.stderr, flush=True)
            os._exit(1)


_run: _Run | None = None


def _end(kind, error, trace) -> None:
    """The excepthook of a demo that runs as a script."""
    if _run is not None:
        _run.failed = True
    if issubclass(kind, BadInput):
        exit_with(error)
    if issubclass(kind, ModuleNotFoundError) and not (_run and _run.assumptions):  # the demo's imports
        exit_with(BadInput(f'the package "{error.name}" cannot be found by {sys.executable}: '
                           "make setup installs what the demos need"))
    if issubclass(kind, KeyboardInterrupt):
        raise SystemExit(130)
    if issubclass(kind, BrokenPipeError):  # `| head`: the reader has what it wanted
        end_quietly()
    sys.__excepthook__(kind, error, trace)


# A demo may be interrupted, or lack a package, in the imports before it comes to assumptions().
_script = Path(getattr(sys.modules.get("__main__"), "__file__", None) or ".").absolute()
if _script.parent.name == "lab" and re.match(r"\d\d_", _script.name):
    sys.excepthook = _end

for _name in ("stdout", "stderr"):  # None where it was closed before the start, as by `>&-`
    if getattr(sys, _name) is None:
        setattr(sys, _name, open(os.devnull, "w", encoding="utf-8"))


def flush() -> None:
    """Flush sys.stdout; a full disk behind it is a BrokenPipeError too, so that both end the same way."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        raise BrokenPipeError(*error.args) from None


def exit_with(error: BaseException) -> typing.NoReturn:
    """Print a BadInput as one sentence on stderr and exit with status 2."""
    try:
        flush()
    except BrokenPipeError:
        _discard_output()
    sentence = " ".join(str(error).split()).rstrip(".")
    print(_plain(f"error: {sentence}.", _encoding(sys.stderr)), file=sys.stderr)
    raise SystemExit(2)


def end_quietly() -> typing.NoReturn:
    """Exit with status 1 after a BrokenPipeError."""
    _discard_output()
    raise SystemExit(1)


def _discard_output() -> None:
    """What stdout still holds goes nowhere, so that the flush at the exit does not fail as well."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def record() -> dict:
    """The record of the current demo so far, as plain JSON values (see --json); {} before any demo began."""
    return _run.record() if _run is not None else {}


def run_demo(path, argv: Sequence[str] = ()) -> dict:
    """Run a demo file in this process, as a script with the flags `argv`, and return its record.

    Its output goes to sys.stdout. Raises what the demo raises (BadInput for a bad flag) and SystemExit for
    --help.
    """
    global _run
    before, argv_before = _run, sys.argv
    started = _run = _Run(None, script=True, in_process=True)
    sys.argv = [str(path), *map(str, argv)]
    try:
        runpy.run_path(str(path), run_name="__main__")
        ended = started.replaced_by or started
        ended.finish()
        return ended.record()
    finally:
        _run, sys.argv = before, argv_before


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return shell is not None and hasattr(shell, "kernel")


def _narrate(everything: bool = False) -> None:
    """Print the markdown cells that stand above the line of the demo that is running now."""
    if _run is None or not _run.to_narrate:
        return
    line = math.inf if everything else 0
    frame = inspect.currentframe()
    while frame is not None and not everything:
        if frame.f_globals is _run.globals and frame.f_code.co_name == "<module>":
            line = frame.f_lineno
        frame = frame.f_back
    while _run.to_narrate and _run.to_narrate[0].line < line:
        _print_markdown(_run.to_narrate.pop(0).text)


# ------------------------------------------------------------------------------------------------ plain
# values


def _jsonable(value):
    """`value` as JSON holds it: numpy scalars as numbers, arrays and tuples as lists, NaN and inf as null."""
    if isinstance(value, (bool, str)) or value is None:
        return value
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # numpy arrays and scalars, tensors
        return _jsonable(value.tolist())
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _jsonable({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_jsonable(item) for item in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    return str(value)


def host() -> dict:
    """The machine: cpu (name), cores that this process may use, memory in bytes (None if unknown), os."""
    name = platform.processor() or platform.machine()
    try:
        name = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text()).group(1)
    except (OSError, AttributeError):
        pass
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        memory = None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": name, "cores": cores, "memory": memory, "os": platform.platform()}


def versions() -> dict[str, str]:
    """Versions of Python and of those of the lab's libraries that this process has imported."""
    found = {"python": platform.python_version()}
    for name in ("numpy", "torch", "transformers", "tokenizers", "safetensors", "gguf", "matplotlib"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found


def within(path) -> str:
    """A path as text, relative to the project's folder where it lies in it."""
    path = Path(path)
    return (path.relative_to(ROOT) if path.is_relative_to(ROOT) else path).as_posix()


def write_text(path, text: str) -> None:
    """Write a text file through a temporary name, so that it is there whole or not at all."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path, data: bytes) -> None:
    """Write a file through a temporary name in the same folder, so that it is there whole or not at all.

    A symbolic link stays, and what it points to is written. Raises OSError.
    """
    path = Path(os.path.realpath(path))
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp makes the file private
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    if not math.isfinite(value):
        return str(value)
    for at, (size, unit) in enumerate(units):
        # 999.7 rounds to 1000: then the next larger unit is the right one.
        if abs(value) >= size * 0.9995 or at == len(units) - 1:
            return f"{_significant(value / size)} {unit}".strip()
    raise AssertionError("units are never empty")


def _significant(value: float, digits: int = 3) -> str:
    """`value` with this many significant digits, without exponent where that reads well: 0.0123, 98.7."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    if exponent < -4 or exponent >= 7:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{max(0, digits - 1 - exponent)}f}"


def fmt_time(seconds: float) -> str:
    """A time in s as text with three digits: "6.65 ms"."""
    return _scaled(seconds, [(1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")])


def fmt_bytes(n: float) -> str:
    """A number of bytes as text with three digits, in powers of 1000: "17.0 GB"."""
    if abs(n) < 1000 and n == int(n):
        return f"{int(n)} B"
    return _scaled(n, [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB"), (1.0, "B")])


def fmt_count(n: float) -> str:
    """A count as text with three digits, in powers of 1000: "8.03 B" (billion), "135 M"."""
    if abs(n) < 1000 and n == int(n):
        return str(int(n))
    return _scaled(n, [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"), (1.0, "")])


# ----------------------------------------------------------------------------------------------------
# printing

# What an encoding without these characters gets instead. One cell each where boxes and bullets are concerned,
# because those stand in text that is laid out already.
_WRITTEN_OUT = {
    "×": "x", "·": "*", "–": "-", "—": "-", "−": "-", "…": "...", "→": "->", "←": "<-", "↔": "<->", "⇒": "=>",
    "≤": "<=", "≥": ">=", "≠": "!=", "≈": "~", "±": "+/-", "µ": "u", "μ": "mu", "∞": "inf", "√": "sqrt",
    "∈": "in",
    "∑": "sum", "Σ": "sum", "∏": "prod", "Π": "prod", "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta",
    "Δ": "Delta", "ε": "epsilon", "θ": "theta", "κ": "kappa", "λ": "lambda", "π": "pi", "ρ": "rho",
    "σ": "sigma",
    "τ": "tau", "φ": "phi", "χ": "chi", "ω": "omega", "‘": "'", "’": "'", "“": '"', "”": '"', "•": "*",
    "▌": "|",
    "\u00a0": " ", "°": " deg ", "½": "1/2", "¼": "1/4", "✓": "ok", "✗": "no",
    "─": "-", "━": "-", "│": "|", "┃": "|", "═": "=", "║": "|",
}


def _encoding(stream) -> str:
    return getattr(stream, "encoding", None) or "utf-8"


def _plain(text: str, encoding: str | None = None) -> str:
    """`text` with what the encoding (by default that of sys.stdout) cannot show written out."""
    encoding = encoding or _encoding(sys.stdout)
    if text.isascii():
        return text
    out = []
    for char in text:
        try:
            char.encode(encoding)
            out.append(char)
            continue
        except (UnicodeEncodeError, LookupError):
            pass
        written = _WRITTEN_OUT.get(char)
        if written is None and "\u2500" <= char <= "\u257f":
            written = "+"
        if written is None:
            written = unicodedata.normalize("NFKD", char).encode("ascii", "ignore").decode() or "?"
        out.append(written)
    return "".join(out)


def _on_terminal() -> bool:
    try:
        return bool(sys.stdout.isatty()) and not in_notebook()
    except (AttributeError, ValueError):
        return False


def _width() -> int:
    if not _on_terminal():
        return WIDTH
    import shutil
    return max(40, min(shutil.get_terminal_size((WIDTH, 25)).columns, 100))


def _rich(file):
    from rich.console import Console, detect_legacy_windows

    terminal = _on_terminal() and not detect_legacy_windows()
    return Console(file=file, width=_width(), force_terminal=terminal, force_jupyter=False,
                   legacy_windows=False, color_system="auto" if terminal else None, highlight=False,
                   emoji=False, markup=False)


_after: tuple = ()  # the stream (and notebook cell) of the last output, if that ended with a blank line


def _place() -> tuple:
    count = sys.modules["IPython"].get_ipython().execution_count if in_notebook() else 0
    return id(sys.stdout), count


def _write(text: str) -> None:
    global _after
    if sys.stdout is not None:
        try:
            sys.stdout.write(_plain(text))
        except OSError as error:  # see flush
            raise BrokenPipeError(*error.args) from None
    flush()
    _after = (*_place(), text.endswith("\n\n") or text == "\n")


def _gap() -> None:
    """A blank line, unless there is one already or this is the first output here."""
    if _after[:2] == _place() and not _after[2]:
        _write("\n")


def _emit(*renderables) -> None:
    """Let rich draw, then write that without trailing blanks and in characters the output can show."""
    buffer = io.StringIO()
    console = _rich(buffer)
    for item in renderables:
        console.print(item)
    _write("".join(line.rstrip() + "\n" for line in buffer.getvalue().splitlines()))


def _fit(text: str) -> str:
    return "".join(line.rstrip() + "\n" for line in text.splitlines())


def _print_markdown(text: str) -> None:
    from rich.markdown import Heading, Markdown
    from rich.text import Text

    class LeftHeading(Heading):
        def __rich_console__(self, console, options):
            self.text.justify = "left"
            self.text.stylize("bold")
            yield self.text
            if self.tag in ("h1", "h2"):
                mark = "=" if self.tag == "h1" else "-"
                yield Text(mark * min(self.text.cell_len, options.max_width))

    class Plain(Markdown):
        elements = {**Markdown.elements, "heading_open": LeftHeading}

    _gap()
    _emit(Plain(_plain(text), hyperlinks=False), "")


def print_header(title: str) -> None:
    """Print a section title between blank lines, underlined."""
    from rich.text import Text

    _narrate()
    title = _plain(title)
    _gap()
    _emit(Text(title, style="bold"), "-" * min(len(title), _width()), "")


def print_table(columns: Sequence[str], rows: Iterable[Sequence], *, title: str = "",
                formats: dict | None = None, measured: Sequence[str] = ()) -> None:
    """Print a table and record it.

    rows hold numbers (recorded as numbers), strings, booleans ("yes", "no") or None ("-"). formats: column ->
    format spec such as ".2f" or a function of the value that returns text; without one, integers are printed
    as they are and floats with three significant digits. measured: the columns that hold readings of the
    machine (times, rates).

    A table too wide for the output gets its headers and texts wrapped between words, then less space between
    the columns, then is printed in parts that repeat the first column; numbers are never broken or cut.
    Raises BadInput when a row's length, or a name in formats or measured, fits no column.
    """
    columns, rows, formats = [str(c) for c in columns], [list(row) for row in rows], dict(formats or {})
    measured = [measured] if isinstance(measured, str) else list(measured)
    for row in rows:
        if len(row) != len(columns):
            raise BadInput(f'table "{title}" has {len(columns)} columns but a row of {len(row)} cells: {row}')
    for name in [*formats, *measured]:
        if name not in columns:
            raise unknown(f'column in table "{title}"', name, columns)
    _narrate()
    if _run is not None:
        _run.tables.append({"title": title, "columns": columns, "measured": measured,
                            "rows": _jsonable(rows)})
    texts = [[_cell(value, formats.get(column)) for column, value in zip(columns, row)] for row in rows]
    # A column is one of numbers, to the right, when no cell of it is text.
    right = [all(_is_numeric(row[i]) for row in rows) and any(row[i] is not None for row in rows)
             for i in range(len(columns))]
    _draw_table(columns, texts, title, right)


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
    return _significant(value) if isinstance(value, float) else str(value)


def _draw_table(columns: list[str], texts: list[list[str]], title: str, right: list[bool]) -> None:
    from rich.text import Text

    columns = [_plain(c) for c in columns]
    texts = [[_plain(t) for t in row] for row in texts]
    _gap()
    if title:
        _emit(Text(_plain(title), style="bold"))
    for part in _parts(columns, texts, right, _width()):
        keep, widths, gap = part
        _draw_part([columns[i] for i in keep], [[row[i] for i in keep] for row in texts],
                   [right[i] for i in keep], widths, gap)


def _parts(columns, texts, right, width) -> list[tuple[list[int], list[int], int]]:
    """The columns of each part of a table, their widths, and the gap between them; one part if that fits."""
    from rich.cells import cell_len

    every = list(range(len(columns)))
    natural = [max(map(cell_len, [columns[i], *[row[i] for row in texts], " "])) for i in every]
    # What a column needs at least: the longest word of its header, and its cells whole (`whole`). Then texts may
    # be wrapped between words too (`kept`); before the table falls apart, long words such as paths are broken
    # (`broken`). Numbers never are.
    whole, kept, broken = [], [], []
    for i in every:
        header = max(map(cell_len, [*columns[i].split(), " "]))
        words = [word for row in texts for word in ([row[i]] if right[i] else row[i].split())]
        cell = max(map(cell_len, words), default=1)
        whole.append(max(header, *(cell_len(row[i]) for row in texts), 1))
        kept.append(max(header, cell))
        broken.append(max(header, cell if right[i] else min(cell, BREAK_FROM)))

    def fitted(keep: list[int], gap: int, least: list[int]) -> list[int] | None:
        room = width - gap * (len(keep) - 1)
        widths = [(natural if least is whole else whole)[i] for i in keep]
        while sum(widths) > room:
            # Take from the column with the most to spare, so that one long text does not squeeze the rest.
            spare = max(range(len(keep)), key=lambda k: widths[k] - least[keep[k]])
            if widths[spare] <= least[keep[spare]]:
                return None
            widths[spare] -= 1
        return widths

    for gap, least in ((2, whole), (2, kept), (1, kept), (2, broken), (1, broken)):
        widths = fitted(every, gap, least)
        if widths is not None:
            return [(every, widths, gap)]
    parts, keep = [], every[:1]
    for i in every[1:]:
        if fitted(keep + [i], 2, broken) is None and len(keep) > 1:
            parts.append(keep)
            keep = [0]
        keep = keep + [i]
    parts.append(keep)
    return [(keep, fitted(keep, 2, broken) or [min(broken[i], width) for i in keep], 2) for keep in parts]


def _draw_part(columns, texts, right, widths, gap) -> None:
    from rich.box import Box
    from rich.table import Table
    from rich.text import Text

    dash = "─" if _encoding(sys.stdout).lower().startswith("utf") else "-"
    line = Box(f"    \n    \n {dash}{dash} \n    \n    \n    \n    \n    \n", ascii=dash == "-")
    table = Table(box=line, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0), header_style="bold")
    for name, width, to_right in zip(columns, widths, right):
        table.add_column(Text(_wrapped(name, width)), justify="right" if to_right else "left", vertical="top",
                         no_wrap=True, min_width=width, max_width=width)
    for row in texts:
        table.add_row(*[Text(text if to_right else _wrapped(text, width))
                        for text, width, to_right in zip(row, widths, right)])
    _emit(table, "")


def _wrapped(text: str, width: int) -> str:
    indent = text[:len(text) - len(text.lstrip())]
    fill = textwrap.TextWrapper(max(width, 1), subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(line for part in text.splitlines() for line in fill.wrap(part) or [""])


# ------------------------------------------------------------------------------------------------
# observations


def observe(text: str, *, holds, measured: bool = False, **values) -> None:
    """Print and record a claim, `text.format(**values)`, and whether it holds in this run.

    measured: the claim rests on a reading of the machine. Raises BadInput when the text names a missing
    value.
    """
    try:
        sentence = text.format(**values)
    except (KeyError, IndexError, ValueError) as error:
        raise BadInput(f'observation "{text}" cannot be filled in from {sorted(values)}: {error}') from None
    holds = bool(holds)
    _narrate()
    if _run is not None:
        _run.observations.append({"text": sentence, "holds": holds, "measured": bool(measured)})
    print_mark(sentence, holds)


def print_mark(text: str, holds: bool) -> None:
    """Print a sentence marked as one that holds or does not; nothing is recorded."""
    mark, style = ("[ ok ] ", "green") if holds else ("[ no ] ", "bold red")
    _hanging(mark, style, text if holds else f"Does not hold: {text}")


def put(text: str, style: str = "") -> None:
    """Write text as it stands, without ending the line; in a style of rich's on a terminal that shows it."""
    from rich.console import COLOR_SYSTEMS
    from rich.style import Style

    colours = _rich(None).color_system if style else None
    _write(Style.parse(style).render(text, color_system=COLOR_SYSTEMS[colours]) if colours else text)


def columns() -> int | None:
    """Width of the terminal behind sys.stdout, as far as it is used; None in a pipe, a file or a notebook."""
    return _width() if _on_terminal() else None


def print_text(text: str) -> None:
    """Print plain text, wrapped; nothing is recorded."""
    _narrate()
    _hanging("", "", text)


def record_samples(name: str, values) -> None:
    """Keep the raw readings behind a measured table in the record, in the order taken; nothing is printed."""
    if _run is not None:
        _run.samples[name] = _jsonable(values)


def print_observations(texts: Iterable[str]) -> None:
    """Print and record finished sentences that carry no condition (their `holds` is null); see observe."""
    _narrate()
    for text in [texts] if isinstance(texts, str) else texts:
        if _run is not None:
            _run.observations.append({"text": str(text), "holds": None, "measured": False})
        _hanging("- ", "", str(text))


def _hanging(mark: str, style: str, text: str) -> None:
    from rich.text import Text

    lines = textwrap.wrap(_plain(text), _width() - len(mark), break_on_hyphens=False,
                          break_long_words=False) or [""]
    first = Text.assemble((mark, style), lines[0])
    _emit(first, *[Text(" " * len(mark) + line) for line in lines[1:]])


# ---------------------------------------------------------------------------------------- figures and the
# rest


def subplots(rows: int = 1, cols: int = 1, size: tuple[float, float] = (7.0, 4.0), **options):
    """A figure and its axes as matplotlib's pyplot.subplots gives them, made without a display or a window.

    size: width and height in inches. options go to Figure.subplots (sharex and the like).
    """
    from matplotlib.figure import Figure

    fig = Figure(figsize=size, layout="constrained")
    return fig, fig.subplots(rows, cols, **options)


def figure(fig, name: str = "") -> None:
    """Save a matplotlib figure as out/NN-k.png (k-th figure of demo NN), record its path, and close it.

    It needs no display. In a notebook the figure appears once, below the cell. `name` is printed beside the
    path. The environment variable DECODE_LAB_OUT names another folder than out/; a path outside the project
    is recorded whole. Where the file cannot be written one line says so, and nothing is recorded.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    _narrate()
    run = _run if _run is not None else _Run(None, script=False)
    run_name = f"{run.demo}-{len(run.figures) + 1}.png"
    buffer = io.BytesIO()
    FigureCanvasAgg(fig).print_figure(buffer, format="png", dpi=120, metadata={"Software": None})
    shown, unsaved = within(OUT / run_name), ""
    try:
        OUT.mkdir(parents=True, exist_ok=True)
        write_bytes(OUT / run_name, buffer.getvalue())
        run.figures.append(shown)
    except OSError as error:
        reason = "Not a directory" if isinstance(error, FileExistsError) else error.strerror or str(error)
        unsaved = f"figure not saved: {reason}: {within(OUT)}"
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close(fig)  # also keeps Jupyter from showing the figure a second time
    caption = unsaved or f"Figure{': ' + name if name else ''} ({shown})"
    if in_notebook():
        import base64
        from IPython.display import display
        image = base64.b64encode(buffer.getvalue()).decode()
        display({"image/png": image, "text/plain": caption}, raw=True)
    elif unsaved:
        _gap()
        _write(f"{unsaved}\n\n")  # whole, however long the path is
    else:
        _gap()
        _emit(_plain(caption), "")


def progress(iterable: Iterable, label: str, total: int | None = None,
             state: Callable[[], tuple[float, str]] | None = None):
    """Yield from `iterable`; work of over two seconds shows a bar on a terminal, and nothing in a pipe.

    state: returns how much is done, from 0 to 1, and the label, for work whose items do not tell.
    """
    _narrate()
    if not _on_terminal():
        yield from iterable
        return
    from rich.console import Console
    from rich.progress import Progress

    if total is None and hasattr(iterable, "__len__"):
        total = len(iterable)
    if state is not None:
        total = 1.0
    started, bar, task = time.monotonic(), None, None
    try:
        for done, item in enumerate(iterable):
            if bar is None and time.monotonic() - started > SHOW_PROGRESS_AFTER:
                bar = Progress(console=Console(file=sys.stdout, width=_width()), transient=True)
                bar.start()
                task = bar.add_task(_plain(label), total=total)
            if bar is not None:
                if state is not None:
                    done, label = state()
                bar.update(task, completed=done, description=_plain(label))
            yield item
    finally:
        if bar is not None:
            bar.stop()


def sliders(show: Callable, **ranges: tuple) -> None:
    """In a notebook, sliders that call show(name=value, ...) whenever one moves; nothing elsewhere.

    ranges: name = (least, greatest, step, start), whole numbers throughout for an integer slider. Below the
    sliders show() is called once with the starting values, so that the page reads without widgets. Put the
    call into a cell of its own, marked `# %% tags=["notebook"]`.
    """
    if not in_notebook():
        return
    import ipywidgets
    from IPython.display import display

    made = {}
    for name, (least, greatest, step, start) in ranges.items():
        kind = ipywidgets.IntSlider if all(isinstance(x, int) for x in (least, greatest, step, start)) \
            else ipywidgets.FloatSlider
        made[name] = kind(min=least, max=greatest, step=step, value=start, description=name,
                          continuous_update=False)
    out = ipywidgets.Output()

    def moved(_change) -> None:
        with out:
            out.clear_output(wait=True)
            show(**{name: slider.value for name, slider in made.items()})

    for slider in made.values():
        slider.observe(moved, names="value")
    box = ipywidgets.VBox([*made.values(), out])
    sentence = f"Sliders for {_listed(list(made))}: run this cell to move them. At their starting values:"
    # Without this a page without widgets shows the widget's repr.
    display({**box._repr_mimebundle_(), "text/plain": sentence}, raw=True)
    show(**{name: start for name, (_, _, _, start) in ranges.items()})
