"""lab/ngram/tokens.py: texts as chunks of ids, and the tokenizers of the toy and of models."""

import itertools

import numpy as np
import pytest

from console import BadInput
from lab import toy
from lab.ngram.corpus import Piece
from lab.ngram.counting import BREAK
from lab.ngram.tokens import token_chunks, tokenizer, tokenizer_of


def ids(texts, **options):
    chunks = list(token_chunks(texts, tokenizer().encode_batch, **options))
    assert all(chunk.dtype == np.uint32 and chunk.ndim == 1 for chunk in chunks)
    return [int(token) for chunk in chunks for token in chunk]


def test_a_break_stands_after_every_text_whatever_the_batches():
    texts = ["def f(x):\n", "", "return", "a<|end|>b"]
    expected = list(itertools.chain(*([*toy.encode(text), BREAK] for text in texts)))
    for batch in (1, 10, 1 << 20):
        assert ids(texts, batch=batch) == expected
    assert ids([Piece("def f"), Piece("(x"), ")", "b"]) == [
        *toy.encode("def f"), *toy.encode("(x"), *toy.encode(")"), BREAK, *toy.encode("b"), BREAK]
    assert ids([]) == []


# --------------------------------------------------------------------------------------------------- tokenizers


def test_the_toy_tokenizer():
    codec = tokenizer("toy")
    assert codec.fingerprint == toy.load("small").tokenizer and codec.vocab_size == toy.load("small").vocab_size
    assert codec.encode_batch(["def f", ""]) == [toy.encode("def f"), []] and codec.decode(toy.encode("def")) == "def"


@pytest.fixture
def folder(tmp_path):
    """A model's folder, with the toy's tokenizer in transformers' form, cut at 4 tokens as some of them come."""
    transformers = pytest.importorskip("transformers")
    codec = transformers.PreTrainedTokenizerFast(tokenizer_object=toy.tokenizer(), bos_token="<|end|>")
    codec.backend_tokenizer.enable_truncation(4)
    codec.backend_tokenizer.enable_padding(length=9)
    codec.save_pretrained(tmp_path)
    codec.backend_tokenizer.no_truncation()
    codec.backend_tokenizer.no_padding()
    transformers.LlamaConfig().save_pretrained(tmp_path)
    return tmp_path


def test_the_tokenizer_of_a_model_is_loaded_without_its_weights(folder):
    from lab.models import loading
    from lab.support.vocabulary import fingerprint
    codec, theirs = tokenizer(str(folder)), loading.load_tokenizer(str(folder))
    text = "def f(x):\n    return x + 12345\n"
    assert codec.encode_batch([text, "a"]) == [toy.encode(text), toy.encode("a")]
    assert codec.fingerprint == fingerprint(theirs) and codec.vocab_size == max(theirs.get_vocab().values()) + 1
    assert codec.decode(toy.encode(text)) == text


def test_a_slow_tokenizer_works_too(folder):
    from lab.models import loading
    theirs = loading.load_tokenizer(str(folder))

    class Slow:
        is_fast = False
        get_vocab, decode = theirs.get_vocab, theirs.decode

        def __call__(self, texts, add_special_tokens, verbose):
            assert not add_special_tokens
            return {"input_ids": [toy.encode(text) for text in texts]}

    assert tokenizer_of(Slow()).encode_batch(["def f", "a"]) == [toy.encode("def f"), toy.encode("a")]


def test_a_model_without_a_tokenizer_gets_one_sentence(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "cut.gguf").write_text("GGUF")
    for name in (tmp_path, tmp_path / "other" / "cut.gguf"):
        with pytest.raises(BadInput, match="cannot be loaded as a tokenizer: a file is missing") as caught:
            tokenizer(str(name))
        assert "\n" not in str(caught.value) and "of:" not in str(caught.value)
    with pytest.raises(BadInput, match="there is no model"):
        tokenizer("nonsense")
