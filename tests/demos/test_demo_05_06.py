"""Demos 05 and 06, through their records, and what they rest on: ranks predict what a tree accepts."""

import functools
from dataclasses import replace

import numpy as np
import pytest

import console
from console import ROOT, BadInput
from decode_lab import autoregressive_generate, tree_generate
from lab.drafters.best_tree import accept_lengths, best_tree, draft_ranks
from lab.drafters.trees import ConfidentTreeDrafter, TreeDrafter, TreeShape
from hw_specs import H100
from lab.toy.transformer import QCFG, TransformerLM, config_like, init_params, truncate
from llm_math import LLAMA31_8B, LLAMA32_1B, best_round, max_batch, verify_time
from records import claims, figures, observation, table

HARDWARE, TREES = ROOT / "lab" / "05_spec_decode_on_hardware.py", ROOT / "lab" / "06_tree_verification.py"
SMALL_05 = ("--sequences", "4")
SMALL_06 = ("--prompts", "4", "--new-tokens", "16", "--samples", "20")


@functools.cache
def record(path, *flags):
    """The record of a demo; its output is captured by pytest."""
    return console.run_demo(path, flags)


# -- 05 ------------------------------------------------------------------------------------------------------

def test_05_all_observations_hold_and_the_figure_is_there():
    found = record(HARDWARE)
    assert all(claims(found).values()) and len(found["observations"]) >= 8
    (figure,) = figures(found)
    assert (ROOT / figure).name == "05-1.png" and (ROOT / figure).exists()


def test_05_one_chip_one_pair():
    found = record(HARDWARE)
    draft = table(found, "one-step")[1]
    assert draft["c"] == pytest.approx(0.19, abs=0.01)
    sent = {row["tokens"]: row for row in table(found, "verify-ratio")}
    assert list(sent) == [1, 2, 5, 9, 33, 129, 257] and sent[129]["verify ratio"] < 1.01
    assert sent[257]["arithmetic, ms"] > sent[257]["reading, ms"] and sent[257]["verify ratio"] == pytest.approx(1.167, abs=1e-3)
    for row in sent.values():
        assert row["time, ms"] == pytest.approx(max(row["reading, ms"], row["arithmetic, ms"]) + 1.0)
    best = {row["alpha"]: row for row in table(found, "best-gamma")}
    assert list(best) == [0.6, 0.7, 0.8, 0.9] and best[0.8]["gamma"] == 4
    assert best[0.8]["speedup"] == pytest.approx(1.9, abs=0.05)


def test_05_the_grid_is_that_of_llm_math():
    rows = table(record(HARDWARE), "grid")
    places = [(n, b) for n in (512, 2048, 8192, 32768) for b in (1, 4, 16, 64, 128, 256, 512)]
    assert [(r["context"], r["batch"]) for r in rows] == [
        (n, b) for n, b in places if b <= max_batch(LLAMA31_8B, H100, n, draft=LLAMA32_1B)]
    for row in rows:
        context, batch = row["context"], row["batch"]
        gamma, round_ = best_round(LLAMA31_8B, LLAMA32_1B, H100, batch, context, 0.8)
        assert row["gamma"] == gamma and row["speedup"] == pytest.approx(round_.speedup)
        assert row["verify ratio"] == pytest.approx(round_.verify_ratio)
        for near, pays in ((row["pays above"] - 1e-6, False), (row["pays above"] + 1e-6, True)):
            assert (best_round(LLAMA31_8B, LLAMA32_1B, H100, batch, context, near)[0] > 0) == pays


@pytest.mark.parametrize("flags, id, has", [
    (("--batches", "1"), "batch-lowers", False), (("--contexts", "512", "512"), "context-large-batch", False),
    (("--contexts", "512", "2048"), "context-large-batch", True),
    (("--chip", "rtx-4090", "--batch", "8"), "context-large-batch", True)])
def test_05_compares_only_what_can_be_compared(flags, id, has):
    made = record(HARDWARE, *flags, *SMALL_05)
    assert (id in claims(made)) == has
    if has:
        rows = {(row["context"], row["batch"]): row["speedup"] for row in table(made, "grid")}
        large = max(batch for context, batch in rows if context > 512)
        longest = max(context for context, batch in rows if batch == large)
        assert observation(made, id)["value"] == pytest.approx(rows[longest, large] / rows[512, large])


def test_05_each_draft_is_priced_by_its_own_bytes():
    found = record(HARDWARE)
    c = {row["draft"]: row["c"] for row in table(found, "draft-prices")}
    int4 = replace(LLAMA31_8B, bytes_per_weight=0.5625)
    step = verify_time(LLAMA31_8B, H100, 1, 1024, 1)
    assert c["int4 copy"] == pytest.approx(verify_time(int4, H100, 1, 1024, 1) / step) and c["int4 copy"] > 0.35
    assert c["trained layer"] == pytest.approx(0.05) and 0.05 < c["first layer"] < 0.1
    expensive = record(HARDWARE, "--trained-layer", "0.5", *SMALL_05)
    assert {row["draft"]: row["c"] for row in table(expensive, "draft-prices")}["trained layer"] == pytest.approx(0.5)


