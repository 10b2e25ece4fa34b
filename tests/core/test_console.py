"""console.py: flags and their errors, the record, output in any encoding and 80 columns, narrative order."""

import json
import math
import os
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import console
from console import Alpha, BadInput, Count, Fraction, NonNegative, OneOf, Positive, Share
from lab.support import output
from lab.support import record as runs
from lab.support.flags import spelled
from lab.support.text import kebab

TINY = '''
    # %% [markdown]
    # # 99. A tiny demo of α × γ
    #
    # **Question.** Does the console work — with τ ≤ 3, χ² and Σ…?
    #
    # **Takes.** about 1 s; needs numpy.
    #
    # - first point ± one
    # - second → last

    # %%
    from dataclasses import dataclass

    import numpy as np

    import console
    from console import Alpha, Count, OneOf, assumptions, fmt_time, observe, print_table


    @dataclass(frozen=True)
    class Assumptions:
        batch: Count = 1
        """sequences decoded together"""
        alpha: Alpha = 0.8  # acceptance rate α
        # draft lengths γ to try
        gammas: tuple[Count, ...] = (1, 3, 5)
        chip: OneOf("h100-sxm", "h100-pcie", "rtx-4090") = "h100-sxm"
        trained: bool = True
        mode: str = "plain"


    A = assumptions(Assumptions)

    # %% [markdown]
    # ## First section
    # Narrative one.

    # %%
    def show():
        rows = [[g, np.float32(0.5) * g, float("nan"), "≥ 1", None, g > 1] for g in A.gammas]
        print_table("speed", ["γ", "time", "odd", "text", "none", "more"], rows, title="Speed × γ",
                    formats={"time": fmt_time}, measured=["time"])


    show()
    observe("batch", "Batch {n} is {share:.1%} of two.", n=A.batch, share=A.batch / 2, holds=np.bool_(A.batch == 1))

    # %% [markdown] tags=["notebook"]
    # Only for notebooks.

    # %% tags=["notebook"]
    console.sliders(lambda x: None, x=(0, 1, 1, 0))

    # %% [markdown]
    # ## Second section
    # Narrative two.

    # %%
    if A.mode == "bad":
        raise console.BadInput(f'the mode "{A.mode}" is not γ: give "plain"')
    if A.mode == "crash":
        raise ZeroDivisionError("a bug")
    if A.mode == "interrupt":
        raise KeyboardInterrupt
    observe("reading", "A reading.", holds=False, measured=True)

    # %% [markdown]
    # ## Homework
    # The end.
'''


TINY_DOCS = "sequences decoded together", "draft lengths γ to try", "acceptance rate α"


@pytest.fixture
def tiny(write_demo):
    return write_demo(TINY)


@pytest.fixture(autouse=True)
def no_run(monkeypatch):
    """What is printed outside a demo belongs to no run of an earlier test."""
    monkeypatch.setattr(runs, "run", None)


# -------------------------------------------------------------------------------------------------------
# flags


@pytest.mark.parametrize("flags, words", [
    (["--btch", "3"], ["--btch", "--batch"]),
    (["--chip", "h1000"], ["h1000", "h100-sxm", "h100-pcie"]),
    (["--alpha", "1.3"], ["--alpha", "1.3", "below 1"]),
    (["--alpha=nan"], ["--alpha", "finite"]),
    (["--alpha", "-0.1"], ["--alpha", "-0.1"]),
    (["--batch", "0"], ["--batch", "at least 1", "0"]),
    (["--batch", "2.5"], ["--batch", "whole number", "2.5"]),
    (["--batch"], ["--batch", "needs a value"]),
    (["--batch", "1", "2"], ["--batch", "one value", "2"]),
    (["--gammas", "1", "0"], ["--gammas", "at least 1"]),
    (["--gammas", "1,3"], ["--gammas", "1,3", "spaces"]),
    (["--trained", "yes"], ["--trained", "yes"]),
    (["32"], ["32", "--batch"]),
    (["-b", "32"], ["-b", "--batch"]),
    (["--json", "/no/such/folder/x.json"], ["--json", "folder"]),
])
def test_a_bad_flag_is_one_sentence_and_nothing_else(tiny, flags, words, capsys):
    with pytest.raises(BadInput) as caught:
        console.run_demo(tiny, flags)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("flags", [["--btch", "3"], ["--chip", "h1000"], ["--mode", "bad"]])
