"""Which package comes with what; what is said where one is missing; where an installed copy leaves its files."""

import json
import os
import shutil
import subprocess
import sys
import tomllib

import pytest

import console
from lab.support import packages

PROJECT = tomllib.loads((console.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_lists_are_those_of_the_project():
    assert list(packages.BASE) == PROJECT["dependencies"]
    assert {extra: list(names) for extra, names in packages.EXTRAS.items()} == PROJECT["optional-dependencies"]
    assert f"--no-deps {packages.APART}\n" in (console.ROOT / "Makefile").read_text(encoding="utf-8")


def without(blocked, *argv, environment=None, cwd=None, root=console.ROOT):
    """python -m lab argv, in a Python that does not find these packages; its children do not find them either."""
    path = os.pathsep.join([str(blocked), str(root)])
    return subprocess.run([sys.executable, "-m", "lab", *argv], capture_output=True, text=True, encoding="utf-8",
                          timeout=120, cwd=cwd, env={**os.environ, "PYTHONPATH": path, **(environment or {})})


@pytest.fixture
def no_torch(tmp_path):
    """A folder for PYTHONPATH, whose sitecustomize keeps torch, transformers and gguf from being found."""
    folder = tmp_path / "blocked"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "gguf"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
""", encoding="utf-8")
    return folder


@pytest.mark.parametrize("argv", [["run", "14"], ["run", "18"], ["gpu"], ["chat", "--text", "hi"],
                                  ["chat", "--target", "random:pythia-70m", "--text", "hi"]], ids=" ".join)
@pytest.mark.slow
def test_without_torch_a_real_target_ends_in_one_sentence_that_names_the_extra(no_torch, argv):
    done = without(no_torch, *argv)
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and len(lines) == 1, done.stderr
    assert lines[0].startswith("error: the package ") and 'the extra "real" brings it' in lines[0]
    assert 'pip install -c constraints.txt -e ".[real]"' in lines[0] and "make setup" in lines[0]


def test_without_torch_the_toy_answers(no_torch):
    done = without(no_torch, "chat", "--target", "toy:small", "--text", "hi", "--max-new-tokens", "4")
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_which_models_are_here_is_found_without_torch(no_torch):
    code = ("from lab import models; from lab.models import finding\n"
            "print(len(finding.find_models()), finding.default_gguf(), models.DTYPES)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join([str(no_torch), str(console.ROOT)])})
    assert done.returncode == 0 and done.stdout.startswith("7 "), done.stderr


DEMO = """
# %% [markdown]
# # 97. One figure
#
# **Question.** Where does it go?
from dataclasses import dataclass
from console import assumptions, figure, out_folder, subplots

@dataclass(frozen=True)
class Assumptions:
    size: int = 2
    \"\"\"inches\"\"\"

A = assumptions(Assumptions)
(out_folder() / "97.txt").write_text("left behind", encoding="utf-8")
fig, ax = subplots()
figure("one", fig)
"""


@pytest.fixture
def installed(tmp_path):
    """A folder like site-packages: the lab's modules, and of its folder nothing else."""
    folder = tmp_path / "site-packages"
    (folder / "lab").mkdir(parents=True)
    for name in ("console.py", "lab/__init__.py", "lab/__main__.py"):
        shutil.copy(console.ROOT / name, folder / name)
    shutil.copytree(console.ROOT / "lab" / "support", folder / "lab" / "support")
    (folder / "lab" / "97_figure.py").write_text(DEMO, encoding="utf-8")
    return folder


@pytest.mark.slow
def test_an_installed_copy_leaves_its_files_in_the_current_folder(installed, no_torch, tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    done = without(no_torch, "run", "97", "--json", "97.json", environment={"DECODE_LAB_OUT": ""}, cwd=here,
                   root=installed)
    assert done.returncode == 0, done.stderr
    assert sorted(path.relative_to(here).as_posix() for path in here.rglob("*")) == ["97.json", "out", "out/97-1.png",
                                                                                   "out/97.txt"]
    assert json.loads((here / "97.json").read_text())["figures"][0]["path"] == (here / "out" / "97-1.png").as_posix()
    assert not (installed / "out").exists()


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="no folder that even root may not write to")
def test_where_nothing_can_be_written_it_ends_in_one_sentence(installed, no_torch):
    done = without(no_torch, "run", "97", environment={"DECODE_LAB_OUT": ""}, cwd="/proc", root=installed)
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and len(lines) == 1 and "DECODE_LAB_OUT" in lines[0], done.stderr