def test_05_trees_send_their_nodes_and_one_token_more():
    found = record(HARDWARE)
    taus = table(found, "tree-tau")
    assert [(r["tree"], r["nodes"]) for r in taus] == [
        ("1", 1), ("1x1", 2), ("1x1x1x1", 4), ("1x1x1x1x1x1", 6), ("2x2x2", 14), ("3x3x3", 39),
        ("4x2x2x1", 44), ("8x4x2x1", 168), ("4x4x4x4", 340)]
    widths = {"1": [1], "1x1": [1, 1], "2x2x2": [1, 2, 4], "4x2x2x1": [1, 4, 8, 16], "4x4x4x4": [1, 4, 16, 64]}
    for batch in (1, 32):
        step = verify_time(LLAMA31_8B, H100, batch, 1024, 1)
        for row, tau in zip(table(found, f"tree-speedup-{batch}"), taus):
            assert row["tokens sent"] == tau["nodes"] + 1
            ratio = verify_time(LLAMA31_8B, H100, batch, 1024, tau["nodes"] + 1) / step
            assert row["verify ratio"] == pytest.approx(ratio)
            if row["tree"] in widths:
                # A level of w nodes is drafted from one forward of the level above it: its batch counts.
                drafting = sum(0.05 * verify_time(LLAMA31_8B, H100, batch, 1024, n) / step for n in widths[row["tree"]])
                assert row["trained layer"] == pytest.approx(tau["trained layer"] / (drafting + ratio))


def test_05_a_longer_chain_accepts_no_less():
    rows = {row["tree"]: row for row in table(record(HARDWARE), "tree-tau")}
    for draft in ("first layer", "trained layer", "int4 copy"):
        chains = [rows[tree][draft] for tree in ("1", "1x1", "1x1x1x1", "1x1x1x1x1x1")]
        assert chains == sorted(chains) and chains[0] > 1


def test_05_an_edit_changes_the_conclusion():
    found = record(HARDWARE, "--chip", "rtx-4090", "--batch", "64", "--alpha", "0.1", "--alphas", "0.1", *SMALL_05)
    texts = claims(found)
    assert not texts["fits"] and not texts["fast-enough"] and not texts["pays-where-fits"]
    best = {row["alpha"]: row for row in table(found, "best-gamma")}
    assert best[0.1]["gamma"] == 0 and best[0.1]["speedup"] == 1


def test_05_runs_where_nothing_fits_and_with_one_context():
    assert not all(claims(record(HARDWARE, "--chip", "t4", "--contexts", "1024", *SMALL_05)).values())


# -- 06 ------------------------------------------------------------------------------------------------------

@pytest.mark.nightly
def test_06_all_observations_hold():
    found = record(TREES)
    assert all(claims(found).values()) and len(found["observations"]) >= 6
    (figure,) = figures(found)
    assert (ROOT / figure).name == "06-1.png" and (ROOT / figure).exists()


def test_06_trees_that_run_are_those_that_the_ranks_predict():
    found = record(TREES, *SMALL_06)
    assert [row["trees"] for row in table(found, "checks")] == [9, 9, 9]
    assert all(row["texts that differ"] == row["rounds that differ"] == 0 for row in table(found, "checks"))
    assert observation(found, "greedy-text")["value"] == observation(found, "rounds-as-ranks")["value"] == 0
    for row in table(found, "tau"):
        assert row["ratio"] == pytest.approx(row["measured tau"] / row["predicted tau"])
        assert row["measured tau"] == pytest.approx(4 * 16 / row["rounds"])


def test_06_one_tree_has_one_tau():
    found = record(TREES, *SMALL_06)
    by_hand = {row["tree"]: row for row in table(found, "best-trees")}
    for row in table(found, "tau"):
        assert row["predicted tau"] == by_hand[row["tree"]]["tau"]
    chains = [by_hand[tree]["tau"] for tree in ("1", "1x1", "1x1x1x1", "1x1x1x1x1x1")]
    assert chains == sorted(chains) and [row["nodes"] for row in by_hand.values()] == [1, 2, 4, 6, 14, 39, 44, 168, 340]
    assert table(found, "runs")[0]["rounds"] == table(found, "tau")[-1]["rounds"]
    for row in by_hand.values():
        assert sum(map(int, row["best: nodes by level"].split())) == row["nodes"] and 1 <= row["its tau"] <= 7


