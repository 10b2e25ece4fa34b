"""The contract of draft length policies, over every one in the registry: a callable, run -> whole number of tokens."""

import copy

import numpy as np
import pytest

from console import BadInput
from decode_lab import Round, Run, Sampler, autoregressive_generate, speculative_generate
from lab.drafters.draft_length import CostAware
from lab.drafters.lookup import SuffixLookup
from lab.drafters.model import ModelDrafter
from lab.drafters.trees import TreeDrafter, TreeShape
from lab.measure.enumeration import exact, outcomes, same_distribution
from lab.measure.scripted import FakeDecoder, random_decoder, table_logits
from registry import CURVE, POLICIES


@pytest.fixture(params=POLICIES)
def case(request):
    return POLICIES[request.param]


def rounds(seed, n=60):
    """Rounds of all kinds: refused at once, in part and not at all, shorter than asked for, and empty."""
    rng, made = np.random.default_rng(seed), []
    for _ in range(n):
        drafted = int(rng.integers(6))
        accepted = int(rng.integers(drafted + 1))
        made.append(Round(drafted, min(accepted + 1, drafted), accepted, rng.random(), rng.random(),
                          first=not made))
    return made


def lengths(policy, past):
    """What it chooses before each of these rounds, and behind the last."""
    run, chosen = Run(), []
    for each in past:
        chosen.append(policy(run))
        run.rounds.append(each)
    return [*chosen, policy(run)]


@pytest.mark.parametrize("seed", range(4))
def test_it_returns_whole_numbers_that_are_not_negative(case, seed):
    for gamma in lengths(case.make(), rounds(seed)):
        assert isinstance(gamma, (int, np.integer)) and not isinstance(gamma, bool) and gamma >= 0


@pytest.mark.parametrize("seed", range(4))
def test_it_starts_afresh_with_a_new_run(case, seed):
    used = case.make()
    want = lengths(case.make(), rounds(seed))
    lengths(used, rounds(seed + 10))
    assert lengths(used, rounds(seed)) == want
    assert lengths(used, rounds(seed)) == want


@pytest.mark.parametrize("seed", range(4))
def test_it_depends_on_the_run_alone(case, seed):
    """Not on how often it is asked, nor on seconds, nor on whether it saw the rounds one by one."""
    past, policy, run, asked = rounds(seed), case.make(), Run(), []
    want = lengths(case.make(), past)
    for each in past:
        asked.append({policy(run) for _ in range(3)})
        run.rounds.append(each)
    assert asked == [{gamma} for gamma in want[:-1]]
    slower = [copy.replace(r, draft_s=9.0, verify_s=7.0) if hasattr(copy, "replace") else
              Round(r.drafted, r.tested, r.accepted, 9.0, 7.0, first=r.first) for r in past]
    assert lengths(case.make(), slower) == want
    np.random.seed(seed)
    assert lengths(case.make(), past) == want


def test_it_does_not_change_the_run(case):
    past = rounds(1)
    run = Run(list(past))
    case.make()(run)
    assert run.rounds == past and run.stop == ""


@pytest.mark.parametrize("value", [float("nan"), 2.5, float("inf"), -1])
def test_numbers_that_are_not_whole_are_refused_by_name(case, value):
    for name in case.whole:
        with pytest.raises(BadInput, match=f"{name} is ") as error:
            case.make(**{name: value})
        assert str(error.value).endswith(".") and "\n" not in str(error.value)


def test_numbers_below_the_least_are_refused_by_name(case):
    for name, least in case.whole.items():
        case.make(**({"gamma": least} if name == "gamma" else {}))
        with pytest.raises(BadInput, match=f"{name} is {least - 1}"):
            case.make(**{name: least - 1})


@pytest.mark.parametrize("shape", ["chain", "tree", "lookup"])
def test_greedy_output_is_that_of_plain_decoding(case, shape):
    """One policy over all runs, an EOS inside a draft among them."""
    policy, drafted = case.make(), 0
    for seed in range(4):
        like, prompt, eos = table_logits(5, seed), [1, 2, 1], (4,) if seed % 2 else ()
        plain, plain_run = autoregressive_generate(FakeDecoder(like, 5), prompt, 40, eos=eos)
        draft = FakeDecoder(table_logits(5, seed, 1.4), 5)
        drafter = {"chain": ModelDrafter(draft), "tree": TreeDrafter(draft, TreeShape.branching([2, 1, 1])),
                   "lookup": SuffixLookup()}[shape]
        tokens, run = speculative_generate(FakeDecoder(like, 5), drafter, prompt, 40, policy, eos=eos)
        assert tokens.tolist() == plain.tolist() and run.stop == plain_run.stop
        drafted += run.drafted
    assert drafted > 0


@pytest.mark.parametrize("own", [None, Sampler()], ids=["same", "greedy"])
def test_sampled_output_has_the_targets_distribution(case, own):
    """What is drafted next depends on what was accepted so far, and the distribution does not."""
    sampler, logits, prompt, gammas = Sampler(0.8), table_logits(3, 1, 1.0), [0, 1, 0], set()

    def written(rng):
        policy = case.make()
        tokens, run = speculative_generate(FakeDecoder(logits, 3), ModelDrafter(random_decoder(3, 2, 1.0), own), prompt,
                                           3, policy, rng=rng, sampler=sampler)
        gammas.add(tuple(r.drafted for r in run.rounds))
        return tuple(tokens[3:].tolist())

    assert same_distribution(outcomes(written), exact(logits, sampler, prompt, 3))
    assert len(gammas) > 1


# -- cost-aware beside a lookup --------------------------------------------------------------------------------

def test_a_cost_aware_policy_is_asked_when_the_lookup_has_read_the_prompt():
    """A prompt that ends inside a match of 60 tokens: the first round drafts long, not the one token of no match."""
    text = np.random.default_rng(0).permutation(100).tolist()
    prompt = [*text, 100, *text[:60]]
    lookup = SuffixLookup()
    policy = CostAware(CURVE, drafter=lookup)
    known = [*prompt, *text[60:], 100, *text]
    target = FakeDecoder(lambda h: np.eye(101)[known[len(h)]], 101)
    _, run = speculative_generate(target, lookup, prompt, 30, policy)
    assert run.rounds[0].drafted == run.rounds[0].accepted > 5
    blank = SuffixLookup()
    first = CostAware(CURVE, drafter=blank)(Run())
    assert first < run.rounds[0].drafted, "what it would draft if nothing had been read"
