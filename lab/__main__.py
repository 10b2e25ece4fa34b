"""python -m lab: the lab's front door.

    python -m lab                       list the demos
    python -m lab run 03                run one; also 1-6, 1,4, lecture (the toy's demos and 14), real, all
    python -m lab run 05 --batch 32     flags after the numbers go to the demos that know them
    python -m lab doctor                what this machine has: versions, cores, bandwidth, GPU, real models
    python -m lab fetch pythia          bring real models from the hub: pythia, lfm2, lfm3-vl, or owner/name
    python -m lab clean                 delete the models that were unpacked once and kept
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
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import console
from console import print_header, print_table, print_text
from lab.support import host, packages
from lab.support.errors import BadInput, cut, unknown
from lab.support.flags import decodable

LAB = Path(__file__).resolve().parent
ROOT = LAB.parent
COMMANDS = ("list", "run", "doctor", "fetch", "clean", "gpu", "ngram", "chat")
FIRST_REAL = 14  # the demo that ends the lecture; those behind it take minutes each


def demos() -> dict[int, Path]:
    """Number -> file of each demo, in order."""
    return {int(path.name[:2]): path for path in sorted(LAB.glob("[0-9][0-9]_*.py"))}


def selected(words: list[str], available: dict[int, Path]) -> list[int]:
    """The numbers that words such as "03", "1-6", "1,4", "lecture" and "all" name, in order and once each.

    A range takes what there is between its ends. Raises BadInput for a word that names no demo.
    """
    if not words:
        raise BadInput("run needs the number of a demo, such as 03, 1-6, 1,4 or all")
    chosen = []
    for word in filter(None, ",".join(words).split(",")):
        if re.match(r"[A-Za-z_][\w-]*=", word):
            name, _, value = word.partition("=")
            raise BadInput(f'unexpected "{cut(word)}": flags begin with --, as in --{cut(name)} {cut(value) or "1"}')
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", word)
        if word in ("all", "lecture", "real"):
            low = FIRST_REAL + 1 if word == "real" else 0
            high = FIRST_REAL if word == "lecture" else max(available, default=0)
            found = [number for number in available if low <= number <= high]
        elif match:
            low, high = int(match.group(1)), int(match.group(2) or match.group(1))
            found = [number for number in available if low <= number <= high]
        else:
            found = []
        if not found:
            known = ", ".join(f"{number:02d}" for number in available) or "none"
            raise BadInput(f'no demo is called "{cut(word)}"; the numbers are {known}, 1-6 or all work too, and flags '
                           "begin with --")
        chosen += found
    if not chosen:
        raise BadInput(f'"{" ".join(words)}" names no demo; give numbers, such as 03, 1-6, 1,4 or all')
    return sorted(set(chosen))


def list_demos() -> int:
    """Print number, question, seconds and needs of each demo."""
    cards = [console.demo_card(path) for path in demos().values()]
    print_table("demos", ["demo", "question", "takes", "needs"],
                [[card["number"], card["question"] or card["title"], card["takes"], card["needs"]]
                 for card in cards],
                title="The demos")
    print_text("Run them: python -m lab run 01, run 1-6, run lecture, run real. This machine: python -m lab doctor.")
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
                raise BadInput(f"{unknown('flag', flag, names)}{console.HELP}")
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
            asked = _value_of("--json", given[number])
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
                record = json.loads((Path(asked).expanduser() if asked else kept).read_text(encoding="utf-8"))
            results.append((path.stem, status, seconds, record.get("observations", [])))
    statuses = [status for _, status, _, _ in results]
    if statuses == [2]:  # its sentence is all there is to say
        return 2
    if not {"-h", "--help"} & set(flags):
        _summary(results)
    return int(any(statuses))


def child_environment() -> dict[str, str]:
    """This process's environment, with which a child takes the lab's modules from the folder this file is in.

    So a child needs no installation, and in a copy of the lab it does not run the installed original.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def _value_of(name: str, flags: list[str]) -> str | None:
    value = None
    for flag, after in zip(flags, [*flags[1:], None]):
        if flag == name:
            value = after
        elif flag.startswith(name + "="):
            value = flag.partition("=")[2]
    return value


