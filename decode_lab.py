"""The decoding loops and the acceptance rules: plain, speculative over a chain, speculative over a tree.

Everything here is written against two small protocols, `Decoder` (a model that holds one growing sequence) and
`Drafter` (whatever proposes tokens), so the numpy toy and a real model run the same experiments.

One round: the drafter proposes a chain or a tree; the target sends the last committed token and the draft through
one forward; `verify` walks the draft from its root, accepting or rejecting; the cache is cut back to what was kept.
A chain is a tree whose nodes have one child, so there is one walk and one rule.

Sources: Leviathan et al., arXiv 2211.17192 (the rule, Algorithm 1); Chen et al., arXiv 2302.01318; SpecInfer, arXiv
2305.09781 (trees, multi-step sampling, Algorithm 2); Sequoia, arXiv 2402.12374 (candidates without replacement, the
best tree by dynamic programming).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from console import BadInput

Array = Any                      # a numpy array, or a tensor on whatever device the model lives on


class Decoder(Protocol):
    """A model that holds one growing sequence.

    Optional attributes: `max_length` (most tokens a sequence may have), `tokenizer` (a fingerprint of the
    vocabulary), `prefill(tokens)` (as `extend`, when nobody reads the logits).
    """

    vocab_size: int
    length: int                                      # tokens committed to the cache
    hidden: Array                                    # (n, d) final hidden states of the last forward

    def extend(self, tokens) -> Array: ...           # (n,) ids -> (n, V) logits; row i predicts what follows tokens[i]
    def rollback(self, length: int) -> None: ...     # forget all past `length`, and a tree not kept; commit the rest
    def extend_tree(self, tokens, parents) -> Array: ...   # parents[i] < i; -1 for the last token of the sequence
    def keep(self, nodes) -> None: ...               # of the tree just sent, commit this root-to-leaf path


def checked_ids(model: Decoder, tokens) -> np.ndarray:
    """Token ids (n,) as int64, n >= 1, all in the model's vocabulary; BadInput otherwise. For implementations of Decoder."""
    ids = np.asarray(tokens, dtype=np.int64)
    if ids.ndim != 1 or ids.size == 0:
        raise BadInput(f"{model.name}: expected a non-empty list of token ids, got shape {ids.shape}.")
    if ids.min() < 0 or ids.max() >= model.vocab_size:
        bad = ids[(ids < 0) | (ids >= model.vocab_size)][0]
        raise BadInput(f"{model.name}: token id {bad} is outside the vocabulary, 0 to {model.vocab_size - 1}.")
    return ids


def tree_layout(model: Decoder, pending: list[int], parents, n: int) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Where n further tree nodes stand -> (parents of all nodes, depth (n,), visible (n, all nodes)).

    pending: the parents of the nodes sent before and not yet kept. A node sees itself and its ancestors, and its position
    is the sequence's length plus its depth, 0 for a root (SpecInfer, arXiv 2305.09781, 4.2). BadInput for other parents.
    """
    first = len(pending)
    if len(parents) != n or any(not -1 <= p < first + i for i, p in enumerate(parents)):
        raise BadInput(f"{model.name}: each of the {n} tree nodes needs one parent, -1 or an earlier node; got "
                       f"{list(parents)}.")
    every = pending + [int(p) for p in parents]
    depth, visible = np.zeros(len(every), np.int64), np.eye(len(every), dtype=bool)
    for i, parent in enumerate(every):
        if parent >= 0:
            depth[i] = depth[parent] + 1
            visible[i] |= visible[parent]
    return every, depth[first:], visible[first:]


def checked_path(model: Decoder, pending: list[int], nodes) -> list[int]:
    """Nodes of the pending tree as a list, root first, each the child of the one before; BadInput otherwise."""
    nodes = [int(i) for i in nodes]
    if any(not 0 <= i < len(pending) for i in nodes) or [pending[i] for i in nodes] != ([-1] + nodes)[:len(nodes)]:
        raise BadInput(f"{model.name}: {nodes} is not a path from the root of the tree just sent.")
    return nodes


@dataclass
class Draft:
    """What a drafter proposes: a chain (parents is None), or a tree.

    q[i] is the distribution (V,) that tokens[i] was drawn from, given its parent and the siblings before it; None
    where it was chosen without chance (the most likely token, a lookup): a point mass. sources[i] says where the
    token came from. parents[i] < i, -1 for the last committed token.
    """

    tokens: list[int] = field(default_factory=list)
    q: list[Array | None] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    parents: list[int] | None = None

    def path(self, node: int) -> list[int]:
        """Tokens from the root to this node of a tree, both ends included; [] for -1."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def children(self) -> dict[int, list[int]]:
        """{node: its children in the order proposed}; node -1 is the last committed token."""
        parents = range(-1, len(self.tokens) - 1) if self.parents is None else self.parents
        table: dict[int, list[int]] = {}
        for i, parent in enumerate(parents):
            table.setdefault(parent, []).append(i)
        return table


class Drafter(Protocol):
    """Proposes tokens. `tokens` is always the whole sequence so far, prompt included."""

    name: str

    def reset(self, target: Decoder, sampler: Sampler) -> None: ...      # before a run; refuses a target that cannot fit
    def propose(self, tokens: Sequence[int], gamma: int, rng) -> Draft: ...   # at most gamma tokens deep
    def kept(self, tokens: Sequence[int]) -> None: ...                   # after a round: the sequence as it is now
    # In a cascade it may be shorter than what was proposed on or told before: its beginning, but for the last token.


