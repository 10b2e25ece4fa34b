# %% [markdown]
# # 03. Cheap drafts
#
# **Question.** A draft model must be much cheaper than its target and still say what the target
# would say. What does each way of making one cost, and how often does it agree?
#
# **Watch for.** Two numbers decide what a draft model is worth: c, the time of its step over the
# target's, and alpha, the chance that a token drawn from it is accepted. Neither alone decides.
#
# **Takes.** about 6 s; needs numpy, safetensors, tokenizers, matplotlib.
#
# **Leaves out.** Drafters that are not language models (lookup, n-grams); memory.

# %%
import math
from dataclasses import dataclass
from itertools import permutations

from console import (NonNegative, OneOf, Within, assumptions, figure, observe, print_table,
                     progress, record_samples, subplots)

import numpy as np

from lab import toy
from lab.measure.spread import disturbed
from lab.toy.drafts import first_layers, loss, rounded, time_steps, whole
from lab.toy.transformer import init_params, softmax
from llm_math import best_gamma, speedup


@dataclass(frozen=True)
class Assumptions:
    quantized: tuple[str, ...] = ("int8", "int4-g32", "int4-g128")  # -gN: N weights share a scale.
    layers: tuple[Within(1, 6), ...] = (1, 2, 3)  # Layers of a target that make a draft model.
    windows: Within(1, 100) = 6  # Passages of 256 tokens that are read, of each kind of text.
    temperature: Within(0.01, 100.0) = 1.0  # Of target and draft model, for alpha.
    float_bytes: Within(0.5, 8.0) = 2.0  # Bytes per weight not quantized, and per cached value.
    context: Within(1, 500) = 128  # Tokens in the cache when a step is timed.
    max_gamma: Within(1, 256) = 16  # Most tokens that are drafted at once.
    kind: OneOf("code", "prose") = "code"  # Text of sections 3 and 4.
    seed: NonNegative = 0  # Of the random weights in section 4.


A = assumptions(Assumptions)

# %% [markdown]
# ## 1. What a step costs
#
# Ways to make a draft model for the toy *large*:
#
# 1. int8, int4: make its weights integers times a scale.
# 2. first n: keep its first n layers and its output head.
# 3. medium, small: train a smaller model on the same text.
#
# A second target, *large-exit*, was trained to predict not only after its last layer but also after
# earlier ones (LayerSkip, arXiv 2404.16710). Its draft models are its own first layers.
#
# A step reads the weights and the cache. The predicted c is the bytes that a draft step reads, over
# those that a target step reads. The measured c is a ratio of times, in numpy. Two things can raise
# it. numpy cannot multiply packed integers, so int8 and int4 run in 32 bits, as slowly as the
# target. And each layer costs some calls. But few layers may fit in a CPU cache: that lowers it.


# %%
def make_models(targets, bytes_):
    """The targets of these names by name, and {way of making them: draft models}."""
    large, large_exit = (toy.load_params(name) for name in targets)
    return {name: whole(name, "", toy.load_params(name), bytes_) for name in targets}, {
        "rounded": [rounded(scheme, "large", large, bytes_) for scheme in A.quantized],
        "cut": [first_layers(n, "large", large, bytes_) for n in A.layers],
        "exit": [first_layers(n, "large-exit", large_exit, bytes_) for n in A.layers],
        "smaller": [whole(n, "large", toy.load_params(n), bytes_) for n in ("medium", "small")],
    }


def predicted_c(d):
    """Bytes of a step over those of its target."""
    read, of_target = (m.step_bytes(A.context, A.float_bytes) for m in (d, TARGETS[d.target]))
    return read / of_target


def measured_c(d):
    """Seconds of a step over those of its target, both the median of many."""
    return float(np.median(SECONDS[d]) / np.median(SECONDS[TARGETS[d.target]]))


def cost_row(d):
    """A row of the table below."""
    kb, c, timed = d.step_bytes(A.context, A.float_bytes) / 1e3, predicted_c(d), measured_c(d)
    return [d.name, d.target, d.lm.config.n_layers, kb, c, timed, timed / c]


# %%
TARGETS, MADE = make_models(("large", "large-exit"), A.float_bytes)
DRAFTS = sum(MADE.values(), [])
SECONDS = time_steps([*TARGETS.values(), *DRAFTS], A.context)
record_samples("seconds per step: targets, then drafts as in the table", [*SECONDS.values()])
TARGET_KB = TARGETS["large"].step_bytes(A.context, A.float_bytes) / 1e3
columns = ["draft", "for target", "layers", "KB a step", "predicted c", "measured c", "/ predicted"]
rows = [cost_row(d) for d in DRAFTS]
print_table("step-costs", columns, rows, measured=columns[5:],
            title=f"One step after {A.context} tokens; a target reads {TARGET_KB:.0f} KB",
            formats=dict(zip(columns[3:], (".0f", ".3f", ".2f", ".2f"))))
