"""python -m lab.commands.notebooks [01 4-6]: write notebooks/NN_name.ipynb from the demos, executed; by default all.

A notebook is never edited: its cells are those of its demo, with fixed ids, so that a notebook differs from
the committed one only where its demo or its outputs do. The test suite compares the cells and executes each
notebook.
"""

import sys
from pathlib import Path

import console
from lab.__main__ import child_environment, demos, entry, selected
from lab.support.errors import BadInput

FOLDER = console.ROOT / "notebooks"
WIDGET = "application/vnd.jupyter.widget-view+json"
TIMEOUT = 600  # seconds for one cell
HIDE = "hide-input"  # tag of code that a page for the class folds away, as Jupyter Book does


def notebook_path(demo: Path) -> Path:
    """Where the notebook of a demo is."""
    return FOLDER / f"{Path(demo).stem}.ipynb"


def build(demo: Path):
    """The notebook (an nbformat node) of a demo, without outputs."""
    import jupytext

    notebook = jupytext.reads(Path(demo).read_text(encoding="utf-8"), fmt="py:percent")
    # Nothing about jupytext's version, or about this machine's kernel, belongs into the file.
    notebook.metadata = {"kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python",
                                        "name": "python3"},
                         "language_info": {"name": "python"}}
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for index, cell in enumerate(notebook.cells):
        cell.id = f"{Path(demo).stem[:2]}-{index:02d}"
        tags = list(cell.metadata.get("tags", []))
        if cell.cell_type == "code" and "class Assumptions" not in cell.source:
            tags.append(HIDE)
        cell.metadata = {"tags": tags} if tags else {}
    return notebook


def execute(notebook, name: str):
    """Run a notebook's cells in a fresh kernel, in notebooks/, and return it with its outputs.

    Raises nbclient's CellExecutionError when a cell fails.
    """
    from nbclient import NotebookClient

    FOLDER.mkdir(exist_ok=True)
    metadata = notebook.metadata.copy()
    client = NotebookClient(notebook, timeout=TIMEOUT, startup_timeout=TIMEOUT, kernel_name="python3",
                            record_timing=False, store_widget_state=False, coalesce_streams=True,
                            extra_arguments=["--IPKernelApp.log_level=ERROR"],  # quiet about its transport
                            resources={"metadata": {"path": str(FOLDER)}})
    # The session name is what JupyterLab sets too: it tells console.figure the demo's number.
    client.execute(env={**child_environment(), "JPY_SESSION_NAME": str(FOLDER / f"{name}.ipynb")})
    notebook.metadata = metadata
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = _lasting(cell.outputs)
    return notebook


def _lasting(outputs: list) -> list:
    """Outputs as a page without a kernel can show them: no live widgets, no chatter on stderr."""
    kept = []
    for output in outputs:
        if output.output_type == "stream" and output.name == "stderr":
            continue
        if output.output_type in ("display_data", "execute_result"):
            output["data"].pop(WIDGET, None)
            alt = output["metadata"].get("image/png", {}).get("alt")  # what a screen reader says of a figure
            output["metadata"] = {"image/png": {"alt": alt}} if alt else {}
        kept.append(output)
    return kept


def cells_of(notebook) -> list[tuple]:
    """(id, type, source, tags) of each cell: what a notebook must have in common with its demo."""
    return [(cell.id, cell.cell_type, cell.source, tuple(cell.metadata.get("tags", ())))
            for cell in notebook.cells]


def main(words: list[str]) -> int:
    """Write the notebooks of the demos that `words` names, or of all."""
    import nbformat

    available = demos()
    if not available:
        raise BadInput(f"there is no demo in {console.ROOT / 'lab'}")
    for number in selected(words or ["all"], available):
        demo = available[number]
        notebook = execute(build(demo), demo.stem)
        console.write_text(notebook_path(demo), nbformat.writes(notebook, version=nbformat.NO_CONVERT) + "\n")
        console.print_text(f"wrote {notebook_path(demo).relative_to(console.ROOT).as_posix()}")
    return 0


if __name__ == "__main__":
    sys.exit(entry(sys.argv[1:], main))
