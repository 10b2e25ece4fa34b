"""Demos 07, 08 and 09 through their records: numbers by hand, edits that change a conclusion, broken rules."""

import functools

import numpy as np
import pytest

import console
import decode_lab
import lab.drafters.cascade
import lab.drafters.draft_length
import lab.measure.known_texts
import lab.measure.acceptance
from console import ROOT, BadInput
from decode_lab import Sampler, autoregressive_generate, speculative_generate
from lab.drafters.model import ModelDrafter
from hw_specs import chip
from lab import toy
from lab.toy.transformer import generate_batch
from llm_math import best_gamma, cascade_cost, expected_tokens, model, verify_time
from records import claims, observation, table, whole_table

SAMPLERS, DEPTH, CASCADE = (ROOT / "lab" / name for name in (
    "07_sampler_matching.py", "08_draft_depth.py", "09_cascade.py"))
QUICK = {
    SAMPLERS: ("--draft", "small", "--prompts", "2", "--new-tokens", "12", "--penalties", "1.3", "--ratios", "0.5",
               "--grid", "0.5", "0.9"),
    DEPTH: ("--requests", "3", "--candidates", "16", "--new-tokens", "24", "--gamma-max", "8", "--batches", "1", "256"),
    CASCADE: ("--prompts", "2", "--new-tokens", "16", "--gamma", "4", "--inner", "2",
              "--batches", "1", "128"),
}
PROMPT = 32


def run(demo, *flags):
    return console.run_demo(demo, [*QUICK[demo], *flags])


@functools.cache
def record(demo):
    return run(demo)


@pytest.fixture
def no_figures(monkeypatch):
    """Figures are not written: they take longer than what they show."""
    monkeypatch.setattr(console, "figure", lambda id, fig, title: None)


def unmeasured(made):
    """Titles, columns and cells that no clock has touched, and such observations."""
    tables = []
    for each in made["tables"]:
        free = [i for i, name in enumerate(each["columns"]) if name not in each["measured"]]
        tables.append((each["id"], each["columns"],
                       [[row[i] for i in free] for row in each["rows"]]))
    return tables, [o["text"] for o in made["observations"] if not o["measured"]]


@pytest.mark.nightly
@pytest.mark.parametrize("demo", QUICK, ids=lambda path: path.stem[:2])
def test_the_same_assumptions_give_the_same_record(demo, no_figures):
    assert unmeasured(run(demo)) == unmeasured(record(demo))


