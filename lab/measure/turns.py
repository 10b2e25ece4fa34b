"""What is compared: a method, which is a loop with its drafter, and one generation of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from decode_lab import Decoder, Drafter, Run, autoregressive_generate, speculative_generate, tree_generate
from lab.drafters.trees import TreeShape


class Made(NamedTuple):
    """One generation. tokens: (n,) ids, prompt and output."""

    tokens: np.ndarray
    run: Run


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
