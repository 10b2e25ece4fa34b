# %% [markdown]
# # 03. Cheap drafts
#
# **Question.** A draft must be much cheaper than its target and still say what the target would say. What
# does each way of making one cost, and how often does it agree?
#
# **Watch for.** Two numbers decide what a draft is worth: c, its time per step over the target's, and
# alpha, the probability that a token drawn from it is accepted. Neither alone tells which draft is best.
# And a pair of untrained models agrees for a reason that has nothing to do with language.
#
# **Takes.** about 6 s; needs numpy, safetensors, tokenizers, matplotlib.
#
# **Leaves out.** Drafts that are no language models (lookup, n-grams), heads on the target's hidden states,
# and the memory that a draft takes beside its target.

# %%
import math
from dataclasses import dataclass
from time import perf_counter

from console import (NonNegative, OneOf, Within, assumptions, figure, observe, print_table, progress,
                     record_samples, subplots)

import numpy as np

from lab.drafters.best_tree import draft_ranks
from lab import toy
from lab.models.quant import quantize_params
from lab.toy.transformer import TransformerLM, config_like, init_params, softmax, truncate
from llm_math import best_gamma, speedup


@dataclass(frozen=True)
class Assumptions:
    quantized: tuple[str, ...] = ("int8", "int4-g32", "int4-g128")
    """Quantizations of the target; -gN is the number of weights that share a scale."""
    layers: tuple[Within(1, 6), ...] = (1, 2, 3)
    """First layers of the target that make a draft."""
    windows: Within(1, 100) = 6
    """Held-out windows of 256 tokens read, of each kind of text."""
    temperature: Within(0.01, 100.0) = 1.0
    """Of target and draft, for alpha."""
    float_bytes: Within(0.5, 8.0) = 2.0
    """Bytes per weight that is not quantized, and per cached value."""
    context: Within(1, 500) = 128
    """Tokens in the cache when a step is timed or its bytes are counted."""
    max_gamma: Within(1, 256) = 16
    """Longest chain considered."""
    kind: OneOf("code", "prose") = "code"
    """Text of the figure and of most observations."""
    seed: NonNegative = 0
    """Of the random weights."""


A = assumptions(Assumptions)
KINDS, TOP, WINDOW, ROUNDS = ("code", "prose"), (1, 2, 4, 8), 256, 100
MODELS = {name: toy.load_params(name) for name in ("large", "large-exit", "medium", "small")}
MODELS["random"] = init_params(MODELS["large"][1], A.seed), MODELS["large"][1]

# %% [markdown]
# ## 1. What a step costs
#
# The target is rounded to fewer bits, or cut after its first layers, or replaced by a smaller model trained
# on the same text. Cutting comes in two kinds: a model never meant to be cut, and one trained with a loss
# on its first layers too (LayerSkip, arXiv 2404.16710), called large-exit here. The latter drafts for its
# own full depth, so its target is another one.
#
# Where memory sets the time, c is the ratio of the bytes that a step reads: weights, scales and the cache.
# That is the prediction. The measurement is numpy's, and numpy has no product of packed integers: a
# quantized draft runs here dequantized to float32, in the target's time. And a step of so small a
# model costs here in good part its calls, a fixed number per layer, whatever the layer's width.


# %%
@dataclass(frozen=True)
class Draft:
    """A draft, or with target None a target: its model and the bytes that its weights would take."""

    name: str
    target: str | None
    lm: TransformerLM
    weight_bytes: float

    @property
    def step_bytes(self) -> float:
        """Read by one decode step after A.context tokens."""
        c = self.lm.config
        return self.weight_bytes + A.context * c.n_layers * 2 * c.n_kv_heads * c.head_dim * A.float_bytes


def whole(name: str, target: str | None, params: dict, config) -> Draft:
    return Draft(name, target, TransformerLM(params, config, name), config.n_params() * A.float_bytes)


def first(n: int, target: str) -> Draft:
    """The first n layers of the target, under its own final norm and head."""
    params, config = MODELS[target]
    return whole(f"first {n}", target, truncate(params, n), config_like(config, n_layers=n))


def rounded(scheme: str, target: str) -> Draft:
    params, report = quantize_params(MODELS[target][0], scheme, float_bytes=A.float_bytes)
    return Draft(scheme, target, TransformerLM(params, MODELS[target][1], scheme), report.bytes)


