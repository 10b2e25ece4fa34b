"""How many tokens to draft: policies for the `gamma=` of decode_lab.speculative_generate, each a callable Run -> int.

A policy knows the rounds so far and nothing of the text. With a new run it begins again from its first state, so that
the same call drafts the same tokens. `generate_in_a_row` gives it several requests as one run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from decode_lab import Decoder, Drafter, Round, Run, speculative_generate
from lab.support.errors import BadInput, require, whole


class DraftLength(ABC):
    """A policy: `start` begins a run, `read` gets each round once, in order, `choose` gives the next gamma."""

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


def round_seconds(seconds: Callable[[int], float] | Mapping[int, float], c: float = 0.0,
                  gamma_max: int = 16) -> list[float]:
    """Seconds of a round, t(gamma + 1) + gamma c t(1), for gamma = 0 to gamma_max.

    seconds: the time of sending n tokens, a function of n, or {n: seconds} with 1 and gamma_max + 1 or more among the
    n, straight lines between them; any unit of time does. c: that of one drafted token over that of sending one token.
    BadInput for times that are missing or not above 0.
    """
    require(0 <= c < np.inf, "c", c, "0 or more")
    n = range(1, whole("gamma_max", gamma_max, 0) + 2)
    if isinstance(seconds, Mapping):
        known = sorted(seconds)
        if not known or known[0] != 1 or known[-1] < n[-1]:
            raise BadInput(f"Times of sending {known} tokens do not tell those of 1 to {n[-1]}, gamma_max + 1.")
        times = np.interp(n, known, [seconds[k] for k in known]).tolist()
    else:
        times = [float(seconds(k)) for k in n]
    if not all(0 < t < np.inf for t in times):
        raise BadInput(f"Sending 1 to {n[-1]} tokens takes {times} seconds: times above 0 would be right.")
    return [t + gamma * c * times[0] for gamma, t in enumerate(times)]


def steps(run: Run, seconds: Sequence[float]) -> float:
    """Plain steps that a run's rounds take, by the `round_seconds` of their drafts; n_tokens over it is the speedup."""
    return sum(seconds[r.drafted] for r in run.rounds) / seconds[0]


def generate_in_a_row(decoders: Sequence[Decoder], drafter: Drafter, prompts: Sequence[Sequence[int]], n_new: int,
                      policy: Callable[[Run], int]) -> tuple[list[np.ndarray], Run]:
    """Greedy requests one after the other, which the policy sees as one run: it does not know where one ends.

    decoders, prompts: one for each request. n_new: tokens of each. -> (prompt and output of each request, all rounds).
    Errors as `speculative_generate`.
    """
    stream, texts = Run(), []
    for decoder, prompt in zip(decoders, prompts, strict=True):
        before = list(stream.rounds)

        def gamma(run, before=before):
            stream.rounds = before + run.rounds
            return policy(stream)

        tokens, run = speculative_generate(decoder, drafter, prompt, n_new, gamma)
        stream.rounds = before + run.rounds
        texts.append(tokens)
    return texts, stream


class Fixed(DraftLength):
    """Always gamma tokens; 0 is plain decoding. What `gamma=` takes as a plain number, among the policies."""

    def __init__(self, gamma: int):
        self.gamma = whole("gamma", gamma, 0)

    def choose(self):
        return self.gamma


