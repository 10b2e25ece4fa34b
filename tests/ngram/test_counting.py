"""lab/counting.py against collections.Counter: chunks, breaks, orders, skew, and so little memory that runs abound."""

import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console import BadInput
from lab.ngram import counting
from lab.ngram.counting import BREAK, build_table, count
from lab.ngram.table import NgramTable

TINY = 1                                                       # bytes: one n-gram in a run, one range for each key


def array(tokens):
    return np.array(tokens, np.uint32)


def expected(tokens, order, top_k):
    """{context: (total, [(successor, count), ...])} in plain Python."""
    windows = zip(*(tokens[i:] for i in range(order)))
    successors = defaultdict(list)
    for ngram, n in Counter(w for w in windows if BREAK not in w).items():
        successors[ngram[:-1]].append((ngram[-1], n))
    return {context: (sum(n for _, n in found), sorted(found, key=lambda pair: (-pair[1], pair[0]))[:top_k])
            for context, found in successors.items()}


def counted(chunks, order, vocab_size, top_k, scratch, **options):
    """(n_tokens, {context: (total, [(successor, count), ...])}) from the parts."""
    found, last = {}, -1
    with count(chunks, order, vocab_size, top_k, scratch=scratch, **options) as result:
        n_rows = 0
        for keys, rows in result.parts:
            assert rows.dtype == np.uint32 and rows.shape[1] == 1 + 2 * top_k and len(rows)
            assert (keys is None) == (order == 2)
            keys = range(n_rows, n_rows + len(rows)) if keys is None else keys.tolist()
            for key, (total, *pairs) in zip(keys, rows.tolist(), strict=True):
                assert key > last
                last, digits, rest = key, [], key
                for _ in range(order - 1):
                    rest, digit = divmod(rest, vocab_size)
                    digits.append(digit)
                if total:
                    pairs = [pair for pair in zip(pairs[:top_k], pairs[top_k:]) if pair != (0, 0)]
                    found[tuple(reversed(digits))] = total, pairs
                else:
                    assert order == 2 and not any(pairs)
            n_rows += len(rows)
        assert result.n_rows == n_rows and (order > 2 or n_rows == vocab_size)
    return result.n_tokens, found


@st.composite
def corpora(draw):
    """(chunks, the same tokens in one list, vocab_size)"""
    vocab_size = draw(st.sampled_from([1, 2, 5, 40]))
    token = st.one_of(st.integers(0, vocab_size - 1), st.just(0), st.just(BREAK))
    chunks = draw(st.lists(st.lists(token, max_size=30), max_size=8))
    return [array(chunk) for chunk in chunks], [t for chunk in chunks for t in chunk], vocab_size


@settings(max_examples=150, deadline=None)
@given(corpora(), st.sampled_from([2, 3, 4]), st.sampled_from([1, 2, 5]), st.sampled_from([TINY, 2_000, 10**6]),
       st.sampled_from([1, 3]), st.sampled_from([1, 3, 8192]))
@pytest.mark.slow
def test_counts_are_those_of_a_counter(tmp_path_factory, corpus, order, top_k, memory, threads, samples):
    chunks, tokens, vocab_size = corpus
    right = expected(tokens, order, top_k)
    options = dict(scratch=tmp_path_factory.getbasetemp(), memory=memory, threads=threads)
    if not right:
        with pytest.raises(BadInput, match="nothing to count"):
            count(chunks, order, vocab_size, top_k, **options)
        return
    with mock.patch.object(counting, "SAMPLES", samples):      # few: what is read of a run begins before its range
        n_tokens, found = counted(chunks, order, vocab_size, top_k, **options)
    assert found == right
    assert n_tokens == sum(t != BREAK for t in tokens)


@pytest.mark.parametrize("order", [2, 3, 4])
@pytest.mark.slow
def test_a_table_has_the_same_bytes_whatever_the_chunks_memory_and_threads(tmp_path, order):
    rng = np.random.default_rng(order)
    tokens = array(rng.zipf(1.3, 700) % 30)
    tokens[rng.random(700) < 0.03] = BREAK
    facts = dict(order=order, top_k=3, vocab_size=30, tokenizer="t")

    def table(name, chunks, **options):
        with build_table(tmp_path / name, chunks, **facts, **options) as built:
            assert built.n_tokens == np.count_nonzero(tokens != BREAK)
            built.verify()
        return (tmp_path / name).read_bytes()

    first = table("whole", [tokens])
    for i, chunks in enumerate([tokens.reshape(-1, 1), np.array_split(tokens, 7), [tokens[:0], tokens.tolist()]]):
        for memory in 2_000, 20_000:
            assert table(f"{i}-{memory}", chunks, memory=memory, threads=1 + i) == first
    assert table("twice", [tokens]) == first