def test_bad_input_of_a_script_exits_2_with_one_line(tiny, script, tmp_path, flags):
    record = tmp_path / "record.json"
    done = script(tiny, *flags, "--json", record)
    lines = done.stderr.decode().splitlines()
    assert done.returncode == 2
    assert len(lines) == 1 and lines[0].startswith("error: ") and lines[0].endswith(".")
    assert not record.exists()
    if flags[0] != "--mode":
        assert done.stdout == b""


@pytest.mark.slow
def test_a_crash_and_an_interrupt_leave_no_record(tiny, script, tmp_path):
    record = tmp_path / "record.json"
    done = script(tiny, "--mode", "crash", "--json", record)
    assert done.returncode == 1 and b"ZeroDivisionError" in done.stderr and b"Homework" not in done.stdout
    done = script(tiny, "--mode", "interrupt", "--json", record)
    assert done.returncode == 130 and done.stderr == b""
    assert list(tmp_path.glob("record*")) == []


def test_flags_set_the_assumptions(tiny, capsys):
    flags = ["--batch", "4", "--gammas", "2", "7", "--no-trained", "--chip=rtx-4090", "--alpha", "0"]
    record = console.run_demo(tiny, flags)
    assert record["assumptions"] == {"batch": 4, "alpha": 0.0, "gammas": [2, 7], "chip": "rtx-4090",
                                     "trained": False, "mode": "plain"}
    out = capsys.readouterr().out
    lines = {line.strip("* ").split()[0]: line for line in out.splitlines() if line.strip("* ")}
    for name, words in {"batch": ["4", TINY_DOCS[0], "1"], "gammas": ["2 7", TINY_DOCS[1], "1 3 5"],
                        "alpha": ["0.0", TINY_DOCS[2], "0.8"]}.items():
        assert lines[name].startswith("*") and all(word in lines[name] for word in words), "value, doc and default"
    assert not lines["mode"].startswith("*") and lines["mode"].split()[1] == "plain"


def test_help_lists_the_flags_and_runs_nothing(tiny, script):
    done = script(tiny, "--help", encoding="ascii")
    text = done.stdout.decode("ascii")
    assert done.returncode == 0 and done.stderr == b""
    for word in ("99. A tiny demo", "--batch", "sequences decoded together", "--no-trained", "--json FILE"):
        assert word in text
    assert "Narrative" not in text
    words = " ".join(text.split())
    for meaning in ("acceptance rate alpha (default: 0.8)", "draft lengths gamma to try (default: 1 3 5)",
                    "One of: h100-sxm, h100-pcie, rtx-4090. (default: h100-sxm)"):
        assert meaning in words


@pytest.mark.parametrize("name", ["H100 SXM", "h100_sxm", "H100-SXM"])
def test_a_name_may_be_spelled_a_little_differently(tiny, name):
    assert console.run_demo(tiny, ["--chip", name])["assumptions"]["chip"] == "h100-sxm"
    assert spelled(("B_c", "x"), tuple[OneOf("b-C"), ...]) == ("b-C", "x")


@pytest.mark.slow
def test_json_writes_through_a_link_and_into_nothing_but_a_file(tiny, script, tmp_path):

    link, real = tmp_path / "link", tmp_path / "real.json"
    link.symlink_to(real)
    assert script(tiny, "--json", link).returncode == 0
    assert link.is_symlink() and json.loads(real.read_text())["demo"] == "99"
    pipe, there = tmp_path / "pipe", tmp_path / "there"
    os.mkfifo(pipe)
    there.symlink_to(pipe)
    shut = ["/proc/x.json"] if Path("/proc").is_dir() else []
    for path in (pipe, there, tmp_path, tmp_path / ("x" * 300), *shut):
        with pytest.raises(BadInput, match="--json cannot write"):
            console.run_demo(tiny, ["--json", str(path)])
    assert pipe.is_fifo() and there.is_symlink()


