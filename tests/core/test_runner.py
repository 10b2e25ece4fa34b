"""python -m lab: the list, the choice of demos, what a run of several reports, and its errors."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import time

import pytest

import console
from console import BadInput
from lab import __main__ as runner
from lab.support.flags import flag_of

GOOD = '''
    # %% [markdown]
    # # 01. Good
    #
    # **Question.** Does a good demo run,
    # on two lines?
    #
    # **Watch for.** Nothing.
    #
    # **Takes.** about 2 s; needs numpy, matplotlib.

    # %%
    from dataclasses import dataclass
    from console import Count, assumptions, observe

    @dataclass(frozen=True)
    class Assumptions:
        batch: Count = 1
        """sequences"""

    A = assumptions(Assumptions)
    observe("batch", "The batch is {n}.", n=A.batch, holds=A.batch == 1)
    observe("reading", "A reading is high.", holds=False, measured=True)
'''
FAILING = '''
    # %% [markdown]
    # # 02. Failing

    # %%
    raise ZeroDivisionError("a bug")
'''


@pytest.fixture
def lab(write_demo, tmp_path, monkeypatch):
    write_demo(GOOD, "01_good.py")
    write_demo(FAILING, "02_failing.py")
    write_demo(GOOD.replace("01. Good", "04. Other"), "04_other.py")
    write_demo("raise SystemExit(9)", "helper.py")
    monkeypatch.setattr(runner, "LAB", tmp_path)
    return tmp_path


def test_a_demo_is_described_by_its_first_cell(lab):
    assert console.demo_card(lab / "01_good.py") == {
        "number": "01", "title": "01. Good", "question": "Does a good demo run, on two lines?",
        "watch": "Nothing.", "takes": "about 2 s", "needs": "numpy, matplotlib"}
    assert console.demo_card(lab / "02_failing.py") == {
        "number": "02", "title": "02. Failing", "question": "", "watch": "", "takes": "", "needs": ""}


def test_the_list_has_number_question_seconds_and_needs(lab, capsys):
    assert runner.main([]) == 0
    out = capsys.readouterr().out
    for words in ("01", "Does a good demo run, on two lines?", "about 2 s", "numpy, matplotlib", "04",
                  "02. Failing"):
        assert words in out
    assert "helper" not in out and all(len(line) <= 80 for line in out.splitlines())


@pytest.mark.parametrize("words, numbers", [
    (["1"], [1]), (["01"], [1]), (["1-4"], [1, 2, 4]), (["4,1"], [1, 4]), (["1", "4"], [1, 4]),
    (["all"], [1, 2, 4]), (["1-2", "2-9"], [1, 2, 4])])
def test_demos_are_chosen_by_number(lab, words, numbers):
    assert runner.selected(words, runner.demos()) == numbers


@pytest.mark.parametrize("argv, words", [
    (["run", "3"], ["3", "01, 02, 04"]), (["run", "x"], ["x", "all"]), (["run", "5-9"], ["5-9"]),
    (["run"], ["03"]), (["run", ","], ["names no demo"]),
    (["rnu"], ["rnu", "run"]), (["doctor", "now"], ["now"]), (["fetch"], ["pythia", "lfm2", "owner/name"]),
    (["gpu", "14"], ["14", "--device"]),
    (["run", "1,4", "--json", "x"], ["--json"]), (["run", "1", "alpha=0.6"], ["alpha=0.6", "--alpha 0.6"]),
    (["run", "1", "alpha", "0.6"], ["alpha", "--"]), (["run", "9" * 5000], ["5,000 characters"]),
    (["chat", "--text", "caf\udce9"], ["UTF-8", "caf"])])
def test_what_does_not_exist_is_one_sentence(lab, argv, words):
    with pytest.raises(BadInput) as caught:
        runner.main(argv)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("argv", [
    ["doctor", "L"], ["clean", "L"], ["fetch", "L"], ["fetch", "a/L"], ["gpu", "L"], ["gpu", "--device", "L"],
    ["gpu", "--device", "cpu", "--out", "/L"], ["ngram", "build", "L", "--out", "x"], ["ngram", "info", "L"],
    ["ngram", "build", "here", "--out", "x", "--tokenizer", "L"], ["chat", "--target", "L"],
    ["chat", "--target", "a/L"], ["chat", "--target", "L.gguf"], ["chat", "--target", "/L"],
    ["chat", "--target", "toy:L"], ["chat", "--device", "L"], ["chat", "--target", "toy", "--table", "L"]],
    ids=" ".join)
def test_a_word_of_thousands_of_characters_is_one_short_sentence(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        runner.entry([__file__ if word == "here" else word.replace("L", "9" * 5000) for word in argv])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1 and len(err) < 600
    assert "characters)" in err and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_failing_demo_does_not_stop_the_rest(lab, capfd):
    assert runner.main(["run", "all"]) == 1
    out, err = capfd.readouterr()
    assert "ZeroDivisionError: a bug" in err
    assert out.index("01. Good") < out.index("04. Other") < out.index("Summary")
    summary = out[out.index("Summary"):]
    rows = {line.split()[0]: line.split()[2:] for line in summary.splitlines()
            if line[:3] in ("01_", "02_", "04_")}
    assert rows == {"01_good": ["1", "1", "0", "ran"], "02_failing": ["-", "-", "-", "failed", "(1)"],
                    "04_other": ["1", "1", "0", "ran"]}
    assert "Failed: 02_failing." in summary
    assert re.fullmatch(r"decode-lab .*: 2 of 3 demos ran in [\d.]+ s, 2 of 4 observations hold", out.splitlines()[-1])
    assert "Does not hold: A reading is high. (01, a reading of this machine)" in summary


@pytest.mark.slow
def test_flags_go_to_the_demo_and_an_observation_that_does_not_hold_is_no_failure(lab, capfd, tmp_path):
    path = tmp_path / "record.json"
    assert runner.main(["run", "1", "--batch", "3", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["assumptions"] == {"batch": 3}
    out = capfd.readouterr().out
    assert "Does not hold: The batch is 3." in out and "Summary" not in out
    assert re.search(r"^decode-lab .*: demo 01 ran in [\d.]+ s, 0 of 2 observations hold$", out.splitlines()[-1])
    assert runner.main(["run", "1", "--batch", "0"]) == 2
    out, err = capfd.readouterr()
    assert err.startswith("error: --batch must be") and len(err.splitlines()) == 1
    assert out == "", "the sentence is all there is to say"
    assert runner.main(["run", "1,4", "--batch", "0"]) == 1
    out, err = capfd.readouterr()
    assert out.count("refused its input") == 2 and "failed (2)" not in out and len(err.splitlines()) == 2
    assert runner.main(["run", "1", "--help"]) == 0
    out = capfd.readouterr().out
    assert "sequences (default: 1)" in out and "Summary" not in out


def test_each_command_has_help(lab, capsys):
    for command in ("list", "run", "doctor", "fetch", "gpu"):
        assert runner.main([command, "--help"]) == 0
        assert f"python -m lab {command if command != 'list' else ''}".strip() in capsys.readouterr().out


def test_a_record_in_the_home_folder(lab, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert runner.main(["run", "1", "--json", "~/record.json"]) == 0
    assert json.loads((tmp_path / "record.json").read_text())["demo"] == "01"


@pytest.mark.slow
def test_a_flag_goes_to_the_demos_that_know_it(lab, write_demo, capfd):
    source = GOOD.replace("batch: Count = 1", "deep_tree: bool = True\n        batch: Count = 1")
    write_demo(source, "05_more.py")
    assert runner.flags_of(lab / "05_more.py") == {"-h", "--help", "--json", "--batch",
                                                   "--deep-tree", "--no-deep-tree"}
    assert runner.main(["run", "1,4,5", "--no-deep_tree", "--batch=3"]) == 0
    out, err = capfd.readouterr()
    assert err == "" and "3 of 3 demos ran" in out and out.count("The batch is 3.") == 6
    assert out.startswith("--no-deep-tree goes to 05; the other demos do not have it")
    chosen = {number: runner.demos()[number] for number in (1, 2, 5)}
    assert runner.shared_out(["--batch", "-3"], chosen) == {1: ["--batch", "-3"], 2: [], 5: ["--batch", "-3"]}
    with pytest.raises(BadInput, match="unknown flag \"--btach\"; the nearest is --batch"):
        runner.main(["run", "all", "--btach", "3"])


def test_every_demo_has_the_flags_that_its_source_shows():
    for path in runner.demos().values():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [field.target.id for node in tree.body if isinstance(node, ast.ClassDef)
                 and node.name == "Assumptions" for field in node.body
                 if isinstance(field, ast.AnnAssign)]
        assert names and {flag_of(name) for name in names} <= runner.flags_of(path), path.name


def test_a_copy_runs_its_own_code(lab, tmp_path):
    copy = tmp_path / "copy"
    (copy / "lab").mkdir(parents=True)
    for name in ("__init__.py", "__main__.py"):
        (copy / "lab" / name).write_bytes((console.ROOT / "lab" / name).read_bytes())
    shutil.copytree(console.ROOT / "lab" / "support", copy / "lab" / "support")
    (copy / "console.py").write_bytes((console.ROOT / "console.py").read_bytes())
    claims = copy / "lab" / "support" / "claims.py"
    claims.write_text(claims.read_text(encoding="utf-8").replace('"[ ok ] "', '"[mine] "'), encoding="utf-8")
    (copy / "lab" / "01_good.py").write_bytes((lab / "01_good.py").read_bytes())
    environment = {**os.environ, "PYTHONPATH": str(console.ROOT), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run([sys.executable, "-m", "lab", "run", "1"], cwd=copy, env=environment, timeout=60,
                          capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0 and "[mine] The batch is 1." in done.stdout, done.stderr
    assert runner.child_environment()["PYTHONPATH"].split(os.pathsep)[0] == str(console.ROOT)


def test_a_closed_pipe_ends_a_run_quietly(lab):
    code = (f"import sys, pathlib; sys.path.insert(0, {str(console.ROOT)!r}); import lab.__main__ as m; "
            f"m.LAB = pathlib.Path({str(lab)!r}); sys.exit(m.entry(['run', '1,4']))")
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 1
    process.stderr.close()


@pytest.mark.nightly
def test_sigterm_ends_the_demo_and_leaves_no_files(lab, write_demo, tmp_path):
    write_demo("""
        import os, pathlib, time
        pathlib.Path(__file__).with_name("pid.part").write_text(str(os.getpid()))
        pathlib.Path(__file__).with_name("pid.part").rename(pathlib.Path(__file__).with_name("pid"))
        time.sleep(60)
    """, "05_sleeps.py")
    (tmp_path / "temporary").mkdir()
    code = (f"import sys, pathlib; sys.path.insert(0, {str(console.ROOT)!r}); import lab.__main__ as m; "
            f"m.LAB = pathlib.Path({str(lab)!r}); sys.exit(m.entry(['run', '5,1']))")
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE,
                               env={**os.environ, "TMPDIR": str(tmp_path / "temporary")})
    deadline = time.monotonic() + 30
    while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    assert process.communicate(timeout=30)[1] == b"" and process.returncode == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_without_the_packages_the_lab_says_which_python_to_use():
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-S", "-m", "lab", "run", "1"], cwd=console.ROOT, timeout=60,
                          env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: rich and tyro") and ".venv/bin/python" in done.stderr


def test_the_command_line_of_the_lab(tmp_path):
    def call(*argv, **environment):
        return subprocess.run([sys.executable, "-m", "lab", *argv], capture_output=True, text=True,
                              cwd=console.ROOT, env={**os.environ, **environment}, timeout=300)

    done = call("run", "77")
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: ") and "77" in done.stderr
    done = subprocess.run([sys.executable, "-OO", "-m", "lab", "--help"], capture_output=True, text=True,
                          cwd=console.ROOT, timeout=60)
    assert done.returncode == 0 and done.stderr == "" and all(name in done.stdout for name in runner.COMMANDS)
    done = call(PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stderr == ""
    assert all(f"{number:02d}" in done.stdout for number in runner.demos())


def test_every_demo_says_its_question_and_what_it_takes():
    for path in runner.demos().values():
        card = console.demo_card(path)
        assert card["title"].startswith(path.name[:2] + ". "), path.name
        assert card["question"] and card["takes"].startswith("about ") and card["needs"], path.name
