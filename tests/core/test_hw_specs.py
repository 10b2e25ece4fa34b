import dataclasses
import math

import pytest

import hw_specs
from console import BadInput
from hw_specs import CHIPS, chip, measure_this_machine

# The large figures of the data sheets: 16-bit with structured sparsity where the chip has it, in TFLOP/s. A
# row of ours that equals one of these, or does not equal half of it, took the wrong column. None: no sparse
# mode.
SPARSE_16_BIT = {
    "v100": None, "t4": None, "a100-40": 624, "a100-80": 624, "l4": 242, "l40s": 733, "h100-sxm": 1978.9,
    "h100-pcie": 1513, "h200": 1978.9, "b200": 4500, "mi300x": 2614.9, "rtx-3090": 142, "rtx-4090": 330.4,
    "rtx-5090": 419, "rtx-5090d": 419, "m3-max": None, "m3-ultra": None, "desktop-cpu": None,
}
SPARSE_8_BIT = {
    "a100-40": 1248, "a100-80": 1248, "l4": 485, "l40s": 1466, "h100-sxm": 3957.8, "h100-pcie": 3026,
    "h200": 3957.8, "b200": 9000, "mi300x": 5229.8, "rtx-3090": 568, "rtx-4090": 1321.2, "rtx-5090": 1676,
}


def test_the_sparse_tables_cover_every_chip():
    assert set(SPARSE_16_BIT) == set(CHIPS)
    assert {name for name, c in CHIPS.items() if "int8" in c.flops} == {*SPARSE_8_BIT, "t4"}


@pytest.mark.parametrize("name", CHIPS)
def test_rates_are_dense(name):
    found = CHIPS[name]
    if SPARSE_16_BIT[name] is not None:
        assert found.peak() * 2 == pytest.approx(SPARSE_16_BIT[name] * 1e12, rel=0.02)
    if name in SPARSE_8_BIT:
        assert found.peak("int8") * 2 == pytest.approx(SPARSE_8_BIT[name] * 1e12, rel=0.01)
    if "fp16" in found.flops and "bf16" in found.flops:
        assert found.peak("fp16") == found.peak("bf16")
    assert found.peak("fp32") <= found.peak()


@pytest.mark.parametrize("name", CHIPS)
def test_rows_are_complete_and_plausible(name):
    found = CHIPS[name]
    assert found.name and found.form_factor and len(found.source) > 10
    assert found.checked.count("-") == 2
    assert 50e9 < found.bandwidth < 20e12 and 10e9 < found.memory < 1e12
    assert 1 < found.ridge() < 500
    assert chip(name) is found and chip(name.upper().replace("-", " ")) is found


@pytest.mark.parametrize("name, memory, bandwidth, peak, ridge", [
    ("h100-sxm", 80e9, 3.35e12, 989.4e12, 295),
    ("h200", 141e9, 4.8e12, 989.4e12, 206),
    ("a100-80", 80e9, 2.04e12, 312e12, 153),
    ("rtx-4090", 24e9, 1008e9, 165.2e12, 164),
])
def test_published_chips(name, memory, bandwidth, peak, ridge):
    found = CHIPS[name]
    assert found.memory == memory and found.peak() == peak
    assert found.bandwidth == pytest.approx(bandwidth, rel=1e-3)
    assert round(found.ridge()) == ridge


def test_h100_is_the_sxm_one():
    assert hw_specs.H100 is CHIPS["h100-sxm"]
    assert round(hw_specs.H100.ridge(), 1) == 295.2
    assert hw_specs.H100_PCIE.peak() < hw_specs.H100.peak() and hw_specs.H100_PCIE.form_factor == "PCIe"


def test_chips_without_bf16_run_in_fp16():
    assert hw_specs.V100.default_dtype == "fp16" and hw_specs.V100.peak() == 125e12
    with pytest.raises(BadInput, match="no 'bf16' rate is known for V100; known are fp16, fp32"):
        hw_specs.V100.peak("bf16")


def test_unknown_chip_names_the_nearest():
    with pytest.raises(BadInput, match='unknown chip "h100-sxn"; the nearest are h100-sxm'):
        chip("h100-sxn")


def test_chips_cannot_be_changed_by_accident():
    with pytest.raises(dataclasses.FrozenInstanceError):
        hw_specs.H100.bandwidth = 1.0


@pytest.mark.slow
def test_this_machine_is_measured():
    found = measure_this_machine(0.1)
    assert isinstance(found, hw_specs.Chip) and found.default_dtype == "fp32"
    low, high = found.bandwidth_spread
    assert 0 < low <= found.bandwidth <= high < 20e12
    low, high = found.flops_spread
    assert 0 < low <= found.peak() <= high < 1e15
    assert math.isnan(found.memory) or found.memory > 1e8
    with pytest.raises(BadInput, match="seconds is 0"):
        measure_this_machine(0)


def test_the_bandwidth_reading_counts_bytes(monkeypatch):
    """With a clock that steps 1 s per reading, the rate is the array's size in bytes per second."""
    ticks = iter(float(i) for i in range(10**6))
    monkeypatch.setattr(hw_specs.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(hw_specs.host, "last_level_cache", lambda: 1 << 20)
    monkeypatch.setattr(hw_specs.host, "cores", lambda: 1)
    found = measure_this_machine(1.0)
    assert found.bandwidth == 8 << 20
    assert found.peak() == 2 * 1024**3
