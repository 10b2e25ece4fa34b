"""A smaller model drafts: a chain, one forward per token, on a cache that follows the sequence."""

from __future__ import annotations

import numpy as np

from decode_lab import Decoder, Draft, Sampler, draw, name_of, prefill, to_numpy
from lab.support.checks import possible
from lab.support.errors import BadInput

PREFILL_FROM = 16                                  # tokens: fewer are sent at once, logits and all


class Follower:
    """A draft model whose own sequence follows the one being written.

    What the model has sent is kept as long as it agrees with the sequence; what is verified is committed. So each
    proposal sends only what the model has not read yet.
    """

    def __init__(self, model: Decoder):
        self.model = model
        self._final = 0                            # tokens of the sequence that are verified
        self._sent: list[int] = []                 # what the model has sent behind the first `_base` tokens
        self._base = 0

    def start(self, prompt) -> None:
        """A new run: an empty cache, and a prompt (n,) that stays."""
        self.model.rewind(0)
        self._sent, self._base = [], self.model.committed
        self._final, self._readable = len(prompt), self._knows(prompt)

    def room(self, tokens, gamma: int) -> int:
        """How deep the model can draft behind the sequence: gamma, or less where its context ends (the deepest token
        need not enter its cache), or 0 once the target has written an id that it has no row for."""
        limit = getattr(self.model, "max_length", None)
        depth = gamma if limit is None else min(gamma, limit - len(tokens) + 1)
        return depth if depth > 0 and self._readable and self._knows(tokens[self._final:]) else 0

    def catch_up(self, tokens) -> list[int]:
        """Go back to what the model shares with the sequence, and read a long verified part -> what is still unread.

        At least the last token is unread, so that sending gives the row that follows it.
        """
        held = min(self._shared(tokens), len(tokens) - 1)
        if held < self.model.length:
            self.model.rewind(held)
            del self._sent[held - self._base:]
        stop = min(self._final, len(tokens) - 1)
        if stop - held >= PREFILL_FROM and not self._sent and hasattr(self.model, "prefill"):
            prefill(self.model, tokens[held:stop])
            self._base = held = stop
        return list(tokens[held:])

    def send(self, tokens):
        """Logits (n, V) of tokens (n,) behind what the model holds."""
        rows = self.model.send(tokens)
        self._sent += [int(t) for t in tokens]
        return rows

    def verified(self, tokens) -> None:
        """Commit what the model shares with the sequence (n,), which is final, but for its last token."""
        self._readable = self._readable and self._knows(tokens[self._final:])
        self._final = len(tokens)
        n = min(self._shared(tokens), len(tokens) - 1) - self._base
        if self._sent:
            self.model.commit(range(n))
        self._base, self._sent = self.model.committed, []

    def _knows(self, tokens) -> bool:
        """Whether the model has a row for each of these ids (see `check_vocabulary`)."""
        return max(tokens, default=0) < self.model.vocab_size

    def _shared(self, tokens) -> int:
        """How many tokens of the sequence, from its start, the model holds."""
        if self.model.committed != self._base:     # a draft on its target's cache moves with it
            self._base, self._sent = self.model.committed, []
        n = 0
        while n < len(self._sent) and self._base + n < len(tokens) and self._sent[n] == tokens[self._base + n]:
            n += 1
        return self._base + n


class FromModel:
    """What drafters share that run a smaller model: its cache follows the sequence.

    sampler: how the model draws; None draws as the target does, which accepts most.
    """

    def __init__(self, model: Decoder, sampler: Sampler | None = None, name: str | None = None):
        self.model, self._own = model, sampler
        self.name = name or name_of(model, "model")
        self._follower = Follower(model)

    def start(self, target, sampler, prompt):
        check_vocabulary(target, self.model)
        self._vocab_size, self._sampler = target.vocab_size, self._own or sampler
        self._follower.start(prompt)

    def verified(self, tokens, path, hidden):
        self._follower.verified(tokens)


