"""Draft length policies on rounds that are scripted, without a model or a clock; then in the loop."""

from itertools import product

import numpy as np
import pytest

from console import BadInput
from decode_lab import Round, Run, Sampler, autoregressive_generate, speculative_generate
from lab.drafters.lookup import PromptLookup, SuffixLookup
from lab.drafters.model import ModelDrafter
from fakes import (Counted, FakeDecoder, exact, from_text, one_hot, outcomes, random_decoder, same_distribution,
                   script)
from hw_specs import chip
from lab.drafters.draft_length import (AIMD, CostAware, Fixed, Floor, Oracle, known_rounds,
                                       round_seconds, steps)
from lab.drafters.model import ConfidentDrafter
from llm_math import best_gamma, best_round, expected_tokens, model, verify_time

FLAT, STEEP = {1: 1.0, 33: 1.0}, {1: 1.0, 33: 25.0}              # seconds by tokens sent: the second 0.75 a token more


def play(policy, would_accept, n, offered=None, run=None):
    """n rounds -> (gammas, Run). would_accept(i): right draft tokens in round i; offered(i): most the drafter has."""
    run, gammas = Run() if run is None else run, []
    for i in range(n):
        gammas.append(policy(run))
        drafted = gammas[-1] if offered is None else min(gammas[-1], offered(i))
        accepted = min(drafted, would_accept(i))
        run.rounds.append(Round(drafted, min(accepted + 1, drafted), accepted, 0.0, 0.0))
    return gammas, run


def write(policy, accepts, n=None):
    """n tokens, all of `accepts` by default, of a text that accepts accepts[i] drafts behind i new tokens -> Run."""
    run, n = Run(), len(accepts) if n is None else n
    while run.n_tokens < n:
        at = run.n_tokens
        drafted = min(policy(run), n - at - 1)                    # as the loop cuts it
        accepted = min(drafted, accepts[at] if at < len(accepts) else 0)
        run.rounds.append(Round(drafted, min(accepted + 1, drafted), accepted, 0.0, 0.0))
    return run


def cost(policy, run):
    return sum(policy.seconds[r.drafted] for r in run.rounds)


POLICIES = {
    "plain": lambda: Fixed(0), "fixed": lambda: Fixed(5), "AIMD": AIMD, "short AIMD": lambda: AIMD(1, 1, 16),
    "floor": Floor, "short floor": lambda: Floor(4, window=3, rest=2),
    "oracle": lambda: Oracle(np.random.default_rng(0).integers(6, size=30), STEEP),
    "cost-aware": lambda: CostAware({1: 1.0, 2: 1.2, 17: 4.2}), "cost-aware, flat": lambda: CostAware(FLAT, 0.05),
}


# -- fixed, AIMD, floor --------------------------------------------------------------------------------------

def test_fixed_is_fixed():
    assert play(Fixed(3), lambda i: i % 5, 20)[0] == [3] * 20 and play(Fixed(0), lambda i: 9, 3)[0] == [0] * 3


def test_aimd_adds_one_when_all_were_accepted_and_halves_after_a_refusal_never_below_four():
    accepts = [99] * 8 + [11, 5, 3, 0] + [99] * 3                 # a refusal of the last token is one
    assert play(AIMD(), lambda i: accepts[i], 15)[0] == [4, 5, 6, 7, 8, 9, 10, 11, 12, 6, 4, 4, 4, 5, 6]


def test_aimd_keeps_to_the_start_and_the_limits_it_is_given():
    accepts = [99] * 4 + [0] * 4 + [99] * 2
    assert play(AIMD(3, 1, 5), lambda i: accepts[i], 10)[0] == [3, 4, 5, 5, 5, 2, 1, 1, 1, 2]
    assert max(play(AIMD(), lambda i: 99, 100)[0]) == 64


def test_aimd_learns_nothing_from_an_empty_draft_and_takes_a_short_one_for_a_whole_one():
    offered = [0, 0, 2, 0, 1, 9]
    assert play(AIMD(), lambda i: 99, 6, lambda i: offered[i])[0] == [4, 4, 4, 5, 5, 6]
    assert play(AIMD(8, 2), lambda i: 1, 3, lambda i: 2)[0] == [8, 4, 2], "a short one that is refused is refused"


def test_the_floor_halves_down_to_none_rests_and_probes_with_one():
    gammas, run = play(Floor(8, window=4, rest=6), lambda i: 0, 46)
    assert gammas == [8] * 4 + [4] * 4 + [2] * 4 + [1] * 4 + ([0] * 6 + [1] * 4) * 3
    assert all(r.tested == min(r.drafted, 1) for r in run.rounds), "a round tests up to its first refusal only"


def test_above_the_floor_it_doubles_up_to_the_first_length():
    policy = Floor(6, window=4, rest=2)
    gammas, run = play(policy, lambda i: 0, 14)
    assert gammas == [6] * 4 + [3] * 4 + [1] * 4 + [0] * 2
    assert play(policy, lambda i: 99, 10, run=run)[0] == [1] * 4 + [2] * 2 + [4] + [6] * 3