@pytest.mark.parametrize("line, status, error", [
    ("raise KeyboardInterrupt", 130, ""), ("import no_such_package", 2, "no_such_package")])
def test_the_imports_of_a_demo_end_as_gently_as_the_rest(tmp_path, script, line, status, error):
    (tmp_path / "lab").mkdir()
    demo = tmp_path / "lab" / "97_imports.py"
    demo.write_text(f"import console\n{line}\n", encoding="utf-8")
    done = script(demo)
    lines = done.stderr.decode().splitlines()
    assert done.returncode == status and len(lines) == bool(error), lines
    assert not error or (error in lines[0] and "make setup" in lines[0])


def test_a_script_in_lab_does_not_hide_packages_of_the_same_name(tmp_path, script):
    """Python puts the folder of a script first on sys.path, and lab/ has folders called toy and chat."""
    (tmp_path / "lab").mkdir()
    for room in ("toy", "chat"):
        (tmp_path / "lab" / room).mkdir()
        (tmp_path / "lab" / room / "__init__.py").write_text("")
    demo = tmp_path / "lab" / "97_rooms.py"
    demo.write_text("import console\nfrom importlib.util import find_spec\n"
                    "print(find_spec('toy'), find_spec('chat'), find_spec('lab.toy') is not None)\n", encoding="utf-8")
    done = script(demo)
    assert done.returncode == 0 and done.stdout.split() == [b"None", b"None", b"True"], done.stderr


@pytest.mark.parametrize("value", ["9" * 5000, "-" + "9" * 5000, str(10**30), "10000000000001"])
@pytest.mark.parametrize("flag", ["--batch", "--gammas", "--plain"])
def test_a_number_of_any_size_is_a_sentence(write_demo, flag, value):
    path = write_demo(TINY.replace("trained: bool = True", "trained: bool = True\n        plain: int = 1"))
    with pytest.raises(BadInput) as caught:
        console.run_demo(path, [flag, value])
    assert flag in str(caught.value) and len(str(caught.value)) < 200


def test_bytes_that_are_no_utf8_are_a_sentence(tiny):
    with pytest.raises(BadInput, match="caf.* holds bytes that are no UTF-8"):
        console.run_demo(tiny, ["--mode", "caf\udce9"])


@pytest.mark.parametrize("below", ["", "further"])
def test_a_folder_for_output_that_cannot_be_made_is_a_sentence(tmp_path, monkeypatch, below):
    (tmp_path / "out").write_text("a file")
    monkeypatch.setattr(console, "OUT", tmp_path / "out" / below)
    with pytest.raises(BadInput, match="Not a directory.*DECODE_LAB_OUT"):
        console.out_folder()
    monkeypatch.setattr(console, "OUT", tmp_path / "new" / "folder")
    assert console.out_folder().is_dir()


def test_the_folder_for_output_may_be_named_from_home(tmp_path):
    import subprocess

    done = subprocess.run([sys.executable, "-c", "import console; print(console.out_folder())"], capture_output=True,
                          text=True, timeout=60, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(console.ROOT),
                                                                    "HOME": str(tmp_path), "DECODE_LAB_OUT": "~/there"})
    assert done.stdout.split() == [str(tmp_path / "there")] and (tmp_path / "there").is_dir(), done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full and a shell")
@pytest.mark.slow
def test_a_closed_or_full_stdout_is_no_traceback(tiny):
    import subprocess

    for shell, flags, status in ((">&-", "", 0), (">/dev/full", "", 1), (">&-", "--batch 0", 2),
                                 (">/dev/full", "--batch 0", 2), (">/dev/full", "--help", 1)):
        done = subprocess.run(f"'{sys.executable}' '{tiny}' {flags} {shell}", shell=True,
                              stderr=subprocess.PIPE, timeout=60,
                              env={**os.environ, "PYTHONPATH": str(console.ROOT)})
        assert done.returncode == status, (shell, flags, done.stderr)
        assert len(done.stderr.splitlines()) == (status == 2), done.stderr


