"""lab/ngram/corpus.py: what is read of files and folders, what is said of the rest, and the tokens that come of it."""

import gzip
import json
import os
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from console import BadInput
from lab import toy
from lab.ngram import corpus as module
from lab.ngram import files
from lab.ngram.corpus import Corpus, Piece
from lab.ngram.counting import BREAK
from lab.ngram.tokens import token_chunks, tokenizer

PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}
RECORDS = [{"title": "one", "meta": {"tags": ["two", 3, None, ["three"]], "": ""}}, "four", ["five é\n"], {"n": 6}]
STRINGS = ["one", "two", "three", "four", "five é\n"]


def write(path, data, pack=""):
    path = path.with_name(path.name + pack)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(PACK[pack](data if isinstance(data, bytes) else data.encode()))
    return path


def read(paths, **options):
    """(the texts, their pieces joined; the report)"""
    texts, held = [], ""
    corpus = Corpus(paths, **options)
    for text in corpus:
        held += text
        if not isinstance(text, Piece):
            texts.append(held)
            held = ""
    assert held == ""
    return texts, corpus.report


def problems(report):
    return {kind: (problem.files, problem.count) for kind, problem in report.problems.items()}


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records)


# ------------------------------------------------------------------------------------------------ kinds of files


@pytest.mark.parametrize("pack", PACK)
@pytest.mark.parametrize("name, data, texts", [
    ("a.txt", "Prose.\n\nMore.", ["Prose.\n\nMore."]), ("a.md", "# Title\n", ["# Title\n"]),
    ("a.py", "def f():\n    pass\n", ["def f():\n    pass\n"]), ("LICENSE", "no suffix", ["no suffix"]),
    ("a.jsonl", lines(RECORDS), STRINGS), ("A.JSONL", lines(RECORDS), STRINGS), ("a.ndjson", lines(RECORDS), STRINGS),
    ("a.jsonl", lines(RECORDS).strip().replace("\n", "\r\n\r\n"), STRINGS),
    ("a.json", json.dumps(RECORDS, indent=1), STRINGS), ("a.json", json.dumps(RECORDS), STRINGS),
    ("a.json", lines(RECORDS), STRINGS), ("a.json", "\n\n" + json.dumps(RECORDS, indent=1), STRINGS),
    ("a.txt", b"\xef\xbb\xbfmark\r\nlines\rends\n", ["mark\nlines\nends\n"]),
    ("a.jsonl", b'\xef\xbb\xbf"mark"\n', ["mark"])])
def test_every_kind_of_file_gives_its_texts(tmp_path, name, data, texts, pack):
    path = write(tmp_path / name, data, pack)
    found, report = read([path])
    assert found == texts
    assert report.problems == {} and report.told() == []
    assert (report.files, report.texts, report.bytes) == (1, len(texts), path.stat().st_size)


def test_several_frames_and_members_are_one_file(tmp_path):
    skipped = b"\x50\x2a\x4d\x18" + (7).to_bytes(4, "little") + b"ignored"  # as pzstd and the seekable format write
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(b"one ") + skipped + zstandard.compress(b"two"))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"one ") + gzip.compress(b"two"))
    texts, report = read(tmp_path)
    assert texts == ["one two"] * 2 and report.problems == {}


@settings(max_examples=60, deadline=None)
@given(value=st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=4)
                          | st.dictionaries(st.text(max_size=5), inner, max_size=4), max_leaves=12),
       ascii=st.booleans(), indent=st.sampled_from([None, 0, 2]), size=st.integers(1, 9))
def test_a_long_json_text_gives_the_strings_that_parsing_gives(tmp_path_factory, value, ascii, indent, size):
    def strings(value):
        if isinstance(value, str):
            return [value] if value else []
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        return [text for each in inner for text in strings(each)]

    text = json.dumps([value, "end"], ensure_ascii=ascii, indent=indent)
    expected = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in strings([value, "end"])]
    path = write(tmp_path_factory.mktemp("json") / "a.json", text.encode("utf-8", "surrogatepass"))
    if b"\0" in path.read_bytes():
        return
    assert read([path])[0] == expected
    corpus = Corpus([path])
    parts = [text[i:i + size] for i in range(0, len(text), size)]
    assert [str(each) for each in corpus._long_json(path, parts)] == expected and corpus.report.problems == {}


