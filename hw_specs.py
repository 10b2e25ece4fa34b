"""Chips: dense peak rates, memory bandwidth and memory, each with its source; and this machine, measured.

Rates are vendor peaks *without* structured sparsity: the large number in a data sheet that carries the
footnote "with sparsity" is twice the one used here. On consumer GeForce cards the 16-bit rate is the one with
32-bit accumulation, which is half of the rate with 16-bit accumulation and what matrix libraries use. GB is
1e9 bytes.

`checked` is the day on which a row's 16- and 32-bit rates, bandwidth and memory were compared with public copies
(reprints and citations) of its source; a source that says "8 bits not compared" or "derived" means it.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from lab.support import host
from lab.support.errors import BadInput, require, unknown

CHECKED = "2026-11-29"


@dataclass(frozen=True)
class Chip:
    """One chip, or one machine.

    flops: dtype name -> dense peak, FLOP/s ("int8" in operations per second). bandwidth: bytes per second.
    memory: bytes (NaN where unknown). The *_spread fields are (first quartile, third quartile) of a measured
    chip's readings, None for a data sheet.
    """

    name: str
    flops: dict[str, float] = field(hash=False)
    bandwidth: float
    memory: float
    form_factor: str
    source: str
    checked: str
    bandwidth_spread: tuple[float, float] | None = None
    flops_spread: tuple[float, float] | None = None

    @property
    def default_dtype(self) -> str:
        """What a model runs in on this chip: bf16, else fp16, else fp32."""
        return next(dtype for dtype in ("bf16", "fp16", "fp32") if dtype in self.flops)

    def peak(self, dtype: str | None = None) -> float:
        """Dense peak rate in FLOP/s; None means `default_dtype`. BadInput where no rate is known."""
        dtype = self.default_dtype if dtype is None else dtype
        if dtype not in self.flops:
            raise BadInput(f"no {dtype!r} rate is known for {self.name}; known are {', '.join(self.flops)}")
        return self.flops[dtype]

    def ridge(self, dtype: str | None = None) -> float:
        """Arithmetic intensity at which compute and memory take equally long, in FLOP per byte."""
        return self.peak(dtype) / self.bandwidth


def _rates(**tera: float) -> dict[str, float]:
    return {dtype: rate * 1e12 for dtype, rate in tera.items()}


V100 = Chip(
    "V100", _rates(fp16=125, fp32=15.7), 900e9, 32e9, "SXM2, 32 GB",
    "NVIDIA Tesla V100 data sheet, NVLink column; Volta has no bf16", CHECKED)
T4 = Chip(
    "T4", _rates(fp16=65, fp32=8.1, int8=130), 320e9, 16e9, "PCIe",
    "NVIDIA T4 data sheet; Turing has no bf16", CHECKED)
A100_40 = Chip(
    "A100 40GB", _rates(bf16=312, fp16=312, fp32=19.5, int8=624), 1555e9, 40e9, "SXM4",
    "NVIDIA A100 data sheet, 40 GB SXM column", CHECKED)
A100_80 = Chip(
    "A100 80GB", _rates(bf16=312, fp16=312, fp32=19.5, int8=624), 2039e9, 80e9, "SXM4",
    "NVIDIA A100 data sheet, 80 GB SXM column", CHECKED)
L4 = Chip(
    "L4", _rates(bf16=121, fp16=121, fp32=30.3, int8=242.5, fp8=242.5), 300e9, 24e9, "PCIe",
    "NVIDIA L4 data sheet, which gives sparse rates (242, 485): halved here", CHECKED)
L40S = Chip(
    "L40S", _rates(bf16=362.05, fp16=362.05, fp32=91.6, int8=733, fp8=733), 864e9, 48e9, "PCIe",
    "NVIDIA L40S data sheet, first figure of each pair (the second is sparse)", CHECKED)
# The data sheet rounds the bandwidth to 3.35 TB/s: 5120 bits x 2 transfers x 2619 MHz / 8 is 3.352 TB/s.
H100 = Chip(
    "H100 SXM", _rates(bf16=989.4, fp16=989.4, fp32=66.9, int8=1978.9, fp8=1978.9), 3.352e12, 80e9, "SXM5",
    "NVIDIA H100 architecture white paper, SXM5 table; bandwidth from bus width and memory clock", CHECKED)
H100_PCIE = Chip(
    "H100 PCIe", _rates(bf16=756, fp16=756, fp32=51, int8=1513, fp8=1513), 2.0e12, 80e9, "PCIe",
    "NVIDIA H100 data sheet, PCIe column, which gives sparse rates: halved here", CHECKED)
H200 = Chip(
    "H200", _rates(bf16=989.4, fp16=989.4, fp32=66.9, int8=1978.9, fp8=1978.9), 4.8e12, 141e9, "SXM5",
    "NVIDIA H200 data sheet (sparse rates, halved); the compute die is the H100's", CHECKED)
B200 = Chip(
    "B200", _rates(bf16=2250, fp16=2250, fp32=80, int8=4500, fp8=4500), 8.0e12, 180e9, "SXM6, HGX, 1000 W",
    "NVIDIA Blackwell architecture technical brief, HGX B200 per GPU; 180 GB usable of 192", CHECKED)
MI300X = Chip(
    "MI300X", _rates(bf16=1307.4, fp16=1307.4, fp32=163.4, int8=2614.9, fp8=2614.9), 5.3e12, 192e9, "OAM",
    "AMD Instinct MI300X data sheet, without structured sparsity", CHECKED)
RTX_3090 = Chip(
    "RTX 3090", _rates(bf16=71, fp16=71, fp32=35.6, int8=284), 936e9, 24e9, "PCIe",
    "NVIDIA GA102 white paper, appendix A, with fp32 accumulation; 8 bits not compared", CHECKED)
RTX_4090 = Chip(
    "RTX 4090", _rates(bf16=165.2, fp16=165.2, fp32=82.6, int8=660.6, fp8=330.3), 1008e9, 24e9, "PCIe",
    "NVIDIA Ada white paper, appendix A, with fp32 accumulation (330.3 with fp16)", CHECKED)
RTX_5090 = Chip(
    "RTX 5090", _rates(bf16=209.5, fp16=209.5, fp32=104.8, int8=838, fp8=419), 1792e9, 32e9, "PCIe",
    "NVIDIA RTX Blackwell white paper, with fp32 accumulation (419 with fp16); 8 bits not compared",
    CHECKED)
# NVIDIA publishes one rate for the D: 2375 sparse 4-bit TOPS against 3352. Public tests see 4- and 8-bit cut
# and 16-bit not, at equal core count and clock, so 16 and 32 bits are the 5090's and 8 bits are left unknown.
RTX_5090D = Chip(
    "RTX 5090D", _rates(bf16=209.5, fp16=209.5, fp32=104.8), 1792e9, 32e9, "PCIe",
    "NVIDIA RTX 5090 D page; 16 and 32 bits taken from the RTX 5090, 8 bits not published", CHECKED)
# Apple publishes bandwidth and core count only. GPU rate: cores x 128 lanes x 2 x 1.398 GHz; 16 bits as fast
# as 32.
M3_MAX = Chip(
    "M3 Max", _rates(bf16=14.3, fp16=14.3, fp32=14.3), 400e9, 128e9, "laptop, 40-core GPU",
    "Apple M3 Max announcement (bandwidth); rate derived as 40 cores x 128 x 2 x 1.398 GHz", CHECKED)
M3_ULTRA = Chip(
    "M3 Ultra", _rates(bf16=28.6, fp16=28.6, fp32=28.6), 819e9, 512e9, "desktop, 80-core GPU",
    "Apple Mac Studio specification (bandwidth); rate derived as 80 cores x 128 x 2 x 1.398 GHz", CHECKED)
DESKTOP_CPU = Chip(
    "Ryzen 9 7950X", _rates(bf16=4.6, fp32=2.3), 83.2e9, 128e9, "AM5 socket, 2 x DDR5-5200",
    "derived from AMD's product page: 2 x 8 B x 5200 MT/s; 16 cores x 4.5 GHz x 32 FLOP (fp32), x 64 (AVX512-BF16)",
    CHECKED)

CHIPS: dict[str, Chip] = {
    "v100": V100, "t4": T4, "a100-40": A100_40, "a100-80": A100_80, "l4": L4, "l40s": L40S,
    "h100-sxm": H100, "h100-pcie": H100_PCIE, "h200": H200, "b200": B200, "mi300x": MI300X,
    "rtx-3090": RTX_3090, "rtx-4090": RTX_4090, "rtx-5090": RTX_5090, "rtx-5090d": RTX_5090D,
    "m3-max": M3_MAX, "m3-ultra": M3_ULTRA, "desktop-cpu": DESKTOP_CPU,
}


def chip(name: str) -> Chip:
    """The chip of that name in CHIPS ("h100-sxm"; spaces, underscores and capitals are forgiven), or
    BadInput."""
    key = name.strip().lower().replace(" ", "-").replace("_", "-")
    if key not in CHIPS:
        raise unknown("chip", name, CHIPS)
    return CHIPS[key]


def _rate(action, amount: float, seconds: float) -> tuple[float, tuple[float, float]]:
    """Median and quartiles of amount / time over at least five runs after a warm-up, within about
    `seconds`."""
    action()
    rates: list[float] = []
    end = time.perf_counter() + seconds
    while len(rates) < 5 or (time.perf_counter() < end and len(rates) < 1000):
        start = time.perf_counter()
        action()
        rates.append(amount / (time.perf_counter() - start))
    low, median, high = np.quantile(rates, [0.25, 0.5, 0.75])
    return float(median), (float(low), float(high))


def measure_this_machine(seconds: float = 1.0) -> Chip:
    """Read bandwidth and float32 matrix rate of this machine's CPU, in about `seconds`; quartiles in
    *_spread.

    Bandwidth: dot products over an array eight times the last-level cache (at most 512 MiB, so that small
    machines can hold it), in one piece and in one piece per core; the faster counts. Rate: a 1024 x 1024
    float32 product in numpy's BLAS. Other work on the machine shows as a wide spread.
    """
    require(seconds > 0, "seconds", seconds, "above 0")
    size = min(8 * host.last_level_cache(), 512 << 20)
    array = np.ones(size // 4, dtype=np.float32)
    cores = host.cores()
    readings = [_rate(lambda: np.dot(array, array), array.nbytes, 0.3 * seconds)]
    if cores > 1:
        parts = np.array_split(array, cores)
        with ThreadPoolExecutor(cores) as pool:  # np.dot releases the interpreter lock
            readings.append(_rate(lambda: list(pool.map(lambda part: np.dot(part, part), parts)),
                                  array.nbytes, 0.3 * seconds))
    bandwidth, bandwidth_spread = max(readings)
    side = 1024
    left, out = np.ones((side, side), np.float32), np.empty((side, side), np.float32)
    flops, flops_spread = _rate(lambda: np.matmul(left, left, out=out), 2 * side**3, 0.3 * seconds)
    return Chip("this machine", {"fp32": flops}, bandwidth, float(host.memory() or math.nan), f"CPU, {cores} cores",
                "measured with numpy", time.strftime("%Y-%m-%d"), bandwidth_spread, flops_spread)
