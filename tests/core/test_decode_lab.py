"""Loops, samplers, acceptance rule, drafters, trees and metrics, on models whose answers are known."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import decode_lab as dl
from console import BadInput
from decode_lab import (Draft, Round, Run, Sampler, accept, autoregressive_generate,
                        residual, speculative_generate, tree_generate, verify)
from lab.drafters.best_tree import (accept_lengths, accept_lengths_to_end, best_tree, draft_ranks,
                                    rank_table, tree_accept_lengths)
from lab.drafters.lookup import PromptLookup
from lab.drafters.model import ModelDrafter
from lab.drafters.trees import ConfidentTreeDrafter, TreeDrafter, TreeShape, tokens_to
from lab.support.checks import check_draft
from fakes import (Counted, FakeDecoder, ScriptedDrafter, chain, exact, from_text, one_hot, outcomes, random_decoder,
                   same_distribution, script, table_logits, tree)
from lab.toy.transformer import QCFG, Config, TransformerLM, init_params

V = 16
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7]
PROMPT = TEXT[:3]

# Few examples and the same ones each time; no deadline, as a busy machine is no fault.
quick = settings(max_examples=40, deadline=None, derandomize=True)


class Watched:
    """A drafter passed through, with the invariants of each round checked as the loop goes by."""

    def __init__(self, drafter, target):
        self.drafter, self.target, self.name = drafter, target, drafter.name
        self.lengths = []

    def start(self, target, sampler, prompt):
        self.drafter.start(target, sampler, prompt)

    def propose(self, tokens, gamma, rng):
        assert gamma >= 1
        assert self.target.length == self.target.committed == len(tokens) - 1
        return self.drafter.propose(tokens, gamma, rng)

    def verified(self, tokens, path, hidden):
        assert self.target.length == self.target.committed == len(tokens) - 1, "after a round the cache holds all tokens but the last"
        if isinstance(self.target, FakeDecoder):
            assert self.target.tokens == tokens[:-1] and not self.target.pending
        self.lengths.append(len(tokens))
        self.drafter.verified(tokens, path, hidden)


def run_script(drafter, n_new, gamma, text=TEXT, prompt=PROMPT, eos=(), **options):
    """Speculate on a scripted target -> (target, tokens, run), the invariants of every run checked."""
    target = script(text, V, **options)
    tokens, run = speculative_generate(target, Watched(drafter, target), prompt, n_new, gamma, eos=eos)
    check(target, tokens, run, prompt)
    return target, tokens.tolist(), run


def check(target, tokens, run, prompt):
    assert tokens.dtype == np.int64 and tokens[:len(prompt)].tolist() == list(prompt)
    assert run.n_tokens == len(tokens) - len(prompt) == len(run.rounds) + run.accepted
    assert target.forwards == len(run.rounds) + (len(prompt) > 1), "one forward per round, and the prefill"
    assert target.tokens == tokens[:-1].tolist(), "the cache holds all tokens but the last"
    assert run.stop in ("eos", "budget", "context")
    assert [r.first for r in run.rounds] == [True] + [False] * (len(run.rounds) - 1)
    for r in run.rounds:
        assert 0 <= r.accepted <= r.tested <= max(r.drafted, r.accepted)


# -- the loop, on a script -----------------------------------------------------------------------------------

@pytest.mark.parametrize("miss, accepted", [(3, 0), (4, 1), (5, 2), (6, 3), (None, 4)])
def test_mismatch_at_each_position(miss, accepted):
    """Drafts of 4 from position 3: a wrong one at 3, 4, 5, 6 leaves 0, 1, 2, 3 of them, and 4 without."""
    target, tokens, run = run_script(from_text(TEXT, {miss}, V), 12, 4)
    assert tokens == TEXT[:15]
    first = run.rounds[0]
    assert (first.drafted, first.accepted) == (4, accepted)
    assert first.tested == min(accepted + 1, 4), "a draft past the first refusal was never tested"
    assert first.sources == ("scripted",) * first.tested
    assert target.called("rewind") == [0], "the target is emptied once, and never goes back"
    committed = target.called("commit")
    assert committed[0] == list(range(accepted + 1)), "the last token of the sequence, and the accepted drafts"
    assert len(committed) == len(run.rounds), "a round ends in a commit, also where nothing is dropped"
    if miss is None:
        assert [r.accepted for r in run.rounds] == [4, 4, 1]


def test_all_wrong_adds_exactly_one_token_a_round():
    _, tokens, run = run_script(from_text(TEXT, range(30), V), 20, 4)
    assert tokens == TEXT[:23] and len(run.rounds) == 20 and run.accepted == 0 and run.tau == 1


def test_all_right_takes_the_fewest_forwards():
    target, tokens, run = run_script(from_text(TEXT), 20, 4)
    assert tokens == TEXT[:23] and [r.accepted for r in run.rounds] == [4, 4, 4, 4]
    assert target.calls[:3] == [("rewind", 0), ("prefill", PROMPT[:-1]), ("send", (TEXT[2:7], [-1, 0, 1, 2, 3]))]


def test_plain_decoding_is_one_forward_a_token():
    target = script(TEXT, V)
    tokens, run = autoregressive_generate(target, PROMPT, 5)
    check(target, tokens, run, PROMPT)
    assert tokens.tolist() == TEXT[:8] and target.called("send") == [
        ([t], [-1]) for t in TEXT[2:7]]
    assert run.drafted == 0 and np.isnan(run.alpha) and run.acceptance == []


def test_one_token_prompt_needs_no_prefill():
    target, tokens, run = run_script(from_text(TEXT), 6, 2, prompt=TEXT[:1])
    assert tokens == TEXT[:7] and target.called("prefill") == []


def test_a_decoder_without_prefill_is_sent_the_prompt():
    class Bare(FakeDecoder):
        prefill = property()                                # as if it were not there: raises AttributeError

    target = Bare(script(TEXT, V)._logits, V)
    tokens, run = autoregressive_generate(target, PROMPT, 4)
    assert tokens.tolist() == TEXT[:7]
    assert target.calls[1:3] == [("send", (PROMPT[:-1], [-1, 0])), ("commit", [0, 1])]


@pytest.mark.parametrize("n_new", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("gamma", [1, 2, 3, 8])
def test_budget_with_all_drafts_right(n_new, gamma):
    drafter = from_text(TEXT)
    target, tokens, run = run_script(drafter, n_new, gamma)
    assert tokens == TEXT[:3 + n_new] and run.stop == "budget"
    assert all(asked <= 3 + n_new - 1 - at for at, asked in drafter.asked), "no draft that cannot be used"
    assert len(run.rounds) == -(-n_new // (gamma + 1))


@pytest.mark.parametrize("limit", [4, 5, 6, 7, 8, 9, 10])
@pytest.mark.parametrize("wrong", [(), range(3, 30), (5,)])
def test_context_limit_inside_a_draft(limit, wrong):
    """Plain and speculative decoding fill the context to the last token; the fake refuses one token more."""
    target, tokens, run = run_script(from_text(TEXT, wrong, V), 20, 4, max_length=limit)
    assert tokens == TEXT[:limit] and run.stop == "context"
    plain, plain_run = autoregressive_generate(script(TEXT, V, max_length=limit), PROMPT, 20)
    assert plain.tolist() == tokens and plain_run.stop == "context"


def test_budget_that_just_fits_the_context_is_a_budget():
    assert run_script(from_text(TEXT), 5, 4, max_length=8)[2].stop == "budget"
    assert run_script(from_text(TEXT), 6, 4, max_length=8)[2].stop == "context"


@pytest.mark.parametrize("at", range(3, 11))                # the EOS is the at-th token of the text
@pytest.mark.parametrize("wrong", [(), (4,), (6,), range(3, 30)])
@pytest.mark.parametrize("gamma", [1, 3, 5])
def test_eos_ends_where_plain_decoding_ends(at, wrong, gamma):
    """Inside a draft, as its last token, as the bonus token, as a correction, as the very first."""
    text = [t if i != at else 15 for i, t in enumerate(TEXT)]
    plain, plain_run = autoregressive_generate(script(text, V), PROMPT, 20, eos={15})
    assert plain.tolist() == text[:at + 1] and plain_run.stop == "eos"
    target, tokens, run = run_script(from_text(text, wrong, V), 20, gamma, text=text, eos=(15,))
    assert tokens == text[:at + 1] and run.stop == "eos"


def test_the_first_of_several_eos_ids_ends():
    text = TEXT[:6] + [14, 15] + TEXT[8:]
    assert run_script(from_text(text), 20, 5, text=text, eos=[15, 14])[1] == text[:7]
    text = TEXT[:6] + [15, 14] + TEXT[8:]
    assert run_script(from_text(text), 20, 5, text=text, eos=[15, 14])[1] == text[:7]


def test_eos_in_the_prompt_and_in_a_refused_draft_ends_nothing():
    text = [15] + TEXT[1:]
    drafter = ScriptedDrafter(lambda tokens, gamma: [15] * gamma)
    _, tokens, run = run_script(drafter, 6, 3, text=text, prompt=text[:3], eos=(15,))
    assert tokens == text[:9] and run.stop == "budget"


def test_eos_as_the_last_token_of_the_budget_is_an_eos():
    text = TEXT[:5] + [15] + TEXT[6:]
    assert run_script(from_text(text), 3, 4, text=text, eos=(15,))[2].stop == "eos"


def test_an_accepted_eos_counts_neither_as_refused_nor_as_drafted_and_accepted():
    """It ends the round as the target's own token does, so that tokens = rounds + accepted; alpha stays 1."""
    for at in range(3, 8):
        text = [t if i != at else 15 for i, t in enumerate(TEXT)]
        run = run_script(from_text(text), 20, 8, text=text, eos=(15,))[2]
        assert run.accepted == at - 3 and run.rounds[0].tested == at - 3
        assert all(tested == accepted for tested, accepted in run.by_source.values())


