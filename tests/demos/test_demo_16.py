"""Demo 16 through its record: on small random models in folders, and with its losslessness broken."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import console
import decode_lab
import lab.measure.compare
import lab.measure.spread
import lab.measure.timing
from console import ROOT, BadInput
from decode_lab import speculative_generate
from lab.drafters.draft_length import AIMD, CostAware
from lab.drafters.lookup import SuffixLookup
from lab.drafters.model import ConfidentDrafter, ModelDrafter
from lab import models
from lab.measure.prompts import PROMPTS
from lab.models.rounded import integer_kernels
from records import claims, numbers, observation, table

DEMO = ROOT / "lab" / "16_real_draft_depth.py"
QUICK = ("--repeat-tokens", "12", "--code-tokens", "8", "--open-tokens", "10", "--gamma", "5", "--copied", "8",
         "--context", "16", "--repeats", "1")
TOKENS = {"repeat": 12, "code": 8, "open": 10}
POLICIES = {"lookup": ["best fixed", "AIMD", "AIMD least 4", "floor", "cost-aware"],
            "model": ["best fixed", "AIMD", "AIMD least 4", "floor", "confident", "cost-aware"]}
COST, SLOPE = 0.3, 0.1                                   # c, and t(n) - t(n - 1), where no clock is asked

pytestmark = pytest.mark.usefixtures("one_thread", "read_once")


def run(folders, *flags):
    return console.run_demo(DEMO, [*QUICK, "--target", str(folders / "small-llama"), *map(str, flags)])


def run_timed(folders):
    """A record with t(n) and c as above: the policies then choose the same lengths on any machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab.measure.timing, "step_times", lambda decoder, ids, context, sent, repeats: np.array(
            [[1 + SLOPE * (n - 1)] * repeats for n in sent]))
        patch.setattr(lab.measure.timing, "step_seconds", lambda models, ids, context, rounds: np.array(
            [[c] * rounds for c in (1, COST)]))
        return run(folders)


@pytest.fixture(scope="module")
def record(folders):
    return run_timed(folders)


def check(made, methods):
    """What holds of every record, on whatever machine."""
    costs, = table(made, "costs")
    assert list(costs) == ["step, ms", *(f"t({n})" for n in (1, 2, 3, 5, 6, 9)), "c"]
    assert costs["t(1)"] == 1 and min(costs.values()) > 0
    for draft, names in POLICIES.items():
        rows = table(made, f"predicted-{draft}")
        assert [row["policy"] for row in rows] == names
        assert all(row[text] > 0 for row in rows for text in TOKENS)
        assert all(rows[0][text] >= 1 for text in TOKENS), "a fixed length of 0 is plain decoding"
    rows = table(made, "speeds")
    assert [(row["text"], row["method"]) for row in rows] == [(text, method) for text in TOKENS for method in methods]
    for row in rows:
        assert row["low"] <= row["speed"] <= row["high"] and row["tau"] >= 1
        assert (row["predicted"] is None) == (row["method"] == "generate")
    explained = observation(made, "explained")
    assert explained["holds"] and numbers(explained["text"])[:2] == [3 * 5 * len(methods), 0]


@pytest.mark.slow
def test_a_small_llama(record):
    check(record, ["lookup", "model", "generate"])
    whole, = (t for t in record["tables"] if t["id"] == "costs")
    assert whole["title"] == "small-llama; the draft model is small-llama in int4-g32 kernels"
    # The rounded weights are right often enough that the columns say something.
    assert max(row["tau"] for row in table(record, "speeds") if row["method"] == "model") > 1.2


def test_what_a_clock_has_touched_is_marked(record):
    assert {t["id"]: t["measured"] for t in record["tables"]} == {
        "costs": ["t(1)", "t(2)", "t(3)", "t(5)", "t(6)", "t(9)", "c"], "predicted-lookup": list(TOKENS),
        "predicted-model": list(TOKENS), "speeds": ["tau", "predicted", "speed", "low", "high"]}
    assert list(claims(record, measured=False)) == ["explained"]
    assert set(record["samples"]) == {"seconds of sending n tokens", "seconds of a step", *(
        f"seconds per token, {text}, {method}" for text in TOKENS for method in ("lookup", "model", "generate"))}


