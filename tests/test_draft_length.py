"""Draft length policies on rounds that are scripted: no model, no clock."""

import numpy as np
import pytest

from console import BadInput
from decode_lab import (ModelDrafter, PromptLookup, Round, Run, SuffixLookup, autoregressive_generate,
                        speculative_generate)
from fakes import Counted, from_text, random_decoder, script
from hw_specs import chip
from lab.draft_length import CostAware
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


def cost(policy, run):
    return sum(policy.seconds[r.drafted] for r in run.rounds)


# -- what it decides -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("probe", [0.01, 0.05])
def test_nothing_accepted_ends_drafting_and_probes_cost_what_they_may(probe):
    policy = CostAware({1: 1.0, 2: 1.2, 17: 4.2}, probe=probe)
    gammas, run = play(policy, lambda i: 0, 2000)
    stop = gammas.index(0)
    assert 0 < stop <= 6 and gammas[0] > 0
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
        assert not any(gammas[:99]) and 0 < np.count_nonzero(gammas) <= 30
        assert cost(policy, run) <= 3000 * 1.011


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


# -- what it learns from -------------------------------------------------------------------------------------

def test_a_change_of_text_is_followed():
    good = lambda i: 99 if (i // 100) % 2 == 0 else 0
    policy = CostAware({1: 1.0, 2: 1.1, 17: 2.6})
    gammas, run = play(policy, good, 400)
    assert set(gammas[20:100]) == {16} and set(gammas[220:300]) == {16}
    for start in (100, 300):
        # A draft of 16 pays while its first token is accepted once in ten times, so it takes a while to give it up.
        assert 16 not in gammas[start + 20:start + 100] and 0 in gammas[start:start + 32]
        assert sum(gammas[start + 32:start + 100]) <= 7, "it has stopped, and probes one round in ten at most"
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
