"""Tables for the time of a demo: built from tokens at hand, in a folder that is deleted when it is closed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from lab.ngram.corpus import Corpus
from lab.ngram.counting import BREAK, build_table
from lab.ngram.table import NgramTable
from lab.ngram.tokens import Tokenizer, token_chunks


class Scratch:
    """A folder for tables, below `parent`: a real disk, where /tmp may be memory."""

    def __init__(self, parent: Path):
        self._held = ExitStack()
        self.folder = Path(self._held.enter_context(TemporaryDirectory(dir=parent, prefix="ngram-")))

    def build(self, name: str, tokens: np.ndarray, order: int, top_k: int, vocab_size: int, fingerprint: str,
              max_tokens: int | None = None) -> NgramTable:
        """A table of these tokens (BREAK between documents), open until `close`. BadInput as build_table.

        max_tokens: how many of them are counted, at most.
        """
        table = build_table(self.folder / f"{name}-{order}.ngram", [tokens], order=order, top_k=top_k,
                            vocab_size=vocab_size, tokenizer=fingerprint, max_tokens=max_tokens)
        return self._held.enter_context(table)

    def close(self) -> None:
        self._held.close()


def corpus_tokens(paths: Sequence[str | Path] | Path, words: Tokenizer) -> np.ndarray:
    """All token ids of a corpus, with a BREAK behind each document.

    paths: files and folders, or one of them. BadInput where one cannot be read.
    """
    corpus = Corpus([paths] if isinstance(paths, Path) else list(paths))
    return np.concatenate([np.zeros(0, np.uint32), *token_chunks(corpus, words.encode_batch)])


def first_share(tokens: np.ndarray, share: float) -> np.ndarray:
    """The first share of a corpus's tokens, with a BREAK behind them."""
    return np.append(tokens[:int(share * len(tokens))], np.uint32(BREAK))


def repeated_share(tokens, n: int = 8) -> float:
    """The share of a text's runs of n tokens that occurred in it before; 0 for a text of less than n tokens."""
    runs = [tuple(tokens[i:i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
