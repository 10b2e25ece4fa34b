"""lab.measure.acceptance: what models draw from at the tokens of texts, a round's first token, full rounds."""

import numpy as np
import pytest

from decode_lab import Round, Sampler, autoregressive_generate, speculative_generate
from lab import toy
from lab.drafters.model import ModelDrafter
from lab.measure.acceptance import Texts, first_token, full_rounds, where_tested

IDS = toy.passages("code", 2, 17)
P, Q, R = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.2, 0.2, 0.4, 0.2]), np.array([0.0, 0.0, 1.0, 0.0])


def test_the_probabilities_are_those_behind_each_prefix():
    small, sampler = toy.load("small"), Sampler(0.8, top_k=20, repetition_penalty=1.3)
    found = Texts(IDS, 12).probs(small, sampler)
    assert found.shape == (2, 5, small.vocab_size) and found.sum(-1) == pytest.approx(1)
    row = small.full_logits(IDS[1:, :15])[0, -1]
    assert found[1, 3] == pytest.approx(sampler.probs(row, IDS[1, :15]), abs=1e-6)


def test_overlap_by_hand():
    large, small, texts = toy.load("large"), toy.load("small"), Texts(IDS, 12)
    assert texts.overlaps((large, Sampler()), (large, Sampler())) == pytest.approx(1)
    p, q = texts.probs(large, Sampler(1.0)), texts.probs(small, Sampler(0.5))
    found = texts.overlaps((large, Sampler(1.0)), (small, Sampler(0.5)))
    assert found.shape == (2, 5) and found[0, 4] == pytest.approx(1 - np.abs(p[0, 4] - q[0, 4]).sum() / 2)


def test_the_texts_are_those_of_plain_decoding():
    large, sampler, prompts = toy.load("large"), Sampler(0.8, top_k=20), IDS[:, :12].tolist()
    rng = np.random.default_rng(3)
    texts = Texts.written(large, prompts, 5, sampler, np.random.default_rng(3))
    assert texts.n_prompt == 12
    for ids, text in zip(prompts, texts.tokens, strict=True):
        assert text.tolist() == autoregressive_generate(large, ids, 5, rng=rng, sampler=sampler)[0].tolist()


def test_which_tokens_were_tested():
    """Two of three accepted, all of two (the token behind them was not tested), nothing drafted."""
    rounds = [Round(3, 3, 2, 0, 0), Round(2, 2, 2, 0, 0), Round(0, 0, 0, 0, 0)]
    assert where_tested(rounds, 7).tolist() == [True, True, True, True, True, False, False]


def test_a_greedy_draft_is_accepted_exactly_where_it_overlaps():
    large, small, greedy = toy.load("large"), toy.load("small"), Sampler()
    tokens, run = speculative_generate(large, ModelDrafter(small), IDS[0, :12].tolist(), 30, 4)
    overlaps = Texts([tokens], 12).overlaps((large, greedy), (small, greedy))[0]
    assert overlaps[where_tested(run.rounds, 30)].sum() == run.accepted


def test_the_first_token_has_the_targets_distribution_if_q_is_what_was_drawn_from():
    accepted, out = first_token(P, Q, Q)
    assert accepted == pytest.approx(np.minimum(P, Q).sum()) and out == pytest.approx(P)


def test_another_q_gives_another_distribution():
    """Token 2 is drawn, said to have had q: kept with 0.2 / 0.4, else a token of max(p - q, 0), which is 0.3, 0.1."""
    accepted, out = first_token(P, R, Q)
    assert accepted == pytest.approx(0.5) and out == pytest.approx([0.375, 0.125, 0.5, 0])


def test_only_full_rounds_are_counted():
    large, small, prompts = toy.load("large"), toy.load("small"), IDS[:, :12].tolist()
    run = full_rounds(large, small, prompts, 30, 4, Sampler(1.0), np.random.default_rng(0))
    assert run.rounds and {r.drafted for r in run.rounds} == {4}
    assert not full_rounds(large, small, prompts, 3, 4, Sampler(1.0), np.random.default_rng(0)).rounds


def test_greedy_overlap_is_how_often_the_draft_says_the_same_token():
    large, small, prompts = toy.load("large"), toy.load("small"), IDS[:, :12].tolist()
    texts = Texts.written(large, prompts, 20, Sampler())
    same = small.full_logits(texts.tokens)[:, 11:-1].argmax(-1) == texts.tokens[:, 12:]
    assert 0 < same.mean() < 1
    assert texts.overlaps((large, Sampler()), (small, Sampler())).mean() == pytest.approx(same.mean())
