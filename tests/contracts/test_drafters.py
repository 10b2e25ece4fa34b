"""The contract of `decode_lab.Drafter`, over every drafter in the registry. No clock: work is counted."""

import inspect

import numpy as np
import pytest

from console import BadInput
from decode_lab import Drafter, Sampler, autoregressive_generate, speculative_generate
from lab.drafters.lookup import SuffixLookup
from lab.measure.enumeration import exact, outcomes, same_distribution
from lab.measure.scripted import Counted, FakeDecoder, ScriptedDrafter, one_hot, random_decoder, table_logits
from minimal import MinimalDecoder, MinimalDrafter
from registry import DRAFTERS, logits_like, names

V, PROMPT = 6, [2, 3, 2, 1, 2, 3]


@pytest.fixture(params=names(DRAFTERS))
def kind(request):
    return request.param


def made(kind, target, seed=0, like=logits_like, **options):
    """(a drafter for this target, its draft models by name)."""
    models = {}

    def model(name):
        models[name] = FakeDecoder(like(name, target._logits, target.vocab_size, seed), target.vocab_size, name=name,
                                   **options)
        return models[name]

    return DRAFTERS[kind].make(model, target.vocab_size), models


def twin(name, logits, vocab_size, seed):
    return logits


class Watched:
    """A drafter passed through; what the loop tells it, and what its models hold, is checked in every round."""

    def __init__(self, drafter, target, models=()):
        self.drafter, self.target, self.models, self.prompt, self.draft = drafter, target, list(models), None, None

    def start(self, target, sampler, prompt):
        assert target is self.target and self.prompt is None, "told once, and first of all"
        self.prompt = self.tokens = [int(t) for t in prompt]
        self.drafter.start(target, sampler, prompt)

    def propose(self, tokens, gamma, rng):
        assert gamma >= 1 and list(tokens) == self.tokens and self.draft is None
        assert self.target.committed == self.target.length == len(tokens) - 1
        self.draft = self.drafter.propose(tokens, gamma, rng)
        assert list(tokens) == self.tokens, "a drafter does not change the sequence"
        return self.draft

    def verified(self, tokens, path, hidden):
        tokens, path = [int(t) for t in tokens], list(path)
        drafted = [int(self.draft.tokens[i]) for i in path] if self.draft is not None else []
        assert tokens[:-1] == self.tokens + drafted and len(tokens) == len(self.tokens) + len(drafted) + 1
        assert hidden is None, "only one with uses_hidden gets hidden states"
        assert self.target.committed == self.target.length == len(tokens) - 1
        self.drafter.verified(tokens, path, hidden)
        for model in self.models:
            assert model.tokens == tokens[:model.committed] and model.length == model.committed < len(tokens), \
                "between rounds a draft model holds verified tokens alone"
        self.tokens, self.draft = tokens, None


def run(kind, target, n_new, gamma=3, seed=0, rng=None, prompt=PROMPT, **options):
    """(tokens, run, models) of a watched drafter; one forward of the target a round."""
    drafter, models = made(kind, target, seed)
    forwards = target.forwards
    tokens, report = speculative_generate(target, Watched(drafter, target, models.values()), prompt, n_new, gamma,
                                          rng=rng, **options)
    assert target.forwards - forwards == len(report.rounds) + (len(prompt) > 1), "one a round, and the prefill"
    assert report.n_tokens == len(tokens) - len(prompt) == len(report.rounds) + report.accepted
    return tokens.tolist(), report, models


# -- lossless --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("gamma", [1, 2, 5])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_output_is_that_of_plain_decoding(kind, gamma, penalty):
    sampler, accepted = Sampler(repetition_penalty=penalty), 0
    for seed in range(5):
        target = random_decoder(V, seed)
        plain, _ = autoregressive_generate(random_decoder(V, seed), PROMPT, 40, sampler=sampler)
        tokens, report, _ = run(kind, target, 40, gamma, seed, sampler=sampler)
        assert tokens == plain.tolist()
        accepted += report.accepted
    assert accepted > 0, "nothing was ever accepted, so little was tested"