def time_steps(models: list[Draft]) -> np.ndarray:
    """(models, ROUNDS) seconds of one decode step, the models in turn, after a warm-up of three rounds."""
    seconds = np.empty((len(models), ROUNDS + 3))
    for m in models:
        m.lm.prefill(np.zeros(A.context, int))
    for j in range(ROUNDS + 3):
        for i, m in enumerate(models):
            started = perf_counter()
            m.lm.send([0])
            seconds[i, j] = perf_counter() - started
            m.lm.rewind(A.context)
    return seconds[:, 3:]


TARGETS = {name: whole(name, None, *MODELS[name]) for name in ("large", "large-exit", "random")}
DRAFTS = [*(rounded(scheme, "large") for scheme in A.quantized),
          *(first(n, target) for target in ("large", "large-exit") for n in A.layers),
          *(whole(name, "large", *MODELS[name]) for name in ("medium", "small")),
          first(min(A.layers), "random"), rounded(A.quantized[-1], "random")]
everyone = [*TARGETS.values(), *DRAFTS]
seconds = dict(zip(everyone, time_steps(everyone)))
for d in everyone:
    record_samples(f"seconds per step, {d.name} for {d.target or 'itself'}", seconds[d])
C, MEASURED, table = {}, {}, []
for d in DRAFTS:
    target = TARGETS[d.target]
    C[d] = d.step_bytes / target.step_bytes
    MEASURED[d] = float(np.median(seconds[d]) / np.median(seconds[target]))
    low, high = np.quantile(seconds[d] / seconds[target], [0.25, 0.75])
    table.append([d.name, d.target, d.step_bytes / 1e3, d.lm.config.n_layers, C[d], MEASURED[d],
                  f"{low:.2f}-{high:.2f}", MEASURED[d] / C[d]])
timed = ["measured c", "quartiles", "measured / predicted"]
print_table("step-costs", ["draft", "for target", "KB a step", "layers", "predicted c", *timed], table, measured=timed,
            title=f"One decode step after {A.context} tokens (quantized drafts are timed dequantized)",
            formats={"KB a step": ".0f", "predicted c": ".3f", **dict.fromkeys(timed, ".2f")})
packed = sorted((d for d in DRAFTS if d.name in A.quantized), key=C.get)
observe("quantized-slower",
        "By its bytes {name} would take {a:.2f} of a target step; dequantized, it takes {b:.2f}. Every "
        "quantized draft takes more than 1.2 times its prediction.", name=packed[0].name, a=C[packed[0]],
        b=MEASURED[packed[0]], measured=True, holds=all(MEASURED[d] > 1.2 * C[d] for d in packed))
deep, cut = (next(d for d in DRAFTS if d.name == name) for name in ("medium", f"first {min(A.layers)}"))
observe("depth-costs",
        "Bytes alone do not set the time here: {d} reads {x:.0f} KB a step, less than the {y:.0f} of {e} "
        "for {target}, but takes {t:.2f} times as long, more than 1.2 times. It has {m} layers against {n}.",
        d=deep.name, e=cut.name, target=cut.target, x=deep.step_bytes / 1e3, y=cut.step_bytes / 1e3,
        t=MEASURED[deep] / MEASURED[cut], m=deep.lm.config.n_layers, n=cut.lm.config.n_layers, measured=True,
        holds=deep.step_bytes < cut.step_bytes and MEASURED[deep] > 1.2 * MEASURED[cut])

# %% [markdown]
# ## 2. How often it agrees
#
# Draft and target read the same held-out text. The loss says how well each predicts it. alpha is the sum
# over the vocabulary of min(p, q), averaged over positions: the chance that a token drawn from the draft is
# accepted (arXiv 2211.17192, corollary 3.6). The ranks say how often the token that the target finds
# likeliest there, its argmax, is among the draft's first 1, 2, 4, 8: what a greedy chain (1) or a wider
# tree would catch.


# %%
def windows(kind: str) -> np.ndarray:
    """(A.windows, WINDOW + 1) ids, spread evenly over the held-out text."""
    ids = np.array(toy.encode(toy.heldout(kind)))
    return ids[np.linspace(0, len(ids) - WINDOW - 1, A.windows).astype(int)[:, None] + np.arange(WINDOW + 1)]


