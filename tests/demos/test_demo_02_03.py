"""Demos 02 and 03: what their records hold, under the defaults and when an assumption is edited."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

import console
from console import BadInput
from decode_lab import overlap
from lab import toy
from lab.models.quant import quantize_params
from lab.toy.transformer import softmax
from llm_math import best_gamma
from records import claims, figures, observation, table

LAB = Path(console.ROOT) / "lab"
CACHE, DRAFTS = LAB / "02_kv_cache.py", LAB / "03_cheap_drafts.py"
SMALL_CACHE = ("--prompt-tokens", 4, "--new-tokens", 40, "--repeats", 1, "--prompts", 8, 40,
               "--answer-tokens", 3)
SMALL_DRAFTS = ("--windows", 2)


@pytest.fixture(scope="module")
def cache():
    return console.run_demo(CACHE, SMALL_CACHE)


@pytest.fixture(scope="module")
def drafts():
    return console.run_demo(DRAFTS, SMALL_DRAFTS)


def unmeasured(record):
    """The record without host, versions, and readings of the machine."""
    tables = []
    for t in record["tables"]:
        keep = [i for i, name in enumerate(t["columns"]) if name not in t["measured"]]
        tables.append([t["id"], [[row[i] for i in keep] for row in t["rows"]]])
    return json.dumps([record["demo"], record["assumptions"], tables, claims(record, measured=False), figures(record)])


# -- 02 ----------------------------------------------------------------------------------------------------


def test_both_versions_agree_and_every_claim_holds(cache):
    assert all(claims(cache, measured=False).values()) and len(claims(cache, measured=False)) >= 6
    logits, = table(cache, "logits")
    assert logits["forwards"] == 40 and logits["different tokens"] == 0
    assert 0 < logits["largest difference"] < 1e-3 < logits["largest logit"]


def test_counts_meet_the_formulas(cache):
    with_cache, without = table(cache, "whole-text")
    for row in (with_cache, without):
        assert row["GFLOP / predicted"] == pytest.approx(1, abs=1e-9)
        assert row["GB / predicted"] == pytest.approx(1, abs=0.005)     # the norms, which the formula leaves out
    # By hand, for the toy of 6 layers: two per weight and token, and 4 x heads x head_dim per layer and position.
    c = toy.load("large").config
    weights, each = c.n_params() - (2 * c.n_layers + 1) * c.hidden, c.n_layers * 4 * c.n_heads * c.head_dim
    lengths = range(4, 44)
    assert with_cache["GFLOP"] * 1e9 == pytest.approx(sum(2 * weights + each * n for n in lengths))
    assert without["GFLOP"] * 1e9 == pytest.approx(sum(n * (2 * weights + each * n) for n in lengths))


def test_linear_and_quadratic(cache):
    with_cache, without = table(cache, "whole-text")
    assert 1 < with_cache["FLOP, 2nd half / 1st"] < 1.2
    # (4 + i) summed over i: the second 20 tokens against the first, by hand, and attention on top.
    by_hand = sum(range(24, 44)) / sum(range(4, 24))
    assert by_hand < without["FLOP, 2nd half / 1st"] < by_hand * 1.1


def test_cache_bytes(cache):
    each = 6 * 2 * 2 * 32 * 4 / 1e3
    for row in table(cache, "cache-bytes"):
        assert row["needed, KB"] == pytest.approx(row["tokens"] * each)
        assert row["allocated, KB"] == pytest.approx(row["slots"] * each)
        assert row["tokens"] <= row["slots"] <= max(64, 2 * row["tokens"])


def test_intensity(cache):
    c = toy.load("large").config
    for row in table(cache, "intensity"):
        n, shape = row["prompt"], c.shape()
        assert row["decode FLOP/B"] == pytest.approx(
            shape.flops(1, n - 1) / (shape.streamed_bytes() + shape.kv_bytes(n, "fp32")), rel=0.01)
        assert row["prefill FLOP/B"] > row["decode FLOP/B"] and 0.4 < row["decode FLOP/B"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("flags, broken", [
    (("--rounding-steps", 1, "--prompts", 2), ["rounding", "prefill-denser"]),
    (("--prompt-tokens", 400), ["growth-without"]), (("--new-tokens", 300), ["growth-with"]),
    (("--chip", "m3-ultra"), ["below-ridge"]), (("--model", "small"), ["less-than-weights"])])
def test_an_edited_assumption_changes_the_conclusion(cache, flags, broken):
    record = console.run_demo(CACHE, [*SMALL_CACHE, *flags])
    assert all(observation(cache, id)["holds"] and not observation(record, id)["holds"] for id in broken)


@pytest.mark.parametrize("flags", [("--new-tokens", 8), ("--prompt-tokens", 1), ("--new-tokens", 500),
                                   ("--answer-tokens", 1),
                                   ("--prompts", 511), ("--model", "huge"), ("--repeats", 0),
                                   ("--chip", "h1000")])
def test_02_refuses(flags):
    with pytest.raises(BadInput, match=str(flags[1])):
        console.run_demo(CACHE, flags)


# -- 03 ----------------------------------------------------------------------------------------------------


def test_every_draft_is_there_for_its_own_target(drafts):
    costs = table(drafts, "step-costs")
    assert [(row["draft"], row["for target"]) for row in costs] == [
        ("int8", "large"), ("int4-g32", "large"), ("int4-g128", "large"),
        *((f"first {n}", target) for target in ("large", "large-exit") for n in (1, 2, 3)),
        ("medium", "large"), ("small", "large")]
    pairs = [(row["draft"], row["for target"]) for row in costs]
    assert [(row["draft"], row["for target"]) for row in table(drafts, "best-chains")] == pairs
    assert [(row["model"], row["for target"]) for row in table(drafts, "agreement")] == [
        ("large", "itself"), ("large-exit", "itself"), *pairs]


def test_predicted_c_by_hand(drafts):
    c = {(row["draft"], row["for target"]): row["predicted c"] for row in table(drafts, "step-costs")}
    params, config = toy.load_params("large")
    kv = 128 * 2 * config.n_kv_heads * config.head_dim * 2            # per layer, context 128, 2 bytes
    full = 2 * config.n_params() + 6 * kv
    _, report = quantize_params(params, "int4-g32", float_bytes=2)
    assert c["int4-g32", "large"] == pytest.approx((report.bytes + 6 * kv) / full)
    layer = sum(w.size for w in params["layers"][0].values())
    cut = config.n_params() - 5 * layer
    for target in ("large", "large-exit"):
        assert c["first 1", target] == pytest.approx((2 * cut + kv) / full)
    assert c["small", "large"] < c["medium", "large"] < c["int8", "large"] < 1


def test_alpha_and_equal_choices(drafts):
    rows = {(row["model"], row["for target"]): row for row in table(drafts, "agreement")}
    for kind in ("code", "prose"):
        alpha = {key: row[f"{kind}: alpha"] for key, row in rows.items()}
        assert alpha["large", "itself"] == rows["large", "itself"][f"{kind}: same choice"] == pytest.approx(1)
        assert all(0 < a <= 1 for a in alpha.values())
        assert alpha["int8", "large"] > alpha["int4-g32", "large"] > alpha["first 1", "large"]
        assert rows["large", "itself"][f"{kind}: loss"] < rows["small", "large"][f"{kind}: loss"] < 4


def test_alpha_is_decode_lab_overlap_averaged(drafts):
    """The passages recomputed row by row, with the rule's own function."""
    row = next(row for row in table(drafts, "agreement") if row["model"] == "small")
    rows = toy.passages("code", 2, 257)[:, :-1]
    p, q = (softmax(toy.load(name).full_logits(rows).astype(float)).reshape(-1, 1024) for name in ("large", "small"))
    assert row["code: alpha"] == pytest.approx(np.mean([overlap(a, b) for a, b in zip(p, q)]), abs=1e-5)
    assert row["code: same choice"] == pytest.approx(np.mean(p.argmax(-1) == q.argmax(-1)))


