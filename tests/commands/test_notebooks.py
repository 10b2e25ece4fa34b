"""Each notebook has the cells of its demo, reads without widgets, and executes."""

import re
from pathlib import Path

import pytest

import console
from lab.__main__ import demos
from lab.commands import notebooks

DEMOS = list(demos().values())
NAMES = [path.stem for path in DEMOS]


def valid(path):
    """The notebook in this file."""
    import nbformat  # takes seconds, which a worker without these tests need not spend
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    return notebook


def committed(demo):
    return valid(notebooks.notebook_path(demo))


def test_every_demo_has_a_notebook_and_every_notebook_a_demo():
    assert sorted(path.stem for path in notebooks.FOLDER.glob("*.ipynb")) == sorted(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("demo", DEMOS, ids=NAMES)
def test_a_notebook_has_the_cells_of_its_demo(demo):
    assert notebooks.cells_of(committed(demo)) == notebooks.cells_of(notebooks.build(demo)), "run make notebooks"


@pytest.mark.slow
@pytest.mark.parametrize("demo", DEMOS, ids=NAMES)
def test_a_notebook_is_executed_and_reads_without_widgets(demo):
    code = [cell for cell in committed(demo).cells if cell.cell_type == "code" and cell.source.strip()]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for output in [output for cell in code for output in cell.outputs]:
        assert output.output_type != "error" and output.get("name") != "stderr"
        data = output.get("data", {})
        assert notebooks.WIDGET not in data
        text = data.get("text/plain", "")
        assert "(children=" not in text and " object at 0x" not in text


# Numbers in place of the defaults of demos that take minutes; all cells still run.
QUICK = {15: {"prompts": 2, "samples": 20, "texts": 2, "new_tokens": 8, "timings": 2, "kept": 28},
         20: {"copied": 8, "new_tokens": 8, "timings": 2},
         16: {"repeat_tokens": 8, "code_tokens": 8, "open_tokens": 8, "repeats": 1},
         18: {"new_tokens": 8, "timed_tokens": 8, "timings": 1, "penalised": 8, "gamma": 4}}


def with_numbers(notebook, numbers):
    """The notebook, with these defaults of its Assumptions."""
    cell, = [cell for cell in notebook.cells if "class Assumptions" in cell.source]
    for name, value in numbers.items():
        cell.source, n = re.subn(rf"^(    {name}: .*? = )\d+\b", rf"\g<1>{value}", cell.source, flags=re.M)
        assert n == 1, f"{name} is no number among the Assumptions"
    return notebook


@pytest.mark.slow
def test_only_the_numbers_named_change():
    demo = demos()[15]
    before, after = ([line for cell in made.cells for line in cell.source.splitlines()] for made in (
        notebooks.build(demo), with_numbers(notebooks.build(demo), QUICK[15])))
    numbers = {}
    for a, b in zip(before, after, strict=True):
        name = b.split(":")[0].strip()
        assert a == b or name in QUICK[15]
        if b.startswith("    ") and ": " in b and name in QUICK[15]:
            numbers[name] = int(re.search(r" = (\d+)", b).group(1))
    assert numbers == QUICK[15] and before != after
    for wrong in ("kep", "target"):
        with pytest.raises(AssertionError, match="is no number"):
            with_numbers(notebooks.build(demo), {wrong: 1})


@pytest.mark.parametrize("demo", [pytest.param(demo, id=demo.stem, marks=(
    pytest.mark.slow if demo.stem.startswith("05") else pytest.mark.nightly)) for demo in DEMOS])
def test_a_notebook_executes(demo):
    notebook = with_numbers(notebooks.build(demo), QUICK.get(int(demo.stem[:2]), {}))
    notebook = notebooks.execute(notebook, demo.stem)
    text = "".join(output.get("text", "") for cell in notebook.cells if cell.cell_type == "code"
                   for output in cell.outputs)
    assert "Assumptions" in text


TINY = '''
    # %% [markdown]
    # # 97. Tiny

    # %%
    from dataclasses import dataclass
    import console

    @dataclass(frozen=True)
    class Assumptions:
        gamma: console.Count = 4
        """draft length γ"""

    A = console.assumptions(Assumptions)

    # %%
    fig, ax = console.subplots()
    ax.plot([1, 2])
    console.figure("line", fig, "a line")

    # %%
    def show(gamma):
        console.print_table("gammas", ["gamma"], [[gamma]], title="A table")

    console.observe("a-line", "It is a line.", holds=True)
    show(2)

    # %% tags=["notebook"]
    console.sliders(show, gamma=(1, 8, 1, 3))
'''


@pytest.mark.slow
def test_a_notebook_is_the_same_each_time_and_shows_what_the_demo_does(write_demo, tmp_path, monkeypatch):
    demo = write_demo(TINY, "97_tiny.py")
    monkeypatch.setattr(notebooks, "FOLDER", tmp_path / "notebooks")
    monkeypatch.setattr(notebooks, "demos", lambda: {97: demo})
    monkeypatch.setattr(notebooks.console, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    assert notebooks.main(["97"]) == 0
    path = tmp_path / "notebooks" / "97_tiny.ipynb"
    first = path.read_bytes()
    assert notebooks.main([]) == 0 and path.read_bytes() == first
    assert [name.name for name in path.parent.iterdir()] == [path.name]

    cells = valid(path).cells
    assert [cell.id for cell in cells] == ["97-00", "97-01", "97-02", "97-03", "97-04"]
    tags = [[tag for tag in cell.metadata.get("tags", []) if tag != notebooks.HIDE] for cell in cells]
    assert tags == [[], [], [], [], ["notebook"]] and not any(set(cell.metadata) - {"tags"} for cell in cells)
    assert "draft length γ" in cells[1].outputs[0].text
    assert len(cells[2].outputs) == 1 and "image/png" in cells[2].outputs[0].data  # once, not twice
    figure = console.within(console.OUT / "97-1.png")
    assert cells[2].outputs[0].data["text/plain"] == f"Figure: a line ({figure})"
    assert "[ ok ] It is a line.\n\nA table\n" in cells[3].outputs[0].text
    assert cells[4].outputs[0].data["text/plain"].startswith("Sliders for gamma")
    assert list(cells[4].outputs[0].data) == ["text/plain"]
    assert "A table" in cells[4].outputs[1].data["text/plain"]


@pytest.mark.slow
def test_a_failing_cell_leaves_the_old_notebook(write_demo, tmp_path, monkeypatch):
    from nbclient.exceptions import CellExecutionError

    demo = write_demo("# %% [markdown]\n# # 96. Fails\n\n# %%\n1 / 0\n", "96_fails.py")
    monkeypatch.setattr(notebooks, "FOLDER", tmp_path / "notebooks")
    monkeypatch.setattr(notebooks, "demos", lambda: {96: demo})
    (tmp_path / "notebooks").mkdir()
    path = tmp_path / "notebooks" / "96_fails.ipynb"
    path.write_text("old")
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        notebooks.main([])
    assert path.read_text() == "old" and list(path.parent.iterdir()) == [path]


def test_code_can_be_folded_away_but_not_the_assumptions():
    cells = [cell for cell in notebooks.build(DEMOS[0]).cells if cell.cell_type == "code"]
    shown = [cell for cell in cells if notebooks.HIDE not in cell.metadata.get("tags", [])]
    assert len(cells) > 3 and len(shown) == 1 and "class Assumptions" in shown[0].source


def test_every_figure_has_a_text_for_those_who_cannot_see_it():
    outputs = [output for demo in DEMOS for cell in committed(demo).cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) > 8 and all(output.metadata["image/png"]["alt"] for output in pictures)
