"""Acceptance, predicted and in full rounds, on random weights."""

import numpy as np
import pytest

from decode_lab import Sampler, autoregressive_generate
from lab.measure.acceptance import full_rounds, predicted_alpha
from lab.toy.transformer import QCFG, TransformerLM, config_like, init_params, truncate

PARAMS = init_params(QCFG, 3)
PROMPTS = [[5, 17, 99], [1, 2, 3]]


def models():
    draft = TransformerLM(truncate(PARAMS, 2), config_like(QCFG, n_layers=2), "draft")
    return TransformerLM(PARAMS, QCFG, "target"), draft


def texts(target, T):
    rng = np.random.default_rng(0)
    return np.array([autoregressive_generate(target, prompt, 30, T, rng)[0] for prompt in PROMPTS])


def test_a_target_that_drafts_for_itself_is_always_accepted():
    target, _ = models()
    for T in (0, 1):
        assert predicted_alpha(target, target, texts(target, T), 3, Sampler(T)) == pytest.approx(1)


def test_greedy_alpha_is_how_often_the_draft_says_the_same_token():
    target, draft = models()
    written = texts(target, 0)
    same = (draft.full_logits(written)[:, 2:-1].argmax(-1) == written[:, 3:]).mean()
    assert 0 < same < 1 and predicted_alpha(target, draft, written, 3, Sampler()) == pytest.approx(same)


def test_only_full_rounds_are_counted():
    target, draft = models()
    run = full_rounds(target, draft, PROMPTS, 30, 4, Sampler(1.0), np.random.default_rng(0))
    assert run.rounds and {r.drafted for r in run.rounds} == {4}
    longer = full_rounds(target, draft, PROMPTS, 3, 4, Sampler(1.0), np.random.default_rng(0))
    assert not longer.rounds
