"""What chance alone does: standard errors of what a run reports, and how far off one of several readings may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import NormalDist

import numpy as np

from decode_lab import Run

LEVEL = 0.05          # chance that a set of comparisons fails although nothing is wrong
LEAST_ROUNDS = 30     # of fewer, a standard error says little


def level_each(comparisons: int) -> float:
    """The p-value below which one of several comparisons fails: LEVEL over their number (Bonferroni)."""
    return LEVEL / comparisons


def most_errors(comparisons: int) -> float:
    """How many standard errors one of several differences may be off, up or down, by the same level (normal)."""
    return NormalDist().inv_cdf(1 - level_each(comparisons) / 2)


def with_error(run: Run, statistic: Callable[[Run], float], draws: int = 200) -> tuple[float, float]:
    """(a statistic of a run, its standard error: how much it varies when the rounds are drawn again, with replacement).

    Rounds count as independent of each other. The draws are the same each time.
    """
    rounds, rng = np.empty(len(run.rounds), object), np.random.default_rng(0)
    rounds[:] = run.rounds
    drawn = rng.choice(rounds, size=(draws, len(rounds)))
    return statistic(run), float(np.std([statistic(Run(list(row))) for row in drawn]))


def too_few(runs: Iterable[Run]) -> str:
    """Why standard errors of these runs are not to be judged, for observe(not_judged=...), or "" where they may be."""
    least = min(len(run.rounds) for run in runs)
    return f"One number rests on {least} rounds, fewer than {LEAST_ROUNDS}." if least < LEAST_ROUNDS else ""
