"""CascadeDrafter: the law of what it drafts and of what the target makes of it, its caches, edges and counts."""

from itertools import permutations, product, takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console import BadInput
from decode_lab import Run, Sampler, autoregressive_generate, speculative_generate
from lab import toy
from lab.drafters.cascade import CascadeDrafter
from lab.drafters.lookup import PromptLookup, SuffixLookup
from lab.drafters.model import ConfidentDrafter, ModelDrafter
from lab.drafters.tiers import NgramDrafter
from lab.drafters.trees import TreeDrafter, TreeShape
from lab.measure.enumeration import exact, outcomes, same_distribution
from lab.measure.scripted import FakeDecoder, ScriptedDrafter, chain, from_text, random_decoder, script, tree
from llm_math import cascade_cost
from loops import PROMPT, TEXT, V
from marks import few

quick = settings(max_examples=60, deadline=None, derandomize=True)


class Next:
    """A table for NgramDrafter: t is followed by t + 1, of any t."""

    order, path = 2, "fake.ngram"

    def __init__(self, vocab_size, tokenizer=None):
        self.vocab_size, self.tokenizer = vocab_size, tokenizer

    def best(self, tokens):
        return (tokens[-1] + 1) % self.vocab_size, 9, 9


INNER = {                                                       # the smallest model -> what drafts for the middle one
    "model": ModelDrafter,
    "model at another temperature": lambda m: ModelDrafter(m, Sampler(2.0)),
    "greedy model": lambda m: ModelDrafter(m, Sampler()),
    "confident model": lambda m: ConfidentDrafter(m, 0.4),
    "prompt lookup": lambda m: PromptLookup(),
    "suffix lookup": lambda m: SuffixLookup(),
    "n-grams": lambda m: NgramDrafter([Next(m.vocab_size, m.tokenizer)], price=0),
    "cascade": lambda m: CascadeDrafter(m, PromptLookup(), 2),
}


class Watched:
    """A drafter passed through; after each round the caches of `models` hold what they share with the text, no less."""

    def __init__(self, drafter, *models, target=None):
        self.drafter, self.models, self.target, self.name = drafter, models, target, drafter.name
        self.kept_some = 0

    def start(self, target, sampler, prompt):
        self.drafter.start(target, sampler, prompt)

    def propose(self, tokens, gamma, rng):
        assert gamma >= 1
        return self.drafter.propose(tokens, gamma, rng)

    def verified(self, tokens, path, hidden):
        before = [m.tokens + [token for token, _ in m.pending] for m in self.models]
        self.drafter.verified(tokens, path, hidden)
        if self.target is not None:
            assert self.target.tokens == tokens[:-1]
        for model, held in zip(self.models, before):
            shared = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(held, tokens[:-1]))]
            assert model.tokens == shared and not model.pending
            self.kept_some += len(shared) > 0


def watched(target, middle, small, inner, inner_gamma, sampler=None):
    """A cascade whose caches are checked after each round of the target's and of the middle's."""
    cascade = CascadeDrafter(middle, Watched(inner, small), inner_gamma, sampler)
    return cascade, Watched(cascade, middle, small, target=target)


def check(target, tokens, run, prompt):
    assert target.forwards == len(run.rounds) + (len(prompt) > 1), "one forward per round, and the prefill"
    assert target.tokens == tokens[:-1].tolist() and run.n_tokens == len(tokens) - len(prompt)


def counts(run):
    return [(r.drafted, r.tested, r.accepted) for r in run.rounds]


# -- by hand -------------------------------------------------------------------------------------------------

