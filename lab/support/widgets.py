"""What moves: a progress bar on a terminal, sliders in a notebook."""

import sys
import time
from collections.abc import Callable, Iterable, Sized
from typing import Any

from lab.support import output, record
from lab.support.errors import listed

SHOW_PROGRESS_AFTER = 2.0  # seconds


def progress_bar(iterable: Iterable, label: str, total: float | None,
                 state: Callable[[], tuple[float, str]] | None):
    """Yield from `iterable`; work of over two seconds shows a bar. See console.progress."""
    from rich.console import Console
    from rich.progress import Progress

    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    if state is not None:
        total = 1.0
    started, bar = time.monotonic(), None
    try:
        for n, item in enumerate(iterable):
            if bar is None and time.monotonic() - started > SHOW_PROGRESS_AFTER:
                bar = Progress(console=Console(file=sys.stdout, width=output.width()), transient=True)
                bar.start()
                bar.add_task(output.shown(label), total=total)
            if bar is not None:
                done, label = state() if state is not None else (n, label)
                bar.update(bar.task_ids[0], completed=done, description=output.shown(label))
            yield item
    finally:
        if bar is not None:
            bar.stop()


def sliders(show: Callable, **ranges: tuple) -> None:
    """In a notebook, sliders that call show(name=value, ...) whenever one moves; nothing elsewhere.

    ranges: name = (least, greatest, step, start), whole numbers throughout for an integer slider, or
    name = ([values], start) for a slider over these values, such as powers of two. What show() prints, and the figure
    that it draws, stand below the sliders from the start, so that the page reads without widgets; a move replaces them.
    Put the call into a cell of its own, marked `# %% tags=["notebook"]`.
    """
    if not output.in_notebook():
        return
    import ipywidgets
    from IPython.display import display

    made = {name: _slider(name.replace("_", " "), given) for name, given in ranges.items()}
    places: dict[str, Any] = {}                    # handles of IPython, which states no types

    def draw(_change=None) -> None:
        found = _caught(show, {name: slider.value for name, slider in made.items()})
        for kind, (bundle, metadata) in found.items():
            if kind in places:
                places[kind].update(bundle, raw=True, metadata=metadata)
            else:
                places[kind] = display(bundle, raw=True, metadata=metadata, display_id=True)

    for slider in made.values():
        slider.observe(draw, names="value")
    box = ipywidgets.VBox(list(made.values()))
    names = listed([name.replace("_", " ") for name in made])
    sentence = f"Sliders for {names}: run this cell to move them. At their starting values:"
    # Without this a page without widgets shows the widget's repr.
    display({**box._repr_mimebundle_(), "text/plain": sentence}, raw=True)
    draw()


def _slider(label: str, given: tuple):
    """A slider with its whole label beside it."""
    import ipywidgets

    look = dict(description=label, continuous_update=False, style={"description_width": "12em"},
                layout=ipywidgets.Layout(width="36em"))
    if len(given) == 2:
        values, start = given
        return ipywidgets.SelectionSlider(options=list(values), value=start, **look)
    least, greatest, step, start = given
    kind = ipywidgets.IntSlider if all(isinstance(x, int) for x in given) else ipywidgets.FloatSlider
    return kind(min=least, max=greatest, step=step, value=start, **look)


def _caught(show: Callable, values: dict) -> dict[str, tuple[dict, dict]]:
    """What show(**values) prints and draws, as a notebook displays it: {"text" or "figure": (bundle, metadata)}."""
    from IPython.utils.capture import capture_output

    record.redrawing = True
    try:
        with capture_output() as caught:
            show(**values)
    finally:
        record.redrawing = False
    found: dict[str, tuple[dict, dict]] = {}
    if caught.stdout.strip():
        found["text"] = {"text/plain": caught.stdout.strip("\n")}, {}
    for each in caught.outputs:
        if "image/png" in each.data:
            found["figure"] = each.data, each.metadata
    return found