@pytest.mark.slow
def test_a_figure_that_cannot_be_saved_is_one_line(write_demo, tmp_path, monkeypatch, capsys):
    (tmp_path / "out").write_text("a file")
    monkeypatch.setattr(console, "OUT", tmp_path / "out")
    assert console.run_demo(write_demo(FIGURES, "98_figures.py"))["figures"] == []
    lines = [line for line in capsys.readouterr().out.splitlines() if "not saved" in line]
    assert lines == [f"figure not saved: Not a directory: {console.within(tmp_path / 'out')}"] * 2


def test_a_flag_that_names_nothing_says_how_to_see_the_choices(tiny):
    with pytest.raises(BadInput, match=r"nearest are .* \(--help lists them\)"):
        console.run_demo(tiny, ["--chip", "h1000"])
    with pytest.raises(BadInput, match=r"nearest is --batch \(--help lists them\)"):
        console.run_demo(tiny, ["--bacth", "1"])


def test_an_impossible_default_is_named_as_the_field_and_not_as_a_flag(write_demo):
    demo = write_demo(TINY.replace("alpha: Alpha = 0.8", "alpha: Alpha = 80"))
    with pytest.raises(BadInput, match="^alpha must be at least 0 and below 1, not 80"):
        console.run_demo(demo)
    with pytest.raises(BadInput, match="^--alpha must be"):
        console.run_demo(demo, ["--alpha", "81"])
    assert console.run_demo(demo, ["--alpha", "0.5"])["assumptions"]["alpha"] == 0.5


def test_a_demo_of_a_copy_refuses_the_code_of_the_original(tmp_path, script, monkeypatch):
    for folder in ("lab", "notebooks"):
        (tmp_path / folder).mkdir()
    demo = tmp_path / "lab" / "99_tiny.py"
    demo.write_text(textwrap.dedent(TINY).lstrip(), encoding="utf-8")
    (tmp_path / "console.py").write_bytes(Path(console.__file__).read_bytes())
    done = script(demo)
    error = done.stderr.decode()
    assert done.returncode == 2 and done.stdout == b"" and len(error.splitlines()) == 1
    assert f'taken from "{console.ROOT}"' in error and f'"{tmp_path}"' in error and "make setup" in error

    @dataclass(frozen=True)
    class Assumptions:
        n: int = 1

    monkeypatch.setattr(output, "in_notebook", lambda: True)
    monkeypatch.setattr(console, "in_notebook", lambda: True)
    monkeypatch.setattr(output, "cell_run", lambda: 0)
    monkeypatch.chdir(tmp_path / "notebooks")
    with pytest.raises(BadInput, match="make setup"):
        console.assumptions(Assumptions)
    (tmp_path / "console.py").unlink()
    assert console.assumptions(Assumptions).n == 1


@pytest.mark.parametrize("kind, good, bad", [
    (Count, [1, 7, 10**12], [0, -1, 10**12 + 1]), (NonNegative, [0, 3], [-1, 10**13]),
    (Positive, [0.1, 1e-9, 1e12], [0.0, -2.0, 1e-10, 2e12, math.inf, math.nan]),
    (Share, [0.1, 1.0], [0.0, 1.1]),
    (Fraction, [0.0, 1.0], [1.1, -0.1]), (Alpha, [0.0, 0.99], [1.0, -0.1]), (OneOf("a", "b"), ["a"], ["c"]),
    (tuple[Alpha, ...], [(0.1, 0.2)], [(0.1, 1.0)]),
])
def test_annotated_values_are_checked_for_defaults_too(kind, good, bad):
    def make(value):
        @dataclass(frozen=True)
        class Assumptions:
            field: kind = value
        return Assumptions

    for value in good:
        assert console.assumptions(make(value)).field == value
    for value in bad:
        with pytest.raises(BadInput, match="field"):
            console.assumptions(make(value))


