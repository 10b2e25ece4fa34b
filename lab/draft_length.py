"""How many tokens to draft: policies for the `gamma=` of decode_lab.speculative_generate, each a callable Run -> int.

A policy knows the rounds so far and nothing of the text. It may outlive a run: with the next one it starts afresh, so
that the same call drafts the same tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import numpy as np

from console import BadInput
from decode_lab import Round, Run


class DraftLength(ABC):
    """A policy: `start` begins a run, `read` is told of each round once, in order, `choose` gives the next gamma."""

    _run: Run | None = None

    def __call__(self, run: Run) -> int:
        if run is not self._run:
            self._run, self._n_read = run, 0
            self.start()
        for past in run.rounds[self._n_read:]:
            self.read(past)
        self._n_read = len(run.rounds)
        return self.choose()

    def start(self) -> None: ...
    def read(self, past: Round) -> None: ...

    @abstractmethod
    def choose(self) -> int: ...


class CostAware(DraftLength):
    """The gamma, 0 included, with the most expected tokens per second: (1 + sum over i of alpha_1 ... alpha_i) over
    t(gamma + 1) + gamma c t(1). The numerator is llm_math.tau_from_positions.

    seconds: the measured time of sending n tokens, a function of n, or {n: seconds} with 1 and gamma_max + 1 or more
    among the n, straight lines between them. c: seconds of one drafted token over those of sending one token.
    gamma_max: longest draft. BadInput for times that are missing or not above 0.
    drafter: None, and acceptance is estimated by draft position. A lookup that tells its match's length (`matched`),
    and it is estimated by the tokens copied before this one, match and draft together: what is learnt of the third
    token behind a match of one then serves the first behind a match of three.
    discount: weight of a test after one more round of drafting; 1 forgets nothing.
    weight: how many tests the first guess is worth. That is the estimate one token earlier (0.5 for the first); for a
    lookup no less than n / (n + 2) after n copied tokens, as a copy that held for long tends to hold on.
    probe: where nothing pays, the share of plain decoding's time to be spent on finding out whether that still holds.

    The estimate rests on positions tested, so drafts that came out shorter than asked for, or empty, do not bend it.
    """

    LONGEST = 24                                               # copies longer than this are taken for one kind

    def __init__(self, seconds: Callable[[int], float] | Mapping[int, float], c: float = 0.0, gamma_max: int = 16, *,
                 drafter=None, discount: float = 0.9, weight: float = 1.0, probe: float = 0.01):
        for name, value, ok, right in (
                ("c", c, 0 <= c < np.inf, "0 or more"),
                ("gamma_max", gamma_max, gamma_max == int(gamma_max) >= 0, "a whole number, 0 or more"),
                ("discount", discount, 0 < discount <= 1, "above 0 and at most 1"),
                ("weight", weight, 0 < weight < np.inf, "above 0"),
                ("probe", probe, 0 < probe <= 1, "above 0 and at most 1")):
            if not ok:
                raise BadInput(f"{name} = {value} is impossible: {right} would be right.")
        if drafter is not None and not hasattr(drafter, "matched"):
            raise BadInput(f"{getattr(drafter, 'name', drafter)} does not tell how long its match is: leave `drafter` "
                           "out, or give a SuffixLookup.")
        n = range(1, int(gamma_max) + 2)
        if isinstance(seconds, Mapping):
            known = sorted(seconds)
            if not known or known[0] != 1 or known[-1] < n[-1]:
                raise BadInput(f"Times of sending {known} tokens do not tell those of 1 to {n[-1]}, gamma_max + 1.")
            times = np.interp(n, known, [seconds[k] for k in known]).tolist()
        else:
            times = [float(seconds(k)) for k in n]
        if not all(0 < t < np.inf for t in times):
            raise BadInput(f"Sending 1 to {n[-1]} tokens takes {times} seconds: times above 0 would be right.")
        self.seconds = [t + gamma * c * times[0] for gamma, t in enumerate(times)]       # of a round, by gamma
        self.drafter, self.discount, self.weight, self.probe = drafter, discount, weight, probe

    def start(self):
        kinds = len(self.seconds) + (self.LONGEST if self.drafter is not None else 0)
        self.tested, self.accepted = [0.0] * kinds, [0.0] * kinds
        self._copied, self._since, self._probing, self._again = 0, 0, False, False

    def read(self, past):
        if past.drafted:
            # All grow old together: a position that was given up on long ago is believed to be as the one before it.
            for table in (self.tested, self.accepted):
                table[:] = [self.discount * x for x in table]
        for i in range(min(past.tested, len(self.seconds) - 1)):
            self.tested[self._copied + i] += 1
            self.accepted[self._copied + i] += i < past.accepted
        self._since += 1
        if self._probing and past.drafted:                     # a lookup may have had nothing to propose
            cost = self.seconds[min(past.drafted, len(self.seconds) - 1)]
            self._since, self._again = 0, (past.accepted + 1) * self.seconds[0] > cost

    def alphas(self) -> list[float]:
        """Estimated acceptance at draft position 1 ... gamma_max of the next round, each given those before it."""
        estimate, found = 0.5, []
        for n in range(self._copied + len(self.seconds) - 1):
            guess = estimate if self.drafter is None else max(estimate, n / (n + 2))
            estimate = (self.accepted[n] + self.weight * guess) / (self.tested[n] + self.weight)
            found.append(estimate)
        return found[self._copied:]

    def choose(self):
        self._copied = min(self.drafter.matched, self.LONGEST) if self.drafter is not None else 0
        reach, tokens, best, rate = 1.0, 1.0, 0, 0.0
        for gamma, alpha in enumerate(self.alphas(), 1):
            reach *= alpha
            tokens += reach
            if tokens / self.seconds[gamma] > rate:
                best, rate = gamma, tokens / self.seconds[gamma]
        self._probing = False
        if best == 0 or rate > 1 / self.seconds[0]:
            return best
        # A probe that fails costs this share of a plain step, so it waits; one that paid is followed by another.
        lost = self.seconds[best] / self.seconds[0] - 1
        self._probing = self._again or self._since * self.probe >= lost
        return best if self._probing else 0
