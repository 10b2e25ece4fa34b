"""Methods that demos share, and the checks that they lose nothing, on small random models."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from console import BadInput
from decode_lab import Sampler, autoregressive_generate
from lab.drafters.best_tree import best_tree, rank_table
from lab.drafters.draft_length import CostAware
from lab.drafters.lookup import PromptLookup, SuffixLookup
from lab.drafters.model import ModelDrafter
from lab.drafters.trees import TreeDrafter, TreeShape
from lab.measure.costs import StepCurve
from lab.measure.lossless import FirstTokens, greedy_runs, kept_drafts
from lab.measure.methods import fastest_shape, lookup_methods, model_method, model_methods
from lab.measure.prediction import predict
from lab.measure.turns import Method
from lab.models.kept_prefix import KeptPrefix
from lab.models.layers import LayerDraft
from lab.models.rounded import quantized
from test_prediction import build, prompt

pytestmark = pytest.mark.usefixtures("one_thread")

T = StepCurve({1: 1.0, 2: 1.1, 17: 2.0})


@pytest.fixture(scope="module")
def target():
    return build()


@pytest.fixture(scope="module")
def models(target):
    return {"first": LayerDraft(target, range(2)), "int4": quantized(target, "int4-g32")}


def test_two_lookups_draft_what_pays():
    found = lookup_methods(T, 8)
    assert list(found) == ["lookup", "suffixes"]
    assert isinstance(found["lookup"].drafter, PromptLookup) and isinstance(found["suffixes"].drafter, SuffixLookup)
    assert found["suffixes"].gamma.drafter is found["suffixes"].drafter
    for method in found.values():
        assert isinstance(method.gamma, CostAware) and len(method.gamma.seconds) == 9 and method.draft == ""


def test_each_draft_model_has_a_chain_and_a_tree(models):
    found = model_methods(models, {"chain": (1, 1), "tree": (2, 1)})
    assert list(found) == ["first, chain", "first, tree", "int4, chain", "int4, tree"]
    chain, tree = found["int4, chain"], found["int4, tree"]
    assert isinstance(chain.drafter, ModelDrafter) and chain.gamma == 2 and chain.draft == "int4"
    assert isinstance(tree.drafter, TreeDrafter) and tree.gamma is None and len(tree.shape) == 4
    asked = []
    model_methods(models, lambda name, kind: asked.append((name, kind)) or TreeShape.branching((1,)))
    assert asked == [(name, kind) for name in models for kind in ("chain", "tree")]
    with pytest.raises(BadInput, match="kind of draft"):
        model_method("bush", models["int4"], TreeShape.branching((1,)), "int4")


def test_the_fastest_shape_has_the_best_predicted_speed_over_all_texts():
    rng = np.random.default_rng(0)
    ranks = [(rng.random(n) < 0.4).astype(int) for n in (20, 24, 30)]      # first or second, always
    table = rank_table(np.array([r[:20] for r in ranks]), 6, 4)
    trees = [best_tree(table, n)[0] for n in range(1, 7)]      # of each number of nodes that with the most tokens
    for c in (0.05, 0.3, 2.0):
        for kind in ("chain", "tree"):
            found = fastest_shape(kind, ranks, T, c, 6)
            assert 1 <= len(found) <= 6 and (kind == "tree" or found.depth == len(found))
            shapes = [TreeShape.branching((1,) * n) for n in range(1, 7)] if kind == "chain" else trees
            speeds = [np.mean([predict(Method(None, None, shape, ""), T, {"": c}, None, None, 0, r).speedup
                               for r in ranks]) for shape in (found, *shapes)]
            assert speeds[0] == pytest.approx(max(speeds))
    assert len(fastest_shape("chain", [np.zeros(12, int)], T, 0.01, 6)) == 6    # always right, and cheap
    assert len(fastest_shape("chain", [np.full(12, 9)], T, 0.5, 6)) == 1        # never right


def test_greedy_runs_are_those_of_the_loops(target, models):
    kept = kept_drafts(models)
    assert kept["first"] is models["first"] and isinstance(kept["int4"], KeptPrefix)
    prompts = [prompt(9, seed) for seed in (1, 1, 2)]
    made = greedy_runs(lookup_methods(T) | model_methods(kept, {"chain": (1, 1), "tree": (2, 1)}), target, 6, prompts)
    assert list(made) == ["plain", "lookup", "suffixes", "first, chain", "first, tree", "int4, chain", "int4, tree"]
    for i, start in enumerate(prompts):
        text = autoregressive_generate(target, start, 6)[0].tolist()
        assert all(runs[i][0].tolist() == text for runs in made.values())


def test_first_tokens_are_the_target_s_and_others_are_not(target, models):
    first = FirstTokens(target, prompt(), Sampler(1.0, top_k=5), 400)
    assert first.possible == 5 and first.p.sum() == pytest.approx(1)
    right = {"plain": Method(), "lookup": Method(PromptLookup(), 1),
             **model_methods(first.drafts(models), {"chain": (1,), "tree": (2,)}, sample=True)}
    for name, method in right.items():
        accepted, *found = first.read(method)
        assert first.explains(*found), name
        assert (accepted is None) == (name in ("plain", "lookup")), name     # a lookup finds nothing in this prompt

    def likeliest(decoder, start, n_new, rng, sampler):
        return autoregressive_generate(decoder, start, n_new)
    assert not first.explains(*first.read(likeliest)[1:])
    assert not first.explains(1, 0.0, 0.0) and first.explains(0, 0.0, 0.0)
