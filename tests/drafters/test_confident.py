"""ConfidentDrafter: a draft that ends by itself."""

import numpy as np
import pytest

from decode_lab import Sampler, speculative_generate
from lab.drafters.draft_length import AIMD
from lab.drafters.model import ConfidentDrafter, ModelDrafter
from lab.measure.enumeration import same_distribution
from lab.measure.scripted import FakeDecoder, one_hot, random_decoder, script
from policies import law_of

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


CONFIDENT = {                                                     # the target's sampler, the drafter's own
    "same": (Sampler(0.8), None), "warmer": (Sampler(0.8), Sampler(1.6)), "greedy": (Sampler(0.8), Sampler()),
    "penalty": (Sampler(1.0, repetition_penalty=1.7), None), "top-k": (Sampler(1.0), Sampler(0.4, top_k=2)),
}


@pytest.mark.parametrize("order", [1, 3])
@pytest.mark.parametrize("kind", CONFIDENT)
def test_a_draft_that_ends_by_itself_leaves_the_targets_distribution(kind, order):
    (sampler, own), target, both = CONFIDENT[kind], random_decoder(3, 1, 1.0, order), False
    n_new = 4 if kind == "greedy" else 3                          # its first draft is always the same, not its second
    for threshold in (0.3, 0.45, 0.6, 0.75):
        drafter = ConfidentDrafter(random_decoder(3, 4, 1.0, order), threshold, own)
        law, plain, rounds = law_of(drafter, 2, sampler, n_new, target=target)
        assert same_distribution(law, plain)
        # Rounds with room for two drafts: the first; of four tokens also the second, behind a refusal at once.
        both |= {1, 2} == {r.drafted for last, r in zip([None, *rounds], rounds)
                           if r.first or (n_new == 4 and last.first and last.accepted == 0)}
    assert both, "all drafts are of one length"


@pytest.mark.parametrize("size", [2, 4])
def test_so_it_does_with_rows_padded_differently(size):
    target = random_decoder(3, 1, 1.0, tokenizer="same")
    drafter = ConfidentDrafter(random_decoder(size, 5, 1.0, tokenizer="same"), 0.45)
    law, plain, rounds = law_of(drafter, 2, Sampler(0.8), 3, target=target)
    assert same_distribution(law, plain) and {1, 2} <= {r.drafted for r in rounds if r.first}


def test_longer_drafts_that_end_by_themselves_too():
    """Three drafts deep, two tokens possible at each place: a draft of three, of two and of one."""
    sampler = Sampler(1.0, top_k=2)
    drafter = ConfidentDrafter(random_decoder(3, 2, 1.0, 3), 0.5)
    law, plain, rounds = law_of(drafter, AIMD(3, 1), sampler, 4, target=random_decoder(3, 1, 1.0, 3))
    assert same_distribution(law, plain) and {r.drafted for r in rounds if r.first} == {1, 2, 3}


class Dropping(ConfidentDrafter):
    """The mistake: the unlikely token itself is left out."""

    def propose(self, tokens, gamma, rng):
        draft = super().propose(tokens, gamma, rng)
        if draft.tokens and draft.q[-1][draft.tokens[-1]] < self.threshold:
            for column in (draft.tokens, draft.q, draft.sources):
                column.pop()
        return draft


def test_a_draft_cut_before_a_token_because_of_that_token_bends_the_distribution():
    law, plain, _ = law_of(Dropping(random_decoder(3, 4, 1.0), 0.45), 2, Sampler(0.8), 3)
    assert not same_distribution(law, plain, 0.01)
