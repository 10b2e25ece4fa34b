"""console.py: flags and their errors, the record, output in any encoding and 80 columns, narrative order."""

import json
import math
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import console
from console import Alpha, BadInput, Count, Fraction, NonNegative, OneOf, Positive, Share

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
        print_table(["γ", "time", "odd", "text", "none", "more"], rows, title="Speed × γ",
                    formats={"time": fmt_time}, measured=["time"])


    show()
    observe("Batch {n} is {share:.1%} of two.", n=A.batch, share=A.batch / 2, holds=np.bool_(A.batch == 1))

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
    observe("A reading.", holds=False, measured=True)

    # %% [markdown]
    # ## Homework
    # The end.
'''


@pytest.fixture
def tiny(write_demo):
    return write_demo(TINY)


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
def test_a_bad_flag_is_one_sentence_and_nothing_else(tiny, flags, words, capsys, monkeypatch):
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
    assert "* batch       4         sequences decoded together (default 1)" in out
    assert "draft lengths γ to try (default 1 3 5)" in out and "acceptance rate α (default 0.8)" in out
    assert "  mode        plain" in out


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
    assert console._spelled(("B_c", "x"), tuple[OneOf("b-C"), ...]) == ("b-C", "x")


def test_json_writes_through_a_link_and_into_nothing_but_a_file(tiny, script, tmp_path):
    import os

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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full and a shell")
def test_a_closed_or_full_stdout_is_no_traceback(tiny):
    import os
    import subprocess

    for shell, flags, status in ((">&-", "", 0), (">/dev/full", "", 1), (">&-", "--batch 0", 2),
                                 (">/dev/full", "--batch 0", 2), (">/dev/full", "--help", 1)):
        done = subprocess.run(f"'{sys.executable}' '{tiny}' {flags} {shell}", shell=True,
                              stderr=subprocess.PIPE, timeout=60,
                              env={**os.environ, "PYTHONPATH": str(console.ROOT)})
        assert done.returncode == status, (shell, flags, done.stderr)
        assert len(done.stderr.splitlines()) == (status == 2), done.stderr


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

    monkeypatch.setattr(console, "in_notebook", lambda: True)
    monkeypatch.setattr(console, "_place", lambda: (0, 0))
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
        "title": "Speed × γ", "columns": ["γ", "time", "odd", "text", "none", "more"], "measured": ["time"],
        "rows": [[1, 0.5, None, "≥ 1", None, False], [3, 1.5, None, "≥ 1", None, True],
                 [5, 2.5, None, "≥ 1", None, True]]}]
    assert record["observations"] == [{"text": "Batch 1 is 50.0% of two.", "holds": True, "measured": False},
                                      {"text": "A reading.", "holds": False, "measured": True}]
    assert record["host"]["cores"] >= 1 and record["host"]["cpu"] and record["host"]["os"]
    assert record["versions"]["numpy"] == np.__version__
    assert "torch" not in record["versions"]  # it was not imported
    assert [name.name for name in tmp_path.iterdir() if "record" in name.name] == ["record.json"]


def test_run_demo_has_fresh_state_each_time(tiny, capsys):
    first, second = console.run_demo(tiny), console.run_demo(tiny, ["--batch", "2"])
    assert len(first["tables"]) == len(second["tables"]) == 1
    assert [o["holds"] for o in first["observations"]] == [True, False]
    assert [o["holds"] for o in second["observations"]] == [False, False]
    assert first["assumptions"]["batch"] == 1
    assert "[ no ] Does not hold: Batch 2 is 100.0% of two." in capsys.readouterr().out


def test_values_become_json():
    @dataclass
    class Point:
        x: float

    value = {"a": np.int64(3), "b": np.array([1.5, np.inf]), "c": (True, np.bool_(False)),
             "d": Point(-math.inf), "e": {2, 1}, "f": Path("x"), 1: np.float32(0.5)}
    assert console._jsonable(value) == {"a": 3, "b": [1.5, None], "c": [True, False], "d": {"x": None},
                                        "e": [1, 2], "f": "x", "1": 0.5}


def test_observations_and_tables_refuse_what_does_not_fit():
    with pytest.raises(BadInput, match="missing"):
        console.observe("{missing}", holds=True, given=1)
    with pytest.raises(BadInput, match="2 columns"):
        console.print_table(["a", "b"], [[1]])
    with pytest.raises(BadInput, match="tme"):
        console.print_table(["time"], [[1]], measured=["tme"])


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


def test_the_narrative_does_not_depend_on_how_the_path_is_written(tiny, script):
    whole = script(tiny).stdout
    for name in ("99_tiny.py", "./99_tiny.py", f"../{tiny.parent.name}/99_tiny.py"):
        assert script(name, cwd=tiny.parent).stdout == whole


def _table(capsys, *args, **options) -> list[str]:
    capsys.readouterr()
    console.print_table(*args, **options)
    return capsys.readouterr().out.splitlines()


def test_numbers_are_to_the_right_and_have_three_digits(capsys):
    lines = _table(capsys, ["name", "n", "value"], 
                   [["a", 1, 0.012345], ["long", 12345, 98765.4], ["x", None, 0.0]])
    assert lines[:2] == ["name      n   value", "───────────────────"]
    assert lines[2:5] == ["a         1  0.0123", "long  12345   98765", "x         -       0"]


@pytest.mark.parametrize("columns", [6, 9, 14, 25])
def test_a_wide_table_fits_and_breaks_no_number(capsys, columns):
    names = [f"rather long header number{i}" for i in range(columns)]
    numbers = [f"{1234567.25 + i:,.2f}" for i in range(columns)]
    lines = _table(capsys, names, [[1234567.25 + i for i in range(columns)]],
                   formats={name: ",.2f" for name in names})
    text = "\n".join(lines)
    assert all(len(line) <= 80 for line in lines)
    for number in numbers:
        assert number in text.split()
    for i in range(columns):
        assert f"number{i}" in text.split()
    assert "…" not in text and "..." not in text


def test_long_texts_wrap_between_words_and_numbers_stay(capsys):
    words = "a sentence of quite some length that has to be wrapped between its words to fit " * 2
    lines = _table(capsys, ["verdict", "n"], [[words, 123456789]])
    assert all(len(line) <= 80 for line in lines)
    assert " ".join(" ".join(lines[2:]).split()).replace("123456789 ", "") == words.strip()
    unbroken = _table(capsys, ["path", "n"], [["x" * 200, 7]])
    assert all(len(line) <= 80 for line in unbroken) and "".join(unbroken).count("x") == 200


def test_observations_hang(capsys):
    console.observe("word " * 40, holds=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[ ok ] word") and all(line.startswith("       word") for line in lines[1:])
    assert all(len(line) <= 80 for line in lines)


def test_progress_is_silent_in_a_pipe(capsys, monkeypatch):
    monkeypatch.setattr(console, "SHOW_PROGRESS_AFTER", 0.0)
    assert list(console.progress(range(3), "work")) == [0, 1, 2]
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_shows_progress_and_colours(write_demo):
    import os
    import subprocess

    path = write_demo("""
        import console
        console.SHOW_PROGRESS_AFTER = 0.0
        assert list(console.progress(range(3), "counting")) == [0, 1, 2]
        console.observe("It ended.", holds=True)
    """)
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(console.ROOT)}
    environment.pop("NO_COLOR", None)
    done = subprocess.run([sys.executable, str(path)], stdout=theirs, stderr=theirs, env=environment,
                          timeout=60)
    os.close(theirs)
    text = os.read(ours, 100_000).decode()
    os.close(ours)
    assert done.returncode == 0 and "counting" in text
    assert "\x1b[32m[ ok ] \x1b[0mIt ended." in text


@pytest.mark.parametrize("value, text", [
    (6.65e-3, "6.65 ms"), (0.0, "0 ns"), (1.5, "1.50 s"), (999.96e-6, "1.00 ms"), (2.5e-7, "250 ns"),
    (75.2, "75.2 s")])
def test_fmt_time(value, text):
    assert console.fmt_time(value) == text


def test_fmt_bytes_and_counts():
    assert console.fmt_bytes(17e9) == "17.0 GB" and console.fmt_bytes(23_040) == "23.0 KB"
    assert console.fmt_bytes(512) == "512 B" and console.fmt_bytes(0) == "0 B"
    assert console.fmt_count(8_030_261_248) == "8.03 B" and console.fmt_count(134_515_008) == "135 M"
    assert console.fmt_count(999_600) == "1.00 M" and console.fmt_count(64) == "64"


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
    console.figure(fig, "two panels")
    fig, ax = plt.subplots()
    console.figure(fig)
    assert plt.get_fignums() == []
'''