def test_a_refusal_that_yields_eos_is_a_refusal():
    """The draft said something else where the target says EOS: tested and refused, at every position."""
    for at in range(3, 8):
        text = [t if i != at else 15 for i, t in enumerate(TEXT)]
        run = run_script(from_text(text, {at}, V), 20, 8, text=text, eos=(15,))[2]
        assert (run.rounds[0].accepted, run.rounds[0].tested) == (at - 3, at - 2)


def test_gamma_zero_is_plain_decoding():
    drafter = from_text(TEXT)
    _, tokens, run = run_script(drafter, 6, 0)
    assert tokens == TEXT[:9] and run.drafted == 0 and len(run.rounds) == 6 and drafter.asked == []


def test_gamma_may_follow_the_run():
    seen = []

    def gamma(run):
        seen.append(len(run.rounds))
        return len(run.rounds)                              # 0, 1, 2, …

    drafter = from_text(TEXT)
    _, tokens, run = run_script(drafter, 10, gamma)
    assert tokens == TEXT[:13] and seen == [0, 1, 2, 3]
    assert [r.drafted for r in run.rounds] == [0, 1, 2, 3]


@pytest.mark.parametrize("returned, drafted", [(lambda g: 0, 0), (lambda g: g - 2, 2), (lambda g: 1, 1)])
def test_fewer_tokens_than_asked_or_none(returned, drafted):
    drafter = ScriptedDrafter(lambda tokens, gamma: TEXT[len(tokens):len(tokens) + max(0, returned(gamma))])
    _, tokens, run = run_script(drafter, 9, 4)
    assert tokens == TEXT[:12] and run.rounds[0].drafted == run.rounds[0].accepted == drafted


def test_a_drafter_that_works_with_arrays():
    """list + array would add: the tokens of a draft may be an array."""
    drafter = ScriptedDrafter(lambda tokens, gamma: Draft(np.array(TEXT[len(tokens):len(tokens) + gamma]),
                                                          [None] * gamma, ["scripted"] * gamma))
    assert run_script(drafter, 8, 3)[1] == TEXT[:11]


def test_a_drafter_is_told_the_prompt_and_after_every_round_the_sequence_and_the_accepted_path():
    drafter = from_text(TEXT, {5}, V)
    _, tokens, run = run_script(drafter, 10, 3)
    ends = 3 + np.cumsum([r.accepted + 1 for r in run.rounds])
    assert drafter.told == [TEXT[:n] for n in ends] and drafter.prompts == [PROMPT]
    assert drafter.paths == [list(range(r.accepted)) for r in run.rounds]


def test_a_second_run_starts_afresh():
    target, drafter = script(TEXT, V), ModelDrafter(script(TEXT, V))
    once, _ = speculative_generate(target, drafter, PROMPT, 12, 3)
    target.calls.clear()
    again, run = speculative_generate(target, drafter, PROMPT, 12, 3)
    check(target, again, run, PROMPT)
    assert once.tolist() == again.tolist() == TEXT[:15] and run.alpha == 1


def one_sentence(error):
    text = str(error.value)
    assert text.endswith(".") and "\n" not in text and len(text) < 250
    return text


BAD_DRAFTS = {
    "too many": (chain([1, 2, 3, 4]), "4 deep"),
    "id above the vocabulary": (chain([1, V]), str(V)),
    "id below zero": (chain([1, -1]), "-1"),
    "fewer q than tokens": (Draft([1, 2], [None], ["x"] * 2), "1 distributions"),
    "more q than tokens": (Draft([1], [None] * 2, ["x"]), "2 distributions"),
    "no sources": (Draft([1], [None], []), "0 sources"),
    "q over another vocabulary": (chain([1], [np.full(V + 1, 1 / (V + 1))]), str(V + 1)),
    "q that cannot have drawn the token": (chain([1], [one_hot(2, V, 1.0)]), "1"),
    "a parent after its child": (tree([1, 2], [1, -1]), "node 0"),
    "its own parent": (tree([1, 2], [-1, 1]), "node 1"),
    "a parent below -1": (tree([1, 2], [-1, -2]), "-2"),
    "fewer parents than nodes": (tree([1, 2], [-1]), "2"),
    "a tree too deep": (tree([1, 2, 3, 4], [-1, 0, 1, 2]), "4 deep"),
}


@pytest.mark.parametrize("case", BAD_DRAFTS)
def test_impossible_drafts_are_refused_in_one_sentence(case):
    draft, named = BAD_DRAFTS[case]
    target = script(TEXT, V)
    with pytest.raises(BadInput) as error:
        speculative_generate(target, ScriptedDrafter(lambda tokens, gamma: draft), PROMPT, 9, 3, 1.0)
    assert named in one_sentence(error)
    assert target.forwards == 1, "refused before it was sent: only the prefill ran"


@pytest.mark.parametrize("arguments, named", [
    (dict(prompt=[]), "no tokens"), (dict(n_new=0), "n_new = 0"), (dict(n_new=-3), "-3"),
    (dict(gamma=-1), "-1"),
    (dict(gamma=np.int64(-1)), "-1"), (dict(gamma=lambda run: -1), "-1"), (dict(prompt=[1, V]), str(V)),
    (dict(prompt=[-1]), "-1"), (dict(temperature=-0.1), "temperature = -0.1"), (dict(prompt=[1] * 40), "40"),
])
def test_impossible_arguments_are_refused_before_the_first_forward(arguments, named):
    target = script(TEXT, V, max_length=40)
    with pytest.raises(BadInput) as error:
        speculative_generate(target, from_text(TEXT), **{"prompt": [1], "n_new": 3, "gamma": 2, **arguments})
    assert named in one_sentence(error) and target.forwards == 0


def test_a_temperature_beside_a_sampler_is_refused():
    """One of the two would be ignored in silence, and a greedy run taken for a sampled one."""
    with pytest.raises(BadInput) as error:
        autoregressive_generate(script(TEXT, V), PROMPT, 3, 0.8, sampler=Sampler(top_k=4))
    one_sentence(error)


def test_an_unusable_row_is_refused():
    for sampler in (Sampler(1.0), Sampler(0.0)):
        with pytest.raises(BadInput) as error:
            sampler.probs(np.array([0.0, np.nan, 1.0]))
        one_sentence(error)


# -- vocabularies --------------------------------------------------------------------------------------------

