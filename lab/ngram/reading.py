"""What reading a table costs: lookups timed cold and warm, from the mapped file and from memory, and a yardstick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from lab.ngram import disk
from lab.ngram.table import NgramTable, expected_pages

WARM = 15  # times that warm lookups are timed


@dataclass(frozen=True)
class Reading:
    """Lookups in one table in one state. Counts that the system does not tell are None.

    state: "cold", "warm", or "as it was" where the system would not drop the file from memory. seconds: of a lookup,
    each time that all were timed. pages: of the file in memory afterwards; predicted: by `expected_pages`. read: bytes
    that came from the device.
    """

    file: str
    state: str
    seconds: list[float]
    pages: int | None
    predicted: float | None
    read: int | None

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def row(self) -> list:
        """As a table shows it: file, state, us of a lookup, pages in memory and predicted, MB read."""
        megabytes = None if self.read is None else self.read / 1e6
        return [self.file, self.state, self.median * 1e6, self.pages, self.predicted, megabytes]


def read_table(path: Path, contexts) -> list[Reading]:
    """Readings of these lookups (m, order - 1), one at a time: cold and warm from the mapped file, warm from memory.

    The table must not be open anywhere, or the file stays in memory. Raises OSError.
    """
    lookups = np.asarray(contexts).tolist()
    first = "cold" if disk.evict(path) else "as it was"
    found = []
    for file, states in (("mmap", (first, "warm")), ("ram", ("warm",))):
        with NgramTable.open(path, file) as table:
            for state in states:
                before = disk.io_use()
                seconds = [_one_by_one(table, lookups) for _ in range(WARM if state == "warm" else 1)]
                resident = table.resident()
                found.append(Reading(file, state, seconds, resident[0] if resident else None,
                                     expected_pages(table, len(lookups)) if file == "mmap" else None,
                                     (disk.io_use() - before).bytes_read))
    return found


def scattered_read_seconds(nbytes: int, n: int = 2000, seed: int = 0) -> float:
    """Seconds in which Python reads one number at a random place among so many bytes in memory.

    The least that any lookup can take: the interpreter's overhead, and the latency of this machine's memory.
    """
    values = np.zeros(max(nbytes // 8, 1), np.int64)
    values[:] = 1  # so that each page is a page of its own
    places = np.random.default_rng(seed).integers(len(values), size=n).tolist()
    times = []
    for _ in range(7):
        started = perf_counter()
        for place in places:
            int(values[place])
        times.append((perf_counter() - started) / n)
    return median(times)


def _one_by_one(table: NgramTable, contexts: list[list[int]]) -> float:
    started = perf_counter()
    for context in contexts:
        table.best(context)
    return (perf_counter() - started) / len(contexts)