@pytest.mark.parametrize("accepted, then", [(3, 0), (4, 1)])
def test_a_share_at_the_floor_is_not_below_it(accepted, then):
    gammas, _ = play(Floor(1, floor=0.5, window=8), lambda i: int(i < accepted), 9)
    assert gammas == [1] * 8 + [then]


def test_the_floor_counts_what_was_tested_and_each_window_by_itself():
    # Rounds of three tests, two accepted: 2/3 in every window of two rounds, although 16 tokens were proposed.
    assert set(play(Floor(8, floor=0.6, window=6), lambda i: 2, 40)[0]) == {8}
    assert set(play(Floor(8, floor=0.7, window=6), lambda i: 2, 6)[0]) == {8, 4, 2}
    # A long good past does not carry a bad window.
    gammas, _ = play(Floor(2, window=4), lambda i: 99 if i < 50 else 0, 56)
    assert gammas == [2] * 54 + [1] * 2


def test_the_floor_waits_while_nothing_is_tested():
    assert set(play(Floor(8, window=2), lambda i: 0, 50, lambda i: 0)[0]) == {8}
    assert Floor().floor == 0.35


# -- the oracle ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("seed", range(12))
def test_the_oracle_costs_what_the_best_of_all_sequences_of_drafts_costs(seed):
    rng = np.random.default_rng(seed)
    accepts = rng.integers(6, size=5).tolist() if seed else [99] * 5
    times = dict(enumerate(rng.uniform(0.5, 3, 4), 1))            # more tokens may well cost less
    oracle = Oracle(accepts, times, c=[0.0, 0.2][seed % 2], gamma_max=3)
    every = [cost(oracle, write(lambda run: gammas[len(run.rounds)], accepts))
             for gammas in product(range(4), repeat=5)]
    assert oracle.cost[0] == pytest.approx(min(every)) == pytest.approx(cost(oracle, write(oracle, accepts)))
    assert len(set(every)) > 1


