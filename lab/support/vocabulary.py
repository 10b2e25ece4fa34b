"""Which tokenizer a model has, by its vocabulary."""

import hashlib
import json

from lab.support.errors import BadInput


def fingerprint(tokenizer) -> str:
    """Hash of a tokenizer's vocabulary, 16 hex digits: models that share it may draft for one another.

    tokenizer: of the libraries tokenizers or transformers; its `get_vocab()` gives {token: id}.
    """
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]


def without_a_row(model, token: int, source: str) -> BadInput:
    """The BadInput for a text with a token that the model has no row for, as of a tokenizer with more ids than rows.

    model: a decoder that decodes. source: which text it is: "The message", "--system".
    """
    codec = getattr(model, "hf_tokenizer", None)
    word = codec.convert_ids_to_tokens(token) if codec is not None else model.decode([token])
    return BadInput(f"{source} has the token {word!r} with id {token}, and {model.name} only has rows for the ids 0 to "
                    f"{model.vocab_size - 1}: a text without it would be right")
