"""Text for n-gram tables: files and folders, read in pieces, as token ids in the form that lab/counting.py counts.

Read are JSON Lines and JSON (every string in them), and anything else as plain text (prose, Markdown, source code);
each also compressed, as .gz or .zst. Every file, and every string of JSON, is a document of its own. What cannot be
used stops nothing: it is counted and named in `Corpus.report`. Memory stays bounded whatever the files hold.
"""

from __future__ import annotations

import codecs
import gzip
import io
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import zstandard

from console import BadInput
from lab.ngram.counting import BREAK

BLOCK = 1 << 20        # bytes read at a time
ZST_INPUT = 1 << 8     # compressed bytes at a time: zstandard may make 32 KiB of each, all at once
PIECE = 1 << 16        # characters: a longer text is cut into pieces, so that its parts are tokenized side by side
BATCH = 1 << 20        # characters tokenized in one call
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
    "bad bytes": "bytes that are not UTF-8, each replaced by U+FFFD",
    "bad JSON": "JSON that cannot be parsed, left out",
    "too long": "JSON lines or strings longer than the limit, left out",
}


class Piece(str):
    """A part of a text with which the text does not end: what comes next goes on with it."""


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
                problem.names.append(f"{path} ({where})" if where else str(path))

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
    """The texts of files and folders, read when iterated: a str each, or Pieces and a str that ends the text.

    paths: files, and folders with all that is in them, in the order of their names, but for hidden files and folders
    (in folders) and anything that is no regular file. Links are followed; a file is read once however many lead to
    it. BadInput for a path that is not there and for folders without a file.
    files: what was found. report: what it held, as far as it was read. limit: see LIMIT.
    """

    def __init__(self, paths, limit: int = LIMIT):
        self.files, self._unreadable = _found(paths)
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
        """The bytes of a file, unpacked. Where they cannot be had they end, and the report says why."""
        held, size = [], 0
        try:
            with open(path, "rb") as raw:
                before, unpacked = self.report.bytes, 0
                for block in UNPACK.get(path.suffix.lower(), _plain)(raw):
                    held.append(block)
                    size += len(block)
                    unpacked += len(block)
                    self.report.bytes = before + (raw.tell() if raw.seekable() else unpacked)  # a pipe cannot tell
                    if size >= BLOCK:
                        yield b"".join(held)
                        held, size = [], 0
        except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError):
            self.report.note("damaged", path)
        except OSError as error:
            self.report.note("unreadable", path, where=error.strerror or type(error).__name__)
        yield b"".join(held)

    def _texts(self, path: Path) -> Iterator[str]:
        blocks = self._blocks(path)
        first = next(blocks, b"")
        if b"\0" in first[:1 << 13]:
            self.report.note("binary", path)
            return
        blocks = itertools.chain([first], blocks)
        kind = Path(path.stem if path.suffix.lower() in UNPACK else path.name).suffix.lower()
        if kind in (".jsonl", ".ndjson"):
            yield from self._json_lines(path, blocks)
        elif kind == ".json":
            yield from self._json(path, blocks)
        elif first:
            yield from _cut_up(_decoded(blocks))

    def _json_lines(self, path: Path, blocks: Iterable[bytes]) -> Iterator[str]:
        for number, line in enumerate(_lines(blocks, self.limit), 1):
            if line is None:
                self.report.note("too long", path, where=f"line {number}")
            elif line.strip():
                yield from self._strings(path, line, f"line {number}")

    def _json(self, path: Path, blocks: Iterable[bytes]) -> Iterator[str]:
        """A JSON text is parsed as a whole where it is short; of a long one the strings are read one by one."""
        held, blocks = [], iter(blocks)
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
            yield from self._long_json(path, _decoded(itertools.chain([head], blocks)))

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


# --------------------------------------------------------------------------------------- files, bytes, characters


def _found(paths) -> tuple[list[Path], list[tuple[Path, str]]]:
    """(the files of a path or several, each once; the folders that cannot be read, and why). BadInput as for Corpus."""
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
            unreadable.append((path, error.strerror))
            continue
        pending += [each for each in reversed(inside) if os.path.isdir(each) or os.path.isfile(each)]
    if not files:
        raise BadInput(f"there is no file in {', '.join(map(str, paths)) or 'an empty list of paths'}; files, or "
                       f"folders with files of text, would be right")
    return files, unreadable


