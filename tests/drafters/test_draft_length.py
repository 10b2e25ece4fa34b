"""Draft length policies on rounds that are scripted, without a model or a clock."""

from itertools import product

import numpy as np
import pytest

from console import BadInput
from decode_lab import Round, Run
from hw_specs import chip
from lab.drafters.draft_length import AIMD, CostAware, Fixed, Floor, Oracle, round_seconds
from lab.drafters.lookup import PromptLookup
from lab.drafters.model import ConfidentDrafter
from lab.measure.scripted import Counted, random_decoder
from llm_math import best_gamma, best_round, expected_tokens, model, verify_time
from policies import FLAT, STEEP, cost, play, write

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


@pytest.mark.slow
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
    (dict(c=-0.1), "c is -0.1"), (dict(gamma_max=-1), "gamma_max"), (dict(gamma_max=2.5), "gamma_max"),
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
    (lambda: Fixed(-1), "gamma is -1"), (lambda: Fixed(1.5), "gamma is 1.5"), (lambda: Fixed(NAN), "gamma is nan"),
    (lambda: AIMD(least=0), "least is 0"), (lambda: AIMD(first=3), "first is 3"), (lambda: AIMD(4.5), "first is 4.5"),
    (lambda: AIMD(8, 2, 7), "most is 7"), (lambda: AIMD(most=float("inf")), "most is inf"),
    (lambda: Floor(0), "gamma is 0"), (lambda: Floor(floor=NAN), "floor is nan"), (lambda: Floor(floor=1.1), "is 1.1"),
    (lambda: Floor(floor=-0.1), "-0.1"), (lambda: Floor(window=0), "window is 0"), (lambda: Floor(rest=0), "rest is 0"),
    (lambda: Oracle([1, -1], FLAT), "accept length is -1"), (lambda: Oracle([1], {1: 1.0}), "1 to 17"),
    (lambda: Oracle([1], FLAT, -1), "c is -1"), (lambda: Oracle([1], FLAT, gamma_max=-1), "gamma_max is -1"),
    (lambda: round_seconds(FLAT, NAN), "c is nan"), (lambda: round_seconds(lambda n: 2 - n, gamma_max=1), "above 0"),
    (lambda: ConfidentDrafter(ANY, -0.1), "threshold is -0.1"), (lambda: ConfidentDrafter(ANY, 1.01), "is 1.01"),
    (lambda: ConfidentDrafter(ANY, NAN), "threshold is nan")])
def test_what_a_policy_cannot_work_with_is_named_in_one_sentence(make, named):
    with pytest.raises(BadInput, match=named) as refused:
        make()
    assert str(refused.value).endswith(".") and "\n" not in str(refused.value)