def by_hand(run, c):
    """Tokens after the first round over the steps that they took, by `COST` and `SLOPE`."""
    later = [r for r in run.rounds if not r.first] or run.rounds
    return sum(r.accepted + 1 for r in later) / sum(1 + (SLOPE + c) * r.drafted for r in later)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["model", "lookup"])
def test_predicted_speeds_are_those_of_the_targets_own_rounds(record, folders, draft):
    """With times that are given: the real loop on the target, at every fixed gamma, and with two of the policies."""
    target = models.load(str(folders / "small-llama"))
    drafter = ModelDrafter(integer_kernels(target, "int4-g32")) if draft == "model" else SuffixLookup()
    c, most = (COST, 5) if draft == "model" else (0.0, 8)
    rows = {row["policy"]: row for row in table(record, f"predicted-{draft}")}

    def speed(text, gamma, drafter=drafter):
        prompt = target.chat(PROMPTS[text][0])
        return by_hand(speculative_generate(target, drafter, prompt, TOKENS[text], gamma, eos=target.eos)[1], c)

    sure = ConfidentDrafter(drafter.model, 0.5) if draft == "model" else drafter
    aware = CostAware(lambda n: 1 + SLOPE * (n - 1), c, most, drafter=drafter if draft == "lookup" else None, credit=2.0)
    for text in TOKENS:
        assert rows["best fixed"][text] == pytest.approx(max(speed(text, gamma) for gamma in range(most + 1)))
        assert rows["AIMD"][text] == pytest.approx(speed(text, AIMD(first=4, least=1, most=most)))
        assert rows["cost-aware"][text] == pytest.approx(speed(text, aware, sure))
    measured = {row["text"]: row for row in table(record, "speeds") if row["method"] == draft}
    assert all(measured[text]["predicted"] == pytest.approx(rows["cost-aware"][text]) for text in TOKENS)


@pytest.mark.nightly
def test_the_same_times_give_the_same_record_and_nothing_is_judged_where_they_are_disturbed(record, folders, monkeypatch):
    monkeypatch.setattr(lab.measure.compare, "MOST_SPREAD", -1.0)
    monkeypatch.setattr(lab.measure.spread, "disturbed", lambda readings: "These readings were disturbed.")
    made = run_timed(folders)
    free = [[[row[i] for i, name in enumerate(t["columns"]) if name not in ("speed", "low", "high")] for row in t["rows"]]
            for each in (record, made) for t in each["tables"]]
    assert free[:len(free) // 2] == free[len(free) // 2:]
    assert set(claims(made, measured=True).values()) == {None} and observation(made, "explained")["holds"]
    assert "before, not judged" in made["samples"]["seconds per token, code, model"]


@pytest.mark.nightly
def test_a_draft_that_transformers_refuses_and_the_shortest_drafts(folders):
    """By the machine's own clock, on which nothing here depends: output rows of another width."""
    made = run(folders, "--draft", folders / "padded", "--gamma", 4, "--copied", 4, "--repeat-tokens", 8)
    assert [row["method"] for row in table(made, "speeds")] == ["lookup", "model"] * 3
    assert observation(made, "explained")["holds"] and "better-than-generate" not in claims(made)


# -- losslessness, broken ------------------------------------------------------------------------------------

@pytest.mark.slow
def test_a_wrong_token_accepted_is_seen_in_the_texts(folders, monkeypatch, one_repeat):
    right = decode_lab.verify

    def verify(draft, rows, sampler, history, rng):
        """The first draft token is kept whatever the target says."""
        path, token, tested = right(draft, rows, sampler, history, rng)
        return ([0], int(rows[1].argmax()), 1) if draft.tokens and not path else (path, token, tested)

    monkeypatch.setattr(decode_lab, "verify", verify)
    assert not observation(run(folders), "explained")["holds"]


# -- bad assumptions -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("flags, words", [
    (["--scheme", "int4-x"], "int4-x"), (["--target", "no-such-model"], "no-such-model"), (["--gamma", 3], "4 to 32"),
    (["--copied", 3], "4 to 64"), (["--dtype", "int8"], "no choice")])
def test_bad_input(folders, flags, words):
    with pytest.raises(BadInput, match=words) as said:
        run(folders, *flags)
    assert "\n" not in str(said.value)


def test_a_draft_of_another_tokenizer_is_refused(folders):
    with pytest.raises(BadInput, match="tokenizer"):
        run(folders, "--draft", folders / "stranger")
