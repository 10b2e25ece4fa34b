"""Keeps README.md true: `make readme` writes what the commands named in it print, and its picture, again.

A block that begins with a comment `<!-- output: COMMAND -->` holds the output of that command in a code block, up to
`<!-- end -->`; after `| from: TEXT`, only the part that begins with a line of that text and ends at a blank line.
`<!-- demos -->` holds the table of demos, read from their first cells. The picture is a figure of a demo; the values that
it was drawn from are fingerprinted in the file, and a test compares the fingerprint with the demo's.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import console
from lab.__main__ import demos

ROOT = Path(__file__).resolve().parent.parent
README, PICTURE = ROOT / "README.md", ROOT / "docs" / "speedup.png"
PICTURE_OF = ROOT / "lab" / "05_spec_decode_on_hardware.py"


def output_of(command: str) -> str:
    """What `python …` prints in a pipe, 80 columns, without the progress of anything."""
    words = shlex.split(command)
    done = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, encoding="utf-8",
                          env={**os.environ, "PYTHONIOENCODING": "utf-8"})
    if done.returncode:
        raise SystemExit(f"{command} failed: {done.stderr}")
    return done.stdout


def part(text: str, beginning: str) -> str:
    """The first line that begins so, and what follows up to a blank line."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(beginning))
    end = next((i for i in range(start + 1, len(lines)) if not lines[i].strip()), len(lines))
    return "\n".join(lines[start:end])


def table_of_demos() -> str:
    rows = ["| demo | question | what you will see | takes |", "|---|---|---|---|"]
    for path in demos().values():
        card = console.demo_card(path)
        rows.append(f"| [{path.name}](lab/{path.name}) | {card['question']} | {card['watch']} | {card['takes']} |")
    return "\n".join(rows)


def refreshed(text: str) -> str:
    """README text with every generated block made anew."""
    def block(match):
        command, _, beginning = match.group(1).partition(" | from: ")
        shown = output_of(command)
        shown = part(shown, beginning) if beginning else shown.strip("\n")
        return f"<!-- output: {match.group(1)} -->\n```\n{shown}\n```\n<!-- end -->"
    text = re.sub(r"<!-- output: (.*?) -->\n.*?<!-- end -->", block, text, flags=re.S)
    return re.sub(r"<!-- demos -->\n.*?<!-- end -->", lambda m: f"<!-- demos -->\n{table_of_demos()}\n<!-- end -->", text,
                  flags=re.S)


def fingerprint(record: dict) -> str:
    """Of the table over batch and context that the picture shows more of, to three digits."""
    tables = [table for table in record["tables"] if {"batch", "context", "verdict"} <= set(table["columns"])]
    assert len(tables) == 1, "the picture's table is not in the record"
    tables = json.loads(json.dumps(tables), parse_float=lambda x: float(f"{float(x):.3g}"))
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()[:16]


def picture_fingerprint() -> str:
    from PIL import Image
    return Image.open(PICTURE).text.get("fingerprint", "")


def main():
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo
    with redirect_stdout(io.StringIO()):
        record = console.run_demo(PICTURE_OF)
    info = PngInfo()
    info.add_text("fingerprint", fingerprint(record))
    PICTURE.parent.mkdir(exist_ok=True)
    temporary = PICTURE.with_suffix(".tmp.png")
    Image.open(ROOT / record["figures"][0]).save(temporary, pnginfo=info)
    os.replace(temporary, PICTURE)
    console.write_text(README, refreshed(README.read_text(encoding="utf-8")))
    print(f"written: {README.name}, {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