def _summary(results: list[tuple]) -> None:
    """Of several demos a table and what does not hold; and one line to paste."""
    if len(results) > 1:
        _print_results(results)
    elif not results[0][1]:
        print()
    ran = sum(status == 0 for _, status, _, _ in results)
    total = sum(seconds for _, _, seconds, _ in results)
    verdicts = [observation["holds"] for _, _, _, observations in results for observation in observations]
    names = f"demo {results[0][0][:2]}" if len(results) == 1 else f"{ran} of {len(results)} demos"
    said = f"{names} ran" if ran else f"{names} failed"
    unjudged = f", {verdicts.count(None)} not judged" if None in verdicts else ""
    print(f"{host.in_one_line()}: {said} in {total:.1f} s, {verdicts.count(True)} of {len(verdicts)} observations hold"
          f"{unjudged}")


def _print_results(results: list[tuple]) -> None:
    rows = []
    for name, status, seconds, observations in results:
        verdicts = [observation["holds"] for observation in observations]
        counts = [verdicts.count(verdict) for verdict in (True, False, None)]
        ended = "refused its input" if status == 2 else f"failed ({status})"
        rows.append([name, seconds, None, None, None, ended] if status else [name, seconds, *counts, "ran"])
    print_header("Summary")
    print_table("summary", ["demo", "seconds", "hold", "do not hold", "not judged", ""], rows,
                formats={"seconds": ".1f"})
    failed = [name for name, status, _, _ in results if status]
    if failed:
        print_text(f"Failed: {', '.join(failed)}.")
    for name, _, _, observations in results:
        for observation in observations:
            if not observation["holds"]:
                reading = ", a reading of this machine" if observation["measured"] else ""
                text = f"{observation['text']} ({name[:2]}{reading})"
                console.print_claim(console.Claim(text, observation["holds"], observation.get("not_judged", ""),
                                                  bounded="value" in observation))


def fetch(words: list[str]) -> int:
    """Bring real models from the hub to this machine, and print where each lies. Nothing else here reaches a hub."""
    flag = next((word for word in words if word.startswith("-")), None)
    if not words or flag:
        raise BadInput(f"fetch needs the names of models{f', not {flag}' if flag else ''}: pythia, lfm2, lfm3-vl, one "
                       "that doctor lists, or owner/name")
    from lab.models import fetching

    for hub_id in dict.fromkeys(hub_id for word in words for hub_id in fetching.fetched_by(word)):
        folder = fetching.fetch(hub_id)
        print_text(f"{hub_id} is")
        print(folder)  # not wrapped, so that it can be copied
    return 0


def main(argv: list[str]) -> int:
    """Do what the command line says and return the exit status."""
    decodable(argv)
    command, rest = (argv[0], argv[1:]) if argv else ("list", [])
    asks = rest in (["-h"], ["--help"])
    if command in ("-h", "--help", "help") or (command in ("list", "run", "doctor", "fetch", "clean") and asks):
        print((__doc__ or f"python -m lab {'|'.join(COMMANDS)}").strip())  # -OO drops docstrings
        return 0
    missing = [name for name in ("rich", "tyro") if importlib.util.find_spec(name) is None]
    if missing:
        raise BadInput(f"{' and '.join(missing)} cannot be found by {sys.executable}: run it with "
                       ".venv/bin/python -m lab, or make setup first")
    if command not in COMMANDS:
        raise unknown("command", command, COMMANDS)
    if command == "run":
        first_flag = next((i for i, word in enumerate(rest) if word.startswith("-")), len(rest))
        return run(rest[:first_flag], rest[first_flag:])
    if command == "fetch":
        return fetch(rest)
    if command == "gpu":
        from lab.commands import gpu

        if asks:
            print((gpu.__doc__ or "").strip())
            return 0
        return gpu.run(rest)
    if command == "ngram":
        from lab.ngram import command as ngram_cli

        return ngram_cli.run(rest)
    if command == "chat":
        from lab.chat import command as chat

        return chat.run(rest)
    if command == "clean":
        from lab.commands import clean

        return clean.run(rest)
    if rest:
        raise BadInput(f'{command} takes nothing after it, so "{rest[0]}" is not possible there')
    if command == "list":
        return list_demos()
    from lab.commands import doctor

    return doctor.run(demos().values())


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
    except ModuleNotFoundError as error:
        if packages.command_for(str(error.name)) is None:  # a fault of the lab's own
            raise
        console.exit_with(packages.not_found(error))
    except BrokenPipeError:  # `| head`: the reader has what it wanted
        console.end_quietly()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(entry(sys.argv[1:]))