def drafters_of(model):
    return [ModelDrafter(model), TreeDrafter(model, TreeShape.branching([2, 1])),
            ConfidentTreeDrafter(model, 4, 2)]


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


# -- greedy equality on transformers -------------------------------------------------------------------------

TINY = Config(vocab_size=24, hidden=16, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, ffn=24,
              max_length=160)


def tiny_params(seed, config=TINY):
    """Random weights whose greedy text does not settle on one token: layers that matter."""
    params = init_params(config, seed)
    params["embed"] = params["embed"] * np.float32(50)
    for layer in params["layers"]:
        layer["wo"], layer["w_down"] = layer["wo"] * np.float32(40), layer["w_down"] * np.float32(40)
    return params


def tiny(seed, noise=0.0):
    """A tiny transformer; noise > 0 makes a draft that agrees with it in part."""
    params = tiny_params(seed)
    if noise:
        rng = np.random.default_rng(seed)
        moved = params["embed"] + noise * rng.standard_normal(params["embed"].shape)
        params["embed"] = moved.astype(np.float32)
    return TransformerLM(params, TINY, "draft" if noise else "target")


def assert_same_greedy(target, got, want, sampler=Sampler()):
    """Equal token by token, but for a position where the two best logits are within float32 rounding."""
    assert len(got) == len(want)
    differ = np.flatnonzero(got != want)
    if len(differ):
        at = differ[0]
        z = sampler._penalised(target.full_logits([want[:at]])[0, -1].astype(np.float64), want[:at])
        margin = abs(z[got[at]] - z[want[at]])
        assert margin < 1e-4, f"token {at}: {got[at]} instead of {want[at]}, {margin:.2e} apart"


IRREGULAR = TreeShape([(-1, 0), (-1, 1), (0, 0), (2, 0), (2, 1)])
GREEDY = {
    "chain": lambda draft: (ModelDrafter(draft), 4),
    "chain, gamma 1": lambda draft: (ModelDrafter(draft), 1),
    "lookup": lambda draft: (PromptLookup(), 5),
    "tree": lambda draft: (TreeDrafter(draft, TreeShape.branching([3, 2, 1])), None),
    "wide": lambda draft: (TreeDrafter(draft, TreeShape.branching([4])), None),
    "thin": lambda draft: (TreeDrafter(draft, TreeShape.branching([1] * 4)), None),
    "irregular": lambda draft: (TreeDrafter(draft, IRREGULAR), None),
    "root alone": lambda draft: (TreeDrafter(draft, TreeShape([])), None),
    "confident": lambda draft: (ConfidentTreeDrafter(draft, 7, 4, 3), None),
    "sampled chain": lambda draft: (ModelDrafter(draft, Sampler(1.0)), 4),
    "sampled tree": lambda draft: (
        TreeDrafter(draft, TreeShape.branching([2, 2]), Sampler(1.0), sample=True), None),
}


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("kind", GREEDY)
def test_greedy_output_equals_plain_decoding(kind, penalty):
    sampler = Sampler(repetition_penalty=penalty)
    accepted = 0
    for seed in range(4):
        target, draft = tiny(seed), tiny(seed, 0.2)
        drafter, gamma = GREEDY[kind](draft)
        prompt = np.random.default_rng(seed).integers(24, size=1 + 7 * seed)
        plain, _ = autoregressive_generate(target, prompt, 48, sampler=sampler)
        assert len(set(plain[len(prompt):])) > 2, "a text that settles on one token tests little"
        if gamma is None:
            tokens, run = tree_generate(target, Watched(drafter, target), prompt, 48, sampler=sampler)
        else:
            tokens, run = speculative_generate(target, Watched(drafter, target), prompt, 48, gamma,
                                               sampler=sampler)
        assert_same_greedy(target, tokens, plain, sampler)
        assert run.n_tokens == 48 == len(run.rounds) + run.accepted
        accepted += run.accepted
    assert accepted > 0 or kind == "root alone" or (kind == "lookup" and penalty != 1)


@quick
@given(seed=st.integers(0, 9), prompt=st.lists(st.integers(0, 23), min_size=1, max_size=12),
       gamma=st.integers(0, 6), n_new=st.integers(1, 14), eos=st.sets(st.integers(0, 23), max_size=6),
       penalty=st.sampled_from([1.0, 1.2]))
def test_any_prompt_budget_and_eos_stop_as_plain_decoding(seed, prompt, gamma, n_new, eos, penalty):
    sampler = Sampler(repetition_penalty=penalty)
    target, draft = random_decoder(24, seed), random_decoder(24, seed, scale=1.4)
    plain, plain_run = autoregressive_generate(target, prompt, n_new, sampler=sampler, eos=eos)
    drafters = [ModelDrafter(draft), PromptLookup(boundary=eos),
                TreeDrafter(draft, TreeShape.branching([2, 2])), ConfidentTreeDrafter(draft, 5, 3)]
    for drafter in drafters:
        target.calls.clear()
        tokens, run = speculative_generate(target, Watched(drafter, target), prompt, n_new, gamma,
                                           sampler=sampler, eos=eos)
        check(target, tokens, run, prompt)
        assert tokens.tolist() == plain.tolist() and run.stop == plain_run.stop


def test_a_penalty_sees_the_earlier_drafts_of_its_block():
    """The target wants token 1 at once, then, penalised, 2, then 1: a block of drafts is accepted whole."""
    target = FakeDecoder(lambda h: np.array([0, 4.0, 3.0, 2.0, 0, 0]), 6)
    sampler = Sampler(repetition_penalty=2.0)
    plain, _ = autoregressive_generate(target, [0], 3, sampler=sampler)
    assert plain.tolist() == [0, 1, 2, 1], "4 / 2 = 2 wins again once 3 is halved too"
    draft = FakeDecoder(lambda h: np.array([0, 4.0, 3.0, 2.0, 0, 0]), 6)
    target.calls.clear()
    tokens, run = speculative_generate(target, ModelDrafter(draft), [0], 3, 2, sampler=sampler)
    assert tokens.tolist() == plain.tolist() and [r.accepted for r in run.rounds] == [2]
    drafter = TreeDrafter(draft, TreeShape.branching([1, 1]))
    tokens, run = tree_generate(target, drafter, [0], 3, sampler=sampler)
    assert tokens.tolist() == plain.tolist()


def test_the_same_seed_gives_the_same_tokens():
    def text(drafter, seed=None):
        rng = None if seed is None else np.random.default_rng(seed)
        return speculative_generate(random_decoder(12, 1), drafter, [0], 60, 3, 1.0, rng)[0].tolist()

    for make in (lambda: ModelDrafter(random_decoder(12, 2)), PromptLookup,
                 lambda: TreeDrafter(random_decoder(12, 2), TreeShape.branching([2, 1]), sample=True)):
        assert text(make(), 5) == text(make(), 5) != text(make(), 6)
        assert text(make()) == text(make()) == text(make(), 0), "without an rng, seed 0"


# -- the rule ------------------------------------------------------------------------------------------------

def distributions(n, size, rng):
    """Random distributions, some with zeros."""
    p = rng.random((n, size)) ** 3
    p[rng.random((n, size)) < 0.25] = 0
    p[np.arange(n), rng.integers(size, size=n)] += 0.1
    return p / p.sum(axis=-1, keepdims=True)


def test_acceptance_probability_overlap_and_residual_by_hand():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    before = p.copy()
    assert dl.acceptance_probability(p, 0, q) == 1.0
    assert dl.acceptance_probability(p, 2, q) == pytest.approx(0.4)
    assert dl.acceptance_probability(p, 2) == pytest.approx(0.2), "a point mass is accepted with p(x)"
    assert dl.overlap(p, q) == pytest.approx(0.7)
    assert residual(p, 2, q).tolist() == [1.0, 0.0, 0.0]
    np.testing.assert_allclose(residual(p, 0), [0, 0.6, 0.4])
    assert residual(p, 0, p).tolist() == [0, 0, 0] and residual(np.array([1.0, 0.0]), 0).tolist() == [0, 0]
    assert (p == before).all() and q.tolist() == [0.2, 0.3, 0.5], "neither p nor q is changed"


