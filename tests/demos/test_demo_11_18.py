"""Demos 11 and 18, through their records, and with the rules broken that their observations are to guard."""

import functools

import pytest

torch = pytest.importorskip("torch")

import console
import decode_lab
from console import ROOT, BadInput
from lab.ngram import disk
from lab import toy
from lab.ngram.table import NgramTable
from records import observation, table
from small import save

TOY, REAL = ROOT / "lab" / "11_ngram_on_ssd.py", ROOT / "lab" / "18_real_ngram.py"
SMALL = ("--prompts", "2", "--new-tokens", "24", "--big-tokens", "60000", "--queries", "200", "--shares", "0.05", "0.2")
QUICK = ("--new-tokens", "12", "--timed-tokens", "8", "--timings", "1", "--context", "16", "--penalised", "8",
         "--gamma", "4", "--max-tokens", "20000")

pytestmark = pytest.mark.usefixtures("one_thread", "read_once")


@functools.cache
def record(path, *flags):
    return console.run_demo(path, flags)


# -- 11 ------------------------------------------------------------------------------------------------------

def test_11_tables_and_coverage():
    made = record(TOY, *SMALL)
    rows = table(made, "growing")
    assert [row["order"] for row in rows] == [2, 3, 4] * 2 and len({row["tokens"] for row in rows}) == 2
    for row in rows:
        for kind in toy.KINDS:
            assert 1 >= row[f"{kind}: known"] >= row[f"{kind}: right"] >= 0
    small, large = rows[:3], rows[3:]
    for a, b in zip(small, large):
        assert a["tokens"] < b["tokens"] and a["code: known"] < b["code: known"] and a["MB"] <= b["MB"]
    assert large[0]["code: known"] > large[1]["code: known"] > large[2]["code: known"]


def test_11_tokens_are_rounds_and_accepted_drafts():
    made = record(TOY, *SMALL)
    assert observation(made, "same-text")["value"] == 0
    rows = {(row["text"], row["tiers"]): row for row in table(made, "drafts")}
    assert len(rows) == 4 * 5 and all(1 <= row["tau"] <= 9 for row in rows.values())
    for text in ("again", "greedy code", *toy.KINDS):
        assert rows[text, "priced"]["drafts a round"] <= rows[text, "to 4"]["drafts a round"]
        assert rows[text, "lookup"]["drafts a round"] <= rows[text, "to 2"]["drafts a round"]


def test_11_text_that_is_fresh_repeats_less_than_what_the_toy_writes():
    rows = {row["text"]: row["repeated"] for row in table(record(TOY, *SMALL), "texts")}
    assert max(rows["code"], rows["prose"]) <= rows["greedy code"] < rows["again"]


def test_11_pages_predicted_are_the_pages_read():
    rows = [row for row in table(record(TOY, *SMALL), "lookups") if row["file"] == "mmap" and row["state"] == "cold"]
    if not rows or rows[0]["pages in memory"] is None:
        pytest.skip("this system does not tell, or keeps files in memory")
    for row in rows:
        assert row["pages in memory"] == pytest.approx(row["pages predicted"], rel=0.1)


@pytest.mark.parametrize("flag", ["--orders", "--shares"])
def test_11_one_table_cannot_be_compared(flag):
    with pytest.raises(BadInput, match=flag):
        console.run_demo(TOY, [flag, "1" if flag == "--shares" else "2"])


@pytest.mark.slow
def test_11_a_system_without_fadvise_says_so(monkeypatch):
    monkeypatch.setattr(disk, "evict", lambda path: False)
    rows = table(console.run_demo(TOY, SMALL), "lookups")
    assert [row["state"] for row in rows] == ["as it was", "warm", "warm"] * 2


def test_11_leaves_nothing_behind():
    record(TOY, *SMALL)
    assert not list(console.OUT.glob("ngram-*"))


@pytest.mark.slow
def test_11_all_but_times_is_the_same_again():
    first, again = record(TOY, *SMALL), console.run_demo(TOY, SMALL)
    for a, b in zip(first["tables"], again["tables"], strict=True):
        free = [i for i, name in enumerate(a["columns"]) if name not in a["measured"]]
        assert [[row[i] for i in free] for row in a["rows"]] == [[row[i] for i in free] for row in b["rows"]], a["id"]


