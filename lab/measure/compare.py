"""Fair comparisons: every method between two runs of its baseline, and a check whether the readings are worth judging.

`compare` returns a row for each text and method. A row whose check fails says why in `not_judged`, as
`console.observe` takes it: its speedup is neither ok nor broken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from console import progress, record_samples
from decode_lab import Run
from lab.measure.turns import Made, Method
from lab.support.claims import shown
from lab.support.errors import require, whole

LEAST_REPEATS = 5
WARM_UP = 3                    # tokens that each method writes before any is timed
MOST_SPREAD = 0.2              # of the baseline: distance of the quartiles of its runs over their median


@dataclass
class Compared:
    """A method on a text, each of its runs between two of the baseline (A B A).

    made: its runs. before, after: the baseline's run before and after each. bounded: whether its forward is the
    baseline's, so that its speedup cannot be above its tokens per round. predicted: the speedup that a demo predicts,
    set by the demo. earlier: what was read first, where that was not good enough and all was read again.
    All but `ttft` leaves out each run's first round.
    """

    text: str
    method: str
    made: list[Made]
    before: list[Made]
    after: list[Made]
    bounded: bool = True
    predicted: float | None = None
    earlier: Compared | None = field(default=None, repr=False)

    @property
    def run(self) -> Run:
        """The rounds after the first of each run, pooled."""
        return Run.pool([made.run for made in self.made]).later()

    @property
    def tau(self) -> float:
        """Tokens per round."""
        return self.run.tau

    @property
    def steps(self) -> np.ndarray:
        """(repeats,): seconds per token of the baseline around each run, the mean of before and after."""
        return np.array([(a.run.per_token + c.run.per_token) / 2 for a, c in zip(self.before, self.after, strict=True)])

    @property
    def ratios(self) -> np.ndarray:
        """(repeats,): `steps` over the method's seconds per token between."""
        return self.steps / [made.run.per_token for made in self.made]

    @property
    def speedup(self) -> float:
        """The median of the paired ratios. Whether the method is never slower than its baseline is read here."""
        return float(np.median(self.ratios))

    @property
    def quartiles(self) -> tuple[float, float]:
        """Lower and upper quartile of the paired ratios."""
        low, high = np.quantile(self.ratios, (0.25, 0.75))
        return float(low), float(high)

    @property
    def per_token(self) -> float:
        """Median seconds per token of the method."""
        return median(made.run.per_token for made in self.made)

    @property
    def ttft(self) -> float:
        """Median seconds to the first tokens."""
        return median(made.run.ttft for made in self.made)

    @property
    def plain(self) -> tuple[float, float]:
        """(seconds per token, seconds to the first token) of the baseline beside it, medians."""
        return float(np.median(self.steps)), median(made.run.ttft for made in self.before)

    @property
    def spread(self) -> float:
        """Of the baseline's runs beside this method: the distance of the quartiles over the median."""
        low, middle, high = np.quantile([made.run.per_token for made in self.before + self.after], (0.25, 0.5, 0.75))
        return float((high - low) / middle)

    @property
    def not_judged(self) -> str:
        """Why the speedup is not to be judged, as a sentence; "" where it may be."""
        where = f"this machine was busy: {self.method} on {self.text}"
        if self.spread > MOST_SPREAD:
            spread, most = shown(".0%", self.spread, [MOST_SPREAD])
            return (f"{where} stands beside plain runs whose middle half spreads over {spread} of their "
                    f"median, more than {most}. Run it again.")
        if self.bounded and self.speedup > self.tau * (1 + self.spread):
            speedup, tau = shown(".2f", self.speedup, [self.tau])
            return (f"{where} reads {speedup} times plain decoding at {tau} tokens a round, which cannot be. "
                    "Run it again.")
        return ""

    @property
    def judged(self) -> bool:
        return not self.not_judged

    @property
    def samples(self) -> dict[str, list[float]]:
        """Seconds per token of every run, in the order taken, for the record."""
        each = {"before": self.before, "method": self.made, "after": self.after}
        found = {name: [made.run.per_token for made in runs] for name, runs in each.items()}
        if self.earlier is not None:
            found |= {f"{name}, not judged": x for name, x in self.earlier.samples.items()}
        return found


