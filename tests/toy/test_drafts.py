"""Draft models made of the toy: what they are, and the bytes that they would take."""

import numpy as np
import pytest

from lab.models.quant import quantize_params
from lab.support.errors import BadInput
from lab.toy.drafts import draft_for_large, first_layers, loss, rounded, time_forwards, time_steps, whole
from lab.toy.transformer import QCFG, init_params

MODEL = init_params(QCFG, 0), QCFG
TOKENS = [[3, 1, 4, 1, 5]]


def test_bytes_are_those_of_weights_and_cache():
    target = whole("large", "", MODEL, 2.0)
    assert target.weight_bytes == 2 * QCFG.n_params()
    kv = QCFG.n_layers * 2 * QCFG.n_kv_heads * QCFG.head_dim
    assert target.step_bytes(10, 2.0) - target.step_bytes(0, 2.0) == 10 * kv * 2
    sizes = quantize_params(MODEL[0], "int4-g32", float_bytes=2.0)[1]
    assert rounded("int4-g32", "large", MODEL, 2.0).weight_bytes == sizes.bytes


def test_all_layers_are_the_target_and_fewer_are_not():
    target = whole("large", "", MODEL, 2.0).lm.full_logits(TOKENS)
    every = first_layers(QCFG.n_layers, "large", MODEL, 2.0)
    assert every.name == f"first {QCFG.n_layers}" and np.array_equal(every.lm.full_logits(TOKENS), target)
    one = first_layers(1, "large", MODEL, 2.0)
    assert one.lm.config.n_layers == 1 and not np.allclose(one.lm.full_logits(TOKENS), target)
    with pytest.raises(BadInput):
        first_layers(QCFG.n_layers + 1, "large", MODEL, 2.0)


def test_steps_are_timed_behind_the_context_that_stays():
    models = [whole("large", "", MODEL, 2.0), first_layers(1, "large", MODEL, 2.0)]
    seconds = time_steps(models, 7, blocks=2, steps=3)
    assert list(seconds) == models and all(s.shape == (2, 3) and (s > 0).all() for s in seconds.values())
    assert all(m.lm.length == 7 for m in models)


def test_forwards_of_several_lengths_are_timed_on_one_model():
    model = whole("large", "", MODEL, 2.0).lm
    sizes, send = [], model.send
    model.send = lambda tokens: sizes.append(len(tokens)) or send(tokens)
    seconds = time_forwards({n: (model, n) for n in (1, 4)}, 7, blocks=2, steps=1)
    assert list(seconds) == [1, 4] and all(s.shape == (2, 1) and (s > 0).all() for s in seconds.values())
    assert sizes == [1, 4] * 5 and model.length == 7, "in turn, three times to warm up"


def test_guessing_has_the_loss_of_its_vocabulary():
    ids = np.array([[0, 1, 2], [3, 2, 1]])
    assert loss(np.zeros((2, 2, 8)), ids) == pytest.approx(np.log(8))
    sure = np.full((2, 2, 8), -100.0)
    np.put_along_axis(sure, ids[:, 1:, None], 100.0, axis=-1)
    assert loss(sure, ids) == pytest.approx(0)


def test_drafts_for_large_have_their_layers():
    assert draft_for_large("small").name == "small" and draft_for_large("first-2").config.n_layers == 2
    with pytest.raises(BadInput, match="first-5"):
        draft_for_large("first-9")
