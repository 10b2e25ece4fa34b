"""The record of demo 15: on small random models in folders, and with its losslessness broken."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import console
import decode_lab
from records import observation, table

DEMO = Path(__file__).resolve().parents[2] / "lab" / "15_real_speculation.py"
QUICK = ["--prompts", "2", "--samples", "20", "--texts", "2", "--new-tokens", "8", "--timings", "2", "--context", "16",
         "--nodes", "4"]
SMALL = [*QUICK, "--first", "2", "--kept", "3"]                 # of models of four layers
LLAMA, LFM2 = "small-llama", "small-lfm2"


pytestmark = pytest.mark.usefixtures("one_thread", "read_once")


def run(target, *flags):
    return console.run_demo(DEMO, [*SMALL, "--target", str(target), *map(str, flags)])


@pytest.fixture(scope="module")
def record(folders):
    return run(folders / LLAMA)


TABLES = ["step-costs", "alpha", "why", "speedups", "divergences", "first-token"]


def check(record, drafts, kept):
    """What holds of every record. drafts: those of section 1; kept: those of section 2 on."""
    assert [t["id"] for t in record["tables"]] == TABLES
    kinds, lookups = ("code", "prose"), ("lookup", "suffixes")
    steps = table(record, "step-costs")
    assert [row["draft"] for row in steps] == drafts
    for row in steps:
        assert row["ratio"] == pytest.approx(row["measured c"] / row["predicted c"]) and row["measured c"] > 0
    agreed = table(record, "alpha")
    assert [(row["draft"], row["text"]) for row in agreed] == [(d, k) for d in drafts for k in kinds]
    for row in agreed:
        assert 0 <= row["alpha"] <= 1
        assert 0 <= row["in first 1"] <= row["in first 2"] <= row["in first 4"] <= row["in first 8"] <= 1

    methods = [*lookups, *(f"{name}, {kind}" for name in kept for kind in ("chain", "tree"))]
    speeds, whys = table(record, "speedups"), table(record, "why")
    assert [row["method"] for row in speeds] == [row["method"] for row in whys] == methods
    for speed, why in zip(speeds, whys):
        assert 1 <= why["predicted tau"] <= 17 and 1 <= why["measured tau"] <= why["drafted"] + 1
        assert (why["c"] is None) == (why["nodes by level"] is None) == (speed["method"] in lookups)
        readings = record["samples"][f"seconds per token, code, {speed['method']}"]
        plain = (np.array(readings["before"]) + readings["after"]) / 2
        ratios = plain / readings["method"]
        assert len(ratios) == 5 and speed["measured speedup"] == pytest.approx(np.median(ratios))
        low, high = map(float, speed["quartiles"].split("-"))
        assert low - 0.006 <= speed["measured speedup"] <= high + 0.006
        assert speed["predicted verify ratio"] > 0 and speed["predicted speedup"] > 0
    for what in ("seconds of sending n tokens", "seconds of a step"):           # read before the runs and after them
        assert {len(each) for each in record["samples"][what].values()} == {4}

    texts = table(record, "divergences")
    assert [row["method"] for row in texts] == methods
    for row in texts:
        assert row["texts"] == 7                                                # two prompts, and five timed runs
        assert row["tokens"] == 8 and 0 <= row["from drafts"] < 8               # four after each of two prompts
        assert (row["at"] is None) == (row["differ"] == 0) and row["bugs"] <= row["differ"]
    same = observation(record, "explained")
    assert same["holds"] and same["value"] == 0
    assert same["text"].startswith(f"Of {7 * len(methods)} texts {sum(row['differ'] for row in texts)} differ")
    *tokens, chance = table(record, "first-token")
    assert [row["method"] for row in tokens] == ["plain", *methods] and {row["impossible"] for row in tokens} == {0}
    assert all(0 <= row["TV"] <= 1 and (row["accepted"] is None or 0 <= row["accepted"] <= 1) for row in tokens)
    assert chance["method"] == "chance alone" and observation(record, "as-target")["holds"]
    return speeds, whys, texts


@pytest.mark.slow
def test_a_small_llama(record):
    speeds, whys, texts = check(record, ["first 2", "3 kept", "int8", "int4-g32"], ["first 2", "3 kept", "int4-g32"])
    assert [row["kernels"] for row in table(record, "step-costs")] == ["the target's"] * 2 + ["integer"] * 2
    assert [row["differ"] for row in texts] == [0] * 8          # in float32 nothing is within rounding of another
    # Here drafts are right often enough that the tables say something.
    assert sum(row["from drafts"] for row in texts) > 4      # of fixed shapes; those of the tables hang on the times read
    shapes = {row["method"]: row["nodes by level"] for row in whys if row["nodes by level"] not in (None, "none")}
    assert all(sum(map(int, shape.split())) <= 4 for shape in shapes.values())
    assert all(set(shape.split()) == {"1"} for name, shape in shapes.items() if name.endswith("chain"))


@pytest.mark.slow
def test_a_reading_that_is_not_good_enough_is_neither_ok_nor_broken(record):
    """Whatever the machine did meanwhile: a claim about it is judged, or says why not."""
    for each in record["observations"]:
        assert (each["holds"] is None) == ("not_judged" in each) and (each["measured"] or each["holds"])


def readings_aside(record):
    kept = []
    for t in record["tables"]:
        # A lookup drafts as many tokens as pay by the times just read.
        if t["id"] in ("alpha", "divergences", "first-token"):
            kept.append([row for row in t["rows"] if row[0] not in ("lookup", "suffixes")])
    return kept


@pytest.mark.nightly
def test_the_same_assumptions_give_the_same_drafts_and_samples(record, folders):
    assert readings_aside(run(folders / LLAMA)) == readings_aside(record)


@pytest.mark.slow
def test_a_hybrid_whose_trees_go_as_paths(folders):
    record = run(folders / LFM2)
    _, whys, _ = check(record, ["first 2", "3 kept", "int8", "int4-g32"], ["first 2", "3 kept", "int4-g32"])
    assert max(row["measured tau"] for row in whys if "int4" in row["method"]) > 1


@pytest.mark.nightly
def test_bfloat16_and_a_draft_of_its_own(folders):
    """One that shares the tokenizer and has more output rows."""
    path = str(folders / "padded")
    record = run(folders / LLAMA, "--dtype", "bfloat16", "--draft", path, "--schemes", "int8-g32")
    names = ["first 2", "3 kept", "int8-g32", path]
    check(record, names, names)
    assert [row["kernels"] for row in table(record, "step-costs")] == ["the target's"] * 2 + ["dequantized", "its own"]


@pytest.mark.nightly
def test_a_draft_that_is_always_right_and_texts_shorter_than_drafts(folders):
    path = str(folders / LLAMA)
    record = run(folders / LLAMA, "--draft", path, "--schemes", "int8", "int8", "--nodes", "12")
    whys = {row["method"]: row for row in table(record, "why")}
    assert [name for name in whys if "int8" in name] == ["int8, chain", "int8, tree"]
    chain = whys[f"{path}, chain"]
    assert chain["alpha"] == 1 and chain["measured tau"] == pytest.approx(chain["drafted"] + 1)
    assert all(row["predicted speedup"] > 0 for row in table(record, "speedups"))


@pytest.mark.nightly
def test_layers_that_cannot_draft_are_left_out_with_the_reason(folders, monkeypatch, capsys):
    from lab.models import drafts, layers
    for module in (drafts, layers):
        monkeypatch.setattr(module, "why_no_layers", lambda target: "some of its layers read the keys of others")
    record = run(folders / LLAMA)
    check(record, ["int8", "int4-g32"], ["int4-g32"])
    said = " ".join(capsys.readouterr().out.split())
    assert "Drafts by some of its layers are left out: some of its layers read the keys of others." in said


@pytest.mark.nightly
def test_random_weights_mean_nothing(monkeypatch, capsys):
    import llm_math
    monkeypatch.setattr(llm_math, "MODELS", {"tiny": llm_math.replace(
        llm_math.PYTHIA_70M, n_layers=4, hidden=64, n_heads=4, n_kv_heads=4, head_dim=16, ffn=128, vocab_size=320)})
    record = console.run_demo(DEMO, [*SMALL, "--random-weights", "tiny"])
    check(record, ["first 2", "3 kept", "int8", "int4-g32"], ["first 2", "3 kept", "int4-g32"])
    assert "tau and acceptance mean nothing" in " ".join(capsys.readouterr().out.split())


# -- losslessness, broken ------------------------------------------------------------------------------------

@pytest.mark.slow
def test_a_wrong_token_accepted_is_seen_in_the_texts(folders, monkeypatch, one_repeat):
    right = decode_lab.verify

    def verify(draft, rows, sampler, history, rng):
        """Greedy, the first draft token is kept whatever the target says."""
        path, token, tested = right(draft, rows, sampler, history, rng)
        if sampler.greedy and draft.tokens and not path:
            return [0], int(rows[1].argmax()), 1
        return path, token, tested

    monkeypatch.setattr(decode_lab, "verify", verify)
    record = run(folders / LLAMA)
    assert sum(row["bugs"] for row in table(record, "divergences")) > 8
    assert not observation(record, "explained")["holds"]
    assert observation(record, "as-target")["holds"]


@pytest.mark.slow
def test_a_draft_token_accepted_untested_is_seen_in_the_samples(folders, monkeypatch, one_repeat):
    right = decode_lab.accept
    monkeypatch.setattr(decode_lab, "accept", lambda p, tokens, q, rng: (0, tokens[0]) if tokens else right(
        p, tokens, q, rng))
    record = run(folders / LLAMA)
    assert observation(record, "explained")["holds"]
    assert not observation(record, "as-target")["holds"]
    assert max(row["impossible"] for row in table(record, "first-token")[:-1]) > 0


@pytest.mark.nightly
def test_no_residual_after_a_refusal_is_seen_in_the_samples(folders, monkeypatch):
    """Every token is possible, but those that the draft holds likely come too often."""
    monkeypatch.setattr(decode_lab, "residual", lambda p, x, q=None: np.array(p))
    record = run(folders / LLAMA, "--samples", "400", "--top-k", "2", "--temperature", "3")
    *rows, _ = table(record, "first-token")
    assert {row["impossible"] for row in rows} == {0} and rows[0]["TV"] < 0.1
    assert not observation(record, "as-target")["holds"]


# -- bad input -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("flags, message", [
    (["--schemes", "int3"], "--schemes must be a rounding such as int8 or int4-g32, not int3"),
    (["--kept", "5"], "5 layers of small-llama cannot be kept: 1 to 4 would be right"),
    (["--first", "0"], "--first must be a whole number of at least 1"),
    (["--first", "5"], r"layers \[0, 1, 2, 3, 4\] cannot be kept of small-llama: .* at most 3 would be right"),
    (["--random-weights", "pythia-70m"], "takes the place of a target and has no family: leave out --target"),
    (["--context", "1000"], "1000 tokens are more than the 512"), (["--draft", "nothing"], 'there is no model "nothing"'),
    (["--texts", "1"], "--texts must be a whole number from 2"), (["--text", "verse"], 'no choice "verse"'),
    (["--repeats", "4"], "--repeats must be a whole number from 5"), (["--target", "toy"], "must be a real model")])
def test_bad_flags_get_one_sentence(folders, flags, message):
    with pytest.raises(console.BadInput, match=message) as error:
        run(folders / LLAMA, *flags)
    assert "\n" not in str(error.value)


def test_random_weights_have_no_family():
    with pytest.raises(console.BadInput, match="--random-weights pythia-70m takes the place of a target"):
        console.run_demo(DEMO, [*SMALL, "--random-weights", "pythia-70m", "--draft", "small"])
    with pytest.raises(console.BadInput, match='unknown model "pythia-71m"'):
        console.run_demo(DEMO, [*SMALL, "--random-weights", "pythia-71m"])


def test_a_draft_with_another_tokenizer_is_refused_before_it_reads(folders, capsys):
    with pytest.raises(console.BadInput, match="stranger and small-llama have different tokenizers") as error:
        run(folders / LLAMA, "--draft", folders / "stranger")
    assert "a draft must share the target's" in str(error.value) and "One step" not in capsys.readouterr().out


def test_a_hybrid_cannot_be_cut_to_its_convolutions(folders):
    with pytest.raises(console.BadInput, match=r"layers \[0\] of small-lfm2 are convolutions"):
        run(folders / LFM2, "--first", "1")