@pytest.mark.parametrize("sampler", [Sampler(0.8), Sampler(1.0, top_k=2, repetition_penalty=1.4)],
                         ids=["temperature", "top-k, penalty"])
def test_sampled_output_has_the_targets_distribution(kind, sampler):
    """Every way in which the random choices of a whole run can fall is summed."""
    logits, prompt, n_new = table_logits(3, 1, 1.0), [1, 0, 1], 3
    n_new = 2 if "sampled tree" in kind and sampler.top_k == 0 else n_new
    accepted = []

    def written(rng):
        target = FakeDecoder(logits, 3)
        drafter, _ = made(kind, target)
        tokens, report = speculative_generate(target, drafter, prompt, n_new, 2, rng=rng, sampler=sampler)
        accepted.append(report.accepted)
        return tuple(tokens[len(prompt):].tolist())

    assert same_distribution(outcomes(written), exact(logits, sampler, prompt, n_new))
    assert max(accepted) > 0 or kind == "n-gram tiers, priced", "nothing was ever accepted"


def test_the_same_seed_gives_the_same_tokens(kind):
    def text(seed):
        rng = None if seed is None else np.random.default_rng(seed)
        return run(kind, random_decoder(V, 1), 40, 3, rng=rng, sampler=Sampler(1.0))[0]

    assert text(5) == text(5) != text(6)
    assert text(None) == text(None) == text(0), "without an rng, seed 0"


def test_a_drafter_serves_several_runs_and_forgets_between_them(kind):
    target = random_decoder(V, 1)
    used, _ = made(kind, target)

    def rounds(drafter, prompt):
        tokens, report = speculative_generate(target, drafter, prompt, 20, 3, 1.0)
        return tokens.tolist(), [(r.drafted, r.tested, r.accepted, r.sources) for r in report.rounds]

    first = rounds(used, PROMPT)
    assert rounds(used, [5, 4]) == rounds(made(kind, target)[0], [5, 4])
    assert rounds(used, PROMPT) == first


# -- where a text ends -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("prompt", [[3], PROMPT])
def test_it_stops_where_plain_decoding_stops(kind, seed, prompt):
    """At each budget, at each end of the context, and at each id as EOS: the same tokens, for the same reason."""
    for n_new in (1, 2, 3, 4, 9):
        plain, plain_run = autoregressive_generate(random_decoder(V, seed), prompt, n_new)
        tokens, report, _ = run(kind, random_decoder(V, seed), n_new, 4, seed, prompt=prompt)
        assert (tokens, report.stop) == (plain.tolist(), "budget") and plain_run.stop == "budget"
    for room in (1, 2, 3, 5, 8):
        limit = len(prompt) + room
        plain, plain_run = autoregressive_generate(random_decoder(V, seed, max_length=limit), prompt, 40)
        tokens, report, _ = run(kind, random_decoder(V, seed, max_length=limit), 40, 4, seed, prompt=prompt)
        assert (tokens, report.stop) == (plain.tolist(), "context") and len(tokens) == limit
    for eos in ([0], [1], [2, 5], [3], [4]):
        plain, plain_run = autoregressive_generate(random_decoder(V, seed), prompt, 30, eos=eos)
        tokens, report, _ = run(kind, random_decoder(V, seed), 30, 4, seed, prompt=prompt, eos=eos)
        assert (tokens, report.stop) == (plain.tolist(), plain_run.stop)


@pytest.mark.parametrize("limit", [2, 6, 7, 9, 12])
def test_the_draft_models_context_may_end_first(kind, limit):
    """The scripted model refuses one token too many; the run goes on without drafts."""
    target = random_decoder(V, 2)
    plain, _ = autoregressive_generate(random_decoder(V, 2), PROMPT, 20)
    drafter, models = made(kind, target, max_length=limit)
    tokens, _ = speculative_generate(target, Watched(drafter, target, models.values()), PROMPT, 20, 4)
    assert tokens.tolist() == plain.tolist()


