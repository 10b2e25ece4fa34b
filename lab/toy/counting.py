"""One forward of the toy with what it took: FLOPs, bytes, seconds."""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

import numpy as np

from lab.toy.transformer import TransformerLM


class Forward(NamedTuple):
    """What a forward returned for its last token, (V,), or None where no logits were wanted; and what it took."""

    logits: np.ndarray | None
    flops: int
    bytes: int
    seconds: float


def counted(lm: TransformerLM, forward, tokens) -> Forward:
    """Call forward(tokens), a method of `lm` such as send, and note what the toy counts where it spends it."""
    flops, read, started = lm.flops, lm.bytes_read, perf_counter()
    rows = forward(tokens)
    seconds = perf_counter() - started
    last = None if rows is None else rows.reshape(-1, lm.vocab_size)[-1].copy()
    return Forward(last, lm.flops - flops, lm.bytes_read - read, seconds)
