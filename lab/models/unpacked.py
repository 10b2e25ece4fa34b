"""GGUF files unpacked once: each as a folder that transformers loads in a second, in a cache that anyone may delete."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from lab.models.files import check_folder
from lab.support.errors import BadInput

LARGEST = 300e6  # bytes of a packed file that is kept unpacked: eight times as many, at most


def cache_folder() -> Path:
    """Where unpacked models lie: in DECODE_LAB_CACHE, or in the system's folder for what can be made again."""
    named = os.environ.get("DECODE_LAB_CACHE")
    if named:
        return Path(named).expanduser().absolute() / "unpacked"
    if sys.platform == "darwin":
        system = Path.home() / "Library" / "Caches"
    elif os.name == "nt":
        system = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        system = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return system / "decode-lab" / "unpacked"


def place(gguf: Path) -> Path:
    """The folder of a GGUF file with just this content, unpacked by the transformers that is installed."""
    with open(gguf, "rb") as opened:
        content = hashlib.file_digest(opened, "sha256").hexdigest()[:16]
    return cache_folder() / f"{gguf.stem}-{content}-transformers-{metadata.version('transformers')}"


def is_kept(folder: Path) -> bool:
    """Whether the folder is there and whole; a damaged one is removed."""
    if not folder.is_dir():
        return False
    try:
        check_folder(folder)
        return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()
    except (BadInput, OSError):
        shutil.rmtree(folder, ignore_errors=True)
        return False


def keep(folder: Path, model, tokenizer) -> None:
    """Write a model and its tokenizer there; a full disk or a folder that cannot be written leaves nothing.

    They are written beside it and renamed, so another process sees all or nothing, and the first to end wins.
    """
    made = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        made.rename(folder)
    except OSError:
        pass
    finally:
        if made is not None and made.exists():
            shutil.rmtree(made, ignore_errors=True)


def size() -> int:
    """Bytes of all that is kept."""
    total = 0
    for file in cache_folder().rglob("*"):
        with suppress(OSError):  # another process may be at it
            total += file.stat().st_size if file.is_file() else 0
    return total


def clean() -> int:
    """Delete all that is kept, and what a killed process left half written; returns the bytes of it."""
    freed = size()
    shutil.rmtree(cache_folder(), ignore_errors=True)
    return freed - size()
