"""How fast this machine is just now, beside the one that the demos' "Takes" figures were read on."""

import re
from collections.abc import Callable
from statistics import median
from time import perf_counter

REFERENCE_S = 0.0075  # seconds of `work` where those figures were read: two quiet cores of an AMD EPYC, Python 3.11
SLOWER = 1.5          # times as long, from which it is worth saying


def work() -> int:
    """A fixed piece of work for the interpreter, some hundredths of a second."""
    return sum(i * i for i in range(150_000))


def slowness(repeats: int = 5, clock: Callable[[], float] = perf_counter) -> float:
    """How many times as long `work` takes here as where the "Takes" figures were read; the median of a few readings."""
    readings = []
    for _ in range(repeats):
        started = clock()
        work()
        readings.append(clock() - started)
    return median(readings) / REFERENCE_S


def sentence(takes: str, times: float) -> str:
    """What is to be said of a demo that `takes` "about 9 s" on a machine that takes `times` as long; "" for nothing."""
    seconds = re.search(r"about (\d+) s", takes)
    if times < SLOWER or seconds is None:
        return ""
    return (f"This machine is slower than the one of that figure, or busy: a short test takes {times:.1f} times as "
            f"long. Expect about {float(seconds[1]) * times:.0f} s.")
