"""Tables for the time of a demo, parts of a corpus, and how much a text repeats itself."""

import numpy as np
import pytest

from lab import toy
from lab.ngram import tokenizer
from lab.ngram.counting import BREAK
from lab.ngram.reading import read_table, scattered_read_seconds
from lab.ngram.scratch import Scratch, corpus_tokens, first_share, repeated_share


def test_a_table_lasts_until_its_folder_is_closed(tmp_path):
    scratch = Scratch(tmp_path)
    table = scratch.build("some", np.array([1, 2, 3, 1, 2, 3], np.uint32), 2, 4, 10, "none")
    assert table.best([1])[0] == 2 and table.path.parent.parent == tmp_path
    assert (table.n_tokens, scratch.build("few", np.arange(9, dtype=np.uint32), 2, 4, 10, "none", 5).n_tokens) == (6, 5)
    scratch.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_corpus_has_a_break_behind_each_document_and_behind_its_first_share():
    tokens = corpus_tokens(toy.corpus("prose"), tokenizer("toy"))
    assert tokens[-1] == BREAK and (tokens == BREAK).sum() > 1
    both = corpus_tokens([toy.corpus(kind) for kind in ("prose", "code")], tokenizer("toy"))
    assert both[:len(tokens)].tolist() == tokens.tolist() and len(both) > len(tokens)
    part = first_share(np.arange(100, dtype=np.uint32), 0.25)
    assert part.tolist() == [*range(25), BREAK]


def test_the_share_of_a_text_that_repeats():
    assert repeated_share(range(20)) == 0 and repeated_share([1, 2]) == 0
    assert repeated_share([7] * 17) == pytest.approx(0.9)           # 10 runs of 8, one of them new
    assert repeated_share([*range(10), *range(10)]) == pytest.approx(3 / 13)


def test_readings_of_a_table(tmp_path):
    scratch = Scratch(tmp_path)
    tokens = np.random.default_rng(0).integers(50, size=2000, dtype=np.uint32)
    table = scratch.build("some", tokens, 3, 4, 50, "none")
    table.close()
    found = read_table(table.path, np.stack([tokens[:40], tokens[1:41]], axis=1))
    assert found.order == 3 and found.pages > 1 and found.one_read > 0 and len(found.samples) == 3
    assert [(row[2], row[3] in ("cold", "as it was")) for row in found.rows] == [
        ("mmap", True), ("mmap", False), ("ram", False)]
    assert all(row[4] > 0 for row in found.rows) and found.in_memory.predicted is None
    assert scattered_read_seconds(8000, n=50) > 0
    scratch.close()
