"""Is what lies in a model's folder what its name says? Read without torch, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

from lab.support.errors import BadInput

POINTER = b"version https://git-lfs"


def check_folder(folder: Path) -> None:
    """BadInput that names the first file of a model's folder that is empty, a pointer, cut short or no JSON."""
    for file in sorted(folder.iterdir()):
        if file.suffix in (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja") and file.is_file():
            _check_file(file)


def _check_file(file: Path) -> None:
    with open(file, "rb") as opened:
        begins = opened.read(len(POINTER))
    if begins == POINTER:
        raise BadInput(f'"{file}" is a Git LFS pointer, not the file itself: "git lfs pull" in its folder fetches it')
    if file.suffix in (".json", ".safetensors", ".bin") and not begins:
        raise BadInput(f'"{file}" is empty: fetch or copy it again')
    if file.suffix == ".json":
        _read_json(file)
    if file.suffix == ".safetensors":
        _check_safetensors(file)


def _read_json(file: Path):
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise BadInput(f'"{file}" is not a valid JSON file ({str(error).splitlines()[0]}): fetch or copy it again') from None


def _check_safetensors(file: Path) -> None:
    """The header (8 bytes of length, then JSON) says where the last tensor ends: there the file must end too."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = opened.read(length) if 2 <= length <= size - 8 else b""
    try:
        tensors = json.loads(header)
        ends = 8 + length + max((entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"),
                                default=0)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise BadInput(f'"{file}" is no safetensors file, or a damaged one: fetch or copy it again') from None
    if ends != size:
        what = "cut short" if size < ends else "longer than it should be"
        raise BadInput(f'"{file}" is {what}: {size} bytes, where its header says {ends}; fetch or copy it again')
