"""Methods that several demos compare: lookups, and the chain and the tree of a draft model predicted to be fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lab.drafters.best_tree import best_tree, rank_table
from lab.drafters.draft_length import CostAware
from lab.drafters.lookup import PromptLookup, SuffixLookup
from lab.drafters.model import ModelDrafter
from lab.drafters.trees import TreeDrafter, TreeShape
from lab.measure.costs import StepCurve
from lab.measure.prediction import predict
from lab.measure.turns import Method
from lab.support.errors import unknown

KINDS = ("chain", "tree")


def lookup_methods(t: StepCurve, longest: int = 16) -> dict[str, Method]:
    """The two lookups of demo 15. Each drafts as many tokens as pay at these times, `longest` at most."""
    suffixes = SuffixLookup()
    return {"lookup": Method(PromptLookup(), CostAware(t.seconds, gamma_max=longest)),
            "suffixes": Method(suffixes, CostAware(t.seconds, gamma_max=longest, drafter=suffixes))}


def model_method(kind: str, model, shape: TreeShape, name: str, sample: bool = False) -> Method:
    """A model, called `name` where costs and ranks are looked up, drafts a "chain" as deep as the shape, or the "tree".

    sample: the candidates of a tree are drawn, as a chain's are, where the target samples.
    """
    if kind not in KINDS:
        raise unknown("kind of draft", kind, KINDS)
    if kind == "chain":
        return Method(ModelDrafter(model), shape.depth, shape, name)
    return Method(TreeDrafter(model, shape, sample=sample), None, shape, name)


def model_methods(models: Mapping[str, Any], shapes: Callable[[str, str], TreeShape] | Mapping[str, Sequence[int]],
                  sample: bool = False) -> dict[str, Method]:
    """{"draft, chain" and "draft, tree": `model_method`} of each draft model.

    shapes: a function (draft, kind) -> shape, or {kind: widths by level}, the same for all models.
    """
    shape_of = shapes if callable(shapes) else lambda _, kind: TreeShape.branching(shapes[kind])
    return {f"{name}, {kind}": model_method(kind, model, shape_of(name, kind), name, sample)
            for name, model in models.items() for kind in KINDS}


def fastest_shape(kind: str, ranks: Sequence[np.ndarray], t: StepCurve, c: float, n_nodes: int,
                  width: int = 4) -> TreeShape:
    """The "chain" or "tree" of 1 to n_nodes nodes with the best predicted speed, on average over some texts.

    ranks: of each text, where the target's choices stand in the draft's list (n,), 0 first. Of each number of nodes one
    tree is tried, that with the most tokens a round (`best_tree`), of at most `width` candidates per node. t: the time
    of sending n tokens. c: that of a draft's step over one of the target's.
    """
    if kind not in KINDS:
        raise unknown("kind of draft", kind, KINDS)
    length, sizes = min(map(len, ranks)), range(1, n_nodes + 1)
    table = rank_table(np.array([r[:length] for r in ranks]), min(n_nodes, length), width)
    shapes = [TreeShape.branching((1,) * n) if kind == "chain" else best_tree(table, n)[0] for n in sizes]
    return max(shapes, key=lambda shape: _mean_speed(shape, ranks, t, {"": c}))


def _mean_speed(shape: TreeShape, ranks: Sequence[np.ndarray], t: StepCurve, c: Mapping[str, float]) -> float:
    method = Method(None, None, shape)
    return float(np.mean([predict(method, t, c, None, None, 0, each).speedup for each in ranks]))
