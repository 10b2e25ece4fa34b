"""Keeps README.md true: `make readme` writes its tables and its picture again.

`<!-- demos -->` holds, up to `<!-- end -->`, the table of demos, read from their first cells;
`<!-- records: results/*.json -->` tables of the records that match, as `make gpu` leaves them. The picture is a figure
of a demo; the values that it was drawn from are fingerprinted in the file, and a test compares the fingerprint with
the demo's.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path

import console
from lab.__main__ import demos
from lab.support.files import replacing

ROOT = Path(__file__).resolve().parents[2]
README, PICTURE = ROOT / "README.md", ROOT / "docs" / "speedup.png"
PICTURE_OF = ROOT / "lab" / "05_spec_decode_on_hardware.py"


def table_of_demos() -> str:
    rows = ["| demo | what you find out | takes |", "|---|---|---|"]
    for path in demos().values():
        card = console.demo_card(path)
        title = card["title"].removeprefix(f"{card['number']}. ")
        rows.append(f"| [{card['number']}](lab/{path.name}) {title} | {card['question']} | {card['takes']} |")
    return "\n".join(rows)


def table_of_records(pattern: str) -> str:
    """Markdown tables of the records of demos 14, 15 and 20 whose files match a pattern: what each run showed.

    One table per demo that has records; nothing where there are none.
    """
    rows: dict[str, list] = {demo: [] for demo in SUMMARIES}
    for path in sorted(ROOT.glob(pattern)):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["demo"] in SUMMARIES:
            said, host = record["assumptions"], record["host"]
            machine = f"[{host.get('gpu', host['cpu'])}]({path.relative_to(ROOT).as_posix()})"
            target = f"{said['random_weights']}, random weights" if said["random_weights"] else said["target"]
            rows[record["demo"]].append([machine, target, said["dtype"], *SUMMARIES[record["demo"]][1](record)])
    tables = [[["GPU", "target", "dtype", *SUMMARIES[demo][0]], ["---"] * (3 + len(SUMMARIES[demo][0])), *found]
              for demo, found in rows.items() if found]
    return "\n\n".join("\n".join("| " + " | ".join(row) + " |" for row in table) for table in tables)


COSTS = (5, 9, 33)  # tokens sent in one forward


def _of_14(record: dict) -> list[str]:
    plain, = _rows(record, "plain")
    reading, tpot = plain["reading, ms"], plain["TPOT, ms"]
    ratio = {row["tokens"]: f"{row['verify ratio']:.2f}" for row in _rows(record, "forward-times")}
    return [f"{plain['GB read a second']:.1f}", f"{1e3 / reading:.1f}", f"{1e3 / tpot:.1f}", f"{reading / tpot:.0%}",
            *[ratio.get(n, "-") for n in COSTS]]


def _of_15(record: dict) -> list[str]:
    """A speedup of random weights means nothing, and is left out."""
    best = max(_rows(record, "speedups"), key=lambda row: row["measured speedup"])
    return ["-" if record["assumptions"]["random_weights"] else f"{best['method']}: {best['measured speedup']:.2f}",
            ", ".join(f"{row['draft']} {row['measured c']:.2f}" for row in _rows(record, "step-costs"))]


def _of_20(record: dict) -> list[str]:
    """Tokens per second are those on the open question."""
    speed = {row["method"]: f"{row['tokens/s']:.1f}" for row in _rows(record, "why-open")}
    return [speed["our plain"], speed["generate, loaded"]]


# demo: (what its table shows of a record, beside GPU, target and dtype; the function that reads it)
SUMMARIES = {"14": (["GB read a second", "ceiling, tokens/s", "plain decoding, tokens/s", "share of the ceiling",
                 *[f"verify ratio, {n} tokens" for n in COSTS]], _of_14),
             "15": (["best speedup", "c of drafts"], _of_15),
             "20": (["plain decoding, tokens/s", "transformers' `generate`, tokens/s"], _of_20)}


def _table(record: dict, id: str) -> dict:
    """The table of this id."""
    found, = [table for table in record["tables"] if table["id"] == id]
    return found


def _rows(record: dict, id: str) -> list[dict]:
    """The rows of that table, as {column: cell}."""
    found = _table(record, id)
    return [dict(zip(found["columns"], row)) for row in found["rows"]]


def refreshed(text: str) -> str:
    """README text with every generated block made again."""
    text = re.sub(r"<!-- records: (.*?) -->\n.*?<!-- end -->", lambda m: "\n".join(filter(None, [
        f"<!-- records: {m.group(1)} -->", table_of_records(m.group(1)), "<!-- end -->"])), text, flags=re.S)
    return re.sub(r"<!-- demos -->\n.*?<!-- end -->", lambda m: f"<!-- demos -->\n{table_of_demos()}\n<!-- end -->",
                  text, flags=re.S)


def fingerprint(record: dict) -> str:
    """Of the table over batch and context that the picture shows more of, to three digits."""
    tables = [{key: value for key, value in _table(record, "grid").items() if key != "id"}]
    tables = json.loads(json.dumps(tables), parse_float=lambda x: float(f"{float(x):.3g}"))
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()[:16]


def picture_fingerprint() -> str:
    from PIL import Image
    return Image.open(PICTURE).info.get("fingerprint", "")


def main():
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo
    with redirect_stdout(io.StringIO()):
        record = console.run_demo(PICTURE_OF)
    info = PngInfo()
    info.add_text("fingerprint", fingerprint(record))
    PICTURE.parent.mkdir(exist_ok=True)
    with replacing(PICTURE) as temporary:
        Image.open(ROOT / record["figures"][0]["path"]).save(temporary, format="PNG", pnginfo=info)
    console.write_text(README, refreshed(README.read_text(encoding="utf-8")))
    print(f"written: {README.name}, {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