def test_one_candidate_is_lossless_and_accepted_with_the_overlap(monkeypatch):
    rng = np.random.default_rng(0)
    for p, q in zip(distributions(30, 6, rng), distributions(30, 6, rng)):
        def rule(paths):
            x = dl.draw(q, paths)
            hit, token = accept(p, [x], [q], paths)
            return hit, token

        law = outcomes(rule)
        tokens = [sum(w for (_, t), w in law.items() if t == x) for x in range(6)]
        np.testing.assert_allclose(tokens, p, atol=1e-12)
        assert sum(w for (hit, _), w in law.items() if hit == 0) == pytest.approx(dl.overlap(p, q))


@pytest.mark.parametrize("way", ["with replacement", "without replacement", "different q", "deterministic",
                                 "the same twice", "mixed"])
def test_several_candidates_are_lossless(way, monkeypatch):
    rng = np.random.default_rng(1)
    for p, q, other in zip(*(distributions(12, 4, rng) for _ in range(3))):
        def rule(paths):
            if way == "deterministic":
                return accept(p, [2, 0, 1], [None] * 3, paths)[1]
            if way == "the same twice":
                return accept(p, [1, 1, 3], [None] * 3, paths)[1]
            if way == "mixed":
                return accept(p, [2, dl.draw(q, paths), 0], [None, q, None], paths)[1]
            drawn, qs, now = [], [], q
            for i in range(3):
                if not now.any():
                    break
                drawn.append(dl.draw(now, paths))
                qs.append(now)
                now = {"with replacement": now, "different q": other}.get(way)
                if now is None:
                    now = residual(qs[-1], drawn[-1])
            return accept(p, drawn, qs, paths)[1]

        law = outcomes(rule)
        np.testing.assert_allclose([law.get(t, 0.0) for t in range(4)], p, atol=1e-12)


def test_more_candidates_are_accepted_more_often_than_by_the_naive_rule():
    """The multi-step rule beats sampling from p and looking for it among the candidates (2305.09781)."""
    p, q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.25, 0.25, 0.25, 0.25])

    def multi(paths):
        drawn = [dl.draw(q, paths), dl.draw(q, paths)]
        return accept(p, drawn, [q, q], paths)[0] is not None

    def naive(paths):
        drawn = [dl.draw(q, paths), dl.draw(q, paths)]
        return dl.draw(p, paths) in drawn

    assert outcomes(multi)[True] > outcomes(naive)[True] + 0.1


def test_accept_does_not_write_over_its_arguments():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    for seed in range(20):
        accept(p, [2, 1], [q, None], np.random.default_rng(seed))
    assert p.tolist() == [0.5, 0.3, 0.2] and q.tolist() == [0.2, 0.3, 0.5]


class Fixed:
    """An rng whose uniform numbers are given."""

    def __init__(self, *values):
        self.values = list(values)

    def random(self):
        return self.values.pop(0)


@pytest.mark.parametrize("p", [[0.25, 0.75], [0.0, 0.5, 0.0, 0.5, 0.0], [1.0], [0.0, 1.0], [0.1] * 10])
def test_draw_inverts_the_cumulative_sum_and_never_draws_the_impossible(p):
    p = np.array(p)
    below_one = np.nextafter(1.0, 0.0)
    for u in (0.0, below_one, *np.cumsum(p)[:-1], *np.linspace(0, 0.999, 57)):
        x = dl.draw(p, Fixed(float(min(u, below_one))))
        assert p[x] > 0 and p[:x].sum() <= u + 1e-12 and u <= p[:x + 1].sum() + 1e-12
    assert dl.draw(p, Fixed(0.0)) == np.flatnonzero(p)[0]
    assert dl.draw(p, Fixed(below_one)) == np.flatnonzero(p)[-1]


def test_draw_from_a_generator_has_the_distribution():
    p, rng = np.array([0.1, 0.0, 0.55, 0.35]), np.random.default_rng(3)
    counts = np.bincount([dl.draw(p, rng) for _ in range(20000)], minlength=4)
    assert counts[1] == 0 and np.abs(counts / 20000 - p).max() < 0.015      # four standard deviations


def test_acceptance_compares_strictly():
    """random() can be 0: a candidate with probability 0 is still refused, one with probability 1 never is."""
    p = np.array([0.0, 1.0])
    assert accept(p, [0], [None], Fixed(0.0, 0.5)) == (None, 1)
    assert accept(p, [1], [None], Fixed(np.nextafter(1.0, 0.0))) == (0, 1)
    assert accept(p, [], [], Fixed(0.5)) == (None, 1), "without candidates, a draw from p"


def test_verify_reads_the_rows_of_the_path():
    """Two siblings, the second accepted, its child refused: rows 0 and 2 decide; `tested` counts levels."""
    draft = tree([1, 2, 3, 4], [-1, -1, 0, 1])
    rows = np.array([one_hot(t, 6) for t in (2, 3, 5, 0, 1)])
    assert verify(draft, rows, Sampler(), [0], None) == ([1], 5, 2)
    rows[2] = one_hot(4, 6)
    assert verify(draft, rows, Sampler(), [0], None) == ([1, 3], 1, 2)
    rows[0] = one_hot(0, 6)
    assert verify(draft, rows, Sampler(), [0], None) == ([], 0, 1)
    assert verify(Draft(), rows[:1], Sampler(), [0], None) == ([], 0, 0)


def test_verify_takes_tensors():
    import torch
    draft, rows = chain([2, 3]), np.array([one_hot(t, 6, 60.0) for t in (2, 3, 5)])
    for dtype in (torch.float32, torch.bfloat16):
        for sampler in (Sampler(), Sampler(1.0), Sampler(repetition_penalty=1.1), Sampler(1.0, top_k=2)):
            got = verify(draft, torch.tensor(rows, dtype=dtype), sampler, [0], np.random.default_rng(0))
            assert got == ([0, 1], 5, 2)


# -- output distributions ------------------------------------------------------------------------------------

SAMPLERS = {
    "temperature 1": Sampler(1.0), "temperature 0.6": Sampler(0.6), "top-k": Sampler(0.9, top_k=2),
    "top-p": Sampler(1.0, top_p=0.7), "min-p": Sampler(1.0, min_p=0.25),
    "penalty": Sampler(0.8, repetition_penalty=1.7), "all": Sampler(0.8, 3, 0.9, 0.05, 1.3),
}


def with_replacement(model, sampler):
    """Two candidates at each of two levels, drawn independently: siblings may be equal."""
    class Drafter(ScriptedDrafter):
        def propose(self, tokens, gamma, rng):
            found, qs, parents, level = [], [], [], [(-1, list(tokens))]
            for _ in range(min(gamma, 2)):
                below = []
                for parent, history in level:
                    q = sampler.probs(model._logits(tuple(history)), history)
                    for _ in range(2 if parent == -1 else 1):
                        found.append(dl.draw(q, rng))
                        qs.append(q)
                        parents.append(parent)
                        below.append((len(found) - 1, history + [found[-1]]))
                level = below
            return tree(found, parents, qs)

    return Drafter(None)


LOSSLESS = {                                            # draft model -> drafter of at most two levels
    "chain": lambda m: ModelDrafter(m),
    "chain at another temperature": lambda m: ModelDrafter(m, Sampler(2.0)),
    "chain with another top-k": lambda m: ModelDrafter(m, Sampler(1.0, top_k=2)),
    "greedy chain": lambda m: ModelDrafter(m, Sampler()),
    "greedy chain with a penalty": lambda m: ModelDrafter(m, Sampler(repetition_penalty=1.5)),
    "lookup": lambda m: PromptLookup(),
    "tree": lambda m: TreeDrafter(m, TreeShape.branching([2, 1]), sample=True),
    "tree wider than top-k": lambda m: TreeDrafter(m, TreeShape.branching([3]), Sampler(1.0, top_k=2), True),
    "tree with replacement": lambda m: with_replacement(m, Sampler(1.2)),
    "deterministic tree": lambda m: TreeDrafter(m, TreeShape.branching([2, 2])),
    "confident tree": lambda m: ConfidentTreeDrafter(m, 4, 2, 2),
}


