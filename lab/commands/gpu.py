"""python -m lab gpu: the demos of the real target on a CUDA device; their records are what the README's table shows.

    python -m lab gpu                                  8 minutes at most; records go to results/
    python -m lab gpu --device cuda:1 --new-tokens 20  further flags go to the demos that know them
    python -m lab gpu --device cpu --out FOLDER        a dry run without a GPU

Each demo runs with its default target, and with weights of a registered shape drawn at random, which need no download;
flags that name a target or a shape take the place of both. A record holds host, versions and raw samples, and is
written whole or not at all; that of a run that failed is not.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import console
from console import BadInput, print_table, print_text
from lab import __main__ as front
from lab.support.files import writable_folder

RESULTS = console.WORK / "results"
MINUTES = 8.0  # for all runs together
DEMOS = range(14, 21)
SETTINGS: tuple[list[str], ...] = ([], ["--random-weights", "pythia-2.8b", "--dtype", "bfloat16"])


def run(argv: list[str]) -> int:
    """Run what `argv` asks for, print what was written; 0 when every run left a record, else 1."""
    device, folder, flags = _own_flags(argv)
    available = {number: path for number, path in front.demos().items()
                 if number in DEMOS and "--device" in front.flags_of(path)}
    if not available:
        raise BadInput(f"there is no demo among {DEMOS[0]} to {DEMOS[-1]} that takes --device")
    gpu, facts = _gpu(device, folder)
    runs = []
    named = any(flag.partition("=")[0].replace("_", "-") in ("--target", "--random-weights") for flag in flags)
    for setting in SETTINGS[:1] if named else SETTINGS:
        # Without --random-weights a run would be the one with the default target again.
        knows = {number: path for number, path in available.items()
                 if not setting or setting[0] in front.flags_of(path)}
        shares = front.shared_out([*setting, *flags], knows) if knows else {}
        runs += [(number, shares[number]) for number in knows]
    rows, end = [], time.monotonic() + 60 * MINUTES
    writable_folder(folder, "--out")
    for number, given in runs:
        started = time.monotonic()
        record, failure = _record(available[number], ["--device", device, *given], end - started)
        shown = None
        if record is not None:
            record["host"] |= facts
            path = folder / name_of(record, gpu)
            console.write_text(path, json.dumps(record, indent=1, allow_nan=False) + "\n")
            shown = console.within(path)
        seconds = time.monotonic() - started
        rows.append([f"{number:02d}", " ".join(given) or "default target", seconds, failure or "ran"])
        if shown:
            print_text(f"written: {shown}")
    print_table("runs", ["demo", "flags", "seconds", ""], rows, title=f"On {gpu}", formats={"seconds": ".0f"})
    return int(any(row[-1] != "ran" for row in rows))


def _own_flags(argv: list[str]) -> tuple[str, Path, list[str]]:
    """(device, folder of the records, the flags for the demos)."""
    own, rest, words = {"--device": "cuda", "--out": str(RESULTS)}, [], iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name not in own:
            rest.append(word)
            continue
        own[name] = value if equals else next(words, "")
        if not own[name] or own[name].startswith("-"):
            raise BadInput(f"{name} needs a value: {name} {'cuda' if name == '--device' else 'FOLDER'} would be right")
    bad = next((word for word in rest if word.partition("=")[0] in ("--json", "-h", "--help")), None)
    if bad or (rest and not rest[0].startswith("-")):
        raise BadInput(f'gpu takes --device, --out and the demos\' own flags, not "{bad or rest[0]}"')
    return own["--device"], Path(own["--out"]).expanduser(), rest


def _gpu(device: str, folder: Path) -> tuple[str, dict]:
    """The device's name, and what a record's host says of it: gpu, cuda (that PyTorch was built for) and driver.

    BadInput where there is no such device, and where results/ would get a record of no GPU.
    """
    import torch
    if device.partition(":")[0] == "cuda" and not torch.cuda.is_available():
        raise BadInput("PyTorch sees no CUDA device here, so nothing was run; --device cpu --out FOLDER is a dry run")
    from lab.models.loading import checked_device
    place = checked_device(device)
    if place.type == "cuda":
        name = torch.cuda.get_device_name(place)
        return name, {"gpu": name, "cuda": torch.version.cuda, "driver": _driver()}
    if folder.resolve() == RESULTS.resolve():
        raise BadInput(f"{console.within(RESULTS)} is for records of GPUs: with --device {device}, --out must name "
                       f"another folder")
    return console.host()["cpu"], {}


def _driver() -> str | None:
    """The version of NVIDIA's driver, which PyTorch does not tell; None where nvidia-smi does not answer."""
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                              capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split("\n")[0].strip() or None if done.returncode == 0 else None


def _record(demo: Path, flags: list[str], seconds: float) -> tuple[dict | None, str]:
    """(the record, "") of a demo run in a process of its own, or (None, why there is none)."""
    if seconds <= 0:
        return None, f"not run: {MINUTES:g} minutes are over"
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "record.json"
        console.flush()
        try:
            status = subprocess.run([sys.executable, str(demo), *flags, "--json", str(kept)], timeout=seconds,
                                    env=front.child_environment()).returncode
        except subprocess.TimeoutExpired:
            return None, f"stopped: {MINUTES:g} minutes are over"
        if status in (130, -2):
            raise KeyboardInterrupt
        if status or not kept.exists():
            return None, f"failed ({status})"
        return json.loads(kept.read_text(encoding="utf-8")), ""


def name_of(record: dict, gpu: str) -> str:
    """The file's name: GPU, demo, target and dtype of a record."""
    said = record["assumptions"]
    shape = said.get("random_weights")
    target = f"random-{shape}" if shape else Path(said["target"]).name
    words = [gpu, record["demo"], target, said.get("dtype", "")]
    return "_".join(re.sub(r"[^a-z0-9.]+", "-", str(word).lower()).strip("-") for word in words) + ".json"
