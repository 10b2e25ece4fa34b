"""A corpus: the texts of files and folders, for n-gram tables.

1. JSON Lines and JSON give the strings in them. Any other file is plain text: prose, Markdown, source code.
2. A file may be compressed, as .gz or .zst. It is UTF-8, or UTF-16 or UTF-32 with a byte order mark.
3. Each text file, and each string of JSON, is a document: no n-gram goes from one into the next.
4. What cannot be used stops nothing. It is counted and named in `Corpus.report`.

Files are read in pieces, so memory stays bounded whatever they hold.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import zstandard

from console import fmt_bytes
from lab.ngram import files

PIECE = 1 << 16        # characters: a longer text is cut into pieces, so that its parts are tokenized side by side
LIMIT = 1 << 26        # bytes: the longest JSON line, and the longest JSON text that is parsed as a whole
NAMED = 3              # files named of each problem
SURROGATES = re.compile("[\ud800-\udfff]")
# A string of JSON, and the character that tells whether it is a key; the possessive repeats keep no way back.
STRING = re.compile(r'[^"]*+"([^"\\]*+(?:\\.[^"\\]*+)*+)"\s*+(.)', re.DOTALL)
PROBLEMS = {
    "unreadable": "cannot be read",
    "binary": "binary, left out",
    "damaged": "compressed, and damaged or cut short: what comes before that is used",
    "no text": "no text in it",
    "wide window": f"compressed with a window above {fmt_bytes(files.ZST_WINDOW)}, left out",
    "bad bytes": "bytes that are not UTF-8, each replaced by U+FFFD",
    "bad JSON": "JSON that cannot be parsed, left out",
    "too long": "JSON lines or strings longer than the limit, left out",
}


class Piece(str):
    """A part of a text that is not its last: the next one goes on with the same text."""


@dataclass
class Problem:
    """One kind of problem: in how many files, how often, and the first of those files."""

    files: int = 0
    count: int = 0
    names: list[str] = field(default_factory=list)
    last: str = ""


@dataclass
class Report:
    """What a corpus held, as far as it was read."""

    files: int = 0            # that gave text
    texts: int = 0            # documents
    bytes: int = 0            # read, of the files as they lie on disk
    problems: dict[str, Problem] = field(default_factory=dict)     # by kind, as in PROBLEMS

    def note(self, kind: str, path, count: int = 1, where: str = "") -> None:
        problem = self.problems.setdefault(kind, Problem())
        problem.count += count
        if problem.last != str(path):
            problem.last = str(path)
            problem.files += 1
            if len(problem.names) < NAMED:
                name = str(path) if str(path).isprintable() else repr(str(path))  # a name may hold the end of a line
                problem.names.append(f"{name} ({where})" if where else name)

    def told(self) -> list[tuple[str, list[str]]]:
        """For each kind of problem: how many files have it, in words, and the first of them."""
        found = []
        for kind, words in PROBLEMS.items():
            if problem := self.problems.get(kind):
                times = f", {problem.count:,} times" if problem.count > problem.files else ""
                first = f", the first {NAMED}" if problem.files > NAMED else ""
                found.append((f"{problem.files:,} {'file' if problem.files == 1 else 'files'}{times} "
                              f"({words}){first}:", problem.names))
        return found


class Corpus:
    """The texts of files and folders, read when iterated. A text is one str; a long one is Pieces and then a str.

    paths: files and folders. A folder's files are read in the order of their names, without hidden ones and those that
    are no regular files. Links are followed, and a file is read once, however many links lead to it.
    files: what was found. report: what was in them, as far as they were read. limit: see LIMIT.
    BadInput for a path that is not there, and where there is no file at all.
    """

    def __init__(self, paths, limit: int = LIMIT):
        self.files, self._unreadable = files.found(paths)
        self.limit, self.report = limit, Report()
        self._sizes = [os.path.getsize(path) for path in self.files]
        self._left_out = 0  # bytes of the files so far that were not read

    def __iter__(self) -> Iterator[str]:
        self.report, self._left_out = Report(), 0
        for folder, why in self._unreadable:
            self.report.note("unreadable", folder, where=why)
        for path, size in zip(self.files, self._sizes):
            words, before = False, self.report.bytes
            for at, text in enumerate(self._texts(path)):
                if SURROGATES.search(text):  # bytes that were no UTF-8, or half a pair that JSON spells out
                    kind = type(text)
                    text, n = SURROGATES.subn("\ufffd", text)
                    text = kind(text)
                    self.report.note("bad bytes", path, n)
                words = words or not (text == "" or text.isspace())
                self.report.files += at == 0
                self.report.texts += not isinstance(text, Piece)
                yield text
            named = any(problem.last == str(path) for problem in self.report.problems.values())
            if not words and not named:
                self.report.note("no text", path)
            self._left_out += size - (self.report.bytes - before)

    @property
    def share(self) -> float:
        """How much of the files has been dealt with, from 0 to 1."""
        return min(1.0, (self.report.bytes + self._left_out) / max(sum(self._sizes), 1))

    def _blocks(self, path: Path) -> Iterator[bytes]:
        """The bytes of a file, unpacked. They end where reading fails, and the report says why."""
        held, size = [], 0
        try:
            with open(path, "rb") as raw:
                before, unpacked = self.report.bytes, 0
                for block in files.UNPACK.get(path.suffix.lower(), files.plain)(raw):
                    held.append(block)
                    size += len(block)
                    unpacked += len(block)
                    self.report.bytes = before + (raw.tell() if raw.seekable() else unpacked)  # a pipe cannot tell
                    if size >= files.BLOCK:
                        yield b"".join(held)
                        held, size = [], 0
        except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
            self.report.note("wide window" if "too much memory" in str(error) else "damaged", path)
        except OSError as error:
            self.report.note("unreadable", path, where=error.strerror or type(error).__name__)
        yield b"".join(held)

    def _texts(self, path: Path) -> Iterator[str]:
        blocks = files.as_utf8(self._blocks(path))
        first = next(blocks, b"")
        if b"\0" in first[:1 << 13]:
            self.report.note("binary", path)
            return
        blocks = itertools.chain([first], blocks)
        kind = Path(path.stem if path.suffix.lower() in files.UNPACK else path.name).suffix.lower()
        if kind in (".jsonl", ".ndjson"):
            yield from self._json_lines(path, blocks)
        elif kind == ".json":
            yield from self._json(path, blocks)
        elif first:
            yield from _cut_up(files.decoded(blocks))

    def _json_lines(self, path: Path, blocks: Iterable[bytes]) -> Iterator[str]:
        for number, line in enumerate(files.lines(blocks, self.limit), 1):
            if line is None:
                self.report.note("too long", path, where=f"line {number}")
            elif line.strip():
                yield from self._strings(path, line, f"line {number}")

    def _json(self, path: Path, blocks: Iterable[bytes]) -> Iterator[str]:
        """The strings of a JSON text. A short one is parsed as a whole; of a long one they are found one by one."""
        held, blocks = list[bytes](), iter(blocks)
        while sum(map(len, held)) <= self.limit and (block := next(blocks, b"")):
            held.append(block)
        head = b"".join(held)
        first = head.lstrip().partition(b"\n")[0]
        if len(first) <= self.limit and _parsed(first)[1]:  # JSON Lines under another name, or JSON on one line
            yield from self._json_lines(path, itertools.chain([head], blocks))
        elif len(head) <= self.limit:
            if head.strip():
                yield from self._strings(path, head)
        else:
            yield from self._long_json(path, files.decoded(itertools.chain([head], blocks)))

    def _strings(self, path: Path, data: bytes, where: str = "") -> Iterator[str]:
        value, valid = _parsed(data)
        if not valid:
            self.report.note("bad JSON", path, where=where)
        pending = [value]
        while pending:
            value = pending.pop()
            if isinstance(value, str):
                yield from _cut_up([value] if value else [])
            elif isinstance(value, (dict, list)):
                pending.extend(reversed(value.values() if isinstance(value, dict) else value))

    def _long_json(self, path: Path, parts: Iterable[str]) -> Iterator[str]:
        held = ""
        for part in parts:
            held, at = held + part, 0
            while match := STRING.match(held, at):
                at = match.end(1) + 1
                if match[2] != ":":
                    yield from self._strings(path, f'"{match[1]}"'.encode("utf-8", "surrogateescape"))
            held = held[at:] if '"' in held[at:] else ""
            if len(held) > self.limit:
                self.report.note("too long", path)
                return
        if held:
            self.report.note("bad JSON", path, where="it ends in a string")


def _parsed(data: bytes) -> tuple[object, bool]:
    """(a JSON value, whether it is one)."""
    try:
        return json.loads(data.decode("utf-8-sig", "surrogateescape"), strict=False), True
    except (ValueError, RecursionError):
        return None, False


def _cut_up(parts: Iterable[str]) -> Iterator[str]:
    """A text that comes in parts, as Pieces of at most PIECE characters and a last str."""
    held = ""
    for part in parts:
        held, at = held + part, 0
        while len(held) - at > PIECE:
            end = _cut(held, at, at + PIECE)
            yield Piece(held[at:end])
            at = end
        held = held[at:]
    if held:
        yield held


def _cut(text: str, start: int, end: int) -> int:
    """A place between start and end where no token is cut in two: before a newline, else before a space, else `end`.

    The character before the place is no blank, because some tokens join blanks. If possible it is a letter or a digit,
    because some tokens join punctuation and a newline.
    """
    for fits in (str.isalnum, lambda character: not character.isspace()):
        for blank in "\n ":
            at = text.rfind(blank, start + 1, end)
            while at > 0 and not fits(text[at - 1]):
                at = text.rfind(blank, start + 1, at)
            if at > 0:
                return at
    return end
