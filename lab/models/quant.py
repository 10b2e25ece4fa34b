"""Weight quantization: int8 and int4, symmetric, with one 16-bit scale per group of weights.

A group is `group` consecutive weights of one output channel, along the input dimension; without a group size
the whole channel is one group. Each weight becomes the nearest of 2^bits - 1 evenly spaced values, from -qmax
to qmax times the group's scale (qmax 127 or 7), zero among them ("absmax" in LLM.int8(), arXiv 2208.07339;
groups as in Q-BERT, arXiv 1909.05840). Nothing is calibrated on data.

numpy has no product of packed integers, so what comes back is dequantized to float32: it behaves as the
quantized model would, and runs no faster. The bytes reported are those of the packed form.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from lab.support.errors import BadInput
from lab.support.flags import Rule

SCALE_BYTES = 2                                      # scales are float16


@dataclass(frozen=True)
class Scheme:
    """bits per weight, and weights per scale (0: one scale for a whole output channel)."""

    bits: int
    group: int = 0

    @property
    def qmax(self) -> int:
        """Largest code: 127 for int8, 7 for int4. -qmax - 1 is left unused, so that zero is in the middle."""
        return 2 ** (self.bits - 1) - 1

    def n_groups(self, n_in: int) -> int:
        """Scales per output channel; the last group is shorter where the size does not divide n_in."""
        return -(-n_in // (self.group or n_in))


def parse_scheme(name: str) -> Scheme:
    """ "int8", "int4-g32" and the like -> Scheme; BadInput for any other name."""
    match = re.fullmatch(r"int(4|8)(?:-g([1-9][0-9]*))?", str(name))
    if not match:
        raise BadInput(f'unknown quantization "{name}"; int8 or int4 would be right, with a group size '
                       "where wanted, as in int4-g32")
    return Scheme(int(match[1]), int(match[2] or 0))


def _is_scheme(name: str) -> bool:
    try:
        return bool(parse_scheme(name))
    except BadInput:
        return False


# The type of an assumption that `parse_scheme` takes.
Rounding = Annotated[str, Rule("a rounding such as int8 or int4-g32", _is_scheme)]


def quantize(weight: np.ndarray, scheme: Scheme) -> tuple[np.ndarray, np.ndarray]:
    """(in, out) weights -> int8 codes (in, out) and float16 scales (groups, out).

    A scale is the group's largest magnitude over qmax, rounded up to float16, so that no weight is clipped
    and each is at most half a step from its code times the scale. BadInput for weights that are not finite,
    or so large that their scale is beyond float16.
    """
    weight = np.asarray(weight)
    if weight.ndim != 2 or weight.size == 0:
        raise BadInput(f"quantize takes (in, out) weights, not an array of shape {weight.shape}")
    group = min(scheme.group or len(weight), len(weight))
    largest = np.maximum.reduceat(np.abs(weight), np.arange(0, len(weight), group), axis=0)
    exact, limit = largest.astype(np.float64) / scheme.qmax, float(np.finfo(np.float16).max)
    if not exact.max() <= limit:
        raise BadInput(f"cannot quantize weights up to {largest.max():g}: finite ones up to "
                       f"{limit * scheme.qmax:g} have a float16 scale")
    scales = exact.astype(np.float16)
    scales = np.where(scales < exact, np.nextafter(scales, np.float16(np.inf)), scales)
    step = np.repeat(scales, group, axis=0)[:len(weight)].astype(np.float64)
    codes = np.rint(np.divide(weight, step, out=np.zeros(weight.shape), where=step > 0))
    return codes.astype(np.int8), scales


def dequantize(codes: np.ndarray, scales: np.ndarray, scheme: Scheme) -> np.ndarray:
    """The weights that the codes stand for, float32 (in, out); exact: code times scale fits in 24 bits."""
    steps = np.repeat(scales, min(scheme.group or len(codes), len(codes)), axis=0)[:len(codes)]
    return codes * steps.astype(np.float32)


@dataclass(frozen=True)
class TensorReport:
    """One tensor. bits: of a code, None if it stays float. error: RMS of the change over RMS of weights."""

    name: str
    shape: tuple[int, ...]
    bits: int | None
    bytes: int
    original_bytes: int
    error: float

    @property
    def bits_per_weight(self) -> float:
        """Stored bits over weights, scales included."""
        return 8 * self.bytes / int(np.prod(self.shape))


@dataclass(frozen=True)
class QuantReport:
    """All tensors together; `bytes` counts codes, scales and what stays float."""

    scheme: str
    tensors: tuple[TensorReport, ...]
    bytes: int
    original_bytes: int
    bits_per_weight: float
    error: float


def quantize_params(params: dict, scheme: str, include_lm_head: bool = True, *,
                    float_bytes: float | None = None) -> tuple[dict, QuantReport]:
    """Quantize a model's matrices -> (parameters of the same structure, dequantized to float32; QuantReport).

    params: as `lab.toy.transformer.init_params` makes them; they are not changed, and what stays float (norms) is
    shared. The toy's embedding is tied: one matrix (V, d) is both the input table and the output head,
    grouped along d, the head's input dimension. include_lm_head=True quantizes it, so the input embeddings
    carry the same rounding; False keeps it float in both places.
    float_bytes: bytes of a float value, in the original and where it stays float (2 for a model kept in 16
    bits); None: as the arrays given. BadInput as `parse_scheme` and `quantize`.
    """
    how, reports, sums = parse_scheme(scheme), [], np.zeros(2)

    def convert(name, value):
        if isinstance(value, dict):
            return {key: convert(f"{name}.{key}" if name else key, item) for key, item in value.items()}
        if isinstance(value, list):
            return [convert(f"{name}.{i}", item) for i, item in enumerate(value)]
        weight = np.asarray(value)
        original = bytes_ = int(weight.size * (float_bytes or weight.itemsize))
        new, bits = weight.astype(np.float32, copy=False), None
        if weight.ndim == 2 and (name != "embed" or include_lm_head):
            matrix = weight.T if name == "embed" else weight             # (in, out)
            codes, scales = quantize(matrix, how)
            new, bits = dequantize(codes, scales, how), how.bits
            new = np.ascontiguousarray(new.T) if name == "embed" else new
            bytes_ = -(-weight.size * bits // 8) + SCALE_BYTES * scales.size
        change, size = (np.square(x, dtype=np.float64).sum() for x in (new - weight, weight))
        sums[:] += change, size
        reports.append(TensorReport(name, weight.shape, bits, bytes_, original, _relative(change, size)))
        return new

    converted = convert("", params)
    bytes_, weights = sum(t.bytes for t in reports), sum(int(np.prod(t.shape)) for t in reports)
    return converted, QuantReport(scheme, tuple(reports), bytes_, sum(t.original_bytes for t in reports),
                                  8 * bytes_ / weights, _relative(*sums))


def _relative(change: float, size: float) -> float:
    return float(np.sqrt(change / size)) if size > 0 else 0.0
