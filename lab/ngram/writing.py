"""Writing an n-gram table, in the format of lab/ngram/format.py, from rows that come in parts."""

from __future__ import annotations

import sys
import tempfile
import zlib
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from lab.ngram.format import MAX_FINGERPRINT, PAGE, Header, pages, wrong_keys, wrong_part, wrong_rows, wrong_sizes
from lab.support.errors import BadInput
from lab.support.files import replacing

CHUNK = 1 << 22                   # bytes of keys copied at a time
Part = tuple[np.ndarray | None, np.ndarray]     # keys (n,) uint64, or None of order 2; rows (n, 1 + 2K) uint32


def write_table(path, *, order: int, top_k: int, vocab_size: int, tokenizer: str, n_tokens: int,
                parts: Iterable[Part], n_rows: int | None = None) -> None:
    """Write a table file. Memory stays small, however large the table is.

    parts: blocks of (keys, rows) in the order of the table. Of order 2 they are vocab_size rows in all.
    n_rows: how many rows there must be, where that is known before.
    The file gets its name when it is whole. Until then an older table stays, and a program that has it open goes on
    reading it. A process that is killed leaves a file beside it whose name ends in .part.
    Raises BadInput for parts that make no table, and where the file cannot be written.
    """
    fingerprint = tokenizer.encode("utf-8")
    wrong = wrong_sizes(order, top_k, vocab_size)
    if wrong is None and len(fingerprint) > MAX_FINGERPRINT:
        wrong = f"a tokenizer fingerprint of {len(fingerprint)} bytes: at most {MAX_FINGERPRINT} would be right"
    if wrong is not None:
        raise BadInput(f"Cannot make an n-gram table with {wrong}.")
    try:
        with replacing(path) as temporary, open(temporary, "wb") as file:
            file.write(bytes(PAGE))             # the header is known at the end
            sums = array("I")
            header = Header(order, top_k, vocab_size, _write_parts(file, sums, parts, order, top_k, vocab_size, n_rows),
                            n_tokens, tokenizer)
            if sys.byteorder == "big":
                sums.byteswap()
            file.write(sums.tobytes())
            file.seek(0)
            file.write(header.pack())
    except OSError as error:
        raise BadInput(f"Cannot write the n-gram table {path}: {error.strerror or error}.") from error


def _write_parts(file, sums: array, parts: Iterable[Part], order: int, top_k: int, vocab_size: int,
                 n_rows: int | None) -> int:
    """Write rows and keys, and put the checksums of their pages into `sums` -> the number of rows."""
    section, count, last = _Section(file, sums), 0, -1
    # Rows and keys come together but lie apart: the keys, the smaller part, wait in a file without a name.
    with tempfile.TemporaryFile(dir=Path(file.name).parent) as waiting:
        for keys, rows in parts:
            wrong = wrong_part(keys, rows, order, top_k) or wrong_rows(rows, vocab_size, order)
            if wrong is None and keys is not None:          # of order 2 there are none, as wrong_part has checked
                wrong = wrong_keys(keys, last, vocab_size, order)
            if wrong is not None:
                raise BadInput(f"No n-gram table of order {order} can hold {wrong} (from row {count} on).")
            section.write(rows.astype("<u4", copy=False).tobytes())
            count += len(rows)
            if keys is not None and len(keys):
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
    return count


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
        """Fill the last page with zeros."""
        self._put(memoryview(self._rest.ljust(pages(len(self._rest)) * PAGE, b"\0")))

    def _put(self, data: memoryview) -> None:
        self._file.write(data)
        self._sums.extend([zlib.crc32(data[at:at + PAGE]) for at in range(0, len(data), PAGE)])
