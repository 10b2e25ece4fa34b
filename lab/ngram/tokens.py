"""Tokenizers for n-gram tables, and texts as the chunks of ids that lab/ngram/counting.py counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from lab.ngram.corpus import Piece
from lab.ngram.counting import BREAK

BATCH = 1 << 20        # characters tokenized in one call


@dataclass(frozen=True)
class Tokenizer:
    """What a table needs of a tokenizer.

    encode_batch: texts -> a list of ids each, without special tokens. decode: ids -> text. vocab_size: largest id + 1.
    fingerprint: the one that decoders of this tokenizer have as `tokenizer`.
    """

    encode_batch: Callable[[list[str]], list[list[int]]]
    decode: Callable[[list[int]], str]
    vocab_size: int
    fingerprint: str


def tokenizer(name: str = "toy") -> Tokenizer:
    """The toy family's tokenizer, or that of a real model: its name, its folder or its .gguf file.

    The model itself is not loaded. BadInput where there is none.
    """
    if name == "toy":
        from lab import toy
        return Tokenizer(_encoder(toy.tokenizer()), toy.decode, toy.tokenizer().get_vocab_size(), toy.tokenizer_id())
    from lab.models.loading import load_tokenizer
    return tokenizer_of(load_tokenizer(name))


def tokenizer_of(codec) -> Tokenizer:
    """The same for a tokenizer of transformers, such as HFDecoder.hf_tokenizer."""
    from copy import deepcopy

    from lab.support.vocabulary import fingerprint

    if codec.is_fast:
        backend = deepcopy(codec.backend_tokenizer)  # the settings changed here are the model's own there
        backend.no_truncation()
        backend.no_padding()
        encode_batch = _encoder(backend)
    else:
        def encode_batch(texts):
            return codec(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return Tokenizer(encode_batch, codec.decode, max(codec.get_vocab().values()) + 1, fingerprint(codec))


def _encoder(backend) -> Callable[[list[str]], list[list[int]]]:
    def encode_batch(texts):
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

    return encode_batch


def token_chunks(texts: Iterable[str], encode_batch: Callable, batch: int = BATCH) -> Iterator[np.ndarray]:
    """The ids of texts in 1-D arrays of uint32, with a BREAK after every text, as lab/ngram/counting.py takes them.

    texts: a Corpus, or any texts; after a Piece there is no BREAK. encode_batch: see Tokenizer. batch: characters that
    are tokenized in one call. A call uses several cores where it has several texts.
    """
    held, size = [], 0
    for text in texts:
        held.append(text)
        size += len(text) + 1
        if size >= batch:
            yield _ids(held, encode_batch)
            held, size = [], 0
    if held:
        yield _ids(held, encode_batch)


def _ids(texts: list[str], encode_batch: Callable) -> np.ndarray:
    ids = []
    for text, tokens in zip(texts, encode_batch(texts), strict=True):
        ids += tokens
        if not isinstance(text, Piece):
            ids.append(BREAK)
    return np.array(ids, np.uint32)
