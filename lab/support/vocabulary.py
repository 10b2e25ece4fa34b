"""Which tokenizer a model has, by its vocabulary."""

import hashlib
import json


def fingerprint(tokenizer) -> str:
    """Hash of a tokenizer's vocabulary, 16 hex digits: models that share it may draft for one another.

    tokenizer: of the libraries tokenizers or transformers; its `get_vocab()` gives {token: id}.
    """
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]
