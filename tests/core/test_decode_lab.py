"""The loop on scripted texts: where it stops, what it counts, what it refuses."""

import numpy as np
import pytest

import decode_lab as dl
from console import BadInput
from decode_lab import Draft, Sampler, autoregressive_generate, speculative_generate
from lab.drafters.model import ModelDrafter
from lab.measure.scripted import FakeDecoder, ScriptedDrafter, chain, from_text, one_hot, script, tree
from loops import PROMPT, TEXT, V, check, one_sentence, run_script

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
    (dict(prompt=[]), "no tokens"), (dict(n_new=0), "n_new is 0"), (dict(n_new=-3), "-3"),
    (dict(gamma=-1), "-1"),
    (dict(gamma=np.int64(-1)), "-1"), (dict(gamma=lambda run: -1), "-1"), (dict(prompt=[1, V]), str(V)),
    (dict(prompt=[-1]), "-1"), (dict(temperature=-0.1), "temperature is -0.1"), (dict(prompt=[1] * 40), "40"),
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