# -- sampling ----------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Sampler:
    """How a token is chosen from logits; temperature 0 is greedy.

    Applied in this order: repetition_penalty (arXiv 1909.05858, 4.1, over all tokens of the history), temperature,
    top_k (0: off), top_p (1: off), min_p (0: off). The same order as transformers'.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        for name, ok, right in (("temperature", self.temperature == 0 or 1e-6 <= self.temperature < np.inf,
                                 "0 (greedy), or 0.000001 or more"),
                                ("top_k", self.top_k >= 0, "0 (off) or more"),
                                ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
                                ("min_p", 0 <= self.min_p < 1, "0 (off) to below 1"),
                                ("repetition_penalty", self.repetition_penalty > 0, "above 0, and 1 is off")):
            if not ok:
                raise BadInput(f"{name} = {getattr(self, name)} is impossible: it is {right}.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probs(self, logits, history: Sequence[int] = ()) -> np.ndarray:
        """Logits (V,) -> the distribution (V,) that a token is drawn from, float64; a point mass when greedy."""
        z = self.penalised(logits, history)
        top = z.max()
        if not np.isfinite(top):
            raise BadInput(f"A logits row has no finite maximum ({top}): the model's output is not usable.")
        if self.greedy:
            p = np.zeros(len(z))
            p[z.argmax()] = 1.0
            return p
        z = (z - top) / self.temperature
        if 0 < self.top_k < len(z):
            z[z < np.partition(z, -self.top_k)[-self.top_k]] = -np.inf
        p = np.exp(z)
        p /= p.sum()
        if self.top_p < 1:
            order = np.argsort(-p, kind="stable")
            before = np.cumsum(p[order]) - p[order]          # mass ahead of each token: the first is always kept
            p[order[before >= self.top_p]] = 0.0
        if self.min_p > 0:
            p[p < self.min_p * p.max()] = 0.0
        return p / p.sum()

    def argmax(self, logits, history: Sequence[int] = ()) -> int:
        """The greedy choice after the penalty."""
        return int(self.penalised(logits, history).argmax())

    def penalised(self, logits, history: Sequence[int] = ()) -> np.ndarray:
        """Logits (V,), float64, after the repetition penalty alone."""
        z = to_numpy(logits)
        if self.repetition_penalty != 1 and len(history):
            seen = np.unique(np.asarray(history))
            z[seen] = np.where(z[seen] > 0, z[seen] / self.repetition_penalty, z[seen] * self.repetition_penalty)
        return z


def to_numpy(row) -> np.ndarray:
    """A row of logits, numpy or tensor, as float64 on the host (a copy)."""
    if hasattr(row, "detach"):
        row = row.detach().float().cpu().numpy()
    return np.array(row, dtype=np.float64)


def greedy_ids(rows) -> list[int]:
    """argmax of each row (n, V); from a device, only the ids come to the host. BadInput where a row holds a NaN."""
    # The argmax of NaN is an id like any other, and plain and speculative text would agree on it.
    if hasattr(rows, "detach"):
        top, best = rows.max(-1)
        ids = best.masked_fill(top.isnan(), -1).tolist()
    else:
        ids = np.where(np.isnan(rows.max(-1)), -1, rows.argmax(-1)).tolist()
    if -1 in ids:
        raise BadInput("A logits row holds NaN: the model's output is not usable.")
    return ids


def likeliest(scores: np.ndarray, n: int) -> list[int]:
    """The n ids of the largest scores (V,), largest first, ties by lower id; without sorting all V."""
    if n >= len(scores):
        best = np.arange(len(scores))
    else:
        best = np.flatnonzero(scores >= np.partition(scores, -n)[-n]) if n else np.empty(0, int)
    return best[np.argsort(-scores[best], kind="stable")][:n].tolist()


def draw(p: np.ndarray, rng) -> int:
    """One id from the distribution p (V,), by inversion of its cumulative sum."""
    edges = np.cumsum(p)
    return int(np.searchsorted(edges, rng.random() * edges[-1], side="right"))


# -- the rule ----------------------------------------------------------------------------------------------

def overlap(p, q) -> float:
    """Sum of min(p, q) = 1 - TV(p, q): the probability that a token drawn from q is accepted (2211.17192, Cor. 3.6)."""
    return float(np.minimum(p, q).sum())


def acceptance_probability(p, x: int, q=None) -> float:
    """min(1, p(x) / q(x)); q None is a point mass on x, so p(x)."""
    return float(p[x] if q is None else min(1.0, p[x] / q[x]))


def residual(p, x: int, q=None) -> np.ndarray:
    """What the next token is drawn from after x was refused: max(p - q, 0), normalised; p itself is not changed.

    All zeros when p = q, where a refusal has probability 0.
    """
    if q is None:
        rest = p.copy()
        rest[x] = 0.0
    else:
        rest = np.maximum(p - q, 0.0)
    total = rest.sum()
    return rest / total if total > 0 else rest


def accept(p, candidates: Sequence[int], q: Sequence, rng) -> tuple[int | None, int]:
    """Test candidates in turn -> (index of the accepted one, its token), or (None, a token of the last residual).

    Each candidate is accepted with `acceptance_probability`, else p becomes the `residual`. The returned token has
    distribution p whatever the candidates, as long as candidates[i] was drawn from q[i] (or q[i] is None) given the
    ones before it: one candidate is Algorithm 1 of 2211.17192, several are SpecInfer's multi-step rule.
    """
    for i, (x, q_x) in enumerate(zip(candidates, q)):
        if rng.random() < acceptance_probability(p, x, q_x):
            return i, x
        rest = residual(p, x, q_x)
        if not rest.any():               # p = q up to rounding: the refusal was a rounding error
            return i, x
        p = rest
    return None, draw(p, rng)


def verify(draft: Draft, rows, sampler: Sampler, history: Sequence[int], rng) -> tuple[list[int], int, int]:
    """Walk the draft from its root -> (accepted nodes in order, the target's own next token, levels tested).

    rows: (1 + nodes, V) target logits; row 0 follows the last committed token, row 1 + i follows node i. Greedy needs
    only the argmax of each row; sampling reads only the rows on the path. A penalty sees the path so far.
    """
    children, history = draft.children(), list(history)
    ids = greedy_ids(rows) if sampler.greedy and sampler.repetition_penalty == 1 else None
    node, path = -1, []
    while True:
        nodes = children.get(node, [])
        tokens = [draft.tokens[i] for i in nodes]
        if sampler.greedy:
            token = ids[node + 1] if ids is not None else sampler.argmax(rows[node + 1], history)
            hit = tokens.index(token) if token in tokens else None
        else:
            p = sampler.probs(rows[node + 1], history)
            hit, token = accept(p, tokens, [draft.q[i] for i in nodes], rng)
        if hit is None:
            return path, token, len(path) + bool(nodes)
        node = nodes[hit]
        path.append(node)
        history.append(token)


# -- what a run reports ------------------------------------------------------------------------------------

@dataclass
class Round:
    """One draft, one target forward. Emits accepted + 1 tokens, the last of them the target's own."""

    drafted: int                 # tokens proposed (tree nodes, for a tree)
    tested: int                  # positions (levels) that the rule looked at: a draft past the first refusal is not
    accepted: int
    draft_s: float
    verify_s: float
    sources: tuple[str, ...] = ()            # of the tokens tested (chain), or of the accepted ones (tree)
    prefill_s: float = 0.0
    first: bool = False                      # the run's first round: its time is TTFT, not TPOT

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.draft_s + self.verify_s


@dataclass
class Run:
    """The rounds of a generation, or of several (`Run.pool`); every statistic is read off them."""

    rounds: list[Round] = field(default_factory=list)
    stop: str = ""                           # "eos", "budget" (n_new reached) or "context" (max_length reached)

    @classmethod
    def pool(cls, runs: Sequence[Run]) -> Run:
        """The rounds of several runs together: statistics over tokens, not means of means."""
        return cls([r for run in runs for r in run.rounds], runs[0].stop if len(runs) == 1 else "")

    def later(self) -> Run:
        """The rounds after the first of each run, as TPOT counts them; all where there are no others."""
        return Run([r for r in self.rounds if not r.first] or self.rounds, self.stop)

    @property
    def n_tokens(self) -> int:
        """New tokens: rounds + accepted, always."""
        return len(self.rounds) + self.accepted

    @property
    def accepted(self) -> int:
        return sum(r.accepted for r in self.rounds)

    @property
    def drafted(self) -> int:
        return sum(r.drafted for r in self.rounds)

    @property
    def tau(self) -> float:
        """Tokens per round, the bonus token (the target's own) included; nan without rounds."""
        return self.n_tokens / len(self.rounds) if self.rounds else float("nan")

    @property
    def alpha(self) -> float:
        """Accepted over tested positions; nan when nothing was drafted."""
        tested = sum(r.tested for r in self.rounds)
        return self.accepted / tested if tested else float("nan")

    @property
    def acceptance(self) -> list[float]:
        """By draft position: of the rounds in which position i was tested, the share that accepted it."""
        deepest = max((r.tested for r in self.rounds), default=0)
        return [sum(r.accepted >= i for r in self.rounds) / sum(r.tested >= i for r in self.rounds)
                for i in range(1, deepest + 1)]

    @property
    def histogram(self) -> list[int]:
        """Number of rounds that accepted 0, 1, 2, … tokens."""
        counts = Counter(r.accepted for r in self.rounds)
        return [counts[i] for i in range(max(counts, default=0) + 1)]

    @property
    def by_source(self) -> dict[str, tuple[int, int]]:
        """{source: (tested, accepted)} over the tokens of chains."""
        table: dict[str, list[int]] = {}
        for r in self.rounds:
            for i, source in enumerate(r.sources):
                row = table.setdefault(source, [0, 0])
                row[0] += 1
                row[1] += i < r.accepted
        return {source: (t, a) for source, (t, a) in table.items()}

    @property
    def ttft(self) -> float:
        """Seconds to the first tokens: prefill and first round (median over the runs pooled)."""
        return median([r.seconds for r in self.rounds if r.first] or [float("nan")])

    @property
    def tpot(self) -> float:
        """Seconds per token after the first round; nan when there was only one."""
        later = [r for r in self.rounds if not r.first]
        return sum(r.seconds for r in later) / sum(r.accepted + 1 for r in later) if later else float("nan")

    @property
    def per_token(self) -> float:
        """TPOT; where there is only one round, its seconds over its tokens."""
        return self.tpot if any(not r.first for r in self.rounds) else self.seconds / self.n_tokens

    @property
    def seconds(self) -> float:
        return sum(r.seconds for r in self.rounds)

    @property
    def draft_token_s(self) -> float:
        """Seconds per drafted token after the first round; of a chain, c times a target step. nan without drafts."""
        later = [r for r in self.rounds if not r.first and r.drafted]
        return sum(r.draft_s for r in later) / sum(r.drafted for r in later) if later else float("nan")


# -- the loops ---------------------------------------------------------------------------------------------

def autoregressive_generate(target: Decoder, prompt, n_new: int, temperature: float = 0.0, rng=None, *,
                            sampler: Sampler | None = None, eos: Collection[int] = ()) -> tuple[np.ndarray, Run]:
    """Plain decoding: one token per forward. Arguments and result as `speculative_generate`."""
    return _generate(target, None, prompt, n_new, 0, temperature, rng, sampler, eos)


def speculative_generate(target: Decoder, drafter: Drafter, prompt, n_new: int,
                         gamma: int | Callable[[Run], int], temperature: float = 0.0, rng=None, *,
                         sampler: Sampler | None = None, eos: Collection[int] = ()) -> tuple[np.ndarray, Run]:
    """Draft up to gamma tokens, verify them in one forward, keep what the rule accepts: lossless.

    target: its cache is emptied first; prompt[:-1] is prefilled and the prompt's last token is the first round's
    first input. prompt: ids, at least one. n_new: tokens wanted, at least one. gamma: the draft length, or a function
    of the run so far. temperature, rng: short for sampler=Sampler(temperature); rng seeds default to 0, so the same
    call gives the same tokens. eos: ids that end the text, the id itself included.
    Returns (ids of prompt and output, int64; the Run). BadInput before the first forward where something cannot work.
    """
    return _generate(target, drafter, prompt, n_new, gamma, temperature, rng, sampler, eos)


def tree_generate(target: Decoder, drafter: Drafter, prompt, n_new: int, temperature: float = 0.0, rng=None, *,
                  sampler: Sampler | None = None, eos: Collection[int] = ()) -> tuple[np.ndarray, Run]:
    """`speculative_generate` with a drafter of trees, whose own shape bounds the depth."""
    return _generate(target, drafter, prompt, n_new, None, temperature, rng, sampler, eos)


def _generate(target, drafter, prompt, n_new, gamma, temperature, rng, sampler, eos):
    if sampler is not None and temperature != 0:
        raise BadInput(f"temperature = {temperature} stands beside a sampler with its own: one of the two would be right.")
    sampler = Sampler(temperature) if sampler is None else sampler
    rng = np.random.default_rng(0) if rng is None else rng
    tokens, synchronize = _ids(prompt), getattr(target, "synchronize", lambda: None)
    budget, stop_at = _budget(target, tokens, n_new)
    if gamma is not None and not callable(gamma):
        _draft_length(gamma)
    if drafter is not None:
        drafter.reset(target, sampler)
    eos = frozenset(map(int, eos if isinstance(eos, Collection) else [] if eos is None else np.atleast_1d(eos)))
    run, end = Run(), len(tokens) + budget

    started = perf_counter()
    target.rollback(0)
    if len(tokens) > 1:
        getattr(target, "prefill", target.extend)(tokens[:-1])
        synchronize()                            # a device may still be at it
    prefill_s = perf_counter() - started

    while not run.stop:
        started = perf_counter()
        depth = end - len(tokens) - 1            # of a full acceptance and the target's own token, none is too many
        if gamma is not None:
            depth = min(depth, _draft_length(gamma(run)) if callable(gamma) else gamma)
        draft = drafter.propose(tokens, depth, rng) if drafter is not None and depth > 0 else Draft()
        _check_draft(draft, depth, target.vocab_size, drafter)
        drafted = perf_counter()

        sent = [tokens[-1], *draft.tokens]
        if draft.parents is None:
            rows = target.extend(sent)
        else:
            rows = target.extend_tree(sent, [-1] + [parent + 1 for parent in draft.parents])
        path, token, tested = verify(draft, rows, sampler, tokens, rng)
        new = [int(draft.tokens[i]) for i in path] + [int(token)]
        ended = next((i for i, t in enumerate(new) if t in eos), None)
        if ended is not None:                    # plain decoding would have stopped here: what follows never was
            if ended < len(path):                # an accepted EOS counts as the target's own token, not as a draft
                tested = ended
            new, path = new[:ended + 1], path[:ended]
        if draft.parents is not None:
            target.keep([0] + [i + 1 for i in path])
        else:                                    # also where nothing is dropped: it is the commit
            target.rollback(len(tokens) + len(new) - 1)
        synchronize()
        verified = perf_counter()

        tokens += new
        run.stop = "eos" if ended is not None else stop_at if len(tokens) >= end else ""
        if drafter is not None:
            drafter.kept(tokens)
        sources = draft.sources[:tested] if draft.parents is None else [draft.sources[i] for i in path]
        run.rounds.append(Round(len(draft.tokens), tested, len(new) - 1, verify_s=verified - drafted,
                                draft_s=drafted - started + perf_counter() - verified,
                                sources=tuple(sources), prefill_s=prefill_s, first=not run.rounds))
        prefill_s = 0.0
    return np.array(tokens, dtype=np.int64), run


def _ids(prompt) -> list[int]:
    """One sequence of token ids as a list of ints."""
    ids = np.asarray(prompt)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise BadInput(f"The prompt is an array of {ids.dtype} of shape {ids.shape}: one sequence of whole numbers, "
                       "shape (n,), would be right.")
    return ids.tolist()


def _draft_length(gamma):
    if gamma < 0:
        raise BadInput(f"gamma = {gamma} is impossible: 0 (no draft) or more would be right.")
    return gamma


def _budget(target, tokens, n_new):
    """How many tokens may be generated, and which limit it is that ends them."""
    limit = getattr(target, "max_length", None)
    if not tokens:
        raise BadInput("The prompt has no tokens: at least one would be right.")
    bad = [t for t in tokens if not 0 <= t < target.vocab_size]
    if bad:
        raise BadInput(f"Prompt token {bad[0]} is outside the target's vocabulary, 0 to {target.vocab_size - 1}.")
    if n_new < 1:
        raise BadInput(f"n_new = {n_new} is impossible: at least one new token would be right.")
    if limit is not None and len(tokens) >= limit:
        raise BadInput(f"The prompt has {len(tokens)} tokens and the model holds {limit}: no room for a new one.")
    if limit is not None and len(tokens) + n_new > limit:
        return limit - len(tokens), "context"
    return n_new, "budget"


def _check_draft(draft, depth, vocab_size, drafter):
    name, n = getattr(drafter, "name", "the drafter"), len(draft.tokens)
    for t in draft.tokens:
        if not 0 <= t < vocab_size:
            raise BadInput(f"{name} proposed token {t}, outside the target's vocabulary, 0 to {vocab_size - 1}.")
    if len(draft.q) != n or len(draft.sources) != n or (draft.parents is not None and len(draft.parents) != n):
        raise BadInput(f"{name} proposed {n} tokens with {len(draft.q)} distributions and {len(draft.sources)} sources: "
                       "one of each per token would be right.")
    for t, q in zip(draft.tokens, draft.q):
        if q is not None and (len(q) != vocab_size or not q[t] > 0):
            raise BadInput(f"{name} proposed token {t} with a distribution over {len(q)} ids that cannot have drawn it: "
                           f"one over the target's {vocab_size}, positive at the token, would be right.")
    deepest = n
    if draft.parents is not None:
        levels: list[int] = []
        for i, parent in enumerate(draft.parents):
            if not -1 <= parent < i:
                raise BadInput(f"{name} gave node {i} the parent {parent}: an earlier node or -1 would be right.")
            levels.append(levels[parent] + 1 if parent >= 0 else 1)
        deepest = max(levels, default=0)
    if deepest > depth:
        raise BadInput(f"{name} proposed a draft {deepest} deep where at most {depth} were asked for.")


# -- drafters ----------------------------------------------------------------------------------------------

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

    Suffixes of max_ngram down to min_ngram tokens are looked up in an index that grows with the sequence, so a
    proposal costs the same on a long prompt. Where fewer than gamma tokens follow the match, the copy goes on into
    the draft itself, as in LZ77. It never copies past a token of `boundary` (a document's end).
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1, boundary: Collection[int] = (), name: str = "lookup"):
        if not 1 <= min_ngram <= max_ngram:
            raise BadInput(f"Suffix lengths {min_ngram} to {max_ngram} are impossible: 1 <= min_ngram <= max_ngram.")
        self.name, self.sizes, self.boundary = name, range(max_ngram, min_ngram - 1, -1), frozenset(boundary)
        self._index: dict[int, dict[tuple, list[int]]] = {}      # suffix -> where it ended, the latest last
        self._seen = 0

    def reset(self, target, sampler):
        self._index, self._seen = {n: {} for n in self.sizes}, 0

    def propose(self, tokens, gamma, rng=None) -> Draft:
        for end in range(self._seen + 1, len(tokens)):       # the suffix itself is left out: it would match itself
            for n in self.sizes:
                if n <= end:
                    self._index[n].setdefault(tuple(tokens[end - n:end]), []).append(end)
        self._seen = len(tokens) - 1
        at = next((end for n in self.sizes if n < len(tokens) and (end := self._latest(tokens, n))), None)
        return copied(tokens, at, gamma, self.boundary, self.name)

    def _latest(self, tokens, n) -> int | None:
        """Where the last n tokens ended before; places that no longer hold them are forgotten."""
        key = tuple(tokens[-n:])
        ends = self._index[n].get(key, [])
        while ends and (ends[-1] >= len(tokens) or tuple(tokens[ends[-1] - n:ends[-1]]) != key):
            ends.pop()
        return ends[-1] if ends else None

    def kept(self, tokens):
        """The next proposal reads what the sequence grew by; in a cascade, from the first token that was refused on."""
        self._seen = min(self._seen, len(tokens) - 1)


class SuffixLookup:
    """Copies what followed an earlier occurrence of the longest suffix, however long (SAM decoding, arXiv 2411.10666).

    A suffix automaton of the sequence (Blumer et al., 1985) grows with it, in constant time per token on average. Each
    state stands for the substrings that end at the same places; the link of the state of the whole sequence is that of
    its longest suffix that occurred before. Where that has min_match tokens, what followed is copied, on into the draft
    itself as in `PromptLookup`, never past a token of `boundary`. Of several occurrences it takes the latest at which
    nothing longer matched either, as here; where there is none yet, the first. Noting that costs one assignment a token
    (the latest of all would cost a walk), and on the real target's text neither the first nor the latest accepted more.

    matched: tokens of the match at the end of the sequence, 0 for none; known after each round, for a policy to read.
    """

    def __init__(self, min_match: int = 1, boundary: Collection[int] = (), name: str = "suffix automaton"):
        if min_match < 1:
            raise BadInput(f"min_match = {min_match} is impossible: a match has one token or more.")
        self.min_match, self.boundary, self.name = min_match, frozenset(boundary), name
        self.reset(None, None)

    def reset(self, target, sampler):
        # Per state: where each token leads, the link, the length of its longest string, and the place where that ended.
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._end = [-1], [0], [0]
        self._whole, self.matched = 0, 0

    def propose(self, tokens, gamma, rng=None) -> Draft:
        self.kept(tokens)
        at = self._end[self._link[self._whole]] if self.matched >= self.min_match else None
        return copied(tokens, at, gamma, self.boundary, self.name)

    def kept(self, tokens):
        """Add to the automaton what the sequence grew by."""
        n = self._length[self._whole]
        if n > len(tokens) or n == len(tokens) and tokens[-1] != self._last:     # in a cascade: some was refused
            self.reset(None, None)
        for token in tokens[self._length[self._whole]:]:
            self._grow(token)
        self.matched = self._length[max(self._link[self._whole], 0)]

    def _grow(self, token):
        self._end[self._link[self._whole]] = self._length[self._whole]         # the match before this token
        self._last = token
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
        for column, value in zip((self._next, self._link, self._length, self._end), (nexts, link, length, end)):
            column.append(value)
        return len(self._next) - 1


class ModelDrafter:
    """A smaller model drafts a chain, one forward per token.

    sampler: how it draws; None draws as the target does, which accepts most. Its cache follows the sequence: after
    each round it is cut to what was kept, and the next proposal sends what it has not seen yet (the target's own
    token, and the last draft token when all were accepted) in its first forward.
    """

    def __init__(self, model: Decoder, sampler: Sampler | None = None, name: str | None = None):
        self.model, self._own = model, sampler
        self.name = name or getattr(model, "name", "model")

    def reset(self, target, sampler):
        check_vocabulary(target, self.model)
        self._vocab_size, self._sampler = target.vocab_size, self._own or sampler
        self.model.rollback(0)
        self._proposed: tuple[int, list[int]] = 0, []         # where the last draft began, and its tokens

    def propose(self, tokens, gamma, rng) -> Draft:
        draft, history, unseen = Draft(), list(tokens), tokens[self.model.length:]
        for _ in range(room(self.model, tokens, gamma)):
            row = last_row(self.model, unseen)
            token, q = self._choose(row, history, rng)
            draft.tokens.append(token)
            draft.q.append(q)
            draft.sources.append(self.name)
            if not self._goes_on(token, q, row, history):
                break
            history.append(token)
            unseen = [token]
        self._proposed = len(tokens), draft.tokens
        return draft

    def kept(self, tokens):
        """Cut the cache to the tokens that it shares with the sequence, all but the last at most."""
        same, drafted = self._proposed
        for a, b in zip(drafted, tokens[same:]):
            if a != b:
                break
            same += 1
        go_back(self.model, min(same, self.model.length, len(tokens) - 1))

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


class TreeDrafter:
    """A smaller model drafts a tree of a fixed shape, one forward per level.

    sample=False: a node's children are the model's most likely next tokens, deterministic candidates. sample=True:
    they are drawn one after another without replacement by `sampler` (None: the target's), each with the
    distribution it was drawn from, which `accept` needs to stay lossless.
    """

    def __init__(self, model: Decoder, shape: TreeShape, sampler: Sampler | None = None, sample: bool = False,
                 name: str | None = None):
        self.model, self.shape, self._own, self.sample = model, shape, sampler, sample
        self.name = name or getattr(model, "name", "model")

    def reset(self, target, sampler):
        check_vocabulary(target, self.model)
        self._vocab_size, self._sampler = target.vocab_size, self._own or sampler
        self.model.rollback(0)

    def propose(self, tokens, gamma, rng) -> Draft:
        draft = Draft(parents=[])
        gamma = room(self.model, tokens, gamma)
        if gamma < 1:
            return draft
        # The tokens that the last round kept and the target's own are sent together, so the tree of that round need
        # not be kept here: a draft's cache holds the sequence and nothing else between rounds.
        rows, sent = {-1: last_row(self.model, tokens[self.model.length:])}, {-1: -1}
        for level in range(gamma):
            expand = self._level(draft, rows, tokens, rng)
            if not expand or level + 1 == gamma:
                break
            first = len(sent) - 1
            logits = self.model.extend_tree([draft.tokens[i] for i in expand],
                                            [sent[draft.parents[i]] for i in expand])
            sent.update({i: first + j for j, i in enumerate(expand)})
            rows = dict(zip(expand, logits))
        self.model.rollback(self.model.length)
        return self._chosen(draft)

    def kept(self, tokens):
        """Nothing to do: the tree was dropped when it was proposed, and the next proposal sends what was kept."""

    def _level(self, draft, rows, tokens, rng) -> list[int]:
        """Add the children of the nodes in `rows` to the draft -> those to be expanded in turn."""
        if -1 in rows:
            self._at = {-1: -1}                                # draft node -> node of the shape
        expand = []
        for node, row in rows.items():
            children = self.shape.children[self._at[node]]
            for child, (token, q) in zip(children, self._candidates(draft, node, row, tokens, len(children), rng)):
                self._at[len(draft.tokens)] = child
                if self.shape.children[child]:
                    expand.append(len(draft.tokens))
                self._add(draft, node, token, q)
        return expand

    def _candidates(self, draft, node, row, tokens, n, rng):
        row = fit_row(row, self._vocab_size)
        history = [] if self._sampler.repetition_penalty == 1 else list(tokens) + draft.path(node)
        if not self.sample:
            yield from ((token, None) for token in likeliest(self._sampler.penalised(row, history), n))
            return
        q = self._sampler.probs(row, history)
        for _ in range(n):
            token = draw(q, rng)
            yield token, q
            q = residual(q, token)                             # without replacement: the rest, renormalised
            if not q.any():
                return

    def _add(self, draft, parent, token, q):
        draft.tokens.append(token)
        draft.q.append(q)
        draft.sources.append(self.name)
        draft.parents.append(parent)

    def _chosen(self, draft):
        return draft


class ConfidentTreeDrafter(TreeDrafter):
    """A tree shaped by the draft's confidence: the n_nodes likeliest paths (EAGLE-2, arXiv 2406.16858, 4.1 and 4.2).

    Each level expands the `width` nodes with the largest product of draft probabilities from the root, each into its
    `width` likeliest children; of all nodes seen, the n_nodes best are sent. Deterministic candidates.
    """

    def __init__(self, model: Decoder, n_nodes: int, depth: int, width: int = 4, name: str | None = None):
        super().__init__(model, TreeShape([]), name=name)
        if min(n_nodes, depth, width) < 1:
            raise BadInput(f"A tree of {n_nodes} nodes, depth {depth} and width {width} is impossible: 1 or more of each.")
        self.n_nodes, self.depth, self.width = n_nodes, depth, width

    def propose(self, tokens, gamma, rng) -> Draft:
        return super().propose(tokens, min(gamma, self.depth), rng)

    def _level(self, draft, rows, tokens, rng):
        if -1 in rows:
            self._scores = {-1: 0.0}
        new = []
        for node, row in rows.items():
            logits = to_numpy(fit_row(row, self._vocab_size))
            log_z = logits.max() + np.log(np.exp(logits - logits.max()).sum())
            for token, _ in self._candidates(draft, node, row, tokens, self.width, rng):
                new.append(len(draft.tokens))
                self._scores[new[-1]] = self._scores[node] + logits[token] - log_z
                self._add(draft, node, token, None)
        return sorted(sorted(new, key=lambda i: (-self._scores[i], i))[:self.width])

    def _chosen(self, draft):
        # A child never scores above its parent and comes after it, so the best nodes form a tree.
        best = sorted(sorted(range(len(draft.tokens)), key=lambda i: (-self._scores[i], i))[:self.n_nodes])
        place = {-1: -1, **{i: j for j, i in enumerate(best)}}
        return Draft([draft.tokens[i] for i in best], [None] * len(best), [self.name] * len(best),
                     [place[draft.parents[i]] for i in best])


def room(model: Decoder, tokens, gamma: int) -> int:
    """How deep the draft model can draft: gamma, or less where its context ends (the deepest token need not enter its
    cache), or 0 once the target has written an id that the model has no row for (see `check_vocabulary`)."""
    if max(tokens[model.length:]) >= model.vocab_size:
        return 0
    limit = getattr(model, "max_length", None)
    return gamma if limit is None else min(gamma, limit - len(tokens) + 1)


def go_back(model: Decoder, length: int) -> int:
    """Roll back to this length, or to 0 where layers hold a state that cannot go back so far -> the length it has now.

    A hybrid's state goes back to its last commit at most; what is sent next then begins with the sequence's start.
    """
    try:
        model.rollback(length)
    except BadInput:
        model.rollback(length := 0)
    return length


def catch_up(model: Decoder, tokens) -> list[int]:
    """Send a long prompt's tokens (n,), whose logits nobody reads, but for the last -> what is still to be sent."""
    if len(tokens) > 16 and hasattr(model, "prefill"):
        model.prefill(tokens[:-1])
        tokens = tokens[-1:]
    return tokens


def last_row(model: Decoder, tokens) -> Array:
    """Send tokens (n,) -> logits (V,) after the last."""
    return model.extend(catch_up(model, tokens))[-1]


def check_vocabulary(target: Decoder, draft: Decoder) -> None:
    """BadInput unless the draft's ids mean the same to the target.

    Where both name their tokenizer, the names decide, and output rows may be padded differently; else the sizes must
    agree.
    """
    names = [getattr(m, "name", what) for m, what in ((target, "the target"), (draft, "the draft"))]
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


# -- trees -------------------------------------------------------------------------------------------------

class TreeShape:
    """Which candidates a tree holds: nodes (parent, rank), rank 0 the likeliest child; the root is not a node.

    len(shape) is the number of drafted nodes; a verification sends one more, the root.
    """

    def __init__(self, nodes: Sequence[tuple[int, int]]):
        self.nodes = list(nodes)
        self.children: dict[int, list[int]] = {i: [] for i in range(-1, len(self.nodes))}
        self.depths: list[int] = []
        for i, (parent, rank) in enumerate(self.nodes):
            if not -1 <= parent < i or rank != len(self.children[parent]):
                raise BadInput(f"Tree node {i} = (parent {parent}, rank {rank}) is impossible: the parent comes first "
                               "and its children have ranks 0, 1, 2, … in order.")
            self.children[parent].append(i)
            self.depths.append(self.depths[parent] + 1 if parent >= 0 else 1)

    @classmethod
    def branching(cls, widths: Sequence[int]) -> TreeShape:
        """Every node of level d has widths[d] children: (1, 1, 1) is a chain, (4, 2) has 4 + 8 nodes."""
        if any(w < 1 for w in widths):
            raise BadInput(f"Branching {tuple(widths)} is impossible: each level has at least one child.")
        nodes, level = [], [-1]
        for width in widths:
            first = len(nodes)
            nodes += [(parent, rank) for parent in level for rank in range(width)]
            level = range(first, len(nodes))
        return cls(nodes)

    def __len__(self):
        return len(self.nodes)

    @property
    def depth(self) -> int:
        return max(self.depths, default=0)


def draft_ranks(logits, tokens) -> np.ndarray:
    """Rank of each next token in the draft's logits: (T, V) and (T,) -> (T - 1,) of tokens[1:], 0 the likeliest.

    Leading axes are kept, (n, T, V) and (n, T) -> (n, T - 1). Ties count as `argmax` breaks them, lower id first.
    """
    logits, tokens = np.asarray(logits), np.asarray(tokens)
    if logits.shape[:-1] != tokens.shape:
        raise BadInput(f"draft_ranks got logits of shape {logits.shape} and tokens of shape {tokens.shape}: (…, T, V) and "
                       "(…, T) would be right.")
    logits, tokens = logits[..., :-1, :], tokens[..., 1:, None]
    value = np.take_along_axis(logits, tokens, axis=-1)
    earlier = np.arange(logits.shape[-1]) < tokens
    return ((logits > value) | ((logits == value) & earlier)).sum(axis=-1)


def accept_lengths(ranks, shape: TreeShape) -> np.ndarray:
    """Accept length of a tree drafted greedily at each start: ranks (..., T) -> T - depth + 1 per row, flattened.

    From start t the walk takes the child of rank ranks[t], then ranks[t + 1], … as long as the tree has it. On the
    target's own greedy text these are the lengths that verification accepts there.
    """
    ranks = np.reshape(ranks, (-1, np.shape(ranks)[-1]))
    if ranks.size and ranks.min() < 0:
        raise BadInput(f"accept_lengths got the rank {ranks.min()}: 0, the likeliest, or more would be right.")
    widest = max((len(c) for c in shape.children.values()), default=0)
    step = np.full((len(shape) + 1, widest + 1), -1)           # row 0 is the root, row 1 + i node i; -1: no such child
    for parent, children in shape.children.items():
        step[parent + 1, :len(children)] = np.array(children) + 1
    starts = max(ranks.shape[-1] - shape.depth + 1, 0)
    at, lengths = np.zeros((len(ranks), starts), int), np.zeros((len(ranks), starts), int)
    for d in range(shape.depth):
        at = np.where(at >= 0, step[at, np.minimum(ranks[:, d:d + starts], widest)], -1)
        lengths += at >= 0
    return lengths.reshape(-1)


def accept_lengths_to_end(ranks, shape: TreeShape) -> np.ndarray:
    """`accept_lengths` behind every token of one text: ranks (n,) -> (n,), where starts near the end are counted too.

    There drafts are cut short, as the text's last token is the target's own: at most n - 1 - i at start i.
    """
    n = len(ranks)
    padded = np.append(ranks, np.full(shape.depth, np.iinfo(np.int64).max))      # past the end nothing is accepted
    return np.minimum(accept_lengths(padded, shape)[:n], np.arange(n)[::-1])


def tree_accept_lengths(ranks, branching: Sequence[int]) -> tuple[np.ndarray, int]:
    """`accept_lengths` of a tree by its widths per level -> (accept length per start, drafted nodes without the root)."""
    shape = TreeShape.branching(branching)
    return accept_lengths(ranks, shape), len(shape)


def rank_table(ranks, depth: int, width: int) -> np.ndarray:
    """(depth, width): at draft position i + 1, the share of starts whose next token has rank k, given that the
    positions before it had ranks below `width` (were on the tree). The rest of each row is a refusal."""
    ranks = np.reshape(ranks, (-1, np.shape(ranks)[-1]))
    starts = max(ranks.shape[-1] - depth + 1, 0)
    alive, table = np.ones((len(ranks), starts), bool), np.zeros((depth, width))
    for d in range(depth):
        now = ranks[:, d:d + starts]
        for k in range(width):
            table[d, k] = (now[alive] == k).mean() if alive.any() else 0.0
        alive &= now < width
    return table


def best_tree(probabilities, n_nodes: int) -> tuple[TreeShape, float]:
    """The tree of n_nodes drafted nodes with the most expected tokens, the target's own included.

    probabilities: (width,) or (depth, width): the chance that the k-th candidate of a level is the accepted one,
    given that its parent is. Dynamic programming as Sequoia's (arXiv 2402.12374, 4.1), with one table per level, so
    depth is bounded by the rows given (a single row is used at every depth).
    """
    table = np.asarray(probabilities, float)
    if n_nodes < 0 or table.ndim not in (1, 2) or table.size == 0 or not (table >= 0).all() \
            or (table.sum(axis=-1) > 1 + 1e-9).any():
        raise BadInput(f"best_tree needs n_nodes >= 0 and probabilities whose rows sum to at most 1; got {n_nodes} nodes.")
    same_everywhere = table.ndim == 1
    rows = table[None] if same_everywhere else table
    if same_everywhere:                                        # no deeper than there are nodes
        rows = np.repeat(rows, max(n_nodes, 1), axis=0)
    # below[d][m]: most expected accepted tokens with m nodes under a node of depth d; split[d][k][m]: the nodes that
    # the k-th child takes (itself included) when m are left for children k, k + 1, …
    n, width = n_nodes, rows.shape[1]
    below, splits = np.zeros(n + 1), []
    for p in rows[::-1]:
        own = np.concatenate([[0.0], 1.0 + below[:n]])         # value of a child that takes m nodes, once accepted
        rest, split = np.zeros(n + 1), np.zeros((width, n + 1), int)
        for k in reversed(range(width)):
            choice = np.full((n + 1, n + 1), -1.0)             # [m left, m taken]; taking none ends the siblings
            for m in range(n + 1):
                choice[m, 1:m + 1] = p[k] * own[1:m + 1] + rest[m - np.arange(1, m + 1)]
                choice[m, 0] = 0.0
            split[k] = choice.argmax(axis=1)
            rest = choice.max(axis=1)
        below = rest
        splits.append(split)
    splits = splits[::-1]
    nodes, queue = [], [(-1, 0, n)]
    for parent, depth, left in queue:                          # the queue grows while it is read: level by level
        for k in range(width if depth < len(splits) else 0):
            taken = int(splits[depth][k][left])
            if taken == 0:
                break
            queue.append((len(nodes), depth + 1, taken - 1))
            nodes.append((parent, k))
            left -= taken
    return TreeShape(nodes), 1.0 + float(below[n])
