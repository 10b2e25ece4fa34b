"""python -m lab ngram: tables from files of every kind, what is refused, and what interruptions leave behind."""

import collections
import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import zstandard

import console
from console import BadInput
from lab import __main__ as runner
from lab import toy
from lab.ngram import command as ngram_cli
from lab.ngram.corpus import Corpus
from lab.ngram.table import NgramTable

TEXTS = ["def f(x):\n    return x\n", "# A title\n\nSome prose, and prose again.\n", "one of a record", "two of it",
         "def g(x):\n    return f(x)\n", "prose and prose", "def f(y):\n    return y\n"]


def call(*argv, status=0):
    assert runner.main(["ngram", *map(str, argv)]) == status


@pytest.fixture
def folder(tmp_path):
    """A corpus that holds TEXTS in files of every kind."""
    root = tmp_path / "corpus"
    (root / "more").mkdir(parents=True)
    (root / "a.py").write_text(TEXTS[0])
    (root / "b.md").write_text(TEXTS[1])
    (root / "c.jsonl").write_text(json.dumps({"x": TEXTS[2], "y": [TEXTS[3]]}) + "\n")
    (root / "d.py.gz").write_bytes(gzip.compress(TEXTS[4].encode()))
    (root / "e.json.zst").write_bytes(zstandard.compress(json.dumps([TEXTS[5]]).encode()))
    (root / "more" / "f.txt").write_text(TEXTS[6])
    return root


@pytest.fixture
def table(folder, tmp_path, capsys):
    """A table of order 2 of that corpus."""
    call("build", folder, "--out", tmp_path / "T.ngram")
    capsys.readouterr()
    return tmp_path / "T.ngram"


@pytest.mark.parametrize("order", [2, 3, 4])
def test_a_table_holds_the_ngrams_of_its_files(folder, tmp_path, capsys, order):
    call("build", folder / "a.py", folder, f"--order={order}", "--top-k", "3", "--out", tmp_path / "T.ngram")
    counts = collections.defaultdict(collections.Counter)
    documents = [toy.encode(text) for text in TEXTS]
    for ids in documents:
        for i in range(len(ids) - order + 1):
            counts[tuple(ids[i:i + order - 1])][ids[i + order - 1]] += 1
    with NgramTable.open(tmp_path / "T.ngram", tokenizer=toy.tokenizer_id(), vocab_size=1024) as found:
        assert (found.order, found.top_k, found.n_tokens) == (order, 3, sum(map(len, documents)))
        for context, after in counts.items():
            best = sorted(after.items(), key=lambda item: (-item[1], item[0]))[:3]
            assert found.row(list(context)) == best
            assert found.best(list(context)) == (*best[0], after.total())
        assert found.n_rows == (1024 if order == 2 else len(counts)) and len(counts) > 20
    out = " ".join(capsys.readouterr().out.split())
    assert f"order {order}" in out and "7 texts in 6 files" in out and f"{sum(map(len, documents)):,} tokens" in out
    assert "binary" not in out and "\r" not in out and "\x1b" not in out


def test_max_tokens_ends_the_reading(folder, tmp_path, capsys):
    for i in range(40):
        (folder / f"g{i:02d}.txt").write_text("words and words " * 5000)
    call("build", folder, "--out", tmp_path / "T.ngram", "--max-tokens", "10_000")
    with NgramTable.open(tmp_path / "T.ngram") as found:
        assert found.n_tokens == 10_000
    out = " ".join(capsys.readouterr().out.split())
    assert "10,000 tokens" in out and " 46 files" not in out


def test_a_build_names_at_its_end_what_it_left_out(folder, tmp_path, capsys):
    (folder / "bad.txt").write_bytes(b"caf\xe9")
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    (folder / "g.jsonl").write_text("not JSON\n")
    (folder / "h.txt.zst").write_bytes(zstandard.compress(b"cut short")[:-1])
    call("build", folder, "--out", tmp_path / "T.ngram")
    out = capsys.readouterr().out.splitlines()
    for sentence, file in (("bytes that are not UTF-8", "bad.txt"), ("1 file (binary, left out):", "picture.png"),
                           ("JSON that", "g.jsonl (line 1)"), ("cut short", "h.txt.zst")):
        at = next(i for i, line in enumerate(out) if sentence in line)
        assert out[at + 1] == f"  {folder / file}" and "T.ngram" in "".join(out[:at])


def test_info_and_verify(table, tmp_path, capsys):
    call("info", table)
    out = capsys.readouterr().out
    with NgramTable.open(table) as found:
        values = ["2 (1 token before)", "8", "1,024", toy.tokenizer_id(), f"{found.n_tokens:,}", f"{found.nbytes:,}"]
        assert all(value in out for value in values)
        _, _, totals = found.rows(np.arange(1024)[:, None])
    most = int(totals.argmax())
    common = out[out.index("most common"):].splitlines()[3].split("  ")
    assert common[0] == repr(toy.decode([most])) and str(totals[most]) in [cell.strip() for cell in common]
    call("verify", table)
    assert "is sound" in capsys.readouterr().out
    call("info", table, "--tokenizer", "toy")
    assert capsys.readouterr().out.strip() == out.strip()


