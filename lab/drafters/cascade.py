"""Three models in a row: the smallest drafts for the middle one, whose tokens are drafted for the largest."""

from __future__ import annotations

from itertools import takewhile
from time import perf_counter

import numpy as np

from decode_lab import Decoder, Draft, Drafter, Round, Run, Sampler, name_of, verify
from lab.drafters.model import ModelDrafter, check_vocabulary, fit_row
from lab.support.errors import BadInput, whole


class CascadeDrafter(ModelDrafter):
    """A middle model drafts a chain, and speculates itself meanwhile: `inner` drafts, the middle verifies.

    inner: any Drafter of chains for the middle model, lookups and further cascades too. inner_gamma: its longest
    draft. sampler: how the middle draws; None draws as the target does. BadInput for an inner_gamma that cannot be,
    from `start` for models that do not share the target's tokenizer or that share one cache, and from `propose` for a
    tree of `inner`.

    Lossless for the target, as each token is reported with the middle's own distribution. That is what it was drawn
    from: speculation leaves a model's distribution as it is, whether a token was accepted from `inner` or drawn after
    a refusal. What `inner` drew from is used up in the middle's test, and the target must not see it.

    run: the middle's rounds since the last `start`, as any Run: drafted and accepted are `inner`'s tokens.
    """

    def __init__(self, model: Decoder, inner: Drafter, inner_gamma: int, sampler: Sampler | None = None,
                 name: str | None = None):
        super().__init__(model, sampler, name or f"{name_of(inner, 'draft')} for {name_of(model, 'model')}")
        self.inner, self.inner_gamma, self.run = inner, whole("inner_gamma", inner_gamma, 0), Run()

    def start(self, target, sampler, prompt):
        super().start(target, sampler, prompt)
        self.inner.start(target, self._sampler, prompt)
        if hasattr(self.inner, "model"):
            check_vocabulary(self.model, self.inner.model)
        self._text, self._n_verified, self.run = list(prompt), len(prompt), Run()

    def propose(self, tokens, gamma, rng) -> Draft:
        draft, end = Draft(), len(tokens) + self._follower.room(tokens, gamma)
        text = self._grown(tokens)
        while len(text) < end:
            # 1. Draft: the inner drafter goes on behind the middle model's text, which is not verified yet. What the
            # middle has refused leaves its cache before that, as the inner may draft on this cache (LayerDraft).
            started = perf_counter()
            unread = self._follower.catch_up(text)
            caught_up = perf_counter()
            depth = min(self.inner_gamma, end - len(text) - 1)
            inner = self.inner.propose(text, depth, rng) if depth > 0 else Draft()
            if inner.parents is not None:
                raise BadInput(f"{name_of(self.inner, 'the inner drafter')} proposed a tree for "
                               f"{name_of(self.model, 'the middle model')}: a drafter of chains would be right "
                               "there.")
            drafted = perf_counter()

            # 2. Verify with the middle model.
            # An id that the middle has no row for (see `check_vocabulary`) has the probability 0: it is refused, and no
            # row behind it is read.
            known = takewhile(lambda t: t < self.model.vocab_size, inner.tokens)
            rows = self._fitted(self._follower.send([*unread, *known])[len(unread) - 1:])
            path, own, tested = verify(inner, rows, self._sampler, text, rng)

            # 3. What the middle accepted, and its own token, are the draft for the target, with the middle's q.
            for row, token in zip(rows, [*(inner.tokens[i] for i in path), own]):
                q = None if self._sampler.greedy else self._sampler.probs(row, text)
                draft.add(int(token), q, self.name)
                text.append(int(token))
            if hasattr(self.inner, "tentative"):
                self.inner.tentative(text)
            self.run.rounds.append(Round(len(inner.tokens), tested, len(path), drafted - caught_up,
                                         perf_counter() - drafted + caught_up - started, tuple(inner.sources[:tested]),
                                         first=not self.run.rounds))
        return draft

    def verified(self, tokens, path, hidden):
        super().verified(tokens, path, hidden)
        self._n_verified = len(self._grown(tokens))
        self.inner.verified(tokens, [], None)

    def _grown(self, tokens) -> list[int]:
        """The sequence as a list that may be written to; only what is not verified yet is copied."""
        del self._text[self._n_verified:]
        self._text += tokens[self._n_verified:]
        return self._text

    def _fitted(self, rows):
        """Logits (n, V') of the middle model over the target's ids (n, V)."""
        same = rows.shape[-1] == self._vocab_size
        return rows if same else np.stack([fit_row(row, self._vocab_size) for row in rows])
