"""Draft models: vocabularies that differ, and a cache that follows the text."""

import numpy as np
import pytest

from console import BadInput
from decode_lab import Sampler, autoregressive_generate, speculative_generate, tree_generate
from lab.drafters.model import ModelDrafter
from lab.drafters.trees import TreeDrafter, TreeShape
from lab.measure.scripted import FakeDecoder, one_hot, random_decoder, script, table_logits
from lab.toy.transformer import QCFG, TransformerLM, init_params
from loops import PROMPT, TEXT, V, Watched, check, drafters_of, one_sentence


@pytest.mark.parametrize("make", range(3))
@pytest.mark.parametrize("ours, theirs", [((V, None), (V + 1, None)), ((V, "a"), (V, "b")),
                                          ((V, "a"), (V + 1, None))])
def test_another_vocabulary_is_refused_before_the_first_forward(make, ours, theirs):
    target = script(TEXT, ours[0], tokenizer=ours[1], name="big")
    draft = script(TEXT, theirs[0], tokenizer=theirs[1], name="little")
    generate = (lambda d: speculative_generate(target, d, PROMPT, 5, 2)) if make == 0 else (
        lambda d: tree_generate(target, d, PROMPT, 5))
    with pytest.raises(BadInput) as error:
        generate(drafters_of(draft)[make])
    assert "little" in one_sentence(error) and target.forwards == draft.forwards == 0


@pytest.mark.parametrize("make", range(3))
def test_the_target_cannot_draft_for_itself_with_one_cache(make):
    target = script(TEXT, V, name="big")
    with pytest.raises(BadInput) as error:
        speculative_generate(target, drafters_of(target)[make], PROMPT, 5, 2)
    assert "big" in one_sentence(error) and target.forwards == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("make", range(3))
@pytest.mark.parametrize("padded", ["target", "draft"])
def test_padded_vocabularies_with_one_tokenizer(padded, make, temperature):
    """One model's rows are longer; its extra ids are as likely as any, which is the worst case."""
    sizes = {"target": 6, "draft": 6, padded: 9}
    if padded == "target":                                  # a trained target never says a padding id
        logits = table_logits(9, 1)
        target = FakeDecoder(lambda h: np.where(np.arange(9) < 6, logits(h), -50.0), 9, tokenizer="t")
    else:
        target = random_decoder(6, 1, tokenizer="t")
    drafter = drafters_of(random_decoder(sizes["draft"], 2, tokenizer="t", name="little"))[make]
    proposed = []

    class Spy(Watched):
        def propose(self, tokens, gamma, rng):
            draft = super().propose(tokens, gamma, rng)
            proposed.extend(draft.tokens)
            for t, q in zip(draft.tokens, draft.q):
                assert q is None or (len(q) == sizes["target"] and q[t] > 0 and abs(q.sum() - 1) < 1e-12)
                assert q is None or not q[6:].any(), "q is padded with zeros"
            return draft

    tokens, run = speculative_generate(target, Spy(drafter, target), [0, 1], 80, 3, temperature)
    check(target, tokens, run, [0, 1])
    assert proposed and max(proposed) < 6, "no id beyond the smaller vocabulary is drawn"
    if temperature == 0:
        assert tokens.tolist() == autoregressive_generate(target, [0, 1], 80)[0].tolist()


@pytest.mark.parametrize("make", range(3))
def test_a_token_the_draft_does_not_know_ends_drafting_not_the_run(make):
    """The target may say an id of its own padding; a draft with fewer rows cannot read it: no more drafts."""
    target, draft = random_decoder(9, 1, tokenizer="t"), random_decoder(6, 2, tokenizer="t", name="little")
    plain, _ = autoregressive_generate(target, [0, 1], 60)
    assert max(plain) >= 6
    target.calls.clear()
    tokens, run = speculative_generate(target, Watched(drafters_of(draft)[make], target), [0, 1], 60, 3)
    check(target, tokens, run, [0, 1])
    assert tokens.tolist() == plain.tolist()


# -- the draft's cache ---------------------------------------------------------------------------------------