def test_info_of_a_higher_order_and_of_a_tokenizer_that_is_not_known(folder, tmp_path, capsys):
    from lab.ngram.counting import build_table
    call("build", folder, "--out", tmp_path / "T.ngram", "--order", "3", "--top-k", "1")
    call("info", tmp_path / "T.ngram")
    assert "3 (2 tokens before)" in capsys.readouterr().out
    build_table(tmp_path / "U.ngram", [np.array([7, 8, 7, 8, 7], np.uint32)], order=2, top_k=1, vocab_size=10,
                tokenizer="another").close()
    call("info", tmp_path / "U.ngram")
    assert capsys.readouterr().out.split()[-8:] == ["7", "2", "8", "2", "8", "2", "7", "2"]
    with pytest.raises(BadInput, match="another"):
        call("info", tmp_path / "U.ngram", "--tokenizer", "toy")


@pytest.mark.parametrize("argv, words", [
    ([], "build, info or verify"), (["biuld"], "build"), (["build"], "files or folders"),
    (["build", "corpus"], "--out"), (["build", "corpus", "--out"], "--out needs a value"),
    (["build", "corpus", "--out", "--order", "2"], "--out needs a value"),
    (["build", "corpus", "--out", "no/folder/T"], "no/folder/T"), (["build", "corpus", "--out", "corpus"], "corpus"),
    (["build", "corpus", "--out", "corpus/a.py"], "no n-gram table, so it stays"),
    (["build", "nowhere", "--out", "T"], "nowhere"), (["build", "hollow", "--out", "T"], "no file in hollow"),
    (["build", "corpus", "--out", "T", "--order", "1"], "--order"),
    (["build", "corpus", "--out", "T", "--order", "two"], '"two"'),
    (["build", "corpus", "--out", "T", "--order", "7"], "2 \\*\\* 64"),
    (["build", "corpus", "--out", "T", "--top-k", "0"], "--top-k"),
    (["build", "corpus", "--out", "T", "--top-k", "9999"], "--top-k"),
    (["build", "corpus", "--out", "T", "--max-tokens", "-5"], "--max-tokens"),
    (["build", "corpus", "--out", "T", "--max_tokens=0"], "--max-tokens"),
    (["build", "corpus", "--out", "T", "--tokenizer", "nonsense"], "nonsense"),
    (["build", "corpus", "--out", "T", "--topk", "3"], "--top-k"),
    (["build", "blank", "--out", "T"], "nothing to count"),
    (["build", "corpus", "--out", "T", "--order", "9" * 5000], '--order must be .* 2 to 16, not "9{37}\\.\\.\\."'),
    (["build", "corpus", "--out", "T", "--max-tokens", "9" * 5000], "--max-tokens must be"),
    (["build", "corpus", "--out", "T", "--order", "-1"], 'not "-1"'),
    (["build", "corpus", "--out", "T", "--order", "nan"], 'not "nan"'),
    (["build", "corpus", "--out", "T", "--order", "_2_"], 'not "_2_"'),
    (["build", "corpus", "--out", "x" * 250], "cannot be written"),
    (["build", "", "--out", "T"], '"" names no file'),
    (["info", ""], '"" names no file'), (["info", "x" * 5000], "File name too long"), (["verify", "corpus"], "corpus"),
    (["verify", "blank"], "blank is empty"), (["info", "two\nlines"], "two\nlines"),
    (["info"], "one table"), (["info", "nowhere"], "nowhere"), (["info", "corpus/a.py"], "no n-gram table"),
    (["info", "a", "b"], "not 2"), (["info", "a", "--order", "2"], "--tokenizer"),
    (["verify", "nowhere"], "nowhere"), (["verify", "a", "--all"], "no flags")])
def test_bad_input_gets_one_sentence_and_nothing_is_written(folder, tmp_path, monkeypatch, argv, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hollow").mkdir()
    (tmp_path / "blank").write_text("")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BadInput, match=words) as caught:
        call(*argv)
    assert "\n" not in str(caught.value).replace("two\nlines", "")
    assert sorted(tmp_path.rglob("*")) == before and (folder / "a.py").read_text() == TEXTS[0]


def test_where_nothing_is_left_the_reasons_stand_before_the_error(tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "b.jsonl").write_text("not JSON\n")
    (tmp_path / "c.txt.gz").write_bytes(b"no gzip")
    (tmp_path / "d.txt").write_text("")
    with pytest.raises(SystemExit) as end:
        runner.entry(["ngram", "build", str(tmp_path), "--out", str(tmp_path / "T.ngram")])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and err.startswith("error: nothing to count in a corpus of 0 tokens")
    for sentence, file in (("binary", "a.png"), ("JSON that cannot", "b.jsonl"), ("damaged", "c.txt.gz"),
                           ("no text", "d.txt")):
        assert sentence in out and str(tmp_path / file) in out
    assert not (tmp_path / "T.ngram").exists()


