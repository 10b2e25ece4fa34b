"""Small real models in folders, which the tests of several demos decode with."""

import pytest


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Where they are: a target, a hybrid, another model, one with more output rows, one with another tokenizer."""
    pytest.importorskip("torch")
    from lab.measure.prompts import PROMPTS
    from small import save

    at = tmp_path_factory.mktemp("models")
    save(at / "small-llama")
    save(at / "small-lfm2", "lfm2")
    save(at / "other", seed=1)
    save(at / "padded", seed=1, vocab_size=352)
    save(at / "stranger", texts=PROMPTS["repeat"])
    return at
