"""Decoding with tables in a known state: the text is the target's, and what was read is what the tables say."""

import numpy as np
import pytest

from console import BadInput
from decode_lab import autoregressive_generate
from lab import toy
from lab.measure.known_texts import KnownText
from lab.measure.table_reads import TableMethod
from lab.ngram import disk, tokenizer
from lab.ngram.scratch import Scratch, corpus_tokens


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A bigram and a trigram table of the toy's code."""
    words, scratch = tokenizer("toy"), Scratch(tmp_path_factory.mktemp("tables"))
    tokens = corpus_tokens(toy.corpus("code"), words)[:30_000]
    made = [scratch.build("code", tokens, order, 4, words.vocab_size, words.fingerprint) for order in (2, 3)]
    for table in made:
        table.close()
    yield [table.path for table in made]
    scratch.close()


@pytest.fixture(scope="module")
def text():
    """(decoder of a known text, its prompt, the text)."""
    prompt = toy.prompts("code", 1, 16)[0]
    target = toy.load("small")
    written = autoregressive_generate(target, prompt, 24)[0]
    return KnownText(written, target), prompt, written


@pytest.mark.parametrize("state", ["as it is", "warm", "cold"])
@pytest.mark.slow
def test_the_text_is_the_target_s_and_reads_are_noted_for_each_generation(paths, text, state):
    decoder, prompt, written = text
    method = TableMethod(paths, 4, 0.02, state)
    for _ in range(2):
        tokens, run = method(decoder, prompt, 24)
        assert tokens.tolist() == written.tolist() and run.drafted > 0
    first, second = method.reads
    assert first.rows == second.rows > 0 and 0 < first.pages == second.pages <= 4 * first.rows
    if state == "warm" and second.in_memory is not None:
        assert second.in_memory == sum(-(-path.stat().st_size // 4096) for path in paths)


@pytest.mark.slow
def test_cold_tables_are_those_that_the_system_dropped(paths, text, monkeypatch):
    decoder, prompt, _ = text
    asked = []
    monkeypatch.setattr(disk, "evict", lambda path: asked.append(path) or path == paths[0])
    cold, warm = (TableMethod(paths, 4, 0.02, state) for state in ("cold", "warm"))
    warm(decoder, prompt, 4)
    assert asked == [] and warm.dropped
    cold(decoder, prompt, 4)
    assert asked == paths and not cold.dropped


def test_without_tables_it_is_the_lookup_alone(text):
    decoder, prompt, written = text
    method = TableMethod([], 4, 0.02)
    tokens, run = method(decoder, prompt, 24)
    assert np.array_equal(tokens, written) and set(run.by_source) <= {"lookup"}
    assert method.reads[0][:3] == (0, 0, 0)


def test_an_unknown_state_is_refused():
    with pytest.raises(BadInput, match="cold"):
        TableMethod([], 4, 0.02, "cool")