def test_json_above_the_limit_is_read_string_by_string(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 64)
    for indent in (None, 1):
        path = write(tmp_path / "a.json", json.dumps({"data": RECORDS * 20}, indent=indent))
        texts, report = read([path], limit=200)
        assert texts == STRINGS * 20 and report.problems == {}
    path = write(tmp_path / "b.json", json.dumps({"data": ["s"] * 200 + ["x" * 900] + ["after"]}))
    texts, report = read([path], limit=200)
    assert texts == ["s"] * 200 and problems(report) == {"too long": (1, 1)}
    texts, report = read([write(tmp_path / "c.json", json.dumps(["s"] * 200)[:-2])], limit=200)
    assert texts == ["s"] * 199 and problems(report) == {"bad JSON": (1, 1)}
    texts, report = read([write(tmp_path / "d.json", '["\\x", "good", ' + "1, " * 200 + "1]")], limit=200)
    assert texts == ["good"] and problems(report) == {"bad JSON": (1, 1)}
    texts, report = read([write(tmp_path / "e.json", b'["caf\xe9",' + b" " * 200 + b'"\\ud83d"]')], limit=200)
    assert texts == ["caf\ufffd", "\ufffd"] and problems(report) == {"bad bytes": (1, 2)}


# ----------------------------------------------------------------------------------------------- what is not right


def test_what_cannot_be_used_is_counted_and_named_and_the_rest_is_read(tmp_path):
    text = "A sentence of some length, and a number: {}.\n"
    whole = "".join(text.format(i) for i in range(20_000)).encode()
    write(tmp_path / "a_good.txt", "good")
    write(tmp_path / "b_bytes.txt", b"caf\xe9 \xff\xfe")
    write(tmp_path / "c_empty.txt", "")
    write(tmp_path / "d_blank.txt", " \n\t\n")
    write(tmp_path / "e_numbers.jsonl", "[1, 2]\n{}\n")
    write(tmp_path / "f_program", b"\x7fELF\x00\x01text")
    write(tmp_path / "g_bad.jsonl", '"first"\n{"cut": "of\n' + "[" * 200_000 + '\n"last"\n')
    write(tmp_path / "h_bad.json", '{\n "a": "text",\n "b"\n}')
    (tmp_path / "i_cut.txt.gz").write_bytes(gzip.compress(whole)[:-2000])
    (tmp_path / "j_cut.txt.zst").write_bytes(zstandard.compress(whole)[:-10])
    (tmp_path / "k_not.txt.zst").write_bytes(b"plain text")
    (tmp_path / "l_not.txt.gz").write_bytes(b"plain text")
    write(tmp_path / "m_half.jsonl", '"half a pair \\ud83d"\n')
    gone = write(tmp_path / "n_gone.txt", "gone")
    write(tmp_path / "o_good.txt", "also good")
    corpus = Corpus(tmp_path)
    gone.unlink()
    texts, held = [], ""
    for piece in corpus:
        held += piece
        if not isinstance(piece, Piece):
            texts.append(held)
            held = ""
    cut = [each for each in texts if each.startswith("A sentence")]
    assert [each for each in texts if each not in cut and each.strip()] == [
        "good", "caf\ufffd \ufffd\ufffd", "first", "last", "half a pair \ufffd", "also good"]
    assert len(cut) == 2 and all(whole.decode().startswith(each) and len(each) > len(whole) / 2 for each in cut)
    assert problems(corpus.report) == {"bad bytes": (2, 4), "no text": (3, 3), "binary": (1, 1), "bad JSON": (2, 3),
                                       "damaged": (4, 4), "unreadable": (1, 1)}
    said = [" ".join([sentence, *names]) for sentence, names in corpus.report.told()]
    for words in ("b_bytes.txt", "c_empty.txt", "d_blank.txt", "e_numbers.jsonl", "f_program", "g_bad.jsonl (line 2)",
                  "h_bad.json", "i_cut.txt.gz", "j_cut.txt.zst", "k_not.txt.zst", "the first 3:", "m_half.jsonl",
                  "n_gone.txt (No such file", "2 files, 4 times", "3 files (no text"):
        assert any(words in sentence for sentence in said), words
    assert len(said) == 6 and not any("good.txt" in sentence for sentence in said)


