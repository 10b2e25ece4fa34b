"""Files that are there whole or not at all."""

import os

import pytest

import console


def test_a_file_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    console.write_text(path, "old")

    def fail(*args):
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError):
        console.write_text(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_json_in_the_home_folder(tmp_path, monkeypatch):
    from lab.support.files import writable

    monkeypatch.setenv("HOME", str(tmp_path))
    assert writable("--json", "~/record.json") == tmp_path / "record.json"
