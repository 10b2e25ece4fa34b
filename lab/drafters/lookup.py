"""Drafts copied from the text so far: no model, and almost no time."""

from __future__ import annotations

from collections.abc import Collection

from decode_lab import Draft
from lab.support.errors import whole


def copied(tokens, at: int | None, gamma: int, boundary: Collection[int], source: str) -> Draft:
    """A draft of what stands from place `at` of the sequence on, up to gamma tokens; None gives an empty one.

    Where the sequence ends the copy goes on into the draft itself, as in LZ77. It ends with a token of `boundary`.
    """
    draft: list[int] = []
    while at is not None and len(draft) < gamma:
        draft.append(tokens[at] if at < len(tokens) else draft[at - len(tokens)])
        if draft[-1] in boundary:
            break
        at += 1
    return Draft(draft, [None] * len(draft), [source] * len(draft))


class PromptLookup:
    """Copies what followed the latest earlier occurrence of the longest suffix (prompt lookup; LLMA, arXiv 2304.04487).

    Suffixes of max_ngram down to min_ngram tokens are looked up in an index of the verified text that grows with it, so
    a proposal costs the same on a long prompt. Where fewer than gamma tokens follow the match, the copy goes on into
    the draft itself, as in LZ77. It never copies past a token of `boundary` (a document's end).
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1, boundary: Collection[int] = (), name: str = "lookup"):
        min_ngram = whole("min_ngram", min_ngram, 1)
        max_ngram = whole("max_ngram", max_ngram, min_ngram)
        self.name, self.sizes, self.boundary = name, range(max_ngram, min_ngram - 1, -1), frozenset(boundary)
        self._index: dict[int, dict[tuple, int]] = {n: {} for n in self.sizes}   # suffix -> where it ended last
        self._seen = 0

    def start(self, target, sampler, prompt):
        self._index, self._seen = {n: {} for n in self.sizes}, 0
        self.verified(prompt, [], None)

    def verified(self, tokens, path, hidden):
        """Note where each suffix of the text ended, but for the text's own end: it would match itself."""
        for end in range(self._seen + 1, len(tokens)):
            for n in self.sizes:
                if n <= end:
                    self._index[n][tuple(tokens[end - n:end])] = end
        self._seen = len(tokens) - 1

    def propose(self, tokens, gamma, rng=None) -> Draft:
        at = None
        for n in self.sizes:
            if n < len(tokens) and at is None:
                at = self._index[n].get(tuple(tokens[-n:]))
        return copied(tokens, at, gamma, self.boundary, self.name)


class LastTokens:
    """Drafts the last tokens of the text again, up to gamma of them, right or not.

    It stands in for a lookup on texts that mean nothing, as models with random weights write them: there is a draft in
    every round, so its times can be read.
    """

    name = "last tokens"

    def start(self, target, sampler, prompt):
        """Nothing to prepare."""

    def verified(self, tokens, path, hidden):
        """Nothing to learn."""

    def propose(self, tokens, gamma, rng=None) -> Draft:
        return copied(tokens, max(len(tokens) - gamma, 0), min(gamma, len(tokens)), (), self.name)


class SuffixLookup:
    """Copies what followed an earlier occurrence of the longest suffix, however long (SAM decoding, arXiv 2411.10666).

    A suffix automaton of the verified text (Blumer et al., 1985) grows with it, in constant time per token on average.
    Each state stands for the substrings that end at the same places; the link of the state of the whole text is that of
    its longest suffix that occurred before. Where that has min_match tokens, what followed is copied, on into the draft
    itself as in `PromptLookup`, never past a token of `boundary`. Of several occurrences it takes the latest at which
    nothing longer matched either, as here; where there is none yet, the first. Noting that costs one assignment a token
    (the latest of all would cost a walk), and on the real target's text neither the first nor the latest accepted more.

    matched: tokens of the match at the end of the sequence, 0 for none; known after the prompt, after each round (so
    that a policy can read it), and after each proposal for the text that it was asked behind.
    """

    def __init__(self, min_match: int = 1, boundary: Collection[int] = (), name: str = "suffix automaton"):
        min_match = whole("min_match", min_match, 1)
        self.min_match, self.boundary, self.name = min_match, frozenset(boundary), name
        self._clear()

    def _clear(self):
        # Per state: where each token leads, the link, the length of its longest string, and the place where that ended.
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._end = [-1], [0], [0]
        self._whole, self.matched = 0, 0

    def start(self, target, sampler, prompt):
        self._clear()
        self.verified(prompt, [], None)

    def verified(self, tokens, path, hidden):
        """Add to the automaton what the text grew by."""
        for token in tokens[self._length[self._whole]:]:
            self._grow(token)
        self.matched = self._length[max(self._link[self._whole], 0)]

    def propose(self, tokens, gamma, rng=None) -> Draft:
        state = max(self._link[self._whole], 0)
        matched = self._length[state]
        for token in tokens[self._length[self._whole]:]:         # in a cascade: tokens that are not verified yet
            state, matched = self._walk(state, matched, token)
        self.matched = matched
        at = self._end[state] if matched >= self.min_match else None
        return copied(tokens, at, gamma, self.boundary, self.name)

    def _walk(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """(state, length) of the longest match after one more token, which is not added."""
        while state and token not in self._next[state]:
            state = self._link[state]
            matched = self._length[state]
        if token not in self._next[state]:
            return 0, 0
        return self._next[state][token], matched + 1

    def _grow(self, token):
        self._end[self._link[self._whole]] = self._length[self._whole]         # the match before this token
        length = self._length[self._whole] + 1
        at, self._whole = self._whole, self._state({}, 0, length, length)
        while at >= 0 and token not in self._next[at]:         # suffixes that this token never followed
            self._next[at][token] = self._whole
            at = self._link[at]
        if at >= 0:
            found, length = self._next[at][token], self._length[at] + 1
            if self._length[found] > length:                   # its longer strings do not end here: they part
                longer, found = found, self._state(dict(self._next[found]), self._link[found], length, self._end[found])
                self._link[longer] = found
                while at >= 0 and self._next[at].get(token) == longer:
                    self._next[at][token] = found
                    at = self._link[at]
            self._link[self._whole] = found

    def _state(self, nexts, link, length, end) -> int:
        self._next.append(nexts)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1