def texts(n):
    """Accept lengths: easy, hard, alternating, and at random."""
    rng = np.random.default_rng(1)
    turns = [8 * (i // 25 % 2) for i in range(n)]
    return [99] * n, [0] * n, turns, (rng.geometric(0.3, n) - 1).tolist(), rng.integers(3, size=n).tolist()


@pytest.mark.parametrize("seconds", [FLAT, STEEP, {1: 1.0, 2: 1.2, 17: 4.2}, lambda n: 1 + 0.5 * (n % 4 > 1) + n // 9])
@pytest.mark.parametrize("c", [0.0, 0.3])
def test_no_policy_beats_the_oracle(seconds, c):
    for accepts in texts(150):
        oracle = Oracle(accepts, seconds, c)
        least = cost(oracle, write(oracle, accepts))
        assert least == pytest.approx(oracle.cost[0])
        rng = np.random.default_rng(2)
        for policy in (*map(Fixed, range(17)), AIMD(most=16), AIMD(1, 1, 16), Floor(), Floor(16, window=3, rest=2),
                       CostAware(seconds, c), lambda run: int(rng.integers(17))):
            assert cost(oracle, write(policy, accepts)) > least - 1e-9


def test_the_oracle_by_hand():
    # A round of three for 1.4 saves more than two rounds; behind the first token nothing is accepted, and none drafted.
    oracle = Oracle([0, 2, 1, 0, 5, 0], {1: 1.0, 3: 1.4}, gamma_max=2)
    assert [r.drafted for r in write(oracle, [0, 2, 1, 0, 5, 0]).rounds] == [0, 2, 1]
    assert oracle.cost[0] == pytest.approx(1.0 + 1.4 + 1.2) and oracle.cost[-2:] == [1.0, 0.0]
    assert Oracle([], FLAT).cost == [0.0] and Oracle([], FLAT)(Run()) == 0


def test_past_the_text_that_it_knows_the_oracle_drafts_nothing():
    accepts = [2, 0, 3, 1, 2]
    oracle = Oracle(accepts, {1: 1.0, 17: 2.0})
    known, longer = write(oracle, accepts), write(oracle, accepts, n=9)
    assert known.drafted > 0 and [r.drafted for r in longer.rounds] == [r.drafted for r in known.rounds] + [0] * 4
    # Where another rule decides, as sampling does, it goes by the tokens that there are.
    assert [oracle(Run([Round(2, 2, k, 0.0, 0.0)])) for k in range(4)] == [0, 2, 1, 0]


# -- cost-aware: what it decides -----------------------------------------------------------------------------

@pytest.mark.parametrize("probe", [0.01, 0.05])
def test_nothing_accepted_ends_drafting_and_probes_cost_what_they_may(probe):
    policy = CostAware({1: 1.0, 2: 1.2, 17: 4.2}, probe=probe)
    gammas, run = play(policy, lambda i: 0, 2000)
    stop = gammas.index(0)
    assert 0 < stop <= 10 and gammas[0] > 0
    assert cost(policy, Run(run.rounds[:100])) - 100 <= 1 + 100 * probe + 1, "the first guess, and the credit"
    late = [g for g in gammas[100:] if g]
    assert late and set(late) == {1}, "a probe is as cheap as drafts come"
    extra = cost(policy, Run(run.rounds[100:])) - 1900
    assert 0.5 * probe * 1900 < extra <= probe * 1900 * 1.01


def test_everything_accepted_at_flat_cost_drafts_all_there_is():
    gammas, _ = play(CostAware(FLAT, gamma_max=12), lambda i: 99, 30)
    assert set(gammas) == {12}
    assert play(CostAware(FLAT, gamma_max=0), lambda i: 99, 5)[0] == [0] * 5


def test_where_tokens_cost_as_much_as_steps_nothing_is_drafted():
    for seconds, c in (({1: 1.0, 17: 17.0}, 0.0), (FLAT, 1.0)):      # the target's arithmetic, or the draft's
        policy = CostAware(seconds, c)
        gammas, run = play(policy, lambda i: 0, 3000)
        assert gammas[0] == 1 and not any(gammas[1:100]) and 1 < np.count_nonzero(gammas) <= 31
        assert cost(policy, run) <= 3000 * 1.01 + 1
        never = CostAware(seconds, c, credit=0.0)
        assert not any(play(never, lambda i: 0, 99)[0])


def test_a_steep_cost_keeps_drafts_short():
    # Two tokens in 1.75 s beat one in 1 s, and each further token, if it is accepted, gains less and less.
    gammas, _ = play(CostAware(STEEP), lambda i: i % 4, 60)
    assert max(gammas) <= 2
    half = [play(CostAware(seconds), lambda i: 99 * (i % 2), 200)[0][-50:] for seconds in (FLAT, STEEP)]
    assert np.mean(half[1]) < 2 < 15 < np.mean(half[0])


@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.7, 0.8, 0.9])
@pytest.mark.parametrize("c", [0.01, 0.05, 0.1, 0.2, 0.4])
def test_geometric_acceptance_leads_to_the_textbooks_gamma(alpha, c):
    accepts = np.random.default_rng(7).geometric(1 - alpha, 2000) - 1
    gammas = np.array(play(CostAware(FLAT, c, 32, discount=0.98), lambda i: accepts[i], 2000)[0][500:])
    best, gain = best_gamma(alpha, c, 32)
    assert abs(np.median(gammas) - best) <= 1
    assert expected_tokens(alpha, gammas).mean() / (1 + gammas * c).mean() > 0.93 * gain


@pytest.mark.parametrize("batch", [1, 64, 256])
@pytest.mark.parametrize("alpha", [0.5, 0.8])
def test_on_a_chip_it_finds_the_cost_models_gamma(batch, alpha):
    target, draft, h100, context = model("pythia-2.8b"), model("pythia-70m"), chip("h100-sxm"), 500
    best, _ = best_round(target, draft, h100, batch, context, alpha, max_gamma=16)
    times = {n: verify_time(target, h100, batch, context, n) for n in range(1, 18)}
    step = verify_time(draft, h100, batch, context, 1, 0.3e-3)
    accepts = np.random.default_rng(3).geometric(1 - alpha, 2000) - 1
    gammas, _ = play(CostAware(times, step / times[1], discount=0.98), lambda i: accepts[i], 2000)
    assert abs(np.median(gammas[500:]) - best) <= 1


# -- cost-aware: what it learns from -------------------------------------------------------------------------

def test_a_change_of_text_is_followed():
    good = lambda i: 99 if (i // 100) % 2 == 0 else 0
    policy = CostAware({1: 1.0, 2: 1.1, 17: 2.6})
    gammas, run = play(policy, good, 400)
    assert set(gammas[20:100]) == {16} and set(gammas[220:300]) == {16}
    for start in (100, 300):
        # A draft of 16 pays while its first token is accepted once in ten times, so it takes a while to give it up.
        assert 16 not in gammas[start + 20:start + 100] and 0 in gammas[start:start + 48]
        assert sum(gammas[start + 48:start + 100]) <= 7, "it has stopped, and probes one round in ten at most"
    back = next(i for i in range(200, 300) if gammas[i] > 8)
    assert 200 < back <= 220, "and comes back: a dozen rounds to the next probe, and each that pays is followed"


def test_a_probe_that_paid_is_followed_by_another():
    policy = CostAware({1: 1.0, 2: 1.5, 17: 9.0})
    gammas, run = play(policy, lambda i: 0, 200)
    probes = [i for i, gamma in enumerate(gammas) if gamma and i > 60]
    assert probes and not any(gammas[i + 1] for i in probes), "one that failed waits"
    ended = len(run.rounds)
    gammas, _ = play(policy, lambda i: 1, 60, run=run)
    first = next(i for i, gamma in enumerate(gammas) if gamma)
    assert ended + first - probes[-1] == 51 and all(gammas[first:])


def test_short_and_empty_drafts_are_no_refusals():
    """A lookup has three tokens to offer at most, and every other round none; all are accepted."""
    policy = CostAware({1: 1.0, 17: 1.8})
    gammas, run = play(policy, lambda i: 99, 60, offered=lambda i: 3 * (i % 2))
    assert set(gammas[10:]) == {16} and min(policy.alphas()) > 0.9
    assert run.drafted == 90 == run.accepted
    # Where nothing was drafted nothing was learnt.
    idle = CostAware({1: 1.0, 17: 1.8})
    first = idle(Run())
    gammas, _ = play(idle, lambda i: 0, 50, offered=lambda i: 0)
    assert set(gammas) == {first}


def test_the_estimate_is_by_position():
    """Always two right tokens, never a third: two are drafted, where one rate for all positions would go on."""
    policy = CostAware({1: 1.0, 17: 2.6})
    gammas, run = play(policy, lambda i: 2, 100)
    first, second, third, *deeper = policy.alphas()
    assert min(first, second) > 0.95 and third < 0.4 and max(deeper) < 0.4
    # A third is tried again, now and then, when its refusals are all but forgotten.
    assert set(gammas[10:]) == {2, 3} and gammas.count(3) < 40 < gammas.count(2)


def test_each_round_is_read_once_and_a_new_run_starts_afresh():
    policy = CostAware({1: 1.0, 2: 1.2, 17: 4.2})
    fresh = policy(Run())
    gammas, run = play(policy, lambda i: 0, 20)
    assert gammas[0] == fresh > 0 == gammas[-2]
    policy(run)                                                   # the last round is read now, and only now
    state = list(policy.tested)
    policy(run)
    assert policy.tested == state and policy(Run()) == fresh
    assert play(policy, lambda i: 0, 20)[0] == gammas, "the same rounds, the same drafts"

    Counted.reads = 0
    play(policy, lambda i: i % 3, 200, run=Run(Counted()))
    assert Counted.reads <= 200, "rounds are read again"


class Matching:
    """A drafter that tells how long its match is."""

    name, matched = "matching", 0


def test_with_a_lookup_the_estimate_is_by_tokens_copied():
    """The first copied token is always wrong, and after three it always goes on."""
    drafter = Matching()
    policy, run = CostAware({1: 1.0, 2: 1.3, 17: 5.8}, drafter=drafter), Run()
    for i in range(60):
        drafter.matched = 1 if i % 2 else 3
        gamma = policy(run)
        accepted = 0 if i % 2 else gamma
        run.rounds.append(Round(gamma, min(accepted + 1, gamma), accepted, 0.0, 0.0))
    chosen = {}
    for drafter.matched in (1, 3, 5, 400):
        chosen[drafter.matched] = CostAware.choose(policy)
    assert chosen[1] == 0 and min(chosen[3], chosen[5], chosen[400]) >= 12
    # What was learnt behind a match of three serves one of five, which was never seen.
    drafter.matched = 3
    policy.choose()
    three = policy.alphas()
    drafter.matched = 5
    policy.choose()
    assert policy.alphas()[:10] == three[2:12] and all(0.9 < alpha <= 1 for alpha in three)


def test_a_copy_that_held_for_long_is_trusted_from_the_start():
    drafter, found = Matching(), {}
    for drafter.matched in (0, 1, 8):
        policy = CostAware({1: 1.0, 2: 1.3, 17: 5.8}, drafter=drafter)
        found[drafter.matched] = policy(Run()), policy.alphas()[0]
    assert [alpha for _, alpha in found.values()] == [0.5, 0.5, 0.8] and found[8][0] > found[1][0]


# -- what it is given ----------------------------------------------------------------------------------------

def test_times_between_the_measured_ones_are_interpolated():
    by_table = CostAware({17: 4.2, 1: 1.0, 2: 1.2}, 0.1)
    assert by_table.seconds == pytest.approx([1.0] + [1.2 + 0.2 * (g - 1) + 0.1 * g for g in range(1, 17)])
    assert CostAware(lambda n: 1.0 + 0.2 * (n - 1), 0.1).seconds == pytest.approx(by_table.seconds)


@pytest.mark.parametrize("options, named", [
    (dict(seconds={1: 1.0, 16: 2.0}), "17"), (dict(seconds={2: 1.0, 17: 2.0}), "1 to 17"),
    (dict(seconds={}), "1 to 17"),
    (dict(seconds={1: 0.0, 17: 1.0}), "above 0"), (dict(seconds=lambda n: float("nan")), "nan"),
    (dict(c=-0.1), "c = -0.1"), (dict(gamma_max=-1), "gamma_max"), (dict(gamma_max=2.5), "gamma_max"),
    (dict(discount=0.0), "discount"), (dict(weight=0), "weight"), (dict(probe=0), "probe"),
    (dict(drafter=PromptLookup()), "lookup")])
def test_impossible_arguments_are_refused(options, named):
    with pytest.raises(BadInput, match=named):
        CostAware(**{"seconds": FLAT, **options})


def test_a_rounds_seconds_are_the_targets_and_the_drafts():
    assert round_seconds({1: 2.0, 2: 2.5, 4: 3.5}, 0.1, 3) == pytest.approx([2.0, 2.7, 3.4, 4.1])
    assert round_seconds(lambda n: n, 0.5, 2) == pytest.approx([1.0, 2.5, 4.0])
    assert round_seconds({1: 3.0}, 0.5, 0) == [3.0] and len(round_seconds(FLAT)) == 17


NAN, ANY = float("nan"), random_decoder(3, 0)


@pytest.mark.parametrize("make, named", [
    (lambda: Fixed(-1), "gamma = -1"), (lambda: Fixed(1.5), "gamma = 1.5"), (lambda: Fixed(NAN), "gamma = nan"),
    (lambda: AIMD(least=0), "least = 0"), (lambda: AIMD(first=3), "first = 3"), (lambda: AIMD(4.5), "first = 4.5"),
    (lambda: AIMD(8, 2, 7), "most = 7"), (lambda: AIMD(most=float("inf")), "most = inf"),
    (lambda: Floor(0), "gamma = 0"), (lambda: Floor(floor=NAN), "floor = nan"), (lambda: Floor(floor=1.1), "= 1.1"),
    (lambda: Floor(floor=-0.1), "-0.1"), (lambda: Floor(window=0), "window = 0"), (lambda: Floor(rest=0), "rest = 0"),
    (lambda: Oracle([1, -1], FLAT), "accept length of -1"), (lambda: Oracle([1], {1: 1.0}), "1 to 17"),
    (lambda: Oracle([1], FLAT, -1), "c = -1"), (lambda: Oracle([1], FLAT, gamma_max=-1), "gamma_max = -1"),
    (lambda: round_seconds(FLAT, NAN), "c = nan"), (lambda: round_seconds(lambda n: 2 - n, gamma_max=1), "above 0"),
    (lambda: ConfidentDrafter(ANY, -0.1), "threshold = -0.1"), (lambda: ConfidentDrafter(ANY, 1.01), "= 1.01"),
    (lambda: ConfidentDrafter(ANY, NAN), "threshold = nan")])
def test_what_a_policy_cannot_work_with_is_named_in_one_sentence(make, named):
    with pytest.raises(BadInput, match=named) as refused:
        make()
    assert str(refused.value).endswith(("would be right.", "gamma_max + 1.")) and "\n" not in str(refused.value)


# -- a draft that ends by itself -----------------------------------------------------------------------------

CONFIDENCE = {                                                    # the target's sampler, the drafter's own
    "greedy": (Sampler(), None), "greedy, penalty": (Sampler(repetition_penalty=1.5), None),
    "sampled": (Sampler(1.0), None), "all filters": (Sampler(0.8, 4, 0.9, 0.05, 1.4), None),
    "cooler": (Sampler(1.0), Sampler(0.5)), "greedy for sampled": (Sampler(1.0), Sampler()),
}


@pytest.mark.parametrize("kind", CONFIDENCE)
@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.45, 0.7, 1.0])
def test_a_draft_ends_behind_its_first_unlikely_token(kind, threshold):
    (given, own), target, lengths = CONFIDENCE[kind], random_decoder(6, 0), set()
    sampler = own or given
    soft = Sampler(1.0, repetition_penalty=sampler.repetition_penalty) if sampler.greedy else sampler
    for seed in range(25):
        model, prompt = random_decoder(6, seed, 2.0), [seed % 6, 3, 1]
        whole, drafter = ModelDrafter(random_decoder(6, seed, 2.0), own), ConfidentDrafter(model, threshold, own)
        whole.start(target, given, prompt)
        drafter.start(target, given, prompt)
        whole = whole.propose(prompt, 6, np.random.default_rng(seed))
        draft = drafter.propose(prompt, 6, np.random.default_rng(seed))
        told = [soft.probs(model._logits(tuple(h)), h)[t]
                for i, t in enumerate(whole.tokens) for h in [prompt + whole.tokens[:i]]]
        n = next((i + 1 for i, p in enumerate(told) if p < threshold), 6)
        assert draft.tokens == whole.tokens[:n] and len(draft.q) == len(draft.sources) == n == model.forwards
        assert all(a is b is None or (a == b).all() for a, b in zip(draft.q, whole.q))
        lengths.add(n)
    assert threshold != 0.0 or lengths == {6}
    assert threshold != 0.45 or len(lengths) > 2, "the case tells nothing"


def test_a_token_at_the_threshold_is_not_below_it():
    even = FakeDecoder(lambda h: np.zeros(4), 4)
    for sampler in (Sampler(), Sampler(1.0)):
        for threshold, n in ((0.25, 3), (0.2501, 1)):
            drafter = ConfidentDrafter(even, threshold)
            drafter.start(random_decoder(4, 0), sampler, [0])
            assert len(drafter.propose([0], 3, np.random.default_rng(0)).tokens) == n


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(repetition_penalty=1.01), Sampler(1.0)])
@pytest.mark.parametrize("row", [(0.0, 4.0, 0.0, 9.0, 9.0), (0.0, 4.0, 0.0, -9.0, -9.0), (0.0, 4.0)])
def test_confidence_is_over_the_targets_ids_however_the_drafts_rows_are_padded(sampler, row):
    """Token 1 has at least e^4 / (e^4 + 2) = 0.965 of the target's three ids; what the padding holds does not count."""
    drafter = ConfidentDrafter(FakeDecoder(lambda h: np.array(row), len(row), tokenizer="same"), 0.9)
    drafter.start(random_decoder(3, 0, tokenizer="same"), sampler, [0])
    assert drafter.propose([0], 3, np.random.default_rng(1)).tokens == [1] * 3


