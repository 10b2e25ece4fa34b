"""Reads a whole table file and checks everything that lab/ngram/format.py says of it."""

from __future__ import annotations

import zlib

import numpy as np

from lab.ngram.format import PAGE, Header, wrong_keys, wrong_rows
from lab.support.errors import BadInput

CHUNK = 1 << 22                   # bytes read at a time


def verify_file(file, header: Header, path) -> None:
    """Check the open file of a table: its pages' checksums, then the rows, then the keys.

    The header has been checked when it was read. Raises BadInput that names the first thing that is wrong.
    """
    _check_pages(file, header, path)
    _check_rows(file, header, path)
    if header.order > 2:
        _check_keys(file, header, path)


def _check_pages(file, header: Header, path) -> None:
    sums = np.frombuffer(_read(file, header.sums_at, header.size, path), "<u4")
    for start in range(PAGE, header.sums_at, CHUNK):
        data = _read(file, start, min(start + CHUNK, header.sums_at), path)
        for at in range(0, len(data), PAGE):
            page = (start + at) // PAGE
            if zlib.crc32(data[at:at + PAGE]) != sums[page - 1]:
                raise damaged(path, f"page {page} of {header.sums_at // PAGE} has a wrong checksum")


def _check_rows(file, header: Header, path) -> None:
    width = header.row_bytes
    step = CHUNK // width
    for first in range(0, header.n_rows, step):
        stop = min(first + step, header.n_rows)
        data = _read(file, PAGE + first * width, PAGE + stop * width, path)
        rows = np.frombuffer(data, "<u4").reshape(stop - first, -1)
        wrong = wrong_rows(rows, header.vocab_size, header.order)
        if wrong is not None:
            raise damaged(path, f"among rows {first} to {stop - 1} is {wrong}")


def _check_keys(file, header: Header, path) -> None:
    last, step = -1, CHUNK // 8
    for first in range(0, header.n_rows, step):
        stop = min(first + step, header.n_rows)
        keys = np.frombuffer(_read(file, header.keys_at + 8 * first, header.keys_at + 8 * stop, path), "<u8")
        wrong = wrong_keys(keys, last, header.vocab_size, header.order)
        if wrong is not None:
            raise damaged(path, f"among rows {first} to {stop - 1} are {wrong}")
        last = int(keys[-1])


def damaged(path, what: str) -> BadInput:
    """The error for a table whose bytes cannot be right."""
    return BadInput(f"{path} is damaged: {what}; copy or build it again.")


def _read(file, start: int, stop: int, path) -> bytes:
    """Bytes of the file, read and not mapped: a device that fails is then an error, and does not end the process."""
    try:
        file.seek(start)
        data = file.read(stop - start)
    except OSError as error:
        raise BadInput(f"Cannot read {path} at byte {start}: {error.strerror}.") from None
    if len(data) != stop - start:
        raise BadInput(f"{path} became shorter while it was read: build it again.")
    return data
