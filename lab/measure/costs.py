"""What forwards cost: t(n), the time of sending n tokens, and c, the time of a draft model's step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from console import record_samples
from lab.measure import timing
from lab.measure.spread import disturbed

LENGTHS = (1, 2, 3, 4, 5, 7, 9, 13, 17)  # tokens sent, whose times say what drafts of up to 16 tokens cost
MOST = 1.2                     # times that c or a verify ratio may differ between earlier and later readings


class StepCurve:
    """t(n), the time of sending n tokens over that of one: straight lines between measured medians.

    seconds: {n: seconds}, with n = 1. step_s: seconds of sending one.
    """

    def __init__(self, seconds: Mapping[int, float]):
        self.seconds, self.step_s = dict(sorted(seconds.items())), seconds[1]

    def __call__(self, n):
        return np.interp(n, list(self.seconds), list(self.seconds.values())) / self.step_s


class Costs:
    """t(n) and c as measured on this machine, over all readings so far.

    A shared machine changes its pace. So a demo calls `read` before the runs that it explains, and again after them.

    target: the model. ids: one token or more, repeated as often as the longest forward needs. context: tokens in the
    cache. sent: the n of t(n), 1 among them. repeats: timings of each n and of each step, per reading. drafts: {name:
    draft model}; some may read the target's cache.
    """

    def __init__(self, target, ids: Sequence[int], context: int, sent: Sequence[int], repeats: int,
                 drafts: Mapping[str, Any] | None = None):
        self.target, self.drafts = target, dict(drafts or {})
        self.context, self.sent, self.repeats = context, sorted({1, *sent}), repeats
        self._ids = (list(ids) * (context + self.sent[-1]))[:max(context + 1, self.sent[-1])]
        self._sending = np.zeros((len(self.sent), 0))
        self._steps = np.zeros((1 + len(self.drafts), 0))

    def read(self) -> None:
        """Time every forward `repeats` times more, and keep all seconds in the record of the demo that runs."""
        sending = timing.step_times(self.target, self._ids, self.context, self.sent, self.repeats)
        self._sending = np.hstack([self._sending, sending])
        if self.drafts:
            models = [self.target, *self.drafts.values()]
            steps = timing.step_seconds(models, self._ids, self.context, self.repeats)
            self._steps = np.hstack([self._steps, steps])
        for what, seconds in self.samples.items():
            record_samples(what, seconds)

    @property
    def t(self) -> StepCurve:
        """t(n): medians over all readings."""
        return StepCurve(dict(zip(self.sent, np.median(self._sending, axis=1).tolist())))

    @property
    def c(self) -> dict[str, float]:
        """{draft: time of its step over that of the target's beside it}, the median over all readings."""
        ratios = np.median(self._steps[1:] / self._steps[0], axis=1)
        return dict(zip(self.drafts, ratios.tolist()))

    @property
    def step_s(self) -> float:
        """Seconds of a step of the target, as timed beside the drafts' steps."""
        return float(np.median(self._steps[0]))

    @property
    def not_judged(self) -> str:
        """Why c and the verify ratios are not to be judged, as a sentence; "" where the earlier and the later half of
        all readings agree."""
        half = self._sending.shape[1] // 2
        if not half or (len(self.sent) == 1 and not self.drafts):
            return ""
        ratios = []
        for part in (np.s_[:, :half], np.s_[:, half:]):
            sending, steps = np.median(self._sending[part], axis=1), self._steps[part]
            c = np.median(steps[1:] / steps[0], axis=1) if self.drafts else []
            ratios.append([*(sending[1:] / sending[0]), *c])
        return disturbed(ratios, "c and of verify ratios", MOST)

    @property
    def samples(self) -> dict[str, dict]:
        """All seconds in the order taken, for the record: {"sending n tokens": {n: ...}, "a step": {model: ...}}."""
        found: dict[str, dict] = {"seconds of sending n tokens": dict(zip(self.sent, self._sending))}
        if self.drafts:
            found["seconds of a step"] = dict(zip(["target", *self.drafts], self._steps))
        return found
