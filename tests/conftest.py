"""Shared by all tests: one thread per worker, and small demos that tests write themselves."""

import os

# Two pytest workers with two threads each on two cores are slower than one thread each.
if "PYTEST_XDIST_WORKER" in os.environ:
    for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(_name, "1")

import subprocess
import sys
import tempfile
import textwrap
from contextlib import contextmanager
from pathlib import Path

import pytest

os.environ.pop("COLUMNS", None)  # what tests print is 80 columns wide

# Figures of the small settings of tests do not replace those in out/. Workers and subprocesses inherit this.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _figures = tempfile.TemporaryDirectory(prefix="decode-lab-")
    os.environ["DECODE_LAB_OUT"] = _figures.name

ROOT = Path(__file__).resolve().parent.parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Demos run for seconds each, so make check leaves their tests to make test, but for their form and their flags."""
    for item in items:
        if item.path.parent.name == "demos" and item.path.name not in ("test_limits.py", "test_refusals.py"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def write_demo(tmp_path):
    """write_demo(source, name="99_tiny.py") writes a demo file and returns its path."""

    def write(source: str, name: str = "99_tiny.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(source).lstrip(), encoding="utf-8")
        return path

    return write


@pytest.fixture
def script():
    """script(path, *flags, encoding=None) runs a file in a process of its own; its outputs are pipes."""

    def run(path, *flags, encoding: str | None = None, **options) -> subprocess.CompletedProcess:
        environment = {key: value for key, value in os.environ.items()
                       if key not in ("DISPLAY", "PYTHONIOENCODING", "MPLBACKEND", "COLUMNS", "FORCE_COLOR")}
        environment["PYTHONPATH"] = str(ROOT)
        environment["PYTHONIOENCODING"] = encoding or "utf-8"
        return subprocess.run([sys.executable, str(path), *map(str, flags)], capture_output=True,
                              env=environment, timeout=300, **options)

    return run


@pytest.fixture(scope="module")
def one_thread():
    """PyTorch on one thread for a module of small models, which more threads only slow down."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def read_once():
    """What a small model's texts take is read once: no number of threads is chosen, nothing is read again when busy.

    The machine's rates, which say nothing about a small model, are read in a quarter of a second."""
    from lab.measure import compare, threads, timing

    read_rates = timing.read_rates
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "read_rates", lambda device, dtype: read_rates(device, dtype, 0.25))
        patch.setattr(threads, "cores", lambda: 1)
        patch.setattr(compare, "MOST_SPREAD", float("inf"))
        yield


@contextmanager
def timing_once():
    """Each method is timed once and not five times, in tests of what a demo writes and not of how fast."""
    from lab.measure import compare

    read = compare._read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "_read", lambda methods, text, prompt, target, n_new, repeats, *rest: read(
            methods, text, prompt, target, n_new, 1, *rest))
        yield


@pytest.fixture
def one_repeat():
    """timing_once, throughout a test."""
    with timing_once():
        yield


@pytest.fixture(scope="session")
def timed_once():
    """timing_once, for the fixtures of a module."""
    return timing_once
