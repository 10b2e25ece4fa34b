"""A progress bar on a terminal, sliders in a notebook."""

import sys

import pytest

import console
from lab.support import output, widgets


def test_progress_is_silent_in_a_pipe(capsys, monkeypatch):
    monkeypatch.setattr(widgets, "SHOW_PROGRESS_AFTER", 0.0)
    assert list(console.progress(range(3), "work")) == [0, 1, 2]
    assert capsys.readouterr().out == ""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_shows_progress_and_colours(write_demo):
    import os
    import subprocess

    path = write_demo("""
        import console
        from lab.support import widgets
        widgets.SHOW_PROGRESS_AFTER = 0.0
        assert list(console.progress(range(3), "counting")) == [0, 1, 2]
        console.observe("ended", "It ended.", holds=True)
    """)
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(console.ROOT)}
    environment.pop("NO_COLOR", None)
    done = subprocess.run([sys.executable, str(path)], stdout=theirs, stderr=theirs, env=environment,
                          timeout=60)
    os.close(theirs)
    text = os.read(ours, 100_000).decode()
    os.close(ours)
    assert done.returncode == 0 and "counting" in text
    assert "\x1b[32m[ ok ] \x1b[0mIt ended." in text


def test_sliders_do_nothing_in_a_script(capsys):
    console.sliders(lambda **values: print("called"), alpha=(0.1, 0.9, 0.1, 0.5))
    assert capsys.readouterr().out == ""


def test_a_moved_slider_calls_the_function(monkeypatch):
    import ipywidgets
    import IPython.display

    calls, shown, made = [], [], []
    for kind in ("IntSlider", "FloatSlider"):
        def make(real=getattr(ipywidgets, kind), **options):
            made.append(real(**options))
            return made[-1]

        monkeypatch.setattr(ipywidgets, kind, make)
    monkeypatch.setattr(output, "in_notebook", lambda: True)
    monkeypatch.setattr(output, "cell_run", lambda: 1)
    monkeypatch.setattr(IPython.display, "display", lambda data, raw: shown.append(data["text/plain"]))
    console.sliders(lambda **values: calls.append(values), alpha=(0.1, 0.9, 0.1, 0.5), gamma=(1, 8, 1, 4))
    assert calls == [{"alpha": 0.5, "gamma": 4}]  # the plain table below
    assert "alpha and gamma" in shown[0] and "(" not in shown[0]
    made[1].value = 6
    assert calls[1:] == [{"alpha": 0.5, "gamma": 6}]
