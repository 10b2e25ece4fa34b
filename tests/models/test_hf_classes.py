"""HFDecoder on the real classes of transformers, small and randomly initialised: every way of decoding gives the text
and the distribution of plain decoding, at lengths around the edges of windows and convolutions."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import transformers

from console import BadInput
from decode_lab import Run, Sampler, autoregressive_generate, speculative_generate, tree_generate
from lab.drafters.model import ModelDrafter
from lab.drafters.trees import TreeDrafter, TreeShape
from lab.measure.enumeration import exact, outcomes, same_distribution
from lab.measure.scripted import chain, tree
from lab.models.decoder import HFDecoder

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

V, N_NEW, CLEAR = 50, 4, 1e-3
SMALL = dict(vocab_size=V, hidden_size=16, num_attention_heads=2, intermediate_size=24, max_position_embeddings=64,
             bos_token_id=1, eos_token_id=2, pad_token_id=0)
GROUPED = dict(num_key_value_heads=1)
# class: (its configuration, the window or convolution kernel whose edges its lengths lie around)
CLASSES = {
    "GPTNeoX": (dict(num_hidden_layers=2), 6),
    "Llama": (dict(num_hidden_layers=2, **GROUPED), 6),
    "Lfm2": (dict(num_hidden_layers=3, **GROUPED, conv_L_cache=4, layer_types=["conv", "full_attention", "conv"]), 4),
    "Lfm3": (dict(num_hidden_layers=4, **GROUPED, head_dim=8, conv_L_cache=4, sliding_window=6,
                  layer_types=["conv", "sliding_attention", "full_attention", "conv"]), 6),
    "Mistral": (dict(num_hidden_layers=2, **GROUPED, sliding_window=6), 6),
    "Qwen3": (dict(num_hidden_layers=2, **GROUPED, head_dim=8), 6),
}
HYBRID, AS_PATHS = ("Lfm2", "Lfm3"), ("Lfm2", "Lfm3", "Mistral")


def build(kind):
    if not hasattr(transformers, kind + "ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config = getattr(transformers, kind + "Config")(**SMALL, **CLASSES[kind][0])
    model = getattr(transformers, kind + "ForCausalLM")(config).eval()
    # Larger than the usual initialisation, so that attention is far from uniform and a wrong mask or position shows.
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.4, generator=generator)
    return model


@pytest.fixture(scope="module", params=CLASSES)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def model(kind):
    return build(kind)


@pytest.fixture(scope="module")
def decoder(model):
    return HFDecoder(model)


@torch.inference_mode()
def rows_of(model, batch):
    """(B, n, V) logits of transformers' own forward over whole sequences (B, n), without a cache."""
    return model(torch.tensor(np.asarray(batch)), use_cache=False).logits.numpy()


@pytest.fixture(scope="module")
def texts(kind, model):
    """Prompts with their greedy continuations from cacheless forwards: at least 200, as (n_prompt, ids).

    Those on whose way two logits come within CLEAR of each other are left out: rounding may swap these.
    """
    window, rng, found = CLASSES[kind][1], np.random.default_rng(5), []
    for n_prompt in (1, window - 1, window, window + 1, 2 * window + 3):
        # Of one token there are V prompts only.
        batch = np.arange(V)[:, None] if n_prompt == 1 else rng.integers(3, V, (42, n_prompt))
        clear = np.ones(len(batch), bool)
        for _ in range(N_NEW):
            last = rows_of(model, batch)[:, -1]
            best = np.sort(last, axis=1)
            clear &= best[:, -1] - best[:, -2] > CLEAR
            batch = np.concatenate([batch, last.argmax(1)[:, None]], axis=1)
        found += [(n_prompt, text.tolist()) for text in batch[clear]]
    assert len(found) >= 200 and len({text[-1] for _, text in found}) > 5
    return found


class Oracle:
    """A drafter that knows the text but for every third position: a chain, or a tree of two candidates."""

    name = "oracle"

    def __init__(self, tree):
        self.tree = tree

    def start(self, target, sampler, prompt):
        self.target = target

    def verified(self, tokens, path, hidden):
        """After each round: all layers hold the sequence but its last token, and no recorded past is left."""
        assert self.target.length == len(tokens) - 1 and set(self.target.cache.lengths()) == {len(tokens) - 1}
        assert past(self.target) <= 0

    def propose(self, tokens, gamma, rng):
        right = self.text[len(tokens):len(tokens) + min(gamma, 4)]
        wrong = [(len(tokens) + i) % 3 == 0 for i in range(len(right))]
        if not self.tree:
            said = [(t + 1) % V if w else t for t, w in zip(right, wrong)]
            return chain(said)
        said, parents, parent = [], [], -1
        for depth, (t, second) in enumerate(zip(right, wrong)):  # two candidates, the right one is either
            first = len(said)
            said += [(t + 1) % V, t] if second else [t, (t + 1) % V]
            parents += [parent, parent]
            if depth + 1 < len(right):                          # and a child of one of them that leads nowhere
                said, parents = [*said, 5], [*parents, first]
            parent = first + second
        return tree(said, parents)


