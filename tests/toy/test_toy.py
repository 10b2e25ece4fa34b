"""The trained toy family: files, tokenizer, held-out text, training log, and what the largest one writes."""

import ast
import importlib.util
import json
import re

import numpy as np
import pytest

from console import BadInput
from decode_lab import autoregressive_generate
from lab import toy
from lab.toy.transformer import TransformerLM, init_params

LOGS = {name: [json.loads(line) for line in (toy.WEIGHTS / f"{name}.log.jsonl").read_text().splitlines()]
        for name in toy.NAMES}


@pytest.fixture(scope="module")
def train():
    spec = importlib.util.spec_from_file_location("train", toy.WEIGHTS.parent / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def held_out_loss(lm, kind, n=16, width=256):
    ids = np.array(toy.encode(toy.heldout(kind)))[:n * width + 1]
    logits = lm.full_logits(ids[:-1].reshape(n, width)).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -np.take_along_axis(log_p, ids[1:].reshape(n, width, 1), -1).mean()


def test_sizes_are_a_million_a_quarter_and_a_sixteenth():
    n = {name: toy.load(name).config.n_params() for name in toy.NAMES}
    assert 0.9e6 < n["large"] < 1.1e6 and n["large-exit"] == n["large"]
    assert n["medium"] / n["large"] == pytest.approx(1 / 4, rel=0.1)
    assert n["small"] / n["large"] == pytest.approx(1 / 16, rel=0.1)


def test_files_are_half_precision_and_at_most_ten_megabytes():
    total = sum(path.stat().st_size for path in toy.WEIGHTS.iterdir() if path.is_file())
    assert total <= 10e6
    for name in toy.NAMES:
        size = (toy.WEIGHTS / f"{name}.safetensors").stat().st_size
        assert size == pytest.approx(2 * toy.load(name).config.n_params(), rel=0.05)


@pytest.mark.parametrize("kind", ["code", "prose"])
def test_tokenizer_round_trip_on_held_out_text(kind):
    text = toy.heldout(kind)[:5000]
    ids = toy.encode(text)
    assert toy.decode(ids) == text and max(ids) < 1024
    assert len(text) / len(ids) > 2


@pytest.mark.slow
def test_the_log_tells_each_model_to_its_end_and_agrees_with_the_weights():
    for name in toy.NAMES:
        last = LOGS[name][-1]
        assert last["step"] == last["of"] and last["params"] == toy.load(name).config.n_params()
        assert last["loss"] < LOGS[name][0]["loss"]
        assert all({"step", "loss", "held_code", "held_prose", "seconds"} <= row.keys() for row in LOGS[name])
    assert sum(rows[-1]["seconds"] for rows in LOGS.values()) < 2 * 90 * 60, "core-seconds of the family"
    # The log is of the whole held-out text, this of a part: they agree in kind, and a wrong file would not.
    for kind in ("code", "prose"):
        assert held_out_loss(toy.load("large"), kind) == pytest.approx(LOGS["large"][-1][f"held_{kind}"], abs=0.3)


@pytest.mark.slow
def test_bigger_models_predict_held_out_text_better_and_random_ones_do_not():
    for kind in ("code", "prose"):
        loss = [held_out_loss(toy.load(name), kind) for name in ("small", "medium", "large")]
        assert loss[0] > loss[1] > loss[2]
    lm = toy.load("large")
    random = TransformerLM(init_params(lm.config, 0), lm.config)
    assert held_out_loss(random, "code") > np.log(lm.vocab_size) - 0.5


@pytest.mark.slow
def test_truncation_is_better_where_it_was_trained(train):
    from lab.toy.transformer import config_like, truncate
    for k in (1, 2, 3):
        plain, trained = (TransformerLM(truncate(params, k), config_like(config, n_layers=k))
                          for params, config in (toy.load_params("large"), toy.load_params("large-exit")))
        assert held_out_loss(trained, "code") < held_out_loss(plain, "code") - 0.5


@pytest.mark.slow
def test_held_out_text_is_never_trained_on(train):
    documents, held = train.read_text()
    for kind in ("code", "prose"):
        assert toy.heldout(kind).count(toy.DOCUMENT_BREAK) + 1 >= 8
        chunks = {p for text in held[kind] for p in train.paragraphs(text) if len(p) > 60}
        seen = {p for text in documents[kind] for p in train.paragraphs(text)}
        shared = chunks & seen
        assert chunks and len(shared) <= (0 if kind == "prose" else 0.01 * len(chunks)), sorted(shared)[:3]


def test_the_largest_writes_python():
    """Greedy continuations of headers from held-out files: most complete statements of them parse."""
    prompt = toy.encode('class Queue:\n    """A queue of items."""\n\n    def __init__(self, maxsize=0):\n')
    tokens, _ = autoregressive_generate(toy.load("large"), prompt, 120)
    text = toy.decode(tokens)
    assert re.search(r"self\.\w+ = ", text[len(toy.decode(prompt)):])
    lines = text.splitlines()
    assert any(_parses("\n".join(lines[:n])) for n in range(5, len(lines)))


def _parses(text):
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def test_unknown_names_are_refused():
    with pytest.raises(BadInput, match="large-exit"):
        toy.load("huge")
    with pytest.raises(BadInput, match="prose"):
        toy.heldout("poetry")


def test_texts_longer_than_any_in_training_are_said():
    assert toy.past_training(toy.TRAINED_LENGTH) == []
    sentence, = toy.past_training(400)
    assert "256" in sentence and "400" in sentence
    for name in toy.NAMES:
        assert toy.load(name).trained_length == 256 < toy.load(name).max_length


def test_past_the_trained_length_the_large_model_predicts_much_worse():
    """Why it is said: the mean loss of held-out code behind 256 to 511 tokens, against that behind 64 to 255."""
    lm, ids = toy.load("large"), np.array(toy.encode(toy.heldout("code"))[:4 * 512]).reshape(4, 512)
    logits = lm.full_logits(ids)[:, :-1].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    right = np.take_along_axis(logits, ids[:, 1:, None], -1)[..., 0]
    loss = np.log(np.exp(logits).sum(-1)) - right
    assert loss[:, 300:].mean() > loss[:, 64:250].mean() + 1


def test_passages_are_spread_over_the_whole_text():
    ids = toy.encode(toy.heldout("prose"))
    rows = toy.passages("prose", 3, 50)
    assert rows.shape == (3, 50) and rows[0].tolist() == ids[:50] and rows[-1].tolist() == ids[-50:]
