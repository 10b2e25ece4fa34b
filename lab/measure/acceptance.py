"""How often drafts are accepted: predicted by the overlap, sum of min(p, q), at the tokens of texts; and in rounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from decode_lab import Decoder, Round, Run, Sampler, accept, autoregressive_generate, draw, speculative_generate
from lab.drafters.model import ModelDrafter
from lab.measure.enumeration import outcomes


class Texts:
    """Texts that were written behind prompts, and what models draw from at each of their new tokens.

    tokens: (texts, prompt and new tokens), ids. n_prompt: tokens of each prompt. Models need `full_logits`, as the toys
    have it; each reads the texts once.
    """

    def __init__(self, tokens, n_prompt: int):
        self.tokens, self.n_prompt = np.asarray(tokens), n_prompt
        self._logits: dict = {}

    @classmethod
    def written(cls, target, prompts, n_new: int, sampler: Sampler, rng=None) -> Texts:
        """The texts that a target writes alone behind prompts (lists of ids, all of one length); rng: of its draws."""
        return cls([autoregressive_generate(target, ids, n_new, rng=rng, sampler=sampler)[0] for ids in prompts],
                   len(prompts[0]))

    def probs(self, model, sampler: Sampler) -> np.ndarray:
        """What a model draws from with a sampler at each new token: (texts, new tokens, V), float64."""
        if model not in self._logits:
            self._logits[model] = model.full_logits(self.tokens)[:, self.n_prompt - 1:-1]
        found = []
        for ids, rows in zip(self.tokens, self._logits[model]):
            found.append([sampler.probs(row, ids[:self.n_prompt + i]) for i, row in enumerate(rows)])
        return np.array(found)

    def overlaps(self, one, other) -> np.ndarray:
        """Sum of min(p, q) at each new token, (texts, new tokens). one, other: (model, its sampler)."""
        return np.minimum(self.probs(*one), self.probs(*other)).sum(axis=-1)


def where_tested(rounds: Sequence[Round], n_new: int) -> np.ndarray:
    """(n_new,) booleans: which new tokens stand where a run's rounds tested a drafted one, accepted or not."""
    found, at = np.zeros(n_new, bool), 0
    for r in rounds:
        found[at:at + r.tested] = True
        at += r.accepted + 1
    return found


def full_rounds(target: Decoder, draft: Decoder, prompts: Sequence[Sequence[int]], n_new: int, gamma: int,
                sampler: Sampler, rng) -> Run:
    """The rounds of speculative runs behind several prompts in which gamma tokens were drafted, pooled.

    Those that the end of a text cuts short are left out: they could not accept gamma tokens.
    """
    made = [speculative_generate(target, ModelDrafter(draft), prompt, n_new, gamma, sampler=sampler, rng=rng)[1]
            for prompt in prompts]
    return Run([r for r in Run.pool(made).rounds if r.drafted == gamma])


def first_token(p, drawn_from, reported) -> tuple[float, np.ndarray]:
    """A round's first token by the loop's own rule -> (probability that the draft is accepted, distribution (V,)).

    Exact: over every way that the random choices can fall. p: the target's distribution. drawn_from: what the draft is
    drawn from. reported: the q that the rule is given; where it is another one, the output is not p.
    """
    def test(rng):
        hit, token = accept(p, [draw(drawn_from, rng)], [reported], rng)
        return hit is not None, token
    accepted, out = 0.0, np.zeros(len(p))
    for (hit, token), chance in outcomes(test).items():
        accepted += hit * chance
        out[token] += chance
    return accepted, out
