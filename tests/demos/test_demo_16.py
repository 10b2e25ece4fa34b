"""Demo 16 through its record: on small random models in folders, and with its losslessness broken."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import console
import decode_lab
import lab.drafters.cascade
import lab.measure.timing
from console import ROOT, BadInput
from decode_lab import speculative_generate
from lab.drafters.lookup import PromptLookup, SuffixLookup
from lab.drafters.model import ModelDrafter
from lab import models
from lab.measure.prompts import PROMPTS
from lab.models.layers import LayerDraft
from lab.models.rounded import integer_kernels
from records import numbers, observation, table
from small import save

DEMO = ROOT / "lab" / "16_real_draft_depth.py"
QUICK = ("--repeat-tokens", "12", "--code-tokens", "8", "--open-tokens", "10", "--gamma", "5", "--copied", "8",
         "--runs", "1", "--layers", "0", "1", "3", "--cascade-tokens", "8", "--context", "16",
         "--repeats", "1")
TOKENS = {"repeat": 12, "code": 8, "open": 10}
POLICIES = {"plain": [""], "lookup": ["best fixed", "cost-aware", "AIMD", "AIMD least 4", "floor", "oracle"],
            "model": ["best fixed", "both", "AIMD", "AIMD least 4", "floor", "confident", "cost-aware", "oracle"],
            "generate": ["default", "heuristic"]}
CASCADES = ["lookup", "kept", "lookup > kept", "model", "lookup > model"]
STEPS, SLOPE = {"model": 0.3, "kept": 0.6}, 0.1          # c, and t(n) - t(n - 1), where no clock is asked

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Where the models are: a target, another model, one of another width of output rows, one of another tokenizer."""
    at = tmp_path_factory.mktemp("models")
    save(at / "small-llama")
    save(at / "other", seed=1)
    save(at / "padded", seed=2, vocab_size=352)
    save(at / "stranger", texts=["another tokenizer, of another text"])
    return at


def run(folders, *flags):
    return console.run_demo(DEMO, [*QUICK, "--target", str(folders / "small-llama"), *map(str, flags)])