def past(decoder):
    """Most positions that a layer of the committed cache holds beyond what its next forward needs."""
    beyond = []
    for layer in decoder.cache.hf.layers:
        if hasattr(layer, "conv_states"):
            beyond += [state.shape[-1] - layer.conv_kernel_size[i] for i, state in layer.conv_states.items()]
        elif hasattr(layer, "sliding_window"):
            beyond.append(layer.keys.shape[-2] - min(layer.sliding_window - 1, layer.cumulative_length))
    return max(beyond, default=0)


# -- greedy ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("how", ["plain", "chain", "tree"])
def test_every_way_of_decoding_gives_the_greedy_text(how, kind, decoder, texts):
    drafter, rounds = Oracle(how == "tree"), 0
    if how == "plain" or kind == "Mistral":                     # Mistral is in test_hf.py too
        texts = texts[::4]
    for n_prompt, text in texts:
        prompt, drafter.text = text[:n_prompt], text
        if how == "plain":
            out, run = autoregressive_generate(decoder, prompt, N_NEW)
            drafter.target = decoder
            drafter.verified(out, [], None)
        elif how == "chain":
            out, run = speculative_generate(decoder, drafter, prompt, N_NEW, gamma=4)
        else:
            out, run = tree_generate(decoder, drafter, prompt, N_NEW)
        assert out.tolist() == text, (n_prompt, how)
        rounds += len(run.rounds)
    if how != "plain":
        assert rounds < N_NEW * len(texts) / 1.5                # drafts were accepted, or there was nothing to test


def test_plain_text_is_that_of_transformers_own_generate(model, texts):
    for n_prompt, text in texts[::40]:
        with torch.inference_mode():
            ids = torch.tensor([text[:n_prompt]])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=N_NEW, do_sample=False,
                                 eos_token_id=None, pad_token_id=0)
        assert out[0].tolist() == text


def test_a_model_drafts_for_itself_through_rejections_and_trees(kind, model, texts):
    """The draft's own cache, rolled back in turn: its weights are the target's, a little off."""
    target, draft = HFDecoder(model), HFDecoder(noisy(model, 0.1))
    shape = TreeShape.branching((2, 2, 1))
    for drafter, as_tree in ((ModelDrafter(draft), False), (TreeDrafter(draft, shape), True)):
        runs = []
        for n_prompt, text in texts[::20]:
            prompt = text[:n_prompt]
            out, run = (tree_generate(target, drafter, prompt, N_NEW) if as_tree else
                        speculative_generate(target, drafter, prompt, N_NEW, gamma=3))
            assert out.tolist() == text
            runs.append(run)
        assert 0 < Run.pool(runs).alpha < 1


def noisy(model, scale):
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p += scale * p.std() * torch.randn(p.shape, generator=generator)
    return model


# -- sampled -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("how", ["chain", "tree"])
def test_sampled_output_has_the_target_s_distribution(kind, model, how):
    """Summed over every way that the draws and the acceptance tests can fall, not sampled."""
    if kind == "Mistral":
        pytest.skip("the same cache as Llama's, and its trees go as those of the hybrids")
    target, draft = HFDecoder(model), HFDecoder(noisy(model, 0.3))
    prompt, sampler, n_new = [7, 8, 9, 10, 11][:CLASSES[kind][1] - 1], Sampler(temperature=3.0, top_k=2), 3

    def run(rng):
        if how == "chain":
            drafter = ModelDrafter(draft)
            out, _ = speculative_generate(target, drafter, prompt, n_new, 2, rng=rng, sampler=sampler)
        else:
            drafter = TreeDrafter(draft, TreeShape([(-1, 0), (-1, 1), (0, 0)]), sample=True)
            out, _ = tree_generate(target, drafter, prompt, n_new, rng=rng, sampler=sampler)
        return tuple(out[len(prompt):].tolist())

    wanted = exact(lambda history: rows_of(model, [history])[0, -1], sampler, prompt, n_new)
    found = outcomes(run)
    assert len(wanted) == 8 and same_distribution(found, wanted, 1e-4)


# -- the pieces --------------------------------------------------------------------------------------------

PARENTS = [-1, 0, 0, 1, 1, 2, 3, -1, 7]


def path(node):
    return [*(path(PARENTS[node]) if PARENTS[node] >= 0 else []), node]


