"""lab/models/layers.py on small random models of the real classes, against models built another way."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import model_classes
from console import BadInput
from decode_lab import autoregressive_generate, speculative_generate, tree_generate
from lab.drafters.cascade import CascadeDrafter
from lab.drafters.model import ModelDrafter
from lab.drafters.trees import ConfidentTreeDrafter, TreeDrafter, TreeShape
from lab.models.decoder import HFDecoder
from lab.models.layer_search import search_layers
from lab.models.layers import LayerDraft, why_no_layers
from layered import CLASSES, N, build, close, direct, layer_list, tokens
from marks import few

pytestmark = pytest.mark.usefixtures("one_thread")


SUBSETS = [(0, 1), (0, 1, 2), (0, 1, 3), (0, 1, 2, 4)]


@pytest.fixture(scope="module", params=few(CLASSES, {"llama"}))
def target(request):
    return HFDecoder(build(request.param), name=request.param)


@pytest.fixture(scope="module")
def llama():
    return HFDecoder(build("llama"), name="llama")


def snapshot(decoder):
    """A copy of all that the target's cache shows."""
    return [{name: copy.deepcopy(value) for name, value in vars(layer).items()
             if name in ("keys", "values", "conv_states")} for layer in decoder.cache.hf.layers]


def same_cache(before, after):
    for a, b in zip(before, after, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            pairs = zip(a[name].values(), b[name].values()) if isinstance(a[name], dict) else [(a[name], b[name])]
            assert all(torch.equal(x, y) for x, y in pairs), name


# -- what it computes ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("k", [2, 3, N])
def test_the_first_layers_are_a_model_of_those_layers(target, k):
    """Oracle: a copy of the model cut to k layers, its own forward over the whole text."""
    cut = copy.deepcopy(target.model)
    cut.base_model.layers = torch.nn.ModuleList(list(layer_list(cut))[:k])
    cut.config.num_hidden_layers = k
    ids, draft = tokens(40), LayerDraft(target, range(k))
    with torch.inference_mode():
        wanted = cut(torch.tensor(ids)[None], use_cache=False).logits[0]
    target.rewind(0)
    target.prefill(ids[:20])
    close(draft.send(ids[20:23]), wanted[20:23])
    close(draft.send(ids[23:24]), wanted[23:24])
    target.send(ids[20:30])                                   # what the draft wrote lay where these rows are now
    close(draft.send(ids[30:40]), wanted[30:40])
    assert draft.hidden.shape == (10, 32) and target.hidden.shape == (10, 32)


@pytest.mark.parametrize("kept", SUBSETS)
def test_a_subset_reads_the_target_s_cache(target, kept):
    """Oracle: the model, each layer left out made to pass its input on, on a copy of the target's cache."""
    ids, draft, n = tokens(20), LayerDraft(target, kept), 12
    target.rewind(0)
    target.prefill(ids[:n])
    oracle = HFDecoder(copy.deepcopy(target.model))
    oracle.prefill(ids[:n])
    hooks = [layer.register_forward_hook(lambda module, args, out: args[0])
             for i, layer in enumerate(layer_list(oracle.model)) if i not in kept]
    close(draft.send(ids[n:n + 4]), oracle.send(ids[n:n + 4]))
    close(draft.send(ids[n + 4:]), oracle.send(ids[n + 4:]))
    for hook in hooks:
        hook.remove()


def test_a_tree_s_nodes_behind_a_chain(target):
    parents, nodes, prompt = [-1, 0, 0, 1, 3, 2], tokens(6, 5), tokens(12)
    draft, alone = LayerDraft(target, (0, 1, 2)), LayerDraft(target, (0, 1, 2))
    target.rewind(0)
    target.prefill(prompt)
    draft.send(tokens(1, 8))                                    # node 0; those of the tree come after it
    behind = [parent + 1 for parent in parents]
    rows = [*draft.send(nodes[:3], behind[:3]), *draft.send(nodes[3:], behind[3:])]
    assert draft.length == 12 + 1 + 6 and draft.committed == 12
    draft.rewind(13)
    after = draft.send(tokens(2, 9))
    for i, row in enumerate(rows):
        path = [i]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        alone.rewind(0)
        close(row, alone.send([*tokens(1, 8), *nodes[path]])[-1])
    alone.rewind(0)
    close(after, alone.send([*tokens(1, 8), *tokens(2, 9)])[-2:])


# -- the target's cache --------------------------------------------------------------------------------------

def test_the_target_s_cache_is_the_same_before_and_after(target):
    draft, other = LayerDraft(target, (0, 1, 3)), LayerDraft(target, range(2))
    target.rewind(0)
    target.prefill(tokens(12))
    before = snapshot(target)
    for model in (draft, other):
        model.send(tokens(5, 1))
        model.send(tokens(4, 2), [4, 5, 5, 7])
        model.rewind(17)
        model.send(tokens(1, 3))
        model.rewind(0)
    same_cache(before, snapshot(target))
    fresh = HFDecoder(copy.deepcopy(target.model))
    fresh.prefill(tokens(12))
    close(target.send(tokens(3, 4)), fresh.send(tokens(3, 4)))


def test_what_was_drafted_is_void_once_the_target_moved(target):
    """By as many tokens as the draft sent, by a tree dropped, forward, backward, and by a new prompt."""
    draft = LayerDraft(target, (0, 1, 2))
    moves = [lambda: target.send(tokens(4, 1)), lambda: target.rewind(10), lambda: target.rewind(0) or
             target.prefill(tokens(14, 2)), lambda: (target.send(tokens(4, 6), [-1, 0, 1, 2]), target.commit([])),
             lambda: (target.send(tokens(3, 1)), target.rewind(target.length - 3))]
    for move in moves:
        target.rewind(0)
        target.prefill(tokens(14))
        if move is moves[1]:
            target.rewind(0)                                    # a hybrid cannot go back behind what it committed
            target.prefill(tokens(10))
            target.send(tokens(4, 3))
        draft.send(tokens(4, 5))
        assert draft.length == target.length + 4
        move()
        assert draft.length == target.length
        fresh = LayerDraft(target, (0, 1, 2))
        length, row = target.length, draft.send(tokens(2, 7))
        assert draft.length == length + 2
        close(row, fresh.send(tokens(2, 7)))


def test_two_drafts_of_one_target_do_not_read_each_other_s_rows(target):
    a, b = LayerDraft(target, (0, 1, 2)), LayerDraft(target, range(2))
    target.rewind(0)
    target.prefill(tokens(10))
    a.send(tokens(3, 1))
    b.send(tokens(3, 2))
    assert (a.length, b.length) == (10, 13)                     # what a had sent is overwritten, and forgotten
    row = a.send(tokens(3, 3))
    close(row, LayerDraft(target, (0, 1, 2)).send(tokens(3, 3)))


def test_a_buffer_that_is_full_is_not_the_target_s_to_grow(target):
    draft, fresh = LayerDraft(target, (0, 1, 3)), HFDecoder(copy.deepcopy(target.model))
    target.rewind(0)
    target.prefill(tokens(254))
    before, ids = snapshot(target), tokens(300)
    rows = [draft.send(ids[i:i + 1])[0] for i in range(6)]    # a buffer holds 508 rows for 254, 256 for less
    rows += [*draft.send(ids[6:])]
    same_cache(before, snapshot(target))
    other = LayerDraft(target, (0, 1, 3))
    close(torch.stack(rows), other.send(ids), 1e-4)
    fresh.prefill(tokens(254))
    close(target.send(ids[:3]), fresh.send(ids[:3]))
    assert draft.length == 257


# -- drafting ------------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_all_layers_are_accepted_for_200_rounds(target):
    """And drafting recomputes nothing: a forward per drafted token, of one token, but for the first of a run."""
    rounds, draft, sent = 200 if target.name in ("llama", "lfm2") else 40, LayerDraft(target, range(N)), []
    layer = layer_list(draft.model)[0]
    hook = layer.register_forward_hook(lambda module, args, out: sent.append(args[0].shape[1]))
    drafter = ModelDrafter(draft)
    text, run = speculative_generate(target, drafter, tokens(3), 2 * rounds + 1, 1)
    assert len(run.rounds) == rounds + 1 and run.alpha == 1.0 and run.drafted == rounds
    assert sent == [1] * rounds
    sent.clear()
    _, run = speculative_generate(target, drafter, tokens(30), 24, 4)
    hook.remove()
    assert sent == [1] * run.drafted and run.alpha == 1.0
    assert draft.length == target.length


@pytest.mark.slow
def test_chain_and_tree_give_plain_greedy_text(target):
    kept = LayerDraft(target, (0, 1, 3))
    first = LayerDraft(target, range(2))
    chains = [ModelDrafter(kept), ModelDrafter(first)]
    trees = [TreeDrafter(first, TreeShape.branching((2, 2, 1))), ConfidentTreeDrafter(kept, 5, 3, 2)]
    accepted = 0
    for seed in range(6):
        prompt = tokens([1, 2, 7, 8, 9, 20][seed], seed)
        plain, _ = autoregressive_generate(target, prompt, 12)
        for drafter in chains[seed % 2:seed % 2 + 1]:
            text, run = speculative_generate(target, drafter, prompt, 12, 3)
            assert text.tolist() == plain.tolist()
            accepted += run.accepted
        for drafter in trees[seed % 2:seed % 2 + 1]:
            text, run = tree_generate(target, drafter, prompt, 12)
            assert text.tolist() == plain.tolist()
    assert accepted > 5


def test_sampled_drafts_with_the_same_seed_are_the_same_text(llama):
    draft = ModelDrafter(LayerDraft(llama, range(3)))
    one, two = (speculative_generate(llama, draft, tokens(9), 30, 3, 1.0, np.random.default_rng(1))[0]
                for _ in "12")
    assert one.tolist() == two.tolist() and len(set(one.tolist())) > 8


def test_misuse_is_one_sentence(llama):
    for layers, message in (((1, 2), "from 0"), ((), "from 0"), ((0, 2, 1), "increasing"), ((0, 5), "at most 4")):
        with pytest.raises(BadInput, match=message):
            LayerDraft(llama, layers)
    with pytest.raises(BadInput, match="such as 1"):
        LayerDraft(HFDecoder(build("lfm2")), (0, 2))
    draft = LayerDraft(llama, range(2))
    llama.rewind(0)
    llama.prefill(tokens(4))
    draft.send([5, 6], [-1, 0])
    llama.send([5, 6], [-1, -1])
    with pytest.raises(BadInput, match="has a tree pending"):
        draft.send([5])
    draft.rewind(0)                                             # as a drafter starts before its target
    llama.rewind(4)
    draft.send([5])
    with pytest.raises(BadInput, match="alone commits"):
        draft.commit([0])
    with pytest.raises(BadInput, match="cannot rewind to 6"):
        draft.rewind(6)
    assert not hasattr(draft, "prefill")


# -- a target that has tokens pending (in a cascade) -----------------------------------------------------------

def test_a_draft_goes_back_behind_what_the_target_has_sent(target):
    """And its rows then lie elsewhere than the target's, which may still commit them."""
    draft, alone = LayerDraft(target, (0, 1, 3)), HFDecoder(copy.deepcopy(target.model))
    prompt, sent, other = tokens(9), tokens(5, 1), tokens(3, 2)
    for back in (0, 2):
        target.rewind(0)
        target.prefill(prompt)
        rows = target.send(sent)
        draft.rewind(len(prompt) + back)
        assert draft.committed == draft.length == len(prompt) + back
        found = draft.send(other)
        following = LayerDraft(alone, (0, 1, 3))
        alone.rewind(0)
        alone.prefill(prompt)
        if back:
            alone.send(sent[:back])
        close(found, following.send(other))
        target.commit(range(5))                                # untouched by what the draft wrote
        alone.rewind(0)
        alone.prefill([*prompt, *sent])
        close(target.send(other), alone.send(other))
        close(rows, direct(target.model, [*prompt, *sent])[9:])


def test_a_tree_of_the_target_of_which_a_chain_is_left_is_still_a_tree(target):
    draft = LayerDraft(target, (0, 1))
    target.rewind(0)
    target.prefill(tokens(6))
    target.send([5, 6, 7], [-1, 0, 0])
    target.rewind(8)                                           # nodes 0 and 1: a chain, sent as paths or as rows
    if target.tree_as_paths:
        with pytest.raises(BadInput, match="has a tree pending"):
            draft.send([8])
    else:
        close(draft.send([8]), LayerDraft(target, (0, 1)).send([8]))


def test_a_cascade_over_the_middle_model_s_layers_drafts_as_without_its_refused_tokens(llama):
    """With few layers that it often refuses, the inner draft still says what these layers say behind the text."""
    middle, seen = HFDecoder(copy.deepcopy(llama.model), name="middle"), []
    inner = LayerDraft(middle, (0, 1))

    class Noted(ModelDrafter):
        def propose(self, sequence, gamma, rng):
            draft = super().propose(sequence, gamma, rng)
            seen.append((list(sequence), list(draft.tokens)))
            return draft

    drafter = CascadeDrafter(middle, Noted(inner), 3)
    speculative_generate(llama, drafter, tokens(7), 24, 6)
    assert 0 < drafter.run.alpha < 1 and len(seen) > 4
    fresh = HFDecoder(copy.deepcopy(llama.model))
    alone = LayerDraft(fresh, (0, 1))
    for sequence, said in seen:
        fresh.rewind(0)
        fresh.prefill(sequence[:-1])
        token, wanted = sequence[-1], []
        for _ in said:
            token = int(alone.send([token])[-1].argmax())
            wanted.append(token)
        assert said == wanted


def test_layers_that_read_the_keys_of_others_are_refused():
    model = model_classes.build("Gemma 3n shared keys")
    with pytest.raises(BadInput, match="read the keys of others"):
        LayerDraft(HFDecoder(model), (0, 1))


OTHERS = ["GPT-2", "GPT-Neo", "GPT-J", "CodeGen", "GPTBigCode", "OPT", "BLOOM", "Falcon rotary", "Falcon ALiBi", "MPT",
          "DBRX", "Qwen2", "Mistral", "Mixtral", "Gemma 2", "Gemma 3", "Phi", "Granite", "DeepSeek-V3",
          "ModernBERT decoder", "XGLM"]


@pytest.mark.parametrize("name", few(OTHERS, {"GPT-2", "Mixtral"}))
def test_layers_draft_wherever_a_class_keeps_its_list_of_them(name):
    """All of them draft what the target says, and what a search keeps changes no text."""
    target = HFDecoder(model_classes.build(name), name=name)
    assert why_no_layers(target) == ""
    prompt, n = tokens(6) % model_classes.V, target.config.num_hidden_layers
    plain, _ = autoregressive_generate(target, prompt, 12)
    for kept in (search_layers(target, [prompt.tolist()], n - 1), range(n)):
        draft = LayerDraft(target, kept)
        text, run = speculative_generate(target, ModelDrafter(draft), prompt, 12, 3)
        tree, _ = tree_generate(target, TreeDrafter(draft, TreeShape.branching((2, 1))), prompt, 12)
        assert text.tolist() == tree.tolist() == plain.tolist()
    assert run.alpha == 1


@pytest.mark.parametrize("name, reason", [
    ("LongCat Flash", "keeps its 4 layers in no list of 4 modules"),
    ("Gemma 3n shared keys", "read the keys of others"),
    pytest.param("Gemma 3n", "two of them do not make a model", marks=pytest.mark.slow)])
def test_where_layers_cannot_draft_the_reason_is_said(name, reason):
    target = HFDecoder(model_classes.build(name), name=name)
    assert reason in why_no_layers(target)
    for make in (lambda: LayerDraft(target, range(2)), lambda: search_layers(target, [tokens(9).tolist()], 2)):
        with pytest.raises(BadInput, match=f"no layers of {name} can draft alone: .*{reason}"):
            make()


def test_layers_that_would_not_make_up_the_model_are_refused(monkeypatch):
    target = HFDecoder(build("llama"), name="odd")
    monkeypatch.setattr("lab.models.layers.stack_of", lambda model: (
        ["model", "layers"], list(reversed(model.model.layers))))
    assert "do not give what the model gives" in why_no_layers(target)