def loss(logits, ids) -> float:
    """Nats per token of the text that follows."""
    p = np.take_along_axis(softmax(logits), ids[:, 1:, None], axis=-1)
    return float(-np.log(np.maximum(p, 1e-30)).mean(dtype=np.float64))


def agreement(logits, target_logits) -> tuple[float, list[float]]:
    """alpha, and the share of positions at which the target's argmax is among the draft's top k, k in TOP."""
    p, q = softmax(target_logits / A.temperature), softmax(logits / A.temperature)
    choice = target_logits.argmax(axis=-1)
    ranks = draft_ranks(logits, np.concatenate([choice[:, :1], choice[:, :-1]], axis=1))
    alpha = np.minimum(p, q).sum(axis=-1).mean(dtype=np.float64)
    return min(float(alpha), 1.0), [float((ranks < k).mean()) for k in TOP]


LOSS, ALPHA, CAUGHT = {}, {}, {}
for kind in KINDS:
    ids, target_logits = windows(kind), {}
    for d in progress(everyone, f"targets and drafts read {kind}"):
        logits = d.lm.full_logits(ids[:, :-1])
        LOSS[d, kind] = loss(logits, ids)
        if d.target is None:
            target_logits[d.name] = logits
        else:
            ALPHA[d, kind], CAUGHT[d, kind] = agreement(logits, target_logits[d.target])
columns = [f"{kind}: {what}" for what in ("loss", "alpha") for kind in KINDS]
print_table("loss-and-alpha", ["model", "for target", *columns],
            [[d.name, d.target or "itself", *(LOSS[d, k] for k in KINDS), *(ALPHA.get((d, k)) for k in KINDS)]
             for d in everyone], formats=dict.fromkeys(columns, ".3f"),
            title=f"Held-out loss (nats per token) and alpha, {A.windows * WINDOW} positions")
columns = [f"{kind}: {k}" for kind in KINDS for k in TOP]
print_table("first-k", ["draft", "for target", *columns],
            [[d.name, d.target, *(share for k in KINDS for share in CAUGHT[d, k])] for d in DRAFTS],
            title="The target's argmax is among the draft's first k", formats=dict.fromkeys(columns, ".0%"))

plain, trained = ([d for d in DRAFTS if d.target == name and d.name.startswith("first")]
                  for name in ("large", "large-exit"))
a, b = (", ".join(f"{ALPHA[d, A.kind]:.2f}" for d in group) for group in (plain, trained))
observe("trained-exit-agrees",
        "First layers trained to predict agree more than those cut off, on both texts: alpha on {kind} is "
        "{b} against {a}. The full model's loss differs by {x:+.3f}.", kind=A.kind, a=a, b=b,
        x=LOSS[TARGETS["large-exit"], A.kind] - LOSS[TARGETS["large"], A.kind],
        holds=all(ALPHA[t, k] > ALPHA[p, k] for p, t in zip(plain, trained) for k in KINDS))
moved = max(DRAFTS, key=lambda d: abs(ALPHA[d, "code"] - ALPHA[d, "prose"]))
observe("alpha-by-text",
        "alpha belongs to a draft, a target and a text: {name} for {target} has {a:.3f} on code, {b:.3f} on "
        "prose, more than 0.005 apart.", name=moved.name, target=moved.target, a=ALPHA[moved, "code"],
        b=ALPHA[moved, "prose"], holds=abs(ALPHA[moved, "code"] - ALPHA[moved, "prose"]) > 0.005)

# %% [markdown]
# ## 3. Which draft is best
#
# speedup = E[tokens per round] / (gamma c + 1), at the gamma that makes it largest. It supposes that
# verifying gamma + 1 tokens takes as long as one step, and that every position accepts with the same alpha;
# demos 04 and 05 take both apart. Speculation pays only where alpha is above c.

