"""Writing tables: the bytes are those of the format, no wrong table is written, and a kill leaves one whole."""

import os
import signal
import subprocess
import sys
import textwrap
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest

from console import BadInput
from lab.ngram.format import FIELDS, PAGE
from lab.ngram.table import NgramTable
from lab.ngram.writing import write_table
from made_tables import every_context, expected, parts_of, random_model, refused, unchecked, write

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("order", (2, 3))
def test_parts_of_any_size_give_the_same_bytes_laid_out_as_documented(tmp_path, order):
    successors, totals = random_model(order, 40, 3, 0.5)
    files = []
    for size in (1, 7, 10_000):
        files.append(tmp_path / f"{size}.ngram")
        write(files[-1], order, parts=parts_of(successors, totals, order, 40, 3, size))
    content = files[0].read_bytes()
    assert all(file.read_bytes() == content for file in files)
    (keys, rows), = parts_of(successors, totals, order, 40, 3, 10_000)
    n = len(rows)
    rows_end = PAGE + -(-rows.nbytes // PAGE) * PAGE
    keys_end = rows_end + (PAGE * -(-8 * n // PAGE) if order > 2 else 0)
    size = keys_end + 4 * (keys_end // PAGE - 1)
    assert FIELDS.unpack_from(content) == (b"\x89NGRAM\r\n", 0x01020304, 1, order, 3, 40, 4096, n, 1234, 4096, rows_end,
                                           keys_end, size, 5)
    assert content[84:89] == b"toy-1" and not any(content[89:PAGE - 4])
    assert content[PAGE - 4:PAGE] == zlib.crc32(content[:PAGE - 4]).to_bytes(4, "little")
    assert content[PAGE:PAGE + rows.nbytes] == rows.astype("<u4").tobytes()
    if order > 2:
        assert content[rows_end:rows_end + 8 * n] == keys.astype("<u8").tobytes()
    sums = b"".join(zlib.crc32(content[at:at + PAGE]).to_bytes(4, "little") for at in range(PAGE, keys_end, PAGE))
    assert content[keys_end:] == sums and len(content) == size


# -- rows and keys that make no sense ------------------------------------------------------------------

BAD_ROWS = {                                             # of a vocabulary of 3, K = 2
    "an id of 3": [5, 3, 1, 3, 2], "an id of 7": [5, 1, 7, 3, 2], "do not descend": [5, 0, 1, 2, 3],
    "ids do not ascend": [5, 1, 0, 2, 2], "whose ids do not ascend": [5, 1, 1, 2, 2], "a count of 0": [5, 0, 1, 5, 0],
    "below the sum": [4, 0, 1, 3, 2], "total below the sum": [4, 0, 1, 2**32 - 1, 5],
    "without a successor": [5, 0, 0, 0, 0]}


@pytest.mark.parametrize("order, keys", [(2, None), (3, np.arange(3, dtype=np.uint64))])
@pytest.mark.parametrize("words", BAD_ROWS)
def test_rows_that_make_no_sense(tmp_path, monkeypatch, words, order, keys):
    """Neither written nor passed by verify, though their checksums are right; no id beyond the vocabulary comes out."""
    path, row, good = tmp_path / "t.ngram", BAD_ROWS[words], [3, 0, 1, 2, 1]
    with pytest.raises(BadInput, match=words):
        write(path, order, 3, 2, parts=[(keys, np.array([good, row, good], np.uint32))])
    assert not list(tmp_path.iterdir())
    unchecked(monkeypatch, path, [good, row, good], order, keys)
    refused(path, words)
    context = [1] if order == 2 else [0, 1]
    with NgramTable.open(path) as table:
        if "an id of" in words:
            for read in (table.row, lambda context: table.rows([context])):
                with pytest.raises(BadInput, match="vocabulary of 3"):
                    read(context)
        if words == "an id of 3":
            with pytest.raises(BadInput, match="vocabulary of 3"):
                table.best(context)
        if words == "without a successor":
            assert table.best(context) is None and table.row(context) is None


def test_a_row_without_a_context(tmp_path, monkeypatch):
    """A total of 0 is a context never seen: of order 2 a row of its own, of order 3 none."""
    path, rows, keys = tmp_path / "t.ngram", [[3, 0, 1, 2, 1], [0] * 5, [3, 0, 1, 2, 1]], np.arange(3, dtype=np.uint64)
    unchecked(monkeypatch, path, rows, 3, keys)
    refused(path, "without a successor")
    write(path, 2, 3, 2, parts=[(None, np.array(rows, np.uint32))])
    with NgramTable.open(path) as table:
        table.verify()


@pytest.mark.parametrize("keys, words", [([0, 2, 1], "do not ascend"), ([0, 1, 1], "do not ascend"),
                                         ([0, 1, 9], "key of 9")])
def test_keys_that_make_no_sense(tmp_path, monkeypatch, keys, words):
    path, keys, rows = tmp_path / "t.ngram", np.array(keys, np.uint64), np.array([[3, 0, 1, 2, 1]] * 3, np.uint32)
    for parts in ([(keys, rows)], [(keys[i:i + 1], rows[i:i + 1]) for i in range(3)]):
        with pytest.raises(BadInput, match=words):
            write(path, 3, 3, 2, parts=parts)
    assert not list(tmp_path.iterdir())
    unchecked(monkeypatch, path, rows, 3, keys)
    refused(path, words)


# -- writing -------------------------------------------------------------------------------------------------

def test_parts_that_make_no_table(tmp_path):
    path = tmp_path / "t.ngram"
    rows, keys = np.array([[3, 0, 1, 2, 1]] * 3, np.uint32), np.arange(3, dtype=np.uint64)
    for order, parts, options in [
            (2, [(None, rows[:2])], {}), (2, [(None, rows), (None, rows)], {}), (2, [(keys, rows)], {}),
            (2, [(None, rows.astype(np.int64))], {}), (2, [(None, rows[:, :3])], {}), (2, [(None, rows[0])], {}),
            (3, [], {}), (3, [(None, rows)], {}), (3, [(keys[:2], rows)], {}), (3, [(keys.astype(np.int64), rows)], {}),
            (3, [(keys, rows)], {"n_rows": 4}), (1, [(keys, rows)], {}), (3, [(keys, rows)], {"top_k": 0}),
            (3, [(keys, rows)], {"top_k": 512}), (3, [(keys, rows)], {"vocab_size": 2**22}),
            (3, [(keys, rows)], {"vocab_size": 0}), (3, [(keys, rows)], {"tokenizer": "é" * 129})]:
        with pytest.raises(BadInput):
            write(path, order, **{"vocab_size": 3, "top_k": 2, "parts": parts, **options})
        assert not list(tmp_path.iterdir())
    write(path, 3, 3, 2, parts=[(keys, rows), (keys[:0], rows[:0])], n_rows=3, tokenizer="é" * 128)
    with NgramTable.open(path) as table:
        assert table.n_rows == 3 and table.tokenizer == "é" * 128
    with pytest.raises(BadInput, match="nowhere"):
        write(tmp_path / "nowhere" / "t.ngram")


def test_an_error_in_the_parts_leaves_the_old_table(tmp_path):
    path = tmp_path / "t.ngram"
    model = write(path)
    before = path.read_bytes()

    def failing(error):
        yield from parts_of(*model, 3, 40, 3)[:5]
        raise error

    for error, seen in ((KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space left on device"), BadInput)):
        with pytest.raises(seen):
            write(path, parts=failing(error))
        assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


KILLED = """
    import os, signal, sys
    from pathlib import Path
    sys.path[:0] = [{root!r}, {tests!r}]
    from made_tables import parts_of, random_model, write

    def reach(moment):
        moments.append(moment)
        if moments[-1] == {when!r} and moments.count(moment) == 1:
            if hasattr(signal, "SIGKILL"):
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(9)

    def parts():
        for i, part in enumerate(parts_of(*random_model(3, 40, 3, 0.9), 3, 40, 3)):
            if i == 50:
                reach("parts")
            yield part

    def watched(name):
        real = getattr(os, name)
        def call(*args):
            reach("before " + name)
            result = real(*args)
            reach("after " + name)
            return result
        setattr(os, name, call)

    moments = []
    watched("fsync")
    watched("replace")
    write(Path({path!r}), parts=parts(), tokenizer="new")
    assert moments[:5] == ["parts", "before fsync", "after fsync", "before replace", "after replace"], moments
    print("whole")
"""


@pytest.mark.nightly
@pytest.mark.parametrize("when", ["parts", "before fsync", "before replace", "after replace", "never"])
def test_killed_at_any_moment_a_table_is_whole(tmp_path, when):
    """The old one until the new one is on the disk, whole, and has its name."""
    path = tmp_path / "t.ngram"
    write(path, tokenizer="old")
    source = textwrap.dedent(KILLED).format(root=str(ROOT), tests=str(ROOT / "tests" / "ngram"), path=str(path),
                                            when=when)
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    if when == "never":
        assert ended.stdout == "whole\n", ended.stderr
    else:
        assert ended.returncode == (-signal.SIGKILL if hasattr(signal, "SIGKILL") else 9), ended.stderr
    with NgramTable.open(path) as table:
        table.verify()
        assert table.tokenizer == ("new" if when in ("after replace", "never") else "old")
    write(path, tokenizer="newer")                       # what a killed one left behind is in nobody's way
    with NgramTable.open(path, tokenizer="newer") as table:
        table.verify()
    assert all(left.suffix == ".part" for left in tmp_path.iterdir() if left != path)


@pytest.mark.skipif(os.name == "nt", reason="Windows does not replace a file that is open")
def test_a_table_that_is_open_stays_as_it_is_when_a_new_one_takes_its_name(tmp_path):
    path, link = tmp_path / "t.ngram", tmp_path / "link.ngram"
    model = write(path, share=0.5)
    link.symlink_to(path)
    with NgramTable.open(path) as table:
        write(link, share=0.1, tokenizer="new")
        for context in every_context(3, 40).tolist():
            assert table.best(context) == expected(*model, tuple(context))
        table.verify()
    assert link.is_symlink()
    with NgramTable.open(path) as table:
        assert table.tokenizer == "new" and table.n_rows < len(model[0])
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_memory_does_not_grow_with_the_table(tmp_path):
    path, rows = tmp_path / "t.ngram", np.tile(np.array([10, 1, 2, 3, 4, 4, 3, 2, 1], np.uint32), (5000, 1))
    parts = ((np.arange(at, at + 5000, dtype=np.uint64), rows) for at in range(0, 1_000_000, 5000))
    tracemalloc.start()
    try:
        write_table(path, order=3, top_k=4, vocab_size=2**20, tokenizer="", n_tokens=1, parts=parts)
        written = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        with NgramTable.open(path) as table:
            assert table.n_rows == 1_000_000 and table.nbytes > 44e6
            table.verify()
        verified = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert written < 12e6 and verified < 20e6, (written, verified)