def wide(data, log):
    """A frame of zstd whose header asks for a window of 2**log bytes, as `zstd --long` writes it."""
    packer = zstandard.ZstdCompressor().compressobj()
    frame = bytearray(packer.compress(data) + packer.flush())
    assert not frame[4] & 0x20                                 # no single segment: a window follows
    frame[5] = (log - 10) << 3
    return bytes(frame)


def test_wide_windows_of_zstd_are_read_up_to_the_widest_that_zstd_writes(tmp_path):
    for log in (27, 28, 31):
        (tmp_path / f"{log}.txt.zst").write_bytes(wide(f"window {log}".encode(), log))
    (tmp_path / "32.txt.zst").write_bytes(wide(b"too wide", 32))
    texts, report = read(tmp_path)
    assert texts == ["window 27", "window 28", "window 31"] and problems(report) == {"wide window": (1, 1)}
    assert report.told() == [("1 file (compressed with a window above 2.15 GB, left out):",
                              [str(tmp_path / "32.txt.zst")])]


@pytest.mark.parametrize("pack", PACK)
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_utf_16_and_32_with_a_mark_are_read(tmp_path, monkeypatch, encoding, pack):
    monkeypatch.setattr(files, "BLOCK", 13)
    text = "caf\u00e9 \U0001f600\nlines\n" * 50
    path = write(tmp_path / "a.txt", ("\ufeff" + text).encode(encoding), pack)
    texts, report = read(path)
    assert texts == [text] and report.problems == {}
    path = write(tmp_path / "b.jsonl", ("\ufeff" + lines(RECORDS).replace("\n", "\r\n")).encode(encoding), pack)
    assert read(path)[0] == STRINGS
    path = write(tmp_path / "c.json", ("\ufeff" + json.dumps(RECORDS, indent=1)).encode(encoding), pack)
    assert read(path)[0] == STRINGS


def test_what_is_no_character_in_utf_16_is_replaced_and_counted(tmp_path):
    half, cut = "a\ud83db".encode("utf-16", "surrogatepass"), "ab".encode("utf-16")[:-1]
    for data, text in ((half, "a\ufffdb"), (cut, "a\ufffd")):
        texts, report = read(write(tmp_path / "a.txt", data))
        assert texts == [text] and problems(report) == {"bad bytes": (1, 1)}
    texts, report = read(write(tmp_path / "b.txt", "\ufeff".encode("utf-16-le")))
    assert texts == [] and problems(report) == {"no text": (1, 1)}
    texts, report = read(write(tmp_path / "c.txt", "no mark".encode("utf-16-le")))
    assert texts == [] and problems(report) == {"binary": (1, 1)}


