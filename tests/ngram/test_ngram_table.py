"""Reading tables: what was written comes back, and a file that is not what it should be is refused in one sentence."""

import itertools
import mmap
import os
import struct

import numpy as np
import pytest

from console import BadInput
from lab.ngram import disk, verify
from lab.ngram import table as ngram
from lab.ngram.format import FIELDS, MAGIC, PAGE
from lab.ngram.table import NgramTable
from made_tables import every_context, expected, parts_of, patch, refused, unchecked, write

IO = ("mmap", "ram")


# -- what is written is read back ----------------------------------------------------------------------------

@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("order, vocab_size, top_k, share", [
    (2, 40, 3, 0.5), (2, 3000, 4, 1.0), (3, 40, 3, 0.5), (3, 40, 1, 1.0), (4, 9, 2, 0.6)])
def test_every_context_has_what_was_counted(tmp_path, io, order, vocab_size, top_k, share):
    path = tmp_path / "t.ngram"
    successors, totals = write(path, order, vocab_size, top_k, share)
    contexts = every_context(order, vocab_size)
    with NgramTable.open(path, io, tokenizer="toy-1", vocab_size=vocab_size) as table:
        table.verify()
        assert (table.path, table.order, table.top_k, table.vocab_size) == (path, order, top_k, vocab_size)
        assert (table.tokenizer, table.n_tokens, table.io) == ("toy-1", 1234, io)
        assert table.n_rows == (vocab_size if order == 2 else len(successors))
        assert table.nbytes == path.stat().st_size
        for context in map(tuple, contexts.tolist()):
            assert table.best([1, 2, *context]) == expected(successors, totals, context)
            assert table.row([1, 2, *context]) == successors.get(context)
        assert table.use.lookups == 2 * len(contexts)
        for shuffle in (False, True):
            if shuffle:
                contexts = np.random.default_rng(1).permutation(contexts)
            ids, counts, sums = table.rows(contexts)
            assert ids.shape == counts.shape == (len(contexts), top_k) and sums.shape == (len(contexts),)
            answers = zip(contexts.tolist(), ids.tolist(), counts.tolist(), sums.tolist())
            for context, i, c, total in answers:
                context = tuple(context)
                assert [pair for pair in zip(i, c) if pair[1]] == successors.get(context, [])
                assert total == totals.get(context, 0)
        assert table.use.lookups == 4 * len(contexts)


def test_a_row_as_long_as_a_page(tmp_path):
    path, totals = tmp_path / "t.ngram", {(5, 6): 511, (599, 599): 1022}
    successors = {(5, 6): [(i, 1) for i in range(511)], (599, 599): [(i, 2) for i in range(89, 600)]}
    write(path, 3, 600, 511, parts=parts_of(successors, totals, 3, 600, 511))
    with NgramTable.open(path) as table:
        table.verify()
        for context in ((5, 6), (6, 5), (599, 599), (0, 0)):
            assert table.best(context) == expected(successors, totals, context)
            assert table.row(context) == successors.get(context)


@pytest.mark.parametrize("order", (2, 3))
def test_a_context_that_cannot_be_in_a_table_has_no_successor(tmp_path, order):
    path = tmp_path / "t.ngram"
    write(path, order, share=1.0)
    with NgramTable.open(path) as table:
        whole = [1] * (order - 1)
        assert table.best(whole) and table.best([999, -5, *whole])         # only the end is looked at
        assert table.best([]) is None and table.best(whole[1:]) is None
        for wrong in (-1, 40, 2**40):
            for at in range(order - 1):
                context = [*whole[:at], wrong, *whole[at + 1:]]
                assert table.best(context) is None and table.row(context) is None
                ids, counts, totals = table.rows(np.array([whole, context]))
                assert totals[0] and counts[0, 0] and not totals[1] and not counts[1].any() and not ids[1].any()
        for wrong in ([[1] * order], [1], np.ones((2, order - 1)), []):
            with pytest.raises(BadInput, match=f"order {order}"):
                table.rows(wrong)
        assert table.rows(np.zeros((0, order - 1), int))[0].shape == (0, 3)


