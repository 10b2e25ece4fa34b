"""A demo's file: its cells in percent format, and the card that its first markdown cell is."""

import dataclasses
import re
from pathlib import Path


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
    for start, end in zip(starts, [*starts[1:], len(lines)]):
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
