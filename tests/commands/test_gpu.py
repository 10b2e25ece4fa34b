"""python -m lab gpu: which runs it makes, what it leaves behind, and when it does nothing."""

import json
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import console
from console import BadInput
from lab import __main__ as runner
from lab.commands import gpu

DEMO = '''
    # %% [markdown]
    # # 14. Fake

    # %%
    import time
    from dataclasses import dataclass
    from console import Count, assumptions, observe, record_samples

    @dataclass(frozen=True)
    class Assumptions:
        target: str = "some/Model"
        """x"""
        random_weights: str = ""
        """x"""
        device: str = "cpu"
        """x"""
        dtype: str = "float32"
        """x"""
        batch: Count = 1
        """x"""

    A = assumptions(Assumptions)
    if A.batch == 9 and A.random_weights:
        raise ZeroDivisionError("a bug")
    if A.batch == 7 and A.random_weights:
        raise SystemExit(3)  # its record is complete all the same
    if A.batch == 8:
        time.sleep(30)
    record_samples("seconds", [1.5, 2.5])
    observe("it-ran", "It ran.", holds=False)
'''


@pytest.fixture
def lab(write_demo, tmp_path, monkeypatch):
    (tmp_path / "lab").mkdir()
    for name, source in (("14_fake.py", DEMO), ("13_other.py", "raise SystemExit(9)"),
                         ("15_plain.py", DEMO.replace("14. Fake", "15. Plain").replace(
                             '        random_weights: str = ""\n        """x"""\n', "").replace(
                                 " and A.random_weights", "")),
                         ("16_paper.py", DEMO.replace("device", "place"))):
        write_demo(source, f"lab/{name}")
    monkeypatch.setattr(runner, "LAB", tmp_path / "lab")
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(console, "host", lambda: {"cpu": "Some CPU @ 2 GHz", "memory": 1 << 34})
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_a_dry_run_leaves_a_record_of_each_run(lab, capfd):
    assert runner.main(["gpu", "--device", "cpu", "--out", str(lab / "dry"), "--batch", "3"]) == 0
    assert names(lab / "dry") == ["some-cpu-2-ghz_14_model_float32.json",
                                  "some-cpu-2-ghz_14_random-pythia-2.8b_bfloat16.json",
                                  "some-cpu-2-ghz_15_model_float32.json"]
    record = json.loads((lab / "dry" / "some-cpu-2-ghz_14_random-pythia-2.8b_bfloat16.json").read_text())
    assert record["assumptions"] == {"target": "some/Model", "random_weights": "pythia-2.8b", "device": "cpu",
                                     "dtype": "bfloat16", "batch": 3}
    assert record["samples"] == {"seconds": [1.5, 2.5]} and record["host"]["cores"] and record["versions"]["python"]
    out = capfd.readouterr().out
    assert out.count("written:") == 3 and "On Some CPU @ 2 GHz" in out and not (lab / "results").exists()


def test_flags_that_name_a_shape_or_a_target_replace_the_settings(lab):
    assert runner.main(["gpu", "--device=cpu", f"--out={lab / 'dry'}", "--random-weights", "gpt2", "--batch", "2"]) == 0
    assert names(lab / "dry") == ["some-cpu-2-ghz_14_random-gpt2_float32.json", "some-cpu-2-ghz_15_model_float32.json"]


@pytest.mark.slow
@pytest.mark.parametrize("batch, status", [(9, 1), (7, 3)])
def test_the_record_of_a_failed_run_is_not_written_and_the_others_are_kept(lab, capfd, batch, status):
    assert runner.main(["gpu", "--device", "cpu", "--out", str(lab / "dry"), "--batch", str(batch)]) == 1
    assert names(lab / "dry") == ["some-cpu-2-ghz_14_model_float32.json"]
    out, err = capfd.readouterr()
    assert f"failed ({status})" in out and ("ZeroDivisionError: a bug" in err) == (batch == 9)


@pytest.mark.nightly
def test_the_time_is_for_all_runs_together(lab, monkeypatch, capfd):
    monkeypatch.setattr(gpu, "MINUTES", 2 / 60)
    assert runner.main(["gpu", "--device", "cpu", "--out", str(lab / "dry"), "--batch", "8"]) == 1
    out = " ".join(capfd.readouterr().out.split())
    assert names(lab / "dry") == [] and "stopped: " in out and out.count("not run: ") == 2


@pytest.mark.parametrize("argv, words", [
    (["--device", "cpu"], "--out must name another folder"),
    (["--device", "cpu", "--out", "results"], "another folder"),
    (["--device"], "--device needs a value"), (["--device", "gpu", "--out", "x"], "cpu or cuda"),
    (["14"], 'not "14"'), (["--json", "x"], 'not "--json"'),
    (["--device", "cpu", "--out", "x", "--bach", "2"], "the nearest is --batch")])
def test_bad_flags_get_one_sentence(lab, argv, words, monkeypatch):
    monkeypatch.chdir(lab)
    with pytest.raises(BadInput, match=words):
        runner.main(["gpu", *argv])
    assert names(lab) == ["lab"]


@pytest.mark.parametrize("below", ["", "further"])
def test_a_folder_for_records_that_cannot_be_made_is_one_sentence(lab, below):
    (lab / "file").write_text("")
    with pytest.raises(BadInput, match="Not a directory.*--out"):
        runner.main(["gpu", "--device", "cpu", "--out", str(lab / "file" / below)])


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_nothing_is_written():
    before = sorted(gpu.RESULTS.glob("*"))
    done = subprocess.run([sys.executable, "-m", "lab", "gpu"], cwd=console.ROOT, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: PyTorch sees no CUDA device") and len(done.stderr.splitlines()) == 1
    assert sorted(gpu.RESULTS.glob("*")) == before


@pytest.mark.slow
def test_a_gpu_gives_the_record_its_name_and_the_host_its_facts(lab, monkeypatch):
    """With what PyTorch and the driver's tool would answer, as there need be no GPU here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (lab / "nvidia-smi").write_text("#!/bin/sh\necho 580.65.06\necho 580.65.06\n")
    (lab / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{lab}{os.pathsep}{os.environ['PATH']}")
    assert runner.main(["gpu"]) == 0
    assert names(lab / "results")[0] == "nvidia-h200_14_model_float32.json"
    record = json.loads((lab / "results" / "nvidia-h200_14_model_float32.json").read_text())
    assert {"gpu": "NVIDIA H200", "cuda": "13.0", "driver": "580.65.06"}.items() <= record["host"].items()
    assert record["assumptions"]["device"] == "cuda"
    (lab / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert gpu._driver() is None