busy = disturbed(np.transpose([np.median(SECONDS[d] / SECONDS[TARGETS[d.target]], axis=1)
                               for d in DRAFTS]), "c")
observe("quantized-slower", "Each rounded model takes at least {x:.2f} times its predicted time.",
        value=min(row[6] for row in rows[:len(A.quantized)]), at_least=1.2, measured=True,
        not_judged=busy)
observe("depth-costs", "Medium and small take at least {x:.2f} times their predicted time.",
        value=min(row[6] for row in rows[-2:]), at_least=1.2, measured=True, not_judged=busy)

# %% [markdown]
# ## 2. How often it agrees
#
# Both read the same held-out text. At each position the target's distribution is p, and the draft
# model's q.
#
# 1. *loss*: minus the log of the probability given to the token that follows, on average.
# 2. *alpha*: the sum of min(p, q) over the vocabulary, on average. It is the chance that a token
#    drawn from q is accepted (arXiv 2211.17192, corollary 3.6).
# 3. *same choice*: how often both have the same likeliest token. It is alpha at temperature 0.


# %%
def agreement(logits, target_logits):
    """alpha, and the share of positions with the same likeliest token."""
    p, q = softmax(target_logits / A.temperature), softmax(logits / A.temperature)
    alpha = np.minimum(p, q).sum(axis=-1).mean(dtype=np.float64)
    same = (logits.argmax(axis=-1) == target_logits.argmax(axis=-1)).mean()
    return min(float(alpha), 1.0), float(same)


def read(kind, models):
    """{model: (loss, alpha, same choice)} on a kind of text; a target stands before its drafts."""
    ids, targets, found = toy.passages(kind, A.windows, 257), {}, {}
    for m in progress(models, f"reading {kind}"):
        logits = m.lm.full_logits(ids[:, :-1])
        target = targets.setdefault(m.target or m.name, logits)
        found[m] = (loss(logits, ids), *agreement(logits, target))
    return found


def agreement_row(m):
    """A row of the table below."""
    code, prose = READ["code"][m], READ["prose"][m]
    return [m.name, m.target or "itself", *np.ravel(list(zip(code, prose)))]


# %%
READ = {kind: read(kind, [*TARGETS.values(), *DRAFTS]) for kind in toy.KINDS}
columns = [f"{kind}: {what}" for what in ("loss", "alpha", "same choice") for kind in toy.KINDS]
rows = [agreement_row(m) for m in [*TARGETS.values(), *DRAFTS]]
print_table("agreement", ["model", "for target", *columns], rows, title="Reading held-out text",
            formats=dict.fromkeys(columns[:4], ".3f") | dict.fromkeys(columns[4:], ".0%"))
raised = [READ[kind][trained][1] - READ[kind][cut][1] for kind in READ
          for cut, trained in zip(MADE["cut"], MADE["exit"])]
observe("trained-exit-agrees", "First n: large-exit has an alpha {x:.2f} or more above large's.",
        value=min(raised), at_least=0.1)
observe("alpha-by-text", "Between code and prose, alpha differs by up to {x:.3f}.", at_least=0.01,
        value=max(abs(READ["code"][d][1] - READ["prose"][d][1]) for d in DRAFTS))

# %% [markdown]
# ## 3. Which one is best
#
# A round drafts gamma tokens, then the target verifies them. If verifying takes as long as one
# step, a round takes gamma c + 1 steps of the target. If alpha is the same at every position, it
# yields 1 + alpha + alpha^2 + ... + alpha^gamma tokens. (Demos 04 and 05 look at these two ifs.)
# The predicted speedup is these tokens over these steps.
#
# The table shows each draft model at its best gamma. Gamma is 0 if alpha is at most c: drafting
# does not pay there. Last column: the speedup with the measured c, at the gamma best for it.


# %%
def best_row(d):
    """A row of the table below: the best gamma, its speedup, and the best one at the measured c."""
    alpha, c = READ[A.kind][d][1], predicted_c(d)
    (gamma, best), (_, other) = (best_gamma(alpha, x, A.max_gamma) for x in (c, measured_c(d)))
    return [d.name, d.target, c, alpha, gamma, best, other]


