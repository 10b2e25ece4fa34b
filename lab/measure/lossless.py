"""Whether methods write what plain decoding writes: greedy texts after fixed prompts, and many sampled first tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from console import progress
from decode_lab import Run, Sampler
from lab.measure.exactness import distances
from lab.measure.known_texts import Remembered
from lab.measure.turns import Method
from lab.models.kept_prefix import KeptPrefix
from lab.models.layers import LayerDraft

SHARE = 0.9999                 # of plain samplings that lie within what is taken for chance
SAMPLINGS = 20_000             # that say what chance does


# -- greedy ----------------------------------------------------------------------------------------------------

def kept_drafts(models: Mapping[str, Any]) -> dict[str, Any]:
    """Draft models that keep their caches from run to run, where they have one of their own."""
    return {name: model if isinstance(model, LayerDraft) else KeptPrefix(model) for name, model in models.items()}


def greedy_runs(methods: Mapping[str, Callable], target, n_new: int,
                prompts: Sequence[Sequence[int]]) -> dict[str, list[tuple[np.ndarray, Run]]]:
    """{"plain" and each method: its (tokens, run) after each prompt}, greedy, up to n_new tokens.

    A prompt is prefilled once for all methods; draft models should be `kept_drafts`.
    """
    every: dict[str, Callable] = {"plain": Method(), **methods}
    kept = KeptPrefix(target)
    made: dict[str, list[tuple[np.ndarray, Run]]] = {name: [] for name in every}
    for prompt in progress(prompts, "comparing texts"):
        for name, method in every.items():
            made[name].append(method(kept, prompt, n_new, eos=target.eos))
    return made


# -- sampled ---------------------------------------------------------------------------------------------------

class FirstTokens:
    """Many sampled runs after one prompt: how far the counts of their first tokens are from the target's distribution.

    A forward that was made before is remembered, so that many runs take a few forwards; the rules run again each time.

    p: (V,), the exact distribution. chance: (total variation, chi-square) that all but 1 - SHARE of plain samplings of
    as many tokens stay within. possible: tokens that p allows.
    """

    def __init__(self, target, prompt: Sequence[int], sampler: Sampler, n: int, seed: int = 0):
        self.prompt, self.sampler, self.n, self._rng = prompt, sampler, n, np.random.default_rng(seed)
        target.rewind(0)
        self.p = sampler.probs(target.send(prompt)[-1])
        self._support = np.flatnonzero(self.p)
        self.possible, p = len(self._support), self.p[self._support]
        by_chance = distances(self._rng.multinomial(n, p / p.sum(), size=SAMPLINGS), p)
        self.chance = tuple(float(np.quantile(x, SHARE)) for x in by_chance)
        self._target = Remembered(target)

    def explains(self, impossible: int, off: float, chi_square: float) -> bool:
        """Whether chance explains such readings."""
        return not impossible and off <= self.chance[0] and chi_square <= self.chance[1]

    def drafts(self, models: Mapping[str, Any]) -> dict[str, Remembered]:
        """The draft models, each of which remembers its forwards, too."""
        return {name: Remembered(model, self._target if isinstance(model, LayerDraft) else None)
                for name, model in models.items()}

    def read(self, method: Callable) -> tuple[float | None, int, float, float]:
        """(accepted over tested, None without drafts; impossible tokens; total variation; chi-square) of a method."""
        both = [method(self._target, self.prompt, 2, rng=self._rng, sampler=self.sampler) for _ in range(self.n)]
        counts = np.bincount([tokens[len(self.prompt)] for tokens, _ in both], minlength=len(self.p))
        run, possible = Run.pool([run for _, run in both]), counts[self._support]
        off, chi_square = distances(possible, self.p[self._support])
        return run.alpha if run.drafted else None, int(self.n - possible.sum()), float(off), float(chi_square)