def test_large_pieces_agree_with_small_ones(tmp_path, monkeypatch):
    """Equal n-grams across the edge of a piece, and breaks there."""
    tokens = array([1, 1, 1, 1, 1, 1, BREAK, 1, 1, 2, 1, 2, BREAK, 2] * 3)
    for piece in 1, 2, 3, 5:
        monkeypatch.setattr(counting, "PIECE", piece)
        for order in 2, 3:
            assert counted([tokens], order, 4, 2, tmp_path)[1] == expected(tokens.tolist(), order, 2)


def test_skew_one_context_with_all_successors_and_one_key_that_is_most_of_the_corpus(tmp_path):
    rng = np.random.default_rng(0)
    fan = array(rng.integers(0, 500, 3000))
    fan[::2] = 7                                               # 7 is followed by everything, and follows everything
    same = array(np.where(rng.random(3000) < 0.97, 3, rng.integers(0, 500, 3000)))
    for tokens in fan, same:
        for order in 2, 3:
            for memory in 5_000, 50_000:
                _, found = counted([tokens], order, 500, 4, tmp_path, memory=memory)
                assert found == expected(tokens.tolist(), order, 4)


def test_a_context_spread_over_many_ranges_needs_no_larger_ranges(tmp_path, monkeypatch):
    """All in one context. Ranges are cut by keys, so none holds more than its size and `step` of every run."""
    sizes, merge = [], counting._merge

    def watched(*args):
        keys, counts = merge(*args)
        sizes.append(len(keys))
        return keys, counts

    monkeypatch.setattr(counting, "_merge", watched)
    monkeypatch.setattr(counting, "PIECE", 64)
    tokens = np.full(6000, BREAK, np.uint32)
    tokens[::3] = 7
    tokens[1::3] = np.random.default_rng(0).permutation(2000)
    _, found = counted([tokens], 2, 2000, 3, tmp_path, memory=60_000, threads=1)
    assert found == {(7,): (2000, [(0, 1), (1, 1), (2, 1)])}
    assert len(sizes) > 10 and max(sizes) < 200 and sum(sizes) == 2000


def test_keys_fill_all_64_bits(tmp_path):
    wide = 65536
    tokens = [wide - 1] * 6 + [0, 1, wide - 1, wide - 2] * 2
    assert counted([array(tokens)], 4, wide, 2, tmp_path, memory=TINY)[1] == expected(tokens, 4, 2)


def test_counts_stop_at_the_largest_that_a_row_can_hold():
    keys = np.array([5, 6, 7], np.uint64)                      # vocabulary 10: context 0
    contexts, totals, rows = counting._rows(keys, np.array([3, 2**33, 2**34], np.uint64), 10, 2)
    assert totals[0] == 3 + 2**33 + 2**34 and rows[0, 1:].tolist() == [6, 7, 2**32 - 1, 2**32 - 1]
    assert counting._finished(contexts, totals, rows)[1][0, 0] == 2**32 - 1


def test_max_tokens_counts_tokens_not_breaks_and_reads_no_further(tmp_path):
    tokens = [1, 2, BREAK, 3, 1, 2, BREAK, 1, 3]

    def chunks(size):
        for i in range(0, len(tokens), size):
            yield array(tokens[i:i + size])
        raise AssertionError("read past max_tokens")

    for size in 1, 2, 4, 9:
        for n, upto in (2, 2), (5, 6), (6, 8), (7, 9):
            assert counted(chunks(size), 2, 4, 2, tmp_path, max_tokens=n) == (n, expected(tokens[:upto], 2, 2))
    assert counted([array(tokens)], 2, 4, 2, tmp_path, max_tokens=100) == (7, expected(tokens, 2, 2))


@pytest.mark.parametrize("chunk, words", [
    ([1, 4], "token id 4"), ([1, -1], "-1|int64"), ([1.0, 2.0], "float64"), ([[1, 2], [1, 2]], "shape"),
    ([1, 2**32], "int64"), (["a", "b"], "U1"), (7, "shape"),
])
def test_what_is_no_token_is_refused(tmp_path, chunk, words):
    with pytest.raises(BadInput, match=words):
        count([array([1, 2]), np.array(chunk)], 2, 4, 1, scratch=tmp_path)