class Followed:
    """A drafter over a FakeDecoder: what it sends first must complete the sequence, and be little."""

    def __init__(self, drafter, most):
        self.drafter, self.name, self.most, self.proposals = drafter, drafter.name, most, 0

    def start(self, target, sampler, prompt):
        self.drafter.start(target, sampler, prompt)

    def propose(self, tokens, gamma, rng):
        model, first = self.drafter.model, len(self.drafter.model.calls)
        held = list(model.tokens)
        assert not model.pending, "what is verified is committed"
        assert held == tokens[:len(held)] and len(held) < len(tokens)
        assert not self.proposals or len(tokens) - len(held) <= self.most, "the cache was cut by too much"
        draft = self.drafter.propose(tokens, gamma, rng)
        name, (sent, parents) = next(call for call in model.calls[first:] if call[0] == "send")
        assert sent == tokens[len(held):] and parents == list(range(-1, len(sent) - 1))
        self.proposals += 1
        return draft

    def verified(self, tokens, path, hidden):
        self.drafter.verified(tokens, path, hidden)
        model = self.drafter.model
        assert model.tokens == tokens[:model.length] and model.length < len(tokens) and not model.pending


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("gamma", [1, 4])
def test_draft_equal_to_target_is_always_accepted(temperature, gamma):
    n_new = 200 * (gamma + 1)
    target, draft = random_decoder(8, 1), random_decoder(8, 1)
    drafter = Followed(ModelDrafter(draft), 2)
    tokens, run = speculative_generate(target, drafter, [0, 1], n_new, gamma, temperature)
    check(target, tokens, run, [0, 1])
    assert len(run.rounds) == 200 and run.alpha == 1 and run.acceptance == [1.0] * gamma
    assert run.histogram == [0] * gamma + [200] and run.tau == gamma + 1
    assert draft.forwards == 200 * gamma, "one draft forward per drafted token"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tree_of_a_draft_equal_to_the_target(temperature):
    """A deterministic tree over a greedy target, a sampled chain over a sampled one: never refused."""
    target, draft = random_decoder(8, 1), random_decoder(8, 1)
    shape = TreeShape.branching([2, 2, 1] if temperature == 0 else [1, 1, 1])
    drafter = Followed(TreeDrafter(draft, shape, sample=temperature > 0), 4)
    tokens, run = tree_generate(target, drafter, [0, 1], 800, temperature)
    check(target, tokens, run, [0, 1])
    assert len(run.rounds) == 200 and run.histogram == [0, 0, 0, 200]
    assert draft.forwards == 200 * 3, "one draft forward per level"


@pytest.mark.parametrize("make, most", [(0, 2), (1, 4), (2, 4)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_draft_cache_never_drifts(make, most, temperature):
    target, draft = random_decoder(5, 1), random_decoder(5, 7)
    drafter = Followed(drafters_of(draft)[make], most)
    tokens, run = speculative_generate(target, drafter, [0, 1], 150, 3, temperature)
    check(target, tokens, run, [0, 1])
    assert 0 < run.alpha < 1 and drafter.proposals > 50


def test_the_draft_cache_survives_rounds_without_a_draft():
    target, draft = random_decoder(5, 1), random_decoder(5, 7)
    drafter = Followed(ModelDrafter(draft), 30)
    tokens, run = speculative_generate(target, drafter, [0, 1], 100, lambda run: len(run.rounds) % 4, 0.8)
    check(target, tokens, run, [0, 1])
    assert {r.drafted for r in run.rounds} == {0, 1, 2, 3}


@pytest.mark.parametrize("others", [[2, 3, 4, 5], [2, 9, 4, 5, 6], [9, 3], [2], [2, 3, 9, 9, 9, 9]])
def test_a_draft_cache_follows_a_sequence_that_others_drafted(others):
    """Where drafters take turns, what was kept may differ from what this one proposed, and be longer."""
    draft = FakeDecoder(lambda h: one_hot(h[-1] + 1, V), V)
    drafter = ModelDrafter(draft)
    drafter.start(script(TEXT, V), Sampler(), [0, 1])
    assert drafter.propose([0, 1], 4, None).tokens == [2, 3, 4, 5]
    sequence = [0, 1] + others
    drafter.verified(sequence, [], None)
    assert draft.tokens == sequence[:draft.length] and draft.length < len(sequence)
    assert drafter.propose(sequence, 1, None).tokens == [others[-1] + 1]


def test_an_always_wrong_draft_adds_exactly_one_token_a_round():
    target = random_decoder(8, 1)
    wrong = FakeDecoder(lambda h: -target._logits(h) * 9, 8)
    drafter = Followed(ModelDrafter(wrong), 1)
    tokens, run = speculative_generate(target, drafter, [0, 1], 60, 3)
    check(target, tokens, run, [0, 1])
    assert run.accepted == 0 and len(run.rounds) == 60 and run.histogram == [60]


@pytest.mark.parametrize("limit", [2, 3, 6, 9])
@pytest.mark.parametrize("make", range(3))
def test_the_draft_models_context_ends_first(make, limit):
    """The fake refuses a token past its limit; the run goes on without drafts and says the same."""
    target, draft = random_decoder(8, 1), random_decoder(8, 1, max_length=limit)
    plain, _ = autoregressive_generate(target, [0, 1], 20)
    target.calls.clear()
    tokens, run = speculative_generate(target, Watched(drafters_of(draft)[make], target), [0, 1], 20, 4)
    check(target, tokens, run, [0, 1])
    assert tokens.tolist() == plain.tolist()
    assert run.drafted > 0
    if make < 2:                                        # the deepest drafted token need not enter its cache
        assert run.rounds[0].accepted == min(limit - 1, (4, 2)[make])


def test_a_long_prompt_is_prefilled_by_the_draft_too():
    """Its logits are read by nobody: at most one row of the prompt's is asked for."""
    lm, other = (TransformerLM(init_params(QCFG, seed), QCFG) for seed in (0, 0))
    asked, send = [], other.send
    other.send = lambda tokens, parents=None: (asked.append(len(tokens)), send(tokens, parents))[1]
    prompt = np.arange(100) % QCFG.vocab_size
    assert speculative_generate(lm, ModelDrafter(other), prompt, 20, 3)[1].alpha == 1
    assert max(asked) <= 2
