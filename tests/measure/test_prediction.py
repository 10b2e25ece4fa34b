"""Methods, turns, costs and predictions on small random models: against the loops, an uncached forward, by hand."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from types import SimpleNamespace

from transformers import LlamaConfig, LlamaForCausalLM

from decode_lab import Round, Run, Sampler, autoregressive_generate, speculative_generate, tree_generate
from lab.drafters.best_tree import draft_ranks
from lab.drafters.draft_length import CostAware
from lab.drafters.lookup import PromptLookup, SuffixLookup
from lab.drafters.model import ModelDrafter
from lab.drafters.trees import TreeDrafter, TreeShape
from lab.measure import costs, engines, llama_cpp, prediction, timing, turns
from lab.measure import generate as rivals
from lab.measure.along import agreements, read_along
from lab.measure.compare import Compared
from lab.measure.costs import StepCurve
from lab.measure.turns import Method
from lab.models.decoder import HFDecoder
from lab.models.layers import LayerDraft
from lab.models.rounded import quantized

V = 32


pytestmark = pytest.mark.usefixtures("one_thread")


def build(seed=0, layers=3, vocab_size=V):
    """A Llama that repeats itself, so that a lookup finds something, and whose text depends on the cache."""
    torch.manual_seed(seed)
    return HFDecoder(LlamaForCausalLM(LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=256, initializer_range=0.12, bos_token_id=None,
        eos_token_id=None, pad_token_id=None)).eval(), name=f"model {seed}")


@pytest.fixture(scope="module")
def target():
    return build()


@pytest.fixture(scope="module")
def models(target):
    """Drafts of all kinds: on the target's cache, on one of their own, and another model's."""
    return {"first": LayerDraft(target, range(2)), "skips": LayerDraft(target, (0, 2)),
            "int4": quantized(target, "int4-g32"), "small": build(1, layers=1)}


def prompt(n=9, seed=0):
    return np.random.default_rng(seed).integers(1, V, n).tolist()


def counts(run):
    return [(r.drafted, r.tested, r.accepted, r.first) for r in run.rounds]


# -- methods -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["plain", "chain", "policy", "tree"])
@pytest.mark.slow
def test_a_method_is_the_loop_with_its_drafter(target, models, kind):
    draft, shape = models["int4"], TreeShape.branching((2, 2))
    method, (text, run) = {
        "plain": lambda: (Method(), autoregressive_generate(target, prompt(), 12)),
        "chain": lambda: (Method(ModelDrafter(draft), 3),
                          speculative_generate(target, ModelDrafter(draft), prompt(), 12, 3)),
        "policy": lambda: (Method(ModelDrafter(draft), lambda run: len(run.rounds) % 3),
                           speculative_generate(target, ModelDrafter(draft), prompt(), 12,
                                                    lambda run: len(run.rounds) % 3)),
        "tree": lambda: (Method(TreeDrafter(draft, shape), None, shape),
                         tree_generate(target, TreeDrafter(draft, shape), prompt(), 12))}[kind]()
    again, counted = method(target, prompt(), 12)
    assert again.tolist() == text.tolist() and counts(counted) == counts(run)
    assert (run.drafted > 0) == (kind != "plain")
    stop = text[len(prompt()) + 4].item()                       # options go on to the loop
    short, ended = method(target, prompt(), 12, eos=(stop,))
    assert ended.stop == "eos" and short.tolist() == text[:len(short)].tolist() and short[-1] == stop
    sampled = [method(target, prompt(), 12, rng=np.random.default_rng(seed), sampler=Sampler(2.0))[0].tolist()
               for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2] and sampled[0] != text.tolist()


def test_transformers_generate_is_called_as_a_method_is(target, models):
    text, _ = Method()(target, prompt(), 10)
    for how in ({}, {"as_loaded": True}, {"prompt_lookup": 3}, {"assistant": models["int4"]}):
        tokens, run = engines.generate_method(**how)(target, prompt(), 10, eos=target.eos)
        assert tokens.tolist() == text.tolist() and run.n_tokens == 10


# -- what is read of drafts ----------------------------------------------------------------------------------

class Noted:
    """Passes everything on and notes which forwards of one token were made, and behind how many others."""

    def __init__(self, model, name, calls):
        self.model, self.note = model, lambda ids: calls.append((name, model.length, list(ids)))

    def __getattr__(self, name):
        return getattr(self.model, name)

    def send(self, ids, parents=None):
        self.note(ids)
        return self.model.send(ids, parents)


def test_steps_are_timed_in_turn_behind_the_context(target, models):
    calls, ids = [], prompt(30)
    noted = [Noted(model, name, calls) for name, model in {"target": target, **models}.items()]
    for left in (0, 7, 25):                                     # whatever the models held before
        calls.clear()
        for model in (target, models["int4"]):
            model.rewind(0)
            if left:
                model.prefill(prompt(left, 3))
        seconds = timing.step_seconds(noted, ids, 20, 4)
        assert seconds.shape == (5, 4) and (seconds > 0).all()
        assert calls == [(model, 20, [ids[20]]) for _ in range(4 + 2) for model in ("target", *models)]
        assert [model.length for model in noted] == [20] * 5
        for model in (target, models["int4"], models["small"]):  # it is the context that the cache holds
            row = model.send(ids[20:21])[-1]
            model.rewind(0)
            torch.testing.assert_close(row, model.send(ids[:21])[-1], rtol=0, atol=1e-4)


def cacheless(model, ids):
    with torch.inference_mode():
        return model(torch.tensor(ids)[None], use_cache=False).logits[0].double().numpy()


@pytest.mark.parametrize("n_prompt", [1, 9])
def test_drafts_read_along_say_what_they_would_have_drafted(target, models, n_prompt):
    seen, start = {}, prompt(n_prompt, 1)
    text = read_along(target, models, start, 14, lambda name, p, q: seen.update({name: (p, q)}))
    assert text == autoregressive_generate(target, start, 14)[0].tolist() and list(seen) == list(models)
    wanted = cacheless(target.model, text)[n_prompt - 1:-1]
    for name, (p, q) in seen.items():
        assert p.dtype == q.dtype == np.float64 and p.shape == q.shape == (14, V)
        np.testing.assert_allclose(p, wanted, atol=1e-4)
        assert p.argmax(-1).tolist() == text[n_prompt:]
        if name in ("int4", "small"):
            np.testing.assert_allclose(q, cacheless(models[name].model, text)[n_prompt - 1:-1], atol=1e-4)
        drafter = ModelDrafter(models[name])                # and its first guess of a real draft there
        for i in range(0, 14, 4):
            at = text[:n_prompt + i]
            drafter.start(target, Sampler(), at)
            target.rewind(0)
            if len(at) > 1:
                target.prefill(at[:-1])
            assert drafter.propose(at, 1, None).tokens == [q[i].argmax()]
            drafter.verified(at, [], None)
    assert np.abs(seen["first"][1] - seen["first"][0]).max() > 0.1
    assert np.abs(seen["first"][1] - seen["skips"][1]).max() > 0.1


def test_reading_along_ends_where_the_text_does(target, models, monkeypatch):
    whole = autoregressive_generate(target, prompt(), 14)[0].tolist()
    stop = whole[9 + 5]
    monkeypatch.setattr(target, "eos", (stop,))
    rows, start = [], prompt()
    text = read_along(target, models, start, 14, lambda name, p, q: rows.append((len(p), len(q))))
    assert text == autoregressive_generate(target, start, 14, eos=(stop,))[0].tolist() and text[-1] == stop
    assert rows == [(len(text) - 9,) * 2] * len(models) and len(text) < len(whole)
    monkeypatch.setattr(target, "eos", (start[-1],))           # one that ends the prompt ends no text
    assert len(read_along(target, {}, start, 3, None)) > len(start)


def test_a_draft_with_more_output_rows_is_read_over_the_target_s_ids(target):
    """As where the same tokenizer was padded to another size."""
    wide, seen = build(2, vocab_size=V + 16), {}
    read_along(target, {"wide": wide}, prompt(), 3, lambda name, p, q: seen.update({name: q}))
    text = autoregressive_generate(target, prompt(), 3)[0].tolist()
    np.testing.assert_allclose(seen["wide"], cacheless(wide.model, text)[8:-1, :V], atol=1e-4)


def test_agreement_is_read_off_ranks_and_overlaps(target, models):
    starts, rows = [prompt(), prompt(7, 3)], {}
    texts, drafts = agreements(target, models, starts, 5, 2.0)
    for i, start in enumerate(starts):
        assert texts[i] == read_along(target, models, start, 5, lambda name, p, q: rows.update({(name, i): (p, q)}))
    for name, found in drafts.items():
        overlaps = []
        for i in range(2):
            p, q = rows[name, i]
            assert found.ranks[i].tolist() == [int((b > b[a.argmax()]).sum()) for a, b in zip(p, q)]
            both = [np.exp(z / 2 - (z / 2).max(-1, keepdims=True)) for z in (p, q)]
            overlaps.append(np.minimum(*(e / e.sum(-1, keepdims=True) for e in both)).sum(-1))
        assert found.alpha == pytest.approx(np.concatenate(overlaps).mean())
        assert found.among(1) == np.mean(np.concatenate(found.ranks) == 0) and found.among(V) == 1


# -- what is predicted ----------------------------------------------------------------------------------------

def test_a_curve_of_steps_is_straight_between_its_readings():
    t = StepCurve({5: 3.0, 1: 2.0, 9: 7.0})
    assert t.step_s == 2.0 and [t(1), t(3), t(5), t(8), t(9)] == [1.0, 1.25, 1.5, 3.0, 3.5]
    np.testing.assert_allclose(t(np.array([1, 2])), [1.0, 1.125])


def test_costs_are_medians_over_all_readings(monkeypatch):
    """Read before and after: in the second reading the machine is twice as slow, and c stays."""
    paces = iter([1.0, 1.0, 2.0, 2.0, 2.0, 2.0])
    monkeypatch.setattr(timing, "step_times", lambda target, ids, context, sent, repeats: next(paces) * np.array(
        [[0.25 * (n + 3)] * repeats for n in sent]))
    monkeypatch.setattr(timing, "step_seconds", lambda models, ids, context, repeats: next(paces) * np.array(
        [[{"target": 1.0, "half": 0.5}[model]] * repeats for model in models]))
    read = costs.Costs("target", [7], 4, (5, 3), 2, {"half": "half"})
    read.read()
    assert read.t.seconds == {1: 1.0, 3: 1.5, 5: 2.0} and read.c == {"half": 0.5} and read.step_s == 1.0
    read.read()
    read.read()
    assert read.t.seconds == {1: 2.0, 3: 3.0, 5: 4.0} and read.t(5) == 2.0
    assert read.c == {"half": 0.5} and read.step_s == 2.0
    assert read.samples["seconds of a step"]["half"].tolist() == [0.5] * 2 + [1.0] * 4
    assert read.samples["seconds of sending n tokens"][3].tolist() == [1.5] * 2 + [3.0] * 4


T = StepCurve({1: 2.0, 2: 2.4, 5: 3.0, 9: 4.0})


def test_what_a_chain_and_a_tree_are_predicted_to_bring_and_to_take(target):
    ranks = np.array([0, 0, 1, 0, 3, 0, 0])
    chain = Method(None, 2, TreeShape.branching((1, 1)), "draft")
    predicted = prediction.predict(chain, T, {"draft": 0.25, "other": 9.0}, target, None, 0, ranks)
    # From five starts two tokens are drafted, from the next one, then none. Accepted: 2, 1, 0, 1, 0, 1, 0.
    assert predicted == pytest.approx([1 + 5 / 7, 0.25 * 11 / 7, (5 * T(3) + T(2) + T(1)) / 7])
    # Nodes: 0 and 1 under the root, 2 and 3 under 0. One forward for the root and one for node 0.
    tree = Method(None, None, TreeShape([(-1, 0), (-1, 1), (0, 0), (0, 1)]), "draft")
    predicted = prediction.predict(tree, T, {"draft": 0.25}, target, None, 0, ranks)
    # Accepted: 2, 2, 1, 1, 0, 1, 0.
    assert predicted == pytest.approx([1 + 7 / 7, 0.25 * 11 / 7, (5 * T(5) + T(3) + T(1)) / 7])
    # With both nodes of the first level expanded, the second forward holds two tokens.
    tree = Method(None, None, TreeShape.branching((2, 2)), "draft")
    predicted = prediction.predict(tree, T, {"draft": 0.25}, target, None, 0, ranks)
    assert predicted[1:] == pytest.approx([0.25 * (5 * 2.2 + 1) / 7, (5 * T(7) + T(3) + T(1)) / 7])


def test_a_tree_of_no_nodes_still_asks_its_draft(target, models):
    """As the best tree of a draft that is never right: the drafter reads the root before it knows."""
    empty = TreeShape([])
    predicted = prediction.predict(Method(None, None, empty, "d"), T, {"d": 0.5}, target, None, 0, np.array([7, 7]))
    assert predicted == pytest.approx([1, 0.25, 1])                 # from the second start on there is no room to draft
    calls = []
    tree_generate(target, TreeDrafter(Noted(models["small"], "d", calls), empty), prompt(), 5)
    assert len(calls) == 4                                      # one per round; the last has no room to draft


def test_a_text_shorter_than_the_draft_is_refused_past_its_end(target):
    chain = Method(None, 5, TreeShape.branching((1,) * 5), "d")
    predicted = prediction.predict(chain, T, {"d": 0.1}, target, None, 0, np.array([0, 0, 4]))
    assert predicted == pytest.approx([2, 0.1, (T(3) + T(2) + T(1)) / 3])


@pytest.mark.parametrize("name", ["chain", "tree"])
@pytest.mark.slow
def test_ranks_predict_the_rounds_of_a_real_run(target, models, name):
    """Over all starts; so the first round of a run from each start has what is predicted on average."""
    ranks, draft, n = [], models["int4"], 12
    text = read_along(target, {"d": draft}, prompt(), n, lambda name, p, q: ranks.extend(
        draft_ranks(np.append(q, q[-1:], 0), [0, *p.argmax(-1)])))
    shape = TreeShape.branching((1, 1, 1) if name == "chain" else (2, 2, 1))
    method = Method(ModelDrafter(draft), 3, shape, "d") if name == "chain" else Method(
        TreeDrafter(draft, shape), None, shape, "d")
    predicted = prediction.predict(method, T, {"d": 0.3}, target, text, 9, np.array(ranks))
    first = [method(target, text[:9 + i], n - i)[1].rounds[0] for i in range(n)]
    assert predicted[0] == pytest.approx(1 + np.mean([r.accepted for r in first]))
    drafted = [r.drafted for r in first]
    assert len(set(drafted)) > 2 and predicted[2] == pytest.approx(np.mean([T(k + 1) for k in drafted]))
    if name == "chain":
        assert predicted[1] == pytest.approx(0.3 * np.mean(drafted))
    assert 1.3 < predicted[0] < 4


@pytest.mark.parametrize("kind", ["lookup", "suffixes"])
def test_a_lookup_is_predicted_the_rounds_that_a_real_run_has(target, kind):
    suffixes = SuffixLookup()
    drafter, how = (PromptLookup(), {}) if kind == "lookup" else (suffixes, {"drafter": suffixes})
    method = Method(drafter, CostAware(T.seconds, gamma_max=8, **how))
    text, run = method(target, prompt(20), 40)
    assert run.later().accepted > 3                            # else there is nothing to predict
    predicted = prediction.predict(method, T, {}, target, text, 20)
    assert predicted[0] == pytest.approx(run.later().tau)
    assert predicted[2] == pytest.approx(np.mean([T(r.drafted + 1) for r in run.later().rounds]))
    assert 0 < predicted[1] < 0.01                                  # in steps of T's 2 seconds
    assert run.tau != pytest.approx(run.later().tau)


@pytest.mark.slow
def test_a_library_at_its_best(target, models, monkeypatch):
    """Of its settings the one whose rounds take the least time at these costs, with both kernels."""
    start = prompt(20)
    text = autoregressive_generate(target, start, 30)[0].tolist()
    cheap, expensive = StepCurve({1: 1.0, 17: 1.0}), StepCurve({1: 1.0, 2: 9.0, 17: 99.0})
    for t, c in ((cheap, 0.0), (expensive, 1.0)):
        found = engines.generate_contenders(target, models["small"], start, 30, t, c)
        generate, loaded, lookup, lookup_loaded, assisted = found
        assert (generate, loaded, lookup_loaded) == ("generate", "generate, loaded", f"{lookup}, loaded")
        assert [x.way for x in found.values()] == ["generate", "generate", "lookup", "lookup", "assisted"]
        assert [x.kernels for x in found.values()] == ["packed", "loaded", "packed", "loaded", "packed"]
        assert [x.c for x in found.values()] == [None] * 4 + [c]
        for name, method in found.items():
            assert method(target, start, 30, target.eos)[0].tolist() == text, name
        speeds = {name: prediction.predict_rounds(engines.generate_method(**how)(target, start, 30)[1], t).speedup
                  for name, how in engines.LOOKUPS.items()}
        assert speeds[lookup] == max(speeds.values())


def test_llama_cpp_runs_on_as_many_threads_as_the_others(monkeypatch):
    """Its rows are there where its package and a GGUF file are."""
    made, loaded = rivals.Rival(np.arange(3), Run(), 0.0), []

    def engine(path, *, threads, **how):
        loaded.append((path, threads, how))
        return lambda prompt, n, eos: made

    monkeypatch.setattr(llama_cpp, "llama_cpp", engine)
    for installed, file in ((False, "x.gguf"), (True, None)):
        monkeypatch.setattr(llama_cpp, "has_llama_cpp", lambda: installed)
        assert engines.llama_contenders(file) == {}
    plain, lookup = engines.llama_contenders("x.gguf").values()
    assert (plain.way, lookup.way, lookup.kernels) == ("llama.cpp", "llama.cpp lookup", "its own") and loaded == []
    for threads in (1, 1, 3, 1):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        assert plain(None, [1], 2) == (made.tokens, made.run)
    assert loaded == [("x.gguf", n, {}) for n in (1, 3, 1)]


def test_rounds_that_are_counted_have_a_predicted_speed():
    rounds = [Round(9, 9, 9, 0.0, 9.0, first=True), Round(4, 3, 2, 0.0, 9.0), Round(0, 0, 0, 0.0, 9.0)]
    predicted = prediction.predict_rounds(Run(rounds), T, 0.5)
    assert predicted == pytest.approx([2, 0.5 * 2, (T(5) + T(1)) / 2])
    slower = prediction.predict_rounds(Run(rounds), T, 0.5, step_s=1.0)         # T's step takes 2 seconds
    assert slower == pytest.approx([2, 2 * predicted.draft, 2 * predicted.verify])


def test_a_compared_row_is_explained_by_its_pieces():
    def run(round_s, draft_s=0.0, drafted=0, accepted=0):
        rounds = [Round(0, 0, 0, 0.0, 50.0, first=True), Round(drafted, drafted, accepted, draft_s, round_s)]
        return turns.Made(np.zeros(1), Run(rounds))
    paces = (1.0, 2.0, 3.0, 1.0, 1.0)                           # each run at the pace of the plain runs around it
    row = Compared("a text", "b", [run(1.5 * k, 0.5 * k, 3, 3) for k in paces], [run(0.9 * k) for k in paces],
                   [run(1.1 * k) for k in paces])
    found = prediction.explain_compared(prediction.Pieces(4.0, 0.5, 1.25), row)
    assert found.measured == pytest.approx([4, 0.5, 1.5]) and found.speedup == pytest.approx(2.0)
    assert (found.drafts, found.alpha) == (3, 1.0) and found.quartiles == pytest.approx((2, 2))
    method = Method(None, 1, TreeShape.branching((1,)), "d")
    costs = SimpleNamespace(t=T, c={"d": 0.25})
    both = prediction.explain_rows([row], {"b": method}, costs, None, None, 0, {"d": np.array([0, 0, 4])})
    assert both["b"].predicted == prediction.predict(method, T, {"d": 0.25}, None, None, 0, np.array([0, 0, 4]))
    assert both["b"].measured == found.measured


def test_a_prediction_is_close_within_a_fifth_of_the_quartiles():
    pieces = prediction.Pieces(tau=2.0, draft=0.0, verify=1.0)
    for measured, quartiles, close in ((1.7, None, True), (1.6, None, False), (2.6, None, False), (2.4, None, True),
                                       (2.6, (2.4, 3.0), True), (1.5, (1.4, 1.7), True)):
        assert prediction.Explained(pieces, pieces, measured, 1, 1.0, quartiles).close is close


def test_costs_that_change_between_readings_are_not_judged(monkeypatch):
    """A pace that changes for all alike does no harm; one that changes for several tokens alone does."""
    several = iter([1.0, 1.5])
    monkeypatch.setattr(timing, "step_times", lambda target, ids, context, sent, repeats: np.array(
        [[1.0] * repeats] + [[2.0 * s] * repeats for s in [next(several)] for _ in sent[1:]]))
    read = costs.Costs("target", [7], 4, (5, 3), 2)
    assert read.not_judged == ""
    read.read()
    read._sending *= 3.0                                        # for all alike
    assert read.not_judged == ""
    read.read()
    assert read.not_judged == "This machine was busy: readings of c and of verify ratios differed by a factor of 1.5."
    assert costs.Costs("target", [7], 4, (1,), 2).not_judged == ""
