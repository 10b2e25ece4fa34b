"""Three models in a row: the smallest drafts for the middle one, whose tokens are drafted for the largest."""

from __future__ import annotations

from itertools import takewhile
from time import perf_counter

import numpy as np

from console import BadInput
from decode_lab import (Decoder, Draft, Drafter, ModelDrafter, Round, Run, Sampler, catch_up, check_vocabulary, fit_row,
                        room, verify)


class CascadeDrafter(ModelDrafter):
    """A middle model drafts a chain, and speculates itself meanwhile: `inner` drafts, the middle verifies.

    inner: any Drafter of chains for the middle model, lookups and further cascades too. inner_gamma: its longest
    draft. sampler: how the middle draws; None draws as the target does. BadInput for an inner_gamma that cannot be,
    from `reset` for models that do not share the target's tokenizer or that share one cache, and from `propose` for a
    tree of `inner`.

    Lossless for the target, as each token is reported with the middle's own distribution. That is what it was drawn
    from: speculation leaves a model's distribution as it is, whether a token was accepted from `inner` or drawn after
    a refusal. What `inner` drew from is used up in the middle's test, and the target must not see it.

    run: the middle's rounds since the last `reset`, as any Run: drafted and accepted are `inner`'s tokens.
    """

    def __init__(self, model: Decoder, inner: Drafter, inner_gamma: int, sampler: Sampler | None = None,
                 name: str | None = None):
        super().__init__(model, sampler, name or f"{getattr(inner, 'name', 'draft')} for "
                                                  f"{getattr(model, 'name', 'model')}")
        if not inner_gamma >= 0 or inner_gamma != inner_gamma // 1:
            raise BadInput(f"inner_gamma = {inner_gamma} is impossible: a whole number, 0 (no inner draft) or more, "
                           "would be right.")
        self.inner, self.inner_gamma, self.run = inner, int(inner_gamma), Run()

    def reset(self, target, sampler):
        super().reset(target, sampler)
        self.inner.reset(target, self._sampler)
        if hasattr(self.inner, "model"):
            check_vocabulary(self.model, self.inner.model)
        self.run = Run()

    def propose(self, tokens, gamma, rng) -> Draft:
        draft, text, end = Draft(), list(tokens), len(tokens) + room(self.model, tokens, gamma)
        while len(text) < end:
            started = perf_counter()
            depth = min(self.inner_gamma, end - len(text) - 1)
            inner = self.inner.propose(text, depth, rng) if depth > 0 else Draft()
            if inner.parents is not None:
                raise BadInput(f"{self.inner.name} proposed a tree for {self.model.name}: a drafter of chains would be "
                               "right in a cascade.")
            drafted = perf_counter()
            unseen = catch_up(self.model, text[self.model.length:])
            # An id that the middle has no row for (see `check_vocabulary`) has the probability 0: it is refused, and no
            # row behind it is read.
            known = takewhile(lambda t: t < self.model.vocab_size, inner.tokens)
            rows = self._fitted(self.model.extend([*unseen, *known])[len(unseen) - 1:])
            path, token, tested = verify(inner, rows, self._sampler, text, rng)
            for row, token in zip(rows, [*(inner.tokens[i] for i in path), token]):
                draft.tokens.append(int(token))
                draft.q.append(None if self._sampler.greedy else self._sampler.probs(row, text))
                draft.sources.append(self.name)
                text.append(int(token))
            self.model.rollback(len(text) - 1)
            self.inner.kept(text)
            self.run.rounds.append(Round(len(inner.tokens), tested, len(path), drafted - started,
                                         perf_counter() - drafted, tuple(inner.sources[:tested]),
                                         first=not self.run.rounds))
        self._proposed = len(tokens), draft.tokens
        return draft

    def kept(self, tokens):
        super().kept(tokens)
        self.inner.kept(tokens)

    def _fitted(self, rows):
        """Logits (n, V') of the middle model over the target's ids (n, V)."""
        same = rows.shape[-1] == self._vocab_size
        return rows if same else np.stack([fit_row(row, self._vocab_size) for row in rows])
