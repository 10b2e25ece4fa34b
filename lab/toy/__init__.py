"""The toy: a small Llama-like transformer in numpy, its trained family with tokenizer and texts, and their training.

Here: whatever changes or loads the toy. Not here: real models (models), rounding of weights (models/quant).
"""

from lab.toy.family import (DOCUMENT_BREAK, EOS, KINDS, NAMES, TRAINED_LENGTH, WEIGHTS, corpus, decode, encode, heldout,
                            load, load_params, passages, past_training, prompts, save, tokenizer, tokenizer_id)

__all__ = ["DOCUMENT_BREAK", "EOS", "KINDS", "NAMES", "TRAINED_LENGTH", "WEIGHTS", "corpus", "decode", "encode",
           "heldout", "load", "load_params", "passages", "past_training", "prompts", "save", "tokenizer",
           "tokenizer_id"]