@pytest.mark.parametrize("sampling", SAMPLERS)
@pytest.mark.parametrize("kind", LOSSLESS)
def test_a_round_has_the_targets_distribution(kind, sampling, monkeypatch):
    """All ways that one round of depth two can go, its text completed to three tokens by plain sampling: the
    joint distribution of three tokens of the target, to float64 rounding."""
    sampler, prompt = SAMPLERS[sampling], [0, 1, 2, 0, 1]
    target, model = random_decoder(3, 1, 1.0), random_decoder(3, 2, 1.0)
    drafter = LOSSLESS[kind](model)

    def one_round(rng):
        drafter.start(target, sampler, prompt)
        draft = drafter.propose(prompt, 2, rng)
        check_draft(draft, 2, 3, "the drafter")
        draft.parents, parents = draft.parents, draft.parents if draft.parents is not None else range(
            -1, len(draft.tokens) - 1)
        target.rewind(0)
        target.prefill(prompt[:-1])
        rows = target.send([prompt[-1]] + list(draft.tokens), [-1] + [p + 1 for p in parents])
        path, token, _ = verify(draft, rows, sampler, prompt, rng)
        return tuple(draft.tokens[i] for i in path) + (token,)

    law, whole = outcomes(one_round), {}
    for text, weight in law.items():
        for rest, w in exact(target._logits, sampler, prompt + list(text), 3 - len(text)).items():
            whole[text + rest] = whole.get(text + rest, 0.0) + weight * w
    assert same_distribution(whole, exact(target._logits, sampler, prompt, 3))
    assert any(len(text) > 1 for text in law), "nothing was ever accepted"


@pytest.mark.parametrize("eos", [(), (0,)])
@pytest.mark.parametrize("kind, n_new", [("plain", 3), ("chain", 3), ("chain at another temperature", 3),
                                         ("greedy chain", 3), ("lookup", 3), ("tree", 2),
                                         ("tree with replacement", 2), ("deterministic tree", 3)])
def test_a_whole_run_has_the_targets_distribution(kind, n_new, eos, monkeypatch):
    """Every path through the loop itself, EOS and budget included."""
    sampler, prompt = Sampler(0.8), [0, 1, 0]
    target, model = random_decoder(3, 1, 1.0), random_decoder(3, 2, 1.0)

    def run(rng):
        if kind == "plain":
            tokens, _ = autoregressive_generate(target, prompt, n_new, rng=rng, sampler=sampler, eos=eos)
        else:
            tokens, _ = speculative_generate(target, LOSSLESS[kind](model), prompt, n_new, 2, rng=rng,
                                             sampler=sampler, eos=eos)
        return tuple(tokens[3:].tolist())

    assert same_distribution(outcomes(run), exact(target._logits, sampler, prompt, n_new, eos))


@pytest.mark.parametrize("kind", ["chain at another temperature", "tree", "greedy chain"])
def test_sampled_text_from_a_generator_has_the_targets_distribution(kind):
    """As above with a real generator, so that nothing stands in for `draw`; the seed is fixed."""
    sampler, prompt, n = Sampler(0.8), [0, 1], 3000
    target, drafter = random_decoder(3, 1, 1.0), LOSSLESS[kind](random_decoder(3, 2, 1.0))
    rng = np.random.default_rng(0)
    counts = {}
    for _ in range(n):
        text, _ = speculative_generate(target, drafter, prompt, 2, 2, rng=rng, sampler=sampler)
        text = tuple(text[2:].tolist())
        counts[text] = counts.get(text, 0) + 1
    law = exact(target._logits, sampler, prompt, 2)
    assert sum(abs(counts.get(k, 0) / n - law.get(k, 0)) for k in counts.keys() | law.keys()) / 2 < 0.05


# -- samplers ------------------------------------------------------------------------------------------------

FILTERS = ((0, 1.0, 0.0), (5, 1.0, 0.0), (1, 1.0, 0.0), (0, 0.6, 0.0), (0, 0.01, 0.0), (0, 1.0, 0.15),
           (7, 0.8, 0.05), (99, 0.9, 0.0))
WARPED = [dict(temperature=t, top_k=k, top_p=p, min_p=m, repetition_penalty=r)
          for t, (k, p, m), r in product((1.0, 0.4, 2.5), FILTERS, (1.0, 1.4, 0.7))]


def test_samplers_equal_those_of_transformers():
    import torch
    from transformers import (MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper,
                              TopKLogitsWarper, TopPLogitsWarper)
    rng = np.random.default_rng(0)
    for options in WARPED:
        sampler = Sampler(**options)
        for _ in range(6):
            logits, history = 3 * rng.standard_normal(40), rng.integers(40, size=12)
            scores, ids = torch.tensor(logits)[None], torch.tensor(history)[None]
            if sampler.repetition_penalty != 1:
                scores = RepetitionPenaltyLogitsProcessor(sampler.repetition_penalty)(ids, scores)
            scores = TemperatureLogitsWarper(sampler.temperature)(ids, scores)
            if sampler.top_k:
                scores = TopKLogitsWarper(sampler.top_k)(ids, scores)
            if sampler.top_p < 1:
                scores = TopPLogitsWarper(sampler.top_p)(ids, scores)
            if sampler.min_p:
                scores = MinPLogitsWarper(sampler.min_p)(ids, scores)
            ours, before = sampler.probs(logits, history), logits.copy()
            np.testing.assert_allclose(ours, scores.softmax(-1)[0].numpy(), rtol=1e-9, atol=1e-15)
            assert ours.dtype == np.float64 and (logits == before).all()


def test_greedy_probs_are_a_point_mass_on_the_first_maximum():
    z = np.array([1.0, 3.0, 3.0, -np.inf], np.float32)
    assert Sampler().probs(z).tolist() == [0, 1, 0, 0] and Sampler().argmax(z) == 1
    assert Sampler(repetition_penalty=2.0).probs(z, [1]).tolist() == [0, 0, 1, 0]
    assert Sampler().greedy and not Sampler(0.1).greedy


def test_filters_keep_a_token_and_a_distribution():
    z = np.array([0.0, 10.0, -np.inf, 9.0], np.float32)
    for sampler in (Sampler(1.0, top_k=1), Sampler(1.0, top_p=1e-9), Sampler(1.0, min_p=0.999),
                    Sampler(1e-3)):
        assert sampler.probs(z).tolist() == [0, 1, 0, 0]
    p = Sampler(5.0, 3, 0.999, 1e-6).probs(z)
    assert p.sum() == pytest.approx(1) and p[2] == 0


@pytest.mark.parametrize("options", [dict(temperature=-1), dict(temperature=float("nan")), dict(top_k=-1),
                                     dict(top_p=0), dict(top_p=1.1), dict(min_p=1.0), dict(min_p=-0.1),
                                     dict(repetition_penalty=0)])
def test_impossible_samplers_are_refused(options):
    with pytest.raises(BadInput) as error:
        Sampler(**options)
    assert next(iter(options)) in one_sentence(error)


# -- prompt lookup -------------------------------------------------------------------------------------------

def looked_up(tokens, gamma=4, **options):
    drafter = PromptLookup(**options)
    drafter.start(None, None, tokens)
    draft = drafter.propose(tokens, gamma)
    assert len(draft.q) == len(draft.sources) == len(draft.tokens) and draft.parents is None
    assert all(q is None for q in draft.q)
    return draft.tokens


@pytest.mark.parametrize("tokens, options, expected", [
    ([1, 2, 3, 4], {}, []),                                                  # no match: no draft, not token 0
    ([0], {}, []),
    ([7, 7], {}, [7, 7, 7, 7]),                                              # one repetition goes on
    ([1, 2, 3, 9, 1, 2, 3], {}, [9, 1, 2, 3]),
    ([5, 1, 2, 3, 5], {}, [1, 2, 3, 5]),
    ([1, 2, 3, 4, 5, 3], {}, [4, 5, 3, 4]),                        # fewer than gamma follow: copy on
    ([1, 2, 1, 2], {}, [1, 2, 1, 2]),                              # the match ends two before the end
    ([3, 4, 8, 4, 9, 3, 4], {}, [8, 4, 9, 3]),                     # the longest suffix wins over the latest
    ([3, 4, 8, 3, 4, 9, 3, 4], {}, [9, 3, 4, 9]),                  # of equally long ones, the latest
    ([1, 2, 3, 9, 5, 3, 7, 1, 2, 3], dict(max_ngram=1), [7, 1, 2, 3]),
    ([4, 2, 9, 3, 2], dict(min_ngram=2), []),                      # one token would match, two do not
    ([4, 2, 9, 0, 5, 3, 2], dict(boundary=[0]), [9, 0]),                     # not past the document's end
    ([4, 2, 0, 5, 5, 3, 2], dict(boundary=[0]), [0]),
    ([4, 2, 9, 0, 5, 3, 2], {}, [9, 0, 5, 3]),
])
def test_lookup(tokens, options, expected):
    assert looked_up(tokens, **options) == expected
    assert looked_up(tokens, 2, **options) == expected[:2]
    assert looked_up(np.array(tokens), **options) == expected


