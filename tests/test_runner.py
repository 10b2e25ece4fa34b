"""python -m lab: the list, the choice of demos, what a run of several reports, and its errors."""

import json
import os
import subprocess
import sys

import pytest

import console
from console import BadInput
from lab import __main__ as runner

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
    observe("The batch is {n}.", n=A.batch, holds=A.batch == 1)
    observe("A reading is high.", holds=False, measured=True)
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
    (["run"], ["03"]), (["rnu"], ["rnu", "run"]), (["doctor", "now"], ["now"]),
    (["run", "1,4", "--json", "x"], ["--json"])])
def test_what_does_not_exist_is_one_sentence(lab, argv, words):
    with pytest.raises(BadInput) as caught:
        runner.main(argv)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words)


def test_a_failing_demo_does_not_stop_the_rest(lab, capfd):
    assert runner.main(["run", "all"]) == 1
    out, err = capfd.readouterr()
    assert "ZeroDivisionError: a bug" in err
    assert out.index("01. Good") < out.index("04. Other") < out.index("Summary")
    summary = out[out.index("Summary"):]
    rows = {line.split()[0]: line.split()[2:] for line in summary.splitlines()
            if line[:3] in ("01_", "02_", "04_")}
    assert rows == {"01_good": ["1", "1", "ran"], "02_failing": ["-", "-", "failed", "(1)"],
                    "04_other": ["1", "1", "ran"]}
    assert "2 of 3 demos ran" in summary and "failed: 02_failing" in summary
    assert "Does not hold: A reading is high. (01, a reading of this machine)" in summary


def test_flags_go_to_the_demo_and_an_observation_that_does_not_hold_is_no_failure(lab, capfd, tmp_path):
    path = tmp_path / "record.json"
    assert runner.main(["run", "1", "--batch", "3", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["assumptions"] == {"batch": 3}
    assert "Does not hold: The batch is 3. (01)" in capfd.readouterr().out
    assert runner.main(["run", "1", "--btach", "3"]) == 1
    out, err = capfd.readouterr()
    assert err.startswith("error: unknown flag --btach; the nearest is --batch")
    assert len(err.splitlines()) == 1
    assert "failed (2)" in out


def test_the_command_line_of_the_lab(tmp_path):
    def call(*argv, **environment):
        return subprocess.run([sys.executable, "-m", "lab", *argv], capture_output=True, text=True,
                              cwd=console.ROOT, env={**os.environ, **environment}, timeout=300)

    done = call("run", "77")
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: ") and "77" in done.stderr
    done = call(PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stderr == ""
    assert all(f"{number:02d}" in done.stdout for number in runner.demos())


def test_every_demo_says_its_question_and_what_it_takes():
    for path in runner.demos().values():
        card = console.demo_card(path)
        assert card["title"].startswith(path.name[:2] + ". "), path.name
        assert card["question"] and card["takes"].startswith("about ") and card["needs"], path.name


@pytest.mark.slow
def test_doctor_reports_this_machine(capsys):
    assert runner.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for words in ("numpy", "tested", "cores", "memory bandwidth", "GPU", "Real models"):
        assert words in out
    assert all(len(line) <= 80 for line in out.splitlines())
