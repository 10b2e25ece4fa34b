"""N-gram tables on disk: the file format (format, table, writing), counting, reading a corpus, the command line.

Here: whatever reads or writes tables. Not here: the drafter that uses them (drafters/tiers).
"""

from lab.ngram.corpus import Corpus
from lab.ngram.counting import build_table
from lab.ngram.table import NgramTable
from lab.ngram.tokens import token_chunks, tokenizer, tokenizer_of
from lab.ngram.writing import write_table

__all__ = ["Corpus", "NgramTable", "build_table", "token_chunks", "tokenizer", "tokenizer_of", "write_table"]