def test_in_the_loop_a_confident_drafter_makes_the_same_rounds_of_fewer_drafts():
    """Every third token comes as a guess, with a third for each of three ids, and is wrong."""
    right = [i % 12 for i in range(90)]

    def told(history):
        n = len(history)
        return one_hot(right[n], 16) if n % 3 else 5.0 * np.isin(np.arange(16), [15, 14, 13])

    whole, confident = (speculative_generate(script(right, 16), make(FakeDecoder(told, 16)), right[:4], 60, 5)[1]
                        for make in (ModelDrafter, ConfidentDrafter))
    assert [r.drafted for r in whole.rounds[:4]] == [5] * 4 and whole.alpha == pytest.approx(confident.alpha)
    # The guess is the last of each draft: the same rounds, and nothing drafted behind it.
    assert [r.accepted for r in confident.rounds] == [r.accepted for r in whole.rounds] == [2] * 20
    assert [r.drafted for r in confident.rounds[:-1]] == [3] * 19


# -- in the loop ---------------------------------------------------------------------------------------------

def test_in_the_loop_it_goes_to_the_longest_draft_and_stops():
    right = list(range(12)) * 8
    flat = CostAware(FLAT, gamma_max=8)
    _, run = speculative_generate(script(right, 16), from_text(right, (), 16), right[:5], 60, flat)
    assert {r.drafted for r in run.rounds[:-1]} == {8} and run.alpha == 1
    wrong = from_text(right, range(96), 16)
    _, run = speculative_generate(script(right, 16), wrong, right[:5], 60, CostAware({1: 1, 2: 1.2, 17: 4.2}))
    assert run.accepted == 0 and 0 < run.drafted < 20