def test_keys_that_only_integers_tell_apart(tmp_path):
    """Beyond 2**53 neighbours are one number in float64, to which numpy turns uint64 keys beside a Python int."""
    path, order, vocab_size = tmp_path / "t.ngram", 16, 16
    contexts = [(15,) * 13 + (i, j) for i in range(0, 16, 2) for j in range(1, 16, 2)]
    totals = {context: 1 + i for i, context in enumerate(contexts)}
    successors = {context: [(i % 16, 1 + i)] for i, context in enumerate(contexts)}
    write(path, order, vocab_size, 1, parts=parts_of(successors, totals, order, vocab_size, 1))
    with NgramTable.open(path) as table:
        asked = [(15,) * 13 + pair for pair in itertools.product(range(16), repeat=2)]
        for context, total in zip(asked, table.rows(asked)[2].tolist()):
            assert table.best(list(context)) == expected(successors, totals, context)
            assert total == totals.get(context, 0)


def test_together_no_more_is_read_than_one_by_one(tmp_path):
    path, vocab_size = tmp_path / "t.ngram", 200
    successors, _ = write(path, 3, vocab_size, share=0.1)
    contexts = every_context(3, vocab_size)[::777]
    found = np.array([tuple(context) in successors for context in contexts.tolist()])
    assert found.any() and not found.all()
    for asked in (contexts[found], contexts):
        with NgramTable.open(path) as single, NgramTable.open(path) as batch:
            for context in asked.tolist():
                single.best(context)
            batch.rows(asked)
            assert 0 <= batch.use.blocks - single.use.blocks <= 1      # row 0 stands for what was not found


def test_counts_stop_at_the_largest_number(tmp_path):
    path, most = tmp_path / "t.ngram", 2**32 - 1
    rows = np.array([[most, 1, 2, most, most], [most, 0, 1, most, 5], [0] * 5], np.uint32)
    write(path, 2, 3, 2, parts=[(None, rows)])
    with NgramTable.open(path) as table:
        table.verify()
        assert table.best([0]) == (1, most, most) and table.row([1]) == [(0, most), (1, 5)] and table.row([2]) is None


# -- files that are refused ----------------------------------------------------------------------------------

def test_what_is_no_table_at_all(tmp_path):
    path = tmp_path / "t.ngram"
    refused(path, "No such file", "ngram build")
    refused(tmp_path)                                    # a folder
    path.write_bytes(b"")
    refused(path, "empty")
    for content in (b"x", b"hello world\n" * 1000, bytes(8192), MAGIC[:-1]):
        path.write_bytes(content)
        refused(path, "no n-gram table")
    write(path)
    with pytest.raises(BadInput, match='"disk"'):
        NgramTable.open(path, "disk")


@pytest.mark.parametrize("order", (2, 3))
@pytest.mark.parametrize("io", IO)
def test_a_file_that_is_cut_off_or_too_long(tmp_path, order, io):
    path = tmp_path / "t.ngram"
    write(path, order)
    content = path.read_bytes()
    for size in [8, 12, 16, 84, PAGE - 1, PAGE, PAGE + 1, *range(5000, len(content), 997), len(content) - 1]:
        path.write_bytes(content[:size])
        refused(path, "cut off", io=io)
    path.write_bytes(content + b"x")
    refused(path, "longer", f"says {len(content)}", io=io)