def slow_lookup(tokens, gamma, max_ngram, min_ngram):
    """The definition, by search from the end."""
    for n in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n:end] == tokens[-n:]:
                longer = list(tokens)
                while len(longer) < len(tokens) + gamma:
                    longer.append(longer[end + len(longer) - len(tokens)])
                return longer[len(tokens):]
    return []


@quick
@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40), gamma=st.integers(1, 6),
       sizes=st.tuples(st.integers(1, 3), st.integers(0, 2)), step=st.integers(1, 5))
def test_lookup_in_an_index_that_grows_equals_a_search(tokens, sizes, gamma, step):
    low, high = sizes[0], sum(sizes)
    drafter = PromptLookup(high, low)
    drafter.start(None, None, tokens[:1])
    for n in range(1, len(tokens) + 1, step):
        drafter.verified(tokens[:n], [], None)
        assert drafter.propose(tokens[:n], gamma).tokens == slow_lookup(tokens[:n], gamma, high, low)


def test_lookup_does_little_work_on_a_long_prompt():
    rng, work = np.random.default_rng(0), {}
    for size in (500, 50_000):
        tokens, drafter = Counted(rng.integers(300, size=size).tolist()), PromptLookup()
        Counted.reads = 0
        drafter.start(None, None, tokens)
        drafter.propose(tokens, 5)
        assert Counted.reads <= 8 * size, "the index reads each suffix of the prompt once"
        work[size] = []
        for _ in range(20):
            tokens.extend(rng.integers(300, size=3).tolist())
            Counted.reads = 0
            drafter.verified(tokens, [], None)
            assert drafter.propose(tokens, 5).tokens or size == 500
            work[size].append(Counted.reads)
    assert max(work[50_000]) <= 60, "a later proposal reads what is new, whatever the length"


def test_lookup_forgets_the_last_run():
    drafter = PromptLookup()
    speculative_generate(script([1, 2, 3] * 8, V), drafter, [1, 2, 3, 1, 2, 3], 9, 4)
    drafter.start(None, None, [4, 5, 6, 2])
    assert drafter.propose([4, 5, 6, 2], 4).tokens == [], "2 is followed by 3 in the last run only"
    drafter.start(None, None, [4, 2, 5, 8, 2])
    assert drafter.propose([4, 2, 5, 8, 2], 3).tokens == [5, 8, 2]


def test_lookup_is_used_when_asked_for():
    """With a drafter asked for, at least one token is drafted, and a text that repeats is copied."""
    text = [1, 2, 3, 4, 5] * 8
    _, tokens, run = run_script(PromptLookup(), 25, 4, text=text, prompt=text[:8])
    assert tokens == text[:33] and run.alpha == 1 and run.by_source == {"lookup": (20, 20)}
    with pytest.raises(BadInput):
        PromptLookup(2, 3)


# -- trees ---------------------------------------------------------------------------------------------------

def test_tree_shape():
    shape = TreeShape.branching([2, 3])
    assert len(shape) == 8 and shape.depth == 2 and shape.depths == [1, 1] + [2] * 6
    assert shape.nodes[:3] == [(-1, 0), (-1, 1), (0, 0)] and shape.children[1] == [5, 6, 7]
    assert len(TreeShape([])) == 0 and TreeShape([]).depth == 0 and TreeShape.branching([]).nodes == []
    for bad in ([(0, 0)], [(-1, 1)], [(-1, 0), (-1, 0)], [(-2, 0)]):
        with pytest.raises(BadInput):
            TreeShape(bad)
    with pytest.raises(BadInput):
        TreeShape.branching([2, 0])


@pytest.mark.parametrize("widths, counted", [
    ((1,), 1), ((1, 1), 2), ((1,) * 4, 4), ((1,) * 6, 6), ((2, 2, 2), 14), ((3, 3, 3), 39),
    ((4, 2, 2, 1), 44), ((8, 4, 2, 1), 168), ((4,) * 4, 340), ((4,), 4), ((), 0)])
def test_node_counts(widths, counted):
    lengths, nodes = tree_accept_lengths(np.zeros(10, int), widths)
    assert nodes == counted and len(lengths) == 10 - len(widths) + 1 and (lengths == len(widths)).all()


def test_accept_lengths_by_hand():
    ranks = np.array([0, 1, 0, 2, 0, 0])
    assert tree_accept_lengths(ranks, (1, 1))[0].tolist() == [1, 0, 1, 0, 2]
    assert tree_accept_lengths(ranks, (2, 2))[0].tolist() == [2, 2, 1, 0, 2]
    assert tree_accept_lengths(ranks, (4,))[0].tolist() == [1] * 6
    assert tree_accept_lengths(ranks, (3, 1, 1))[0].tolist() == [1, 2, 1, 3]
    assert tree_accept_lengths(ranks, (1,) * 7)[0].tolist() == []
    # Root: ranks 0 and 1; only rank 1 goes on, with rank 0.
    assert accept_lengths(ranks, TreeShape([(-1, 0), (-1, 1), (1, 0)])).tolist() == [1, 2, 1, 0, 1]
    both = np.stack([ranks, ranks[::-1]])
    assert tree_accept_lengths(both, (1, 1))[0].tolist() == [1, 0, 1, 0, 2] + [2, 1, 0, 1, 0]


def test_accept_lengths_and_rank_table_flatten_leading_axes():
    ranks = np.random.default_rng(0).integers(4, size=(2, 3, 9))
    flat = ranks.reshape(6, 9)
    assert tree_accept_lengths(ranks, (2, 1))[0].tolist() == tree_accept_lengths(flat, (2, 1))[0].tolist()
    assert rank_table(ranks, 3, 2).tolist() == rank_table(flat, 3, 2).tolist()


def test_draft_ranks():
    logits = np.array([[1.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0], [4.0, 3.0, 2.0, 1.0]])
    assert draft_ranks(logits, np.array([0, 1, 2])).tolist() == [0, 2]
    assert draft_ranks(logits, np.array([0, 3, 0])).tolist() == [1, 0], "ties: the lower id first, as argmax"
    assert draft_ranks(logits, np.array([0, 0, 3])).tolist() == [3, 3]
    both = draft_ranks(np.stack([logits, logits]), np.array([[0, 1, 2], [0, 3, 0]]))
    assert both.tolist() == [[0, 2], [1, 0]]


def test_draft_ranks_by_sorting():
    rng = np.random.default_rng(0)
    logits, tokens = rng.integers(5, size=(4, 30, 12)).astype(float), rng.integers(12, size=(4, 30))
    order = np.argsort(-logits, axis=-1, kind="stable")
    expected = [[int(np.flatnonzero(order[b, t] == tokens[b, t + 1])[0]) for t in range(29)]
                for b in range(4)]
    assert draft_ranks(logits, tokens).tolist() == expected


def test_rank_table_by_hand():
    ranks = np.array([0, 1, 0, 2, 0, 0])                # pairs (0,1) (1,0) (0,2) (2,0) (0,0)
    np.testing.assert_allclose(rank_table(ranks, 2, 1), [[3 / 5], [1 / 3]])
    np.testing.assert_allclose(rank_table(ranks, 2, 2), [[3 / 5, 1 / 5], [2 / 4, 1 / 4]])
    np.testing.assert_allclose(rank_table(np.full(6, 9), 2, 2), np.zeros((2, 2)))