def softmax(rows):
    weights = np.exp(rows - rows.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def prompts(n):
    return [ids for kind in toy.KINDS for ids in toy.prompts(kind, n, PROMPT)]


# -- 07 ------------------------------------------------------------------------------------------------------

def filtered(row, temperature=0.6, top_p=0.95, min_p=0.05):
    """A row of logits at a temperature, cut to its nucleus and to what has a share of the likeliest token's chance."""
    p = softmax(row.astype(float) / temperature)
    order = np.argsort(-p)
    kept = order[:1 + int((np.cumsum(p[order]) < top_p).sum())]
    q = np.zeros_like(p)
    q[kept] = p[kept] / p[kept].sum()
    q[q < min_p * q.max()] = 0
    return q / q.sum()


@functools.cache
def written():
    """{target: (rows of the large model, rows of the small one, new tokens)} of the texts that demo 07 begins with."""
    large, small, rng, found = toy.load("large"), toy.load("small"), np.random.default_rng(0), {}
    samplers = {"greedy": Sampler(), "T 0.6, filters": Sampler(0.6, 0, 0.95, 0.05), "T 1": Sampler(1.0)}
    for name, sampler in samplers.items():
        texts = np.array([autoregressive_generate(large, ids, 12, rng=rng, sampler=sampler)[0] for ids in prompts(2)])
        found[name] = *(m.full_logits(texts)[:, PROMPT - 1:-1].astype(float) for m in (large, small)), texts[:, PROMPT:]
    return found


def likely(large, small, few=8):
    """[(p, q)] at every tenth token of the texts: softmax over the few likeliest tokens of each."""
    rows = ((large[at], small[at]) for at in np.ndindex(large.shape[:2]) if at[1] % 10 == 0)
    return [[softmax(np.where(z >= np.sort(z)[-few], z, -np.inf)) for z in pair] for pair in rows]


def test_07_the_overlaps_by_hand():
    rows = {row["target"]: row for row in table(record(SAMPLERS), "tuned")}
    assert list(rows) == ["T 0.6, top-p 0.95, min-p 0.05", "T 1, no filter", "T 1, penalty 1.3"]
    large, small, tokens = written()["T 0.6, filters"]
    pairs = list(zip(large.reshape(-1, large.shape[-1]), small.reshape(-1, small.shape[-1])))
    expected = {x: np.mean([np.minimum(filtered(p), filtered(q, 0.6 * x)).sum() for p, q in pairs]) for x in (0.5, 0.9, 1)}
    row, best = rows["T 0.6, top-p 0.95, min-p 0.05"], max(expected, key=expected.get)
    assert row["greedy"] == pytest.approx(np.mean([filtered(p)[q.argmax()] for p, q in pairs]))
    assert (row["matched"], row["at the best"], row["best ratio"]) == pytest.approx((expected[1], expected[best], best))
    large, small, _ = written()["T 1"]
    assert rows["T 1, no filter"]["matched"] == pytest.approx(np.minimum(softmax(large), softmax(small)).sum(-1).mean())
    _, small, tokens = written()["greedy"]
    first = table(record(SAMPLERS), "penalty")[0]
    assert first["matched"] == first["plain"] == pytest.approx((small.argmax(-1) == tokens).mean())


def test_07_the_columns_belong_together():
    made = record(SAMPLERS)
    assert not any(t["measured"] for t in made["tables"]) and not any(o["measured"] for o in made["observations"])
    rows = table(made, "samplers")
    filters = "T 0.6, top-p 0.95, min-p 0.05"
    assert [(r["target"], r["draft"]) for r in rows] == [
        ("greedy", "matched"), ("greedy", "T 0.5"), *((filters, d) for d in ("greedy", "T 0.3", "matched")),
        *((t, d) for t in ("T 1, no filter", "T 1, penalty 1.3") for d in ("greedy", "T 0.5", "matched"))]
    for row in rows:
        assert 0 < row["overlap"] < 1 and row["difference"] == pytest.approx(row["accepted"] - row["overlap"])
        assert row["difference"] * row["std errors"] >= 0
    assert rows[0]["difference"] == pytest.approx(0) == rows[0]["std errors"], "greedy for greedy leaves nothing to chance"
    for row in table(made, "tuned"):
        assert row["gain"] == pytest.approx(row["at the best"] - row["matched"]) and row["best ratio"] in (0.5, 0.9, 1)
    for id in ("lookup", "penalty"):
        assert [(r["T"], r["penalty"]) for r in table(made, id)] == [(0, 1), (0, 1.3), (1, 1), (1, 1.3)]
    for row in table(made, "lookup"):
        assert 0 <= row["accepted"] <= 1 <= row["tau"]
    for row in table(made, "penalty"):
        assert row["difference"] == pytest.approx(row["plain"] - row["matched"])
    assert len(claims(made)) == 9 and all(claims(made).values())


def test_07_filters_are_named_only_where_they_are_on(no_figures):
    made = run(SAMPLERS, "--top-k", 20, "--top-p", 1, "--min-p", 0, "--new-tokens", 8)
    assert table(made, "tuned")[0]["target"] == "T 0.6, top-k 20"
    made = run(SAMPLERS, "--top-p", 1, "--min-p", 0, "--new-tokens", 8, "--temperature", 0.7)
    assert table(made, "tuned")[0]["target"] == "T 0.7, no filter"


def test_07_the_output_of_a_wrong_q_by_hand():
    """The likeliest token, said to be drawn: kept with its share of p over q, else the residual is drawn from."""
    rows, (large, small, _) = table(record(SAMPLERS), "bugs"), written()["T 1"]
    found = []
    for p, q in likely(large, small):
        x, rest = q.argmax(), np.maximum(p - q, 0)
        share = min(1, p[x] / q[x])
        out = (1 - share) * rest / rest.sum()
        out[x] += share
        found.append((share, np.abs(out - p).sum() / 2))
    assert (rows[3]["accepted"], rows[3]["TV"]) == pytest.approx(tuple(np.mean(found, axis=0)))
    overlaps = [np.minimum(p, q).sum() for p, q in likely(large, small)]
    assert rows[0]["TV"] == pytest.approx(0, abs=1e-12) and rows[0]["accepted"] == pytest.approx(np.mean(overlaps))


@pytest.mark.parametrize("flags, broken", [
    (["--penalties", 1.0001], {"penalty-lowers", "draft-without-penalty"}),
    (["--penalties", 1.0], {"penalty-lowers", "draft-without-penalty"}),
    (["--temperature", 0.05], {"greedy-draft-falls"}), (["--ratios", 0.05], {"greedy-best-for-greedy"})])
def test_07_an_edit_changes_the_conclusion(flags, broken, no_figures):
    """A penalty of next to nothing, or of nothing, does nothing; at T 0.05 drawing is nearly greedy."""
    assert {id for id, holds in claims(run(SAMPLERS, *flags)).items() if not holds} == broken


def test_07_sees_a_token_accepted_untested(monkeypatch, no_figures):
    right = decode_lab.accept
    monkeypatch.setattr(decode_lab, "accept", lambda p, tokens, q, rng: (0, tokens[0]) if len(tokens) else right(
        p, tokens, q, rng))
    monkeypatch.setattr(lab.measure.acceptance, "accept", decode_lab.accept)
    made = run(SAMPLERS, "--new-tokens", 8)
    for part in ("right-if-reported", "overlap-predicts"):
        assert not observation(made, part)["holds"]


# -- 08 ------------------------------------------------------------------------------------------------------

@functools.cache
def agreement():
    """{text: (3, 24), whether the small toy's likeliest token is the large one's, by request} of demo 08."""
    large, small = toy.load("large"), toy.load("small")
    texts = generate_batch(large, np.array(prompts(16)), 24)
    right = small.full_logits(texts)[:, PROMPT - 1:-1].argmax(-1) == texts[:, PROMPT:]
    order = np.argsort(right.mean(1), kind="stable")
    hard, easy = order[:3], order[:-4:-1]
    return {"easy": right[easy], "hard": right[hard], "alternating": right[[easy[0], hard[0], easy[1]]]}


def fixed_rounds(right, gamma):
    """(drafted of each round) of a fixed gamma over requests, from where the draft is right."""
    drafted = []
    for row in right:
        at = 0
        while at < len(row):
            drafted.append(min(gamma, len(row) - at - 1))
            accepted = next((i for i in range(drafted[-1]) if not row[at + i]), drafted[-1])
            at += accepted + 1
    return drafted


def prices():
    """{cost model: (t(n) by n, c)} from the shapes."""
    found = {}
    for batch in (1, 256):
        times = [verify_time(model("llama-3.1-8b"), chip("h100-sxm"), batch, 1024, n, 1e-3) for n in range(1, 10)]
        draft = verify_time(model("llama-3.2-1b"), chip("h100-sxm"), batch, 1024, 1, 0.3e-3)
        found[f"batch {batch}"] = {n: t / times[0] for n, t in enumerate(times, 1)}, draft / times[0]
    return found


def test_08_texts_and_costs_by_hand():
    made = record(DEPTH)
    for row in table(made, "texts"):
        assert row["tokens"] == 72 and row["agreement"] == pytest.approx(agreement()[row["text"]].mean())
    *chip_rows, here = table(made, "costs")
    for row in chip_rows:
        t, c = prices()[row["costs"]]
        assert [row[f"t({n})"] for n in (1, 2, 3, 5, 9)] == pytest.approx([t[n] for n in (1, 2, 3, 5, 9)])
        assert row["c"] == pytest.approx(c)
    assert here["costs"] == "this machine" and here["t(1)"] == 1 and here["c"] > 0


@pytest.mark.parametrize("cost", ["batch 1", "batch 256"])
def test_08_fixed_lengths_and_regrets_by_hand(cost):
    t, c = prices()[cost]
    id = f"speed-{cost.replace(' ', '-')}"
    rows = {row["policy"]: row for row in table(record(DEPTH), id)}
    assert list(rows) == ["best fixed", "plain", "always 4", "AIMD", "AIMD least 4", "floor", "confident", "fitted",
                          "cost-aware", "oracle"]
    for text, right in agreement().items():
        drafted = [fixed_rounds(right, gamma) for gamma in range(9)]
        speed = [72 / sum(t[d + 1] + d * c for d in rounds) for rounds in drafted]
        assert rows["plain"][text] == pytest.approx(1) and rows["always 4"][text] == pytest.approx(speed[4])
        assert rows["best fixed"][text] == pytest.approx(max(speed))
        assert all(row[text] <= rows["oracle"][text] * (1 + 1e-9) for row in rows.values())
    for row in rows.values():
        assert row["regret"] == pytest.approx(np.mean([rows["oracle"][text] / row[text] - 1 for text in agreement()]))
    assert whole_table(record(DEPTH), id)["measured"] == []
    for part in ("easy-and-hard", "oracle-fastest", "same-text", "same-rounds"):
        assert observation(record(DEPTH), part)["holds"]


def test_08_claims_are_about_the_tables():
    made = record(DEPTH)
    tables = [{row["policy"]: row for row in table(made, f"speed-batch-{batch}")} for batch in (1, 256)]
    regret = {name: np.mean([rows[name]["regret"] for rows in tables]) for name in tables[0]}
    unaware = min(regret[name] for name in ("always 4", "AIMD", "floor", "confident"))
    lowest = min(rows["cost-aware"][text] for rows in tables for text in agreement())
    for part, value in (("never-slower", lowest), ("least-regret", regret["cost-aware"] / unaware),
                        ("fitting-helps", regret["cost-aware"] / regret["fitted"])):
        assert observation(made, part)["value"] == pytest.approx(value)
    here = {row["policy"]: row for row in table(made, "speed-this-machine")}
    assert observation(made, "plain-is-as-fast")["value"] == pytest.approx(
        np.mean([here["plain"][text] / here["cost-aware"][text] for text in agreement()]))


def test_08_what_a_clock_has_touched_is_marked():
    made = record(DEPTH)
    marked = {t["id"]: t["measured"] for t in made["tables"] if t["measured"]}
    assert marked == {"costs": ["t(1)", "t(2)", "t(3)", "t(5)", "t(9)", "c"],
                      "speed-this-machine": ["easy", "hard", "alternating", "regret"]}
    assert list(claims(made, measured=True)) == ["plain-is-as-fast"]
    assert set(made["samples"]) == {"seconds of a forward of the toy"}


def test_08_an_edit_changes_the_conclusion(no_figures):
    """A draft whose step costs nearly one of the target's: no length pays, and one trial costs too much."""
    made = run(DEPTH, "--priced", "llama-3.1-8b", "--batches", 1, "--requests", 2, "--new-tokens", 16)
    assert not observation(made, "never-slower")["holds"] and not observation(made, "fitting-helps")["holds"]
    rows = {row["policy"]: row for row in table(made, "speed-batch-1")}
    assert rows["plain"]["hard"] == rows["best fixed"]["hard"] == 1


@pytest.mark.nightly
def test_08_a_threshold_fitted_to_the_texts_has_less_regret_than_the_costs(no_figures):
    """So the claim is of rules whose numbers are not fitted."""
    made = run(DEPTH, "--threshold", 0.6, "--requests", 4, "--candidates", 32, "--new-tokens", 64, "--gamma-max", 8)
    assert not observation(made, "least-regret")["holds"] and observation(made, "fitting-helps")["holds"]


def first_is_right(draft, rows, sampler, history, rng, verify=decode_lab.verify):
    """The mistake: the first greedy draft token is kept whatever the target says."""
    path, token, tested = verify(draft, rows, sampler, history, rng)
    return ([0], token, max(tested, 1)) if sampler.greedy and draft.tokens and not path else (path, token, tested)


def test_08_sees_a_rule_broken_and_an_oracle_that_is_none(monkeypatch, no_figures):
    monkeypatch.setattr(decode_lab, "verify", first_is_right)
    monkeypatch.setattr(lab.drafters.draft_length.Oracle, "choose", lambda self: 0)
    made = run(DEPTH)
    for part in ("same-text", "oracle-fastest"):
        assert not observation(made, part)["holds"]
    assert observation(made, "easy-and-hard")["holds"], "found without the rule"


def test_08_sees_rounds_that_are_not_the_targets(monkeypatch, no_figures):
    """The text that rounds are counted on is another than the target's, which writes its own."""
    right = lab.measure.known_texts.KnownText.send
    monkeypatch.setattr(lab.measure.known_texts.KnownText, "send", lambda self, tokens, parents=None: np.roll(
        right(self, tokens, parents), 1, axis=1))
    made = run(DEPTH)
    assert observation(made, "same-text")["holds"], "the target still writes its own text"
    assert not observation(made, "same-rounds")["holds"]


# -- 09 ------------------------------------------------------------------------------------------------------

def step_seconds(name, batch=1, n=1):
    shape = model(name)
    return verify_time(shape, chip("h100-sxm"), batch, 512, n, 10e-6 * shape.n_layers)


FAMILY = ("pythia-70m", "pythia-410m", "pythia-2.8b")


def ratios(batch=1):
    return [step_seconds(name, batch) / step_seconds(FAMILY[2], batch) for name in FAMILY[:2]]


def test_09_steps_and_predicted_speeds_by_hand():
    made, (c1, c2) = record(CASCADE), ratios()
    for row in table(made, "one-step"):
        assert [row["c1"], row["c2"]] == pytest.approx(ratios(row["batch"]))
    rows = table(made, "cascades")
    assert [(r["alpha_12"], r["alpha_23"]) for r in rows] == [
        (0.6, 0.6), (0.6, 0.9), (0.8, 0.8), (0.9, 0.6), (0.9, 0.9)]
    for row in rows:
        a12, a23 = row["alpha_12"], row["alpha_23"]
        speeds = {(inner, gamma): expected_tokens(a23, gamma) / (1 + cascade_cost(a12, inner, gamma, c1, c2)[-1])
                  for inner in range(3) for gamma in range(5)}
        best = max(speeds, key=speeds.get)
        assert (row["inner"], row["gamma"]) == best and row["cascade"] == pytest.approx(speeds[best])
        pairs = [best_gamma(a12 * a23, c1, 4), best_gamma(a23, c2, 4)]
        assert [row["small"], row["middle"]] == pytest.approx([speed for _, speed in pairs])
        assert row["gain"] == pytest.approx(row["cascade"] / max(speed for _, speed in pairs))
        assert row["at limit"] == (best[0] == 2 or 4 in (best[1], pairs[0][0], pairs[1][0]))
    pays = observation(made, "beats-pairs")
    assert pays["value"] == sum(row["gain"] > 1.005 for row in rows) and "independent" in pays["text"]
    assert not observation(made, "longest")["holds"], "drafts of up to 4 and 2 tokens are too short for some cases"


@functools.cache
def greedy_family():
    """(likeliest tokens of small and medium toy, the large one's text) on demo 09's greedy texts, (4, 16) each."""
    texts = generate_batch(toy.load("large"), np.array(prompts(2)), 16)
    said = [toy.load(name).full_logits(texts)[:, PROMPT - 1:-1].argmax(-1) for name in ("small", "medium")]
    return *said, texts[:, PROMPT:]


def test_09_acceptance_and_pairs_by_hand():
    made, (small, middle, text) = record(CASCADE), greedy_family()
    greedy, sampled = table(made, "overlap")
    assert [greedy[f"alpha_{k}"] for k in (12, 23, 13)] == pytest.approx(
        [(small == middle).mean(), (middle == text).mean(), (small == text).mean()])
    for row in (greedy, sampled):
        x, y, z = (row[f"alpha_{k}"] for k in (12, 23, 13))
        assert row["product"] == pytest.approx(x * y) and x + y - 1 - 1e-9 <= z <= 1
    best = {row["drafts"]: row for row in table(made, "runs")}
    for name, ids, c in zip(("small", "middle"), (small, middle), ratios()):
        speeds = {}
        for gamma in range(1, 5):
            drafted = fixed_rounds(ids == text, gamma)
            spent = [step_seconds(FAMILY[2], n=d + 1) / step_seconds(FAMILY[2]) + d * c for d in drafted]
            speeds[gamma] = ids.size / sum(spent)
        assert (best[name]["gamma"], best[name]["counted"]) == (
            max(speeds, key=speeds.get), pytest.approx(max(speeds.values())))


def greedy_cascade(inner, gamma):
    """The speed of the toy family on demo 09's greedy texts: rounds of the real loop, priced step by step."""
    small, middle, large = (toy.load(name) for name in ("small", "medium", "large"))
    drafter, spent = lab.drafters.cascade.CascadeDrafter(middle, ModelDrafter(small), inner), 0.0
    for ids in prompts(2):
        made = speculative_generate(large, drafter, ids, 16, gamma)[1].rounds
        spent += sum(step_seconds(FAMILY[2], n=r.drafted + 1) for r in made) + sum(
            step_seconds(FAMILY[1], n=r.drafted + 1) + r.drafted * step_seconds(FAMILY[0]) for r in drafter.run.rounds)
    return 64 * step_seconds(FAMILY[2]) / spent


def test_09_the_columns_belong_together():
    made, (c1, c2) = record(CASCADE), ratios()
    assert not any(t["measured"] for t in made["tables"]) and not any(o["measured"] for o in made["observations"])
    rows = {row["drafts"]: row for row in table(made, "runs")}
    alpha, cascade = table(made, "overlap")[0], rows["cascade"]
    speeds = {(inner, gamma): greedy_cascade(inner, gamma) for gamma in range(2, 5) for inner in (1, 2) if inner < gamma}
    best = max(speeds, key=speeds.get)
    assert (cascade["inner"], cascade["gamma"], cascade["counted"]) == pytest.approx((*best, speeds[best]))
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["predicted"] / row["counted"]) and row["differ"] == 0
    for name, a, c in (("small", "alpha_13", c1), ("middle", "alpha_23", c2)):
        gamma = rows[name]["gamma"]
        assert rows[name]["predicted"] == pytest.approx(expected_tokens(alpha[a], gamma) / (1 + gamma * c))
    assert cascade["predicted"] == pytest.approx(expected_tokens(alpha["alpha_23"], best[1]) / (
        1 + cascade_cost(alpha["alpha_12"], *best, c1, c2)[-1]))
    gain = cascade["counted"] / max(rows["small"]["counted"], rows["middle"]["counted"])
    assert observation(made, "gain-greedy")["value"] == pytest.approx(gain)
    right, wrong = table(made, "exact")
    assert right["TV"] == pytest.approx(0, abs=1e-12) and wrong["TV"] > 0.1
    for part in ("middle-q-right", "small-q-wrong", "same-text", "not-independent"):
        assert observation(made, part)["holds"]


