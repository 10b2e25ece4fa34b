"""Demo 04, and the acceptance rule enumerated: the real code through every outcome of its random draws."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

import console
import decode_lab
from console import BadInput
from decode_lab import Draft, Sampler, accept, draw, residual, speculative_generate, tree_generate, verify
from lab.drafters.model import ModelDrafter
from lab.drafters.trees import TreeDrafter, TreeShape
from llm_math import expected_tokens
from records import claims, observation, table, whole_table

DEMO = Path(__file__).resolve().parents[2] / "lab" / "04_speculative_sampling.py"
QUICK = ["--drafts", "small", "--prompts", 1, "--new-tokens", 20, "--samples", 400]
ROUNDING = 1e-14          # a few float64 steps of a number below 1, over some hundred outcomes that are added


# -- every outcome of the random draws -----------------------------------------------------------------------

class Uniform:
    """A number in [0, 1) that is not settled yet: each comparison splits what is left of its interval."""

    def __init__(self, every):
        self.every, self.low, self.high, self.scale = every, 0.0, 1.0, 1.0

    def __mul__(self, factor):
        self.scale *= float(factor)
        return self

    def __lt__(self, bound):
        if bound is self:
            return False
        bound = float(bound) / self.scale
        if not self.low < bound < self.high:
            return bound >= self.high
        below = self.every.choose((bound - self.low) / (self.high - self.low))
        self.low, self.high = (self.low, bound) if below else (bound, self.high)
        return below

    def __ge__(self, bound):
        return not self < bound

    __le__, __gt__ = __lt__, __ge__          # against a bound that it equals with probability 0


class Outcomes:
    """A stand-in for a random generator that takes a program through all of its outcomes, each weighted."""

    def __init__(self):
        self.path, self.at = [], 0           # [outcome, probability of True] of each choice so far

    def random(self):
        return Uniform(self)

    def choose(self, probability):
        if self.at == len(self.path):
            self.path.append([True, probability])
        self.at += 1
        return self.path[self.at - 1][0]

    def of(self, program):
        """{result: probability} of program(self) over all outcomes."""
        table = {}
        while True:
            self.at = 0
            result = program(self)
            assert self.at == len(self.path)
            weight = np.prod([p if outcome else 1 - p for outcome, p in self.path])
            table[result] = table.get(result, 0.0) + weight
            while self.path and not self.path[-1][0]:
                self.path.pop()
            if not self.path:
                return table
            self.path[-1][0] = False


class Table:
    """A decoder whose next token depends on the last one alone: probs (V, V); it counts what it holds."""

    def __init__(self, probs):
        with np.errstate(divide="ignore"):
            self.logits = np.log(probs)
        self.vocab_size, self.length, self.committed, self.max_length = len(probs), 0, 0, None

    def send(self, tokens, parents=None):
        self.length += len(tokens)
        return self.logits[np.asarray(tokens)]

    def commit(self, nodes):
        self.length = self.committed = self.committed + len(nodes)

    def rewind(self, length):
        self.length, self.committed = length, min(length, self.committed)


def models(vocabulary, seed=0):
    """P and Q (V, V); one token that P never writes, one that Q never drafts."""
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.ones(vocabulary), (2, vocabulary))
    p[:, 0], q[:, -1] = 0, 0
    p[-1, 1] = 0
    return p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)


def plain(p, n, last=1):
    """{tokens: probability} of n tokens written by the target alone after `last`."""
    table = {}
    for tokens in itertools.product(range(len(p)), repeat=n):
        steps = zip((last, *tokens), tokens)
        table[tokens] = float(np.prod([p[a, b] for a, b in steps]))
    return table


def distance(found, expected):
    """Largest difference of two tables; what one of them lacks counts as 0."""
    return max(abs(found.get(key, 0.0) - expected.get(key, 0.0)) for key in {*found, *expected})


def generated(generate, n):
    """A program for Outcomes.of: the n tokens after the prompt."""
    return lambda rng: tuple(int(t) for t in generate(rng)[0][1:1 + n])


def test_the_enumeration_itself():
    p = np.array([0.1, 0.2, 0.0, 0.7])
    found = Outcomes().of(lambda rng: draw(p, rng))
    assert set(found) == {0, 1, 3} and distance(found, {0: 0.1, 1: 0.2, 3: 0.7}) < ROUNDING
    pair = Outcomes().of(lambda rng: (draw(p, rng), draw(p, rng)))
    assert distance(pair, {(a, b): p[a] * p[b] for a in range(4) for b in range(4)}) < ROUNDING


# -- the rule and the loops ----------------------------------------------------------------------------------

@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_a_chain_has_the_targets_distribution(gamma):
    """gamma + 1 tokens from the real loop with a model's drafts, in however many rounds they take."""
    p, q = models(4 if gamma < 3 else 3)
    n = gamma + 1
    found = Outcomes().of(generated(
        lambda rng: speculative_generate(Table(p), ModelDrafter(Table(q)), [1], n, gamma, 1.0, rng), n))
    assert sum(found.values()) == pytest.approx(1, abs=ROUNDING)
    assert distance(found, plain(p, n)) < ROUNDING


