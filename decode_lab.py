"""The decoding loops and the acceptance rule: plain, speculative over a chain, speculative over a tree.

Read it in this order: the protocols (what a model and a drafter must do), the sampler (logits to probabilities), the
rule (which drafted tokens stay), the loop (one round after the other), the report (what a run did).

Everything is written against two small protocols, `Decoder` (a model that holds one growing sequence) and `Drafter`
(whatever proposes tokens), so that all models run the same experiments. A chain is a tree whose nodes have one child.

Sources: Leviathan et al., arXiv 2211.17192 (the rule, Algorithm 1); Chen et al., arXiv 2302.01318; SpecInfer, arXiv
2305.09781 (trees, multi-step sampling, Algorithm 2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from lab.support.checks import budget, check_draft, end_ids, name_of, one_sampler, token_ids
from lab.support.errors import BadInput, require, whole

Array = Any                      # a numpy array, or a tensor on whatever device the model lives on


# -- the protocols -----------------------------------------------------------------------------------------

class Decoder(Protocol):
    """A model that holds one growing sequence. What is sent is provisional; what is committed is final.

    The tokens sent since the last commit are nodes 0, 1, 2, … in the order sent. Each has a parent: an earlier node,
    or -1, the last committed token. A node sees the committed tokens, its ancestors and itself, and its position is
    that of its parent plus one. A token's count, its position and its cache row are three things: a decoder may
    compress its cache when it commits, never before.

    Optional: `name`; `max_length` (most tokens a sequence may have); `tokenizer` (a fingerprint of the vocabulary);
    `prefill(tokens)` (send and commit a chain whose logits nobody reads); `hidden` ((n, d) final hidden states of the
    last forward, a row per token sent); `rewind_floor` (the least length, besides 0, that `rewind` accepts; without it
    `committed`, but a cache that keeps all rows can go back further); the protocols `Text` and `Timing`.
    """

    vocab_size: int
    @property
    def length(self) -> int: ...                           # tokens of the sequence: committed, and sent since
    @property
    def committed(self) -> int: ...                        # of these, final

    def send(self, tokens, parents=None) -> Array: ...     # (n,) ids -> (n, V) logits; None: a chain behind the last
    def commit(self, nodes) -> None: ...                   # this path of nodes, root first, stays; the rest goes
    def rewind(self, length: int) -> None: ...             # forget all past length; length >= committed, or 0


class Text(Protocol):
    """What a demo or a chat asks of a model's tokenizer."""

    eos: Collection[int]                                   # ids that end a text

    def encode(self, text: str) -> list[int]: ...          # without special tokens
    def decode(self, tokens) -> str: ...
    def chat(self, message: str) -> list[int]: ...         # a user's message, up to where the answer begins
    def render(self, turns) -> str | None: ...             # {"role", "content"} turns as text; None: no chat template


class Timing(Protocol):
    """What a measurement asks of a model's device."""

    device: Any
    def synchronize(self) -> None: ...                     # wait until the device has done what was asked of it
    def streamed_bytes(self) -> int: ...                   # bytes of weights that one forward reads


@dataclass
class Draft:
    """What a drafter proposes: a chain (parents is None), or a tree.

    q[i] is the distribution (V,) that tokens[i] was drawn from, given its parent and the siblings before it; None
    where it was chosen without chance (the most likely token, a lookup): a point mass. sources[i] says where the
    token came from. parents[i] < i, -1 for the last token of the sequence.
    """

    tokens: list[int] = field(default_factory=list)
    q: list[Array | None] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    parents: list[int] | None = None

    def add(self, token: int, q: Array | None, source: str, parent: int | None = None) -> None:
        """One more token; parent is given for a tree only."""
        self.tokens.append(token)
        self.q.append(q)
        self.sources.append(source)
        if self.parents is not None and parent is not None:
            self.parents.append(parent)

    def children(self) -> dict[int, list[int]]:
        """{node: its children in the order proposed}; node -1 is the last token of the sequence."""
        parents = range(-1, len(self.tokens) - 1) if self.parents is None else self.parents
        table: dict[int, list[int]] = {}
        for i, parent in enumerate(parents):
            table.setdefault(parent, []).append(i)
        return table


class Drafter(Protocol):
    """Proposes tokens. `tokens` is always the whole sequence so far, prompt included, its last token the newest.

    Optional: `name`; `uses_hidden` (True: see `verified`); `tentative(tokens)` (a middle model's text, in a cascade).
    """

    def start(self, target: Decoder, sampler: Sampler, prompt: Sequence[int]) -> None:
        """Before a run. BadInput for a target that it cannot draft for."""

    def propose(self, tokens: Sequence[int], gamma: int, rng) -> Draft:
        """At most gamma tokens deep. In a cascade `tokens` may end with some that are not verified yet."""

    def verified(self, tokens: Sequence[int], path: Sequence[int], hidden: Array | None) -> None:
        """After each round: the sequence as it is now, for good, and the nodes of the draft that were accepted.

        hidden: with uses_hidden, the target's final hidden states (n, d) of the n tokens before the last one that it
        has newly read; behind the prefill `verified` is then called once with those of the prompt. Else None.
        """


def prefill(model: Decoder, tokens) -> None:
    """Send and commit a chain (n,) whose logits nobody reads; n may be 0."""
    if len(tokens) == 0:
        return
    if hasattr(model, "prefill"):
        model.prefill(tokens)
    else:
        model.send(tokens)
        model.commit(range(len(tokens)))


