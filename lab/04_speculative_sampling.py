# %% [markdown]
# # 04. Speculative sampling
#
# **Question.** How can a weaker model write most of a text without changing its distribution, and
# how many tokens does a forward of the target then yield?
#
# **Watch for.** What is drawn after a refusal. A wrong use of the rule, which the same checks
# catch. How far a prediction may be off by chance alone.
#
# **Takes.** about 12 s; needs numpy, matplotlib, tokenizers, safetensors.
#
# **Leaves out.** What a round costs on a chip (demo 05), trees (demo 06), acceptances in bursts.

# %%
from dataclasses import dataclass

from console import (Alpha, BadInput, Fraction, NonNegative, OneOf, Positive, Within, assumptions,
                     figure, observe, print_table, progress)

import numpy as np

from decode_lab import (Run, Sampler, acceptance_probability, overlap, residual,
                        speculative_generate)
from lab import toy
from lab.drafters.model import ModelDrafter
from lab.measure.acceptance import Texts, full_rounds
from lab.measure.chance import level_each, most_errors, too_few, with_error
from lab.measure.exactness import PROPOSALS, Misreporting, Table, against_plain, off_by
from lab.support.charts import against_measured
from lab.toy.drafts import FOR_LARGE, draft_for_large
from lab.toy.transformer import generate_batch
from llm_math import alpha_from_tau, best_gamma, expected_tokens, tau_from_positions


@dataclass(frozen=True)
class Assumptions:
    p_a: Fraction = 0.3  # The target's probability of token a, section 1.
    q_a: Fraction = 0.8  # The draft's probability of token a, section 1.
    vocabulary: Within(2, 12) = 5  # Tokens of the random models of section 2.
    samples: Within(1, 1_000_000) = 3000  # Tokens sampled for each row there.
    alphas: tuple[Alpha, ...] = (0.35, 0.5, 0.6, 0.7, 0.8, 0.9)  # Acceptance rates of section 3.
    costs: tuple[Positive, ...] = (0.05, 0.1, 0.2, 0.5)  # c: a draft step's time over a target's.
    tokens_per_s: Positive = 82.0  # A decoding speed that somebody reports.
    passes_per_s: Positive = 59.0  # Target forwards per second there, at most (demo 01).
    gammas: tuple[Within(1, 256), ...] = (1, 3, 5)  # Draft lengths of sections 3 and 4.
    gamma_max: Within(2, 256) = 8  # The draft length from which section 4 predicts the others.
    drafts: tuple[OneOf(*FOR_LARGE), ...] = ("small", "medium", "first-5")  # Its draft models.
    prompts: Within(1, 64) = 3  # Its prompts of held-out code, and as many of prose.
    new_tokens: Within(4, 220) = 40  # Tokens written after each prompt.
    seed: NonNegative = 0  # Of everything random.


A, PROMPT = assumptions(Assumptions), 32  # tokens of a prompt
if not max(A.gammas) < A.gamma_max < A.new_tokens / 2:
    raise BadInput(f"--gamma-max is {A.gamma_max}, but must be above the largest of --gammas, "
                   f"{max(A.gammas)}, and below half of --new-tokens, {A.new_tokens}")
RNG = np.random.default_rng(A.seed)

# %% [markdown]
# ## 1. The rule by hand
#
# The target has the distribution p, the draft model has q.
#
# 1. Draw a token x from q.
# 2. Accept it with probability min(1, p(x) / q(x)).
# 3. If it is refused, draw a *recovered* token from the residual: max(p - q, 0) over its sum.
#
# A token that q proposes too often is refused more often. One that it proposes too rarely is in
# the residual. Here is a vocabulary of two tokens, a and b. *Accepted* is q times min(1, p/q);
# *written* is *accepted* plus *recovered*. All three are shares of all rounds.


# %%
def by_hand(p, q):
    """(2, 7): the rows of the table below; the residual, the same after either token"""
    accept = [acceptance_probability(p, x, q) if q[x] > 0 else 1.0 for x in (0, 1)]
    accepted, rest = q * accept, residual(p, 0, q)
    recovered = (1 - accepted.sum()) * rest
    return np.transpose([p, q, accept, accepted, rest, recovered, accepted + recovered])


p, q = np.array([[A.p_a, 1 - A.p_a], [A.q_a, 1 - A.q_a]])
rows = by_hand(p, q)
heads = ["p", "q", "min(1, p/q)", "accepted", "residual", "recovered", "written"]
print_table("one-round", ["token", *heads], [["a", *rows[0]], ["b", *rows[1]]],
            formats=dict.fromkeys(heads, ".3f"), title="A round with one draft token")
# No assumption breaks these two: the rule is made for them.
observe("output-as-target", "What is written is off from p by at most {x:.1g}.",
        value=float(np.abs(rows[:, 6] - p).max()), at_most=1e-15)
