"""lab/drafts.py on small random models of the real classes, against models built another way."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from transformers import (GPTNeoXConfig, GPTNeoXForCausalLM, Lfm2Config, Lfm2ForCausalLM, LlamaConfig, LlamaForCausalLM,
                          MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM)

from decode_lab import autoregressive_generate, speculative_generate, tree_generate
from lab.drafters.model import ModelDrafter
from lab.drafters.trees import ConfidentTreeDrafter, TreeDrafter, TreeShape
from console import BadInput
from lab.models import drafts, quant
from lab.models import kernels
from lab.models.decoder import HFDecoder

V, N = 97, 5
SMALL = dict(vocab_size=V, hidden_size=32, num_hidden_layers=N, num_attention_heads=4, intermediate_size=64,
             max_position_embeddings=640, bos_token_id=1, eos_token_id=2)
GQA = dict(SMALL, num_key_value_heads=2)
TYPES = ["conv", "full_attention", "conv", "conv", "full_attention"]
CLASSES = {"llama": (LlamaForCausalLM, lambda: LlamaConfig(**GQA)),
           "neox": (GPTNeoXForCausalLM, lambda: GPTNeoXConfig(**SMALL)),
           "qwen3": (Qwen3ForCausalLM, lambda: Qwen3Config(**GQA, head_dim=8)),
           "mistral": (MistralForCausalLM, lambda: MistralConfig(**GQA, sliding_window=8)),
           "lfm2": (Lfm2ForCausalLM, lambda: Lfm2Config(**GQA, layer_types=list(TYPES)))}
SUBSETS = [(0, 1), (0, 1, 2), (0, 1, 3), (0, 1, 2, 4)]


pytestmark = pytest.mark.usefixtures("one_thread")


def build(kind: str):
    torch.manual_seed(7)
    made, config = CLASSES[kind]
    model = made(config())
    with torch.no_grad():                                       # larger than usual, so that every layer and mask shows
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.2)
    return model.eval()


@pytest.fixture(scope="module", params=CLASSES)
def target(request):
    return HFDecoder(build(request.param), name=request.param)


@pytest.fixture(scope="module")
def llama():
    return HFDecoder(build("llama"), name="llama")


def tokens(n, seed=0):
    return np.random.default_rng(seed).integers(3, V, n)


def close(a, b, atol=3e-5):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=atol)


def layer_list(model):
    return model.base_model.layers


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
    ids, draft = tokens(40), drafts.LayerDraft(target, range(k))
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
    ids, draft, n = tokens(20), drafts.LayerDraft(target, kept), 12
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
    draft, alone = drafts.LayerDraft(target, (0, 1, 2)), drafts.LayerDraft(target, (0, 1, 2))
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
    draft, other = drafts.LayerDraft(target, (0, 1, 3)), drafts.LayerDraft(target, range(2))
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
    draft = drafts.LayerDraft(target, (0, 1, 2))
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
        fresh = drafts.LayerDraft(target, (0, 1, 2))
        length, row = target.length, draft.send(tokens(2, 7))
        assert draft.length == length + 2
        close(row, fresh.send(tokens(2, 7)))


def test_two_drafts_of_one_target_do_not_read_each_other_s_rows(target):
    a, b = drafts.LayerDraft(target, (0, 1, 2)), drafts.LayerDraft(target, range(2))
    target.rewind(0)
    target.prefill(tokens(10))
    a.send(tokens(3, 1))
    b.send(tokens(3, 2))
    assert (a.length, b.length) == (10, 13)                     # what a had sent is overwritten, and forgotten
    row = a.send(tokens(3, 3))
    close(row, drafts.LayerDraft(target, (0, 1, 2)).send(tokens(3, 3)))


def test_a_buffer_that_is_full_is_not_the_target_s_to_grow(target):
    draft, fresh = drafts.LayerDraft(target, (0, 1, 3)), HFDecoder(copy.deepcopy(target.model))
    target.rewind(0)
    target.prefill(tokens(254))
    before, ids = snapshot(target), tokens(300)
    rows = [draft.send(ids[i:i + 1])[0] for i in range(6)]    # a buffer holds 508 rows for 254, 256 for less
    rows += [*draft.send(ids[6:])]
    same_cache(before, snapshot(target))
    other = drafts.LayerDraft(target, (0, 1, 3))
    close(torch.stack(rows), other.send(ids), 1e-4)
    fresh.prefill(tokens(254))
    close(target.send(ids[:3]), fresh.send(ids[:3]))
    assert draft.length == 257


# -- drafting ------------------------------------------------------------------------------------------------

def test_all_layers_are_accepted_for_200_rounds(target):
    """And drafting recomputes nothing: a forward per drafted token, of one token, but for the first of a run."""
    rounds, draft, sent = 200 if target.name in ("llama", "lfm2") else 40, drafts.LayerDraft(target, range(N)), []
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


def test_chain_and_tree_give_plain_greedy_text(target):
    kept = drafts.LayerDraft(target, (0, 1, 3))
    first = drafts.LayerDraft(target, range(2))
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
    draft = ModelDrafter(drafts.LayerDraft(llama, range(3)))
    one, two = (speculative_generate(llama, draft, tokens(9), 30, 3, 1.0, np.random.default_rng(1))[0]
                for _ in "12")
    assert one.tolist() == two.tolist() and len(set(one.tolist())) > 8


def test_misuse_is_one_sentence(llama):
    for layers, message in (((1, 2), "from 0"), ((), "from 0"), ((0, 2, 1), "increasing"), ((0, 5), "at most 4")):
        with pytest.raises(BadInput, match=message):
            drafts.LayerDraft(llama, layers)
    with pytest.raises(BadInput, match="such as 1"):
        drafts.LayerDraft(HFDecoder(build("lfm2")), (0, 2))
    draft = drafts.LayerDraft(llama, range(2))
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


# -- which layers --------------------------------------------------------------------------------------------

def overlap(target, kept, ids):
    """Mean sum of min(p, q), computed another way: layers left out pass their input on."""
    model = copy.deepcopy(target.model)
    batch = torch.tensor(ids)[None]
    with torch.inference_mode():
        p = model(batch, use_cache=False).logits.softmax(-1)
        for i, layer in enumerate(layer_list(model)):
            if i not in kept:
                layer.register_forward_hook(lambda module, args, out: args[0])
        q = model(batch, use_cache=False).logits.softmax(-1)
    return float(torch.minimum(p, q).sum(-1).mean())


def test_one_layer_left_out_is_the_best_one(target):
    ids = tokens(60)
    found = drafts.search_layers(target, [ids], N - 1, width=N, swaps=0)
    must = {0, 1} if target.name == "lfm2" else {0}
    every = {tuple(j for j in range(N) if j != i): None for i in range(N) if i not in must}
    values = {kept: overlap(target, kept, ids) for kept in every}
    assert found == max(values, key=values.get)


def test_the_search_finds_layers_that_do_nothing():
    model = build("llama")
    with torch.no_grad():
        for i in (1, 3):                                        # all they add to the residual stream is zero
            layer_list(model)[i].self_attn.o_proj.weight.zero_()
            layer_list(model)[i].mlp.down_proj.weight.zero_()
    target = HFDecoder(model)
    assert drafts.search_layers(target, [tokens(30), tokens(50, 1)], 3) == (0, 2, 4)
    assert not model._forward_hooks and not layer_list(model)[2]._forward_hooks


def test_swaps_help_and_the_seed_decides(target):
    ids = tokens(50)
    alone = drafts.search_layers(target, [ids], 3, width=1, swaps=0)
    swapped = drafts.search_layers(target, [ids], 3, width=1, swaps=12, seed=1)
    assert swapped == drafts.search_layers(target, [ids], 3, width=1, swaps=12, seed=1)
    assert overlap(target, swapped, ids) >= overlap(target, alone, ids) and swapped[0] == 0 and len(swapped) == 3
    for n, texts, message in ((0, [ids], "cannot be kept"), (6, [ids], "to 5 would"), (3, [], "no texts")):
        with pytest.raises(BadInput, match=message):
            drafts.search_layers(target, texts, n)


# -- integers ------------------------------------------------------------------------------------------------

def dense(linear):
    """What a Linear of a quantized copy multiplies by, read off its outputs."""
    size = linear.blocked.shape[1] if hasattr(linear, "blocked") else linear.weight.shape[1]
    with torch.inference_mode():
        zero = linear(torch.zeros(1, size))
        return (linear(torch.eye(size)) - zero).T.numpy()


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "int4"])
@pytest.mark.parametrize("kind", ["llama", "neox"])
def test_the_weights_are_those_of_lab_quant(kind, scheme, pack):
    model = build(kind)
    target = HFDecoder(kernels.packed(model) if pack else model, name=kind)
    before = {name: p.clone() for name, p in model.named_parameters()}
    copied, how = drafts.quantized(target, scheme), quant.parse_scheme(scheme)
    new_ones = [m for m in copied.model.modules() if isinstance(m, drafts._Blocked) or type(m) is torch.nn.Linear]
    for old, new in zip(drafts._linears(model), new_ones, strict=True):
        wanted = quant.dequantize(*quant.quantize(old.weight.detach().numpy().T, how), how).T
        close(dense(new), wanted, 2e-6)
        assert np.abs(wanted - old.weight.detach().numpy()).max() > 1e-4
        assert isinstance(new, drafts._Blocked) == isinstance(old, kernels.PackedLinear)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    shared = {id(p) for p in model.parameters()}
    assert sum(id(p) in shared for p in copied.model.parameters()) >= 2 * N  # the norms and the embedding at least


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_bytes_of_a_step(tied, head):
    model = LlamaForCausalLM(LlamaConfig(**GQA, tie_word_embeddings=tied)).eval()
    target = HFDecoder(model)
    inside, norms, table = N * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64), (2 * N + 1) * 32, 32 * V
    rows = N * (2 * 32 + 2 * 16 + 2 * 64 + 32) + (V if head else 0)          # output channels, one scale each
    wanted = inside + (table if head else 4 * table) + 2 * rows + 4 * norms
    draft = drafts.quantized(target, "int8", head)
    assert drafts.draft_bytes(draft) == wanted and draft.streamed_bytes() == target.streamed_bytes()
    four = drafts.quantized(target, "int4-g32", head)
    groups = N * (2 * 32 + 2 * 16 + 2 * 64 + 32 * 2) + (V if head else 0)
    assert drafts.draft_bytes(four) == inside // 2 + (table // 2 if head else 4 * table) + 2 * groups + 4 * norms
    first = drafts.LayerDraft(target, range(2))
    assert drafts.draft_bytes(first) == 4 * (inside * 2 // N + table + 5 * 32)
    assert drafts.draft_bytes(target) == target.streamed_bytes() == 4 * (inside + table + norms)
    assert (copy_of := draft.model.get_input_embeddings().weight) is model.get_input_embeddings().weight
    assert torch.equal(copy_of, model.get_input_embeddings().weight)


def test_a_quantized_copy_drafts_with_its_own_cache(target):
    draft = drafts.quantized(target, "int8")
    prompt = tokens(11)
    plain, _ = autoregressive_generate(target, prompt, 30)
    text, run = speculative_generate(target, ModelDrafter(draft), prompt, 30, 3)
    assert text.tolist() == plain.tolist() and run.alpha > 0.8
    assert draft.cache is not target.cache and draft.tokenizer == target.tokenizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "int4-g64", "int4"])
def test_integer_kernels_compute_what_the_rounded_weights_do(scheme, dtype):
    torch.manual_seed(1)
    sizes = dict(GQA, hidden_size=64, intermediate_size=640, vocab_size=96)  # more than one part of 256 channels
    target = HFDecoder(LlamaForCausalLM(LlamaConfig(**sizes)).eval().to(dtype))
    fast, slow = drafts.integer_kernels(target, scheme), drafts.quantized(target, scheme)
    x = torch.randn(3, 64, dtype=dtype)
    for a, b in zip(layer_list(fast.model)[0].modules(), layer_list(slow.model)[0].modules()):
        if isinstance(a, drafts._Integer) and b.weight.shape[1] == 64:
            with torch.inference_mode():
                size = float(b(x).float().abs().max())
                close(a(x).float() / size, b(x).float() / size, 0.02)      # 16-bit activations and scales
                other = (b.weight + 0.3 * b.weight.roll(1, 0)).to(dtype)   # and wrong weights are further away
                assert (a(x) - x @ other.T).abs().max() > 0.1 * size
    assert fast.send([5, 6, 7]).shape == (3, 96)
    assert drafts.draft_bytes(fast) == drafts.draft_bytes(slow) and fast.streamed_bytes() < target.streamed_bytes() * (
        0.4 if dtype == torch.float32 else 0.7)


def test_kernels_that_do_not_exist_are_refused_with_the_reason(llama, monkeypatch):
    with pytest.raises(BadInput, match="one scale per output channel"):
        drafts.integer_kernels(llama, "int8-g32")
    with pytest.raises(BadInput, match="multiple of 16 outputs"):
        drafts.integer_kernels(llama, "int4-g32")               # 97 tokens in the vocabulary
    with pytest.raises(BadInput, match="groups of 32, 64, 128 or 256"):
        drafts.integer_kernels(llama, "int4-g16")
    with pytest.raises(BadInput, match="unknown quantization"):
        drafts.quantized(llama, "int5")
    monkeypatch.setattr(llama, "device", torch.device("cuda"))
    with pytest.raises(BadInput, match="no integer kernels for llama on cuda"):
        drafts.integer_kernels(llama, "int8")


def test_a_draft_with_another_tokenizer_is_refused_with_both_names():
    """Two tokenizers of the tokenizers library, trained on different texts to the same size."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    def trained(text):
        made = Tokenizer(models.BPE(unk_token="?"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        made.train_from_iterator([text], trainers.BpeTrainer(vocab_size=40, special_tokens=["?"], show_progress=False))
        return PreTrainedTokenizerFast(tokenizer_object=made)

    one, two = trained("the cat sat on the mat, the cat"), trained("a quick brown fox jumps over a lazy dog")
    model = build("llama")
    target, draft = HFDecoder(model, one, "the cat"), HFDecoder(build("llama"), two, "the fox")
    with pytest.raises(BadInput, match="the fox and the cat have different tokenizers"):
        speculative_generate(target, ModelDrafter(draft), tokens(4) % 20, 4, 2)
    for fits in (drafts.LayerDraft(target, range(2)), drafts.quantized(target, "int8"), HFDecoder(model, one)):
        speculative_generate(target, ModelDrafter(fits), tokens(4) % 20, 4, 2)