@quick
@given(seed=st.integers(0, 10_000), depth=st.integers(1, 4))
def test_rank_table_predicts_a_chain_exactly(seed, depth):
    ranks = np.random.default_rng(seed).geometric(0.5, size=(3, 40)) - 1
    expected = np.cumprod(rank_table(ranks, depth, 1)[:, 0]).sum()
    assert tree_accept_lengths(ranks, (1,) * depth)[0].mean() == pytest.approx(expected)


@pytest.mark.parametrize("widths", [(4,), (1, 1, 1), (2, 2, 1), (3, 1, 2), (), "irregular"])
def test_accept_lengths_are_those_of_a_real_verification(widths):
    """Ranks of the target's greedy text under the draft predict what is accepted from each start."""
    shape = IRREGULAR if widths == "irregular" else TreeShape.branching(widths)
    target, draft = random_decoder(6, 3), random_decoder(6, 4)
    text, _ = autoregressive_generate(target, [0, 1], 40)
    predicted = accept_lengths(draft_ranks(draft.send(text), text), shape)
    for start in range(len(text) - 1 - shape.depth):
        tokens, run = tree_generate(target, TreeDrafter(draft, shape), text[:start + 1], shape.depth + 1)
        if start + len(tokens[start + 1:]) < len(text) and start >= 1:
            assert run.rounds[0].accepted == predicted[start], start
            assert run.rounds[0].drafted == len(shape)


@pytest.mark.parametrize("shape", [[4], [1] * 5, [], [2, 2, 2], [3, 1]])
def test_tree_forwards_and_keeps(shape):
    """One send per round, the root first; commit gets the path; nothing else touches the cache."""
    target, draft = random_decoder(6, 3), random_decoder(6, 4)
    drafter = TreeDrafter(draft, TreeShape.branching(shape))
    tokens, run = tree_generate(target, Watched(drafter, target), [0, 1, 2], 40)
    check(target, tokens, run, [0, 1, 2])
    assert target.called("rewind") == [0]
    for sent, nodes, r in zip(target.called("send"), target.called("commit"), run.rounds, strict=True):
        assert len(sent[0]) == r.drafted + 1 and sent[1][0] == -1
        assert nodes[0] == 0 and len(nodes) == r.accepted + 1


def test_duplicate_siblings_are_harmless():
    """Both say the right token: the walk takes the first, and only its children count."""
    def plan(tokens, gamma):
        a, b = TEXT[len(tokens):len(tokens) + 2]
        return tree([a, a, b, (b + 1) % V], [-1, -1, 0, 1]) if gamma > 1 else tree([a, a], [-1, -1])

    target = script(TEXT, V)
    tokens, run = tree_generate(target, Watched(ScriptedDrafter(plan), target), PROMPT, 12)
    check(target, tokens, run, PROMPT)
    assert tokens.tolist() == TEXT[:15] and [r.accepted for r in run.rounds] == [2, 2, 2, 2]


def test_an_eos_inside_a_tree():
    for at in range(3, 8):
        text = [t if i != at else 15 for i, t in enumerate(TEXT)]
        target = script(text, V)
        drafter = TreeDrafter(script(text, V), TreeShape.branching([2, 1, 1, 1]))
        tokens, run = tree_generate(target, Watched(drafter, target), PROMPT, 20, eos={15})
        check(target, tokens, run, PROMPT)
        assert tokens.tolist() == text[:at + 1] and run.stop == "eos"


@pytest.mark.parametrize("n_new", [1, 2, 3, 4])
def test_a_tree_within_the_budget_and_the_context(n_new):
    for options, wanted in ((dict(), n_new), (dict(max_length=3 + n_new), 20)):
        target = script(TEXT, V, **options)
        drafter = TreeDrafter(script(TEXT, V), TreeShape.branching([2, 2, 2]))
        tokens, run = tree_generate(target, Watched(drafter, target), PROMPT, wanted)
        check(target, tokens, run, PROMPT)
        assert tokens.tolist() == TEXT[:3 + n_new]


def test_tree_drafter_takes_the_likeliest_children_in_order():
    target, draft = random_decoder(6, 3), random_decoder(6, 4)
    drafter = TreeDrafter(draft, TreeShape.branching([3, 2]))
    drafter.start(target, Sampler(), [0, 1])
    proposed = drafter.propose([0, 1], 9, None)
    ranked = lambda history, n: np.argsort(-draft._logits(history), kind="stable")[:n].tolist()  # noqa: E731
    assert proposed.tokens[:3] == ranked((0, 1), 3) and proposed.parents[:3] == [-1] * 3
    for node in range(3):
        below = [proposed.tokens[i] for i in proposed.children()[node]]
        assert below == ranked((0, 1, proposed.tokens[node]), 2)
    assert draft.length == 2, "between rounds it holds the sequence alone"
    drafter.verified([0, 1, 5], [], None)
    assert draft.tokens == [0, 1] and not draft.pending


def test_sampled_siblings_differ_and_carry_the_q_they_were_drawn_from():
    target, draft = random_decoder(6, 3), random_decoder(6, 4)
    sampler = Sampler(1.5, repetition_penalty=1.5)          # a penalty sees the tokens above in the tree
    drafter = TreeDrafter(draft, TreeShape.branching([3, 2]), sampler, sample=True)
    for seed in range(5):
        drafter.start(target, Sampler(1.0), [0, 1])
        proposed = drafter.propose([0, 1], 2, np.random.default_rng(seed))
        for node, children in proposed.children().items():
            history = (0, 1) + tuple(tokens_to(proposed, node))
            q = sampler.probs(draft._logits(history), history)
            assert len({proposed.tokens[i] for i in children}) == len(children)
            for i in children:
                np.testing.assert_allclose(proposed.q[i], q / q.sum())
                q = q.copy()
                q[proposed.tokens[i]] = 0


def test_confident_tree_is_the_likeliest_paths():
    """Wide enough to see everything, it equals a sort of all paths by probability."""
    target, draft = random_decoder(4, 3), random_decoder(4, 4)
    drafter = ConfidentTreeDrafter(draft, 9, 3, width=64)
    drafter.start(target, Sampler(), [0, 1])
    proposed = drafter.propose([0, 1], 9, None)
    paths = {}
    for depth in (1, 2, 3):
        for path in product(range(4), repeat=depth):
            p = [Sampler(1.0).probs(draft._logits((0, 1) + path[:i]))[t] for i, t in enumerate(path)]
            paths[path] = np.prod(p)
    best = sorted(paths, key=lambda path: -paths[path])[:9]
    assert {tuple(tokens_to(proposed, i)) for i in range(9)} == set(best)


def test_confident_tree_keeps_to_its_nodes_depth_and_width():
    target, draft = random_decoder(30, 3), random_decoder(30, 4)
    for n_nodes, depth, width in ((5, 3, 2), (12, 2, 4), (1, 1, 1), (40, 3, 3)):
        target.calls.clear()
        drafter = ConfidentTreeDrafter(draft, n_nodes, depth, width)
        tokens, run = tree_generate(target, Watched(drafter, target), [0], 60)
        check(target, tokens, run, [0])
        seen = width + (depth - 1) * width * width
        assert max(r.drafted for r in run.rounds) == min(n_nodes, seen)
        assert max(r.tested for r in run.rounds) <= depth


SEQUOIA = (0.60, 0.15, 0.07, 0.04, 0.02)


def test_best_tree_reproduces_the_published_numbers():
    """FACTS: the root counts as a node there, and is not among the drafted nodes here."""
    published = {1: 1, 2: 1.6, 3: 1.96, 4: 2.176, 5: 2.326, 8: 2.6356, 16: 3.076, 32: 3.498, 64: 3.8942}
    for n, expected in published.items():
        shape, value = best_tree(SEQUOIA, n - 1)
        assert len(shape) == n - 1 and value == pytest.approx(expected, abs=6e-4 if n > 8 else 1e-9)
        assert tree_value(shape, np.tile(SEQUOIA, (64, 1))) == pytest.approx(value)
    chains = {1: 1, 2: 1.6, 3: 1.96, 4: 2.176, 5: 2.3056, 8: 2.458, 16: 2.4993, 32: 2.5, 64: 2.5}
    for n, expected in chains.items():
        shape, value = best_tree(SEQUOIA[:1], n - 1)
        assert shape.depth == n - 1 and value == pytest.approx(expected, abs=6e-5)


