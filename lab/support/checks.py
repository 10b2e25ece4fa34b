"""What decode_lab refuses before it computes: prompts, budgets and drafts that cannot be, each in one sentence."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from lab.support.errors import BadInput, whole


def name_of(thing, otherwise: str) -> str:
    """A decoder's or drafter's name, which is optional."""
    return getattr(thing, "name", otherwise)


def token_ids(prompt) -> list[int]:
    """One sequence of token ids as a list of ints."""
    ids = np.asarray(prompt)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise BadInput(f"The prompt is an array of {ids.dtype} of shape {ids.shape}: one sequence of whole numbers, "
                       "shape (n,), would be right.")
    return ids.tolist()


def end_ids(eos) -> frozenset[int]:
    """The ids that end a text, given as one id, as several, or as None."""
    several = isinstance(eos, Collection) and not isinstance(eos, str)
    return frozenset(whole("eos", token, 0) for token in (eos if several else [] if eos is None else [eos]))


def budget(target, tokens, n_new):
    """How many tokens may be generated, and which limit it is that ends them."""
    limit = getattr(target, "max_length", None)
    if not tokens:
        raise BadInput("The prompt has no tokens: at least one would be right.")
    bad = [t for t in tokens if not 0 <= t < target.vocab_size]
    if bad:
        raise BadInput(f"Prompt token {bad[0]} is outside the target's vocabulary, 0 to {target.vocab_size - 1}.")
    n_new = whole("n_new", n_new, 1)
    if limit is not None and len(tokens) >= limit:
        raise BadInput(f"The prompt has {len(tokens)} tokens and the model holds {limit}: no room for a new one.")
    if limit is not None and len(tokens) + n_new > limit:
        return limit - len(tokens), "context"
    return n_new, "budget"


def check_draft(draft, depth, vocab_size, name):
    """BadInput for a draft that the rule cannot test."""
    n = len(draft.tokens)
    for t in draft.tokens:
        if not 0 <= t < vocab_size:
            raise BadInput(f"{name} proposed token {t}, outside the target's vocabulary, 0 to {vocab_size - 1}.")
    if len(draft.q) != n or len(draft.sources) != n or (draft.parents is not None and len(draft.parents) != n):
        raise BadInput(f"{name} proposed {n} tokens with {len(draft.q)} distributions and {len(draft.sources)} "
                       "sources: one of each per token would be right.")
    for t, q in zip(draft.tokens, draft.q):
        if q is not None and (len(q) != vocab_size or not q[t] > 0):
            raise BadInput(f"{name} proposed token {t} with a distribution over {len(q)} ids that cannot have drawn "
                           f"it: one over the target's {vocab_size}, positive at the token, would be right.")
    levels: list[int] = []
    for i, parent in enumerate(range(-1, n - 1) if draft.parents is None else draft.parents):
        if not -1 <= parent < i:
            raise BadInput(f"{name} gave node {i} the parent {parent}: an earlier node or -1 would be right.")
        levels.append(levels[parent] + 1 if parent >= 0 else 1)
    if max(levels, default=0) > depth:
        raise BadInput(f"{name} proposed a draft {max(levels)} deep where at most {depth} were asked for.")


def one_sampler(temperature: float, sampler) -> None:
    """BadInput for a temperature beside a sampler, which has its own."""
    if sampler is not None and temperature != 0:
        raise BadInput(f"temperature = {temperature} stands beside a sampler with its own: one of the two would be "
                       "right.")
