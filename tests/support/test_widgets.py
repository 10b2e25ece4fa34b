"""A progress bar on a terminal, sliders in a notebook."""

import os
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
    import IPython.display
    import ipywidgets

    calls, shown, made = [], [], []
    for kind in ("IntSlider", "FloatSlider", "SelectionSlider"):
        def make(real=getattr(ipywidgets, kind), **options):
            made.append(real(**options))
            return made[-1]

        monkeypatch.setattr(ipywidgets, kind, make)
    monkeypatch.setattr(output, "in_notebook", lambda: True)
    monkeypatch.setattr(output, "cell_run", lambda: 1)
    monkeypatch.setattr(IPython.display, "display", lambda data, **options: shown.append(data["text/plain"]))
    console.sliders(lambda **values: calls.append(values), alpha=(0.1, 0.9, 0.1, 0.5), draft_length=(1, 8, 1, 4),
                    batch=([1, 2, 4, 8], 2))
    assert calls == [{"alpha": 0.5, "draft_length": 4, "batch": 2}]  # the plain table below
    assert "alpha, draft length and batch" in shown[0] and "(" not in shown[0]
    assert [slider.description for slider in made] == ["alpha", "draft length", "batch"]
    made[1].value = 6
    made[2].value = 8
    assert calls[1:] == [{"alpha": 0.5, "draft_length": 6, "batch": 2}, {"alpha": 0.5, "draft_length": 6, "batch": 8}]


@pytest.mark.slow
def test_after_a_move_one_table_and_one_figure_stand_there(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    demo = f"""
import sys
sys.path.insert(0, {str(console.ROOT)!r})
import console

def show(batch):
    console.print_table("moved", ["batch"], [[batch]])
    fig, axis = console.subplots(size=(1, 1))
    axis.plot([0, batch])
    console.figure("moved", fig)

console.sliders(show, batch=([1, 2, 4], 2))
"""
    move = "from ipywidgets.widgets.widget import _instances\n" \
           "[w for w in _instances.values() if hasattr(w, 'options')][0].value = 4"
    cells = [nbformat.v4.new_code_cell(text) for text in (demo, move)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    with client.setup_kernel(env={**os.environ, "DECODE_LAB_OUT": str(tmp_path)}):
        client.execute_cell(cells[0], 0)
        before = [dict(output.data) for output in cells[0].outputs]
        client.execute_cell(cells[1], 1)
    after = [dict(output.data) for output in cells[0].outputs]
    assert len(before) == len(after) == 3 and cells[1].outputs == []
    assert before[1]["text/plain"].split()[-1] == "2" and after[1]["text/plain"].split()[-1] == "4"
    assert before[2]["image/png"] != after[2]["image/png"]