def test_a_line_above_the_limit_is_left_out_and_named(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", lines(["first", "x" * 300, "y" * 98, "z" * 99, "last", "w" * 400]).rstrip("\n"))
    for block in (7, 1 << 20):
        monkeypatch.setattr(files, "BLOCK", block)
        texts, report = read([path], limit=100)
        assert texts == ["first", "y" * 98, "last"]
        assert problems(report) == {"too long": (1, 3)} and report.told()[0][1] == [f"{path} (line 2)"]


@pytest.mark.parametrize("make", ["text", "line", "many blocks"])
@pytest.mark.slow
def test_memory_stays_small_whatever_the_file_holds(tmp_path, make):
    """64 MB of text from a few KB: one line of plain text, one JSON string above the limit, and lines."""
    size = 1 << 26
    data = {"text": b"a" * size, "line": b'"' + b"a" * size + b'"\n"end"',
            "many blocks": b"some words\n" * (size // 11)}[make]
    path = tmp_path / ("a.jsonl.zst" if make == "line" else "a.txt.zst")
    path.write_bytes(zstandard.compress(data))
    del data
    corpus, n = Corpus(path, limit=1 << 22), 0
    tracemalloc.start()
    try:
        for text in corpus:
            n += len(text)
            assert len(text) <= module.PIECE
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert n == {"text": size, "line": 3, "many blocks": size // 11 * 11}[make]
    assert peak < 48 << 20 and path.stat().st_size < 1 << 14


# ------------------------------------------------------------------------------------------------------ folders


def test_folders_are_read_in_the_order_of_names_and_hidden_files_are_not(tmp_path):
    for name in ("b/2.txt", "b/10.txt", "a.txt", "c/.git/x.txt", ".hidden.txt", "c/d/e.txt", "b.txt"):
        write(tmp_path / "root" / name, name)
    assert read(tmp_path / "root")[0] == ["a.txt", "b/10.txt", "b/2.txt", "b.txt", "c/d/e.txt"]
    assert read([tmp_path / "root" / ".hidden.txt", tmp_path / "root" / "c" / ".git"])[0] == [".hidden.txt",
                                                                                             "c/.git/x.txt"]


def test_each_file_is_read_once_and_links_lead_nowhere_for_ever(tmp_path):
    write(tmp_path / "root" / "a" / "1.txt", "one")
    write(tmp_path / "away" / "2.txt", "two")
    try:
        (tmp_path / "root" / "a" / "loop").symlink_to(tmp_path / "root", target_is_directory=True)
        (tmp_path / "root" / "b").symlink_to(tmp_path / "away", target_is_directory=True)
        (tmp_path / "root" / "c.txt").symlink_to(tmp_path / "root" / "a" / "1.txt")
        (tmp_path / "root" / "broken.txt").symlink_to(tmp_path / "nothing")
    except OSError:
        pytest.skip("no links here")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "root" / "pipe")  # opening it would wait for ever
    texts, report = read([tmp_path / "root", tmp_path / "root" / "a" / "1.txt", tmp_path / "root"])
    assert texts == ["one", "two"] and report.problems == {}


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    write(tmp_path / "a.txt", "one")
    write(tmp_path / "closed" / "b.txt", "two")
    inside = type(tmp_path).iterdir

    def iterdir(path):
        if path.name == "closed":
            raise PermissionError(13, "Permission denied")
        return inside(path)

    monkeypatch.setattr(type(tmp_path), "iterdir", iterdir)
    texts, report = read(tmp_path)
    assert texts == ["one"] and report.told()[0][1] == [f"{tmp_path / 'closed'} (Permission denied)"]


@pytest.mark.parametrize("paths, words", [
    (["good.txt", "nowhere.txt"], "nowhere.txt"), (["x" * 400], "no file or folder"), (["empty"], "empty"),
    ([], "files, or folders")])
def test_paths_that_are_not_there_get_one_sentence_before_anything_is_read(tmp_path, paths, words, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "good.txt", "good")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=words):
        Corpus(paths)


# -------------------------------------------------------------------------------------------------------- cuts


def ids(texts, **options):
    chunks = list(token_chunks(texts, tokenizer().encode_batch, **options))
    assert all(chunk.dtype == np.uint32 and chunk.ndim == 1 for chunk in chunks)
    return [int(token) for chunk in chunks for token in chunk]


@pytest.mark.parametrize("kind", ["code", "prose"])
def test_a_long_text_is_cut_where_no_token_is(tmp_path, monkeypatch, kind):
    text = toy.heldout(kind)[:60_000]
    path = write(tmp_path / "a.txt", text)
    monkeypatch.setattr(module, "PIECE", 500)
    pieces = list(Corpus(path))
    assert "".join(pieces) == text and len(pieces) >= 100 and max(map(len, pieces)) <= 500
    assert [isinstance(piece, Piece) for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    assert ids(Corpus(path)) == [*toy.encode(text), BREAK]


def test_a_text_without_a_place_to_cut_is_cut_where_it_must(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PIECE", 10)
    for text in ("x" * 35, " " * 35, "\n" * 35, "a b" + "c" * 30, "é€" * 20):
        assert read(write(tmp_path / "a.txt", text))[0] == [text]
        assert read(write(tmp_path / "a.jsonl", json.dumps(text)))[0] == [text]
        assert max(map(len, Corpus(tmp_path / "a.txt"))) <= 10
    texts, report = read(write(tmp_path / "b.txt", b"\xff234567890" * 5))
    assert texts == ["\ufffd234567890" * 5] and problems(report) == {"bad bytes": (1, 5)}


def test_the_share_that_was_read_rises_to_one(tmp_path):
    text = os.urandom(2 << 20).hex()
    write(tmp_path / "a.txt", text)
    write(tmp_path / "b.txt", text, ".zst")
    write(tmp_path / "c.txt.zst", text)  # damaged
    write(tmp_path / "d", text.encode() + b"\0\1" * 50)
    write(tmp_path / "e.bin", b"\0\1" * (2 << 20))
    corpus = Corpus(tmp_path)
    shares = [corpus.share for _ in corpus]
    assert shares == sorted(shares) and len(set(shares)) > 6 and shares[-1] > 0.6 and corpus.share == 1.0
