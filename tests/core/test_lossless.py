"""Speculation leaves the output as it is: greedy text token by token, sampled text in distribution."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import decode_lab as dl
from decode_lab import Sampler, autoregressive_generate, speculative_generate, tree_generate, verify
from lab.drafters.lookup import PromptLookup
from lab.drafters.model import ModelDrafter
from lab.drafters.trees import ConfidentTreeDrafter, TreeDrafter, TreeShape
from lab.measure.enumeration import exact, outcomes, same_distribution
from lab.measure.scripted import FakeDecoder, ScriptedDrafter, random_decoder, tree
from lab.support.checks import check_draft
from lab.toy.transformer import Config, TransformerLM, init_params
from loops import IRREGULAR, Watched, check, quick

# -- greedy equality on transformers -------------------------------------------------------------------------

TINY = Config(vocab_size=24, hidden=16, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, ffn=24,
              max_length=160)


def tiny_params(seed, config=TINY):
    """Random weights whose greedy text does not settle on one token: layers that matter."""
    params = init_params(config, seed)
    params["embed"] = params["embed"] * np.float32(50)
    for layer in params["layers"]:
        layer["wo"], layer["w_down"] = layer["wo"] * np.float32(40), layer["w_down"] * np.float32(40)
    return params


def tiny(seed, noise=0.0):
    """A tiny transformer; noise > 0 makes a draft that agrees with it in part."""
    params = tiny_params(seed)
    if noise:
        rng = np.random.default_rng(seed)
        moved = params["embed"] + noise * rng.standard_normal(params["embed"].shape)
        params["embed"] = moved.astype(np.float32)
    return TransformerLM(params, TINY, "draft" if noise else "target")


def assert_same_greedy(target, got, want, sampler=Sampler()):
    """Equal token by token, but for a position where the two best logits are within float32 rounding."""
    assert len(got) == len(want)
    differ = np.flatnonzero(got != want)
    if len(differ):
        at = differ[0]
        z = sampler._penalised(target.full_logits([want[:at]])[0, -1].astype(np.float64), want[:at])
        margin = abs(z[got[at]] - z[want[at]])
        assert margin < 1e-4, f"token {at}: {got[at]} instead of {want[at]}, {margin:.2e} apart"


GREEDY = {
    "chain": lambda draft: (ModelDrafter(draft), 4),
    "chain, gamma 1": lambda draft: (ModelDrafter(draft), 1),
    "lookup": lambda draft: (PromptLookup(), 5),
    "tree": lambda draft: (TreeDrafter(draft, TreeShape.branching([3, 2, 1])), None),
    "wide": lambda draft: (TreeDrafter(draft, TreeShape.branching([4])), None),
    "thin": lambda draft: (TreeDrafter(draft, TreeShape.branching([1] * 4)), None),
    "irregular": lambda draft: (TreeDrafter(draft, IRREGULAR), None),
    "root alone": lambda draft: (TreeDrafter(draft, TreeShape([])), None),
    "confident": lambda draft: (ConfidentTreeDrafter(draft, 7, 4, 3), None),
    "sampled chain": lambda draft: (ModelDrafter(draft, Sampler(1.0)), 4),
    "sampled tree": lambda draft: (
        TreeDrafter(draft, TreeShape.branching([2, 2]), Sampler(1.0), sample=True), None),
}


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("kind", GREEDY)
@pytest.mark.slow
def test_greedy_output_equals_plain_decoding(kind, penalty):
    sampler = Sampler(repetition_penalty=penalty)
    accepted = 0
    for seed in range(4):
        target, draft = tiny(seed), tiny(seed, 0.2)
        drafter, gamma = GREEDY[kind](draft)
        prompt = np.random.default_rng(seed).integers(24, size=1 + 7 * seed)
        plain, _ = autoregressive_generate(target, prompt, 48, sampler=sampler)
        assert len(set(plain[len(prompt):])) > 2, "a text that settles on one token tests little"
        if gamma is None:
            tokens, run = tree_generate(target, Watched(drafter, target), prompt, 48, sampler=sampler)
        else:
            tokens, run = speculative_generate(target, Watched(drafter, target), prompt, 48, gamma,
                                               sampler=sampler)
        assert_same_greedy(target, tokens, plain, sampler)
        assert run.n_tokens == 48 == len(run.rounds) + run.accepted
        accepted += run.accepted
    assert accepted > 0 or kind == "root alone" or (kind == "lookup" and penalty != 1)


@quick
@given(seed=st.integers(0, 9), prompt=st.lists(st.integers(0, 23), min_size=1, max_size=12),
       gamma=st.integers(0, 6), n_new=st.integers(1, 14), eos=st.sets(st.integers(0, 23), max_size=6),
       penalty=st.sampled_from([1.0, 1.2]))
def test_any_prompt_budget_and_eos_stop_as_plain_decoding(seed, prompt, gamma, n_new, eos, penalty):
    sampler = Sampler(repetition_penalty=penalty)
    target, draft = random_decoder(24, seed), random_decoder(24, seed, scale=1.4)
    plain, plain_run = autoregressive_generate(target, prompt, n_new, sampler=sampler, eos=eos)
    drafters = [ModelDrafter(draft), PromptLookup(boundary=eos),
                TreeDrafter(draft, TreeShape.branching([2, 2])), ConfidentTreeDrafter(draft, 5, 3)]
    for drafter in drafters:
        target.calls.clear()
        tokens, run = speculative_generate(target, Watched(drafter, target), prompt, n_new, gamma,
                                           sampler=sampler, eos=eos)
        check(target, tokens, run, prompt)
        assert tokens.tolist() == plain.tolist() and run.stop == plain_run.stop


def test_a_penalty_sees_the_earlier_drafts_of_its_block():
    """The target wants token 1 at once, then, penalised, 2, then 1: a block of drafts is accepted whole."""
    target = FakeDecoder(lambda h: np.array([0, 4.0, 3.0, 2.0, 0, 0]), 6)
    sampler = Sampler(repetition_penalty=2.0)
    plain, _ = autoregressive_generate(target, [0], 3, sampler=sampler)
    assert plain.tolist() == [0, 1, 2, 1], "4 / 2 = 2 wins again once 3 is halved too"
    draft = FakeDecoder(lambda h: np.array([0, 4.0, 3.0, 2.0, 0, 0]), 6)
    target.calls.clear()
    tokens, run = speculative_generate(target, ModelDrafter(draft), [0], 3, 2, sampler=sampler)
    assert tokens.tolist() == plain.tolist() and [r.accepted for r in run.rounds] == [2]
    drafter = TreeDrafter(draft, TreeShape.branching([1, 1]))
    tokens, run = tree_generate(target, drafter, [0], 3, sampler=sampler)
    assert tokens.tolist() == plain.tolist()


def test_the_same_seed_gives_the_same_tokens():
    def text(drafter, seed=None):
        rng = None if seed is None else np.random.default_rng(seed)
        return speculative_generate(random_decoder(12, 1), drafter, [0], 60, 3, 1.0, rng)[0].tolist()

    for make in (lambda: ModelDrafter(random_decoder(12, 2)), PromptLookup,
                 lambda: TreeDrafter(random_decoder(12, 2), TreeShape.branching([2, 1]), sample=True)):
        assert text(make(), 5) == text(make(), 5) != text(make(), 6)
        assert text(make()) == text(make()) == text(make(), 0), "without an rng, seed 0"


# -- output distributions ------------------------------------------------------------------------------------

SAMPLERS = {
    "temperature 1": Sampler(1.0), "temperature 0.6": Sampler(0.6), "top-k": Sampler(0.9, top_k=2),
    "top-p": Sampler(1.0, top_p=0.7), "min-p": Sampler(1.0, min_p=0.25),
    "penalty": Sampler(0.8, repetition_penalty=1.7), "all": Sampler(0.8, 3, 0.9, 0.05, 1.3),
}


def with_replacement(model, sampler):
    """Two candidates at each of two levels, drawn independently: siblings may be equal."""
    class Drafter(ScriptedDrafter):
        def propose(self, tokens, gamma, rng):
            found, qs, parents, level = [], [], [], [(-1, list(tokens))]
            for _ in range(min(gamma, 2)):
                below = []
                for parent, history in level:
                    q = sampler.probs(model._logits(tuple(history)), history)
                    for _ in range(2 if parent == -1 else 1):
                        found.append(dl.draw(q, rng))
                        qs.append(q)
                        parents.append(parent)
                        below.append((len(found) - 1, history + [found[-1]]))
                level = below
            return tree(found, parents, qs)

    return Drafter(None)


LOSSLESS = {                                            # draft model -> drafter of at most two levels
    "chain": lambda m: ModelDrafter(m),
    "chain at another temperature": lambda m: ModelDrafter(m, Sampler(2.0)),
    "chain with another top-k": lambda m: ModelDrafter(m, Sampler(1.0, top_k=2)),
    "greedy chain": lambda m: ModelDrafter(m, Sampler()),
    "greedy chain with a penalty": lambda m: ModelDrafter(m, Sampler(repetition_penalty=1.5)),
    "lookup": lambda m: PromptLookup(),
    "tree": lambda m: TreeDrafter(m, TreeShape.branching([2, 1]), sample=True),
    "tree wider than top-k": lambda m: TreeDrafter(m, TreeShape.branching([3]), Sampler(1.0, top_k=2), True),
    "tree with replacement": lambda m: with_replacement(m, Sampler(1.2)),
    "deterministic tree": lambda m: TreeDrafter(m, TreeShape.branching([2, 2])),
    "confident tree": lambda m: ConfidentTreeDrafter(m, 4, 2, 2),
}


@pytest.mark.parametrize("sampling", SAMPLERS)
@pytest.mark.parametrize("kind", LOSSLESS)
def test_a_round_has_the_targets_distribution(kind, sampling):
    """All ways that one round of depth two can go, its text completed to three tokens by plain sampling: the
    joint distribution of three tokens of the target, to float64 rounding."""
    sampler, prompt = SAMPLERS[sampling], [0, 1, 2, 0, 1]
    target, model = random_decoder(3, 1, 1.0), random_decoder(3, 2, 1.0)
    drafter = LOSSLESS[kind](model)

    def one_round(rng):
        drafter.start(target, sampler, prompt)
        draft = drafter.propose(prompt, 2, rng)
        check_draft(draft, 2, 3, "the drafter")
        draft.parents, parents = draft.parents, draft.parents if draft.parents is not None else range(
            -1, len(draft.tokens) - 1)
        target.rewind(0)
        target.prefill(prompt[:-1])
        rows = target.send([prompt[-1]] + list(draft.tokens), [-1] + [p + 1 for p in parents])
        path, token, _ = verify(draft, rows, sampler, prompt, rng)
        return tuple(draft.tokens[i] for i in path) + (token,)

    law, whole = outcomes(one_round), {}
    for text, weight in law.items():
        for rest, w in exact(target._logits, sampler, prompt + list(text), 3 - len(text)).items():
            whole[text + rest] = whole.get(text + rest, 0.0) + weight * w
    assert same_distribution(whole, exact(target._logits, sampler, prompt, 3))
    assert any(len(text) > 1 for text in law), "nothing was ever accepted"


@pytest.mark.parametrize("eos", [(), (0,)])
@pytest.mark.parametrize("kind, n_new", [("plain", 3), ("chain", 3), ("chain at another temperature", 3),
                                         ("greedy chain", 3), ("lookup", 3), ("tree", 2),
                                         ("tree with replacement", 2), ("deterministic tree", 3)])
def test_a_whole_run_has_the_targets_distribution(kind, n_new, eos):
    """Every path through the loop itself, EOS and budget included."""
    sampler, prompt = Sampler(0.8), [0, 1, 0]
    target, model = random_decoder(3, 1, 1.0), random_decoder(3, 2, 1.0)

    def run(rng):
        if kind == "plain":
            tokens, _ = autoregressive_generate(target, prompt, n_new, rng=rng, sampler=sampler, eos=eos)
        else:
            tokens, _ = speculative_generate(target, LOSSLESS[kind](model), prompt, n_new, 2, rng=rng,
                                             sampler=sampler, eos=eos)
        return tuple(tokens[3:].tolist())

    assert same_distribution(outcomes(run), exact(target._logits, sampler, prompt, n_new, eos))


@pytest.mark.parametrize("kind", ["chain at another temperature", "tree", "greedy chain"])
@pytest.mark.slow
def test_sampled_text_from_a_generator_has_the_targets_distribution(kind):
    """As above with a real generator, so that nothing stands in for `draw`; the seed is fixed."""
    sampler, prompt, n = Sampler(0.8), [0, 1], 3000
    target, drafter = random_decoder(3, 1, 1.0), LOSSLESS[kind](random_decoder(3, 2, 1.0))
    rng = np.random.default_rng(0)
    counts = {}
    for _ in range(n):
        text, _ = speculative_generate(target, drafter, prompt, 2, 2, rng=rng, sampler=sampler)
        text = tuple(text[2:].tolist())
        counts[text] = counts.get(text, 0) + 1
    law = exact(target._logits, sampler, prompt, 2)
    assert sum(abs(counts.get(k, 0) / n - law.get(k, 0)) for k in counts.keys() | law.keys()) / 2 < 0.05