def run_timed(folders):
    """A record with t(n) and c as above: the policies then choose the same lengths on any machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab.measure.timing, "step_times", lambda decoder, ids, context, sent, repeats: np.array(
            [[1 + SLOPE * (n - 1)] * repeats for n in sent]))
        patch.setattr(lab.measure.timing, "step_seconds", lambda models, ids, context, rounds: np.array(
            [[c] * rounds for c in (1, *STEPS.values())]))
        return run(folders)


@pytest.fixture(scope="module")
def record(folders):
    return run_timed(folders)


def by_policy(made):
    """{(text, draft, policy): row}, the policy without the length of the best fixed."""
    return {(row["text"], row["draft"], row["policy"].split(",")[0]): row for row in table(made, "policies")}


def texts_that_differ(made):
    """The observations of section 2 and of section 3."""
    return [observation(made, id) for id in ("explained", "cascades-explained")]


def check(made, cascades):
    """What holds of every record, on whatever machine."""
    ms, sent = table(made, "forward-times")
    assert list(sent) == ["n", *map(str, (1, 2, 3, 5, 6, 7, 9))] and sent["1"] == 1 and ms["1"] > 0
    rows = by_policy(made)
    assert [(text, draft) for text, draft, _ in rows] == [
        (text, draft) for text in TOKENS for draft, names in POLICIES.items() for _ in names]
    assert set(rows) == {(text, draft, policy) for text in TOKENS for draft, names in POLICIES.items()
                         for policy in names}
    for (text, draft, policy), row in rows.items():
        rounds = TOKENS[text] / row["tau"]
        assert rounds == pytest.approx(round(rounds)), "tau is tokens over rounds"
        assert row["tau"] <= row["gamma"] + 1 + 1e-9 and row["gamma"] <= (5 if draft == "model" else 8)
        assert (row["predicted"] is None) == (draft in ("plain", "generate"))
        timed = [row[name] for name in ("typical", "speedup", "tokens/s")]
        assert all(x is None if policy == "oracle" else x > 0 for x in timed) and (row["predicted"] is None or row["predicted"] > 0)
        assert draft != "plain" or (row["gamma"], row["tau"], row["typical"], row["speedup"]) == (0, 1, 1, 1)
        if policy.startswith("best fixed"):
            assert row["gamma"] <= int(row["policy"].split(", ")[1]) + 1e-9
    section = table(made, "cascades")
    assert [(row["text"], row["drafts"]) for row in section] == [(t, d) for t in ("repeat", "open") for d in cascades]
    found = {(row["text"], row["drafts"]): row for row in section}
    for (text, name), row in found.items():
        assert 1 <= row["tau"] <= 5 and 0 <= (row["alpha"] or 0) <= 1 and row["predicted"] > 0 and row["speedup"] > 0
        assert 8 / row["tau"] == pytest.approx(round(8 / row["tau"]))
        alone = found[text, name.split(" > ")[-1]]
        assert (row["tau"], row["alpha"]) == (alone["tau"], alone["alpha"]), "a middle says the same with any draft"
        assert (row["middle's tau"] is None) == (row is alone)
        assert row is alone or 1 <= row["middle's tau"] <= 4
    first, second = texts_that_differ(made)
    assert first["holds"] and second["holds"]
    # Plain decoding in both turns, the policies of ours and of transformers; then plain decoding and the cascades.
    assert numbers(first["text"])[:2] == [48, 0] and numbers(second["text"])[:2] == [2 * (1 + len(cascades)), 0]
    return rows


@pytest.mark.slow
def test_a_small_llama(record):
    rows = check(record, CASCADES)
    assert [(row["draft"], row["what"]) for row in table(record, "step-costs")] == [
        ("model", "small-llama in int4-g32 kernels"), ("kept", "3 of 4 layers of small-llama")]
    # The rounded weights are right often enough that the columns say something.
    assert max(row["tau"] for (_, draft, _), row in rows.items() if draft == "model") > 2
    assert max(row["tau"] for (_, draft, _), row in rows.items() if draft == "lookup") > 1


def test_what_a_clock_has_touched_is_marked(record):
    marked = {t["id"]: t["measured"] for t in record["tables"]}
    # What the policies choose follows times, too.
    assert marked["policies"] == ["policy", "gamma", "tau", "predicted", "typical", "speedup", "tokens/s"]
    assert marked["forward-times"] == ["1", "2", "3", "5", "6", "7", "9"] and marked["step-costs"] == ["c"]
    assert marked["cascades"] == ["predicted", "speedup"]
    assert [o["measured"] for o in record["observations"]] == [True] * 6 + [False] + [True] * 3 + [False]
    # One run in turn: speedups of one group are to each other as the seconds per token behind them.
    rows, samples = by_policy(record), record["samples"]
    for text in TOKENS:
        keys = [(text, "model", policy) for policy in ("AIMD", "floor", "confident")]
        products = [rows[key]["speedup"] * samples[f"seconds per token, {text}, {' '.join(key[1:])}, group 2"][0]
                    for key in keys]
        assert products == pytest.approx([products[0]] * 3)


def told(run, c):
    """Tokens after the first round over the steps that they took, by `STEPS` and `SLOPE`."""
    later = [r for r in run.rounds if not r.first] or run.rounds
    return sum(r.accepted + 1 for r in later) / sum(1 + (SLOPE + c) * r.drafted for r in later)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["model", "lookup"])
def test_the_best_fixed_length_by_trying_all(record, folders, draft):
    """With times that are given, the real loop at every gamma: the best of them is the one that the demo names."""
    target = models.load(str(folders / "small-llama"))
    model = integer_kernels(target, "int4-g32")
    rows, c = by_policy(record), {"model": STEPS["model"], "lookup": 0.0}[draft]
    for text, n in TOKENS.items():
        prompt = target.chat(PROMPTS[text][0])
        drafter = ModelDrafter(model) if draft == "model" else SuffixLookup()
        runs = [speculative_generate(target, drafter, prompt, n, gamma, eos=target.eos)[1]
                for gamma in range(6 if draft == "model" else 9)]
        speeds = [told(each, c) for each in runs]
        best, row = int(np.argmax(speeds)), rows[text, draft, "best fixed"]
        named = int(row["policy"].split(", ")[1])
        assert speeds[named] == pytest.approx(max(speeds)), f"{text}: {best} is better than {named}"
        assert row["predicted"] == pytest.approx(speeds[named]) and row["tau"] == pytest.approx(runs[named].tau)
        assert row["gamma"] == pytest.approx(runs[named].drafted / len(runs[named].rounds))


def test_the_speedup_of_a_cascade_by_hand(record, folders):
    target = models.load(str(folders / "small-llama"))
    kept = LayerDraft(target, (0, 1, 3))
    rows = {(row["text"], row["drafts"]): row for row in table(record, "cascades")}
    for text in ("repeat", "open"):
        prompt, drafter = target.chat(PROMPTS[text][0]), lab.drafters.cascade.CascadeDrafter(kept, PromptLookup(), 4)
        made = speculative_generate(target, drafter, prompt, 8, 4, eos=target.eos)[1]
        spent = sum(1 + SLOPE * r.drafted for r in made.rounds) + STEPS["kept"] * sum(
            1 + SLOPE * r.drafted for r in drafter.run.rounds)
        row = rows[text, "lookup > kept"]
        assert (row["predicted"], row["tau"], row["middle's tau"]) == pytest.approx(
            (made.n_tokens / spent, made.tau, drafter.run.tau))


@pytest.mark.slow
def test_with_the_same_times_the_record_is_the_same(record, folders):
    free = [[[row[i] for i, name in enumerate(t["columns"]) if name not in ("typical", "speedup", "tokens/s")] for row in t["rows"]]
            for made in (record, run_timed(folders)) for t in made["tables"]]
    assert free[:len(free) // 2] == free[len(free) // 2:]


@pytest.mark.slow
def test_a_draft_of_its_own_and_one_for_it(folders):
    """By the machine's own clock, on which nothing here depends."""
    made = run(folders, "--draft", folders / "other", "--small", folders / "padded")
    rows = check(made, [*CASCADES, "small", "small > model"])
    assert [row["draft"] for row in table(made, "step-costs")] == ["model", "kept", "small"]
    assert rows["repeat", "model", "floor"]["gamma"] > 0