observe("accepted-share", "alpha, the share accepted, is off from the sum of min(p, q) by {x:.1g}.",
        value=float(abs(rows[:, 3].sum() - overlap(p, q))), at_most=1e-15)

# %% [markdown]
# ## 2. A whole round
#
# 1. The draft model proposes gamma tokens.
# 2. One forward of the target gives p at every position.
# 3. The rule tests the tokens in turn. At the first refusal, the recovered token ends the round.
# 4. If all are accepted, the target adds a *bonus* token.
#
# So every round ends with *the target's own token*. tau is tokens per round, that one included.
#
# Is it lossless? As models, take random tables: the chances of the next token given the last one.
# All ways that a round can go are enumerated. After a refusal the target goes on to gamma + 1.
# How far is the probability of each sequence from plain decoding's?
#
# A position may have two candidates, as in a tree (demo 06). To take the likeliest is certain, so
# the rule uses q = 1. The last row is wrong on purpose: it uses the draft model's q.

# %%
P, Q = RNG.dirichlet(np.ones(A.vocabulary), (2, A.vocabulary))
Q = (P + Q) / 2  # so that they often agree
rows = [[name, off_by(P, Q, 1, how), off_by(P, Q, 2, how), off_by(P, Q, 3, how)]
        for name, how in PROPOSALS.items()]
print_table("exact", ["candidates per position", "gamma 1", "gamma 2", "gamma 3"], rows,
            title="Largest difference from plain decoding")
# No assumption breaks these two: they test the code. A wrong residual breaks the first.
observe("lossless", "With the rule, no sequence is off by more than {x:.0e}.",
        value=max(max(row[1:]) for row in rows[:-1]), at_most=1e-14)
observe("check-can-fail", "With the wrong use of it, some sequence is off by {x:.3f}.",
        value=max(rows[-1][1:]), at_least=0.001)

# %% [markdown]
# Now sample from these tables by the rule. How often does each token follow each token?
#
# - **TV** (total variation): half the sum of all differences from the target's probabilities.
# - **Noise floor**: the median TV of 2000 texts of that length by plain decoding.
# - **p-value**: the share of these texts whose TV is at least that of the tested one.
#
# Of several p-values one may be small by chance. The table has 4: each is held against 0.05 / 4.


# %%
def sampled_row(name, gamma, drafter):
    """[decoding, tau, TV, noise floor, p-value]"""
    tokens, run = speculative_generate(Table(P), drafter, [0], A.samples, gamma, 1.0, RNG)
    return [name, run.tau, *against_plain(tokens, P, RNG)]


rows = [sampled_row(f"gamma = {gamma}", gamma, ModelDrafter(Table(Q))) for gamma in (0, 1, 3)]
wrong = Misreporting(ModelDrafter(Table(Q), Sampler(0.0)), Q)
rows.append(sampled_row("WRONG, gamma = 3", 3, wrong))
print_table("sampled", ["decoding", "tau", "TV", "noise floor", "p-value"], rows,
            title=f"{A.samples} sampled tokens; gamma = 0 is plain decoding",
            formats=dict.fromkeys(["TV", "noise floor", "p-value"], ".4f"))
observe("like-plain", "With the rule, the smallest p-value is {x:.4f}.", at_least=level_each(4),
        value=min(row[4] for row in rows[:-1]))
observe("wrong-shows", "With the wrong use of it, the p-value is {x:.4f}.", value=rows[-1][4],
        at_most=level_each(4))

# %% [markdown]
# ## 3. What tau buys
#
# Suppose that each tested token is accepted with the same chance alpha. Then, by the textbook
# formula, tau = (1 - alpha^(gamma + 1)) / (1 - alpha).
#
# A draft step takes c times as long as a target step. A round takes gamma of them, and one target
# forward. If that forward takes as long as a step, the speedup is tau / (gamma c + 1).
#
# Read backwards: somebody reports a speed above the ceiling of demo 01. Then a forward yielded more
# than one token on average, and the formula says what alpha that takes.


# %%
def textbook_row(alpha):
    """[alpha, tau at each gamma, "best gamma: its speedup" at each c]"""
    best = ("{0}: {1:.2f}x".format(*best_gamma(alpha, c)) for c in A.costs)
    return [alpha, *(expected_tokens(alpha, gamma) for gamma in A.gammas), *best]


heads = [*(f"tau, gamma {gamma}" for gamma in A.gammas), *(f"c = {c:g}" for c in A.costs)]
print_table("textbook", ["alpha", *heads], [textbook_row(alpha) for alpha in A.alphas],
            title="tau, and for each c the best gamma: its speedup", formats={"alpha": ".2f"})
observe("pays-not-always", "In {x} of these cases no gamma pays.", at_least=1,
        value=sum(best_gamma(alpha, c)[0] == 0 for alpha in A.alphas for c in A.costs))
