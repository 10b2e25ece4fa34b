"""Where a greedy text differs from plain decoding's, and whether rounding explains it, as measured on the model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from decode_lab import Sampler, prefill, to_numpy
from lab.support.errors import BadInput

FACTOR = 2                     # times the noise that two honest paths show: the forward in question is a third path
READ = 32                      # positions on which the two are compared


@dataclass(frozen=True)
class Divergence:
    """The first position at which two greedy outputs differ, and whether rounding explains it.

    position: index into the whole sequence, prompt included. plain, other: the token of each, None past its end.
    margin: |logit of plain - logit of other| in plain decoding. step: distance between neighbouring numbers of the
    dtype at the size of these logits. allowed: the largest margin that rounding explains.
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

    @property
    def cells(self) -> tuple[int, str, str]:
        """What a table shows: position, both tokens, and the margin beside what is allowed, in steps of the dtype."""
        return (self.position, f"{self.plain} / {self.other}",
                f"{self.margin / self.step:.3g} of {self.allowed / self.step:.3g}")


def explain_divergence(decoder, plain, other, sampler: Sampler = Sampler()) -> Divergence | None:
    """Where a greedy output first differs from plain greedy decoding of the same prompt; None where it does not.

    plain, other: whole sequences (prompt and output), plain decoding's first. sampler: how both were chosen, whose
    repetition penalty counts. The text is read again, so the decoder's cache is overwritten.

    A forward over several tokens adds in another order than a forward over one, so both round differently. By how much
    is measured: the text up to the difference is read by two honest paths, one token a forward and two tokens a
    forward. The gap between two logits then differs by some noise. A margin of up to FACTOR times the largest noise,
    and of one step of the dtype at least, is rounding; a larger one is a bug.
    """
    plain, other = [int(t) for t in plain], [int(t) for t in other]
    same = next((i for i, (a, b) in enumerate(zip(plain, other)) if a != b), min(len(plain), len(other)))
    if same == len(plain) == len(other):
        return None
    if same == 0:
        raise BadInput("the sequences have different prompts; continuations of one prompt would be right")
    of_plain, of_other = (sequence[same] if same < len(sequence) else None for sequence in (plain, other))
    tokens = [token for token in (of_plain, of_other) if token is not None]
    one, two = (_read(decoder, plain[:same], width) for width in (1, 2))
    row = sampler.penalised(one[-1], plain[:same])
    logits = [row[token] for token in tokens]
    step = torch.finfo(decoder.dtype).eps * 2.0 ** np.floor(np.log2(max(np.abs(logits).max(), 1e-30)))
    margin = abs(logits[0] - logits[1]) if len(logits) == 2 else float("inf")
    allowed = max(FACTOR * _noise(one, two, tokens), step)
    return Divergence(same, of_plain, of_other, float(margin), float(step), float(allowed))


def divergences(decoder, pairs) -> list[Divergence]:
    """Of pairs (plain, other) of greedy outputs, where those that differ do, the one hardest to explain first."""
    found = [explain_divergence(decoder, plain, other) for plain, other in pairs]
    return sorted((d for d in found if d is not None), key=lambda d: -d.margin / d.allowed)


def _read(decoder, text: list[int], width: int) -> np.ndarray:
    """Logits (n, V), float64, behind the last n = READ tokens of a text or fewer, `width` tokens a forward."""
    first = max(len(text) - READ, 0)
    decoder.rewind(0)
    prefill(decoder, text[:first])
    rows = []
    for at in range(first, len(text), width):
        sent = text[at:at + width]
        rows += [to_numpy(row) for row in decoder.send(sent)]
        decoder.commit(range(len(sent)))
    return np.array(rows)


def _noise(one: np.ndarray, two: np.ndarray, tokens: list[int]) -> float:
    """By how much the gap between two logits differs at most from path to path: rows (n, V) of each.

    Of each position the gap between its two best tokens counts, and that between the two tokens in question.
    """
    best = np.argsort(-one, axis=1)[:, :2]
    change = one - two
    gaps = np.take_along_axis(change, best, 1)
    largest = np.abs(gaps[:, 0] - gaps[:, 1]).max()
    if len(tokens) == 2:
        largest = max(largest, np.abs(change[:, tokens[0]] - change[:, tokens[1]]).max())
    return float(largest)
