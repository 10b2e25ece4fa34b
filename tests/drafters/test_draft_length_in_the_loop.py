"""Draft length policies in the loop, over drafters, and rounds counted and priced."""

from itertools import product

import numpy as np
import pytest

from decode_lab import Round, Run, Sampler, autoregressive_generate, speculative_generate
from lab.drafters.draft_length import (
    AIMD,
    CostAware,
    Fixed,
    Floor,
    Oracle,
    generate_in_a_row,
    round_seconds,
    steps,
)
from lab.drafters.lookup import PromptLookup, SuffixLookup
from lab.drafters.model import ConfidentDrafter, ModelDrafter
from lab.measure.enumeration import same_distribution
from lab.measure.scripted import Counted, from_text, random_decoder, script
from policies import FLAT, POLICIES, STEEP, cost, law_of, play, write

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


def test_several_requests_in_a_row_are_one_run_to_the_policy():
    right = list(range(12)) * 4
    target, wrong = script(right, 16), from_text(right, range(48), 16)
    known, aimd = [], AIMD(first=8, least=1)

    def policy(run):
        known.append(len(run.rounds))
        return aimd(run)

    texts, run = generate_in_a_row([target] * 2, wrong, [right[:4], right[:7]], 6, policy)
    assert [text.tolist() for text in texts] == [right[:10], right[:13]]
    assert known == list(range(12)) and len(run.rounds) == 12
    assert [r.first for r in run.rounds] == [True] + [False] * 5 + [True] + [False] * 5
    assert [r.drafted for r in run.rounds] == [5, 4, 2, 1, 1, 0, 1, 1, 1, 1, 1, 0], "it does not begin again with 8"


DRAFTERS = {
    "model": lambda: ModelDrafter(random_decoder(5, 99)), "lookup": PromptLookup,
    "confident": lambda: ConfidentDrafter(random_decoder(5, 99), 0.5),
    "padded confident": lambda: ConfidentDrafter(random_decoder(9, 99, tokenizer="same"), 0.5),
}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.slow
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


@pytest.mark.parametrize("sampler, n_new, eos", [(Sampler(0.8), 3, ()), (Sampler(0.8), 3, (0,)),
                                                 (Sampler(1.0, top_k=2, repetition_penalty=1.3), 4, ())])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", BRIEF)
@pytest.mark.slow
def test_with_every_policy_sampled_output_has_the_targets_distribution(name, kind, sampler, n_new, eos):
    policy, asked = BRIEF[name](), set()

    def gamma(run):
        asked.add((len(run.rounds), policy(run)))
        return policy(run)

    law, plain, rounds = law_of(MODELS[kind](), gamma, sampler, n_new, eos)
    assert same_distribution(law, plain)
    assert name == "plain" or 0 < Run(rounds).accepted < sum(r.tested for r in rounds)
    if name not in ("plain", "fixed"):
        assert len({gamma for i, gamma in asked if i == 1}) > 1, "the second draft does not depend on the first"


# -- rounds counted and priced -------------------------------------------------------------------------------

def test_steps_by_hand():
    seconds = round_seconds({1: 2.0, 2: 2.4, 3: 3.0}, 0.1, 2)         # 2.0, 2.4 + 0.2, 3.0 + 0.4
    run = Run([Round(drafted, 0, 0, 9.0, 9.0) for drafted in (0, 2, 1, 2)])
    assert steps(run, seconds) == pytest.approx((2.0 + 3.4 + 2.6 + 3.4) / 2.0)
    assert steps(Run(), seconds) == 0 and steps(Run(run.rounds[:1]), seconds) == 1, "a plain round is one step"
    oracle = Oracle([0, 2, 1, 0, 5, 0], {1: 1.0, 3: 1.4}, gamma_max=2)
    assert steps(write(oracle, [0, 2, 1, 0, 5, 0]), oracle.seconds) == pytest.approx(oracle.cost[0])
