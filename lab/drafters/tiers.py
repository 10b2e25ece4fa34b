"""Drafts from n-gram statistics, in tiers: what the context repeats, then tables, the highest order first.

A drafted token costs little but not nothing, as the target's forward grows by it. So one is drafted only while the
chance that it is reached and kept, estimated from what was kept so far, is worth that price.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Literal

from decode_lab import Draft, Drafter
from lab.drafters.lookup import SuffixLookup
from lab.drafters.model import check_vocabulary
from lab.support.errors import BadInput, require, whole


def tier_name(order: int) -> str:
    """What the tokens that a table of this order drafted are called."""
    return {2: "bigram", 3: "trigram"}.get(order, f"{order}-gram")


class NgramDrafter:
    """Tiers of statistics as one Drafter of chains.

    A draft begins with what `lookup` copies from the sequence. Where that has nothing, or nothing more that is worth
    its price, the tables go on, token by token behind the sequence and the draft so far: the likeliest successor in
    the table of the highest order, where that has no entry in the next one. A token's source is its tier: "lookup",
    "4-gram", "trigram", "bigram".

    tables: each with `order`, `vocab_size`, `tokenizer` and best(tokens) -> (successor, its count, the context's count)
    or None, as lab.ngram.table.NgramTable; any number, in any order. lookup: a Drafter that copies (default
    SuffixLookup), or None; one that tells the length of its match (`matched`) is judged by it.
    price: the time that the target takes for one more drafted token, in plain steps; 0 drafts whatever there is. A
    token is drafted while it raises the expected tokens per step: while the chance that it and all before it are kept,
    over its price, is above the tokens per step of the draft so far, (1 + chances) / (1 + prices).
    discount: weight of a test after one more round; 1 forgets nothing. What was given up is forgotten and tried again.
    weight: how many tests the first guess is worth. min_count: entries of tables seen less often are no entries.
    BadInput for impossible values, and from `start` for a table of another tokenizer than the target's.

    The chance is estimated by kind of token. A table's kinds are quarters of count / (total + 1), which is the first
    guess. A copy's kinds are the powers of two of n, the tokens copied before this one, match and draft together; the
    first guess is n / (n + 2), as a copy that held for long tends to hold on.
    """

    def __init__(self, tables: Sequence = (), lookup: Drafter | Literal["suffixes"] | None = "suffixes", *,
                 price: float = 0.02, discount: float = 0.99, weight: float = 1.0, min_count: int = 1,
                 name: str = "n-gram tiers"):
        require(0 <= price <= 1, "price", price, "0 (drafts whatever there is) to 1")
        require(0 < discount <= 1, "discount", discount, "above 0 and at most 1")
        require(0 < weight < float("inf"), "weight", weight, "above 0")
        self.lookup: Drafter | None = SuffixLookup() if isinstance(lookup, str) else lookup
        self.tables = sorted(tables, key=lambda table: -table.order)
        self._longest = max((table.order - 1 for table in self.tables), default=1)
        if self.lookup is None and not self.tables:
            raise BadInput(f"{name} has neither a lookup nor a table: one of them would be right.")
        self.price, self.discount, self.weight, self.name = price, discount, weight, name
        self.min_count = whole("min_count", min_count, 1)

    def start(self, target, sampler, prompt):
        for table in self.tables:
            check_vocabulary(target, SimpleNamespace(name=f"the table {getattr(table, 'path', '')}".strip(),
                                                     vocab_size=table.vocab_size, tokenizer=table.tokenizer))
        if self.lookup is not None:
            self.lookup.start(target, sampler, prompt)
        self._vocab_size = target.vocab_size
        self._seen: dict[tuple, list[float]] = {}              # kind -> [tests, kept], as far as remembered
        self._drafted: list[tuple] = []                        # the last draft's tokens and their kinds ...
        self._start = 0                                        # ... and where it began

    def propose(self, tokens, gamma, rng=None) -> Draft:
        draft, kinds = Draft(), list[tuple]()
        chance, expected, text = 1.0, 1.0, [int(t) for t in tokens[-self._longest:]]

        def add(token, q, source, kind, guess) -> bool:
            """Draft this token, if it is worth its price."""
            nonlocal chance, expected
            tests, kept = self._seen.get(kind, (0.0, 0.0))
            reached = chance * (kept + self.weight * guess) / (tests + self.weight)
            steps = 1 + self.price * len(kinds)
            if reached * steps < self.price * expected:
                return False
            chance = reached
            expected += reached
            draft.add(token, q, source)
            kinds.append(kind)
            text.append(token)
            return True

        copied = self.lookup.propose(tokens, gamma, rng) if self.lookup is not None else Draft()
        for n, (token, q) in enumerate(zip(copied.tokens, copied.q), getattr(self.lookup, "matched", 1)):
            if not add(token, q, "lookup", ("lookup", n.bit_length()), n / (n + 2)):
                break
        while len(draft.tokens) < gamma and (found := self._successor(text)) is not None and add(*found):
            pass
        self._drafted, self._start = list(zip(draft.tokens, kinds)), len(tokens)
        return draft

    def verified(self, tokens, path, hidden):
        self._learn(tokens)
        if self.lookup is not None:
            self.lookup.verified(tokens, path, hidden)

    def tentative(self, tokens):
        self._learn(tokens)

    def _learn(self, tokens):
        """Learn from what became of the draft, as far as the sequence goes: it ends with the verifier's own token."""
        for seen in self._seen.values():
            seen[:] = [self.discount * x for x in seen]
        for (token, kind), actual in zip(self._drafted, tokens[self._start:self._start + len(self._drafted)]):
            seen = self._seen.setdefault(kind, [0.0, 0.0])
            seen[0] += 1
            seen[1] += token == actual
        self._drafted = []

    def _successor(self, text):
        """What the tables say comes next: the arguments of `add`, or None."""
        for table in self.tables:
            token, count, total = table.best(text) or (0, 0, 0)
            if count >= self.min_count and token < self._vocab_size:
                guess, order = count / (total + 1), table.order
                return token, None, tier_name(order), (order, int(4 * guess)), guess
        return None
