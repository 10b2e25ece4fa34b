"""Speedups as four readings predict them, beside the measured ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from lab.drafters.best_tree import accept_lengths_to_end
from lab.measure.costs import StepCurve
from lab.measure.known_texts import KnownText
from lab.measure.turns import Made, Method, speedup


def foretold(method: Method, t: StepCurve, c: Mapping[str, float], target, text, n_prompt: int,
             ranks=None) -> list[float]:
    """Of a later round of a method on a text: tau, and the steps of the target that drafting and verifying take.

    t: a StepCurve. c: of each draft model. ranks: (n,), where the text's new tokens stand in the draft model's list; tau
    is then 1 plus the mean accept length over all starts, rounds near the end of the text cut short. A lookup has no ranks: its rounds are counted on the known
    text, the first left out, and its own time there is read.
    """
    if method.shape is None:
        run = method(KnownText(text, target), text[:n_prompt], len(text) - n_prompt)[1].later()
        return [run.tau, float(np.mean([r.draft_s for r in run.rounds])) / t.step_s,
                float(np.mean([t(r.drafted + 1) for r in run.rounds]))]
    # Near the end of the text rounds are cut short: at each start, the tokens still missing but one are drafted at most.
    left, depths = np.arange(len(ranks))[::-1], np.array(method.shape.depths, int)
    opened = [0 if parent < 0 else depths[parent] for parent in {-1, *(p for p, _ in method.shape.nodes)}]  # by level
    levels = np.cumsum([0, *t(np.bincount(opened))])
    deep = np.minimum(left, max(method.shape.depth, 1))
    return [1 + float(accept_lengths_to_end(ranks, method.shape).mean()),
            float(c[method.draft] * levels[np.minimum(deep, len(levels) - 1)].mean()),
            float(np.mean([t(1 + (depths <= d).sum()) for d in deep]))]


@dataclass(frozen=True)
class Explained:
    """A speedup measured after the first round, beside what the pieces tell. Times of a round are in steps of the target.

    tau_told, draft_told, verify_told: as `foretold` gives them; tau, draft, verify: measured. drafts: drafted per round.
    alpha: None where nothing was drafted.
    """

    tau_told: float
    draft_told: float
    verify_told: float
    tau: float
    draft: float
    verify: float
    speedup: float
    drafts: float
    alpha: float | None

    @property
    def told(self) -> float:
        """The speedup that the pieces tell: tokens of a round over its steps."""
        return self.tau_told / (self.draft_told + self.verify_told)

    @property
    def off_in(self) -> str:
        """The piece that is furthest off, where the speedup told is by more than 20%; else "-"."""
        if abs(self.told / self.speedup - 1) <= 0.2:
            return "-"
        whole = self.draft + self.verify
        off = {"tau": self.tau_told / self.tau, "drafting": whole / (self.draft_told + self.verify),
               "verifying": whole / (self.draft + self.verify_told)}
        return max(off, key=lambda piece: abs(np.log(off[piece])))

    @property
    def verdict(self) -> str:
        """Whether it pays; within 3% of plain decoding, neither."""
        return "pays" if self.speedup > 1.03 else "loses" if self.speedup < 0.97 else "even"


def explain(told: Sequence[float], base: Sequence[Made], made: Sequence[Made]) -> Explained:
    """What was `foretold` of a method beside its runs, and those of plain decoding (`base`) in the same turns."""
    runs, step = [m.run.later() for m in made], median(m.run.per_token for m in base)
    draft, verify = (median(np.mean([getattr(r, what) for r in run.rounds]) for run in runs) / step
                     for what in ("draft_s", "verify_s"))
    run = runs[0]                                    # counts are the same in all
    return Explained(*told, run.tau, draft, verify, speedup(base, made), run.drafted / len(run.rounds),
                     run.alpha if run.drafted else None)
