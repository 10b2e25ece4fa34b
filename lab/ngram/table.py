"""N-gram tables on disk: which tokens followed a context, and how often, in a file that is mapped and read row by row.

A table of order n answers for the last n-1 tokens. It is one file, little-endian, in pages of 4096 bytes:

    header     one page: the fields below, zeros, and in its last 4 bytes the CRC-32 of all before them
    rows       u32 [n_rows, 1 + 2K]: total, K successor ids, K counts
    keys       u64 [n_rows], only of order 3 and more
    checksums  u32, one per page of rows and keys: its CRC-32; here the file ends

Rows and keys each begin on a page and are filled up with zeros to the next. A row's total is how often its context
was seen with a successor; ids are sorted by count, largest first, equal ones by id; a count of 0 is no successor, and
its id is 0. Counts and totals stop at 2**32 - 1. Of order 2, row number = preceding token id, so n_rows = vocab_size;
a total of 0: never seen. Of order 3 and more, row i belongs to keys[i]: the preceding n-1 ids as the digits of a
number in base vocab_size, the oldest first; keys ascend, each once. vocab_size ** order is at most 2**64, and a row
is at most a page (K <= 511), so that it lies in two pages at most.

    offset  type     field
    0       8 bytes  magic, 89 4E 47 52 41 4D 0D 0A ("\\x89NGRAM\\r\\n": a file changed as if it were text has another)
    8       u32      0x01020304, which shows the byte order
    12      u32      format version, 1
    16      u32 * 4  order, K, vocab_size, page size (4096)
    32      u64 * 6  n_rows, n_tokens, then where rows, keys, checksums and the file end
    80      u32      length of the tokenizer's fingerprint in bytes, at most 256
    84      bytes    the fingerprint, UTF-8

A page's checksum is checked when the page is first read. A table must not be cut short while it is open: the system
ends a process that reads a mapping past the end of its file. `write_table` replaces files whole, which is safe.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import tempfile
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from console import BadInput
from lab.ngram.disk import may_ask, resident_pages

MAGIC = b"\x89NGRAM\r\n"
ORDER_MARK = 0x01020304
VERSION = 1
PAGE = 4096
PAGE_BITS = 12
MAX_ORDER = 64                    # with 2 tokens, 2**64 n-grams
MAX_TOP_K = (PAGE // 4 - 1) // 2
MAX_FINGERPRINT = 256
HEADER = struct.Struct("<8sIIIIII6QI")
COUNT_MAX = 2**32 - 1
CHUNK = 1 << 22                   # bytes that verify() and copying take at a time


def _pages(n_bytes: int) -> int:
    return -(-n_bytes // PAGE)


def _ends(order: int, top_k: int, vocab_size: int, n_rows: int) -> tuple[int, int, int]:
    """Where rows, keys and checksums end; the last is the size of the file."""
    rows = PAGE * (1 + _pages(n_rows * 4 * (1 + 2 * top_k)))
    keys = rows + (PAGE * _pages(n_rows * 8) if order > 2 else 0)
    return rows, keys, keys + 4 * (keys // PAGE - 1)


def _check_sizes(order: int, top_k: int, vocab_size: int) -> str | None:
    """What is wrong with them, or None."""
    if not 2 <= order <= MAX_ORDER:
        return f"order {order}: 2 to {MAX_ORDER} would be right"
    if not 1 <= top_k <= MAX_TOP_K:
        return f"top-k {top_k}: 1 to {MAX_TOP_K} would be right"
    if not 1 <= vocab_size <= COUNT_MAX or vocab_size**order > 2**64:
        return f"a vocabulary of {vocab_size} at order {order}: at least 1 id, and vocab_size ** order at most 2**64"
    return None


def _check_rows(rows: np.ndarray, vocab_size: int, order: int) -> str | None:
    """What is wrong with rows (n, 1 + 2K), or None."""
    k = rows.shape[1] // 2
    columns = np.ascontiguousarray(rows.T)      # a row is short: numpy is several times faster along a column
    totals, ids, counts = columns[0], columns[1:1 + k], columns[1 + k:]
    if ids.size and int(ids.max()) >= vocab_size:
        return f"an id of {int(ids.max())} in a vocabulary of {vocab_size}"
    if (counts[1:] > counts[:-1]).any():
        return "counts that do not descend"
    if ((counts[1:] == counts[:-1]) & (ids[1:] <= ids[:-1]) & (counts[1:] > 0)).any():
        return "equal counts whose ids do not ascend"
    if ((counts == 0) & (ids > 0)).any():
        return "an id with a count of 0"
    if (totals < np.minimum(counts.sum(axis=0, dtype=np.uint64), COUNT_MAX)).any():
        return "a total below the sum of its counts"
    if ((totals > 0) & (counts[0] == 0)).any() or (order > 2 and not totals.all()):
        return "a context without a successor"
    return None


def _check_keys(keys: np.ndarray, last: int, vocab_size: int, order: int) -> str | None:
    """What is wrong with keys (n,) that follow the key `last` (-1: none), or None."""
    if len(keys) and (int(keys[0]) <= last or (keys[1:] <= keys[:-1]).any()):
        return "keys that do not ascend"
    if len(keys) and int(keys[-1]) >= vocab_size ** (order - 1):
        return f"a key of {int(keys[-1])} in a vocabulary of {vocab_size}"
    return None


# ------------------------------------------------------------------------------------------------- reading

@dataclass
class TableUse:
    """What has been asked of a table since it was opened."""

    lookups: int = 0      # rows asked for, found or not
    blocks: int = 0       # pages of rows and keys that were read for the first time, and so checked


class NgramTable:
    """A table open for reading; `with NgramTable.open(path) as table: ...` closes it.

    path, order, top_k, vocab_size, tokenizer (fingerprint), n_rows, n_tokens (of the corpus), nbytes (of the file),
    io ("mmap" or "ram") and use (TableUse).
    """

    @classmethod
    def open(cls, path, io: str = "mmap", tokenizer: str | None = None, vocab_size: int | None = None) -> NgramTable:
        """The table in the file `path`.

        io: "mmap" maps the file, and the system reads the pages that are touched; "ram" reads all of it now.
        tokenizer: the fingerprint that the table must have. vocab_size: the most ids it may know of.
        Raises BadInput: no such file, no table, damaged, not whole, a newer format, another tokenizer.
        """
        if io not in ("mmap", "ram"):
            raise BadInput(f'Table io "{io}": "mmap" or "ram" would be right.')
        table = cls()
        try:
            table._file = open(path, "rb")
        except OSError as error:
            raise BadInput(f"Cannot open the n-gram table {path}: {error.strerror}; python -m lab ngram build "
                           "makes one.") from None
        try:
            table._read_header(Path(path), tokenizer, vocab_size)
            table._load(io)
        except BaseException:
            table._file.close()
            raise
        return table

    def _read_header(self, path: Path, tokenizer: str | None, vocab_size: int | None) -> None:
        self.path = path
        self.nbytes = os.fstat(self._file.fileno()).st_size
        page = self._file.read(PAGE)
        if not page:
            raise BadInput(f"{path} is empty; an n-gram table has a header: build it again.")
        if page[:8] != MAGIC:
            raise BadInput(f"{path} is no n-gram table: it begins with {page[:8]!r}, a table with {MAGIC!r}.")
        if page[8:12] == struct.pack(">I", ORDER_MARK):
            raise BadInput(f"{path} was written in the other byte order; tables are little-endian: build it again.")
        version = int.from_bytes(page[12:16], "little")
        if page[8:12] == struct.pack("<I", ORDER_MARK) and version > VERSION:
            raise BadInput(f"{path} has format version {version}, newer than the {VERSION} that this program reads.")
        if len(page) < PAGE:
            raise BadInput(f"{path} is cut off in its header, after {len(page)} bytes: copy or build it again.")
        if zlib.crc32(page[:-4]) != int.from_bytes(page[-4:], "little"):
            raise BadInput(f"{path} has a damaged header (wrong checksum): copy or build it again.")
        (_, mark, _, self.order, self.top_k, self.vocab_size, page_size, self.n_rows, self.n_tokens, *stated,
         length) = HEADER.unpack_from(page)
        wrong = _check_sizes(self.order, self.top_k, self.vocab_size)
        if wrong is None:
            self._keys_at, sums_at, size = _ends(self.order, self.top_k, self.vocab_size, self.n_rows)
            if ((mark, version, page_size) != (ORDER_MARK, VERSION, PAGE) or length > MAX_FINGERPRINT
                    or stated != [PAGE, self._keys_at, sums_at, size]
                    or self.n_rows < 1 or (self.order == 2 and self.n_rows != self.vocab_size)):
                wrong = "whose fields do not fit one another"
        if wrong is not None:
            raise BadInput(f"{path} has a wrong header, {wrong}: build it again.")
        self._sums_at = sums_at
        if self.nbytes != size:
            what = "cut off" if self.nbytes < size else "longer than it should be"
            raise BadInput(f"{path} is {what}: {self.nbytes} bytes, where its header says {size}; copy or build it "
                           "again.")
        self.tokenizer = page[HEADER.size:HEADER.size + length].decode("utf-8", "replace")
        if tokenizer is not None and tokenizer != self.tokenizer:
            raise BadInput(f"{path} was built with another tokenizer ({self.tokenizer}) than the {tokenizer} asked "
                           "for: build one with --tokenizer.")
        if vocab_size is not None and self.vocab_size > vocab_size:
            raise BadInput(f"{path} has a vocabulary of {self.vocab_size} ids, the model only {vocab_size}: build "
                           "a table with the model's own tokenizer.")

    def _load(self, io: str) -> None:
        self.io, self.use = io, TableUse()
        if io == "mmap":
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
            if hasattr(mmap, "MADV_RANDOM"):
                self._map.madvise(mmap.MADV_RANDOM)      # else each row that is read brings pages that nobody asked for
        else:
            try:
                self._map = mmap.mmap(-1, self.nbytes)
                self._file.seek(0)
                n_bytes = self._file.readinto(self._map)
            except OSError as error:
                raise BadInput(f"Cannot read the {self.nbytes} bytes of {self.path}: {error.strerror}.") from None
            if n_bytes != self.nbytes:
                raise BadInput(f"{self.path} became shorter while it was read: build it again.")
        k, self._width = self.top_k, 4 * (1 + 2 * self.top_k)
        self._rows = np.frombuffer(self._map, "<u4", self.n_rows * (1 + 2 * k), PAGE).reshape(self.n_rows, 1 + 2 * k)
        self._keys = np.frombuffer(self._map, "<u8", self.n_rows, self._keys_at) if self.order > 2 else None
        self._wanted = np.zeros((), np.uint64)
        self._sums = np.frombuffer(self._map, "<u4", self._sums_at // PAGE - 1, self._sums_at)
        self._first = struct.Struct(f"<II{4 * (k - 1)}xI").unpack_from      # of a row: total, first id, its count
        self._read = bytearray(self._sums_at // PAGE)                       # per page of the file: checked
        self._read[0] = 1

    def close(self) -> None:
        """Let go of the file; the table cannot be read after this."""
        self._rows = self._keys = self._sums = None
        self._map.close()
        self._file.close()

    def __enter__(self) -> NgramTable:
        return self

    def __exit__(self, *_exc) -> None:
        self.close()

    # -- one at a time

    def best(self, tokens: Sequence[int]) -> tuple[int, int, int] | None:
        """The token seen most often after the last order - 1 of `tokens` (ints): (id, its count, the context's total).

        None where that context was never seen, has an id that is none of the vocabulary, or is too short.
        Raises BadInput where what it reads is damaged.
        """
        row = self._find(tokens)
        if row is None:
            return None
        total, token, count = self._first(self._map, PAGE + row * self._width)
        if count == 0:
            return None
        if token >= self.vocab_size:
            raise self._damaged(f"row {row} names id {token} in a vocabulary of {self.vocab_size}")
        return token, count, total

    def row(self, tokens: Sequence[int]) -> list[tuple[int, int]] | None:
        """All successors of the same context as (id, count), most frequent first; None as in `best`."""
        row = self._find(tokens)
        if row is None:
            return None
        _, *values = self._rows[row].tolist()
        found = [pair for pair in zip(values[:self.top_k], values[self.top_k:]) if pair[1]]
        if any(token >= self.vocab_size for token, _ in found):
            raise self._damaged(f"row {row} names an id beyond its vocabulary of {self.vocab_size}")
        return found or None

    def _find(self, tokens: Sequence[int]) -> int | None:
        """The number of the context's row, whose pages have been checked; None where there is none."""
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
            row = self._search(key)
            if row is None:
                return None
        at, read = PAGE + row * self._width, self._read
        first, last = at >> PAGE_BITS, (at + self._width - 1) >> PAGE_BITS
        if not (read[first] and read[last]):
            self._check(first)
            self._check(last)
        return row

    def _search(self, key: int) -> int | None:
        """Where `key` is among the keys, or None.

        A search that met damaged keys on its way can end anywhere. But wherever it ends it has compared `key` with
        the keys on both sides, and keys ascend: if these two lie on sound pages, the answer is right whatever the
        others were, so only their pages are checked. Not for several threads at once.
        """
        self._wanted[()] = key          # of the keys' own type: else numpy would convert all of them, each time
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
        """Check the page's checksum, unless that has been done. Raises BadInput where it differs."""
        if self._read[page]:
            return
        if zlib.crc32(self._map[page * PAGE:(page + 1) * PAGE]) != self._sums[page - 1]:
            raise self._damaged(f"page {page} of {self._sums_at // PAGE} has a wrong checksum")
        self._read[page] = 1
        self.use.blocks += 1

    def _damaged(self, what: str) -> BadInput:
        return BadInput(f"{self.path} is damaged: {what}; copy or build it again.")

    # -- many at a time

    def rows(self, contexts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rows of many contexts, (n, order - 1) ids -> (ids (n, K), counts (n, K), totals (n,)), all uint32.

        What is not there has total and counts of 0. Raises BadInput for another shape, and where what it reads is
        damaged.
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
            in_order = np.argsort(key)            # neighbours find in the processor's caches what they have in common
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
            raise self._damaged(f"a row names id {int(ids.max())} in a vocabulary of {self.vocab_size}")
        return ids, counts, totals

    def _search_many(self, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`_search` for many: (row numbers, whether the key is there); where it is not, row 0."""
        row = self._keys.searchsorted(key)
        at = np.minimum(row, self.n_rows - 1)
        self._check_all(self._keys_at + 8 * at)
        found = self._keys[at] == key
        self._check_all(self._keys_at + 8 * np.maximum(row[~found] - 1, 0))
        at[~found] = 0
        return at, found

    def _check_all(self, at: np.ndarray) -> None:
        """Check the pages that hold the bytes `at`."""
        page = at >> PAGE_BITS
        new = page[np.frombuffer(self._read, np.uint8)[page] == 0]
        for one in np.unique(new).tolist():
            self._check(one)

    # -- the whole

    def resident(self) -> tuple[int, int] | None:
        """(pages of the table in memory, pages of the table), whoever read them; None where the system does not tell.

        For "mmap" these are pages of the page cache, for "ram" those of this process.
        """
        if self.io == "mmap" and not may_ask(self.path):
            return None
        n = resident_pages(self._map)
        return None if n is None else (n, -(-self.nbytes // mmap.PAGESIZE))

    def verify(self) -> None:
        """Read all of the file and check it: checksums, keys ascending, ids in the vocabulary, counts in order.

        Raises BadInput with the first thing that is wrong.
        """
        sums = np.frombuffer(self._at(self._sums_at, self.nbytes), "<u4")
        for start in range(PAGE, self._sums_at, CHUNK):
            data = self._at(start, min(start + CHUNK, self._sums_at))
            for at in range(0, len(data), PAGE):
                page = (start + at) // PAGE
                if zlib.crc32(data[at:at + PAGE]) != sums[page - 1]:
                    raise self._damaged(f"page {page} of {self._sums_at // PAGE} has a wrong checksum")
        step = CHUNK // self._width
        for first in range(0, self.n_rows, step):
            stop = min(first + step, self.n_rows)
            data = self._at(PAGE + first * self._width, PAGE + stop * self._width)
            wrong = _check_rows(np.frombuffer(data, "<u4").reshape(stop - first, -1), self.vocab_size, self.order)
            if wrong is not None:
                raise self._damaged(f"among rows {first} to {stop - 1} is {wrong}")
        if self.order == 2:
            return
        last = -1
        for first in range(0, self.n_rows, CHUNK // 8):
            stop = min(first + CHUNK // 8, self.n_rows)
            keys = np.frombuffer(self._at(self._keys_at + 8 * first, self._keys_at + 8 * stop), "<u8")
            wrong = _check_keys(keys, last, self.vocab_size, self.order)
            if wrong is not None:
                raise self._damaged(f"among rows {first} to {stop - 1} are {wrong}")
            last = int(keys[-1])

    def _at(self, start: int, stop: int) -> bytes:
        """Bytes of the file, read rather than mapped: a device that fails is an error here, not the end."""
        try:
            self._file.seek(start)
            data = self._file.read(stop - start)
        except OSError as error:
            raise BadInput(f"Cannot read {self.path} at byte {start}: {error.strerror}.") from None
        if len(data) != stop - start:
            raise BadInput(f"{self.path} became shorter while it was read: build it again.")
        return data


def _inverse(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The array whose [order] is `values`."""
    result = np.empty_like(values)
    result[order] = values
    return result


def expected_pages(table: NgramTable, m: int) -> float:
    """Pages of a table that m lookups of uniformly drawn contexts touch on average, the header's among them.

    A lookup touches its row's page and a page of checksums. A search among P pages of keys halves them until what is
    left fits in one; the d-th halving has up to 2^d pages to touch, which searches share.
    """
    def distinct(among: float, draws: float) -> float:
        return among * (1 - (1 - 1 / among) ** draws) if among > 1 else 1.0

    rows, keys = table.n_rows * 4 * (1 + 2 * table.top_k) / PAGE, table.n_rows * 8 / PAGE * (table.order > 2)
    levels = [2 ** d for d in range(int(np.log2(keys)) + 1)] if keys > 1 else []
    new = [min(n, keys - n + 1) for n in levels]              # pages of a level that no level above it touches
    halvings = sum(distinct(k, m * k / n) for k, n in zip(new, levels))
    return 1 + distinct(rows, m) + halvings + distinct((rows + keys) * 4 / PAGE, m)



# ------------------------------------------------------------------------------------------------- writing

class _Section:
    """Writes data at the end of a file in pages, and keeps their checksums."""

    def __init__(self, file, sums: array):
        self._file, self._sums, self._rest = file, sums, b""

    def write(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        whole = len(data) // PAGE * PAGE
        self._put(memoryview(data)[:whole])
        self._rest = data[whole:]

    def end(self) -> None:
        """Fill the last page up with zeros."""
        self._put(memoryview(self._rest.ljust(_pages(len(self._rest)) * PAGE, b"\0")))

    def _put(self, data: memoryview) -> None:
        self._file.write(data)
        self._sums.extend([zlib.crc32(data[at:at + PAGE]) for at in range(0, len(data), PAGE)])


def write_table(path, *, order: int, top_k: int, vocab_size: int, tokenizer: str, n_tokens: int,
                parts: Iterable[tuple[np.ndarray | None, np.ndarray]], n_rows: int | None = None) -> None:
    """Write a table file as described at the top of this module, in memory that does not grow with it.

    parts: (keys, rows) in the order of the table: keys (n,) uint64, None of order 2; rows (n, 1 + 2K) uint32. Of
    order 2 they are vocab_size rows in all. n_rows: how many there must be, where that is known beforehand.
    The file appears under its name when it is whole: until then a table that was there stays, and whoever has it
    open keeps it. A process that is killed leaves a file beside it whose name ends in .part.
    Raises BadInput for parts that make no table, and where the file cannot be written.
    """
    fingerprint = tokenizer.encode("utf-8")
    wrong = _check_sizes(order, top_k, vocab_size)
    if wrong is None and len(fingerprint) > MAX_FINGERPRINT:
        wrong = f"a tokenizer fingerprint of {len(fingerprint)} bytes: at most {MAX_FINGERPRINT} would be right"
    if wrong is not None:
        raise BadInput(f"Cannot make an n-gram table with {wrong}.")
    target = Path(os.path.realpath(path))
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name + ".", suffix=".part")
    except OSError as error:
        raise BadInput(f"Cannot write the n-gram table {path}: {error.strerror}.") from None
    try:
        with os.fdopen(handle, "wb") as file:
            _write(file, target.parent, order, top_k, vocab_size, fingerprint, n_tokens, n_rows, parts)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)      # mkstemp makes the file private
        os.replace(temporary, target)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError):
            raise BadInput(f"Cannot write the n-gram table {path}: {error.strerror or error}.") from error
        raise
    if hasattr(os, "O_DIRECTORY"):              # the new name, too, outlives a power cut
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(folder)
        os.close(folder)


def _write(file, folder: Path, order, top_k, vocab_size, fingerprint, n_tokens, n_rows, parts) -> None:
    sums = array("I")
    file.write(bytes(PAGE))                     # the header, which is known at the end
    section, count, last = _Section(file, sums), 0, -1
    # Rows and keys come together but lie apart: the keys, the smaller part, wait in a file without a name.
    with tempfile.TemporaryFile(dir=folder) as waiting:
        for keys, rows in parts:
            wrong = _check_part(keys, rows, order, top_k) or _check_rows(rows, vocab_size, order)
            if wrong is None and order > 2:
                wrong = _check_keys(keys, last, vocab_size, order)
            if wrong is not None:
                raise BadInput(f"No n-gram table of order {order} can hold {wrong} (from row {count} on).")
            section.write(rows.astype("<u4", copy=False).tobytes())
            count += len(rows)
            if order > 2 and len(keys):
                waiting.write(keys.astype("<u8", copy=False).tobytes())
                last = int(keys[-1])
        section.end()
        expected = vocab_size if order == 2 else n_rows
        if count < 1 or (expected is not None and count != expected):
            raise BadInput(f"An n-gram table of {expected or 'at least 1'} rows was to be written, not of {count}.")
        if order > 2:
            section = _Section(file, sums)
            waiting.seek(0)
            while data := waiting.read(CHUNK):
                section.write(data)
            section.end()
    if sys.byteorder == "big":
        sums.byteswap()
    file.write(sums.tobytes())
    keys_at, sums_at, size = _ends(order, top_k, vocab_size, count)
    header = HEADER.pack(MAGIC, ORDER_MARK, VERSION, order, top_k, vocab_size, PAGE, count, n_tokens, PAGE, keys_at,
                         sums_at, size, len(fingerprint)) + fingerprint
    header = header.ljust(PAGE - 4, b"\0")
    file.seek(0)
    file.write(header + zlib.crc32(header).to_bytes(4, "little"))


def _check_part(keys, rows, order: int, top_k: int) -> str | None:
    if rows.dtype != np.uint32 or rows.ndim != 2 or rows.shape[1] != 1 + 2 * top_k:
        return f"rows of shape {rows.shape} and type {rows.dtype}"
    if order == 2 and keys is not None:
        return "keys"
    if order > 2 and (keys is None or keys.dtype != np.uint64 or keys.shape != rows.shape[:1]):
        return f"keys of shape {np.shape(keys)} and type {getattr(keys, 'dtype', None)}"
    return None