def test_a_quoted_home_folder_is_the_home_folder_for_every_command(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    call("build", "~/corpus", "--out", "~/T.ngram")
    call("info", "~/T.ngram")
    call("verify", "~/T.ngram")
    assert (tmp_path / "T.ngram").is_file() and "is sound" in capsys.readouterr().out


def test_names_that_are_no_plain_text_are_written_so_that_each_stays_on_its_line(folder, tmp_path, capsys):
    bad = folder / "two\nlines\x1b[2J.bin"
    try:
        bad.write_bytes(b"\0")
    except OSError:
        pytest.skip("no such names here")
    call("build", folder, "--out", tmp_path / "two\nlines.ngram")
    assert f"  {str(bad)!r}\n" in capsys.readouterr().out
    call("info", tmp_path / "two\nlines.ngram")
    call("verify", tmp_path / "two\nlines.ngram")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a named pipe")
def test_a_pipe_or_a_device_is_no_table(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(BadInput, match="is a pipe or a device"):
            call("info", path)


def test_the_sizes_are_refused_before_anything_is_read(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(Corpus, "__iter__", lambda self: pytest.fail("it was read"))
    for flags in (["--order", "7"], ["--tokenizer", "nonsense"], ["--top-k", "600"]):
        with pytest.raises(BadInput):
            call("build", folder, "--out", tmp_path / "T", *flags)


def test_help_names_the_commands_and_their_flags(capsys):
    for argv in (["--help"], ["build", "-h"]):
        call(*argv)
        out = capsys.readouterr().out
        assert all(flag in out for flags in ngram_cli.ACTIONS.values() for flag in flags)
        assert all(action in out for action in ngram_cli.ACTIONS)


# ------------------------------------------------------------------------------------- in a process of its own


def process(*argv, **options):
    return subprocess.Popen([sys.executable, "-m", "lab", "ngram", *map(str, argv)], cwd=console.ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env={**os.environ, "PYTHONIOENCODING": "utf-8"}, **options)


@pytest.mark.slow
def test_the_exit_status_of_verify(table):
    sound = process("verify", table)
    out, err = sound.communicate(timeout=60)
    assert sound.returncode == 0 and err == "" and "is sound" in " ".join(out.split())
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 4
    for damaged in (data, data[:-1], b""):
        table.write_bytes(damaged)
        done = process("verify", table)
        out, err = done.communicate(timeout=60)
        assert done.returncode == 2 and out == "" and len(err.splitlines()) == 1 and err.startswith("error: ")


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a named pipe, which holds a build up in its middle")
@pytest.mark.parametrize("end, status", [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 128 + signal.SIGTERM),
                                         (signal.SIGINT, 130)])
def test_a_build_that_is_ended_leaves_the_old_table(folder, table, tmp_path, end, status):
    old = table.read_bytes()
    os.mkfifo(tmp_path / "pipe.txt")
    build = process("build", folder, tmp_path / "pipe.txt", "--out", table, "--order", "3")
    with open(tmp_path / "pipe.txt", "wb", buffering=0) as pipe:
        for _ in range(40):  # 4 MB, of which a pipe holds little: when all is written, most has been counted
            pipe.write(b"some text " * 10_000)
        build.send_signal(end)
        with contextlib.suppress(BrokenPipeError):  # a signal that comes right before a read waits for its end
            pipe.write(b"more")
        out, err = build.communicate(timeout=60)
    assert (build.returncode, out, err) == (status, "", "")
    assert table.read_bytes() == old
    call("verify", table)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["T.ngram", "corpus", "pipe.txt"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a named pipe")
def test_a_pipe_is_read_when_it_is_named(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl.gz")
    build = process("build", tmp_path / "pipe.jsonl.gz", "--out", tmp_path / "T.ngram")
    (tmp_path / "pipe.jsonl.gz").write_bytes(gzip.compress(json.dumps(TEXTS).encode()))
    out, err = build.communicate(timeout=60)
    assert build.returncode == 0 and err == "" and "7 texts in 1 file" in " ".join(out.split())


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_shows_tokens_and_the_rate(folder, tmp_path, write_demo):
    (folder / "long.txt").write_text("words and more words\n" * 60_000)
    path = write_demo(f"""
        from lab.ngram import command as ngram_cli
        from lab.support import widgets
        widgets.SHOW_PROGRESS_AFTER = -1.0
        ngram_cli.run(["build", {str(folder)!r}, "--out", {str(tmp_path / "T.ngram")!r}])
    """)
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(console.ROOT)}
    done = subprocess.run([sys.executable, str(path)], stdout=theirs, stderr=theirs, env=environment, timeout=60)
    os.close(theirs)
    text = os.read(ours, 100_000).decode()
    os.close(ours)
    assert done.returncode == 0 and " tokens/s" in text.partition("T.ngram")[0] and "%" in text
