"""python -m lab ngram: tables of n-grams from text, for drafting.

    python -m lab ngram build FILES_OR_FOLDERS... --out T.ngram [--order 2] [--top-k 8] [--max-tokens N]
                                                  [--tokenizer toy]
    python -m lab ngram info T.ngram [--tokenizer NAME]     what it holds
    python -m lab ngram verify T.ngram                      reads all of it; 0, or 2 and one sentence

build reads all strings of JSON Lines (.jsonl, .ndjson) and JSON, and any other file as text (prose, Markdown, source
code). Files may be compressed (.gz, .zst). A folder is read with all that is in it, except hidden files. The table is
written whole or not at all, and replaces an older one.

    --out         the file to write
    --order       2: the table looks at one token to tell the next; 3: at two; and so on, up to 16
    --top-k       how many successors are kept of each context
    --max-tokens  reading ends after so many tokens; without it, all are read
    --tokenizer   toy, or a model as the demos of the real target take it: smollm2-135m, a folder, a .gguf file
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

import console
from console import BadInput, fmt_bytes, fmt_count, print_table, print_text, progress, unknown
from lab.ngram.corpus import Corpus, Report
from lab.ngram.counting import BREAK, NothingToCount, build_table
from lab.ngram.format import MAGIC, MAX_TOP_K
from lab.ngram.table import NgramTable
from lab.ngram.tokens import token_chunks, tokenizer

ACTIONS: dict[str, dict[str, str | None]] = {
    "build": {"--out": None, "--order": "2", "--top-k": "8", "--max-tokens": None, "--tokenizer": "toy"},
    "info": {"--tokenizer": None}, "verify": {}}
SHOWN = 5  # contexts in info


def run(argv: list[str]) -> int:
    """Do what follows `python -m lab ngram`; 0, or BadInput."""
    action, rest = (argv[0], argv[1:]) if argv else ("", [])
    if {"-h", "--help"} & set(argv):
        print((__doc__ or "build, info, verify").strip())
        return 0
    if action not in ACTIONS:
        if not action:
            raise BadInput("ngram needs build, info or verify after it; python -m lab ngram --help says more")
        raise unknown("ngram command", action, ACTIONS)
    paths, flags = _split(action, rest)
    if action == "build":
        return build(paths, flags)
    if len(paths) != 1:
        raise BadInput(f"{action} takes one table, not {len(paths)}: ngram {action} T.ngram would be right")
    path = str(Path(paths[0]).expanduser())
    return info(path, flags["--tokenizer"]) if action == "info" else verify(path)


def _split(action: str, words: list[str]) -> tuple[list[str], dict]:
    """(the paths, the flags with their values or defaults) of a command's words."""
    paths, flags, given = [], dict(ACTIONS[action]), iter(words)
    for word in given:
        if not word.startswith("-"):
            paths.append(word)
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name not in flags:
            if not flags:
                raise BadInput(f"{action} takes no flags, so {name} is not possible there")
            raise unknown("flag", name, flags)
        value = value if equals else next(given, "")
        if not value or (not equals and value.startswith("-") and not console.is_number(value)):
            raise BadInput(f"{name} needs a value")
        flags[name] = value
    if "" in paths:
        raise BadInput(f'"" names no file, so {action} cannot read it: the name of a file would be right')
    return paths, flags


def _whole(flags: dict, name: str, least: int, most: int) -> int:
    value = flags[name]
    if not re.fullmatch("[0-9]+(_[0-9]+)*", value) or len(value) > 40 or not least <= int(value) <= most:
        shown = value if len(value) <= 40 else f"{value[:37]}..."
        raise BadInput(f'{name} must be a whole number from {least} to {most}, not "{shown}"')
    return int(value)


# ------------------------------------------------------------------------------------------------------ build


def build(paths: list[str], flags: dict) -> int:
    """Make a table from the files and folders `paths`, and say what it holds and what was left out."""
    if not paths:
        raise BadInput("build needs the files or folders to read: ngram build FOLDER --out T.ngram would be right")
    out = _checked_out(flags["--out"])
    order, top_k = _whole(flags, "--order", 2, 16), _whole(flags, "--top-k", 1, MAX_TOP_K)
    most = None if flags["--max-tokens"] is None else _whole(flags, "--max-tokens", 1, 10**15)
    corpus, codec = Corpus(paths), tokenizer(flags["--tokenizer"])
    started = time.monotonic()
    chunks = _shown(token_chunks(corpus, codec.encode_batch), corpus, most)
    try:
        with build_table(out, chunks, order=order, top_k=top_k, vocab_size=codec.vocab_size,
                         tokenizer=codec.fingerprint, max_tokens=most) as table:
            _print_built(out, table, corpus.report, time.monotonic() - started)
    except NothingToCount:
        _print_problems(corpus.report)  # they are the reason
        raise
    _print_problems(corpus.report)
    return 0