class AIMD(DraftLength):
    """Additive increase, multiplicative decrease, as a TCP sender finds its window (Chiu and Jain, 1989).

    1. Begin with `first` tokens.
    2. After a round whose whole draft was accepted, draft one token more, `most` at most.
    3. After a refusal, draft half as many, rounded down, `least` at least.

    A round without drafts changes nothing. BadInput unless 1 <= least <= first <= most.
    """

    def __init__(self, first: int = 4, least: int = 4, most: int = 64):
        self.least = whole("least", least, 1)
        self.first = whole("first", first, self.least)
        self.most = whole("most", most, self.first)

    def start(self):
        self._gamma = self.first

    def read(self, past):
        if past.accepted < past.tested:
            self._gamma = max(self.least, self._gamma // 2)
        elif past.drafted:                                     # a lookup may have had nothing to propose
            self._gamma = min(self._gamma + 1, self.most)

    def choose(self):
        return self._gamma


class Floor(DraftLength):
    """Drafts less where too few drafted tokens are accepted, down to none.

    1. Begin with `gamma` tokens, which is also the longest draft.
    2. When `window` tokens or more have been tested, look at the share of them that was accepted. Below `floor`: draft
       half as many, rounded down. Otherwise: twice as many, `gamma` at most. Then count from zero again.
    3. At none, wait `rest` rounds, then draft one token.

    BadInput for a floor outside 0 to 1, and for other numbers below 1.
    """

    def __init__(self, gamma: int = 8, floor: float = 0.35, window: int = 8, rest: int = 32):
        require(0 <= floor <= 1, "floor", floor, "0 to 1")
        self.gamma, self.floor = whole("gamma", gamma, 1), floor
        self.window, self.rest = whole("window", window, 1), whole("rest", rest, 1)

    def start(self):
        self._gamma, self._tested, self._accepted, self._rested = self.gamma, 0, 0, 0

    def read(self, past):
        if self._gamma == 0:
            self._rested += 1
            if self._rested == self.rest:
                self._gamma, self._rested = 1, 0
        self._tested += past.tested
        self._accepted += past.accepted
        if self._tested >= self.window:
            below = self._accepted < self.floor * self._tested
            self._gamma = self._gamma // 2 if below else min(2 * self._gamma, self.gamma)
            self._tested = self._accepted = 0

    def choose(self):
        return self._gamma


class Oracle(DraftLength):
    """The drafts of least cost for n new tokens whose accept lengths are known: no policy can do better on them.

    accepts: (n,), how many drafted tokens would be accepted behind each number of new tokens, 0 to n - 1. seconds, c,
    gamma_max: as `round_seconds` takes them, with its errors; BadInput for an accept length below 0.
    cost: (n + 1,), seconds from each number of new tokens to the end, each found from those behind it. Past the end of
    what it knows it drafts nothing.
    """

    def __init__(self, accepts, seconds: Callable[[int], float] | Mapping[int, float], c: float = 0.0,
                 gamma_max: int = 16):
        self.seconds, n = round_seconds(seconds, c, gamma_max), len(accepts)
        require(min(accepts, default=0) >= 0, "an accept length", min(accepts, default=0), "0 or more")
        self.cost, self._plan = [0.0] * (n + 1), [0] * n
        for at in reversed(range(n)):
            gammas = range(min(len(self.seconds), n - at))     # the last token is the target's own
            costs = [self.seconds[g] + self.cost[at + min(g, int(accepts[at])) + 1] for g in gammas]
            self._plan[at] = int(np.argmin(costs))
            self.cost[at] = costs[self._plan[at]]

    def start(self):
        self._at = 0

    def read(self, past):
        self._at += past.accepted + 1

    def choose(self):
        return self._plan[self._at] if self._at < len(self._plan) else 0


class CostAware(DraftLength):
    """The gamma, 0 included, with the most expected tokens per second, by the acceptance so far and the costs.

    1. After each round with drafts, multiply all counts of tested and accepted drafts by `discount`. Then count this
       round's tested and accepted drafts at their positions.
    2. Before each round, estimate alpha_i, the acceptance at position i given the positions before it: (accepted +
       weight * guess) / (tested + weight). The guess is the estimate one position earlier, `guess` for the first.
    3. Draft the gamma with the largest (1 + sum over i of alpha_1 ... alpha_i) / (t(gamma + 1) + gamma c t(1)). The
       numerator is llm_math.tau_from_positions.
    4. If 0 would be as good, draft none, or try the best gamma of 1 or more where its round may fail: where what is
       saved covers it. Saved are `credit` plain steps at the start, and `probe` with each round that tries nothing. A
       try takes off its time and adds a step for each token that it yields.

    seconds: the measured time of sending n tokens. c: seconds of one drafted token over those of sending one token.
    gamma_max: longest draft. All three as `round_seconds` takes them, with its errors.
    drafter: None, and acceptance is estimated by draft position. A lookup that gives its match's length (`matched`),
    and it is estimated by the tokens copied before this one, match and draft together: what is learnt of the third
    token behind a match of one then serves the first behind a match of three. The guess after n copied tokens is then
    n / (n + 2) or more, as a copy that held for long tends to hold on.
    discount: weight of a test after one more round of drafting; 1 forgets nothing. weight: how many tests the guess is
    worth. probe: the share of plain decoding's time for probes where nothing pays. credit: in plain steps.

    The estimate rests on positions tested, so drafts that came out shorter than asked for, or empty, do not bend it.
    """

    LONGEST = 24                                               # copies longer than this are taken for one kind

    def __init__(self, seconds: Callable[[int], float] | Mapping[int, float], c: float = 0.0, gamma_max: int = 16, *,
                 drafter=None, discount: float = 0.9, weight: float = 1.0, guess: float = 0.5,
                 probe: float = 0.01, credit: float = 1.0):
        require(0 < discount <= 1, "discount", discount, "above 0 and at most 1")
        require(0 < weight < np.inf, "weight", weight, "above 0")
        require(0 <= guess <= 1, "guess", guess, "0 to 1")
        require(0 < probe <= 1, "probe", probe, "above 0 and at most 1")
        require(0 <= credit < np.inf, "credit", credit, "0 or more")
        if drafter is not None and not hasattr(drafter, "matched"):
            raise BadInput(f"{getattr(drafter, 'name', drafter)} does not tell how long its match is: leave `drafter` "
                           "out, or give a SuffixLookup.")
        self.seconds = round_seconds(seconds, c, gamma_max)    # of a round, by gamma
        self.drafter, self.discount, self.weight, self.guess = drafter, discount, weight, guess
        self.probe, self.credit = probe, credit

    def start(self):
        kinds = len(self.seconds) + (self.LONGEST if self.drafter is not None else 0)
        self.tested, self.accepted = [0.0] * kinds, [0.0] * kinds
        self._copied, self._credit, self._probing = 0, self.credit, False

    def read(self, past):
        if past.drafted:
            # All grow old together: a position that was given up on long ago is believed to be as the one before it.
            for table in (self.tested, self.accepted):
                table[:] = [self.discount * x for x in table]
        for i in range(min(past.tested, len(self.seconds) - 1)):
            self.tested[self._copied + i] += 1
            self.accepted[self._copied + i] += i < past.accepted
        if self._probing and past.drafted:                     # a lookup may have had nothing to propose
            cost = self.seconds[min(past.drafted, len(self.seconds) - 1)] / self.seconds[0]
            self._credit += past.accepted + 1 - cost           # so a probe that paid is followed by another
        else:
            self._credit += self.probe

    def alphas(self) -> list[float]:
        """Estimated acceptance at draft position 1 ... gamma_max of the next round, each given those before it."""
        estimate, found = self.guess, []
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
        lost = self.seconds[best] / self.seconds[0] - 1        # by a probe that fails, in plain steps
        self._credit = min(self._credit, max(self.credit, lost))
        self._probing = self._credit >= lost
        return best if self._probing else 0