@pytest.mark.slow
def test_11_sees_a_rule_broken(monkeypatch):
    def first_is_right(draft, rows, sampler, history, rng):
        path, token, tested = verify(draft, rows, sampler, history, rng)
        return ([0], token, max(tested, 1)) if draft.tokens and not path else (path, token, tested)
    verify = decode_lab.verify
    monkeypatch.setattr(decode_lab, "verify", first_is_right)
    assert not observation(console.run_demo(TOY, SMALL), "same-text")["holds"]


# -- 18 ------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save(tmp_path_factory.mktemp("models") / "small-llama")


@pytest.mark.slow
def test_18_on_a_small_model(target):
    made = record(REAL, "--target", str(target), *QUICK)
    assert observation(made, "explained")["holds"]
    assert observation(made, "penalty-same-text")["holds"]
    assert {row["table"]: row["tokens"] for row in table(made, "tables")} == {"bigram": 20000, "trigram": 20000}
    tasks, tiers, methods = ("repeat", "edit code", "open"), ("lookup", "+ bigram", "+ trigram"), ("lookup", "warm", "cold")
    counts = table(made, "counts")
    assert [(row["task"], row["tiers"]) for row in counts] == [(t, m) for t in tasks for m in tiers]
    for row in counts:
        assert (row["pages read"] == 0) == (row["tiers"] == "lookup")
        assert row["accepted from tables"] == 0 or row["tiers"] != "lookup"
    for id in ("speedups", "why"):
        assert [(row["task"], row["method"]) for row in table(made, id)] == [(t, m) for t in tasks for m in methods]
    for speed, why in zip(table(made, "speedups"), table(made, "why"), strict=True):
        assert speed["ratio"] == pytest.approx(speed["predicted"] / speed["speedup"])
        assert why["tau"] >= 1 and why["drafting, steps"] > 0 and why["verifying, steps"] > 0
    for _, warm, cold in zip(*[iter(table(made, "why"))] * 3):
        assert warm["tau"] == cold["tau"] and warm["pages read"] == cold["pages read"] > 0
    assert [row["penalty"] for row in table(made, "penalty")] == [1.0, 1.1, 1.3] * 2


def test_18_tables_stay_for_the_chat_and_are_those_of_the_target(target):
    from lab import models
    record(REAL, "--target", str(target), *QUICK)
    decoder = models.load(str(target))
    for order, name in ((2, "bigram"), (3, "trigram")):
        with NgramTable.open(console.OUT / f"18-{name}.ngram", tokenizer=decoder.tokenizer) as found:
            found.verify()
            assert found.order == order


@pytest.mark.nightly
def test_18_reads_its_own_tables_while_another_run_writes_its_own(target, monkeypatch):
    evict, published = disk.evict, [console.OUT / f"18-{name}.ngram" for name in ("bigram", "trigram")]

    def another_run(path):
        for other in published:
            other.write_bytes(b"of another tokenizer")
        return evict(path)

    monkeypatch.setattr(disk, "evict", another_run)
    made = console.run_demo(REAL, ["--target", str(target), *QUICK])
    assert observation(made, "explained")["holds"]
    for path in published:                             # at the end they are this run's
        with NgramTable.open(path) as found:
            found.verify()
    assert not list(console.OUT.glob("ngram-*"))


@pytest.mark.nightly
def test_18_counts_the_files_it_is_given(target, tmp_path):
    (tmp_path / "some.txt").write_text("the cat sat on the mat. " * 40)
    made = console.run_demo(REAL, ["--target", str(target), *QUICK, "--corpus", str(tmp_path)])
    assert 0 < table(made, "tables")[0]["tokens"] < 20000
    with pytest.raises(BadInput, match="nowhere"):
        console.run_demo(REAL, ["--target", str(target), *QUICK, "--corpus", str(tmp_path / "nowhere")])


@pytest.mark.slow
def test_18_sees_a_rule_broken(target, monkeypatch, one_repeat):
    monkeypatch.setattr(decode_lab, "verify", lambda draft, rows, sampler, history, rng: (
        list(range(len(draft.tokens))), int(rows[len(draft.tokens)].argmax()), len(draft.tokens)))
    made = console.run_demo(REAL, ["--target", str(target), *QUICK])
    assert observation(made, "explained")["value"] > 0
    assert observation(made, "penalty-same-text")["value"] > 0