@pytest.mark.parametrize("seconds", [FLAT, STEEP, {1: 1.0, 2: 1.1, 33: 4.2}])
@pytest.mark.parametrize("make", [lambda: ModelDrafter(random_decoder(5, 99)), PromptLookup, SuffixLookup])
def test_greedy_output_is_that_of_plain_decoding(make, seconds):
    drafter = make()
    policy = CostAware(seconds, drafter=drafter if isinstance(drafter, SuffixLookup) else None)
    for seed in range(6):
        prompt = np.random.default_rng(seed).integers(5, size=6)
        plain, _ = autoregressive_generate(random_decoder(5, seed), prompt, 50)
        tokens, _ = speculative_generate(random_decoder(5, seed), drafter, prompt, 50, policy)
        assert tokens.tolist() == plain.tolist()


DRAFTERS = {
    "model": lambda: ModelDrafter(random_decoder(5, 99)), "lookup": PromptLookup,
    "confident": lambda: ConfidentDrafter(random_decoder(5, 99), 0.5),
    "padded confident": lambda: ConfidentDrafter(random_decoder(9, 99, tokenizer="same"), 0.5),
}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("name", POLICIES)
def test_with_every_policy_greedy_output_is_that_of_plain_decoding(name, kind):
    """One policy and one drafter over all runs; EOS inside a draft, and a penalty, among them."""
    policy, drafter = POLICIES[name](), DRAFTERS[kind]()
    stops, rounds = set(), []
    for seed, penalty in product(range(5), (1.0, 1.3)):
        target, sampler = random_decoder(5, seed, tokenizer="same"), Sampler(repetition_penalty=penalty)
        prompt, eos = np.random.default_rng(seed).integers(5, size=6), (4,) if seed % 2 else ()
        plain, plain_run = autoregressive_generate(target, prompt, 40, sampler=sampler, eos=eos)
        tokens, run = speculative_generate(target, drafter, prompt, 40, policy, sampler=sampler, eos=eos)
        assert tokens.tolist() == plain.tolist() and run.stop == plain_run.stop
        stops.add(run.stop)
        rounds += run.rounds
    assert stops == {"eos", "budget"}
    assert name == "plain" or 0 < Run(rounds).accepted < Run(rounds).drafted, "the case tells nothing"


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_may_outlive_its_runs_and_reads_each_round_once(name):
    policy, rounds = POLICIES[name](), []
    for seed in (1, 2, 1):
        target, drafter = random_decoder(5, seed), ModelDrafter(random_decoder(5, seed, 1.4))
        _, run = speculative_generate(target, drafter, [0, 1], 60, policy)
        rounds.append([(r.drafted, r.accepted) for r in run.rounds])
    assert rounds[0] == rounds[2], "the same call, the same drafts"
    Counted.reads = 0
    play(policy, lambda i: i % 3, 200, run=Run(Counted()))
    assert Counted.reads == 199