def test_best_chain_is_llm_maths(drafts):
    costs = {(r["draft"], r["for target"]): r["predicted c"] for r in table(drafts, "step-costs")}
    alphas = {(r["model"], r["for target"]): r["code: alpha"] for r in table(drafts, "agreement")}
    for row in table(drafts, "best-chains"):
        pair = row["draft"], row["for target"]
        assert (row["best gamma"], row["speedup"]) == pytest.approx(best_gamma(alphas[pair], costs[pair], 16))


def test_untrained_models_mislead(drafts):
    trained, random = table(drafts, "untrained")
    first = next(r for r in table(drafts, "agreement") if (r["model"], r["for target"]) == ("first 1", "large"))
    assert trained["alpha"] == first["code: alpha"] and trained["loss"] == first["code: loss"]
    assert random["alpha"] > 0.8 and random["predicted speedup"] > 1.5 and trained["predicted speedup"] == 1
    assert random["loss"] == pytest.approx(math.log(1024), abs=0.1) and random["same choice"] < 0.05


def test_edited_drafts(drafts):
    flags = ["--windows", 1, "--quantized", "int4", "--layers", 6, "--max-gamma", 1]
    record = console.run_demo(DRAFTS, flags)
    alpha = {(r["model"], r["for target"]): r["code: alpha"] for r in table(record, "agreement")}
    assert alpha["first 6", "large"] == pytest.approx(1) and ("int8", "large") not in alpha
    # All six layers are the target, and training cannot make them agree more than fully.
    assert not observation(record, "trained-exit-agrees")["holds"] and not observation(record, "untrained-alpha")["holds"]