def test_other_byte_order(tmp_path):
    path = tmp_path / "t.ngram"
    write(path)
    content = path.read_bytes()
    for unit in (2, 4, 8):                               # whole files swapped
        path.write_bytes(np.frombuffer(content[:len(content) // 8 * 8], f"u{unit}").byteswap().tobytes())
        refused(path, "no n-gram table")
    path.write_bytes(content)                            # a file whose writer took its own, big-endian, order
    patch(path, 0, struct.pack(FIELDS.format.replace("<", ">"), *FIELDS.unpack_from(content)), seal=True)
    refused(path, "byte order")


def test_a_newer_format_and_a_header_that_contradicts_itself(tmp_path):
    path = tmp_path / "t.ngram"
    write(path)
    content = path.read_bytes()
    for version in (2, 300):
        path.write_bytes(content)
        patch(path, 12, version.to_bytes(4, "little"), seal=True)
        refused(path, f"version {version}", "newer")
    for at, value, size, word in [
            (8, 0, 4, "header"), (12, 0, 4, "header"), (16, 0, 4, "order 0"), (16, 1, 4, "order 1"),
            (16, 2**32 - 1, 4, "order"), (16, 2, 4, "header"), (16, 20, 4, "vocabulary"), (20, 0, 4, "top-k 0"),
            (20, 512, 4, "top-k 512"), (20, 40, 4, "header"), (24, 0, 4, "vocabulary"), (28, 8192, 4, "header"),
            (32, 0, 8, "header"), (32, 2**63, 8, "header"), (48, 0, 8, "header"), (56, PAGE, 8, "header"),
            (64, PAGE, 8, "header"), (72, 2**40, 8, "header"), (80, 257, 4, "header"), (80, 2**32 - 1, 4, "header")]:
        path.write_bytes(content)
        patch(path, at, value.to_bytes(size, "little"), seal=True)
        refused(path, word)


def test_a_table_without_rows(tmp_path):
    path = tmp_path / "t.ngram"
    write(path)
    fields = list(FIELDS.unpack_from(path.read_bytes()))
    fields[7], fields[9:13] = 0, [PAGE] * 4
    path.write_bytes(path.read_bytes()[:PAGE])
    patch(path, 0, FIELDS.pack(*fields), seal=True)
    refused(path, "header")


def test_a_bigram_table_has_a_row_for_each_id(tmp_path):
    path = tmp_path / "t.ngram"
    write(path, 2)
    patch(path, 24, (39).to_bytes(4, "little"), seal=True)
    refused(path, "header")


def test_other_tokenizer_and_vocabulary(tmp_path):
    path = tmp_path / "t.ngram"
    write(path, tokenizer="other-tökenizer")
    refused(path, "other-tökenizer", "toy-1", tokenizer="toy-1")
    refused(path, "40", "39", vocab_size=39)
    with NgramTable.open(path, tokenizer="other-tökenizer", vocab_size=64) as table:     # a model pads its rows
        assert table.tokenizer == "other-tökenizer"
    NgramTable.open(path, tokenizer="other-tökenizer", vocab_size=39).close()     # a tokenizer beyond its model's rows


@pytest.mark.parametrize("order", (2, 3))
def test_a_flipped_bit_anywhere_is_found(tmp_path, order):
    """A bit of every third byte of a small file (rows, keys, zeros), of each byte of its fields and checksums."""
    path = tmp_path / "t.ngram"
    write(path, order, vocab_size=12)
    content = path.read_bytes()
    bits = np.random.default_rng(order).integers(0, 8, len(content)).tolist()
    with open(path, "r+b", buffering=0) as file:
        for at, bit in enumerate(bits):
            if at % 3 and 100 < at < len(content) - 16:
                continue
            file.seek(at)
            file.write(bytes([content[at] ^ 1 << bit]))
            with pytest.raises(BadInput), NgramTable.open(path) as table:
                table.verify()
            file.seek(at)
            file.write(content[at:at + 1])
    with NgramTable.open(path) as table:
        table.verify()


@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("order", (2, 3))
def test_only_what_is_read_is_checked(tmp_path, io, order):
    """A flipped bit in a page of rows, or in its checksum: rows there are refused, the others are read."""
    path, vocab_size, width = tmp_path / "t.ngram", 1600 if order == 2 else 40, 4 * 7
    successors, totals = write(path, order, vocab_size, share=1.0)
    contexts = [tuple(context) for context in every_context(order, vocab_size).tolist()]
    assert len(contexts) == len(successors) == 1600
    content = path.read_bytes()
    sums_at = FIELDS.unpack_from(content)[11]
    damaged = (PAGE + 800 * width) // PAGE
    there = [damaged in ((PAGE + row * width) // PAGE, (PAGE + (row + 1) * width - 1) // PAGE) for row in range(1600)]
    assert 100 < sum(there) < 200
    for at in (damaged * PAGE + 100, sums_at + 4 * (damaged - 1)):
        path.write_bytes(content)
        patch(path, at, bytes([content[at] ^ 0x10]))
        with NgramTable.open(path, io) as table:
            assert table.use.blocks == 0
            for context, bad in zip(contexts, there):
                if not bad:
                    assert table.best(context) == expected(successors, totals, context)
                    continue
                for read in (table.best, table.row, lambda context: table.rows([context]), table.best):
                    with pytest.raises(BadInput, match=f"page {damaged} of .* checksum"):
                        read(context)
            assert table.use.blocks == sums_at // PAGE - 2       # each page once, but the header and the damaged one
            with pytest.raises(BadInput, match=f"page {damaged} "):
                table.rows(contexts)
            assert table.rows(contexts[:50])[2].tolist() == [totals[context] for context in contexts[:50]]


@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("batch", (False, True))
@pytest.mark.slow
def test_damaged_keys_never_give_a_wrong_answer(tmp_path, io, batch):
    """Wherever damaged keys lead a search, its answer is right or refused, and the keys of other pages are found."""
    path, vocab_size = tmp_path / "t.ngram", 64
    successors, totals = write(path, 3, vocab_size, 1)
    contexts = [tuple(context) for context in every_context(3, vocab_size)[::11 if batch else 2].tolist()]
    content = path.read_bytes()
    keys_at, n = FIELDS.unpack_from(content)[10], len(successors)
    pages = [slice(at, min(at + PAGE // 8, n)) for at in range(0, n, PAGE // 8)]
    assert len(pages) >= 4
    keys = np.frombuffer(content, "<u8", n, keys_at)
    rng = np.random.default_rng(5)
    damage = [(8 * (n // 2) + 7, b"\x80"),               # the first key that a search looks at: all seem to lie before
              (8 * (n // 2), bytes(8)),                  # or behind it
              *((PAGE * page, rng.bytes(8 * (part.stop - part.start))) for page, part in enumerate(pages)),
              (PAGE * 1, bytes(PAGE)), (PAGE * 1, b"\xff" * PAGE)]
    for at, data in damage:
        path.write_bytes(content)
        patch(path, keys_at + at, data)
        page, right = at // PAGE, 0
        low, high = int(keys[pages[page]][0]), int(keys[pages[page]][-1])
        with NgramTable.open(path, io) as table:
            for context in contexts:
                key = context[0] * vocab_size + context[1]
                try:
                    if batch:
                        ids, counts, sums = (part[0].tolist() for part in table.rows([context]))
                        found = (ids[0], counts[0], sums) if sums else None
                    else:
                        found = table.best(context)
                except BadInput as error:
                    assert f"page {keys_at // PAGE + page} of" in str(error) and "checksum" in str(error)
                    continue
                assert not low <= key <= high, "no answer rests on damaged keys"
                assert found == expected(successors, totals, context)
                right += 1
            with pytest.raises(BadInput, match="checksum"):
                table.rows(contexts)
        assert right > 0


def test_verify_sees_the_keys_of_one_piece_follow_those_of_the_last(tmp_path, monkeypatch):
    path, keys = tmp_path / "t.ngram", np.arange(800, dtype=np.uint64)
    keys[512:] -= 1                                      # key 512 repeats key 511, which ends a page
    unchecked(monkeypatch, path, [[3, 0, 1, 2, 1]] * 800, 3, keys, vocab_size=30)
    monkeypatch.setattr(verify, "CHUNK", PAGE)
    refused(path, "do not ascend")


# -- reading files -------------------------------------------------------------------------------------------

def test_a_table_that_shrinks_or_fails_while_it_is_verified_is_one_sentence(tmp_path):
    path = tmp_path / "t.ngram"
    write(path)
    with NgramTable.open(path, "ram") as table:
        os.truncate(path, path.stat().st_size - 100)
        with pytest.raises(BadInput, match="shorter"):
            table.verify()

        class Failing:
            def seek(self, at): ...
            def close(self): ...
            def read(self, n): raise OSError(5, "Input/output error")

        table._file.close()
        table._file = Failing()
        with pytest.raises(BadInput, match="Input/output error"):
            table.verify()


@pytest.mark.parametrize("io", IO)
def test_pages_in_memory(tmp_path, monkeypatch, io):
    path = tmp_path / "t.ngram"
    write(path)
    with NgramTable.open(path, io) as table:
        table.verify()
        pages = table.resident()
        assert pages is None or pages == (-(-table.nbytes // mmap.PAGESIZE),) * 2
        monkeypatch.setattr(ngram, "resident_pages", lambda mapped: None)
        assert table.resident() is None
        monkeypatch.setattr(ngram, "resident_pages", lambda mapped: 1)
        monkeypatch.setattr(ngram, "may_ask", lambda path: False)
        assert (table.resident() is None) == (io == "mmap")


def test_a_cold_table_reads_the_pages_it_needs(tmp_path):
    """Where the system can drop a file from memory, and tells what it holds."""
    path = tmp_path / "t.ngram"
    write(path, 2, vocab_size=4000, share=1.0)
    if not disk.evict(path) or disk.resident(path) is None:
        pytest.skip("the system cannot drop a file from its page cache")
    with NgramTable.open(path) as table:
        for token in (0, 1, 2000):
            assert table.best([token])
        here, pages = table.resident()
        assert table.use.blocks == 2 and here < pages
