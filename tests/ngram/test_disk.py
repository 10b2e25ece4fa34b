"""What the operating system tells of a file, and what is said where it does not tell."""

import mmap
import os
import sys
from pathlib import Path

import pytest

from lab.ngram import disk
from lab.ngram.disk import IoUse, evict, io_use, resident

PAGES = 50


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(PAGES * mmap.PAGESIZE))
    return path


@pytest.fixture
def cold(file):
    """Skips where a file dropped by hand is not read from the device again, or the system does not tell."""
    if not hasattr(os, "posix_fadvise"):
        pytest.skip("the system cannot drop a file from its page cache")
    handle = os.open(file, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
    before = io_use().bytes_read
    file.read_bytes()
    if before is None or io_use().bytes_read == before:
        pytest.skip("this file system keeps its files in memory")
    file.write_bytes(os.urandom(PAGES * mmap.PAGESIZE))       # not yet on the device


def test_differences_and_what_is_unknown():
    assert IoUse(10, 3, 100) - IoUse(4, 1, 50) == IoUse(6, 2, 50)
    assert IoUse(None, 3, 100) - IoUse(4, None, 50) == IoUse(None, None, 50)


def test_a_file_dropped_from_memory_is_read_from_the_device_again(file, cold):
    assert evict(file) and resident(file) == 0
    before = io_use()
    content = file.read_bytes()
    used = io_use() - before
    assert resident(file) == PAGES
    assert used.bytes_read >= len(content)
    before = io_use()
    assert file.read_bytes() == content
    used = io_use() - before
    assert used.bytes_read == 0


def test_pages_that_are_mapped_stay(file, cold):
    assert evict(file)
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped[5] == mapped[5] and sum(mapped[::mmap.PAGESIZE]) >= 0      # each page
        assert not evict(file) and resident(file) > 0
    assert evict(file) and resident(file) == 0


def test_faults_are_counted():
    before = io_use()
    with mmap.mmap(-1, 200 * mmap.PAGESIZE) as fresh:
        fresh[::mmap.PAGESIZE] = b"x" * 200
    used = io_use() - before
    assert used.minor_faults is None or used.minor_faults >= 1
    assert used.major_faults is None or used.major_faults >= 0


def test_where_the_system_lacks_it_the_answer_is_unknown(file, monkeypatch):
    with monkeypatch.context() as lacking:
        lacking.delattr(os, "posix_fadvise", raising=False)
        assert evict(file) is False
    with monkeypatch.context() as lacking:
        lacking.setitem(sys.modules, "resource", None)
        used = io_use()
        assert used.major_faults is None and used.minor_faults is None
    for text in (OSError("hidden"), "", "rchar 12\n", "rchar: 12\n", "read_bytes: many\n"):
        def read(self, text=text, **_options):
            if isinstance(text, OSError):
                raise text
            return text
        with monkeypatch.context() as lacking:
            lacking.setattr(Path, "read_text", read)
            assert io_use().bytes_read is None
    for lacks in (TypeError, OSError, None):                 # Windows, a static build, a C library without mincore
        def library(name, lacks=lacks, **_options):
            if lacks:
                raise lacks
            return object()
        with monkeypatch.context() as lacking:
            lacking.setattr(disk.ctypes, "CDLL", library)
            assert resident(file) is None
    with monkeypatch.context() as lacking:                   # a file of somebody else: Linux would say "all of them"
        lacking.setattr(os, "access", lambda *_: False)
        lacking.setattr(os, "geteuid", lambda: -2, raising=False)
        assert resident(file) is None
    assert not disk.may_ask(file.parent / "missing")


def test_an_empty_file_and_none(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    assert resident(tmp_path / "empty") == 0
    for asked in (evict, resident):
        with pytest.raises(OSError):
            asked(tmp_path / "missing")