def test_06_sampling_is_lossless():
    found = record(TREES, *SMALL_06)
    exact = table(found, "one-round")
    assert [row["candidates"] for row in exact] == [1, 2, 3, 4]
    assert all(row["TV"] < 1e-12 for row in exact) and exact[0]["TV, wrong rule"] < 1e-12
    assert all(a["accepted"] <= b["accepted"] + 1e-12 for a, b in zip(exact, exact[1:]))


@pytest.mark.parametrize("flags, broken", [
    (("--depth", "1"), ("best-beats", "best-rounds")), (("--beam", "1"), ("confident-rounds",)),
    (("--draft", "large"), ("average-close", "wrong-shows", "more-accepted", "draft-alone"))])
def test_06_an_edit_changes_the_conclusion(flags, broken):
    found = claims(record(TREES, *SMALL_06, *flags))
    assert not any(found[id] for id in broken)
    assert all(found[id] for id in ("greedy-text", "rounds-as-ranks", "best-text", "exact"))


# -- both ----------------------------------------------------------------------------------------------------

@pytest.mark.nightly
@pytest.mark.parametrize("path, flags", [(HARDWARE, SMALL_05), (TREES, SMALL_06)], ids=["05", "06"])
def test_two_runs_leave_the_same_record(path, flags):
    one, two = record(path, *flags), console.run_demo(path, flags)
    assert one["tables"] == two["tables"] and one["observations"] == two["observations"]
    assert one["tables"] and not any(t["measured"] for t in one["tables"])


@pytest.mark.parametrize("path, flags, words", [
    (HARDWARE, ("--chip", "h1000"), "h100-sxm"), (HARDWARE, ("--batch", "0"), "at least 1"),
    (HARDWARE, ("--alpha", "1.3"), "below 1"), (HARDWARE, ("--sequences", "0"), "from 1"),
    (TREES, ("--draft", "tiny"), "small"), (TREES, ("--new-tokens", "7"), "from 8"),
    (TREES, ("--depth", "9"), "1 to 6")])
def test_bad_flags_are_refused_in_a_sentence(path, flags, words):
    with pytest.raises(BadInput, match=words):
        console.run_demo(path, flags)


# -- what they rest on ---------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def pair():
    """A random-weight target, its first two layers as the draft, a prompt and the greedy text."""
    params = init_params(QCFG, 3)
    target = TransformerLM(params, QCFG, "target")
    draft = TransformerLM(truncate(params, 2), config_like(QCFG, n_layers=2), "draft")
    prompt = [5, 17, 99]
    return target, draft, prompt, autoregressive_generate(target, prompt, 40)[0]


@pytest.mark.parametrize("widths", [(1,), (4,), (1, 1, 1), (2, 2, 2), (4, 2, 1), (3, 1, 2)])
def test_ranks_predict_every_round_of_a_tree(pair, widths):
    target, draft, prompt, text = pair
    ranks = draft_ranks(draft.full_logits(text[None])[0], text)[len(prompt) - 1:]
    tree = TreeShape.branching(widths)
    lengths = accept_lengths(np.append(ranks, [QCFG.vocab_size] * len(widths)), tree)
    at, predicted = 0, []
    while at < len(ranks):
        predicted.append(min(int(lengths[at]), len(ranks) - at - 1))
        at += predicted[-1] + 1
    tokens, run = tree_generate(target, TreeDrafter(draft, tree), prompt, 40)
    assert (tokens == text).all()
    assert [r.accepted for r in run.rounds] == predicted
    assert run.rounds[0].drafted == len(tree) and sum(predicted) + len(predicted) == 40


def test_some_rounds_of_those_accept_something(pair):
    target, draft, prompt, text = pair
    ranks = draft_ranks(draft.full_logits(text[None])[0], text)[len(prompt) - 1:]
    lengths = accept_lengths(ranks, TreeShape.branching((4, 2, 1)))
    assert 0 < lengths.mean() < 3 and len(set(lengths.tolist())) > 2


def test_a_confident_tree_writes_the_same_text(pair):
    target, draft, prompt, text = pair
    tokens, run = tree_generate(target, ConfidentTreeDrafter(draft, 10, 4, 3), prompt, 40)
    assert (tokens == text).all() and max(r.drafted for r in run.rounds) == 10


def test_no_tree_of_equal_size_beats_the_best_one():
    rng = np.random.default_rng(0)
    ranks = rng.choice(6, size=(50, 40), p=[0.5, 0.2, 0.1, 0.05, 0.05, 0.1])
    shares = [(ranks == k).mean() for k in range(5)]
    for widths in ((1, 1, 1), (2, 2), (3, 1), (2, 2, 2)):
        shape = TreeShape.branching(widths)
        best, _ = best_tree(shares, len(shape))
        assert accept_lengths(ranks, best).mean() >= accept_lengths(ranks, shape).mean() - 0.03