def test_post_init_may_refuse_a_combination(write_demo):
    path = write_demo('''
        # %%
        from dataclasses import dataclass
        from console import BadInput, assumptions

        @dataclass(frozen=True)
        class Assumptions:
            low: int = 1
            high: int = 2

            def __post_init__(self):
                if self.low > self.high:
                    raise BadInput(f"low {self.low} is above high {self.high}")

        A = assumptions(Assumptions)
    ''')
    assert console.run_demo(path, ["--high", "5"])["assumptions"] == {"low": 1, "high": 5}
    with pytest.raises(BadInput, match="low 3 is above high 2"):
        console.run_demo(path, ["--low", "3"])


def test_a_module_that_is_not_the_script_keeps_the_defaults(tiny, monkeypatch):
    import runpy

    monkeypatch.setattr(sys, "argv", ["pytest", "--btch", "3"])
    assert runpy.run_path(str(tiny), run_name="a_demo")["A"].batch == 1


# ------------------------------------------------------------------------------------------------------
# record


def test_the_record_has_everything_as_plain_json(tiny, script, tmp_path):
    path = tmp_path / "record.json"
    done = script(tiny, "--json", path)
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert list(record) == ["demo", "assumptions", "tables", "observations", "figures", "samples", "host",
                            "versions"]
    assert record["demo"] == "99"
    assert record["tables"] == [{
        "id": "speed", "title": "Speed × γ", "columns": ["γ", "time", "odd", "text", "none", "more"],
        "measured": ["time"],
        "rows": [[1, 0.5, None, "≥ 1", None, False], [3, 1.5, None, "≥ 1", None, True],
                 [5, 2.5, None, "≥ 1", None, True]]}]
    assert record["observations"] == [
        {"id": "batch", "text": "Batch 1 is 50.0% of two.", "holds": True, "measured": False},
        {"id": "reading", "text": "A reading.", "holds": False, "measured": True}]
    assert record["host"]["cores"] >= 1 and record["host"]["cpu"] and record["host"]["os"]
    assert record["versions"]["numpy"] == np.__version__
    assert "torch" not in record["versions"]  # it was not imported
    assert [name.name for name in tmp_path.iterdir() if "record" in name.name] == ["record.json"]


IDS = '''
    # %%
    from dataclasses import dataclass
    from console import assumptions, observe, print_table

    @dataclass(frozen=True)
    class Assumptions:
        texts: tuple[str, ...] = ("easy", "H100 SXM")

    A = assumptions(Assumptions)
    for text in A.texts:
        print_table(f"speed-{text}", ["n"], [[1]])
        observe(f"speed-{text}", "It is {n}.", n=1, holds=True)
'''


def test_an_id_is_unique_among_its_kind_and_not_printed(write_demo, capsys):
    path = write_demo(IDS)
    record = console.run_demo(path)
    assert [t["id"] for t in record["tables"]] == ["speed-easy", "speed-h100-sxm"]
    assert [o["id"] for o in record["observations"]] == ["speed-easy", "speed-h100-sxm"]
    assert "speed-" not in capsys.readouterr().out
    with pytest.raises(BadInput, match='"speed-easy" stands twice'):
        console.run_demo(path, ["--texts", "easy", "Easy"])
    with pytest.raises(BadInput, match='"-" is no id'):
        kebab("-")


def test_run_demo_has_fresh_state_each_time(tiny, capsys):
    first, second = console.run_demo(tiny), console.run_demo(tiny, ["--batch", "2"])
    assert len(first["tables"]) == len(second["tables"]) == 1
    assert [o["holds"] for o in first["observations"]] == [True, False]
    assert [o["holds"] for o in second["observations"]] == [False, False]
    assert first["assumptions"]["batch"] == 1
    assert "[ no ] Does not hold: Batch 2 is 100.0% of two." in capsys.readouterr().out


def test_observations_and_tables_refuse_what_does_not_fit():
    with pytest.raises(BadInput, match="missing"):
        console.observe("given", "{missing}", holds=True, given=1)
    with pytest.raises(BadInput, match="2 columns"):
        console.print_table("a-b", ["a", "b"], [[1]])
    with pytest.raises(BadInput, match="tme"):
        console.print_table("times", ["time"], [[1]], measured=["tme"])


