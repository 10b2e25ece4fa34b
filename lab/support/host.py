"""Facts about this machine: processor, cores that may be used, memory, operating system; and of versions."""

import os
import platform
import re
import sys
from pathlib import Path

from lab.support.text import fmt_bytes


def cpu_name() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found.group(1) if found else platform.processor() or platform.machine()


def cores() -> int:
    """Cores that this process may use (a container may be given fewer than the machine has)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory() -> int | None:
    """Bytes of main memory; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def last_level_cache() -> int:
    """Bytes of the largest CPU cache where Linux tells, else 32 MiB."""
    sizes, unit = [32 << 20], {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text().strip()
            sizes.append(int(text[:-1]) * unit[text[-1]])
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return max(sizes)


def host() -> dict:
    """The machine: cpu (name), cores that this process may use, memory in bytes (None if unknown), os."""
    return {"cpu": cpu_name(), "cores": cores(), "memory": memory(), "os": platform.platform()}


def versions() -> dict[str, str]:
    """Versions of Python and of those of the lab's libraries that this process has imported."""
    found = {"python": platform.python_version()}
    for name in ("numpy", "torch", "transformers", "tokenizers", "safetensors", "gguf", "matplotlib"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found


def lab_version() -> str:
    """The version of the lab: of the project that this file lies in, else of the one installed."""
    import importlib.metadata

    try:
        project = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        project = ""
    found = re.search(r'^version = "(.*)"', project, re.M)
    if found:
        return found.group(1)
    try:
        return importlib.metadata.version("decode-lab")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def in_one_line() -> str:
    """The lab and the machine in one line to paste: "decode-lab 0.1.0, Python 3.11.7, Linux, 2 cores, 24.9 GB"."""
    size, n = memory(), cores()
    facts = [f"decode-lab {lab_version()}", f"Python {platform.python_version()}", platform.system(),
             f"{n} core{'' if n == 1 else 's'}", fmt_bytes(size) if size else "memory unknown"]
    return ", ".join(facts)