def compare(methods: Mapping[str, Callable], texts: Mapping[str, Sequence[int]], target,
            n_new: int | Mapping[str, int], *, repeats: int = LEAST_REPEATS, baseline: Callable = Method(),
            unbounded: Collection[str] = (), when_busy: Callable[[], object] | None = None) -> list[Compared]:
    """Time methods against their baseline on each text -> a row per text and method, texts first.

    methods: {name: called as a Method is}. texts: {name: prompt ids}. target: the decoder. n_new: tokens that each run
    writes at most, for all texts or {text: tokens}; short, as a machine's pace changes. repeats: at least 5. baseline:
    what a speedup is over. unbounded: methods whose forward is not the baseline's (another engine, other kernels), so
    that tokens per round do not limit their speedup. when_busy: called where a row of a text is not good enough, such
    as choosing the number of threads again; the text is then read again, once.

    Neighbours share a baseline run: A B A C A, and in the next repetition, which begins with the last one, C A B A. The
    seconds of all runs go to the record of the demo that runs.
    """
    repeats = whole("repeats", repeats, LEAST_REPEATS)
    require(methods, "methods", list(methods), "at least one")
    lengths = {text: n_new[text] if isinstance(n_new, Mapping) else n_new for text in texts}
    rows: list[Compared] = []
    for text, prompt in texts.items():
        for method in (baseline, *methods.values()):
            method(target, prompt, min(WARM_UP, lengths[text]), eos=target.eos)
        found = _read(methods, text, prompt, target, lengths[text], repeats, baseline, unbounded)
        if when_busy is not None and not all(row.judged for row in found):
            when_busy()
            again = _read(methods, text, prompt, target, lengths[text], repeats, baseline, unbounded)
            for row, earlier in zip(again, found):
                row.earlier = earlier
            found = again
        for row in found:
            record_samples(f"seconds per token, {text}, {row.method}", row.samples)
        rows += found
    return rows


def not_judged(rows: Sequence[Compared]) -> str:
    """Why a claim that rests on all these rows is not to be judged: the first row's reason; "" where it may be."""
    return next((row.not_judged for row in rows if not row.judged), "")


def undecided(a: Compared, bound: float, b: Compared | None = None) -> str:
    """Why it cannot be told whether a's speedup, or a's over b's, is above or below a bound; "" where it can.

    Either a row is not judged, or the quartiles of the ratios, repetition by repetition, lie on both sides of it.
    """
    ratios = a.ratios if b is None else a.ratios / b.ratios
    low, high = np.quantile(ratios, (0.25, 0.75))
    if reason := not_judged([a] if b is None else [a, b]):
        return reason
    if not low < bound < high:
        return ""
    middle, *half = shown(".2f", bound, [low, high])
    return f"the middle half of its readings, {' to '.join(half)}, lies on both sides of {middle}."


def _read(methods, text: str, prompt, target, n_new: int, repeats: int, baseline, unbounded) -> list[Compared]:
    rows = {name: Compared(text, name, [], [], [], name not in unbounded) for name in methods}
    plain = _one(baseline, target, prompt, n_new)
    for k in progress(range(repeats), f"comparing on {text}"):
        for name in list(methods)[::-1 if k % 2 else 1]:
            rows[name].before.append(plain)
            rows[name].made.append(_one(methods[name], target, prompt, n_new))
            plain = _one(baseline, target, prompt, n_new)
            rows[name].after.append(plain)
    return list(rows.values())


def _one(method, target, prompt, n_new: int) -> Made:
    """One generation, the device idle when it begins."""
    target.synchronize()
    tokens, run = method(target, prompt, n_new, eos=target.eos)
    return Made(tokens, run)