def test_09_an_edit_changes_the_conclusion(no_figures):
    """Drafts that cost nearly a step of the target pay nowhere."""
    made = run(CASCADE, "--small", "pythia-410m", "--middle", "pythia-1b", "--large", "pythia-1.4b",
               "--new-tokens", 8, "--prompts", 1)
    assert not observation(made, "beats-pairs")["holds"]
    for part in ("middle-q-right", "small-q-wrong", "same-text"):
        assert observation(made, part)["holds"]


class ReportsAnEvenQ(lab.drafters.cascade.CascadeDrafter):
    """Wrong: reports that each token was as likely as any other."""

    def propose(self, tokens, gamma, rng):
        draft = super().propose(tokens, gamma, rng)
        draft.q = [q if q is None else np.full(len(q), 1 / len(q)) for q in draft.q]
        return draft


def test_09_sees_another_q_and_a_rule_broken(monkeypatch, no_figures):
    """Sampled, the cascade's wrong q; greedy, the loop's wrong rule."""
    monkeypatch.setattr(lab.drafters.cascade, "CascadeDrafter", ReportsAnEvenQ)
    monkeypatch.setattr(decode_lab, "verify", first_is_right)
    made = run(CASCADE, "--new-tokens", 8, "--prompts", 1)
    for part in ("middle-q-right", "same-text"):
        assert not observation(made, part)["holds"]