def test_two_rounds_by_hand():
    """The middle errs at 6, the small at 4. Draft 1: 3 and the wrong 4; 5; so 3, 4, 5 and the wrong 6. Draft 2: 7 and
    8, then 9; and 10 by the middle alone, of which nothing could be left over."""
    def wrong(at):
        return [(t + 1) % V if i == at else t for i, t in enumerate(TEXT)]

    t = TEXT
    target, middle, small = script(t, V), script(wrong(6), V, name="middle"), script(wrong(4), V, name="small")
    drafter = CascadeDrafter(middle, ModelDrafter(small), 2)
    tokens, run = speculative_generate(target, drafter, PROMPT, 9, 4)
    check(target, tokens, run, PROMPT)
    assert tokens.tolist() == t[:12] and counts(run) == [(4, 4, 3), (4, 4, 4)]
    assert counts(drafter.run) == [(2, 2, 1), (1, 1, 1), (2, 2, 2), (0, 0, 0)]
    assert [r.first for r in drafter.run.rounds] == [True, False, False, False]
    assert [(name, what[0] if name == "send" else what) for name, what in small.calls] == [
        ("rewind", 0), ("send", t[:3]), ("send", [t[3]]), ("send", [t[4]]), ("commit", [0, 1, 2, 3, 4]),
        ("send", t[5:7]), ("send", [t[7]]), ("commit", [0, 1, 2])]
    assert [(name, what[0] if name == "send" else what) for name, what in middle.calls] == [
        ("rewind", 0), ("send", [*t[:4], t[4] + 1]), ("rewind", 4), ("send", t[4:6]), ("commit", [0, 1, 2, 3, 4, 5]),
        ("send", t[6:9]), ("send", [t[9]]), ("commit", [0, 1, 2, 3])]
    assert run.by_source == {"small for middle": (8, 7)} and drafter.run.by_source == {"small": (5, 4)}


@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_with_an_inner_gamma_of_0_the_middle_works_alone(gamma):
    target, inner = random_decoder(V, 0), ScriptedDrafter(None)
    alone, both = (random_decoder(V, 0, scale=1.3, name="middle") for _ in "12")
    text, run = speculative_generate(target, ModelDrafter(alone), [1, 2], 20, gamma, 1.0)
    same, other = speculative_generate(target, CascadeDrafter(both, inner, 0), [1, 2], 20, gamma, 1.0)
    assert text.tolist() == same.tolist() and inner.asked == []
    assert counts(run) == counts(other)
    assert alone.called("send") == both.called("send")


def test_the_inner_drafter_is_asked_for_no_more_than_is_missing():
    inner = from_text(TEXT)
    drafter = CascadeDrafter(script(TEXT, V), inner, 3)
    drafter.start(script(TEXT, V), Sampler(), PROMPT)
    for gamma in range(9):
        inner.asked.clear()
        draft = drafter.propose(PROMPT, gamma, None)
        assert draft.tokens == TEXT[3:3 + gamma]
        assert inner.asked == [(n, min(3, 3 + gamma - n - 1)) for n in range(3, 2 + gamma, 4)]
        drafter.verified(PROMPT, [], None)


# -- greedy output is that of plain decoding -----------------------------------------------------------------

@pytest.mark.parametrize("kind", INNER)
@pytest.mark.parametrize("gamma, inner_gamma", [(1, 2), (2, 1), (3, 2), (6, 3)])
def test_greedy_output_is_that_of_plain_decoding(kind, gamma, inner_gamma):
    runs, inner_runs = [], []
    for seed in range(4):
        target = random_decoder(6, seed)
        middle, small = FakeDecoder(mixed(target, seed + 50, 0.5), 6), FakeDecoder(mixed(target, seed + 90, 0.8), 6)
        cascade, drafter = watched(target, middle, small, INNER[kind](small), inner_gamma)
        plain, _ = autoregressive_generate(random_decoder(6, seed), PROMPT, 30)
        tokens, run = speculative_generate(target, drafter, PROMPT, 30, gamma)
        check(target, tokens, run, PROMPT)
        assert tokens.tolist() == plain.tolist() and cascade.run.n_tokens == run.drafted
        assert all(r.drafted <= inner_gamma for r in cascade.run.rounds)
        assert drafter.kept_some
        runs.append(run)
        inner_runs.append(cascade.run)
    assert 0.2 < Run.pool(runs).alpha < 0.8, "the cases have acceptances and refusals"
    assert gamma == 1 or 0.05 < Run.pool(inner_runs).alpha < 0.8


def mixed(target, seed, share):
    """Logits of another model that agrees with the target now and then."""
    logits, other = target._logits, random_decoder(target.vocab_size, seed)._logits
    return lambda history: (1 - share) * logits(history) + share * other(history)


@quick
@given(seed=st.integers(0, 40), kind=st.sampled_from(sorted(INNER)),
       prompt=st.lists(st.integers(0, 5), min_size=1, max_size=6), n_new=st.integers(1, 12), gamma=st.integers(0, 5),
       inner_gamma=st.integers(0, 3), penalty=st.sampled_from([1.0, 1.3]), eos=st.sets(st.integers(0, 5), max_size=2),
       ends=st.tuples(*[st.sampled_from([None, 6, 7, 8, 9, 10, 11])] * 3))
