"""How often a draft model's tokens are accepted: predicted from texts of the target alone, and in full rounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from decode_lab import Decoder, Run, Sampler, overlap, speculative_generate
from lab.drafters.model import ModelDrafter
from lab.toy.transformer import TransformerLM


def predicted_alpha(target: TransformerLM, draft: TransformerLM, texts: np.ndarray, n_prompt: int,
                    sampler: Sampler) -> float:
    """The mean sum of min(p, q) at the new tokens of the target's own texts (n, T), after prompts of n_prompt."""
    p, q = (np.concatenate(model.full_logits(texts)[:, n_prompt - 1:-1]) for model in (target, draft))
    return float(np.mean([overlap(sampler.probs(a), sampler.probs(b)) for a, b in zip(p, q)]))


def full_rounds(target: Decoder, draft: Decoder, prompts: Sequence[Sequence[int]], n_new: int, gamma: int,
                sampler: Sampler, rng) -> Run:
    """The rounds of speculative runs behind several prompts in which gamma tokens were drafted, pooled.

    Those that the end of a text cuts short are left out: they could not accept gamma tokens.
    """
    made = [speculative_generate(target, ModelDrafter(draft), prompt, n_new, gamma, sampler=sampler, rng=rng)[1]
            for prompt in prompts]
    return Run([r for r in Run.pool(made).rounds if r.drafted == gamma])