# -- edits at the edges --------------------------------------------------------------------------------------

@pytest.mark.parametrize("demo, flags", [
    (SAMPLERS, ["--ratios", 0.5, 1.0, "--gamma", 1, "--new-tokens", 8]),
    (DEPTH, ["--gamma-max", 4, "--requests", 2, "--new-tokens", 16, "--batches", 1]),
    (CASCADE, ["--gamma", 2, "--inner", 1, "--prompts", 1, "--new-tokens", 8])],
    ids=["ratio 1", "gamma_max 4", "gamma 2"])
def test_at_its_edges_a_demo_runs_to_the_end(demo, flags, no_figures):
    assert len(run(demo, *flags)["observations"]) == len(record(demo)["observations"])


# -- bad assumptions -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("demo, flags, words", [
    (SAMPLERS, ["--penalties"], "needs a value"), (SAMPLERS, ["--penalties", 0.9], "1.0 to 4.0"),
    (SAMPLERS, ["--prompts", 1], "2 to 64"),
    (SAMPLERS, ["--ratios", 0], "0.05 to 10"), (DEPTH, ["--candidates", 8], "16 to 200"),
    (DEPTH, ["--gamma-max", 3], "4 to 32"), (DEPTH, ["--target", "gpt-5"], "--target has no choice"),
    (CASCADE, ["--middle", "pythia-70m"], "must grow in this order"),
    (CASCADE, ["--small", "pythia-2.8b", "--large", "pythia-70m"], "must grow in this order"),
    (CASCADE, ["--alpha-12", 1.1], "--alpha-12"), (CASCADE, ["--inner", 0], "1 to 31"),
    (CASCADE, ["--gamma", 1], "2 to 32"), (CASCADE, ["--inner", 4], "below --gamma 4")])
def test_bad_input(demo, flags, words):
    with pytest.raises(BadInput, match=words) as said:
        run(demo, *flags)
    assert "\n" not in str(said.value)