@pytest.mark.parametrize("n_prompt", [0, 1, 6, 13])
def test_a_node_s_row_is_that_of_its_path_and_keep_commits_it(kind, model, decoder, n_prompt):
    rng = np.random.default_rng(n_prompt)
    prompt, nodes, later = rng.integers(3, V, n_prompt), rng.integers(3, V, len(PARENTS)), rng.integers(3, V, 3)
    for leaf in (0, 6, 8):
        decoder.rewind(0)
        if n_prompt:
            decoder.prefill(prompt)
        before = decoder.cache.lengths()
        rows = torch.cat([decoder.send(nodes[:4], PARENTS[:4]), decoder.send(nodes[4:], PARENTS[4:])])
        if decoder.tree_as_paths:
            assert decoder.cache.lengths() == before            # the cache itself is as it was until the commit
        assert decoder.hidden.shape == (5, 16)
        head = model.get_output_embeddings().weight.detach()
        np.testing.assert_allclose(decoder.hidden @ head.T, rows[4:], atol=1e-4)
        for i in range(len(PARENTS)):
            np.testing.assert_allclose(rows[i], rows_of(model, [[*prompt, *nodes[path(i)]]])[0, -1], atol=1e-4)
        decoder.commit(path(leaf))
        assert decoder.length == decoder.committed == n_prompt + len(path(leaf)) and past(decoder) <= 0
        sequence = [*prompt, *nodes[path(leaf)], *later]
        np.testing.assert_allclose(decoder.send(later), rows_of(model, [sequence])[0, -3:], atol=1e-4)


@pytest.mark.parametrize("forget", ["rewind", "commit nothing"])
def test_a_tree_that_is_dropped_leaves_no_trace(model, decoder, forget):
    prompt = list(range(5, 14))
    decoder.rewind(0)
    decoder.prefill(prompt)
    decoder.send([20, 21, 22], [-1, 0, 0])
    decoder.rewind(9) if forget == "rewind" else decoder.commit([])
    decoder.send([30, 31])
    decoder.rewind(10)
    np.testing.assert_allclose(decoder.send([40, 41]), rows_of(model, [[*prompt, 30, 40, 41]])[0, -2:], atol=1e-4)


def test_a_tree_behind_a_chain_that_is_not_committed(model, decoder):
    """The tree goes, in two parts; the chain stays, and goes on."""
    decoder.rewind(0)
    decoder.prefill(list(range(5, 12)))
    decoder.send([20, 21])
    rows = decoder.send([22, 23, 24], [1, 1, 2])
    for i, tail in enumerate(([22], [23], [22, 24])):
        wanted = rows_of(model, [[*range(5, 12), 20, 21, *tail]])[0, -1]
        np.testing.assert_allclose(rows[i], wanted, atol=1e-4)
    decoder.rewind(11)
    decoder.rewind(9)
    assert decoder.committed == 7 and decoder.length == 9
    np.testing.assert_allclose(decoder.send([25])[0], rows_of(model, [[*range(5, 12), 20, 21, 25]])[0, -1], atol=1e-4)
    decoder.commit([0, 1])
    np.testing.assert_allclose(decoder.send([26])[0], rows_of(model, [[*range(5, 12), 20, 21, 26]])[0, -1], atol=1e-4)
    assert decoder.length == 10


def test_which_models_send_trees_as_paths(kind, decoder):
    assert decoder.tree_as_paths == (kind in AS_PATHS)
    decoder.rewind(0)
    decoder.prefill([5, 6])
    full = [type(layer).__name__ for layer in decoder.cache.hf.layers if hasattr(layer, "keys")
            and not hasattr(layer, "sliding_window")]
    assert set(full) == {"GrowingLayer"}


def test_what_was_committed_cannot_be_taken_back_where_a_layer_has_a_state(kind, model, decoder):
    decoder.rewind(0)
    decoder.prefill(list(range(5, 13)))
    decoder.send([20, 21])
    assert decoder.rewind_floor == (8 if kind in HYBRID else 0)
    if kind in HYBRID:
        with pytest.raises(BadInput, match="cannot rewind to 7"):
            decoder.rewind(7)
        assert decoder.length == 10
    decoder.rewind(8)
    np.testing.assert_allclose(decoder.send([30])[0], rows_of(model, [[*range(5, 13), 30]])[0, -1], atol=1e-4)
    if kind not in HYBRID:
        decoder.rewind(6)
        assert decoder.committed == decoder.length == 6
        np.testing.assert_allclose(decoder.send([31])[0], rows_of(model, [[*range(5, 11), 31]])[0, -1], atol=1e-4)
    decoder.rewind(0)
    np.testing.assert_allclose(decoder.send([9])[0], rows_of(model, [[9]])[0, -1], atol=1e-4)


def test_a_recurrent_state_is_refused_whatever_the_class_says(monkeypatch):
    """A linear-attention model is known by what its cache holds after one token, not by its name."""
    kind = "Qwen3Next"
    config = getattr(transformers, kind + "Config")(
        **SMALL, **GROUPED, num_hidden_layers=2, head_dim=8, layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2,
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, shared_expert_intermediate_size=8)
    model = getattr(transformers, kind + "ForCausalLM")(config)
    for stateful in (True, False):
        monkeypatch.setattr(type(model), "_is_stateful", stateful)
        with pytest.raises(BadInput, match="Qwen3NextForCausalLM.* recurrent state"):
            HFDecoder(model, name="it")
