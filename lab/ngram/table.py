"""Reading an n-gram table: NgramTable. lab/ngram/format.py describes the file.

A page's checksum is checked when the page is read for the first time, so a lookup costs little and never gives a wrong
answer from a damaged page.

Do not cut a table short while it is open: the system kills a process that reads a mapped file past its end. Replacing
the file, as `write_table` does, is safe.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import numpy as np

from lab.ngram.disk import may_ask, resident_pages
from lab.ngram.format import PAGE, PAGE_BITS, Header
from lab.ngram.verify import damaged, verify_file
from lab.support.errors import BadInput


@dataclass
class TableUse:
    """What has been read of a table since it was opened."""

    lookups: int = 0      # rows asked for, found or not
    blocks: int = 0       # pages of rows and keys that were read, each counted once


class NgramTable:
    """A table open for reading: `with NgramTable.open(path) as table: ...`. Not for several threads at once.

    path, order, top_k, vocab_size, n_rows: of the table. tokenizer: its fingerprint. n_tokens: of the corpus.
    nbytes: size of the file. io: "mmap" or "ram". use: what has been read (TableUse). header: all that the file's
    header says.
    """

    def __init__(self, file: BufferedReader):
        self._file = file                       # `open` reads what is in it

    @classmethod
    def open(cls, path, io: str = "mmap", tokenizer: str | None = None, vocab_size: int | None = None) -> NgramTable:
        """The table in the file `path`.

        io: "mmap" maps the file, and the system reads a page when it is touched; "ram" reads the whole file now.
        tokenizer: the fingerprint that the table must have.
        vocab_size: the model's. Without a fingerprint to compare, a table with more ids is refused. With the right
        fingerprint it is taken: some tokenizers have more ids than their model has rows, and a drafter leaves them out.
        Raises BadInput: no such file, no table, damaged, not whole, a newer format, another tokenizer.
        """
        if io not in ("mmap", "ram"):
            raise BadInput(f'Table io "{io}": "mmap" or "ram" would be right.')
        try:
            if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
                raise BadInput(f"{path} is a pipe or a device; an n-gram table must be a regular file.")
            table = cls(open(path, "rb"))
        except OSError as error:
            raise BadInput(f"Cannot open the n-gram table {path}: {error.strerror}; python -m lab ngram build "
                           "makes one.") from None
        try:
            table._read_header(Path(path), tokenizer, vocab_size)
            table._load(io)
        except OSError as error:
            table._file.close()
            raise BadInput(f"Cannot read the n-gram table {path}: {error.strerror or error}.") from None
        except BaseException:
            table._file.close()
            raise
        return table

    def _read_header(self, path: Path, tokenizer: str | None, vocab_size: int | None) -> None:
        self.path, self.nbytes = path, os.fstat(self._file.fileno()).st_size
        self.header = header = Header.unpack(self._file.read(PAGE), path)
        if self.nbytes != header.size:
            what = "cut off" if self.nbytes < header.size else "longer than it should be"
            raise BadInput(f"{path} is {what}: {self.nbytes} bytes, where its header says {header.size}; copy or build "
                           "it again.")
        if tokenizer is not None and tokenizer != header.tokenizer:
            raise BadInput(f"{path} was built with another tokenizer ({header.tokenizer}) than the {tokenizer} asked "
                           "for: build one with --tokenizer.")
        if tokenizer is None and vocab_size is not None and header.vocab_size > vocab_size:
            raise BadInput(f"{path} has a vocabulary of {header.vocab_size} ids, the model only {vocab_size}: build "
                           "a table with the model's own tokenizer.")
        self.order, self.top_k, self.vocab_size = header.order, header.top_k, header.vocab_size
        self.tokenizer, self.n_rows, self.n_tokens = header.tokenizer, header.n_rows, header.n_tokens
        self._width, self._keys_at, self._sums_at = header.row_bytes, header.keys_at, header.sums_at

    def _load(self, io: str) -> None:
        self.io, self.use = io, TableUse()
        if io == "mmap":
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
            if hasattr(mmap, "MADV_RANDOM"):
                self._map.madvise(mmap.MADV_RANDOM)      # else each row that is read brings pages that nobody asked for
        else:
            self._map = mmap.mmap(-1, self.nbytes)
            self._file.seek(0)
            if self._file.readinto(self._map) != self.nbytes:
                raise BadInput(f"{self.path} became shorter while it was read: build it again.")
        k = self.top_k
        rows = np.frombuffer(self._map, "<u4", self.n_rows * (1 + 2 * k), PAGE)
        self._rows: np.ndarray = rows.reshape(self.n_rows, 1 + 2 * k)
        self._keys: np.ndarray = np.frombuffer(self._map, "<u8", self.n_rows if self.order > 2 else 0, self._keys_at)
        self._wanted = np.zeros((), np.uint64)
        self._sums: np.ndarray = np.frombuffer(self._map, "<u4", self._sums_at // PAGE - 1, self._sums_at)
        self._first = struct.Struct(f"<II{4 * (k - 1)}xI").unpack_from      # of a row: total, first id, its count
        self._read = bytearray(self._sums_at // PAGE)                       # per page of the file: checked
        self._read[0] = 1

    def close(self) -> None:
        """Close the file. The table cannot be read after this."""
        self._rows = self._keys = self._sums = np.zeros(0)           # the map closes when no array reads it
        self._map.close()
        self._file.close()

    def __enter__(self) -> NgramTable:
        return self

    def __exit__(self, *_exc) -> None:
        self.close()

    # -- one at a time

    def best(self, tokens: Sequence[int]) -> tuple[int, int, int] | None:
        """The most frequent successor of the last order - 1 of `tokens`: (its id, its count, the context's total).

        None where the context was never seen, is too short, or has an id outside the vocabulary.
        Raises BadInput where a page that it reads is damaged.
        """
        row = self._find(tokens)
        if row is None:
            return None
        total, token, count = self._first(self._map, PAGE + row * self._width)
        if count == 0:
            return None
        if token >= self.vocab_size:
            raise damaged(self.path, f"row {row} names id {token} in a vocabulary of {self.vocab_size}")
        return token, count, total

    def row(self, tokens: Sequence[int]) -> list[tuple[int, int]] | None:
        """All successors that are kept for this context, as (id, count), the most frequent first; None as in `best`."""
        row = self._find(tokens)
        if row is None:
            return None
        _, *values = self._rows[row].tolist()
        found = [pair for pair in zip(values[:self.top_k], values[self.top_k:]) if pair[1]]
        if any(token >= self.vocab_size for token, _ in found):
            raise damaged(self.path, f"row {row} names an id beyond its vocabulary of {self.vocab_size}")
        return found or None

    def _find(self, tokens: Sequence[int]) -> int | None:
        """The number of the context's row, or None. The row's pages have been checked."""
        self.use.lookups += 1
        vocab_size = self.vocab_size
        if self.order == 2:
            if len(tokens) == 0 or not 0 <= (row := tokens[-1]) < vocab_size:
                return None
        else:
            context = tokens[1 - self.order:]
            if len(context) < self.order - 1:
                return None
            key = 0
            for token in context:
                if not 0 <= token < vocab_size:
                    return None
                key = key * vocab_size + token
            found = self._search(key)
            if found is None:
                return None
            row = found
        at, read = PAGE + row * self._width, self._read
        first, last = at >> PAGE_BITS, (at + self._width - 1) >> PAGE_BITS
        if not (read[first] and read[last]):
            self._check(first)
            self._check(last)
        return row

    def _search(self, key: int) -> int | None:
        """The number of the row that belongs to `key`, or None.

        Only the pages where the search ends are checked. Damaged keys on its way can lead it to a wrong place. But
        then `key` does not fit between the two keys at that place, or these lie on a damaged page themselves. So where
        both are sound and `key` fits between them, the answer is right.
        """
        self._wanted[()] = key          # has the keys' type: with a Python int numpy would convert all keys each time
        row = int(self._keys.searchsorted(self._wanted))
        if row < self.n_rows:
            page = (self._keys_at + 8 * row) >> PAGE_BITS
            if not self._read[page]:
                self._check(page)
            if self._keys.item(row) == key:
                return row
        if row > 0:
            self._check((self._keys_at + 8 * row - 8) >> PAGE_BITS)
        return None

    def _check(self, page: int) -> None:
        """Compare a page with its checksum, if this is the first time. Raises BadInput where they differ."""
        if self._read[page]:
            return
        if zlib.crc32(self._map[page * PAGE:(page + 1) * PAGE]) != self._sums[page - 1]:
            raise damaged(self.path, f"page {page} of {self._sums_at // PAGE} has a wrong checksum")
        self._read[page] = 1
        self.use.blocks += 1

    # -- many at a time

    def rows(self, contexts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rows of many contexts, (n, order - 1) ids -> (ids (n, K), counts (n, K), totals (n,)), all uint32.

        A context that is not there has a total of 0. Raises BadInput for another shape, and where a page that it reads
        is damaged.
        """
        contexts = np.asarray(contexts)
        n = self.order - 1
        if contexts.ndim != 2 or contexts.shape[1] != n or contexts.dtype.kind not in "iu":
            raise BadInput(f"Contexts of shape {contexts.shape} and type {contexts.dtype}: integers of shape "
                           f"(any, {n}) would be right for a table of order {self.order}.")
        self.use.lookups += len(contexts)
        known, key = np.ones(len(contexts), bool), np.zeros(len(contexts), np.uint64)
        for column in contexts.T:
            known &= (column >= 0) & (column < self.vocab_size)
            key = key * np.uint64(self.vocab_size) + column.astype(np.uint64)
        key[~known] = 0
        if self.order == 2:
            at = key.astype(np.int64)
        else:
            in_order = np.argsort(key)            # the searches of neighbours read the same keys, still in the caches
            at, found = self._search_many(key[in_order])
            known &= _inverse(found, in_order)
        self._check_all(PAGE + at * self._width)
        self._check_all(PAGE + (at + 1) * self._width - 1)
        got = self._rows.take(at, axis=0)
        if self.order > 2:
            got = got.take(_inverse(np.arange(len(at)), in_order), axis=0)
        got[~known] = 0
        ids, counts, totals = got[:, 1:1 + self.top_k], got[:, 1 + self.top_k:], got[:, 0]
        if len(ids) and int(ids.max()) >= self.vocab_size:
            raise damaged(self.path, f"a row names id {int(ids.max())} in a vocabulary of {self.vocab_size}")
        return ids, counts, totals

    def _search_many(self, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`_search` for many keys: (row numbers, whether the key is there). Where it is not, the number is 0."""
        row = self._keys.searchsorted(key)
        at = np.minimum(row, self.n_rows - 1)
        self._check_all(self._keys_at + 8 * at)
        found = self._keys[at] == key
        self._check_all(self._keys_at + 8 * np.maximum(row[~found] - 1, 0))
        at[~found] = 0
        return at, found

    def _check_all(self, at: np.ndarray) -> None:
        """`_check` the pages that hold the bytes at these positions of the file."""
        page = at >> PAGE_BITS
        new = page[np.frombuffer(self._read, np.uint8)[page] == 0]
        for one in np.unique(new).tolist():
            self._check(one)

    # -- the whole

    def resident(self) -> tuple[int, int] | None:
        """(pages of the table in memory, pages of the table); None where the system does not tell.

        For "mmap" these are pages of the system's page cache, also those that another program read. For "ram" they are
        this process's own.
        """
        if self.io == "mmap" and not may_ask(self.path):
            return None
        n = resident_pages(self._map)
        return None if n is None else (n, -(-self.nbytes // mmap.PAGESIZE))

    def verify(self) -> None:
        """Read all of the file and check it. Raises BadInput with the first thing that is wrong."""
        verify_file(self._file, self.header, self.path)


def _inverse(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The array whose [order] is `values`."""
    result = np.empty_like(values)
    result[order] = values
    return result


def expected_pages(table: NgramTable, m: int) -> float:
    """How many pages m lookups of uniformly drawn contexts touch on average, the header's page included.

    A lookup touches its row's page and a page of checksums. Before that, a binary search halves the pages of keys until
    one is left. The d-th halving touches one of up to 2^d pages, so the first ones are the same for all searches.
    """
    def distinct(among: float, draws: float) -> float:
        return among * (1 - (1 - 1 / among) ** draws) if among > 1 else 1.0

    rows, keys = table.n_rows * 4 * (1 + 2 * table.top_k) / PAGE, table.n_rows * 8 / PAGE * (table.order > 2)
    levels = [2 ** d for d in range(int(np.log2(keys)) + 1)] if keys > 1 else []
    new = [min(n, keys - n + 1) for n in levels]              # pages of a level that no level above it touches
    halvings = sum(distinct(k, m * k / n) for k, n in zip(new, levels))
    return 1 + distinct(rows, m) + halvings + distinct((rows + keys) * 4 / PAGE, m)
