"""Where output goes: terminal, pipe or notebook; its width and encoding; writing to it, and ending quietly.

What is written leaves one blank line between two blocks, whatever comes after what.
"""

import io
import os
import shutil
import sys
import typing

from lab.support.errors import cut
from lab.support.text import plain

WIDTH = 80
LONGEST_WORD = 300  # characters, in a sentence about bad input
NARROWEST, WIDEST, WIDEST_TERMINAL = 40, 300, 100  # a long line of prose is hard to read on a wide terminal

_after: tuple = ()  # the stream (and notebook cell) of the last output, and whether that ended with a blank line

for _name in ("stdout", "stderr"):  # None where it was closed before the start, as by `>&-`
    if getattr(sys, _name) is None:
        setattr(sys, _name, open(os.devnull, "w", encoding="utf-8"))


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return shell is not None and hasattr(shell, "kernel")


def cell_run() -> int:
    """The number of the run of the notebook's cell that runs now; 0 in a script."""
    return sys.modules["IPython"].get_ipython().execution_count if in_notebook() else 0


def on_terminal() -> bool:
    try:
        return bool(sys.stdout.isatty()) and not in_notebook()
    except (AttributeError, ValueError):
        return False


def width() -> int:
    """Columns that output may take: COLUMNS if it is set, else the terminal's, else 80; always 80 in a notebook."""
    asked = os.environ.get("COLUMNS", "")
    if in_notebook():
        return WIDTH
    if asked.isascii() and asked.isdigit() and len(asked) < 10 and int(asked):
        return max(NARROWEST, min(int(asked), WIDEST))
    if not on_terminal():
        return WIDTH
    return max(NARROWEST, min(shutil.get_terminal_size((WIDTH, 25)).columns, WIDEST_TERMINAL))


def encoding(stream=None) -> str:
    """The encoding of a stream, by default that of sys.stdout."""
    return getattr(stream or sys.stdout, "encoding", None) or "utf-8"


def shown(text: str, stream=None) -> str:
    """`text` in characters that a stream, by default sys.stdout, can show."""
    return plain(text, encoding(stream))


def rich_console(file, columns: int | None = None):
    """A console of rich's that draws for where sys.stdout goes, in so many columns."""
    from rich.console import Console, detect_legacy_windows

    terminal = on_terminal() and not detect_legacy_windows()
    return Console(file=file, width=columns or width(), force_terminal=terminal, force_jupyter=False,
                   legacy_windows=False, color_system="auto" if terminal else None, highlight=False,
                   emoji=False, markup=False)


def write(text: str) -> None:
    """Write to sys.stdout and flush it; a closed pipe or a full disk is a BrokenPipeError."""
    global _after
    if sys.stdout is not None:
        try:
            sys.stdout.write(shown(text))
        except OSError as error:  # see flush
            raise BrokenPipeError(*error.args) from None
    flush()
    _after = (*_place(), text.endswith("\n\n") or text == "\n")


def gap() -> None:
    """A blank line, unless there is one already or this is the first output here."""
    if _after[:2] == _place() and not _after[2]:
        write("\n")


def emit(*renderables, columns: int | None = None) -> None:
    """Let rich draw, then write that without trailing blanks and in characters the output can show."""
    buffer = io.StringIO()
    console = rich_console(buffer, columns)
    for item in renderables:
        console.print(item)
    write(trimmed(buffer.getvalue()))


def trimmed(text: str) -> str:
    """Lines without trailing blanks, each ended."""
    return "".join(line.rstrip() + "\n" for line in text.splitlines())


def put(text: str, style: str = "") -> None:
    """Write text as it stands, without ending the line; in a style of rich's on a terminal that shows it."""
    from rich.console import COLOR_SYSTEMS
    from rich.style import Style

    colours = rich_console(None).color_system if style else None
    write(Style.parse(style).render(text, color_system=COLOR_SYSTEMS[colours]) if colours else text)


def _place() -> tuple:
    return id(sys.stdout), cell_run()


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
    words = [cut(word) if len(word) > LONGEST_WORD else word for word in str(error).split()]
    sentence = " ".join(words).rstrip(".")
    print(shown(f"error: {sentence}.", sys.stderr), file=sys.stderr)
    raise SystemExit(2)


def end_quietly() -> typing.NoReturn:
    """Exit with status 1 after a BrokenPipeError."""
    _discard_output()
    raise SystemExit(1)


def _discard_output() -> None:
    """What stdout still holds goes nowhere, so that the flush at the exit does not fail as well."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