def test_figures_need_no_display(write_demo, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(console, "ROOT", tmp_path)
    monkeypatch.setattr(console, "OUT", tmp_path / "out")
    monkeypatch.delenv("DISPLAY", raising=False)
    record = console.run_demo(write_demo(FIGURES, "98_figures.py"))
    assert record["figures"] == ["out/98-1.png", "out/98-2.png"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["98-1.png", "98-2.png"]
    assert (tmp_path / "out/98-1.png").read_bytes().startswith(b"\x89PNG")
    assert "Figure: two panels (out/98-1.png)" in capsys.readouterr().out


def test_figures_of_tests_leave_those_of_the_project_alone(write_demo, script, tmp_path):
    assert not console.OUT.is_relative_to(console.ROOT)
    done = script(write_demo(FIGURES, "98_figures.py"), "--json", tmp_path / "record.json")
    assert done.returncode == 0
    figures = json.loads((tmp_path / "record.json").read_text())["figures"]
    assert figures == [(console.OUT / f"98-{k}.png").as_posix() for k in (1, 2)]
    assert all(Path(path).exists() for path in figures) and not (console.ROOT / "out" / "98-1.png").exists()


def test_a_file_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    console.write_text(path, "old")

    def fail(*args):
        raise OSError("no space")

    monkeypatch.setattr(console.os, "replace", fail)
    with pytest.raises(OSError):
        console.write_text(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


# -----------------------------------------------------------------------------------------------------
# sliders


def test_sliders_do_nothing_in_a_script(capsys):
    console.sliders(lambda **values: print("called"), alpha=(0.1, 0.9, 0.1, 0.5))
    assert capsys.readouterr().out == ""


def test_a_moved_slider_calls_the_function(monkeypatch):
    import ipywidgets
    import IPython.display

    calls, shown, made = [], [], []
    for kind in ("IntSlider", "FloatSlider"):
        def make(real=getattr(ipywidgets, kind), **options):
            made.append(real(**options))
            return made[-1]

        monkeypatch.setattr(ipywidgets, kind, make)
    monkeypatch.setattr(console, "in_notebook", lambda: True)
    monkeypatch.setattr(IPython.display, "display", lambda data, raw: shown.append(data["text/plain"]))
    console.sliders(lambda **values: calls.append(values), alpha=(0.1, 0.9, 0.1, 0.5), gamma=(1, 8, 1, 4))
    assert calls == [{"alpha": 0.5, "gamma": 4}]  # the plain table below
    assert "alpha and gamma" in shown[0] and "(" not in shown[0]
    made[1].value = 6
    assert calls[1:] == [{"alpha": 0.5, "gamma": 6}]


@pytest.mark.parametrize("name, known, expected", [
    ("h1000", ["v100", "t4", "h100-sxm", "h100-pcie", "h200"], ["h100-sxm", "h100-pcie"]),
    ("--bacth", ["--batch", "--json", "--alpha"], ["--batch"]),
    ("h100-sxn", ["h100-sxm", "l4"], ["h100-sxm"]),
])
def test_the_nearest_names_begin_alike_or_have_the_same_letters(name, known, expected):
    assert console.nearest(name, known) == expected


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
