"""Where a greedy text differs from plain decoding's, and whether rounding explains it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from lab.support.errors import BadInput
from decode_lab import Sampler, prefill


@dataclass(frozen=True)
class Divergence:
    """The first position at which two greedy outputs differ, and whether rounding explains it.

    position: index into the whole sequence, prompt included. plain, other: the token of each, None past its
    end.
    margin: |logit of plain - logit of other| in plain decoding. step: distance between neighbouring numbers
    of the dtype at the size of these logits. allowed: the largest margin that rounding explains.
    """

    position: int
    plain: int | None
    other: int | None
    margin: float
    step: float
    allowed: float

    @property
    def explained(self) -> bool:
        """False means a bug: the two logits are further apart than rounding reaches."""
        return self.margin <= self.allowed


def explain_divergence(decoder, plain, other, sampler: Sampler = Sampler()) -> Divergence | None:
    """Where a greedy output first differs from plain greedy decoding of the same prompt; None where it does
    not.

    plain, other: whole sequences (prompt and output), plain decoding's first. sampler: how both were chosen, whose
    repetition penalty counts. The logits at that position are computed once more from the sequence up to it, so the
    decoder's cache is overwritten.

    A forward over several tokens adds in another order than a forward over one, so both round differently. A
    logit depends on 2 x layers rounded additions to the residual stream; their errors add like a random walk,
    for each of the two logits, so up to sqrt(2 x 2 x layers) rounding steps between them are rounding, more a
    bug.
    """
    plain, other = [int(t) for t in plain], [int(t) for t in other]
    same = next((i for i, (a, b) in enumerate(zip(plain, other)) if a != b), min(len(plain), len(other)))
    if same == len(plain) == len(other):
        return None
    if same == 0:
        raise BadInput("the sequences have different prompts; continuations of one prompt would be right")
    decoder.rewind(0)
    prefill(decoder, plain[:same - 1])
    row = sampler.penalised(decoder.send(plain[same - 1:same])[-1], plain[:same])
    tokens = [sequence[same] if same < len(sequence) else None for sequence in (plain, other)]
    logits = [row[token] for token in tokens if token is not None]
    step = torch.finfo(decoder.dtype).eps * 2.0 ** np.floor(np.log2(max(np.abs(logits).max(), 1e-30)))
    margin = abs(logits[0] - logits[1]) if len(logits) == 2 else float("inf")
    steps = (4 * decoder.config.num_hidden_layers) ** 0.5
    return Divergence(same, *tokens, float(margin), float(step), float(steps * step))
