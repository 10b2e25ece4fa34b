"""Decoding with n-gram tables whose files are in a known state, and what each generation reads of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from decode_lab import speculative_generate
from lab.drafters.tiers import NgramDrafter
from lab.ngram import disk
from lab.ngram.table import NgramTable
from lab.support.errors import unknown

STATES = ("as it is", "warm", "cold")


class Reads(NamedTuple):
    """What one generation read of its tables. Counts that the system does not tell are None.

    rows: asked for, found or not. pages: read first in this generation. in_memory: pages of the files in memory at its
    end. megabytes: read from the device. faults: page faults that waited for the device.
    """

    rows: int
    pages: int
    in_memory: int | None
    megabytes: float | None
    faults: int | None


class TableMethod:
    """Decoding with a lookup and the tables of these files, opened for each generation; called as a Method is.

    paths: of the tables; none for the lookup alone. gamma, price: see NgramDrafter. state: "warm", each file is read
    before the generation, "cold", the system is asked to drop it from memory, or "as it is". reads: of each generation.
    dropped: whether the system has dropped the files each time that it was asked.
    """

    shape = None                                      # no model drafts

    def __init__(self, paths: Sequence[Path], gamma: int, price: float, state: str = "as it is"):
        if state not in STATES:
            raise unknown("state of the tables", state, STATES)
        self.paths, self.gamma, self.price, self.state = list(paths), gamma, price, state
        self.reads: list[Reads] = []
        self.dropped = True

    def __call__(self, decoder, prompt, n_new: int, **options):
        for path in self.paths:
            if self.state == "warm":
                path.read_bytes()
            if self.state == "cold" and not disk.evict(path):
                self.dropped = False
        before = disk.io_use()
        with ExitStack() as held:
            tables = [held.enter_context(NgramTable.open(path)) for path in self.paths]
            drafter = NgramDrafter(tables, price=self.price)
            tokens, run = speculative_generate(decoder, drafter, prompt, n_new, self.gamma, **options)
            used, resident = disk.io_use() - before, [table.resident() for table in tables]
            pages = [known[0] for known in resident if known is not None]
            self.reads.append(Reads(
                sum(table.use.lookups for table in tables), sum(table.use.blocks for table in tables),
                sum(pages) if len(pages) == len(tables) else None,
                None if used.bytes_read is None else used.bytes_read / 1e6, used.major_faults))
        return tokens, run