def _print_built(out: Path, table: NgramTable, report: Report, seconds: float) -> None:
    print_text(f"{out}: order {table.order}, {table.n_rows:,} rows, {fmt_bytes(table.nbytes)}, from {table.n_tokens:,} "
               f"tokens of {report.texts:,} {'text' if report.texts == 1 else 'texts'} in {report.files:,} "
               f"{'file' if report.files == 1 else 'files'} ({fmt_bytes(report.bytes)}); {seconds:.1f} s, "
               f"{fmt_count(table.n_tokens / seconds)} tokens/s.")


def _print_problems(report: Report) -> None:
    for sentence, names in report.told():
        print_text(sentence)
        for name in names:
            console.put(f"  {name}\n")  # not wrapped, so that it can be copied


def _checked_out(name: str | None) -> Path:
    """The path of the new table. BadInput where it cannot be written, or where a file that is no table would go."""
    if name is None:
        raise BadInput("build needs --out, the name of the table to write: --out T.ngram would be right")
    out = Path(name).expanduser()
    try:
        if os.path.isdir(out):
            raise IsADirectoryError(0, "it is a folder")
        # Only trying tells: root may write into /proc by its mode, and still cannot.
        target = Path(os.path.realpath(out))
        tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name + ".", suffix=".part").close()
    except OSError as error:
        raise BadInput(f'--out "{name}" cannot be written ({error.strerror}): a file in a folder that exists would be '
                       "right") from None
    if os.path.exists(out):
        begins = None
        if os.path.isfile(out) and os.access(out, os.R_OK):
            with open(out, "rb") as file:
                begins = file.read(len(MAGIC))
        if begins not in (MAGIC, b""):
            raise BadInput(f'--out "{name}" exists and is no n-gram table, so it stays: another name would be right')
    return out


def _shown(chunks: Iterable[np.ndarray], corpus: Corpus, most: int | None) -> Iterator[np.ndarray]:
    """The chunks themselves; on a terminal with the tokens so far, tokens/s, and the time left."""
    started, tokens = time.monotonic(), 0

    def counted():
        nonlocal tokens
        for chunk in chunks:
            tokens += int(np.count_nonzero(chunk != BREAK))
            yield chunk

    def state():
        rate = tokens / max(time.monotonic() - started, 1e-9)
        return (max(corpus.share, tokens / most if most else 0.0),
                f"{fmt_count(tokens)} tokens, {fmt_count(rate)} tokens/s")

    return progress(counted(), "tokens", state=state)


# --------------------------------------------------------------------------------------------- info and verify


def info(path: str, name: str | None = None) -> int:
    """Print what a table is, and of a table of order 2 the most common contexts.

    name: the tokenizer whose words are shown; the toy's where the table is of it, else ids.
    """
    with NgramTable.open(path) as table:
        rows = [["order", f"{table.order} ({table.order - 1} {'token' if table.order == 2 else 'tokens'} before)"],
                ["K", str(table.top_k)], ["vocabulary", f"{table.vocab_size:,}"], ["tokenizer", table.tokenizer],
                ["rows", f"{table.n_rows:,}"], ["tokens counted", f"{table.n_tokens:,}"],
                ["bytes", f"{table.nbytes:,}"], ["bytes a row", f"{table.nbytes / max(table.n_rows, 1):.1f}"]]
        codec = _codec_of(table, name)
        print_table("table", ["item", "value"], rows, title=str(path))
        if table.order == 2:
            _print_common(table, codec)
    return 0


def _codec_of(table: NgramTable, name: str | None):
    from lab import toy
    if name is None:
        return tokenizer() if table.tokenizer == toy.tokenizer_id() else None
    codec = tokenizer(name)
    if codec.fingerprint != table.tokenizer:
        raise BadInput(f'{table.path} is of the tokenizer {table.tokenizer}, and "{name}" is {codec.fingerprint}: the '
                       f"model it was built for would be right")
    return codec


def _print_common(table: NgramTable, codec) -> None:
    ids, counts, totals = table.rows(np.arange(table.vocab_size)[:, None])
    common = np.argsort(-totals.astype(np.int64), kind="stable")[:SHOWN]

    def word(token) -> str:
        return str(token) if codec is None else repr(codec.decode([int(token)]))

    print_table("common", ["after", "times", "mostly comes", "times "],
                [[word(i), int(totals[i]), word(ids[i, 0]), int(counts[i, 0])] for i in common if totals[i]],
                title="The most common contexts")


def verify(path: str) -> int:
    """Read all of a table and say that it is sound; BadInput where it is not."""
    with NgramTable.open(path) as table:
        table.verify()
        print_text(f"{path} is sound: {table.n_rows:,} rows, {table.nbytes:,} bytes, all read.")
    return 0
