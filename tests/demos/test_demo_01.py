"""The record of demo 01: published ceilings, observations that assumptions can break, and reproducibility."""

import copy
from pathlib import Path

import pytest

import console
from records import claims, figures, observation, table, whole_table

DEMO = Path(__file__).resolve().parents[2] / "lab" / "01_memory_ceiling.py"


def run(*flags):
    return console.run_demo(DEMO, ["--measure-s", "0.05", *flags])


@pytest.fixture(scope="module")
def record():
    return run()


def test_all_observations_hold(record):
    assert record["demo"] == "01" and len(record["observations"]) >= 9
    # Those that rest on a reading are the machine's business.
    assert all(claims(record, measured=False).values()), claims(record)


def test_the_27b_on_the_4090(record):
    empty, small, large = table(record, "bytes")
    assert [round(row["passes/s"]) for row in (empty, small, large)] == [59, 47, 29]
    assert 0.01 < empty["arithmetic"] < 0.05
    assert [row["fits 24 GB"] for row in (empty, small, large)] == [True, True, False]


def test_the_chip_table_is_bandwidth_over_bytes(record):
    rows = {row["chip"]: row for row in table(record, "chips")}
    assert len(rows) >= 18 and rows["H100 SXM"]["Llama-3.1-70B"] is None
    assert rows["H100 SXM"]["Llama-3.1-8B"] == pytest.approx(3.352e12 / 15.0093e9, rel=1e-4)
    assert rows["H200"]["27B 4-bit"] / rows["A100 80GB"]["27B 4-bit"] == pytest.approx(4.8 / 2.039)


def test_the_chips_are_compared_by_a_model_that_fits_both(record):
    rows = {row["chip"]: row for row in table(record, "chips")}
    l4, ultra = (f"{rows[name]['27B 4-bit']:.0f}" for name in ("L4", "M3 Ultra"))
    text = observation(record, "bandwidth-decides")["text"]
    assert f"27B 4-bit, which fits both, it makes at most {l4} " in text and f"than the {ultra} of" in text


def test_cache_dtype_and_context(record):
    rows = {row["context"]: row for row in table(record, "cache-dtypes")}
    state = 2 * rows[131072]["fp16 cache"] - rows[262144]["fp16 cache"]
    assert rows[262144]["fp16 cache"] - state == 262144 * 65536
    assert rows[262144]["int4 passes/s"] == rows[262144]["int8 passes/s"] * \
        (17e9 + rows[262144]["int8 cache"]) / (17e9 + rows[262144]["int4 cache"])


def test_batches_level_off_at_the_critical_batch(record):
    rows = {row["batch"]: row for row in table(record, "batches")}
    assert "critical batch is 221" in observation(record, "critical-batch")["text"]
    assert rows[128]["step, no cache"] == pytest.approx(rows[1]["step, no cache"], rel=1e-3)
    assert rows[512]["tokens/s, no cache"] == pytest.approx(rows[256]["tokens/s, no cache"])
    assert rows[512]["fits"] is False and rows[256]["fits"] is True


def test_the_roofline(record):
    rows = {row["forward"]: row for row in table(record, "roofline")}
    assert rows["decode, batch 1"]["FLOP/byte"] == pytest.approx(1, abs=0.1)
    assert rows["prefill, 1024 tokens"]["of peak"] == pytest.approx(1)
    figure, = figures(record)
    assert (DEMO.parent.parent / figure).stat().st_size > 10_000


def test_this_machine_is_marked_as_measured(record):
    machine = whole_table(record, "this-machine")
    assert machine["measured"] == ["median", "quartiles"]
    here = table(record, "ceilings-here")
    assert here[0]["model"] == "toy" and 0.9e6 < here[0]["parameters"] < 1.2e6
    bandwidth = machine["rows"][0][1] * 1e9
    assert here[1]["passes/s at most"] == pytest.approx(bandwidth / here[1]["bytes per forward"])


@pytest.mark.parametrize("flags, broken", [
    (["--contexts", "4096"], "long-cache-slows"),
    (["--chip", "h200"], "long-cache-fits-small"),
    (["--models", "llama-3.1-70b"], "bandwidth-decides"),
    (["--strong", "m3-ultra", "--wide", "l4"], "bandwidth-decides"),
    (["--contexts", "1024", "2048"], "cache-outgrows-weights"),
    (["--batches", "512", "1024"], "critical-batch"),
    (["--serving-context", "16"], "cache-bound"),
    (["--serving-context", "64"], "two-sides"),
])
def test_an_edit_changes_the_conclusion(record, flags, broken):
    assert observation(record, broken)["holds"]
    assert not observation(run(*flags), broken)["holds"]


def readings_aside(record):
    for t in record["tables"]:
        kept = [i for i, name in enumerate(t["columns"]) if name not in t["measured"]]
        t["rows"] = [[row[i] for i in kept] for row in t["rows"]]
    record["observations"] = [o for o in record["observations"] if not o["measured"]]
    return {key: record[key] for key in ("demo", "assumptions", "tables", "observations", "figures")}


def test_the_same_assumptions_give_the_same_record(record):
    assert readings_aside(run()) == readings_aside(copy.deepcopy(record))


@pytest.mark.parametrize("flags, message", [
    (["--chip", "h100-sxn"], "h100-sxm"), (["--batches", "0"], "at least 1"),
    (["--flop-efficiency", "0"], "above 0"),
    (["--contexts", "many"], "whole number"), (["--bach", "1"], "unknown flag")])
def test_bad_flags_get_one_sentence(flags, message):
    with pytest.raises(console.BadInput, match=message):
        run(*flags)