# ------------------------------------------------------------------------------------------------------
# output


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "cp1252", "latin-1"])
def test_output_in_a_pipe_is_readable_in_any_encoding(tiny, script, encoding):
    done = script(tiny, encoding=encoding)
    assert done.returncode == 0 and done.stderr == b""
    text = done.stdout.decode(encoding)
    assert "\x1b" not in text  # no colours
    assert all(len(line) <= 80 and line == line.rstrip() for line in text.splitlines())
    if encoding == "ascii":
        for words in ("A tiny demo of alpha x gamma", "Speed x gamma", "tau <= 3, chi2 and sum...", "+/- one",
                      ">= 1", "-> last", "console work - with", "* first"):
            assert words in text
    if encoding == "cp1252":
        assert "Speed × gamma" in text and "±" in text and "tau <= 3, chi²" in text
    assert text.count("?") == 1  # the one of the question: nothing was replaced by a question mark


def test_the_narrative_stands_between_the_outputs(tiny, capsys):
    console.run_demo(tiny)
    out = capsys.readouterr().out
    order = ["99. A tiny demo", "Question.", "Assumptions", "First section", "Narrative one.", "Speed × γ",
             "[ ok ] Batch 1", "Second section", "Narrative two.", "[ no ] Does not hold: A reading.",
             "Homework"]
    places = [out.index(words) for words in order]
    assert places == sorted(places)
    assert "Only for notebooks" not in out
    assert "\n\n\n" not in out


@pytest.mark.slow
def test_the_narrative_does_not_depend_on_how_the_path_is_written(tiny, script):
    whole = script(tiny).stdout
    for name in ("99_tiny.py", "./99_tiny.py", f"../{tiny.parent.name}/99_tiny.py"):
        assert script(name, cwd=tiny.parent).stdout == whole


# -----------------------------------------------------------------------------------------------------
# figures

FIGURES = '''
    # %% [markdown]
    # # 98. Figures

    # %%
    from dataclasses import dataclass
    import matplotlib.pyplot as plt
    import console

    @dataclass(frozen=True)
    class Assumptions:
        size: float = 3.0

    A = console.assumptions(Assumptions)
    fig, axes = console.subplots(1, 2, size=(A.size, 2.0))
    axes[0].plot([1, 2])
    console.figure("two", fig, "two panels")
    fig, ax = plt.subplots()
    console.figure("one", fig)
    assert plt.get_fignums() == []
'''


def test_figures_need_no_display(write_demo, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(console, "ROOT", tmp_path)
    monkeypatch.setattr(console, "OUT", tmp_path / "out")
    monkeypatch.delenv("DISPLAY", raising=False)
    record = console.run_demo(write_demo(FIGURES, "98_figures.py"))
    assert record["figures"] == [{"id": "two", "path": "out/98-1.png"}, {"id": "one", "path": "out/98-2.png"}]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["98-1.png", "98-2.png"]
    assert (tmp_path / "out/98-1.png").read_bytes().startswith(b"\x89PNG")
    assert "Figure: two panels (out/98-1.png)" in capsys.readouterr().out


@pytest.mark.slow
def test_figures_of_tests_leave_those_of_the_project_alone(write_demo, script, tmp_path):
    assert not console.OUT.is_relative_to(console.ROOT)
    done = script(write_demo(FIGURES, "98_figures.py"), "--json", tmp_path / "record.json")
    assert done.returncode == 0
    figures = [each["path"] for each in json.loads((tmp_path / "record.json").read_text())["figures"]]
    assert figures == [(console.OUT / f"98-{k}.png").as_posix() for k in (1, 2)]
    assert all(Path(path).exists() for path in figures) and not (console.ROOT / "out" / "98-1.png").exists()




def test_raw_samples_stand_in_the_record_and_print_nothing(write_demo, capsys):
    path = write_demo('''
        # %%
        import numpy as np
        from dataclasses import dataclass
        from console import assumptions, record_samples

        @dataclass(frozen=True)
        class Assumptions:
            n: int = 2

        A = assumptions(Assumptions)
        print("before")
        record_samples("seconds", np.arange(A.n) / 2)
        ''')
    assert console.run_demo(path)["samples"] == {"seconds": [0.0, 0.5]}
    assert capsys.readouterr().out.rstrip().endswith("before")
