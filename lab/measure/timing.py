"""Seconds of forwards, bytes and operations per second: readings of a real model's device."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch

from console import progress
from decode_lab import autoregressive_generate
from hw_specs import measure_this_machine
from lab.measure.spread import disturbed


class Rates(NamedTuple):
    """What a device does at most: bytes read per second, and floating-point operations per second.

    busy: why the readings are not to be judged, "" where they may be (spread.disturbed).
    """

    bandwidth: float
    flops: float
    busy: str


def read_rates(device: torch.device, dtype: torch.dtype, seconds: float = 2.0) -> Rates:
    """The rates of a device, in about `seconds`: its memory's, and that of a large product of matrices in this dtype.

    Each is read four times, and the best reading counts. On a CPU the product runs on as many threads as PyTorch does
    now, the reading of memory on as many as read fastest.
    """
    each = seconds / 8
    read = read_bandwidth if device.type == "cuda" else lambda _, s: measure_this_machine(s).bandwidth
    readings = [(read(device, each), read_flop_rate(device, dtype, each)) for _ in range(4)]
    bandwidth, flops = np.max(readings, axis=0).tolist()
    return Rates(bandwidth, flops, disturbed(readings, "this machine's rates"))


def read_flop_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """Operations per second of a product of two square matrices: the median over about `seconds`.

    Their side is 1,024 on a CPU and 8,192 on another device, which needs more work to be busy.
    """
    side = 1024 if device.type == "cpu" else 8192
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    return 2 * side**3 / _median_seconds(lambda: matrix @ matrix, device, seconds)


def _median_seconds(action, device: torch.device, seconds: float) -> float:
    """Median time of an action over about `seconds`, at least two times, after a warm-up."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times: list[float] = []
    end = perf_counter() + seconds
    while len(times) < 3 or perf_counter() < end:
        wait()
        started = perf_counter()
        action()
        wait()
        times.append(perf_counter() - started)
    return median(times[1:])


def read_bandwidth(device: torch.device, seconds: float = 0.5) -> float:
    """Bytes per second that a device reads: the median of sums over an array of 512 MiB, or an eighth of a
    smaller device's memory. For a CPU, hw_specs.measure_this_machine is the better reading."""
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 4 << 30
    array = torch.ones(min(1 << 29, memory // 8) // 4, dtype=torch.float32, device=device)
    return array.numel() * array.element_size() / _median_seconds(lambda: float(array.sum()), device, seconds)


def plain_times(decoder, prompt, n_new: int = 8, runs: int = 3) -> tuple[float, float, str]:
    """Seconds to the first token and per later token of short runs of plain decoding: medians, and why they are not to
    be judged ("" where they may be; spread.disturbed). prompt: ids. n_new: tokens of each run."""
    made = [autoregressive_generate(decoder, prompt, n_new)[1] for _ in range(runs)]
    busy = disturbed([[run.per_token] for run in made], "the time of a token in plain decoding")
    return median(run.ttft for run in made), median(run.per_token for run in made), busy


def step_times(decoder, ids, context: int, sent, repeats: int) -> np.ndarray:
    """(n, repeats) seconds of one forward over sent[i] tokens behind `context` cached ones, after a warm-up.

    ids: at least max(context, *sent) token ids. The lengths are timed in rising and falling order in turn, so
    that a machine that slows down does not bend the curve.
    """
    decoder.rewind(0)
    decoder.prefill(ids[:context])
    times = np.zeros((len(sent), repeats + 1))
    order = [(i, k) for k in range(repeats + 1) for i in range(len(sent))[::1 if k % 2 else -1]]
    for i, k in progress(order, "sending n tokens"):
        decoder.synchronize()
        started = perf_counter()
        decoder.send(ids[:sent[i]])
        decoder.synchronize()
        times[i, k] = perf_counter() - started
        decoder.rewind(context)
    return times[:, 1:]


def step_seconds(models: Sequence, ids, context: int, rounds: int) -> np.ndarray:
    """(models, rounds) seconds of a forward of one token behind `context` others, the models in turn, after a warm-up.

    models: the target first, then drafts, of which some may read the target's cache. ids: more than `context` tokens.
    """
    seconds, target = np.empty((len(models), rounds + 2)), models[0]
    for k in range(rounds + 2):
        for i, model in enumerate(models):
            if model.length != context:
                model.rewind(0)
                if model.length < context:       # a draft on the target's cache is already there
                    model.prefill(ids[:context])
            target.synchronize()
            started = perf_counter()
            model.send(ids[context:context + 1])
            target.synchronize()
            seconds[i, k] = perf_counter() - started
            model.rewind(context)
    return seconds[:, 2:]