# %%
columns = ["draft", "for target", "predicted c", "alpha", "best gamma", "speedup", "at measured c"]
rows = [best_row(d) for d in DRAFTS]
print_table("best-chains", columns, rows, title=f"Predicted speedup at the best gamma, on {A.kind}",
            measured=columns[6:], formats=dict.fromkeys((*columns[2:4], *columns[5:]), ".2f"))
best = max(rows, key=lambda row: row[5])
observe("best-pays", "The best is {name} for {target}, with a predicted speedup of {x:.2f}.",
        name=best[0], target=best[1], value=best[5], at_least=1.5)
PAIRS = list(permutations([row[2:6] for row in rows], 2))
# No flag tried breaks it: what agrees more tends to cost more.
observe("alpha-ranks-nothing", "In {x} of {n} pairs, a higher alpha goes with a lower speedup.",
        value=sum(a[1] > b[1] and a[3] < b[3] for a, b in PAIRS), at_least=1, n=len(PAIRS) // 2)
observe("c-ranks-nothing", "In {x} of {n} pairs, a lower c goes with a lower speedup.",
        value=sum(a[0] < b[0] and a[3] < b[3] for a, b in PAIRS), at_least=1, n=len(PAIRS) // 2)


# %%
def draw(rows):
    """The figure: c and alpha of each draft model, over lines of equal predicted speedup."""
    fig, axis = subplots(size=(7.0, 4.6))
    axis.set(xscale="log", xlabel="predicted c", ylabel=f"alpha on {A.kind}", ylim=(0, 1.05),
             title="Draft models, and lines of equal predicted speedup at the best gamma")
    c, alpha = np.geomspace(0.03, 1, 150), np.linspace(0, 0.999, 150)
    speeds = speedup(alpha[:, None, None], np.arange(A.max_gamma + 1), c[:, None]).max(axis=-1)
    lines = axis.contour(c, alpha, speeds, colors="0.7", levels=[1.25, 1.5, 2, 3, 4], linewidths=1)
    axis.clabel(lines, fmt="%gx", fontsize=8)
    axis.plot(c, c, "--", color="0.7", label="alpha = c: nothing to gain")
    for target, color, marker in (("large", "C0", "o"), ("large-exit", "C2", "s")):
        for i, (name, _, x, y, *_) in enumerate(row for row in rows if row[1] == target):
            axis.plot(x, y, marker, color=color, label="" if i else f"for {target}")
            axis.annotate(f"  {name}", (x, y), fontsize=8, color=color, va="center")
    axis.set_xticks([0.05, 0.1, 0.2, 0.5, 1], ["0.05", "0.1", "0.2", "0.5", "1"])
    axis.legend(fontsize=8, loc="lower left")
    figure("alpha-against-c", fig, "alpha against c")

draw(rows)

# %% [markdown]
# ## 4. Untrained models mislead
#
# Models with random weights need no download, so it is tempting to try speculation on them. Here
# are the first layers of *large*, trained, beside those of a model with random weights.
#
# Guessing gives each of V tokens the probability 1/V, so its loss is ln V. The random draft model
# predicts no better. Both distributions are flat, so they overlap, and alpha is high.


# %%
def untrained():
    """(loss, alpha, same choice) of the first layers of a random target."""
    config = toy.load_params("large")[1]
    model = init_params(config, A.seed), config
    target, draft = whole("random", "", model, 2.0), first_layers(A.layers[0], "random", model, 2.0)
    return read(A.kind, [target, draft])[draft]


# %%
trained, random = READ[A.kind][MADE["cut"][0]], untrained()
rows = [[name, *found, best_gamma(found[1], predicted_c(MADE["cut"][0]), A.max_gamma)[1]]
        for name, found in (("trained", trained), ("random", random))]
print_table("untrained", ["weights", "loss", "alpha", "same choice", "predicted speedup"], rows,
            title=f"{MADE['cut'][0].name}, on {A.kind}", formats={"same choice": ".1%"})
observe("untrained-alpha", "Random weights instead of trained ones change alpha by {x:+.2f}.",
        value=random[1] - trained[1], at_least=0.3)
# No assumption breaks this one: random weights have learned nothing.
observe("untrained-loss", "The loss of the random draft model is {x:.3f} times that of guessing.",
        value=random[0] / math.log(TARGETS["large"].lm.vocab_size), at_least=0.97)
observe("untrained-choice", "With random weights, {x:.1%} of the likeliest tokens are the same.",
        value=random[2], at_most=0.05)
