"""Speedups as four readings predict them, beside the measured ones.

The readings: a draft's cost c, its acceptance, t(n), and the tokens per round that follow from both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np

from decode_lab import Run
from lab.drafters.best_tree import accept_lengths_to_end
from lab.measure.compare import Compared
from lab.measure.costs import Costs, StepCurve
from lab.measure.known_texts import KnownText
from lab.measure.turns import Method

CLOSE = 0.2                    # relative: a prediction within it needs no explanation


class Pieces(NamedTuple):
    """What a speedup is made of. tau: tokens per round. draft, verify: time per round, in steps of the target."""

    tau: float
    draft: float
    verify: float

    @property
    def speedup(self) -> float:
        """Tokens of a round over its steps: plain decoding makes one token a step."""
        return self.tau / (self.draft + self.verify)


def predict(method: Method, t: StepCurve, c: Mapping[str, float], target, text, n_prompt: int,
            ranks=None) -> Pieces:
    """The pieces of a later round of a method on a known text, from readings of the target and of the draft.

    t: the time of sending n tokens. c: of each draft model. text: ids (n,), prompt and output. n_prompt: tokens of the
    prompt. ranks: (new tokens,), where each stands in the draft model's list, 0 first. tau is then 1 plus the mean
    accept length over all starts, rounds near the end of the text cut short. A lookup has no ranks: its rounds are
    counted on the known text, the first left out, and its own time there is read.
    """
    if method.shape is None:
        return _replayed(method, t, target, text, n_prompt)
    # Near the end of the text rounds are cut short: at each start, at most the missing tokens but one are drafted.
    left, depths = np.arange(len(ranks))[::-1], np.array(method.shape.depths, int)
    opened = [0 if parent < 0 else depths[parent] for parent in {-1, *(p for p, _ in method.shape.nodes)}]  # by level
    levels = np.cumsum([0, *t(np.bincount(opened))])
    deep = np.minimum(left, max(method.shape.depth, 1))
    return Pieces(tau=1 + float(accept_lengths_to_end(ranks, method.shape).mean()),
                  draft=float(c[method.draft] * levels[np.minimum(deep, len(levels) - 1)].mean()),
                  verify=float(np.mean([t(1 + (depths <= d).sum()) for d in deep])))


def predict_rounds(run: Run, t: StepCurve, c: float = 0.0, step_s: float | None = None) -> Pieces:
    """The pieces of rounds that are counted already, such as a library's: a drafted token takes c steps, and sending n
    tokens t(n). What else the library does between forwards takes no time here.

    step_s: seconds of the step in which the pieces are given; None for t's own.
    """
    rounds, over = run.later().rounds, t.step_s / (step_s or t.step_s)
    return Pieces(tau=run.later().tau, draft=over * c * float(np.mean([r.drafted for r in rounds])),
                  verify=over * float(np.mean([t(r.drafted + 1) for r in rounds])))


def _replayed(method: Method, t: StepCurve, target, text, n_prompt: int) -> Pieces:
    """The pieces of the rounds that a method has on a text that is known, its drafting timed there."""
    run = method(KnownText(text, target), text[:n_prompt], len(text) - n_prompt)[1].later()
    return Pieces(tau=run.tau, draft=float(np.mean([r.draft_s for r in run.rounds])) / t.step_s,
                  verify=float(np.mean([t(r.drafted + 1) for r in run.rounds])))


@dataclass(frozen=True)
class Explained:
    """A speedup measured after the first round, and the pieces that it is made of, predicted and measured.

    drafts: drafted per round. alpha: None where nothing was drafted. quartiles: of the paired ratios whose median the
    speedup is; None where they were not read.
    """

    predicted: Pieces
    measured: Pieces
    speedup: float
    drafts: float
    alpha: float | None
    quartiles: tuple[float, float] | None = None

    @property
    def close(self) -> bool:
        """Whether the predicted speedup lies within 20% of the measured one, or of its quartiles."""
        low, high = self.quartiles or (self.speedup, self.speedup)
        return low * (1 - CLOSE) <= self.predicted.speedup <= high * (1 + CLOSE)


def explain_compared(predicted: Pieces, row: Compared) -> Explained:
    """What was predicted beside a row of `compare`: its pieces over the mean of the plain runs before and after."""
    draft, verify = (median(np.mean([getattr(r, what) for r in made.run.later().rounds]) / step
                            for made, step in zip(row.made, row.steps)) for what in ("draft_s", "verify_s"))
    run = row.made[0].run.later()                    # counts are the same in all
    return Explained(predicted, Pieces(run.tau, draft, verify), row.speedup, run.drafted / len(run.rounds),
                     run.alpha if run.drafted else None, row.quartiles)


def explain_rows(rows: Sequence[Compared], methods: Mapping[str, Method], costs: Costs, target, text, n_prompt: int,
                 ranks: Mapping[str, np.ndarray]) -> dict[str, Explained]:
    """{method: what is predicted of it on a known text, beside what was measured there} for rows of `compare`.

    ranks: {draft model: (new tokens,)}; the rest as `predict` takes it.
    """
    def pieces(method):
        return predict(method, costs.t, costs.c, target, text, n_prompt, ranks[method.draft] if method.draft else None)
    return {row.method: explain_compared(pieces(methods[row.method]), row) for row in rows}
