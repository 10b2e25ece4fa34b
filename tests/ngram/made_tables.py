"""Tables that tests make: random ones, and ones that no writer would write."""

import itertools
import zlib

import numpy as np
import pytest

from console import BadInput
from lab.ngram import writing
from lab.ngram.format import PAGE
from lab.ngram.table import NgramTable
from lab.ngram.writing import write_table


def random_model(order, vocab_size, top_k, share, seed=0):
    """{context: [(id, count), ...] as a table must order them}, and {context: total}, for a share of all contexts."""
    rng = np.random.default_rng(seed)
    successors, totals = {}, {}
    for context in itertools.product(range(vocab_size), repeat=order - 1):
        if rng.random() < share:
            n = rng.integers(1, top_k + 1)
            pairs = zip(rng.choice(vocab_size, n, replace=False).tolist(), rng.integers(1, 6, n).tolist())
            successors[context] = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
            totals[context] = sum(count for _, count in successors[context]) + int(rng.integers(0, 3))
    return successors, totals


def parts_of(successors, totals, order, vocab_size, top_k, size=7):
    """The same as write_table wants it, in blocks of `size` rows."""
    contexts = sorted(successors) if order > 2 else [(token,) for token in range(vocab_size)]
    rows = np.zeros((len(contexts), 1 + 2 * top_k), np.uint32)
    for row, context in zip(rows, contexts):
        pairs = successors.get(context, [])
        row[0] = totals.get(context, 0)
        row[1:1 + len(pairs)] = [token for token, _ in pairs]
        row[1 + top_k:1 + top_k + len(pairs)] = [count for _, count in pairs]
    keys = np.array([sum(token * vocab_size**i for i, token in enumerate(reversed(c))) for c in contexts], np.uint64)
    return [(keys[i:i + size] if order > 2 else None, rows[i:i + size]) for i in range(0, len(rows), size)]


def write(path, order=3, vocab_size=40, top_k=3, share=0.5, parts=None, **options):
    """A table of `parts`, or else of a random model, and that model."""
    successors, totals = random_model(order, vocab_size, top_k, share) if parts is None else (None, None)
    if parts is None:
        parts = parts_of(successors, totals, order, vocab_size, top_k)
    write_table(path, **{"order": order, "top_k": top_k, "vocab_size": vocab_size, "tokenizer": "toy-1",
                         "n_tokens": 1234, "parts": parts, **options})
    return successors, totals


def every_context(order, vocab_size):
    return np.array(list(itertools.product(range(vocab_size), repeat=order - 1)))


def expected(successors, totals, context):
    return (*successors[context][0], totals[context]) if context in successors else None


def patch(path, at, data, seal=False):
    """Overwrite bytes of a file; seal: make the header's checksum right again."""
    content = bytearray(path.read_bytes())
    content[at:at + len(data)] = data
    if seal:
        content[PAGE - 4:PAGE] = zlib.crc32(content[:PAGE - 4]).to_bytes(4, "little")
    path.write_bytes(content)


def refused(path, *words, **options):
    """Opening and verifying says what is wrong in one sentence that names the file."""
    with pytest.raises(BadInput) as error, NgramTable.open(path, **options) as table:
        table.verify()
    text = str(error.value)
    assert str(path) in text and "\n" not in text and text.endswith(".")
    for word in words:
        assert word in text, text


def unchecked(monkeypatch, path, rows, order=2, keys=None, vocab_size=3):
    """A table with right checksums of what no table may hold."""
    with monkeypatch.context() as patched:
        patched.setattr(writing, "wrong_rows", lambda *_: None)
        patched.setattr(writing, "wrong_keys", lambda *_: None)
        write(path, order, vocab_size, 2, parts=[(keys, np.array(rows, np.uint32))])
