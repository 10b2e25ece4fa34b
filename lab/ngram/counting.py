"""Counting n-grams of a corpus that is larger than memory, for the tables of lab.ngram.

1. An n-gram is written as one 64-bit number: its ids are the digits, in base vocab_size.
2. The corpus is read in blocks. The n-grams of a block are sorted and equal ones counted: a sorted run on disk.
3. The runs are merged, one range of n-grams after the other, and each context's successors become its row.

Steps 2 and 3 run in threads, as numpy sorts without the interpreter lock. A range may end inside a context, so that a
context with very many successors needs no more memory than others. Its rows are joined before they are handed on.

The result depends on the tokens alone: not on the chunks that they come in, on `memory`, or on `threads`.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lab.ngram.format import COUNT_MAX
from lab.ngram.table import NgramTable
from lab.ngram.writing import Part, write_table
from lab.support.errors import BadInput
from lab.support.host import cores

BREAK = 0xFFFFFFFF                                             # stands between two documents, and is no token
MEMORY = 640_000_000                                           # bytes
SAMPLES = 8192                                                 # keys of each run that stay in memory
PIECE = 1 << 18                                                # elements: the working set of a piece stays in cache


class NothingToCount(BadInput):
    """No document of the corpus is as long as one n-gram."""


class Counted:
    """What was counted: n_tokens, n_rows, and the table's rows as `parts` for lab.ngram.writing.write_table.

    parts: blocks of (keys (n,) uint64, rows (n, 1 + 2 top_k) uint32) by ascending key. Of order 2 keys is None, and
    every id has a row. They can be iterated once. n_rows: of order 3 and more it is None until the last part is out.
    `close`, the end of the parts and the end of a `with` remove the scratch file.
    """

    def __init__(self, n_tokens: int, n_rows: int | None, parts: Generator[Part, None, None], store: Store):
        self.n_tokens, self.n_rows, self._store = n_tokens, n_rows, store
        self.parts = self._tell(parts)

    def _tell(self, parts: Generator[Part, None, None]) -> Generator[Part, None, None]:
        n_rows = 0
        try:
            for keys, rows in parts:
                n_rows += len(rows)
                yield keys, rows
            self.n_rows = n_rows
        finally:
            parts.close()
            self.close()

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> Counted:
        return self

    def __exit__(self, *_) -> None:
        self.parts.close()
        self.close()


class Run(NamedTuple):
    """N-grams of one block, nearly all distinct, on disk at `offset`: n sorted keys (u64), then n counts (u32)."""

    offset: int
    n: int
    samples: np.ndarray                                        # every `step`-th key, the first among them


class Store:
    """Arrays in one nameless file in `folder`: the system removes it, whatever becomes of this process."""

    def __init__(self, folder: str | os.PathLike):
        self.folder, self._lock, self._size = folder, threading.Lock(), 0
        try:
            self._file = tempfile.TemporaryFile(dir=os.fspath(folder))
        except OSError as error:
            raise BadInput(f"{str(folder)!r} cannot hold the scratch file of a count ({error.strerror}): "
                           "name a folder that exists and can be written") from None

    def append(self, *arrays: np.ndarray) -> int:
        """Bytes before the first of the arrays. BadInput when the disk is full."""
        with self._lock:
            offset = self._size
            try:
                self._file.seek(offset)
                for array in arrays:
                    self._file.write(array.data.cast("B"))
                self._file.flush()
            except OSError as error:
                raise BadInput(f"the scratch file in {str(self.folder)!r} cannot grow beyond {offset / 1e9:.1f} GB "
                               f"({error.strerror}): make room, or count fewer tokens (max_tokens)") from None
            self._size += sum(array.nbytes for array in arrays)
        return offset

    def read(self, offset: int, n: int, dtype: type) -> np.ndarray:
        array: np.ndarray = np.empty(n, dtype)
        with self._lock:
            self._file.seek(offset)
            if n and self._file.readinto(array.data.cast("B")) != array.nbytes:
                raise OSError(f"the scratch file in {str(self.folder)!r} lost its end")
        return array

    def close(self) -> None:
        with self._lock:
            self._file.close()


def count(chunks: Iterable[np.ndarray], order: int, vocab_size: int, top_k: int, *, scratch: str | os.PathLike,
          max_tokens: int | None = None, memory: int = MEMORY, threads: int | None = None) -> Counted:
    """Count n-grams of `order` tokens: for each context of order - 1 tokens, its total and its top_k successors.

    The successors are sorted as in a table: by count, the largest first, then by id. Counts stop at 2^32 - 1.
    chunks: 1-D integer arrays of any sizes. N-grams run on from one into the next, but never across a BREAK.
    scratch: a folder on a disk with room for 12 bytes per token, in the worst case that all n-grams differ.
    max_tokens: reading ends after so many tokens (a BREAK is none). memory: about how many bytes the arrays may take.
    threads: default min(4, processors).
    BadInput: nothing to count, an id of vocab_size or more, vocab_size^order > 2^64, an unusable scratch folder.
    """
    if order < 2 or top_k < 1 or not 1 <= vocab_size <= BREAK or vocab_size ** order > 2 ** 64:
        raise BadInput(f"order {order}, top_k {top_k}, vocab_size {vocab_size} cannot be counted: order must be 2 or "
                       "more, top_k and vocab_size 1 or more, and vocab_size ** order at most 2 ** 64")
    if max_tokens is not None and max_tokens < 1:
        raise BadInput(f"max_tokens {max_tokens} leaves nothing to count: 1 or more, or none for all")
    threads = threads or min(4, cores())
    corpus = _Corpus(chunks, max_tokens)
    # A worker holds a block (4 bytes a token), its keys (8), where each begins (4) and its counts (4), and two blocks
    # are being filled or wait for a worker.
    block = max(1, memory // (20 * threads + 8))
    step = max(1, block // SAMPLES)
    store = Store(scratch)
    try:
        with ThreadPoolExecutor(threads) as pool:
            made = _in_order(pool, lambda block: _sorted_run(block, order, vocab_size, store, step),
                             corpus.blocks(block, order - 1), threads)
            runs = [run for run in made if run is not None]
        if not runs:
            raise NothingToCount(f"nothing to count in a corpus of {corpus.n_tokens} tokens: no document has {order} "
                                 "tokens")
    except BaseException:
        store.close()
        raise
    # A worker that merges n keys holds less than 80 bytes and a row for each; a few results wait. Ranges that fit the
    # cache are fastest, unless there are so many runs that what is read beyond a range's ends would outweigh it.
    size = min(max(PIECE, 8 * step * len(runs)), max(1, memory // (2 * threads + 1) // (80 + 8 * top_k)))
    merged = _merged(threads, runs, store, size, step, vocab_size, top_k)
    if order == 2:
        return Counted(corpus.n_tokens, vocab_size, _every_row(merged, vocab_size), store)
    return Counted(corpus.n_tokens, None, merged, store)


def build_table(path: str | os.PathLike, chunks: Iterable[np.ndarray], *, order: int, top_k: int, vocab_size: int,
                tokenizer: str, max_tokens: int | None = None, scratch: str | os.PathLike | None = None,
                memory: int = MEMORY, threads: int | None = None) -> NgramTable:
    """Count, write the table to `path`, and open it (close it, or use it in `with`).

    scratch: default the folder of `path`. The other parameters and BadInput are those of `count` and `write_table`.
    """
    folder = Path(os.path.realpath(path)).parent               # a link is written through, as write_table does
    if not folder.is_dir() or os.path.isdir(path):
        raise BadInput(f"the table {str(path)!r} cannot be written: name a file in a folder that exists")
    with count(chunks, order, vocab_size, top_k, scratch=folder if scratch is None else scratch,
               max_tokens=max_tokens, memory=memory, threads=threads) as counted:
        write_table(path, order=order, top_k=top_k, vocab_size=vocab_size, tokenizer=tokenizer,
                    n_tokens=counted.n_tokens, n_rows=counted.n_rows, parts=counted.parts)
    return NgramTable.open(path, tokenizer=tokenizer)


def _in_order(pool: ThreadPoolExecutor, work: Callable, items: Iterable, ahead: int) -> Iterator:
    """work(item) for each item, in order, `ahead` of them at a time."""
    waiting: deque[Future] = deque()
    try:
        for item in items:
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
            waiting.append(pool.submit(work, item))
            del item
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


class _Corpus:
    """Chunks of any size to blocks of one size, and the count of the tokens."""

    def __init__(self, chunks: Iterable[np.ndarray], max_tokens: int | None):
        self.chunks, self.max_tokens, self.n_tokens = chunks, max_tokens, 0

    def read(self) -> Iterator[np.ndarray]:
        for chunk in self.chunks:
            chunk = np.asarray(chunk)
            if not chunk.size:
                continue
            if chunk.dtype != np.uint32:
                if chunk.dtype.kind not in "iu" or chunk.min() < 0 or chunk.max() > BREAK:
                    raise BadInput(f"a chunk of {chunk.dtype} with {chunk.flat[0]!r} is none of token ids: "
                                   "1-D arrays of np.uint32 are right")
                chunk = chunk.astype(np.uint32)
            if chunk.ndim != 1:
                raise BadInput(f"a chunk of shape {chunk.shape} is none of token ids: 1-D arrays are right")
            n = int(np.count_nonzero(chunk != BREAK))
            if self.max_tokens is not None and self.n_tokens + n >= self.max_tokens:
                last = np.flatnonzero(chunk != BREAK)[self.max_tokens - self.n_tokens - 1]
                self.n_tokens = self.max_tokens
                yield chunk[:last + 1]
                return
            self.n_tokens += n
            yield chunk

    def blocks(self, size: int, overlap: int) -> Iterator[np.ndarray]:
        """Arrays of `overlap` tokens that were in the block before (BREAK at first), and up to `size` new ones."""
        block, filled = np.full(overlap + size, BREAK, np.uint32), overlap
        for chunk in self.read():
            while len(chunk):
                taken = chunk[:len(block) - filled]
                block[filled:filled + len(taken)] = taken
                filled += len(taken)
                chunk = chunk[len(taken):]
                if filled == len(block):
                    tail = block[-overlap:].copy()
                    yield block
                    block, filled = np.empty(overlap + size, np.uint32), overlap
                    block[:overlap] = tail
        yield block[:filled]


def _first_of_equals(sorted_array: np.ndarray) -> np.ndarray:
    """Indices at which a value stands for the first time."""
    first = np.empty(len(sorted_array), bool)
    first[:1] = True
    np.not_equal(sorted_array[1:], sorted_array[:-1], out=first[1:])
    return np.flatnonzero(first)


def _sorted_run(block: np.ndarray, order: int, vocab_size: int, store: Store, step: int) -> Run | None:
    keys = np.empty(max(0, len(block) - order + 1), np.uint64)
    n = 0
    for lo in range(0, len(keys), PIECE):
        tokens = block[lo:lo + PIECE + order - 1]
        piece = _keys(tokens, order, vocab_size)
        keys[n:n + len(piece)] = piece
        n += len(piece)
    if n == 0:
        return None
    keys = keys[:n]
    keys.sort()

    first_at, distinct = np.empty(n + 1, np.uint32), 0
    for lo in range(0, n, PIECE):                              # distinct keys (of each piece) move to the front
        piece = keys[lo:lo + PIECE]
        first = _first_of_equals(piece)
        keys[distinct:distinct + len(first)] = piece[first]
        first_at[distinct:distinct + len(first)] = first + lo
        distinct += len(first)
    first_at[distinct] = n
    keys, counts = keys[:distinct], np.diff(first_at[:distinct + 1])
    return Run(store.append(keys, counts), distinct, keys[::step].copy())


def _keys(tokens: np.ndarray, order: int, vocab_size: int) -> np.ndarray:
    """The n-grams of tokens (n,) that have no BREAK in them."""
    n = len(tokens) - order + 1
    keys = tokens[:n].astype(np.uint64)
    for i in range(1, order):
        keys *= np.uint64(vocab_size)
        keys += tokens[i:i + n]
    breaks = np.flatnonzero(tokens >= vocab_size)
    if len(breaks):
        wrong = tokens[breaks][tokens[breaks] != BREAK]
        if len(wrong):
            raise BadInput(f"token id {wrong[0]} in the corpus: ids must be below vocab_size, {vocab_size}")
        whole = np.ones(len(tokens), bool)
        for i in range(order):
            whole[breaks[breaks >= i] - i] = False
        keys = keys[whole[:n]]
    return keys


def _merged(threads: int, runs: list[Run], store: Store, size: int, step: int,
            vocab_size: int, top_k: int) -> Generator[tuple[np.ndarray, np.ndarray], None, None]:
    """(contexts (n,) uint64, rows (n, 1 + 2 top_k) uint32), contexts ascending, each once."""
    def rows_between(edges):
        keys, counts = _merge(runs, store, step, *edges)
        return _rows(keys, counts, vocab_size, top_k)

    # Each sample stands for `step` keys of its run: a range holds no more than size + len(runs) * step of them.
    lows = np.unique(np.sort(np.concatenate([run.samples for run in runs]))[::max(1, size // step)])
    held = None                                                # the last context so far: it may go on in the next range
    with ThreadPoolExecutor(threads) as pool:
        for contexts, totals, rows in _in_order(pool, rows_between, zip(lows, [*lows[1:], None]), threads + 1):
            if held is not None:
                if held[0] == contexts[0]:
                    totals[0] += held[1]
                    rows[0] = _joined(held[2], rows[0], top_k)
                else:
                    yield _finished(*(part[None] for part in held))
            held = contexts[-1], totals[-1], rows[-1].copy()
            if len(contexts) > 1:
                yield _finished(contexts[:-1], totals[:-1], rows[:-1])
        if held is not None:
            yield _finished(*(part[None] for part in held))


def _merge(runs: list[Run], store: Store, step: int, low: np.uint64, high: np.uint64 | None):
    """Distinct keys (n,) uint64 with low <= key < high of all runs, ascending, and their counts (n,) uint64."""
    all_keys, all_counts = [], []
    for run in runs:
        begin = max(0, int(np.searchsorted(run.samples, low)) - 1) * step
        end = run.n if high is None else min(run.n, int(np.searchsorted(run.samples, high)) * step)
        if begin < end:
            keys = store.read(run.offset + 8 * begin, end - begin, np.uint64)
            i = int(np.searchsorted(keys, low))
            j = len(keys) if high is None else int(np.searchsorted(keys, high))
            all_keys.append(keys[i:j])
            all_counts.append(store.read(run.offset + 8 * run.n + 4 * (begin + i), j - i, np.uint32))
    keys, counts = np.concatenate(all_keys), np.concatenate(all_counts)
    del all_keys, all_counts
    by_key = np.argsort(keys, kind="stable")                   # merges what is sorted already, unlike the default
    keys, counts = keys[by_key], counts[by_key]
    del by_key
    first = _first_of_equals(keys)
    return keys[first], np.add.reduceat(counts, first, dtype=np.uint64)


def _rows(keys: np.ndarray, counts: np.ndarray, vocab_size: int, top_k: int):
    """Sorted distinct n-grams -> contexts (n,) uint64, totals (n,) uint64, rows (n, 1 + 2 top_k), totals left out."""
    contexts = keys // np.uint64(vocab_size)
    ids = (keys - contexts * np.uint64(vocab_size)).astype(np.uint32)
    first = _first_of_equals(contexts)
    contexts, totals = contexts[first], np.add.reduceat(counts, first)
    counts = np.minimum(counts, COUNT_MAX).astype(np.uint32)
    n_successors = np.diff(first, append=len(ids))
    rows = np.zeros((len(first), 1 + 2 * top_k), np.uint32)
    rows[:, 1], rows[:, 1 + top_k] = ids[first], counts[first]
    several = np.flatnonzero(n_successors > 1)                 # often most contexts have one: nothing to sort
    n = n_successors[several]
    row = np.repeat(several, n)
    rank = np.arange(len(row)) - np.repeat(np.cumsum(n) - n, n)
    here = first[row] + rank
    here = here[np.argsort((row.astype(np.uint64) << np.uint64(32)) | (COUNT_MAX - counts[here]), kind="stable")]
    kept = np.flatnonzero(rank < top_k)
    here, row, rank = here[kept], row[kept], rank[kept]
    rows[row, 1 + rank], rows[row, 1 + top_k + rank] = ids[here], counts[here]
    return contexts, totals, rows


def _joined(a: np.ndarray, b: np.ndarray, top_k: int) -> np.ndarray:
    """The row of a context from the rows of two disjoint sets of its successors."""
    ids = np.concatenate([a[1:1 + top_k], b[1:1 + top_k]])
    counts = np.concatenate([a[1 + top_k:], b[1 + top_k:]])
    best = np.lexsort((ids, COUNT_MAX - counts))[:top_k]
    return np.concatenate([a[:1], ids[best], counts[best]])


def _finished(contexts: np.ndarray, totals: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows[:, 0] = np.minimum(totals, COUNT_MAX)
    return contexts, rows


def _every_row(merged: Generator[tuple[np.ndarray, np.ndarray], None, None],
               vocab_size: int) -> Generator[Part, None, None]:
    """Rows of all ids 0, 1, ..., those of ids without a successor are 0."""
    done = 0
    try:
        for contexts, rows in merged:
            end = int(contexts[-1]) + 1
            yield from _spread(contexts, rows, done, end)
            done = end
        yield from _spread(contexts[:0], rows[:0], done, vocab_size)
    finally:
        merged.close()


def _spread(contexts: np.ndarray, rows: np.ndarray, begin: int, end: int) -> Iterator[Part]:
    for low in range(begin, end, PIECE):
        high = min(low + PIECE, end)
        i, j = np.searchsorted(contexts, np.array([low, high], np.uint64))
        part = np.zeros((high - low, rows.shape[1]), np.uint32)
        part[contexts[i:j] - np.uint64(low)] = rows[i:j]
        yield None, part