def test_gamma_is_the_deepest_it_may_go(kind):
    """Asked directly: never deeper than gamma, each token with a q and a source, parents before children."""
    target = random_decoder(V, 3)
    for sampler in (Sampler(), Sampler(1.0)):
        drafter, _ = made(kind, target)
        drafter.start(target, sampler, PROMPT)
        for gamma in (1, 2, 3, 6):
            draft = drafter.propose(PROMPT, gamma, np.random.default_rng(gamma))
            n, levels = len(draft.tokens), []
            assert len(draft.q) == len(draft.sources) == n
            for i, parent in enumerate(range(-1, n - 1) if draft.parents is None else draft.parents):
                assert -1 <= parent < i
                levels.append(levels[parent] + 1 if parent >= 0 else 1)
            assert max(levels, default=0) <= gamma
            for token, q in zip(draft.tokens, draft.q):
                assert q is None or (q.shape == (V,) and q[token] > 0 and abs(q.sum() - 1) < 1e-9)


# -- drafts of the target itself, and wrong ones ---------------------------------------------------------------

@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.slow
def test_a_draft_that_is_the_target_is_always_accepted(kind, temperature):
    """200 rounds, and the draft's cache neither starves nor runs ahead."""
    case = DRAFTERS[kind]
    if ("sampled" if temperature else "greedy") not in case.twin:
        pytest.skip("its draft is not the target's own choice in this kind of run")
    target = random_decoder(8, 1, order=1)
    drafter, models = made(kind, target, like=twin)
    main, behind = models["draft"], []

    class Lag(Watched):
        def verified(self, tokens, path, hidden):
            before, n = len(self.tokens), len(self.draft.tokens) if self.draft is not None else 0
            super().verified(tokens, path, hidden)
            if n:
                behind.append((main.committed - (self.target.committed - (case.lag or 0)), main.committed - before))

    report = speculative_generate(target, Lag(drafter, target, models.values()), [0, 1], 2000, 4, temperature)[1]
    assert len(report.rounds) >= 200 and report.alpha == 1
    if case.lag is not None:
        assert {exactly for exactly, _ in behind} == {0}, "the target's committed length minus one, always"
    else:
        assert {at for _, at in behind} == {0}, "a tree's cache holds the text that the tree stood behind"
    if kind == "cascade":
        assert drafter.run.alpha == 1 and drafter.run.drafted > 100


def test_a_draft_that_is_always_wrong_adds_one_token_a_round(kind):
    if not DRAFTERS[kind].main:
        pytest.skip("no model drafts")

    def wrong(name, logits, vocab_size, seed):
        return lambda history: -9 * np.asarray(logits(history))

    target = random_decoder(12, 1)
    drafter, models = made(kind, target, like=wrong)
    tokens, report = speculative_generate(target, Watched(drafter, target, models.values()), [0, 1], 40, 3)
    assert report.accepted == 0 and len(report.rounds) == 40 and report.drafted > 0
    assert tokens.tolist() == autoregressive_generate(random_decoder(12, 1), [0, 1], 40)[0].tolist()


# -- what a draft costs ----------------------------------------------------------------------------------------

