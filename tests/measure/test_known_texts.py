"""lab/replay.py: what is counted on a known text, and what remembered forwards return, against the model itself."""

import numpy as np
import pytest

from decode_lab import Sampler, autoregressive_generate, speculative_generate, tree_generate
from lab import toy
from lab.drafters.lookup import PromptLookup
from lab.drafters.model import ModelDrafter
from lab.drafters.trees import TreeDrafter, TreeShape
from lab.measure.known_texts import KnownText, Remembered
from lab.measure.scripted import ScriptedDrafter, random_decoder
from lab.measure.scripted import tree as tree_draft
from lab.models.kept_prefix import KeptPrefix

PROMPT = toy.encode(toy.heldout("code")[:400])[:24]


@pytest.fixture(scope="module")
def models():
    return toy.load("medium"), toy.load("small")


def counts(run):
    return [(r.drafted, r.tested, r.accepted, r.sources, r.first) for r in run.rounds]


@pytest.mark.parametrize("kind", ["lookup", "chain", "tree"])
def test_a_known_text_gives_the_rounds_of_the_model_that_wrote_it(models, kind):
    target, draft = models

    def run(decoder):
        if kind == "tree":
            return tree_generate(decoder, TreeDrafter(draft, TreeShape.branching((3, 2, 1))), PROMPT, 40)
        drafter = PromptLookup() if kind == "lookup" else ModelDrafter(draft)
        return speculative_generate(decoder, drafter, PROMPT, 40, gamma=4)

    text, measured = run(target)
    replayed, counted = run(KnownText(text, target))
    assert replayed.tolist() == text.tolist() and counts(counted) == counts(measured)
    assert 1.2 < measured.tau < 4


class Counted:
    """Passes everything on, and counts the forwards and prefills."""

    def __init__(self, model):
        self.model, self.forwards, self.prefills = model, 0, 0

    def prefill(self, tokens):
        self.prefills += 1
        self.model.prefill(tokens)

    def __getattr__(self, name):
        self.forwards += name == "send"
        return getattr(self.model, name)


@pytest.mark.parametrize("tree", [False, True])
def test_remembered_models_sample_what_the_models_sample(models, tree):
    target, draft = map(Counted, models)
    sampler = Sampler(1.0, top_k=4)

    def texts(target, draft):
        rng, shape = np.random.default_rng(5), TreeShape.branching((2, 2))
        if tree:
            return [tree_generate(target, TreeDrafter(draft, shape, sample=True), PROMPT, 4, rng=rng,
                                      sampler=sampler)[0].tolist() for _ in range(60)]
        return [speculative_generate(target, ModelDrafter(draft), PROMPT, 4, 2, rng=rng, sampler=sampler)[0]
                .tolist() for _ in range(60)]

    plain, direct = texts(target, draft), target.forwards + draft.forwards
    target.forwards = draft.forwards = 0
    assert texts(Remembered(target), Remembered(draft)) == plain
    assert len({tuple(t) for t in plain}) > 10 and target.forwards + draft.forwards < 0.8 * direct


def test_a_remembered_tree_may_be_sent_in_two_calls(models):
    nodes, parents, model = [5, 6, 7, 8], [-1, 0, 0, 1], models[0]
    model.rewind(0)
    model.prefill(PROMPT)
    wanted = model.send(nodes, parents)
    again = Remembered(model)
    for _ in range(2):                                         # the second time nothing runs
        again.rewind(0)
        again.prefill(PROMPT)
        rows = np.concatenate([again.send(nodes[:3], parents[:3]), again.send(nodes[3:], parents[3:])])
        np.testing.assert_allclose(rows, wanted, rtol=0, atol=1e-4)
        again.commit([0, 1, 3])
        assert again.length == len(PROMPT) + 3
    row = again.send([9])[0]
    model.rewind(0)
    np.testing.assert_allclose(row, model.send([*PROMPT, 5, 6, 8, 9])[-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["plain", "chain", "tree"])
def test_a_prompt_is_prefilled_once_and_the_text_is_the_same(models, kind):
    target, draft = map(Counted, models)

    def run(target, draft, prompt):
        if kind == "plain":
            return autoregressive_generate(target, prompt, 12)[0].tolist()
        if kind == "chain":
            return speculative_generate(target, ModelDrafter(draft), prompt, 12, 3)[0].tolist()
        drafter = TreeDrafter(draft, TreeShape.branching((2, 2)))
        return tree_generate(target, drafter, prompt, 12)[0].tolist()

    prompts = [PROMPT, PROMPT, PROMPT[:20], PROMPT, PROMPT[:1], PROMPT[:1], PROMPT]
    wanted = [run(target, draft, p) for p in prompts]
    target.prefills = 0
    kept, kept_draft = KeptPrefix(target), KeptPrefix(draft)
    assert [run(kept, kept_draft, p) for p in prompts] == wanted
    assert target.prefills == 3 and kept.length == len(PROMPT) + 11


@pytest.mark.parametrize("tree", [False, True])
def test_a_prompt_that_goes_on_from_the_text_sends_what_is_new(tree):
    model, rng = random_decoder(30, seed=2), np.random.default_rng(0)
    kept = KeptPrefix(model)

    def run(decoder, prompt):
        if tree:
            drafter = ScriptedDrafter(
                lambda tokens, gamma: tree_draft([*range(30), 4, tokens[-1]], [-1] * 30 + [3, 3]) if gamma > 1 else [])
            return tree_generate(decoder, drafter, prompt, 9)[0].tolist()
        return speculative_generate(decoder, PromptLookup(), prompt, 9, 3)[0].tolist()

    text = rng.integers(0, 30, 6).tolist()
    for turn in range(5):
        before = len(text)
        prompt = text + rng.integers(0, 30, 4).tolist()
        text = run(kept, prompt)
        assert text == run(random_decoder(30, seed=2), prompt) and model.tokens == text[:-1]
        assert kept.sent == (9 if turn == 0 else len(prompt) - before)      # the text's last token was not sent yet
        assert kept.shared(text) == kept.shared([*text[:-1], 77]) == len(text) - 1
    for other in (text[:7] + [1, 2, 3], text[:5], [29 - text[0], 5, 6]):      # cut short, and another text
        kept_text = run(kept, other)                            # it cannot go back behind its last commit: all is read
        assert kept_text == run(random_decoder(30, seed=2), other) and kept.sent == len(other) - 1
    run(kept, [5])
    assert kept.sent == 0                                       # nothing to prefill


@pytest.mark.parametrize("kind", ["Llama", "Lfm2", "Lfm3", "Mistral"])
@pytest.mark.slow
def test_real_models_go_back_as_far_as_they_can(kind):
    torch = pytest.importorskip("torch")
    import test_hf_classes as classes
    from lab.models.decoder import HFDecoder
    torch.set_num_threads(1)
    model = classes.build(kind)
    kept, rng = KeptPrefix(HFDecoder(model)), np.random.default_rng(1)

    def run(decoder, prompt):
        return speculative_generate(decoder, PromptLookup(), prompt, 8, 3)[0].tolist()

    prompt = rng.integers(3, classes.V, 9).tolist()
    for turn in range(3):
        text = run(kept, prompt)
        assert text == run(HFDecoder(model), prompt) and kept.sent == (8 if turn == 0 else 6)
        prompt = text + rng.integers(3, classes.V, 6).tolist()
    text = run(kept, text[:12] + [5, 6])                        # a branch off: a hybrid reads all of it anew
    assert kept.sent == (13 if kind in classes.HYBRID else 1)
    assert text == run(HFDecoder(model), text[:14])