def test_any_edge_stops_as_plain_decoding(seed, kind, prompt, n_new, gamma, inner_gamma, penalty, eos, ends):
    """EOS inside drafts, the budget, the ends of three contexts; no model goes back behind its last commit."""
    sampler, model = Sampler(repetition_penalty=penalty), FakeDecoder
    like = random_decoder(6, seed)
    if ends[0] is not None:
        ends = max(ends[0], len(prompt) + 1), *ends[1:]
    target, middle, small = (FakeDecoder(like._logits, 6, ends[0]), model(mixed(like, seed + 50, 0.5), 6, ends[1]),
                             model(mixed(like, seed + 90, 0.8), 6, ends[2]))
    plain, plain_run = autoregressive_generate(target, prompt, n_new, sampler=sampler, eos=eos)
    target.calls.clear()
    cascade, drafter = watched(target, middle, small, INNER[kind](small), inner_gamma)
    tokens, run = speculative_generate(target, drafter, prompt, n_new, lambda run: (gamma, 0, 3)[len(run.rounds) % 3],
                                       sampler=sampler, eos=eos)
    check(target, tokens, run, prompt)
    assert tokens.tolist() == plain.tolist() and run.stop == plain_run.stop and cascade.run.n_tokens == run.drafted


@pytest.mark.parametrize("limit, drafted", [(2, 0), (3, 1), (5, 3), (10, 6)])
def test_the_middle_drafts_up_to_the_end_of_its_context(limit, drafted):
    """Its cache holds `limit` tokens, the last draft not among them; the small's context ends before."""
    middle, small = script(TEXT, V, max_length=limit), script(TEXT, V, max_length=max(3, limit - 2))
    drafter = CascadeDrafter(middle, ModelDrafter(small), 2)
    tokens, run = speculative_generate(script(TEXT, V), drafter, PROMPT, 20, 6)
    assert tokens.tolist() == TEXT[:23] and run.rounds[0].drafted == drafted
    assert middle.length <= limit and sum(r.drafted for r in run.rounds[2:]) == 0


def test_no_refusal_makes_a_model_read_its_sequence_again():
    """A model with a state goes back to its last commit and no further: in a cascade, too, that is enough."""
    target = random_decoder(6, 1)
    middle, small = FakeDecoder(mixed(target, 3, 0.5), 6), FakeDecoder(mixed(target, 4, 0.7), 6)
    cascade, drafter = watched(target, middle, small, ModelDrafter(small), 2)
    tokens, run = speculative_generate(target, drafter, PROMPT, 40, 4)
    assert tokens.tolist() == autoregressive_generate(random_decoder(6, 1), PROMPT, 40)[0].tolist()
    assert 0 < run.accepted < run.drafted and 0 < cascade.run.accepted < cascade.run.drafted
    assert middle.called("rewind").count(0) == small.called("rewind").count(0) == 1


def test_the_same_drafter_serves_several_runs():
    target, middle, small = (random_decoder(6, seed) for seed in (1, 2, 3))
    for kind in INNER:
        def rounds(drafter, prompt):
            text, run = speculative_generate(target, drafter, prompt, 15, 3, 1.0)
            return text.tolist(), counts(run), counts(drafter.run)

        used = CascadeDrafter(middle, INNER[kind](small), 2)
        first = rounds(used, [0, 1, 2])
        assert rounds(used, [5, 4]) == rounds(CascadeDrafter(middle, INNER[kind](small), 2), [5, 4])
        assert rounds(used, [0, 1, 2]) == first


# -- sampled output has the target's law ---------------------------------------------------------------------

SAMPLERS = {"temperature": Sampler(0.8), "top-p": Sampler(1.0, top_p=0.8),
            "penalty": Sampler(0.8, repetition_penalty=1.7)}
MIDDLE = {"as the target": None, "greedy": Sampler(), "greedy with a penalty": Sampler(repetition_penalty=1.5),
          "hotter": Sampler(2.0), "top-k": Sampler(1.0, top_k=2)}
CASES = [*product(INNER, SAMPLERS, ["as the target"]), *product(["model", "suffix lookup"], ["penalty"], MIDDLE)]


