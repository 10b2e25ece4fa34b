"""What moves: a progress bar on a terminal, sliders in a notebook."""

import sys
import time
from collections.abc import Callable, Iterable, Sized

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

    ranges: name = (least, greatest, step, start), whole numbers throughout for an integer slider. Below the
    sliders show() is called once with the starting values, so that the page reads without widgets. Put the
    call into a cell of its own, marked `# %% tags=["notebook"]`.
    """
    if not output.in_notebook():
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

    def draw(**values) -> None:
        record.redrawing = True
        try:
            show(**values)
        finally:
            record.redrawing = False

    def moved(_change) -> None:
        with out:
            out.clear_output(wait=True)
            draw(**{name: slider.value for name, slider in made.items()})

    for slider in made.values():
        slider.observe(moved, names="value")
    box = ipywidgets.VBox([*made.values(), out])
    sentence = f"Sliders for {listed(list(made))}: run this cell to move them. At their starting values:"
    # Without this a page without widgets shows the widget's repr.
    display({**box._repr_mimebundle_(), "text/plain": sentence}, raw=True)
    draw(**{name: start for name, (_, _, _, start) in ranges.items()})
