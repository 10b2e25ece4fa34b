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
    def quartiles(self) -> tuple[float, float]:
        low, high = np.quantile(self.seconds, (0.25, 0.75))
        return float(low), float(high)

    @property
    def row(self) -> list:
        """As a table shows it: file, state, us of a lookup, pages in memory and predicted, MB read."""
        megabytes = None if self.read is None else self.read / 1e6
        return [self.file, self.state, self.median * 1e6, self.pages, self.predicted, megabytes]


@dataclass(frozen=True)
class TableReadings:
    """Lookups in one table: of its mapped file cold and then warm, and with all of it in memory.

    one_read: seconds in which Python reads one number at a random place in memory of the table's size.
    """

    order: int
    nbytes: int
    cold: Reading
    warm: Reading
    in_memory: Reading
    one_read: float

    @property
    def pages(self) -> float:
        """Predicted number of different pages that all the lookups touch together."""
        assert self.cold.predicted is not None
        return self.cold.predicted

    @property
    def rows(self) -> list[list]:
        """As a table shows them: order, MB, and `Reading.row`."""
        return [[self.order, self.nbytes / 1e6, *each.row] for each in (self.cold, self.warm, self.in_memory)]

    @property
    def samples(self) -> dict[str, list[float]]:
        """Raw seconds of a lookup, for the record."""
        return {f"order {self.order}, {each.file}, {each.state}": each.seconds
                for each in (self.cold, self.warm, self.in_memory)}


def read_table(path: Path, contexts) -> TableReadings:
    """Readings of these lookups (m, order - 1), one at a time.

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
            order, nbytes = table.order, table.nbytes
    cold, warm, in_memory = found
    return TableReadings(order, nbytes, cold, warm, in_memory, scattered_read_seconds(nbytes))


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
