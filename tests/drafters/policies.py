"""Rounds without a model, and the policies that the tests of draft lengths run over."""

import numpy as np

from decode_lab import Round, Run, speculative_generate
from lab.drafters.draft_length import AIMD, CostAware, Fixed, Floor, Oracle
from lab.measure.enumeration import exact, outcomes
from lab.measure.scripted import random_decoder

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


def law_of(drafter, gamma, sampler, n_new, eos=(), target=None):
    """(law of the n_new tokens, law of plain sampling, the rounds of all paths), enumerated."""
    target, prompt, rounds = target or random_decoder(3, 1, 1.0), [0, 1, 0], []

    def run(rng):
        tokens, run = speculative_generate(target, drafter, prompt, n_new, gamma, rng=rng, sampler=sampler, eos=eos)
        rounds.extend(run.rounds)
        return tuple(tokens[3:].tolist())

    return outcomes(run), exact(target._logits, sampler, prompt, n_new, eos), rounds
