"""Files of a corpus, below their texts: which there are, their bytes unpacked, their characters and lines."""

from __future__ import annotations

import codecs
import gzip
import io
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import zstandard

from lab.support.errors import BadInput

BLOCK = 1 << 20        # bytes read at a time
ZST_INPUT = 1 << 8     # compressed bytes at a time: zstandard may make 32 KiB of each, all at once
ZST_WINDOW = 1 << 31   # bytes: the widest window that zstd itself can write; memory is taken as the text fills it
# Byte order marks. Those of UTF-32 come first: in little-endian order they begin like those of UTF-16.
MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16",
         codecs.BOM_UTF16_BE: "utf-16"}
BAD_UNIT = "decode_lab.bad_unit"


def _bad_unit(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\udcff", error.end  # as UTF-8 it is a byte that UTF-8 never has


codecs.register_error(BAD_UNIT, _bad_unit)


def found(paths) -> tuple[list[Path], list[tuple[Path, str]]]:
    """(the files of one path or several, each once; the folders that cannot be read, and why).

    BadInput for a path that is not there, and where there is no file at all.
    """
    paths = [Path(path).expanduser() for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    for path in paths:
        if not os.path.exists(path):
            raise BadInput(f'there is no file or folder "{path}"; the path of one that exists would be right')
    files, unreadable, seen = [], [], set()
    pending = paths[::-1]
    while pending:
        path = pending.pop()
        real = os.path.realpath(path)
        if real in seen:  # a link, or a path that was given twice; a link to a folder may lead round and round
            continue
        seen.add(real)
        if not os.path.isdir(path):
            files.append(path)
            continue
        try:
            inside = sorted(each for each in path.iterdir() if not each.name.startswith("."))
        except OSError as error:
            unreadable.append((path, error.strerror or str(error)))
            continue
        pending += [each for each in reversed(inside) if os.path.isdir(each) or os.path.isfile(each)]
    if not files:
        raise BadInput(f"there is no file in {', '.join(map(str, paths)) or 'an empty list of paths'}; files, or "
                       f"folders with files of text, would be right")
    return files, unreadable


def plain(raw) -> Iterator[bytes]:
    return iter(lambda: raw.read1(BLOCK), b"")  # read() does not see Ctrl-C while it waits for more from a pipe


def gunzip(raw) -> Iterator[bytes]:
    file = gzip.GzipFile(fileobj=raw)
    return iter(lambda: file.read1(BLOCK), b"")  # read() would lose what comes right before a cut


def unzst(raw) -> Iterator[bytes]:
    frame = None  # zstandard's stream_reader takes a file that is cut short for one that ends
    for packed in iter(lambda: raw.read(ZST_INPUT), b""):
        while packed:
            frame = frame or zstandard.ZstdDecompressor(max_window_size=ZST_WINDOW).decompressobj()
            yield frame.decompress(packed)
            packed = b""
            if frame.eof:
                packed, frame = frame.unused_data, None
    if frame:
        raise EOFError


UNPACK = {".gz": gunzip, ".zst": unzst}


def as_utf8(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The bytes of a file; where a mark at its start says UTF-16 or UTF-32, the same text in UTF-8.

    Windows PowerShell writes UTF-16 with such a mark. What is no character there becomes the byte FF.
    """
    blocks = iter(blocks)
    first = next(blocks, b"")
    name = next((name for mark, name in MARKS.items() if first.startswith(mark)), None)
    if name is None:
        yield first
        yield from blocks
        return
    decoder = codecs.getincrementaldecoder(name)(BAD_UNIT)
    for block in itertools.chain([first], blocks):
        yield decoder.decode(block).encode("utf-8", "surrogateescape")
    yield decoder.decode(b"", final=True).encode("utf-8", "surrogateescape")


def decoded(blocks: Iterable[bytes]) -> Iterator[str]:
    """UTF-8 without a byte order mark and with \\n for every end of a line; bad bytes become surrogates."""
    utf8 = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
    decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
    for block in blocks:
        yield decoder.decode(block)
    yield decoder.decode(b"", final=True)


def lines(blocks: Iterable[bytes], limit: int) -> Iterator[bytes | None]:
    """The lines of a file, None for each that is longer than `limit` bytes."""
    held, size = [], 0
    for block in blocks:
        *ended, rest = block.split(b"\n")
        for line in ended:
            held.append(line)
            yield b"".join(held) if size + len(line) <= limit else None
            held, size = [], 0
        size += len(rest)
        held.append(rest)
        if size > limit:
            held = []
    if size:
        yield b"".join(held) if size <= limit else None