@pytest.mark.slow
def test_at_its_edges_it_runs_to_the_end(folders):
    """Drafts shorter than AIMD's least, and a draft of another width of output rows, which transformers refuses."""
    made = run(folders, "--gamma", 1, "--copied", 2, "--draft", folders / "padded", "--repeat-tokens", 8,
               "--open-tokens", 8)
    assert [o["holds"] for o in texts_that_differ(made)] == [True, True]


# -- losslessness, broken ------------------------------------------------------------------------------------

@pytest.mark.slow
def test_a_wrong_token_accepted_is_seen_in_the_texts(folders, monkeypatch):
    right = decode_lab.verify

    def verify(draft, rows, sampler, history, rng):
        """The first draft token is kept whatever the target says."""
        path, token, tested = right(draft, rows, sampler, history, rng)
        return ([0], int(rows[1].argmax()), 1) if draft.tokens and not path else (path, token, tested)

    monkeypatch.setattr(decode_lab, "verify", verify)
    first, second = texts_that_differ(run(folders))
    assert not first["holds"] and not second["holds"]


# -- bad assumptions -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("flags, words", [
    (["--small", "pythia-70m"], "name that with --draft"), (["--scheme", "int4-x"], "int4-x"),
    (["--target", "no-such-model"], "no-such-model"), (["--gamma", 0], "1 to 32"), (["--dtype", "int8"], "no choice"),
    (["--layers", -1], "at least 0"), (["--layers", 0, 1, 9], "cannot be kept")])
def test_bad_input(folders, flags, words):
    with pytest.raises(BadInput, match=words) as said:
        run(folders, *flags)
    assert "\n" not in str(said.value)


def test_a_draft_of_another_tokenizer_is_refused(folders):
    with pytest.raises(BadInput, match="tokenizer"):
        run(folders, "--draft", folders / "stranger")