def test_the_loop_cuts_a_draft_at_the_budget_and_the_policy_goes_on_afresh():
    right, policy = list(range(12)) * 8, AIMD()
    for n_new, drafted in ((30, [4, 5, 6, 7, 3]), (3, [2]), (1, [0]), (12, [4, 5, 0])):
        _, run = speculative_generate(script(right, 16), from_text(right, (), 16), right[:5], n_new, policy)
        assert [r.drafted for r in run.rounds] == drafted and run.n_tokens == n_new
    # An EOS inside a draft ends the run, and the next one knows nothing of it.
    for _ in range(2):
        _, run = speculative_generate(script(right, 16), from_text(right, (), 16), right[:5], 30, policy, eos=[1])
        assert [(r.drafted, r.accepted) for r in run.rounds] == [(4, 4), (5, 3)] and run.stop == "eos"


def test_in_the_loop_the_oracle_meets_the_accept_lengths_it_was_told():
    right, wrong = list(range(12)) * 8, {7, 8, 9, 15, 24, 25, 40}
    accepts = [next(k for k in range(99) if 5 + i + k in wrong or 5 + i + k == len(right)) for i in range(60)]
    oracle = Oracle(accepts, {1: 1.0, 17: 5.0}, 0.02)
    for n_new in (60, 80):                                        # and past what it knows
        _, run = speculative_generate(script(right, 16), from_text(right, wrong, 16), right[:5], n_new, oracle)
        assert cost(oracle, run) == pytest.approx(oracle.cost[0] + (n_new - 60) * 1.0)
        assert run.alpha == 1, "it drafts no token that is refused"