class ModelDrafter(FromModel):
    """A smaller model drafts a chain, one forward per token.

    sampler: how it draws; None draws as the target does, which accepts most. After each round its cache is committed up
    to what was kept, and the next proposal sends what it has not read yet (the target's own token, and the last draft
    token when all were accepted) in its first forward.
    """

    def propose(self, tokens, gamma, rng) -> Draft:
        draft, history = Draft(), list(tokens) if self._sampler.repetition_penalty != 1 else []
        depth = self._follower.room(tokens, gamma)
        unread = self._follower.catch_up(tokens) if depth > 0 else []
        for _ in range(depth):
            row = self._follower.send(unread)[-1]
            token, q = self._choose(row, history, rng)
            draft.add(token, q, self.name)
            if not self._goes_on(token, q, row, history):
                break
            history.append(token)
            unread = [token]
        return draft

    def _goes_on(self, token, q, row, history) -> bool:
        """Whether to draft on behind this token, which is part of the draft either way."""
        return True

    def _choose(self, row, history, rng):
        """-> (token, the distribution it was drawn from, or None for a greedy choice)."""
        if self._sampler.greedy and self._sampler.repetition_penalty == 1 and len(row) <= self._vocab_size:
            return int(row.argmax()), None
        row = fit_row(row, self._vocab_size)
        if self._sampler.greedy:
            return self._sampler.argmax(row, history), None
        q = self._sampler.probs(row, history)
        return draw(q, rng), q


class ConfidentDrafter(ModelDrafter):
    """A chain that ends with the first token to which the draft model gives less than `threshold`.

    So the draft itself decides its length, up to the gamma it is asked for (as transformers'
    `assistant_confidence_threshold`; Kim et al., arXiv 2302.07863, 3.3). The unlikely token stays in the draft: leaving
    it out because of what was drawn would bend the distribution of what remains. The probability is that of the
    distribution drawn from; of a greedy choice, the softmax of the logits after the penalty. BadInput for a threshold
    outside 0 (never ends) to 1.
    """

    def __init__(self, model: Decoder, threshold: float = 0.4, sampler: Sampler | None = None, name: str | None = None):
        super().__init__(model, sampler, name)
        possible(threshold=(threshold, 0 <= threshold <= 1, "0 to 1"))
        self.threshold = threshold

    def _goes_on(self, token, q, row, history):
        if q is None:
            z = self._sampler.penalised(fit_row(row, self._vocab_size), history)
            return 1 / np.exp(z - z[token]).sum() >= self.threshold
        return q[token] >= self.threshold


def check_vocabulary(target: Decoder, draft: Decoder) -> None:
    """BadInput unless the draft's ids mean the same to the target.

    Where both name their tokenizer, the names decide, and output rows may be padded differently; else the sizes must
    agree.
    """
    names = name_of(target, "the target"), name_of(draft, "the draft")
    if draft is target:
        raise BadInput(f"{names[0]} cannot draft for itself with one cache: a second decoder of it would be right.")
    a, b = getattr(target, "tokenizer", None), getattr(draft, "tokenizer", None)
    if a is not None and b is not None:
        if a != b:
            raise BadInput(f"{names[1]} and {names[0]} have different tokenizers ({b} and {a}): a draft must share the "
                           "target's.")
    elif draft.vocab_size != target.vocab_size:
        raise BadInput(f"{names[1]} has a vocabulary of {draft.vocab_size} and {names[0]} of {target.vocab_size}: a "
                       "draft must share the target's.")


def fit_row(row, vocab_size: int):
    """A draft's logits (V',) over the target's ids (V,): cut, or padded with -inf, so that no other id is drawn."""
    if len(row) == vocab_size:
        return row
    row = to_numpy(row)[:vocab_size]
    return np.concatenate([row, np.full(vocab_size - len(row), -np.inf)])
