"""How many threads the products of a real model run on: chosen by a reading, not by the number of cores.

Threads wait for each other at the end of every product. Beside a busy program one of them is often not running, and
then all wait: two threads can be slower than one. What else runs on the machine is seen only by timing a forward.

How they wait counts as much: lab/__init__.py asks for OMP_WAIT_POLICY=passive, which can only be set before torch is
loaded. Beside a busy program, threads that spin hold up a forward far longer than threads that sleep; on a quiet
machine sleeping costs a little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from lab.support.host import cores
from lab.support.text import fmt_time

WARM_UP = 1                    # forwards, after each change of the number
WORTH = 0.97                   # more threads must bring the time of a forward below this share of fewer ones'


@dataclass(frozen=True)
class Reading:
    """Seconds of a forward of one token, by number of threads, and the number chosen from them.

    seconds: {threads: raw seconds in the order taken}; empty where nothing was to be chosen: on a device that is no
    CPU, or where only one number is possible.
    """

    seconds: dict[int, tuple[float, ...]]
    chosen: int

    @property
    def medians(self) -> dict[int, float]:
        return {n: median(each) for n, each in self.seconds.items()}

    def __str__(self) -> str:
        """A sentence for a demo to print."""
        if len(self.seconds) < 2:
            return f"Threads: {self.chosen}."
        times = ", ".join(f"{fmt_time(seconds)} with {n}" for n, seconds in self.medians.items())
        return f"Threads: {self.chosen}. A forward of one token takes {times}."


def choose_threads(decoder, candidates: Sequence[int] | None = None, repeats: int = 7, context: int = 32, *,
                   set_threads: Callable[[int], None] = torch.set_num_threads,
                   clock: Callable[[], float] = perf_counter) -> Reading:
    """Time a forward of one token with 1, 2, 4, … threads in turn, and run on the fastest number from now on.

    decoder: on a CPU; on another device nothing is read or changed. Its cache is overwritten. candidates: the numbers
    of threads to try; by default powers of two up to the cores that this process may use, and all of them. repeats:
    forwards of each. context: tokens in the cache. set_threads, clock: for tests.
    Of numbers that are about as fast the least is chosen. An engine with threads of its own gets `chosen`, too.
    """
    numbers = sorted(set(candidates or [*_powers(cores()), cores()]))
    if decoder.device.type != "cpu":
        return Reading({}, torch.get_num_threads())
    if len(numbers) < 2:
        return Reading({}, _run_on(numbers[0], set_threads))
    decoder.rewind(0)
    decoder.prefill([0] * context)
    seconds: dict[int, list[float]] = {n: [] for n in numbers}
    for k in range(repeats):
        for n in numbers[::-1 if k % 2 else 1]:
            set_threads(n)
            for timed in [False] * WARM_UP + [True]:
                started = clock()
                decoder.send([0])
                if timed:
                    seconds[n].append(clock() - started)
                decoder.rewind(context)
    chosen = numbers[0]
    for n in numbers[1:]:
        if median(seconds[n]) < WORTH * median(seconds[chosen]):
            chosen = n
    decoder.rewind(0)
    return Reading({n: tuple(each) for n, each in seconds.items()}, _run_on(chosen, set_threads))


def _run_on(n: int, set_threads) -> int:
    set_threads(n)
    return n


def _powers(most: int) -> list[int]:
    """1, 2, 4, … up to `most`."""
    return [1 << k for k in range(most.bit_length()) if 1 << k <= most]
