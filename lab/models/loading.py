"""Loading a real model: from a GGUF file, a folder, or the hub's local cache."""

from __future__ import annotations

import functools
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch

from console import BadInput, progress, unknown
from lab.models import unpacked
from lab.models.decoder import HFDecoder
from lab.models.files import check_folder
from lab.models.finding import DTYPES, locate
from lab.models.kernels import packed

# Nothing is fetched while loading, and no code of a folder's own is run, or asked about.
LOCAL: dict = dict(local_files_only=True, trust_remote_code=False)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of that name in DTYPES, or BadInput."""
    if name not in DTYPES:
        raise unknown("dtype", name, DTYPES)
    return getattr(torch, name)


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


def load(name: str | None = None, device: str = "cpu", dtype: str = "float32") -> HFDecoder:
    """A model on this machine as a decoder with an empty cache; its weights in `dtype` on `device`.

    name: None or "smollm2-135m" (the default target), a short name in HUB_IDS, a hub id (looked for in the
    local cache), a folder as save_pretrained writes it, or a .gguf file (its weights are unpacked to
    `dtype`).
    device: "auto", "cpu", "cuda", "cuda:1", ... Raises BadInput for a model that is not there, an unknown
    dtype or device, and a model whose cache cannot roll back.
    """
    weights = torch_dtype(dtype)
    place = checked_device(device)
    shown, path = locate(name)
    from transformers.utils import logging
    logging.disable_progress_bar()
    if path.suffix.lower() == ".gguf":
        model, tokenizer = _named(path, "a GGUF file", lambda: _load_unpacked(path, weights))
        return HFDecoder(packed(model.to(place)), tokenizer, shown)
    check_folder(path)
    model, tokenizer, processor, unused = _load_folder(path, weights)
    decoder = HFDecoder(packed(model.to(place)), tokenizer, shown, processor)
    decoder.notes += unused
    return decoder


def _named(path: Path, what: str, action):
    """action(), whose errors of any kind become a BadInput that names the path: a damaged file fails in any way."""
    try:
        return action()
    except BadInput:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(". ")
        said = "" if reason.endswith(":") else f" ({reason})"  # a list follows, whose first line alone says nothing
        raise BadInput(f'"{path}" cannot be loaded as {what}: a file is missing, cut short, damaged, or of a kind that '
                       f"transformers does not load{said}") from error


def _load_folder(path: Path, weights: torch.dtype):
    """(model, tokenizer, image processor or None, sentences on weights that nothing reads) of a model's folder."""
    import transformers
    tokenizer = _named(path, "a tokenizer", lambda: transformers.AutoTokenizer.from_pretrained(path, **LOCAL))
    config = _named(path / "config.json", "a configuration",
                    lambda: transformers.AutoConfig.from_pretrained(path, **LOCAL))
    # A model that reads images too (LFM3-VL) decodes text like any other.
    composite = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind = transformers.AutoModelForImageTextToText if composite else transformers.AutoModelForCausalLM
    model, info = _named(path, "a causal language model", lambda: kind.from_pretrained(
        path, dtype=weights, output_loading_info=True, **LOCAL))
    missing, unused = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if missing:
        raise BadInput(f'"{path}" lacks {len(missing)} of the weights that its config.json asks for, '
                       f"such as {missing[0]}")
    notes = (f"{path.name}: {len(unused)} of the weights are read by no layer, such as {unused[0]}.",) if unused else ()
    return model, tokenizer, _image_processor(path) if composite else None, notes


def _image_processor(path: Path):
    """transformers' image processor of a model's folder; None where there is none, as text needs none."""
    from transformers import AutoImageProcessor
    from transformers.utils import logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # without torchvision the processor for PIL serves, which need not be said
    try:
        return AutoImageProcessor.from_pretrained(path, **LOCAL)
    except (OSError, ValueError, KeyError, ImportError):
        return None
    finally:
        logging.set_verbosity(before)


def load_tokenizer(name: str | None = None):
    """transformers' tokenizer of a model, the one that `load` gives its decoder, without reading the weights.

    Raises BadInput for a model that is not there, and for one without a tokenizer.
    """
    path = locate(name)[1]
    import transformers
    if path.suffix.lower() != ".gguf":
        check_folder(path)
        return _named(path, "a tokenizer", lambda: transformers.AutoTokenizer.from_pretrained(path, **LOCAL))
    if unpacked.is_kept(kept := unpacked.place(path)):
        return transformers.AutoTokenizer.from_pretrained(kept, **LOCAL)
    with _gguf_read_once():
        return _named(path, "a tokenizer", lambda: transformers.AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, **LOCAL))


@contextmanager
def _gguf_read_once():
    """Inside, a GGUF file's header and gguf's table of names are read and built once.

    transformers reads the header again for configuration, tokenizer and weights, and gguf builds its table once per
    submodule: without this, loading takes about three times as long.
    """
    import gguf
    with ExitStack() as stack:
        for name in ("GGUFReader", "get_tensor_name_map"):
            stack.enter_context(mock.patch.object(gguf, name, functools.lru_cache(getattr(gguf, name))))
        yield stack


def _load_unpacked(path: Path, dtype: torch.dtype):
    """(model, tokenizer) of a GGUF file; a small one is unpacked once, and then comes from the cache."""
    kept = unpacked.place(path)
    if not unpacked.is_kept(kept) and path.stat().st_size <= unpacked.LARGEST:
        unpacked.keep(kept, *_load_gguf(path, torch.float32))
    return _load_folder(kept, dtype)[:2] if kept.is_dir() else _load_gguf(path, dtype)


def _load_gguf(path: Path, dtype: torch.dtype):
    """(model, tokenizer) of a GGUF file, its packed weights unpacked to `dtype`."""
    import transformers
    from transformers import modeling_gguf_pytorch_utils as reader
    file = dict(gguf_file=path.name, **LOCAL)
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