def test_a_greedy_draft_has_the_targets_distribution():
    p, q = models(4)
    found = Outcomes().of(generated(
        lambda rng: speculative_generate(Table(p), ModelDrafter(Table(q), Sampler(0.0)), [1], 3, 2, 1.0, rng),
        3))
    assert distance(found, plain(p, 3)) < ROUNDING


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("widths", [(1, 1), (3,), (2, 1), (2, 2)])
def test_a_tree_has_the_targets_distribution(widths, sample):
    p, q = models(3)
    n = len(widths) + 1
    found = Outcomes().of(generated(
        lambda rng: tree_generate(Table(p), TreeDrafter(Table(q), TreeShape.branching(widths), sample=sample),
                                  [1], n, 1.0, rng), n))
    assert distance(found, plain(p, n)) < ROUNDING


def candidates_of(kind, q, rng, k):
    """k candidates for one position, and the q of each."""
    if kind == "likeliest":
        return list(np.argsort(-q)[:k]), [None] * k
    tokens, qs = [], []
    for _ in range(k):
        qs.append(q)
        tokens.append(draw(q, rng))
        if kind == "without replacement":
            q = residual(q, tokens[-1])
            if not q.any():
                break
    return tokens, qs


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("kind", ["with replacement", "without replacement", "likeliest"])
def test_several_candidates_have_the_targets_distribution(kind, k):
    p, q = models(4)
    p, q = p[1], q[2]

    def program(rng):
        return accept(p, *candidates_of(kind, q, rng, k), rng)[1]

    assert distance(Outcomes().of(program), dict(enumerate(p))) < ROUNDING


def test_a_penalty_over_the_block_has_the_targets_distribution():
    """`verify` under a repetition penalty: the target's second token is penalised for the first."""
    p, q = models(4)
    p = (p + 0.1) / (p + 0.1).sum(1, keepdims=True)
    sampler, logits = Sampler(1.0, repetition_penalty=2.0), np.log(p)

    def program(rng):
        tokens = [draw(q[1], rng)]
        draft = Draft(tokens, [q[1]], ["model"])
        path, token, _ = verify(draft, logits[[1, *tokens]], sampler, [1], rng)
        written = [*tokens[:len(path)], token]
        if len(written) == 1:
            written.append(draw(sampler.probs(logits[token], [1, token]), rng))
        return tuple(written)

    expected = {}
    for a, b in itertools.product(range(4), repeat=2):
        expected[a, b] = sampler.probs(logits[1], [1])[a] * sampler.probs(logits[a], [1, a])[b]
    assert distance(Outcomes().of(program), expected) < ROUNDING


# -- broken rules are caught by the same comparison ----------------------------------------------------------

def not_normalised(p, x, q=None):
    rest = p.copy()
    if q is None:
        rest[x] = 0.0
        return rest
    return np.maximum(p - q, 0.0)


class Misreporting(ModelDrafter):
    """Draws at temperature 0.5 and reports the q of temperature 1."""

    def propose(self, tokens, gamma, rng):
        draft = super().propose(tokens, gamma, rng)
        with np.errstate(divide="ignore"):
            draft.q = [np.exp(self.model.logits[last]) for last in [tokens[-1], *draft.tokens][:-1]]
        return draft


class SaidToBeDrawn(Misreporting):
    """Proposes the likeliest token and reports the q of temperature 1."""