def three(sizes=(3, 3, 3), tokenizer=None):
    return [random_decoder(n, seed, 1.0, tokenizer=tokenizer, name=name)
            for n, seed, name in zip(sizes, (1, 2, 3), ("target", "middle", "small"))]


@pytest.mark.parametrize("kind, sampling, middle_sampler", CASES)
def test_a_draft_has_the_middles_law_and_reports_it(kind, sampling, middle_sampler):
    """Three tokens, two of the inner drafter's among them: as the middle draws alone, which is what q says."""
    prompt, (target, middle, small) = [0, 1, 0, 0, 1], three()            # a penalty sees the first 2
    own = MIDDLE[middle_sampler] or SAMPLERS[sampling]
    drafter = CascadeDrafter(middle, INNER[kind](small), 2, MIDDLE[middle_sampler])

    def drafted(rng):
        drafter.start(target, SAMPLERS[sampling], prompt)
        draft, text = drafter.propose(prompt, 3, rng), list(prompt)
        for token, q in zip(draft.tokens, draft.q, strict=True):
            assert q is None if own.greedy else np.abs(q - own.probs(middle._logits(tuple(text)), text)).max() < 1e-12
            text.append(token)
        accepted.append(drafter.run.accepted)
        return tuple(draft.tokens)

    accepted = []
    assert same_distribution(outcomes(drafted), exact(middle._logits, own, prompt, 3))
    assert max(accepted) > 0 or own.greedy, "nothing of the inner draft was ever accepted"


@pytest.mark.parametrize("kind, sampling, middle_sampler", CASES)
@pytest.mark.slow
def test_a_run_has_the_targets_law(kind, sampling, middle_sampler):
    """Every path through the loop, to three new tokens."""
    prompt, sampler, (target, middle, small) = [0, 1, 0], SAMPLERS[sampling], three()
    drafter = CascadeDrafter(middle, INNER[kind](small), 1, MIDDLE[middle_sampler])

    def written(rng):
        tokens, _ = speculative_generate(target, drafter, prompt, 3, 2, rng=rng, sampler=sampler)
        return tuple(tokens[3:].tolist())

    assert same_distribution(outcomes(written), exact(target._logits, sampler, prompt, 3))


@pytest.mark.parametrize("eos", [(), (0,)])
@pytest.mark.parametrize("kind", few(["model", "suffix lookup"], {"suffix lookup"}))
def test_a_run_with_two_inner_drafts_and_an_end_has_the_targets_law(kind, eos):
    prompt, sampler, (target, middle, small) = [0, 1, 0], Sampler(0.8, top_k=2), three()
    drafter = CascadeDrafter(middle, INNER[kind](small), 2)

    def written(rng):
        tokens, _ = speculative_generate(target, drafter, prompt, 4, 3, rng=rng, sampler=sampler, eos=eos)
        return tuple(tokens[3:].tolist())

    assert same_distribution(outcomes(written), exact(target._logits, sampler, prompt, 4, eos))


@pytest.mark.parametrize("sizes", [*permutations((2, 3, 4)), (3, 2, 3), (2, 3, 2)])
@pytest.mark.parametrize("kind", ["model", "n-grams", "cascade"])
@pytest.mark.slow
def test_vocabularies_padded_differently(kind, sizes):
    """Of target, middle and small: an id that one lacks is neither drawn by it nor shown to it, and bends nothing."""
    prompt, sampler, (target, middle, small) = [0, 1, 0], Sampler(0.9, repetition_penalty=1.2), three(sizes, "t")

    drafter = CascadeDrafter(middle, INNER[kind](small), 2)
    for seed in range(4):
        start = np.random.default_rng(seed).integers(min(sizes), size=3)
        plain, _ = autoregressive_generate(target, start, 12)
        assert speculative_generate(target, drafter, start, 12, 4)[0].tolist() == plain.tolist()

    def written(rng):
        tokens, _ = speculative_generate(target, drafter, prompt, 3, 2, rng=rng, sampler=sampler)
        return tuple(tokens[3:].tolist())

    assert same_distribution(outcomes(written), exact(target._logits, sampler, prompt, 3))


