"""Draft models made of the toy family, with the bytes that they would take: whole, cut after some layers, rounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from lab.models.quant import quantize_params
from lab.support.errors import require
from lab.toy import family
from lab.toy.transformer import Config, TransformerLM, config_like, softmax, truncate

FOR_LARGE = ("small", "medium", "large-exit", *(f"first-{n}" for n in range(1, 6)))


@dataclass(frozen=True, eq=False)
class Sized:
    """A model of the toy family, and the bytes that its weights would take. target: a draft's target, else ""."""

    name: str
    target: str
    lm: TransformerLM
    weight_bytes: float

    def step_bytes(self, context: int, float_bytes: float) -> float:
        """Bytes that a decode step reads after `context` tokens: weights, and the cache at float_bytes per value."""
        c = self.lm.config
        return self.weight_bytes + context * c.n_layers * 2 * c.n_kv_heads * c.head_dim * float_bytes


def whole(name: str, target: str, model: tuple[dict, Config], float_bytes: float) -> Sized:
    """A model as it is, kept at float_bytes per weight; model: (params, config) as `toy.load_params` gives them."""
    params, config = model
    return Sized(name, target, TransformerLM(params, config, name), config.n_params() * float_bytes)


def first_layers(n: int, target: str, model: tuple[dict, Config], float_bytes: float) -> Sized:
    """The first n layers of a target, under its own final norm and head: "first 2"."""
    params, config = model
    return whole(f"first {n}", target, (truncate(params, n), config_like(config, n_layers=n)), float_bytes)


def rounded(scheme: str, target: str, model: tuple[dict, Config], float_bytes: float) -> Sized:
    """A target in fewer bits ("int4-g32"), sized as packed integers and run dequantized, in float32."""
    params, report = quantize_params(model[0], scheme, float_bytes=float_bytes)
    return Sized(scheme, target, TransformerLM(params, model[1], scheme), report.bytes)


def draft_for_large(name: str) -> TransformerLM:
    """A draft model for the toy target large, one of FOR_LARGE: "first-N" is the first N layers of large."""
    require(name in FOR_LARGE, "draft", name, f"one of {', '.join(FOR_LARGE)}")
    layers = name.removeprefix("first-")
    if layers == name:
        return family.load(name)
    return first_layers(int(layers), "large", family.load_params("large"), 2.0).lm


def loss(logits, ids) -> float:
    """Nats per token that a model (n, T, V) gives the text (n, T + 1) that follows its logits."""
    p = np.take_along_axis(softmax(logits), ids[:, 1:, None], axis=-1)
    return float(-np.log(np.maximum(p, 1e-30)).mean(dtype=np.float64))


def time_steps(models: Sequence[Sized], context: int, blocks: int = 5, steps: int = 20) -> dict[Sized, np.ndarray]:
    """{model: (blocks, steps) seconds of a decode step after `context` tokens}, the models in turn, after a warm-up."""
    return time_forwards({m: (m.lm, 1) for m in models}, context, blocks, steps)


def time_forwards(forwards: Mapping[Any, tuple[TransformerLM, int]], context: int, blocks: int = 5,
                  steps: int = 20) -> dict[Any, np.ndarray]:
    """{name: (blocks, steps) seconds of a forward of n tokens after `context` others}, in turn, after a warm-up.

    forwards: {name: (model, n)}; a model may stand there several times.
    """
    taken: dict[Any, list[float]] = {name: [] for name in forwards}
    for lm, _ in forwards.values():
        lm.rewind(0)
        lm.prefill(np.zeros(context, int))
    for name in list(forwards) * (blocks * steps + 3):
        lm, n = forwards[name]
        started = perf_counter()
        lm.send([0] * n)
        taken[name].append(perf_counter() - started)
        lm.rewind(context)
    return {name: np.reshape(seconds[3:], (blocks, steps)) for name, seconds in taken.items()}