def _plain(raw) -> Iterator[bytes]:
    return iter(lambda: raw.read1(BLOCK), b"")  # read() does not see Ctrl-C while it waits for more from a pipe


def _gunzip(raw) -> Iterator[bytes]:
    file = gzip.GzipFile(fileobj=raw)
    return iter(lambda: file.read1(BLOCK), b"")  # read() would lose what comes right before a cut


def _unzst(raw) -> Iterator[bytes]:
    frame = None  # zstandard's stream_reader takes a file that is cut short for one that ends
    for packed in iter(lambda: raw.read(ZST_INPUT), b""):
        while packed:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(packed)
            packed = b""
            if frame.eof:
                packed, frame = frame.unused_data, None
    if frame:
        raise EOFError


UNPACK = {".gz": _gunzip, ".zst": _unzst}


def _decoded(blocks: Iterable[bytes]) -> Iterator[str]:
    """UTF-8 without a byte order mark and with \\n for every end of a line; bad bytes become surrogates."""
    utf8 = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
    decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
    for block in blocks:
        yield decoder.decode(block)
    yield decoder.decode(b"", final=True)


def _lines(blocks: Iterable[bytes], limit: int) -> Iterator[bytes | None]:
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
    """Where to cut between start and end so that no token is: at the end of a line, before a space, or where it must.

    The blank stays with what follows, and none stands before it: some tokens join blanks. Some join a newline to
    punctuation, so a place after a letter or digit is better.
    """
    for fits in (str.isalnum, lambda character: not character.isspace()):
        for blank in "\n ":
            at = text.rfind(blank, start + 1, end)
            while at > 0 and not fits(text[at - 1]):
                at = text.rfind(blank, start + 1, at)
            if at > 0:
                return at
    return end


# ----------------------------------------------------------------------------------------------------- tokens


@dataclass(frozen=True)
class Tokenizer:
    """What a table needs of a tokenizer.

    encode_batch: texts -> a list of ids each, without special tokens. decode: ids -> text. vocab_size: largest id + 1.
    fingerprint: as lab/toy.py and lab/hf.py give it to their decoders.
    """

    encode_batch: Callable[[list[str]], list[list[int]]]
    decode: Callable[[list[int]], str]
    vocab_size: int
    fingerprint: str


def tokenizer(name: str = "toy") -> Tokenizer:
    """The toy family's tokenizer, or that of a model that lab/hf.py finds: its name, its folder or its .gguf file.

    The model itself is not loaded. BadInput where there is none.
    """
    if name == "toy":
        from lab import toy
        return Tokenizer(_encoder(toy.tokenizer()), toy.decode, toy.tokenizer().get_vocab_size(), toy.tokenizer_id())
    from lab.models import hf
    return of_model(hf.load_tokenizer(name))


def of_model(codec) -> Tokenizer:
    """The same for a tokenizer of transformers, such as HFDecoder.hf_tokenizer."""
    from copy import deepcopy

    from lab.models import hf

    if codec.is_fast:
        backend = deepcopy(codec.backend_tokenizer)  # the settings changed here are the model's own there
        backend.no_truncation()
        backend.no_padding()
        encode_batch = _encoder(backend)
    else:
        def encode_batch(texts):
            return codec(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return Tokenizer(encode_batch, codec.decode, max(codec.get_vocab().values()) + 1, hf.fingerprint(codec))


def _encoder(backend) -> Callable[[list[str]], list[list[int]]]:
    def encode_batch(texts):
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

    return encode_batch


def token_chunks(texts: Iterable[str], encode_batch: Callable, batch: int = BATCH) -> Iterator[np.ndarray]:
    """The ids of texts, 1-D arrays of uint32 with BREAK after every text, as lab/counting.py takes them.

    texts: a Corpus, or any texts; a Piece goes on in the next one. encode_batch: see Tokenizer. batch: characters
    that are tokenized in one call, which uses all cores where there are several texts in it.
    """
    held, size = [], 0
    for text in texts:
        held.append(text)
        size += len(text) + 1
        if size >= batch:
            yield _ids(held, encode_batch)
            held, size = [], 0
    if held:
        yield _ids(held, encode_batch)


def _ids(texts: list[str], encode_batch: Callable) -> np.ndarray:
    ids = []
    for text, tokens in zip(texts, encode_batch(texts), strict=True):
        ids += tokens
        if not isinstance(text, Piece):
            ids.append(BREAK)
    return np.array(ids, np.uint32)