# Of each what changes its mind within three or four tokens.
BRIEF = {
    "plain": lambda: Fixed(0), "fixed": lambda: Fixed(2), "AIMD": lambda: AIMD(1, 1),
    "floor": lambda: Floor(2, window=1, rest=1),
    "cost-aware": lambda: CostAware({1: 1.0, 2: 1.3, 3: 1.6}, gamma_max=2),
    "oracle": lambda: Oracle([2, 1, 0, 1], FLAT, gamma_max=2),
    "oracle of less": lambda: Oracle([2, 1, 0], FLAT, gamma_max=2),
}
MODELS = {
    "model": lambda: ModelDrafter(random_decoder(3, 2, 1.0)), "lookup": PromptLookup,
    "another temperature": lambda: ModelDrafter(random_decoder(3, 2, 1.0), Sampler(2.0)),
    "confident": lambda: ConfidentDrafter(random_decoder(3, 2, 1.0), 0.45),
}


def law_of(monkeypatch, drafter, gamma, sampler, n_new, eos=(), target=None):
    """(law of the n_new tokens, law of plain sampling, the rounds of all paths), enumerated."""
    target, prompt, rounds = target or random_decoder(3, 1, 1.0), [0, 1, 0], []

    def run(rng):
        tokens, run = speculative_generate(target, drafter, prompt, n_new, gamma, rng=rng, sampler=sampler, eos=eos)
        rounds.extend(run.rounds)
        return tuple(tokens[3:].tolist())

    return outcomes(run), exact(target._logits, sampler, prompt, n_new, eos), rounds


@pytest.mark.parametrize("sampler, n_new, eos", [(Sampler(0.8), 3, ()), (Sampler(0.8), 3, (0,)),
                                                 (Sampler(1.0, top_k=2, repetition_penalty=1.3), 4, ())])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", BRIEF)
def test_with_every_policy_sampled_output_has_the_targets_distribution(name, kind, sampler, n_new, eos, monkeypatch):
    policy, asked = BRIEF[name](), set()

    def gamma(run):
        asked.add((len(run.rounds), policy(run)))
        return policy(run)

    law, plain, rounds = law_of(monkeypatch, MODELS[kind](), gamma, sampler, n_new, eos)
    assert same_distribution(law, plain)
    assert name == "plain" or 0 < Run(rounds).accepted < sum(r.tested for r in rounds)
    if name not in ("plain", "fixed"):
        assert len({gamma for i, gamma in asked if i == 1}) > 1, "the second draft does not depend on the first"


CONFIDENT = {                                                     # the target's sampler, the drafter's own
    "same": (Sampler(0.8), None), "warmer": (Sampler(0.8), Sampler(1.6)), "greedy": (Sampler(0.8), Sampler()),
    "penalty": (Sampler(1.0, repetition_penalty=1.7), None), "top-k": (Sampler(1.0), Sampler(0.4, top_k=2)),
}