def test_a_greedy_target_takes_a_sampled_middle():
    target, small = random_decoder(6, 1), random_decoder(6, 2)
    middle = FakeDecoder(mixed(target, 5, 0.4), 6)
    plain, _ = autoregressive_generate(target, PROMPT, 30)
    drafter = CascadeDrafter(middle, ModelDrafter(small), 2, Sampler(1.0))
    for seed in range(4):
        tokens, run = speculative_generate(target, drafter, PROMPT, 30, 4, rng=np.random.default_rng(seed))
        assert tokens.tolist() == plain.tolist() and 0 < run.accepted < run.drafted


@pytest.mark.parametrize("sampler", [None, Sampler(), Sampler(0.5)])
def test_the_inner_model_draws_as_the_middle_does(sampler):
    """Whatever the target's sampler: losslessness would hide another, and the middle would refuse its twin's tokens."""
    drafter = CascadeDrafter(random_decoder(6, 2), ModelDrafter(random_decoder(6, 2)), 2, sampler)
    speculative_generate(random_decoder(6, 1), drafter, PROMPT, 40, 4, 1.5)
    assert drafter.run.alpha == 1 and drafter.run.drafted > 20


def test_the_same_seed_gives_the_same_tokens():
    dice = np.random.default_rng

    def text(seed):
        drafter, rng = CascadeDrafter(random_decoder(12, 2), INNER["model"](random_decoder(12, 3)), 2), dice(seed)
        return speculative_generate(random_decoder(12, 1), drafter, [0], 40, 4, 1.0, rng)[0].tolist()

    assert text(5) == text(5) != text(6)


# -- counts --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("n, inner_gamma", [(1, 2), (3, 1), (4, 2), (4, 3)])
def test_the_cost_of_a_draft_is_the_formulas(n, inner_gamma):
    """Over every path: where q and p are the same everywhere, acceptance is their overlap, independent of the past."""
    p, q = np.array([0.6, 0.4]), np.array([0.25, 0.75])
    middle, small = (FakeDecoder(lambda history, d=d: np.log(d), 2) for d in (p, q))
    drafter = CascadeDrafter(middle, ModelDrafter(small), inner_gamma)

    def counted(rng):
        drafter.start(middle_like, Sampler(1.0), [0])
        drafter.propose([0], n, rng)
        return drafter.run.drafted, len(drafter.run.rounds)

    middle_like = FakeDecoder(None, 2)
    law = outcomes(counted)
    cost = sum(weight * (0.03 * drafted + 0.2 * rounds) for (drafted, rounds), weight in law.items())
    assert cost == pytest.approx(cascade_cost(np.minimum(p, q).sum(), inner_gamma, n, 0.03, 0.2)[n], rel=1e-6)
    assert len(law) > 1 or n == 1


def test_n_gram_statistics_learn_what_the_middle_kept():
    """The target refuses what the middle kept; what an n-gram is worth here is what the middle says."""
    target, middle = random_decoder(5, 1), random_decoder(5, 2)
    drafter = NgramDrafter([Next(5)], price=0, discount=1)
    cascade = CascadeDrafter(middle, drafter, 3)
    speculative_generate(target, cascade, PROMPT[:2], 40, 5)
    tests, kept = (sum(column) for column in zip(*drafter._seen.values()))
    assert tests == sum(r.tested for r in cascade.run.rounds) and kept == cascade.run.accepted
    assert 0 < kept < tests


# -- bad input -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("inner_gamma", [-1, 1.5, float("nan"), float("inf")])
def test_an_impossible_inner_gamma_is_refused(inner_gamma):
    with pytest.raises(BadInput, match="inner_gamma is "):
        CascadeDrafter(random_decoder(6, 1), PromptLookup(), inner_gamma)


@pytest.mark.parametrize("make, message", [
    (lambda t, m, s: CascadeDrafter(m, TreeDrafter(s, TreeShape.branching([2])), 2), "small proposed a tree for mid"),
    (lambda t, m, s: CascadeDrafter(m, ScriptedDrafter(lambda *_: tree([1, 2], [-1, 0])), 2), "scripted proposed a"),
    (lambda t, m, s: CascadeDrafter(m, ModelDrafter(m), 2), "middle cannot draft for itself"),
    (lambda t, m, s: CascadeDrafter(t, ModelDrafter(s), 2), "target cannot draft for itself"),
    (lambda t, m, s: CascadeDrafter(m, ModelDrafter(t), 2), "target cannot draft for itself"),
    (lambda t, m, s: CascadeDrafter(m, CascadeDrafter(s, ModelDrafter(t), 1), 2), "target cannot draft for itself"),
    (lambda t, m, s: CascadeDrafter(random_decoder(4, 1), ModelDrafter(s), 2), "vocabulary of 4"),
    (lambda t, m, s: CascadeDrafter(m, ModelDrafter(random_decoder(4, 1)), 2), "vocabulary of 4"),
    (lambda t, m, s: CascadeDrafter(m, ScriptedDrafter(lambda tokens, gamma: chain([1] * 5)), 2), "asked for"),
])
def test_what_cannot_work_is_refused(make, message):
    target, middle, small = three()
    middle._logits = lambda history: np.array([0.0, 9.0, 0.0])
    with pytest.raises(BadInput, match=message):
        speculative_generate(target, make(target, middle, small), [0, 1], 9, 4)