# -- the sampler -------------------------------------------------------------------------------------------

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
        require(self.temperature == 0 or 1e-6 <= self.temperature < np.inf, "temperature", self.temperature,
                "0 (greedy), or 0.000001 or more")
        whole("top_k", self.top_k, 0)
        require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1 (off)")
        require(0 <= self.min_p < 1, "min_p", self.min_p, "0 (off) to below 1")
        require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "above 0 (1 is off)")

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
    """argmax of each row (n, V); only the ids come from a device. BadInput for NaN, whose argmax would be an id too."""
    if hasattr(rows, "detach"):
        top, best = rows.max(-1)
        ids = best.masked_fill(top.isnan(), -1).tolist()
    else:
        ids = np.where(np.isnan(rows.max(-1)), -1, rows.argmax(-1)).tolist()
    if -1 in ids:
        raise BadInput("A logits row holds NaN: the model's output is not usable.")
    return ids


def draw(p: np.ndarray, rng) -> int:
    """One id from the distribution p (V,), by inversion of its cumulative sum.

    rng: numpy's Generator, or an object with a `draw(p)` of its own, as the one in lab.measure.enumeration.
    """
    if hasattr(rng, "draw"):
        return rng.draw(p)
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

    rows: (1 + nodes, V) target logits; row 0 follows the last token of the sequence, row 1 + i follows node i. Greedy
    needs only the argmax of each row; sampling reads only the rows on the path. A penalty sees the path so far.
    """
    children, history = draft.children(), list(history) if sampler.repetition_penalty != 1 else []
    ids = greedy_ids(rows) if sampler.greedy and sampler.repetition_penalty == 1 else None
    node, path = -1, list[int]()
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


# -- the loop ----------------------------------------------------------------------------------------------

def autoregressive_generate(target: Decoder, prompt, n_new: int, temperature: float = 0.0, rng=None, *,
                            sampler: Sampler | None = None, eos: Collection[int] = ()) -> tuple[np.ndarray, Run]:
    """Plain decoding: one token per forward. Arguments and result as `speculative_generate`."""
    return _generate(target, None, prompt, n_new, 0, temperature, rng, sampler, eos)


def speculative_generate(target: Decoder, drafter: Drafter, prompt, n_new: int,
                         gamma: int | Callable[[Run], int], temperature: float = 0.0, rng=None, *,
                         sampler: Sampler | None = None, eos: Collection[int] = ()) -> tuple[np.ndarray, Run]:
    """Draft up to gamma tokens, verify them in one forward, keep what the rule accepts: lossless.

    target: its cache is emptied first; prompt[:-1] is prefilled and the prompt's last token is the first round's first
    input. prompt: ids, at least one. n_new: tokens wanted, at least one. gamma: the draft length, or a function
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
    one_sampler(temperature, sampler)
    sampler = Sampler(temperature) if sampler is None else sampler
    rng = np.random.default_rng(0) if rng is None else rng
    tokens, synchronize = token_ids(prompt), getattr(target, "synchronize", lambda: None)
    n_new, stop_at = budget(target, tokens, n_new)
    if gamma is not None and not callable(gamma):
        whole("gamma", gamma, 0)
    eos = end_ids(eos)
    run, end, uses_hidden = Run(), len(tokens) + n_new, getattr(drafter, "uses_hidden", False)

    # 0. Prefill: the drafter reads the prompt, the target all of it but the last token.
    started = perf_counter()
    if drafter is not None:
        drafter.start(target, sampler, tokens)
    target.rewind(0)
    prefill(target, tokens[:-1])
    if uses_hidden and len(tokens) > 1:
        drafter.verified(tokens, [], target.hidden)
    synchronize()                                # a device may still be at it
    prefill_s = perf_counter() - started

    while not run.stop:
        # 1. Draft. Of a full acceptance and the target's own token none is too many.
        started = perf_counter()
        depth = end - len(tokens) - 1
        if gamma is not None:
            depth = min(depth, whole("gamma", gamma(run), 0) if callable(gamma) else gamma)
        draft = drafter.propose(tokens, depth, rng) if drafter is not None and depth > 0 else Draft()
        check_draft(draft, depth, target.vocab_size, name_of(drafter, "the drafter"))
        drafted = perf_counter()

        # 2. Verify: the newest token and the draft behind it, in one forward.
        parents = None if draft.parents is None else [-1] + [parent + 1 for parent in draft.parents]
        rows = target.send([tokens[-1], *draft.tokens], parents)

        # 3. Accept: the rule says which nodes stay and what the target's own token is.
        path, token, tested = verify(draft, rows, sampler, tokens, rng)
        new = [int(draft.tokens[i]) for i in path] + [int(token)]
        ended = next((i for i, t in enumerate(new) if t in eos), None)
        if ended is not None:                    # plain decoding would have stopped here: what follows never was
            if ended < len(path):                # an accepted EOS counts as the target's own token, not as a draft
                tested = ended
            new, path = new[:ended + 1], path[:ended]

        # 4. Commit the path. The target's own token is not in the cache yet: the next round sends it.
        nodes = [0] + [i + 1 for i in path]
        hidden = target.hidden[nodes] if uses_hidden else None
        target.commit(nodes)
        synchronize()
        verified = perf_counter()

        # 5. Tell the drafter, and book the round.
        tokens += new
        run.stop = "eos" if ended is not None else stop_at if len(tokens) >= end else ""
        if drafter is not None:
            drafter.verified(tokens, path, hidden)
        sources = draft.sources[:tested] if draft.parents is None else [draft.sources[i] for i in path]
        run.rounds.append(Round(len(draft.tokens), tested, len(new) - 1, verify_s=verified - drafted,
                                draft_s=drafted - started + perf_counter() - verified, sources=tuple(sources),
                                prefill_s=0.0 if run.rounds else prefill_s, first=not run.rounds))
    return np.array(tokens, dtype=np.int64), run


# -- the report --------------------------------------------------------------------------------------------

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
        """Tokens per round, the target's own included; nan without rounds."""
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
