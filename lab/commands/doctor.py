"""python -m lab doctor: what this machine has, what it lacks for the demos, and one line that says it all."""

import importlib.metadata
import platform
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import console
from console import print_table, print_text
from lab.models import unpacked
from lab.models.finding import find_models
from lab.support import host, packages


def run(demos: Iterable[Path]) -> int:
    """Print packages, machine and models, and how many of these demos can run; 0."""
    _print_packages()
    _print_machine()
    _print_toy()
    _print_models()
    cards = [console.demo_card(path) for path in demos]
    lacks = {card["number"]: lacking(card) for card in cards}
    _print_lacks(lacks)
    able = sum(not missing for missing in lacks.values())
    print(f"{host.in_one_line()}: {able} of {len(cards)} demos can run")
    return 0


def lacking(card: dict) -> list[str]:
    """The packages that a demo needs, by its card, and that are not installed."""
    names = [name.strip() for name in card["needs"].split(",") if name.strip()]
    return [name for name in names if _version(name) is None]


def _print_lacks(lacks: dict[str, list[str]]) -> None:
    """A sentence for each command that installs something missing; lacks: demo -> packages that it lacks."""
    missing = dict.fromkeys(name for names in lacks.values() for name in names)
    for command in dict.fromkeys(map(packages.command_for, missing)):
        wanted = [name for name in missing if packages.command_for(name) == command]
        numbers = [number for number, names in lacks.items() if set(names) & set(wanted)]
        print_text(f"Without {' and '.join(wanted)} these demos cannot run: {', '.join(numbers)}. In the lab's folder, "
                   "make setup installs everything, and this installs what they lack:")
        print(command)  # on a line of its own, so that it can be copied


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _print_packages() -> None:
    tested, rows = _tested_versions(), [["python", platform.python_version(), None, ""]]
    for name in [*packages.BASE, *[name for names in packages.EXTRAS.values() for name in names], packages.APART]:
        version = _version(name)
        rows.append([name, version, tested.get(name), verdict(name, version, tested.get(name))])
    columns = ["package", "here", "tested", ""]
    if not tested:  # constraints.txt lies in the lab's folder, and is not installed
        columns.remove("tested")
        rows = [[name, version, mark] for name, version, _, mark in rows]
    print_table("packages", columns, rows, title="Packages")


def _tested_versions() -> dict[str, str]:
    try:
        lines = (console.ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return dict(line.strip().split("==") for line in lines if "==" in line)


def verdict(name: str, version: str | None, tested: str | None) -> str:
    """A mark for a package that is missing or not the tested version; "2.13.0+cpu" is a build of 2.13.0."""
    if version is None:
        extra = packages.extra_of(name)
        return f"missing: extra {extra}" if extra else "missing"
    return "differs" if tested and version.partition("+")[0] != tested.partition("+")[0] else ""


def _print_machine() -> None:
    facts = console.host()
    rows = [["processor", facts["cpu"]], ["cores", str(facts["cores"])],
            ["memory", console.fmt_bytes(facts["memory"]) if facts["memory"] else "unknown"], ["system", facts["os"]]]
    try:
        import hw_specs
    except ImportError as error:  # numpy, with which it measures
        rows.append(["memory bandwidth, read", f"not measured: {error.name or error} is missing"])
    else:
        chip = hw_specs.measure_this_machine()
        rows.append(["memory bandwidth, read", f"{console.fmt_bytes(chip.bandwidth)}/s"])
        rows += [[f"matrix rate, {dtype}", f"{rate / 1e9:.3g} GFLOP/s"] for dtype, rate in chip.flops.items()]
    rows.append(["GPU", _gpu()])
    print_table("machine", ["item", "value"], rows, title="This machine, measured", measured=["value"])


def _gpu() -> str:
    try:
        import torch
    except ImportError:
        return "unknown: torch is missing"
    except OSError:  # one of its libraries is damaged, or of another system
        return "unknown: torch cannot be loaded"
    if torch.cuda.is_available():
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return ", ".join(f"{gpu.name} ({console.fmt_bytes(gpu.total_memory)})" for gpu in found)
    if torch.backends.mps.is_available():
        return "Apple GPU (mps)"
    return "none that torch sees"


def _print_toy() -> None:
    with suppress(ImportError):  # said above, as a package that is missing
        from lab import toy
        try:
            holds = toy.load_params("large")[1].max_length
        except Exception as error:  # a damaged file fails in any way
            why = str(error).strip() or type(error).__name__
            print_text(f"The toy models of demos 01 to 13 cannot be read ({why}): the files in "
                       "lab/toy/weights as the repository has them would be right.")
            return
        print_text(f"The toy models of demos 01 to 13 were trained on texts of up to {toy.TRAINED_LENGTH} tokens and "
                   f"hold {holds}.")


def _print_models() -> None:
    try:
        models = find_models()
    except ImportError as error:
        print_text(f"Real models: not looked for, because {error.name or error} is missing (make setup).")
        return
    print_table("models", ["real model", "here", "the command that would fetch it"],
                [[model["name"], model["found"], None if model["found"] else model["command"]]
                 for model in models], title="Real models")
    for model in models:
        if model["found"]:  # a path on a line of its own can be copied whole
            print_text(f"{model['name']} is")
            print(console.within(model["where"]))
    kept = unpacked.size()
    print_text(f"Unpacked models, {console.fmt_bytes(kept)} (python -m lab clean deletes them), are in" if kept
               else "The default model is unpacked when it is first needed, and kept in")
    print(unpacked.cache_folder())