@pytest.mark.parametrize("order", [1, 3])
@pytest.mark.parametrize("kind", CONFIDENT)
def test_a_draft_that_ends_by_itself_leaves_the_targets_distribution(kind, order, monkeypatch):
    (sampler, own), target, both = CONFIDENT[kind], random_decoder(3, 1, 1.0, order), False
    n_new = 4 if kind == "greedy" else 3                          # its first draft is always the same, not its second
    for threshold in (0.3, 0.45, 0.6, 0.75):
        drafter = ConfidentDrafter(random_decoder(3, 4, 1.0, order), threshold, own)
        law, plain, rounds = law_of(monkeypatch, drafter, 2, sampler, n_new, target=target)
        assert same_distribution(law, plain)
        # Rounds with room for two drafts: the first; of four tokens also the second, behind a refusal at once.
        both |= {1, 2} == {r.drafted for last, r in zip([None, *rounds], rounds)
                           if r.first or n_new == 4 and last.first and last.accepted == 0}
    assert both, "all drafts are of one length"


@pytest.mark.parametrize("size", [2, 4])
def test_so_it_does_with_rows_padded_differently(size, monkeypatch):
    target = random_decoder(3, 1, 1.0, tokenizer="same")
    drafter = ConfidentDrafter(random_decoder(size, 5, 1.0, tokenizer="same"), 0.45)
    law, plain, rounds = law_of(monkeypatch, drafter, 2, Sampler(0.8), 3, target=target)
    assert same_distribution(law, plain) and {1, 2} <= {r.drafted for r in rounds if r.first}


def test_longer_drafts_that_end_by_themselves_too(monkeypatch):
    """Three drafts deep, two tokens possible at each place: a draft of three, of two and of one."""
    sampler = Sampler(1.0, top_k=2)
    drafter = ConfidentDrafter(random_decoder(3, 2, 1.0, 3), 0.5)
    law, plain, rounds = law_of(monkeypatch, drafter, AIMD(3, 1), sampler, 4, target=random_decoder(3, 1, 1.0, 3))
    assert same_distribution(law, plain) and {r.drafted for r in rounds if r.first} == {1, 2, 3}


class Dropping(ConfidentDrafter):
    """The mistake: the unlikely token itself is left out."""

    def propose(self, tokens, gamma, rng):
        draft = super().propose(tokens, gamma, rng)
        if draft.tokens and draft.q[-1][draft.tokens[-1]] < self.threshold:
            for column in (draft.tokens, draft.q, draft.sources):
                column.pop()
        return draft


def test_a_draft_cut_before_a_token_because_of_that_token_bends_the_distribution(monkeypatch):
    law, plain, _ = law_of(monkeypatch, Dropping(random_decoder(3, 4, 1.0), 0.45), 2, Sampler(0.8), 3)
    assert not same_distribution(law, plain, 0.01)


# -- rounds counted and priced -------------------------------------------------------------------------------

def test_steps_by_hand():
    seconds = round_seconds({1: 2.0, 2: 2.4, 3: 3.0}, 0.1, 2)         # 2.0, 2.4 + 0.2, 3.0 + 0.4
    run = Run([Round(drafted, 0, 0, 9.0, 9.0) for drafted in (0, 2, 1, 2)])
    assert steps(run, seconds) == pytest.approx((2.0 + 3.4 + 2.6 + 3.4) / 2.0)
    assert steps(Run(), seconds) == 0 and steps(Run(run.rounds[:1]), seconds) == 1, "a plain round is one step"
    oracle = Oracle([0, 2, 1, 0, 5, 0], {1: 1.0, 3: 1.4}, gamma_max=2)
    assert steps(write(oracle, [0, 2, 1, 0, 5, 0]), oracle.seconds) == pytest.approx(oracle.cost[0])


def seen(run):
    return [(r.drafted, r.tested, r.accepted, r.first) for r in run.rounds]


@pytest.mark.parametrize("n", [1, 2, 40])
@pytest.mark.parametrize("right", [0.0, 0.5, 0.85, 1.0])
@pytest.mark.parametrize("name", POLICIES)
def test_known_rounds_are_those_of_the_loop(name, right, n):
    """A draft that is right where it is: what the loop makes of it, and what its accept lengths tell beforehand."""
    rng, prompt = np.random.default_rng(3), [1, 2, 3]
    text = [*prompt, *rng.integers(5, size=n).tolist()]
    good = rng.random(n) < right
    drafted = [*prompt, *(t if ok else (t + 1) % 5 for t, ok in zip(text[3:], good))]
    accepts = [next((k for k in range(n - at) if not good[at + k]), n - at) for at in range(n)]
    tokens, run = speculative_generate(script(text + [0], 5), ModelDrafter(script(drafted + [0], 5)), prompt, n,
                                       POLICIES[name]())
    known = known_rounds(POLICIES[name](), accepts)
    assert tokens.tolist() == text and seen(known) == seen(run) and known.n_tokens == n
    assert known.seconds == 0 and known.tau == run.tau and (known.alpha == run.alpha or not run.drafted)


def test_known_rounds_of_nothing_and_of_numpy():
    assert known_rounds(Fixed(3), []).rounds == []
    run = known_rounds(Fixed(3), np.array([9, 0, 1, 1, 0]))
    assert seen(run) == [(3, 3, 3, True), (0, 0, 0, False)], "no draft reaches past the end"
    assert all(type(x) is int for r in run.rounds for x in (r.drafted, r.tested, r.accepted))
