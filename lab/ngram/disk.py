"""What the operating system did with a file: pages it keeps in memory, bytes it fetched from the device, page faults.

Where the system cannot tell (another system than Linux, a container that hides /proc) the answer is None, unknown.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class IoUse:
    """What this process has used since it began; `after - before` is what a stretch of work used. None: unknown."""

    bytes_read: int | None       # fetched from the device, not from the page cache
    major_faults: int | None     # page faults that waited for the device
    minor_faults: int | None     # page faults that did not

    def __sub__(self, before: IoUse) -> IoUse:
        return IoUse(*(None if None in pair else pair[0] - pair[1] for pair in zip(astuple(self), astuple(before))))


def io_use() -> IoUse:
    """The counters of this process (all its threads) now, from /proc/self/io (proc(5)) and getrusage(2)."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
        bytes_read = int(dict(line.split(": ") for line in lines)["read_bytes"])
    except (OSError, ValueError, KeyError):
        bytes_read = None
    try:
        import resource
    except ImportError:          # Windows
        return IoUse(bytes_read, None, None)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return IoUse(bytes_read, usage.ru_majflt, usage.ru_minflt)


def resident_pages(mapped: mmap.mmap) -> int | None:
    """How many pages of a mapping lie in memory (mincore(2)); None where the system has no way to ask.

    For a file this counts its pages in the page cache, whether this process has read them or not. Linux answers
    "all of them" to a user who may not write the file: ask `may_ask` first.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        mincore = libc.mincore
    except (OSError, TypeError, AttributeError):
        return None
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    view = np.frombuffer(mapped, np.uint8)
    flags = np.zeros(-(-len(view) // mmap.PAGESIZE), np.uint8)
    if mincore(view.ctypes.data, len(view), flags.ctypes.data) != 0:
        return None
    return int(np.count_nonzero(flags & 1))


def may_ask(path) -> bool:
    """Whether the system tells this user which pages of the file are in memory: its owner, or who may write it."""
    try:
        return os.access(path, os.W_OK) or os.stat(path).st_uid == getattr(os, "geteuid", lambda: -1)()
    except OSError:
        return False


def resident(path) -> int | None:
    """Pages of the file `path` in the page cache; None where the system does not tell. Raises OSError."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return 0
        if not may_ask(path):
            return None
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return resident_pages(mapped)


def evict(path) -> bool:
    """Have the system drop the file from its page cache, so that the next read of it is cold.

    False where the system lacks posix_fadvise(2), or is seen to keep pages all the same: those that a process has
    mapped stay, so close a table first, and a file system in memory (tmpfs) has no colder place. Raises OSError.
    """
    with open(path, "rb") as file:
        if not hasattr(os, "posix_fadvise"):
            return False
        with suppress(OSError):          # of a read-only file system, which has nothing to write
            os.fsync(file.fileno())      # pages not yet written cannot be dropped
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return resident(path) in (0, None)