@pytest.mark.slow
@pytest.mark.parametrize("flags, broken", [
    (("--max-gamma", 1), ["best-pays"]), (("--temperature", 0.01), ["untrained-alpha"]),
    (("--layers", 5), ["untrained-choice"]), (("--temperature", 100), ["alpha-by-text"])])
def test_03_an_edited_assumption_changes_the_conclusion(drafts, flags, broken):
    record = console.run_demo(DRAFTS, [*SMALL_DRAFTS, *flags])
    assert all(observation(drafts, id)["holds"] and not observation(record, id)["holds"] for id in broken)


@pytest.mark.parametrize("flags", [("--quantized", "int3"), ("--layers", 7), ("--layers", 0),
                                   ("--windows", 0),
                                   ("--temperature", 0), ("--kind", "poetry")])
def test_03_refuses(flags):
    with pytest.raises(BadInput, match=str(flags[1])):
        console.run_demo(DRAFTS, flags)


# -- both --------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_two_runs_give_the_same_record(cache, drafts):
    assert unmeasured(console.run_demo(CACHE, SMALL_CACHE)) == unmeasured(cache)
    assert unmeasured(console.run_demo(DRAFTS, SMALL_DRAFTS)) == unmeasured(drafts)


@pytest.mark.slow
@pytest.mark.parametrize("demo", [CACHE, DRAFTS])
def test_all_claims_hold_under_the_defaults(demo):
    record = console.run_demo(demo)
    assert all(claims(record, measured=False).values()), claims(record)
    for path in figures(record):
        assert (Path(console.ROOT) / path).stat().st_size > 10_000


@pytest.mark.nightly
@pytest.mark.parametrize("demo, flags", [(CACHE, SMALL_CACHE), (DRAFTS, ("--windows", 1))])
def test_readable_in_80_ascii_columns(script, demo, flags):
    done = script(demo, *flags, encoding="ascii")
    assert done.returncode == 0, done.stderr.decode()
    text = done.stdout.decode("ascii")
    assert max(map(len, text.splitlines())) <= 80 and "Traceback" not in text


def test_a_bad_flag_is_one_sentence(script):
    done = script(DRAFTS, "--quantized", "int5")
    assert done.returncode == 2 and done.stderr.decode().startswith('error: unknown quantization "int5"')
    assert done.stderr.decode().count("\n") == 1
