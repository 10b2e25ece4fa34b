"""Tree shapes, drafters of trees, and what the loop makes of a tree."""

from itertools import product

import numpy as np
import pytest

from console import BadInput
from decode_lab import Sampler, tree_generate
from lab.drafters.trees import ConfidentTreeDrafter, TreeDrafter, TreeShape, path_along, tokens_to
from lab.measure.scripted import ScriptedDrafter, random_decoder, script, tree
from loops import PROMPT, TEXT, V, Watched, check, one_sentence

# -- trees ---------------------------------------------------------------------------------------------------

def test_tree_shape():
    shape = TreeShape.branching([2, 3])
    assert len(shape) == 8 and shape.depth == 2 and shape.depths == [1, 1] + [2] * 6
    assert shape.nodes[:3] == [(-1, 0), (-1, 1), (0, 0)] and shape.children[1] == [5, 6, 7]
    assert len(TreeShape([])) == 0 and TreeShape([]).depth == 0 and TreeShape.branching([]).nodes == []
    for bad in ([(0, 0)], [(-1, 1)], [(-1, 0), (-1, 0)], [(-2, 0)]):
        with pytest.raises(BadInput):
            TreeShape(bad)
    with pytest.raises(BadInput):
        TreeShape.branching([2, 0])


@pytest.mark.parametrize("shape", [[4], [1] * 5, [], [2, 2, 2], [3, 1]])
def test_tree_forwards_and_keeps(shape):
    """One send per round, the root first; commit gets the path; nothing else touches the cache."""
    target, draft = random_decoder(6, 3), random_decoder(6, 4)
    drafter = TreeDrafter(draft, TreeShape.branching(shape))
    tokens, run = tree_generate(target, Watched(drafter, target), [0, 1, 2], 40)
    check(target, tokens, run, [0, 1, 2])
    assert target.called("rewind") == [0]
    for sent, nodes, r in zip(target.called("send"), target.called("commit"), run.rounds, strict=True):
        assert len(sent[0]) == r.drafted + 1 and sent[1][0] == -1
        assert nodes[0] == 0 and len(nodes) == r.accepted + 1


def test_duplicate_siblings_are_harmless():
    """Both say the right token: the walk takes the first, and only its children count."""
    def plan(tokens, gamma):
        a, b = TEXT[len(tokens):len(tokens) + 2]
        return tree([a, a, b, (b + 1) % V], [-1, -1, 0, 1]) if gamma > 1 else tree([a, a], [-1, -1])

    target = script(TEXT, V)
    tokens, run = tree_generate(target, Watched(ScriptedDrafter(plan), target), PROMPT, 12)
    check(target, tokens, run, PROMPT)
    assert tokens.tolist() == TEXT[:15] and [r.accepted for r in run.rounds] == [2, 2, 2, 2]


def test_an_eos_inside_a_tree():
    for at in range(3, 8):
        text = [t if i != at else 15 for i, t in enumerate(TEXT)]
        target = script(text, V)
        drafter = TreeDrafter(script(text, V), TreeShape.branching([2, 1, 1, 1]))
        tokens, run = tree_generate(target, Watched(drafter, target), PROMPT, 20, eos={15})
        check(target, tokens, run, PROMPT)
        assert tokens.tolist() == text[:at + 1] and run.stop == "eos"


@pytest.mark.parametrize("n_new", [1, 2, 3, 4])
def test_a_tree_within_the_budget_and_the_context(n_new):
    for options, wanted in ((dict(), n_new), (dict(max_length=3 + n_new), 20)):
        target = script(TEXT, V, **options)
        drafter = TreeDrafter(script(TEXT, V), TreeShape.branching([2, 2, 2]))
        tokens, run = tree_generate(target, Watched(drafter, target), PROMPT, wanted)
        check(target, tokens, run, PROMPT)
        assert tokens.tolist() == TEXT[:3 + n_new]