def tree_value(shape, table):
    """1 + the sum over nodes of the product of probabilities from the root."""
    reach = {-1: 1.0}
    for i, (parent, rank) in enumerate(shape.nodes):
        reach[i] = reach[parent] * table[shape.depths[i] - 1][rank]
    return sum(reach.values())


def all_trees(n, depth, width):
    """Every tree of n nodes, at most `depth` deep, no node with more than `width` children: nested tuples."""
    if n == 0:
        return [()]
    if depth == 0 or width == 0:
        return []
    found = []
    for first in range(1, n + 1):                           # nodes of the first child, itself included
        for below in all_trees(first - 1, depth - 1, WIDEST):
            found += [((below,) + rest) for rest in all_trees(n - first, depth, width - 1)]
    return found


WIDEST = 3


def value_of(children, table, depth=0):
    return sum(table[depth][k] * (1.0 + value_of(child, table, depth + 1))
               for k, child in enumerate(children))


@quick
@given(seed=st.integers(0, 10_000), n=st.integers(0, 6), depth=st.integers(1, 4), ordered=st.booleans())
def test_best_tree_beats_every_other_tree(seed, n, depth, ordered):
    table = np.random.default_rng(seed).dirichlet(np.ones(WIDEST + 1), size=depth)[:, :WIDEST]
    if ordered:
        table = -np.sort(-table, axis=1)
    every = all_trees(n, depth, WIDEST)
    shape, value = best_tree(table, n)
    assert shape.depth <= depth and len(shape) <= n
    assert tree_value(shape, table) == pytest.approx(value)
    if every:
        assert value == pytest.approx(1 + max(value_of(t, table) for t in every)) and len(shape) == n
    else:                                                   # no room for n nodes: the fullest tree
        assert len(shape) == sum(WIDEST ** d for d in range(1, depth + 1))


def test_best_tree_of_one_row_goes_as_deep_as_it_likes():
    assert best_tree([0.9], 6)[0].depth == 6 and best_tree([[0.9]] * 2, 6)[0].depth == 2
    assert best_tree([0.5, 0.5], 2)[0].depths in ([1, 1], [1, 2])
    assert best_tree([0.3, 0.3], 2)[0].depths == [1, 1]
    np.testing.assert_allclose(best_tree(np.tile(SEQUOIA, (20, 1)), 20)[1], best_tree(SEQUOIA, 20)[1])


@pytest.mark.parametrize("probabilities, n", [([0.5], -1), ([0.6, 0.5], 3), ([-0.1], 3), ([], 3),
                                              ([[[0.5]]], 3)])
def test_best_tree_refuses_the_impossible(probabilities, n):
    with pytest.raises(BadInput) as error:
        best_tree(probabilities, n)
    one_sentence(error)


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


# -- bad input that reaches the loop late ------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [-1, np.int64(-2), lambda run: -3])
def test_a_negative_draft_length_is_refused_however_it_is_given(gamma):
    with pytest.raises(BadInput) as error:
        speculative_generate(script(TEXT, V), from_text(TEXT), PROMPT, 9, gamma)
    assert "gamma" in one_sentence(error)


def test_one_eos_id_may_be_given_without_a_list():
    eos = TEXT[len(PROMPT) + 2]
    runs = [autoregressive_generate(script(TEXT, V), PROMPT, 9, eos=ids)[0].tolist() for ids in (eos, (eos,))]
    assert runs[0] == runs[1] and runs[0][-1] == eos


@pytest.mark.parametrize("shape", [(0, 2, 2), (4, 0, 2), (4, 2, -1)])
def test_a_confident_tree_without_extent_is_refused(shape):
    with pytest.raises(BadInput) as error:
        ConfidentTreeDrafter(random_decoder(9, 1), *shape)
    one_sentence(error)


def test_the_candidates_of_a_tree_are_chosen_after_the_repetition_penalty():
    """With draft = target, a chain of first candidates is accepted whole only if both see the same penalty."""
    sampler = Sampler(repetition_penalty=5.0)
    for seed in range(5):
        target, draft = random_decoder(9, seed), random_decoder(9, seed)
        run = tree_generate(target, TreeDrafter(draft, TreeShape.branching((1,) * 4)), [0, 1, 2], 40, sampler=sampler)[1]
        assert run.alpha == 1


def test_a_long_prompt_is_prefilled_by_the_draft_too():
    """Its logits are read by nobody: at most one row of the prompt's is asked for."""
    lm, other = (TransformerLM(init_params(QCFG, seed), QCFG) for seed in (0, 0))
    asked, send = [], other.send
    other.send = lambda tokens, parents=None: (asked.append(len(tokens)), send(tokens, parents))[1]
    prompt = np.arange(100) % QCFG.vocab_size
    assert speculative_generate(lm, ModelDrafter(other), prompt, 20, 3)[1].alpha == 1
    assert max(asked) <= 2


@pytest.mark.parametrize("eos", [np.int64(TEXT[5]), [np.int64(TEXT[5])], {TEXT[5]}])
def test_eos_ids_may_be_numpy_numbers(eos):
    assert autoregressive_generate(script(TEXT, V), PROMPT, 9, eos=eos)[0].tolist() == TEXT[:6]


def test_no_eos_may_be_given_as_none():
    assert len(autoregressive_generate(script(TEXT, V), PROMPT, 9, eos=None)[0]) == 12


@pytest.mark.parametrize("prompt", [np.array([PROMPT, PROMPT]), [1.7, 2.2], "abc", 3])
def test_a_prompt_is_one_sequence_of_whole_numbers(prompt):
    with pytest.raises(BadInput) as error:
        autoregressive_generate(script(TEXT, V), prompt, 3)
    one_sentence(error)


def test_greedy_decoding_refuses_nan_rows():
    """Plain and speculative greedy text would agree on a broken model's argmax of NaN."""
    target = script(TEXT, V)
    send = target.send
    target.send = lambda tokens, parents=None: np.where(np.arange(V) == 3, np.nan, send(tokens, parents))
    with pytest.raises(BadInput, match="NaN"):
        autoregressive_generate(target, PROMPT, 3)
    torch = pytest.importorskip("torch")
    assert dl.greedy_ids(torch.tensor([[0.0, 2.0, 2.0], [1.0, 0.0, -1.0]])) == [1, 0]
    with pytest.raises(BadInput, match="NaN"):
        dl.greedy_ids(torch.tensor([[0.0, 2.0], [1.0, float("nan")]]))


def test_the_clock_waits_for_the_device():
    """Work that a device has only been asked for belongs to what asked for it: prefill, then verification."""
    target, order = script(TEXT, V), []
    prefill = target.prefill
    target.prefill = lambda tokens: (order.append("prefill"), prefill(tokens))[1]
    target.synchronize = lambda: order.append("synchronize")
    autoregressive_generate(target, PROMPT, 2)
    assert order == ["prefill", "synchronize", "synchronize", "synchronize"]


def test_shapes_and_ranks_that_do_not_fit_are_refused():
    with pytest.raises(BadInput):
        draft_ranks(np.zeros((3, 5)), [1, 2])
    with pytest.raises(BadInput):
        tree_accept_lengths([0, -1, 0], (1, 1))
    with pytest.raises(BadInput):
        best_tree([np.nan], 3)
    assert np.isnan(Run().tau) and np.isnan(Run().ttft)


@pytest.mark.parametrize("widths", [(1, 1, 1), (1,), (2, 1), ()])
def test_accept_lengths_to_the_end_by_hand(widths):
    """At each start: walk on while the next token is on the tree, but leave the text's last token to the target."""
    shape, ranks = TreeShape.branching(widths), np.random.default_rng(3).integers(3, size=40)
    for text in (ranks, ranks[:1], np.zeros(5, int)):
        expected = []
        for i in range(len(text)):
            deep = min(len(widths), len(text) - 1 - i)
            expected.append(next((d for d in range(deep) if text[i + d] >= widths[d]), deep))
        assert accept_lengths_to_end(text, shape).tolist() == expected