BROKEN = {
    # One candidate does not show it (a draw needs no normalised weights); a second one is tested against it.
    "residual not normalised": ("residual", not_normalised),
    "drawn from p after a refusal": ("residual", lambda p, x, q=None: p),
    "accepted without a test": ("acceptance_probability", lambda p, x, q=None: 1.0),
    "accepted by p alone": ("acceptance_probability", lambda p, x, q=None: float(p[x])),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_caught(name, monkeypatch):
    p, q = models(4)
    right = accept

    def program(rng):
        return right(p[1], *candidates_of("with replacement", q[1], rng, 2), rng)[1]

    assert distance(Outcomes().of(program), dict(enumerate(p[1]))) < ROUNDING
    monkeypatch.setattr(decode_lab, *BROKEN[name])
    assert distance(Outcomes().of(program), dict(enumerate(p[1]))) > 1e-3


@pytest.mark.parametrize("drafter", [Misreporting, SaidToBeDrawn])
def test_a_q_that_was_not_drawn_from_is_caught(drafter):
    p, q = models(3)
    own = Sampler(0.5 if drafter is Misreporting else 0.0)
    found = Outcomes().of(generated(
        lambda rng: speculative_generate(Table(p), drafter(Table(q), own), [1], 2, 1, 1.0, rng), 2))
    assert distance(found, plain(p, 2)) > 1e-3


# -- the demo ------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def quick():
    return console.run_demo(DEMO, QUICK)


def test_formulas_and_enumeration(quick):
    a, b = table(quick, "one-round")
    assert (a["written"], b["written"]) == pytest.approx((0.3, 0.7), abs=1e-15)
    assert (a["residual"], b["residual"], b["recovered"]) == pytest.approx((0, 1, 0.5))
    *right, wrong = whole_table(quick, "exact")["rows"]
    assert len(right) == 3 and max(max(row[1:]) for row in right) < 1e-15 and min(wrong[1:]) > 0.01
    rows = {row[0]: row[1:] for row in whole_table(quick, "textbook")["rows"]}
    assert rows[0.6][:3] == pytest.approx([1.6, 2.176, 2.38336])
    assert rows[0.8][3:] == ["8: 3.09x", "6: 2.47x", "4: 1.87x", "2: 1.22x"]
    assert observation(quick, "above-ceiling")["value"] == pytest.approx(82 / 59)
    alpha = observation(quick, "alpha-meant")["value"]
    assert alpha * (1 + alpha * (1 + alpha)) == pytest.approx(82 / 59 - 1)
    assert not any(t["measured"] for t in quick["tables"]) and len(quick["figures"]) == 1


def test_p_values_are_judged_by_their_number(quick):
    rows = table(quick, "sampled")
    assert [row["decoding"] for row in rows] == ["gamma = 0", "gamma = 1", "gamma = 3", "WRONG, gamma = 3"]
    assert rows[0]["tau"] == 1 < rows[1]["tau"] < rows[2]["tau"]
    assert observation(quick, "like-plain")["at_least"] == observation(quick, "wrong-shows")["at_most"] == 0.05 / 4


def test_the_textbook_tau_uses_the_alpha_that_is_shown(quick):
    alpha = {(row["draft"], row["T"]): row["gamma 8"] for row in table(quick, "toy-alpha")}
    for row in table(quick, "toy-tau"):
        assert row["textbook"] == pytest.approx(expected_tokens(alpha[row["draft"], row["T"]], row["gamma"]))
        assert row["±"] > 0 and row["± t."] > 0 and row["± p."] > 0


def test_few_rounds_are_not_judged(quick):
    found = observation(quick, "tau-outlier")
    assert "fewer than 30" in found["not_judged"] and found["holds"] is None


@pytest.mark.parametrize("flags, broken", [
    (["--alphas", 0.9, "--costs", 0.05], "pays-not-always"), (["--tokens-per-s", 50], "above-ceiling"),
    (["--tokens-per-s", 500], "alpha-meant"), (["--samples", 1, "--vocabulary", 2], "wrong-shows"),
    (["--drafts", "medium", "--new-tokens", 9, "--gamma-max", 4, "--gammas", 3],   # a few rounds say little
     "alpha-predicted tau-textbook tau-position")])
def test_an_edit_changes_the_conclusion(flags, broken):
    found = claims(console.run_demo(DEMO, [*QUICK, *flags]))
    assert not any(found[id] for id in broken.split()) and found["lossless"] and found["output-as-target"]


@pytest.mark.parametrize("p, q", [(0.8, 0.8), (0, 0), (1, 0), (0, 1), (0.1, 0.7)])
def test_any_two_distributions_keep_the_rule(p, q):
    record = console.run_demo(DEMO, [*QUICK, "--p-a", p, "--q-a", q])
    assert [row["written"] for row in table(record, "one-round")] == pytest.approx([p, 1 - p], abs=1e-15)
    assert claims(record)["output-as-target"] and claims(record)["accepted-share"]


def test_the_demo_notices_a_broken_rule(monkeypatch):
    monkeypatch.setattr("lab.measure.exactness.residual", not_normalised)
    assert claims(console.run_demo(DEMO, QUICK))["lossless"] is False


@pytest.mark.parametrize("flags, words", [
    (["--vocabulary", 1], "2 to 12"), (["--gammas", 9], "--gamma-max is 8"), (["--p-a", 1.3], "--p-a must be"),
    (["--gamma-max", 10], "below half"), (["--drafts", "tiny"], "--drafts has no choice"),
    (["--alphas", 1], "below 1")])
def test_bad_input(flags, words):
    with pytest.raises(BadInput, match=words):
        console.run_demo(DEMO, [*QUICK, *flags])


@pytest.mark.slow
def test_as_a_script_in_a_pipe(script, tmp_path, quick):
    done = script(DEMO, *QUICK, "--json", tmp_path / "r.json", encoding="ascii")
    assert done.returncode == 0 and done.stderr == b"", done.stderr
    assert max(map(len, done.stdout.decode("ascii").splitlines())) <= 80
    record = json.loads((tmp_path / "r.json").read_text())
    assert (record["tables"], record["observations"]) == (quick["tables"], quick["observations"])


@pytest.mark.nightly
def test_all_observations_hold_by_default():
    record = console.run_demo(DEMO)
    assert all(claims(record).values()), claims(record)