def test_tree_drafter_takes_the_likeliest_children_in_order():
    target, draft = random_decoder(6, 3), random_decoder(6, 4)
    drafter = TreeDrafter(draft, TreeShape.branching([3, 2]))
    drafter.start(target, Sampler(), [0, 1])
    proposed = drafter.propose([0, 1], 9, None)
    ranked = lambda history, n: np.argsort(-draft._logits(history), kind="stable")[:n].tolist()
    assert proposed.tokens[:3] == ranked((0, 1), 3) and proposed.parents[:3] == [-1] * 3
    for node in range(3):
        below = [proposed.tokens[i] for i in proposed.children()[node]]
        assert below == ranked((0, 1, proposed.tokens[node]), 2)
    assert draft.length == 2, "between rounds it holds the sequence alone"
    drafter.verified([0, 1, 5], [], None)
    assert draft.tokens == [0, 1] and not draft.pending


def test_sampled_siblings_differ_and_carry_the_q_they_were_drawn_from():
    target, draft = random_decoder(6, 3), random_decoder(6, 4)
    sampler = Sampler(1.5, repetition_penalty=1.5)          # a penalty sees the tokens above in the tree
    drafter = TreeDrafter(draft, TreeShape.branching([3, 2]), sampler, sample=True)
    for seed in range(5):
        drafter.start(target, Sampler(1.0), [0, 1])
        proposed = drafter.propose([0, 1], 2, np.random.default_rng(seed))
        for node, children in proposed.children().items():
            history = (0, 1) + tuple(tokens_to(proposed, node))
            q = sampler.probs(draft._logits(history), history)
            assert len({proposed.tokens[i] for i in children}) == len(children)
            for i in children:
                np.testing.assert_allclose(proposed.q[i], q / q.sum())
                q = q.copy()
                q[proposed.tokens[i]] = 0


def test_confident_tree_is_the_likeliest_paths():
    """Wide enough to see everything, it equals a sort of all paths by probability."""
    target, draft = random_decoder(4, 3), random_decoder(4, 4)
    drafter = ConfidentTreeDrafter(draft, 9, 3, width=64)
    drafter.start(target, Sampler(), [0, 1])
    proposed = drafter.propose([0, 1], 9, None)
    paths = {}
    for depth in (1, 2, 3):
        for path in product(range(4), repeat=depth):
            p = [Sampler(1.0).probs(draft._logits((0, 1) + path[:i]))[t] for i, t in enumerate(path)]
            paths[path] = np.prod(p)
    best = sorted(paths, key=lambda path: -paths[path])[:9]
    assert {tuple(tokens_to(proposed, i)) for i in range(9)} == set(best)


def test_confident_tree_keeps_to_its_nodes_depth_and_width():
    target, draft = random_decoder(30, 3), random_decoder(30, 4)
    for n_nodes, depth, width in ((5, 3, 2), (12, 2, 4), (1, 1, 1), (40, 3, 3)):
        target.calls.clear()
        drafter = ConfidentTreeDrafter(draft, n_nodes, depth, width)
        tokens, run = tree_generate(target, Watched(drafter, target), [0], 60)
        check(target, tokens, run, [0])
        seen = width + (depth - 1) * width * width
        assert max(r.drafted for r in run.rounds) == min(n_nodes, seen)
        assert max(r.tested for r in run.rounds) <= depth


@pytest.mark.parametrize("shape", [(0, 2, 2), (4, 0, 2), (4, 2, -1)])
def test_a_confident_tree_without_extent_is_refused(shape):
    with pytest.raises(BadInput) as error:
        ConfidentTreeDrafter(random_decoder(9, 1), *shape)
    one_sentence(error)


def test_the_candidates_of_a_tree_are_chosen_after_the_repetition_penalty():
    """With draft = target, a chain of first candidates is accepted whole only if both see the same penalty."""
    sampler = Sampler(repetition_penalty=5.0)
    for seed in range(5):
        target, draft = random_decoder(9, seed), random_decoder(9, seed)
        chain = TreeDrafter(draft, TreeShape.branching((1,) * 4))
        run = tree_generate(target, chain, [0, 1, 2], 40, sampler=sampler)[1]
        assert run.alpha == 1


def test_tokens_go_down_a_tree_as_far_as_it_has_them():
    drafted = tree([7, 8, 7, 9], [-1, -1, 1, 2])
    assert path_along(drafted, [8, 7, 9, 9]) == [1, 2, 3] and path_along(drafted, [8, 5, 7]) == [1]
    assert path_along(drafted, [5, 7]) == [] and path_along(drafted, []) == []