def work(kind, size, monkeypatch, rounds=40, gamma=4):
    """[elements of the text read, steps in the automaton, forwards, tokens sent] of 40 rounds behind `size` tokens."""
    clear = SuffixLookup._clear

    def counted_clear(self):
        clear(self)
        for name in ("_next", "_link", "_length", "_end"):
            setattr(self, name, Steps(getattr(self, name)))

    monkeypatch.setattr(SuffixLookup, "_clear", counted_clear)
    text = np.random.default_rng(0).integers(3, 30, 200).tolist() * (size // 200 + 3)
    for at in range(7, len(text), 11):                         # the pattern holds for a while, and breaks
        text[at] = 3 + at * at % 27
    like = FakeDecoder(lambda history: one_hot((history[-1] + 1) % 30, 30), 30)
    drafter, models = made(kind, like, like=lambda name, logits, v, seed: logits)
    tokens = Counted(text[:size])
    drafter.start(like, Sampler(), tokens)
    found, rng = [], np.random.default_rng(0)
    for _ in range(rounds):
        before = {name: (model.forwards, sent_to(model)) for name, model in models.items()}
        Counted.reads = Steps.reads = 0
        draft = drafter.propose(tokens, gamma, rng)
        node, path = -1, []
        while (hit := next((i for i in draft.children().get(node, [])
                            if draft.tokens[i] == text[len(tokens) + len(path)]), None)) is not None:
            path.append(hit)
            node = hit
        tokens.extend(text[len(tokens):len(tokens) + len(path) + 1])
        drafter.verified(tokens, path, None)
        found.append([Counted.reads, Steps.reads, sum(m.forwards - before[n][0] for n, m in models.items()),
                      sum(sent_to(m) - before[n][1] for n, m in models.items())])
    return np.array(found)


class Steps(Counted):
    """The automaton's own lists, counted apart from the text."""

    reads = 0

    def __getitem__(self, index):
        Steps.reads += 1
        return list.__getitem__(self, index)


def sent_to(model):
    return sum(len(a) for a in model.called("prefill")) + sum(len(a[0]) for a in model.called("send"))


def test_a_draft_costs_what_it_reads_whatever_the_length_of_the_text(kind, monkeypatch):
    """Behind 8,000 tokens as behind 800: the first round reads the prompt, each later one only what is new."""
    short, long = work(kind, 800, monkeypatch)[1:], work(kind, 8000, monkeypatch)[1:]
    assert long[:, 0].max() <= 120, "elements of the text read in a round"
    assert long.sum(0)[1] <= 1.3 * short.sum(0)[1] + 40, "steps in the automaton"
    assert (long[:, 2:].max(0) <= short[:, 2:].max(0)).all(), "forwards, and tokens sent, in a round"
    assert (long.sum(0)[2:] <= 1.1 * short.sum(0)[2:] + 4).all()


def test_a_draft_model_at_the_end_of_its_context_costs_nothing_more(kind):
    """It cannot draft any more; that is found out without reading the text again."""
    if not DRAFTERS[kind].main:
        pytest.skip("no model drafts")
    like = random_decoder(30, 1)
    drafter, models = made(kind, like, max_length=50)
    text = np.random.default_rng(0).integers(30, size=900).tolist()
    tokens = Counted(text[:40])
    drafter.start(like, Sampler(), tokens)
    reads, rng = [], np.random.default_rng(0)
    while len(tokens) < 800:
        Counted.reads = 0
        drafter.propose(tokens, 3, rng)
        tokens.append(text[len(tokens)])
        drafter.verified(tokens, [], None)
        reads.append(Counted.reads)
    assert max(reads[20:]) <= 40


# -- what a drafter is told ------------------------------------------------------------------------------------

@pytest.mark.parametrize("prompt", [[4], PROMPT])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_hidden_rows_are_those_of_the_tokens_before_the_last(prompt, shape):
    """All tokens but the newest, each once, in order, each with its own row: the prompt's after the prefill."""
    text = autoregressive_generate(random_decoder(V, 4), prompt, 30)[0].tolist()
    rows, paths = [], []

    class Head(ScriptedDrafter):
        uses_hidden = True

        def verified(self, tokens, path, hidden):
            super().verified(tokens, path, hidden)
            rows.extend(np.asarray(hidden).tolist())
            paths.append((len(path), len(hidden)))
            assert rows == [[i + 1, t] for i, t in enumerate(tokens[:-1])]

    def plan(tokens, gamma):
        line = [t if at % 5 else (t + 1) % V for at, t in enumerate(text[len(tokens):len(tokens) + gamma], len(tokens))]
        if shape == "chain" or not line:
            return line
        from lab.measure.scripted import tree
        return tree([(line[0] + 1) % V, *line], [-1, -1, *range(1, len(line))])

    drafter = Head(plan)
    tokens, report = speculative_generate(random_decoder(V, 4), drafter, prompt, 30, 3)
    assert tokens.tolist() == text and 0 < report.accepted < report.drafted
    if len(prompt) > 1:
        assert paths.pop(0) == (0, len(prompt) - 1)
    assert paths == [(r.accepted, r.accepted + 1) for r in report.rounds]


def test_without_uses_hidden_nothing_is_read_of_the_targets_hidden_states():
    drafter = ScriptedDrafter(lambda tokens, gamma: [1] * gamma)
    hidden = []
    drafter.verified = lambda tokens, path, given: hidden.append(given)
    target = random_decoder(V, 1)
    del target.hidden
    target.send = lambda tokens, parents=None, send=target.send: (send(tokens, parents), vars(target).pop("hidden"))[0]
    speculative_generate(target, drafter, PROMPT[:1], 9, 2)
    assert set(hidden) == {None}


def test_the_path_is_in_nodes_of_the_draft():
    """A tree whose second branch is right: the nodes as the drafter numbered them."""
    from lab.measure.scripted import script, tree
    text = list(range(5)) * 4
    drafter = ScriptedDrafter(lambda tokens, gamma: tree(
        [9, text[len(tokens)], 9, text[len(tokens) + 1]], [-1, -1, 0, 1]) if gamma > 1 else [])
    speculative_generate(script(text, 10), drafter, text[:3], 7, 4)
    assert drafter.paths == [[1, 3], [1, 3], []] and drafter.prompts == [text[:3]]


# -- the least there can be ------------------------------------------------------------------------------------

def test_the_minimal_drafter_has_exactly_what_the_protocol_names():
    def methods(of):
        return {name for name, value in vars(of).items() if inspect.isfunction(value) and not name.startswith("_")}

    assert methods(MinimalDrafter) == methods(Drafter) == {"start", "propose", "verified"}


def test_a_minimal_decoder_is_target_and_draft_of_everything(kind):
    """It has no name, no limit, no prefill and no hidden states; the text is that of plain decoding."""
    target, other = MinimalDecoder(V, 1), MinimalDecoder(V, 1)
    plain, _ = autoregressive_generate(other, PROMPT, 30)
    drafter = DRAFTERS[kind].make(lambda name: MinimalDecoder(
        logits=logits_like(name, target._logits, V, 0), vocab_size=V), V)
    for long in (PROMPT, PROMPT * 6):                          # the draft model reads a long prompt in another way
        plain, _ = autoregressive_generate(other, long, 30)
        tokens, report = speculative_generate(target, drafter, long, 30, 3)
        assert tokens.tolist() == plain.tolist() and report.drafted > 0
        tokens, _ = speculative_generate(target, drafter, long, 30, lambda run: len(run.rounds) % 3)
        assert tokens.tolist() == plain.tolist()


def test_what_it_cannot_draft_for_is_refused_before_the_first_forward(kind):
    if not DRAFTERS[kind].main:
        pytest.skip("no model drafts")
    target, drafts = random_decoder(V, 1, tokenizer="a"), []

    def model(name):
        drafts.append(random_decoder(V, 2, tokenizer="b", name=name))
        return drafts[-1]

    with pytest.raises(BadInput, match="tokenizer"):
        speculative_generate(target, DRAFTERS[kind].make(model, V), PROMPT, 9, 3)
    assert target.forwards == 0 and not any(model.forwards for model in drafts)
