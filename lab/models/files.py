"""Is what lies in a model's folder what its name says? Read without torch, before anything is loaded."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from lab.support.errors import BadInput

POINTER = b"version https://git-lfs"


def check_folder(folder: Path) -> None:
    """BadInput that names the first file of a model's folder that is empty, a pointer, cut short or no JSON."""
    for file in _files(folder):
        _check_file(file)


def damaged(folder: Path) -> list[str]:
    """The names of all files of a model's folder that `check_folder` would refuse."""
    found = []
    for file in _files(folder):
        try:
            _check_file(file)
        except BadInput:
            found.append(file.name)
    return found


def _files(folder: Path) -> list[Path]:
    kinds = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja")
    return [file for file in sorted(folder.iterdir()) if file.suffix in kinds and file.is_file()]


def _check_file(file: Path) -> None:
    with open(file, "rb") as opened:
        begins = opened.read(len(POINTER))
    if begins == POINTER:
        raise BadInput(f'"{file}" is a Git LFS pointer, not the file itself: "git lfs pull" in its folder fetches it')
    if file.suffix in (".json", ".safetensors", ".bin", ".model") and not begins:
        raise BadInput(f'"{file}" is empty: fetch or copy it again')
    if file.name.endswith(".index.json"):
        index_parts(file)
    elif file.suffix == ".json":
        _read_json(file)
    if file.suffix == ".safetensors":
        _check_safetensors(file)
    if file.suffix == ".bin" and begins[:2] == b"PK" and not zipfile.is_zipfile(file):
        raise BadInput(f'"{file}" is cut short: fetch or copy it again')


def index_parts(file: Path) -> list[str]:
    """The names of the files that the index of a model's weights names; BadInput where it names none."""
    index = _read_json(file)
    weights = index.get("weight_map") if isinstance(index, dict) else None
    parts = set(map(str, weights.values())) if isinstance(weights, dict) else set()
    if not parts:
        raise BadInput(f'"{file}" names no files of weights: fetch or copy it again')
    return sorted(parts)


def _read_json(file: Path):
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        why = str(error).splitlines()[0]
        raise BadInput(f'"{file}" is not a valid JSON file ({why}): fetch or copy it again') from None


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