observe("above-ceiling", "{fast:g} tokens/s from {most:g} forwards/s or fewer are {x:.2f} tokens"
        " per forward or more.", fast=A.tokens_per_s, most=A.passes_per_s, at_least=1.01,
        value=A.tokens_per_s / A.passes_per_s)
observe("alpha-meant", "At gamma 3 that takes an alpha of {x:.2f} or more.", at_most=0.95,
        value=alpha_from_tau(np.clip(A.tokens_per_s / A.passes_per_s, 1, 4), 3))

# %% [markdown]
# ## 4. The formula against measured rounds
#
# Draft models write for the toy *large*; first-5 is its own first five layers. *Predicted* alpha
# is the mean sum of min(p, q) over texts that the target wrote alone. The other columns are the
# share accepted of the tested tokens, at the largest gamma and over all gammas together.

# %%
TARGET, KEYS = toy.load("large"), [(draft, T) for T in (0, 1) for draft in A.drafts]
PROMPTS = np.concatenate([toy.passages(kind, A.prompts, PROMPT) for kind in toy.KINDS])
TEXTS = [Texts(generate_batch(TARGET, PROMPTS, A.new_tokens, T, RNG), PROMPT) for T in (0, 1)]


def measure(draft, T):
    """{gamma: the rounds in which so many tokens were drafted}"""
    lengths, model = (*A.gammas, A.gamma_max), draft_for_large(draft)
    return {gamma: full_rounds(TARGET, model, PROMPTS, A.new_tokens, gamma, Sampler(T), RNG)
            for gamma in lengths}


def alpha_row(draft, T):
    """[draft, T, predicted alpha, alpha at the largest gamma, alpha at all gammas]"""
    runs, pooled = RUNS[draft, T], Run.pool([*RUNS[draft, T].values()])
    both = (TARGET, Sampler(T)), (draft_for_large(draft), Sampler(T))
    return [draft, T, TEXTS[T].overlaps(*both).mean(), runs[A.gamma_max].alpha, pooled.alpha]


RUNS = {key: measure(*key) for key in progress(KEYS, "speculating")}
rows = [alpha_row(*key) for key in KEYS]
print_table("toy-alpha", ["draft", "T", "predicted", f"gamma {A.gamma_max}", "all gammas"], rows,
            title="alpha at temperature T (0: greedy)")
observe("alpha-predicted", "Predicted alpha is off from that of all gammas by up to {x:.3f}.",
        value=max(abs(row[2] - row[4]) for row in rows), at_most=0.1)

# %% [markdown]
# Can the rounds at the largest gamma predict tau at the others?
#
# 1. *Textbook*: by the formula, from alpha there.
# 2. *By position*: 1 + a1 + a1 a2 + ..., where a1, a2, ... are the shares accepted of the tokens
#    tested at the first, second, ... draft position.
#
# ± is a standard error: the spread of a number over resamples of its rounds. A miss is predicted
# less measured tau, over the standard error of that difference. Among more predictions the worst
# miss is larger by chance, so its bound grows, too.


# %%
def tau_row(draft, T, gamma):
    """[draft, T, gamma, then tau: measured, textbook and by position, each with its error]"""
    measured, longest = RUNS[draft, T][gamma], RUNS[draft, T][A.gamma_max]
    row = [draft, T, gamma, *with_error(measured, lambda run: run.tau)]
    row += with_error(longest, lambda run: expected_tokens(run.alpha, gamma))
    return row + [*with_error(longest, lambda run: tau_from_positions(run.acceptance[:gamma]))]


rows = [tau_row(*key, gamma) for key in KEYS for gamma in A.gammas]
heads = ["measured", "±", "textbook", "± t.", "by position", "± p."]
print_table("toy-tau", ["draft", "T", "gamma", *heads], rows, formats=dict.fromkeys(heads, ".2f"),
            title=f"tau: measured, and predicted from gamma {A.gamma_max}")
TAU = np.array([row[3:] for row in rows])
for name, at in (("textbook", 2), ("position", 4)):
    observe(f"tau-{name}", "tau by {name} is off by {x:.1%} on average.", name=name, at_most=0.1,
            value=np.abs(TAU[:, at] / TAU[:, 0] - 1).mean())
misses = np.abs(TAU[:, [2, 4]] - TAU[:, [0]]) / np.hypot(TAU[:, [3, 5]], TAU[:, [1]] + 1e-9)
observe("tau-outlier", "The worst of {n} predictions is {x:.1f} standard errors off.",
        n=misses.size, value=misses.max(), at_most=most_errors(misses.size),
        not_judged=too_few(run for runs in RUNS.values() for run in runs.values()))
figure("tau-predicted", against_measured("tau on the toy", TAU[:, :2].T, {
    "textbook": TAU[:, 2:4].T, "by position": TAU[:, 4:].T}), "tau, predicted against measured")
