"""What forwards cost: t(n), the time of sending n tokens, and c, the time of a draft model's step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


class StepCurve:
    """t(n), the time of sending n tokens over that of one: straight lines between measured medians.

    seconds: {n: seconds}, with n = 1. step_s: seconds of sending one.
    """

    def __init__(self, seconds: Mapping[int, float]):
        self.seconds, self.step_s = dict(sorted(seconds.items())), seconds[1]

    def __call__(self, n):
        return np.interp(n, list(self.seconds), list(self.seconds.values())) / self.step_s