@pytest.mark.parametrize("options", [dict(order=1), dict(top_k=0), dict(vocab_size=0), dict(max_tokens=0),
                                     dict(order=65, vocab_size=2), dict(vocab_size=2**32)])
def test_wrong_sizes_are_refused(tmp_path, options):
    with pytest.raises(BadInput, match=str(next(iter(options.values())))):
        count([array([0, 1])], scratch=tmp_path, **{"order": 2, "vocab_size": 4, "top_k": 1, **options})


@pytest.mark.parametrize("tokens, order", [([], 2), ([1], 2), ([1, BREAK, 2, BREAK], 2), ([1, 2, BREAK, 1], 3)])
def test_a_corpus_without_an_ngram_is_refused_and_the_old_table_stays(tmp_path, tokens, order):
    path = tmp_path / "t"
    path.write_bytes(b"old")
    with pytest.raises(BadInput, match="nothing to count"):
        build_table(path, [array(tokens)], order=order, top_k=1, vocab_size=4, tokenizer="t")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["t"]


def test_a_folder_that_is_not_there_is_told_before_anything_is_read(tmp_path):
    def chunks():
        raise AssertionError("read")
        yield

    facts = dict(order=2, top_k=1, vocab_size=4, tokenizer="t")
    for path in tmp_path / "no" / "t", tmp_path:
        with pytest.raises(BadInput, match="cannot be written"):
            build_table(path, chunks(), **facts)
    with pytest.raises(BadInput, match="scratch"):
        build_table(tmp_path / "t", chunks(), scratch=tmp_path / "no", **facts)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failure_leaves_nothing_behind(tmp_path, error):
    def chunks():
        yield array([0, 1, 2] * 100)
        raise error("stop")

    (tmp_path / "t").write_bytes(b"old")
    with pytest.raises(error, match="stop"):
        build_table(tmp_path / "t", chunks(), order=2, top_k=1, vocab_size=4, tokenizer="t", memory=500)
    assert os.listdir(tmp_path) == ["t"] and (tmp_path / "t").read_bytes() == b"old"


def test_parts_given_up_close_the_scratch_file(tmp_path):
    tokens = array(np.arange(300) % 17)
    for n_parts in 0, 1, 2:
        with count([tokens], 3, 17, 1, scratch=tmp_path, memory=TINY, threads=2) as result:
            for _ in range(n_parts):
                next(result.parts)
        assert result._store._file.closed and result.n_rows is None
    with count([tokens], 3, 17, 1, scratch=tmp_path) as result:
        assert len(list(result.parts)) and result._store._file.closed


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    class Full:
        closed = False

        def seek(self, offset): ...
        def close(self): self.closed = True

        def write(self, data):
            raise OSError(28, "No space left on device")

    full = Full()
    monkeypatch.setattr(counting.tempfile, "TemporaryFile", lambda dir: full)
    with pytest.raises(BadInput, match="No space left on device.*max_tokens"):
        count([array([0, 1, 2] * 9)], 2, 4, 1, scratch=tmp_path, memory=TINY)
    assert full.closed


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="the system has no SIGKILL")
def test_a_killed_count_leaves_no_scratch_file(tmp_path):
    """Killed while runs are on disk: the next build begins with nothing of it."""
    code = ("import sys, numpy as np; from lab.ngram.counting import count\n"
            "def chunks():\n"
            "    yield np.arange(3000, dtype=np.uint32) % 50\n"
            "    print('ready', flush=True); sys.stdin.read()\n"
            "count(chunks(), 3, 50, 1, scratch=sys.argv[1], memory=2000, threads=1)")
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          cwd=Path(__file__).parents[2]) as process:
        assert process.stdout.readline().strip() == b"ready"
        process.kill()
    assert os.listdir(tmp_path) == []
    build_table(tmp_path / "t", [np.arange(60, dtype=np.uint32) % 50], order=3, top_k=1, vocab_size=50,
                tokenizer="t").close()
    assert os.listdir(tmp_path) == ["t"]


def test_the_table_answers_as_counted(tmp_path):
    tokens = [0, 1, 2, 0, 1, 3, 0, 1, 3, BREAK, 2, 2]
    with build_table(tmp_path / "t", [array(tokens)], order=3, top_k=2, vocab_size=4, tokenizer="t") as table:
        assert isinstance(table, NgramTable) and table.n_tokens == 11 and table.tokenizer == "t"
        assert table.row([0, 1]) == [(3, 2), (2, 1)] and table.best([9, 0, 1]) == (3, 2, 3)
        assert table.row([3, 2]) is None