# -- real models, and the toy family -------------------------------------------------------------------------

def test_the_toy_family():
    large, medium, small = (toy.load(name) for name in ("large", "medium", "small"))
    inner = {"model": ModelDrafter(small), "lookup": SuffixLookup(), "alone": PromptLookup()}
    for kind in toy.KINDS:
        prompt = toy.prompts(kind, 2, 40)[1]
        plain, _ = autoregressive_generate(large, prompt, 40)
        for name, drafter in inner.items():
            drafter = CascadeDrafter(medium, drafter, 0 if name == "alone" else 3)
            tokens, run = speculative_generate(large, drafter, prompt, 40, 5)
            assert tokens.tolist() == plain.tolist() and run.accepted > 10
            assert (drafter.run.accepted > 3) == (name != "alone") and drafter.run.n_tokens == run.drafted
            assert len(plain) - 2 - 5 <= medium.length <= len(plain) - 1


@pytest.fixture(scope="module")
def folders(tmp_path_factory, one_thread):
    pytest.importorskip("torch")
    import small
    return {(kind, seed): str(small.save(tmp_path_factory.mktemp("models") / f"{kind}{seed}", kind, seed=seed))
            for kind, seed in (("llama", 0), ("llama", 1), ("lfm2", 0), ("lfm2", 1))}


REAL = {                                                        # (target, another model, load) -> the cascade
    "layers and a lookup": lambda t, other, load: CascadeDrafter(skips(t), PromptLookup(), 2),
    "layers and fewer of them": lambda t, other, load: CascadeDrafter(skips(t), ModelDrafter(first(t)), 2),
    "a model and the target's layers": lambda t, other, load: CascadeDrafter(other, ModelDrafter(first(t)), 2),
    "a model and its own layers": lambda t, other, load: CascadeDrafter(other, ModelDrafter(first(other)), 2),
    "twins": lambda t, other, load: CascadeDrafter(other, ModelDrafter(load(1)), 2),
    "twins of the target": lambda t, other, load: CascadeDrafter(load(0), ModelDrafter(load(0)), 2),
}


def skips(target):
    from lab.models.layers import LayerDraft
    return LayerDraft(target, (0, 1, 3))


def first(target):
    from lab.models.layers import LayerDraft
    return LayerDraft(target, range(2))


@pytest.mark.parametrize("case", few(REAL, {"layers and a lookup"}))
@pytest.mark.parametrize("kind", ["llama", "lfm2"])
@pytest.mark.slow
def test_real_models(folders, kind, case):
    """Layers of the target on its own cache, and models with one of their own, with attention and with states."""
    from lab import models
    target, other = models.load(folders[kind, 0]), models.load(folders[kind, 1])
    drafter = REAL[case](target, other, lambda seed: models.load(folders[kind, seed]))
    prompt = [*range(40, 58), 5, 6, 7, 5, 6]
    plain, _ = autoregressive_generate(target, prompt, 12)
    tokens, run = speculative_generate(target, drafter, prompt, 12, 4)
    assert tokens.tolist() == plain.tolist() and drafter.run.n_tokens == run.drafted > 0
    assert target.length == len(tokens) - 1 and drafter.model.length <= target.length
    _, sampled = speculative_generate(target, drafter, prompt, 7, 4, 1.0)
    assert sampled.n_tokens == 7 and drafter.run.n_tokens == sampled.drafted
    if case == "twins of the target":
        assert run.alpha == sampled.alpha == drafter.run.alpha == 1
    if case == "twins":
        assert drafter.run.alpha == 1 and run.alpha < 0.5
