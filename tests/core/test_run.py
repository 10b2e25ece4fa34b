"""What a run reports: statistics of hand-made rounds, and the clock."""

import numpy as np
import pytest

import decode_lab as dl
from decode_lab import Round, Run, autoregressive_generate, speculative_generate
from lab.measure.scripted import FakeDecoder, ScriptedDrafter, from_text, script
from loops import PROMPT, TEXT, V

# -- metrics -------------------------------------------------------------------------------------------------

def a_round(drafted, tested, accepted, draft_s=0.0, verify_s=0.0, sources=(), **options):
    return Round(drafted, tested, accepted, draft_s, verify_s, sources, **options)


def test_statistics_of_hand_made_rounds():
    run = Run([a_round(4, 3, 2, 0.4, 1.0, ("a", "b", "b"), prefill_s=5.0, first=True),
               a_round(4, 4, 4, 0.4, 1.0, ("a", "a", "b", "b")),
               a_round(0, 0, 0, 0.0, 1.0),
               a_round(2, 1, 0, 0.2, 1.0, ("b",))])
    assert run.n_tokens == 10 and run.accepted == 6 and run.drafted == 10
    assert run.tau == 2.5, "tau counts the target's own token"
    assert run.alpha == 6 / 8, "of tested positions, not of drafted ones"
    assert run.acceptance == [2 / 3, 1.0, 1 / 2, 1.0]
    assert run.histogram == [2, 0, 1, 0, 1]
    assert run.by_source == {"a": (3, 3), "b": (5, 3)}
    assert run.ttft == pytest.approx(6.4)
    assert run.tpot == pytest.approx((1.4 + 1.0 + 1.2) / 7), "the first round is not among them"
    assert run.seconds == pytest.approx(10.0)
    assert run.draft_token_s == pytest.approx(0.6 / 6)


def test_alpha_and_acceptance_by_position_predict_tau():
    """tau = 1 + sum of products, exactly, when every round drafts to the same depth."""
    run = Run([a_round(3, min(a + 1, 3), a) for a in (0, 3, 1, 2, 3, 0, 0, 1)])
    assert run.tau == pytest.approx(1 + np.cumprod(run.acceptance).sum())


def test_statistics_of_nothing_drafted_and_of_one_round():
    run = Run([a_round(0, 0, 0, 0.0, 1.0, first=True)])
    assert run.tau == 1 and np.isnan(run.alpha) and run.acceptance == [] and run.histogram == [1]
    assert run.by_source == {} and run.ttft == 1.0 and np.isnan(run.tpot) and np.isnan(run.draft_token_s)


def test_pooled_runs_count_tokens_not_means():
    fast = Run([a_round(1, 1, 1, 0, 1.0, first=i == 0) for i in range(10)], "budget")
    slow = Run([a_round(1, 1, 0, 0, 3.0, first=True), a_round(1, 1, 0, 0, 1.0)], "eos")
    both = Run.pool([fast, slow])
    assert both.n_tokens == 22 and both.tau == pytest.approx(22 / 12) and both.ttft == 2.0
    assert both.tpot == pytest.approx(10 / 19) and Run.pool([slow]).stop == "eos" and both.stop == ""


def test_times_are_those_of_the_clock(monkeypatch):
    """A clock that only models and drafters advance: drafting, verifying and prefilling are kept apart."""
    now = [0.0]
    monkeypatch.setattr(dl, "perf_counter", lambda: now[0])

    class Slow(FakeDecoder):
        def _note(self, name, argument):
            super()._note(name, argument)
            now[0] += {"prefill": 100.0, "send": 10.0, "rewind": 0.0, "commit": 0.0}[name]

    class Thinking(ScriptedDrafter):
        def propose(self, tokens, gamma, rng):
            now[0] += 1.0
            return super().propose(tokens, gamma, rng)

        def verified(self, tokens, path, hidden):
            now[0] += 0.5

    target = Slow(script(TEXT, V)._logits, V)
    _, run = speculative_generate(target, Thinking(from_text(TEXT).plan), PROMPT, 9, 2)
    times = [(r.prefill_s, r.draft_s, r.verify_s) for r in run.rounds]
    assert times == [(100, 1.5, 10), (0, 1.5, 10), (0, 1.5, 10)]
    assert run.ttft == 111.5 and run.tpot == pytest.approx(23 / 6) and run.draft_token_s == pytest.approx(3 / 4)
    assert run.seconds == pytest.approx(134.5)


def test_the_clock_waits_for_the_device():
    """Work that a device has only been asked for belongs to what asked for it: prefill, then verification."""
    target, order = script(TEXT, V), []
    prefill = target.prefill
    target.prefill = lambda tokens: (order.append("prefill"), prefill(tokens))[1]
    target.synchronize = lambda: order.append("synchronize")
    autoregressive_generate(target, PROMPT, 2)
    assert order == ["prefill", "synchronize", "synchronize", "synchronize"]
