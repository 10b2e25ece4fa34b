"""README.md shows what the commands print now, and its links lead somewhere."""

import json
import re

import pytest

import console
from lab.commands import readme


def test_the_table_of_demos_is_what_they_say_now():
    text = readme.README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120 and "<!-- demos -->" in text
    assert readme.refreshed(text) == text, "README.md is stale: make readme"


@pytest.mark.nightly
def test_the_picture_was_drawn_from_the_values_of_the_demo():
    assert readme.picture_fingerprint() == readme.fingerprint(console.run_demo(readme.PICTURE_OF))


def test_every_link_and_every_make_target_exists():
    text = readme.README.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (readme.ROOT / link).exists(), link
    makefile = (readme.ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make (lab|real|test|setup|notebooks|readme|gpu)\b", text):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_a_changed_table_is_noticed():
    text = readme.README.read_text(encoding="utf-8")
    changed = text.replace("about 3 s", "about 4 s", 1)
    assert changed != text and readme.refreshed(changed) == text


def test_a_record_makes_a_row_and_none_makes_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    text = "before\n<!-- records: results/*.json -->\nold\n<!-- end -->\nafter\n"
    assert readme.refreshed(text) == "before\n<!-- records: results/*.json -->\n<!-- end -->\nafter\n"
    (tmp_path / "results").mkdir()
    said = {"target": "smollm2-135m", "random_weights": "pythia-2.8b", "dtype": "bfloat16"}
    plain = {"id": "plain", "columns": ["GB read a second", "reading, ms", "TPOT, ms"], "rows": [[4400.0, 1.25, 16.0]]}
    record = {"demo": "14", "assumptions": said, "host": {"cpu": "a CPU", "gpu": "NVIDIA H200"},
              "tables": [plain,
                         {"id": "forward-times", "columns": ["tokens", "measured, ms", "verify ratio"],
                          "rows": [[1, 0.1, 1.0], [5, 0.1, 1.016], [9, 0.1, 1.5]]}]}
    (tmp_path / "results" / "b.json").write_text(json.dumps(record))
    record |= {"assumptions": {**said, "random_weights": "", "dtype": "float32"}, "host": {"cpu": "a CPU"}}
    (tmp_path / "results" / "a.json").write_text(json.dumps(record))
    (tmp_path / "results" / "c.json").write_text(json.dumps({"demo": "1"}))
    shown = readme.refreshed(text)
    lines = shown.splitlines()
    assert lines[0] == "before" and lines[-1] == "after" and len(lines) == 8
    assert lines[4] == ("| [a CPU](results/a.json) | smollm2-135m | float32 | 4400.0 | 800.0 | 62.5 | 8% "
                        "| 1.02 | 1.50 | - |")
    assert lines[5].startswith("| [NVIDIA H200](results/b.json) | pythia-2.8b, random weights | bfloat16 | 4400.0 |")
    assert readme.refreshed(shown) == shown


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread", "read_once")
def test_records_of_demos_15_and_20_make_rows(monkeypatch, tmp_path, one_repeat):
    pytest.importorskip("torch")
    import llm_math
    import test_demo_15
    import test_demo_20
    from small import save
    shape = llm_math.replace(llm_math.PYTHIA_70M, n_layers=4, hidden=64, n_heads=4, n_kv_heads=4, head_dim=16, ffn=128,
                             vocab_size=320)
    monkeypatch.setattr(llm_math, "MODELS", {"tiny": shape})
    small = str(save(tmp_path / "small"))
    records = {name: console.run_demo(demo.DEMO, [*demo.SMALL, *flags]) for name, demo, flags in (
        ("a", test_demo_15, ["--target", small]),
        ("b", test_demo_15, ["--random-weights", "tiny", "--dtype", "bfloat16"]),
        ("c", test_demo_20, ["--target", small]))}
    (tmp_path / "results").mkdir()
    for name, record in records.items():
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps(record))
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    of_15, of_20 = [[[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines()]
                    for part in readme.table_of_records("results/*.json").split("\n\n")]
    (head, rule, *rows), lookup = of_15, test_demo_15.table
    assert head[3:] == ["best speedup", "c of drafts"]
    assert set(rule) == {"---"} and [len(row) for row in (head, rule, *rows)] == [5] * 4
    cpu = records["a"]["host"]["cpu"]
    for name, row in zip("ab", rows):
        assert row[0] == f"[{cpu}](results/{name}.json)"
        assert row[4] == ", ".join(f"{draft} {r['measured c']:.2f}" for draft, r in zip(
            ("first 2", "3 kept", "int8", "int4-g32"), lookup(records[name], "step-costs"), strict=True))
    assert rows[0][1:3] == [small, "float32"]
    assert rows[1][1:4] == ["tiny, random weights", "bfloat16", "-"]
    speedups = {r["method"]: r["measured speedup"] for r in lookup(records["a"], "speedups")}
    method, said = rows[0][3].rsplit(": ", 1)
    assert speedups[method] == max(speedups.values()) and said == f"{speedups[method]:.2f}"
    spoken = {r["method"]: f"{r['tokens/s']:.1f}" for r in lookup(records["c"], "why-open")}
    assert of_20[0][3:] == ["plain decoding, tokens/s", "transformers' `generate`, tokens/s"]
    assert of_20[2][3:] == [spoken["our plain"], spoken["generate, loaded"]]


def test_records_of_both_demos_make_two_tables(monkeypatch, tmp_path):
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr(readme, "SUMMARIES", {"14": (["x"], lambda record: ["1"]), "15": (["y"], lambda record: ["2"])})
    for name in ("14", "15"):
        (tmp_path / f"{name}.json").write_text(json.dumps({
            "demo": name, "host": {"cpu": "a CPU"},
            "assumptions": {"target": "t", "random_weights": "", "dtype": "d"}}))
    one, two = readme.table_of_records("*.json").split("\n\n")
    assert one.splitlines() == ["| GPU | target | dtype | x |", "| --- | --- | --- | --- |",
                                "| [a CPU](14.json) | t | d | 1 |"]
    assert two.splitlines()[2] == "| [a CPU](15.json) | t | d | 2 |"
    assert readme.table_of_records("none/*.json") == ""


def test_the_readings_are_those_that_demo_14_shows():
    source = (console.ROOT / "lab" / "14_real_ceiling.py").read_text(encoding="utf-8")
    for words in ('"GB read a second"', '"reading, ms"', '"TPOT, ms"', 'print_table("plain"', '"verify ratio"',
                  '["tokens", ', 'print_table("forward-times"'):
        assert words in source, words
