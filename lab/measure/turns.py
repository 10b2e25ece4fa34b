"""Methods that take turns in one process: one generation each, again and again, in alternating order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np

from console import progress
from decode_lab import Decoder, Drafter, Run, autoregressive_generate, speculative_generate, tree_generate
from lab.drafters.trees import TreeShape
from lab.measure import timing


class Made(NamedTuple):
    """One generation. tokens: (n,) ids, prompt and output. peak: most bytes held meanwhile, None where unknown."""

    tokens: np.ndarray
    run: Run
    peak: int | None


@dataclass(frozen=True)
class Method:
    """One of decode_lab's loops with its drafter: plain decoding without one, trees without a gamma.

    shape: of what a model drafts, for predictions. draft: that model's name.
    """

    drafter: Drafter | None = None
    gamma: int | Callable[[Run], int] | None = None
    shape: TreeShape | None = None
    draft: str = ""

    def __call__(self, decoder: Decoder, prompt, n_new: int, **options) -> tuple[np.ndarray, Run]:
        if self.drafter is None:
            return autoregressive_generate(decoder, prompt, n_new, **options)
        if self.gamma is None:
            return tree_generate(decoder, self.drafter, prompt, n_new, **options)
        return speculative_generate(decoder, self.drafter, prompt, n_new, self.gamma, **options)


def in_turn(methods: Mapping[str, Callable], decoder, prompt, n_new: int, runs: int,
            label: str) -> dict[str, list[Made]]:
    """{name: its generations}: all methods once, then all again in the opposite order, until each has made `runs`."""
    made: dict[str, list[Made]] = {name: [] for name in methods}
    for k in progress(range(runs), label):
        for name in list(methods)[::-1 if k % 2 else 1]:
            timing.reset_peak_memory(decoder.device)
            tokens, run = methods[name](decoder, prompt, n_new, eos=decoder.eos)
            made[name].append(Made(tokens, run, timing.peak_memory(decoder.device)))
    return made


def speedup(base: Sequence[Made], other: Sequence[Made]) -> float:
    """Time per token of `base` over that of `other`, first rounds apart: the median over the turns they shared."""
    return median(a.run.per_token / b.run.per_token for a, b in zip(base, other, strict=True))