# %%
BEST = {(d, k): best_gamma(ALPHA[d, k], C[d], A.max_gamma) for d in DRAFTS for k in KINDS}
here = {d: best_gamma(ALPHA[d, A.kind], MEASURED[d], A.max_gamma)[1] for d in DRAFTS}
timed = f"{A.kind}: speedup, measured c"
columns = [f"{kind}: {what}" for kind in KINDS for what in ("alpha", "gamma", "speedup")]
print_table("best-chains", ["draft", "for target", "c", *columns, timed],
            [[d.name, d.target, C[d], *(x for k in KINDS for x in (ALPHA[d, k], *BEST[d, k])), here[d]]
             for d in DRAFTS], title="Best chain at the predicted c", measured=[timed],
            formats={name: ".2f" for name in ("c", timed, *columns) if not name.endswith("gamma")})
rivals, alpha = [d for d in DRAFTS if d.target != "random"], {d: ALPHA[d, A.kind] for d in DRAFTS}
gain = {d: BEST[d, A.kind][1] for d in DRAFTS}
best = max(rivals, key=gain.get)
observe("best-pays",
        "On {kind} the best draft is {name} for {target}: {s:.2f} times plain decoding is predicted, more "
        "than 1, with gamma = {g}.", kind=A.kind, name=best.name, target=best.target, s=gain[best],
        g=BEST[best, A.kind][0], holds=gain[best] > 1)
more, less = max(((d, e) for d in rivals for e in rivals if alpha[d] >= alpha[e]),
                 key=lambda pair: gain[pair[1]] - gain[pair[0]])
observe("alpha-ranks-nothing",
        "alpha alone ranks no drafts: {d} for {d_target} has {x:.2f} and gains {s:.2f} times, less than "
        "{e} for {e_target}, which has {y:.2f} and gains {t:.2f} times.", d=more.name,
        d_target=more.target, e=less.name, e_target=less.target, x=alpha[more], y=alpha[less],
        s=gain[more], t=gain[less], holds=gain[more] < gain[less])
fake, nothing = next(d for d in DRAFTS if d.target == "random"), math.log(MODELS["random"][1].vocab_size)
observe("random-misleads",
        "With random weights {name} has an alpha of {a:.2f}, above the {b:.2f} when trained, and is promised "
        "{s:.2f} times. It has learned nothing, its loss of {x:.2f} is above 0.97 ln V, {y:.2f}: "
        "both distributions are flat, so they overlap. Its first choice is the target's in {m:.0%} of cases, "
        "trained in {n:.0%}.", name=fake.name, a=alpha[fake], b=alpha[plain[0]], s=gain[fake],
        x=LOSS[fake, A.kind], y=0.97 * nothing, m=CAUGHT[fake, A.kind][0], n=CAUGHT[plain[0], A.kind][0],
        holds=alpha[fake] > alpha[plain[0]] and LOSS[fake, A.kind] > 0.97 * nothing)

fig, axis = subplots(size=(7.0, 4.6))
axis.set_xscale("log")
x, y, gammas = np.geomspace(0.03, 1, 150), np.linspace(0, 0.999, 150), np.arange(A.max_gamma + 1)
lines = axis.contour(x, y, speedup(y[:, None, None], gammas, x[None, :, None]).max(axis=-1), colors="0.7",
                     levels=[1.25, 1.5, 2, 3, 4], linewidths=1)
axis.clabel(lines, fmt=lambda level: f"{level:.3g}x", fontsize=8)
axis.plot(x, x, "--", color="0.7", label="alpha = c: nothing to gain")
for (name, color), marker in zip((("large", "C0"), ("large-exit", "C2"), ("random", "C3")), "os^"):
    group = [d for d in DRAFTS if d.target == name]
    axis.plot([C[d] for d in group], [alpha[d] for d in group], marker, color=color, label=f"for {name}")
    for d in group:                              # to the left where another point or the dashed line is near
        near = any(1 < C[e] / C[d] < 1.25 and abs(alpha[e] - alpha[d]) < 0.08 for e in DRAFTS)
        side, align = (-7, "right") if near or 0 < alpha[d] - C[d] < 0.15 else (7, "left")
        axis.annotate(d.name, (C[d], alpha[d]), (side, 0), textcoords="offset points", fontsize=7, ha=align,
                      va="center", color=color, bbox=dict(fc="white", ec="none", pad=0.5, alpha=0.8))
axis.set(xlabel="predicted c", ylabel=f"alpha on {A.kind}", ylim=(0, 1.02),
         title="Drafts, and lines of equal speedup at the best gamma")
axis.legend(fontsize=8, loc="upper left")
figure("alpha-against-c", fig, "alpha against c")
