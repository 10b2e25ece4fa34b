# %% [markdown]
# # 09. A cascade of three models
#
# **Question.** A middle model drafts better than a small one, and its steps are expensive. If the small one drafts for
# the middle one, do the three together beat the better pair?
#
# **Watch for.** Which q the target tests with. What acceptance and which costs a cascade needs. That the better pair
# is hard to beat: where the small model is good enough for the middle one, it is nearly good enough for the large
# one.
#
# **Takes.** about 10 s; needs numpy, matplotlib, tokenizers, safetensors.
#
# **Leaves out.** A third draft, trees, and drafts that stop by themselves. Three models in memory instead of two.

# %%
from dataclasses import dataclass

from console import (Alpha, BadInput, Count, NonNegative, OneOf, Within, assumptions, figure, fmt_bytes, fmt_time,
                     observe,
                     print_table, progress, sliders, subplots)

import numpy as np

from decode_lab import Run, Sampler, autoregressive_generate, speculative_generate
from lab.drafters.model import ModelDrafter
from hw_specs import CHIPS, chip
from lab import toy
from lab.drafters.cascade import CascadeDrafter
from lab.drafters.draft_length import round_seconds, steps
from lab.measure.known_texts import KnownText, Remembered
from lab.measure.exactness import Misreporting, Table, distances, transitions
from llm_math import MODELS, best_cascade, model, verify_time

NAMES = ("small", "middle", "large")


@dataclass(frozen=True)
class Assumptions:
    vocabulary: Within(2, 12) = 5                          # Tokens of the small random models of section 1.
    samples: Within(1, 1_000_000) = 4000                                  # Tokens sampled from each of them.
    small: OneOf(*MODELS) = "pythia-70m"                   # Model whose step is the price of the small one's.
    middle: OneOf(*MODELS) = "pythia-410m"                 # Model whose step is the price of the middle one's.
    large: OneOf(*MODELS) = "pythia-2.8b"                  # Model whose step is the price of the target's.
    chip: OneOf(*CHIPS) = "h100-sxm"                       # Chip on which they are priced.
    batches: tuple[Count, ...] = (1, 32, 128)              # Sequences decoded together; the first is the one counted.
    context: Count = 512                                   # Tokens cached for each of them.
    layer_us: Within(0.0, 1e4) = 10.0                      # Time of a layer besides bytes and FLOPs, microseconds.
    alpha_12: Alpha = 0.8                                  # Share of the small one's tokens that the middle accepts.
    alpha_23: Alpha = 0.8                                  # Share of the middle one's that the target accepts.
    gamma: Within(2, 32) = 10                              # Longest draft for the target.
    inner: Within(1, 32) = 6                               # Longest draft for the middle one.
    prompts: Within(1, 32) = 3                             # Prompts of held-out code, and as many of prose, section 3.
    new_tokens: Within(8, 200) = 40                        # Tokens written after each.
    seed: NonNegative = 0                                  # Of everything random.

    def __post_init__(self):
        if not model(self.small).n_params() < model(self.middle).n_params() < model(self.large).n_params():
            raise BadInput(f"--small {self.small}, --middle {self.middle} and --large {self.large} are no cascade: three "
                           "models that grow would be right")


A = assumptions(Assumptions)

# %% [markdown]
# ## 1. Which q?
#
# The small model proposes a few tokens to the middle one, which tests them by the rule of demo 04: what comes out,
# accepted or drawn after a refusal, has the middle one's own distribution. These tokens are the draft for the
# target, which tests them by the same rule. The q of its test is the middle one's, as that is what the tokens were
# drawn from; the small one's was used up in the first test. A draft that reports the small one's q, because it
# proposed the token, bends the text.
#
# Random tables stand for the three models, and the loop samples. TV: total variation of the transitions from token
# to token; the noise floor is the median of as many plain samples, "chance" what all but one in a thousand
# stay below.

# %%
rng = np.random.default_rng(A.seed)
LARGE, one, two = rng.dirichlet(np.ones(A.vocabulary), (3, A.vocabulary))
MIDDLE, SMALL = (LARGE + one) / 2, (LARGE + one + 2 * two) / 4
cascade, rows = CascadeDrafter(Table(MIDDLE), ModelDrafter(Table(SMALL)), 2), []
for name, drafter in (("plain decoding", None), ("cascade, the middle one's q", cascade),
                      ("WRONG: the small one's q", Misreporting(cascade, SMALL))):
    tokens, run = (speculative_generate(Table(LARGE), drafter, [0], A.samples, 3, 1.0, rng) if drafter
                   else autoregressive_generate(Table(LARGE), [0], A.samples, 1.0, rng))
    counts = transitions(tokens, len(LARGE))
    chance = rng.multinomial(counts.sum(1), LARGE, (500, len(LARGE)))
    tv, floor = (distances(x, LARGE)[0] for x in (counts, chance))
    rows.append([name, run.tau, float(tv), float(np.median(floor)), float(np.quantile(floor, 0.999))])
print_table("sampled", ["decoding", "tau", "TV", "noise floor", "chance, 99.9%"], rows, formats=dict.fromkeys(
    ["TV", "noise floor", "chance, 99.9%"], ".4f"), title=f"{A.samples} sampled tokens against the target's distribution")
plain, right, wrong = rows
observe("middle-q-right",
        "With the middle one's q the text is the target's: TV {a:.4f}, within chance, {b:.4f}.", a=right[2], b=right[4],
        holds=right[2] <= right[4])
observe("small-q-wrong",
        "With the small one's q it is not: TV {a:.4f}, {x:.1f} times the noise floor.", a=wrong[2],
        x=wrong[2] / wrong[3],
        holds=wrong[2] > wrong[4])

# %% [markdown]
# ## 2. When it pays
#
# c1 and c2: a step of the small and of the middle model over one of the target's. alpha_12: how often the middle
# accepts the small one's token; alpha_23, alpha_13: how often the target accepts the middle one's and the small one's.
# inner gamma: tokens that the small one drafts for the middle one, gamma: tokens that then are drafted for the target.
# With k inner drafts a token of the middle costs about (c2 + k c1) / E(alpha_12, k), E as in demo 04: less than c2 if
# alpha_12 is above c1 / c2. At best it is free, which bounds the gain over the pair of middle and large; over the pair
# of small and large a cascade gains what the middle one's better tokens are worth.
#
# Each is taken at its best draft lengths. Here alpha_13 is alpha_12 alpha_23, as if the two acceptances were
# independent; it can be no less than alpha_12 + alpha_23 - 1. Gain: the cascade's speed over the faster of the two pairs
# and plain decoding.

# %%
SHAPES = {name: model(getattr(A, name)) for name in NAMES}


def seconds(name: str, n: int = 1, batch: int = A.batches[0]) -> float:
    """Time of a forward that sends n tokens of each sequence."""
    shape = SHAPES[name]
    return verify_time(shape, chip(A.chip), batch, A.context, n, A.layer_us * 1e-6 * shape.n_layers)


def compare(c1, c2, alpha_12, alpha_23, alpha_13=None) -> dict:
    """Speedups over plain decoding, and the gain; numbers or arrays."""
    alpha_13 = alpha_12 * alpha_23 if alpha_13 is None else alpha_13
    _, small_gamma, small = best_cascade(0.0, alpha_13, 0.0, c1, 0, A.gamma)      # no inner draft: a pair
    _, middle_gamma, middle = best_cascade(0.0, alpha_23, 0.0, c2, 0, A.gamma)
    inner, gamma, cascade = best_cascade(alpha_12, alpha_23, c1, c2, A.inner, A.gamma)
    return dict(small=small, middle=middle, cascade=cascade, gain=cascade / np.maximum(small, middle), inner=inner,
                gamma=gamma, small_gamma=small_gamma, middle_gamma=middle_gamma)


print_table("one-step", ["model", "bytes read", "layers", *(f"batch {b}" for b in A.batches),
             *(f"c, batch {b}" for b in A.batches)],
            [[shape.name, shape.streamed_bytes(), shape.n_layers, *(fmt_time(seconds(name, 1, b)) for b in A.batches),
              *(seconds(name, 1, b) / seconds("large", 1, b) for b in A.batches)] for name, shape in SHAPES.items()],
            title=f"One step on {chip(A.chip).name}, context {A.context}",
            formats={"bytes read": fmt_bytes} | dict.fromkeys([f"c, batch {b}" for b in A.batches], ".3f"))
ratios = {b: [seconds(name, batch=b) / seconds("large", batch=b) for name in NAMES[:2]] for b in A.batches}
SPEEDS = ["small", "middle", "cascade", "gain"]
alphas = sorted({(A.alpha_12, A.alpha_23), (0.6, 0.6), (0.6, 0.9), (0.9, 0.6), (0.9, 0.9)})
predicted = {pair: compare(*ratios[A.batches[0]], *pair) for pair in alphas}
print_table("cascades", ["alpha_12", "alpha_23", *SPEEDS, "inner gamma", "gamma"], [
    [*pair, *(x[key] for key in SPEEDS), x["inner"], x["gamma"]] for pair, x in predicted.items()],
    formats=dict.fromkeys(SPEEDS, ".2f"), title="Speedups of both pairs and of the cascade at batch "
    f"{A.batches[0]}; an inner gamma of 0 leaves the small one out")
observe("beats-pairs",
        "The cascade beats both pairs in {n} of these {of} cases, by {x:.0%} at most.", of=len(predicted),
        n=sum(x["gain"] > 1.005 for x in predicted.values()), x=max(x["gain"] for x in predicted.values()) - 1,
        holds=any(x["gain"] > 1.005 for x in predicted.values()))

# %% tags=["notebook"]
sliders(lambda c1, c2, alpha_12, alpha_23: print_table("slider",
    [*SPEEDS, "inner gamma", "gamma"], [[x[key] for key in (*SPEEDS, "inner", "gamma")] for x in [compare(
        c1, c2, alpha_12, alpha_23)]], formats=dict.fromkeys(SPEEDS, ".2f")),
    c1=(0.0, 0.5, 0.01, 0.04), c2=(0.05, 1.0, 0.05, 0.2), alpha_12=(0.0, 0.95, 0.05, 0.8),
    alpha_23=(0.0, 0.95, 0.05, 0.8))

# %% [markdown]
# ## 3. The toy family
#
# The same, measured: acceptance from the trained toy models, costs from the models above. alpha is the mean overlap
# on a text that the target wrote alone. From it come the draft lengths and the predicted speedup. Then the loop runs
# with them, and its rounds are priced: the draft steps of the small model, the middle one's forwards, the target's.
# "accepted by middle" is of the small one's tokens. When greedy, all draft lengths are counted too, on the text that is
# known, so that no formula decides what is best.

# %%
PROMPT, (c1, c2) = 32, ratios[A.batches[0]]
models = {name: toy.load(size) for name, size in zip(NAMES, ("small", "medium", "large"))}
target = models["large"]
known = {name: Remembered(models[name]) for name in NAMES[:2]}           # greedy drafts behind a text repeat
prompts = [ids for kind in toy.KINDS for ids in toy.prompts(kind, A.prompts, PROMPT)]
PRICES = {(one, other): round_seconds(lambda n: seconds(one, n), seconds(other) / seconds(one) if other else 0.0,
                                      max(A.gamma, A.inner)) for one, other in (
    ("middle", "small"), ("large", "small"), ("large", "middle"), ("large", None))}      # of a round, by its draft


def price(run: Run, drafter) -> float:
    """Steps of the target that the rounds of a run take, with those of its drafts."""
    if isinstance(drafter, CascadeDrafter):
        return steps(run, PRICES["large", None]) + c2 * steps(drafter.run, PRICES["middle", "small"])
    return steps(run, PRICES["large", drafter.name])


def decode(drafter, gamma: int, T: float, counted: bool) -> tuple[float, float, float | None, bool]:
    """All prompts -> (speedup, tau, share that the middle accepted, whether each text is that of T = 0).

    counted: on the known greedy texts, without a forward of the target.
    """
    runs, inner, spent, same = [], [], 0.0, True
    for i, prompt in enumerate(prompts):
        by = KnownText(texts[0.0][i], target) if counted else target
        tokens, run = speculative_generate(by, drafter, prompt, A.new_tokens, gamma, T, np.random.default_rng([A.seed, i]))
        runs.append(run)
        inner.append(getattr(drafter, "run", Run()))
        spent += price(run, drafter)
        same = same and tokens.tolist() == texts[0.0][i].tolist()
    run = Run.pool(runs)
    return run.n_tokens / spent, run.tau, Run.pool(inner).alpha if any(r.rounds for r in inner) else None, same


def overlap_of(T: float, one: str, other: str) -> float:
    """Mean overlap of two models at the new tokens of the target's texts."""
    p, q = ([[Sampler(T).probs(row) for row in rows] for rows in models[name].full_logits(texts[T])[:, PROMPT - 1:-1]]
            for name in (one, other))
    return float(np.minimum(p, q).sum(axis=-1).mean())


texts = {T: np.array([autoregressive_generate(target, ids, A.new_tokens, T, rng)[0] for ids in prompts])
         for T in (0.0, 1.0)}
PAIRS = {"alpha_12": ("small", "middle"), "alpha_23": ("middle", "large"), "alpha_13": ("small", "large")}
alpha = {T: {name: overlap_of(T, *pair) for name, pair in PAIRS.items()} for T in texts}
HEADS = [*PAIRS, "12 times 23", "12 + 23 - 1"]
print_table("overlap",
            ["T", *HEADS], [[f"{T:g}", *x.values(), x["alpha_12"] * x["alpha_23"], x["alpha_12"] + x["alpha_23"] - 1]
                            for T, x in alpha.items()], title="Overlap on the toy family",
            formats=dict.fromkeys(HEADS, ".2f"))
rows, speed, family, identical = [], {}, {}, []
for T in progress(texts, "three models"):
    x = family[T] = compare(c1, c2, *alpha[T].values())
    for name, inner, gamma in (("small", "-", x["small_gamma"]), ("middle", "-", x["middle_gamma"]),
                               ("cascade", x["inner"], x["gamma"])):
        drafter = ModelDrafter(models[name], name=name) if inner == "-" else \
            CascadeDrafter(models["middle"], ModelDrafter(models["small"]), inner)
        speed[T, name], tau, accepted, same = decode(drafter, gamma, T, counted=False)
        identical += [same] if T == 0 else []
        rows.append([f"{T:g}", name, inner, gamma, accepted, tau, x[name], speed[T, name], x[name] / speed[T, name]])
timed = ["accepted by middle", "tau", "predicted", "speedup", "ratio"]
print_table("runs",
            ["T", "drafts", "inner gamma", "gamma", *timed], rows, formats=dict.fromkeys(timed, ".2f"), title="The "
            "target itself, at the draft lengths that the formula finds best; rounds priced as the models above")
observe("same-text",
        "Greedy, both pairs and the cascade write what plain decoding writes.", holds=all(identical))
off = max(abs(row[-1] - 1) for row in rows)
observe("formula-close",
        "The formula, which takes acceptance as the same everywhere, predicts these speedups within {x:.0%}: less than "
        "25%.", x=off, holds=off < 0.25)

gammas, inners, best = range(1, A.gamma + 1), range(1, A.inner + 1), {}
for name in NAMES[:2]:
    drafter = ModelDrafter(known[name], name=name)
    best[name] = max((decode(drafter, gamma, 0.0, counted=True)[0], gamma) for gamma in gammas)
cascades = {inner: CascadeDrafter(known["middle"], ModelDrafter(known["small"]), inner) for inner in inners}
best["cascade"] = max((decode(cascades[inner], gamma, 0.0, counted=True)[0], gamma, inner)
                      for gamma in progress(gammas, "cascades") for inner in inners if inner < gamma)
print_table("best-lengths", ["drafts", "inner gamma", "gamma", "speedup"], [
    [name, *(found[2:] or ["-"]), found[1], found[0]] for name, found in best.items()], formats={"speedup": ".3f"},
    title="Greedy, the best of all draft lengths, counted")


def verdict(gain: float) -> str:
    """Whether it pays; within 3% neither."""
    return "pays" if gain >= 1.035 else "loses" if gain < 0.965 else "is even"


for T, how, found in ((0.0, "Greedy, all draft lengths counted", {name: found[0] for name, found in best.items()}),
                      (1.0, "At T = 1, at the lengths above", {name: speed[1.0, name] for name in best})):
    pair = max(NAMES[:2], key=lambda name: found[name])
    gain, said = found["cascade"] / max(found[pair], 1.0), family[T]["gain"]
    observe(f"gain-{'greedy' if T == 0 else 'sampled'}",
            how + ", the cascade is {x:.2f} times as fast as the better pair, {pair} and large: it {verdict}. The formula "
            "predicts {y:.2f}, within 0.15.", x=gain, pair=pair, verdict=verdict(gain), y=said, holds=abs(gain - said) < 0.15)
a12, a23, a13 = alpha[0.0].values()
observe("not-independent",
        "Greedy, the target agrees with the small model on {a:.0%} of tokens, more than the product of the other two, "
        "{b:.0%}: all three learned the same text. With the product a gain of {x:.2f} would be predicted.", a=a13,
        b=a12 * a23, x=compare(c1, c2, a12, a23)["gain"], holds=a13 > a12 * a23)

# %% [markdown]
# The figure: where a cascade beats both pairs. Left over the two acceptances, at the costs above, with alpha_13 their
# product; the toy family lies where its marks are, but they look better than they are: its alpha_13 is above the
# product, and the numbers beside them are its own gains. Right over the two costs, at the toy's greedy acceptances,
# alpha_13 its own; the dots are the three models, by batch; dotted: c1 = c2. Grey: even, mostly as the small model is
# left out.

# %%
fig, axes = subplots(1, 2, size=(10.0, 4.4))
a, c = np.linspace(0.3, 0.98, 35), np.linspace(0.01, 0.45, 45)
panels = ((a, a, compare(c1, c2, a[None, :], a[:, None])["gain"]),
          (c, c, compare(c[None, :], c[:, None], a12, a23, a13)["gain"]))
LEVELS, COLORS = (-40, -20, -10, -5, -0.5, 0.5, 5, 10, 20, 40), (
    "#b2182b", "#d6604d", "#f4a582", "#fddbc7", "#e8e8e8", "#d1e5f0", "#92c5de", "#4393c3", "#2166ac")
for axis, (x, y, gain) in zip(axes, panels):
    shade = axis.contourf(x, y, np.clip(100 * (gain - 1), -40, 40), levels=LEVELS, colors=COLORS)
    axis.contour(x, y, gain, levels=[1.005], colors="k", linewidths=1)
axes[0].set(xlabel="alpha_12: the middle accepts the small one's", ylabel="alpha_23: the target accepts the middle's",
            title=f"c1 = {c1:.3f}, c2 = {c2:.3f}")
for T, mark in ((0.0, "o"), (1.0, "s")):
    at = alpha[T]["alpha_12"], alpha[T]["alpha_23"]
    axes[0].plot(*at, "k" + mark, mfc="none", label=f"toy family, T = {T:g}")
    axes[0].annotate(f"{family[T]['gain'] - 1:+.0%}", at, textcoords="offset points", xytext=(7, -3), fontsize=9)
axes[0].legend(fontsize=8, loc="lower left")
axes[1].set(xlabel="c1: a step of the small model", ylabel="c2: a step of the middle model",
            title=", ".join(f"{name} = {value:.2f}" for name, value in alpha[0.0].items()))
axes[1].title.set_fontsize(9)
axes[1].plot(c, c, color="grey", lw=1, ls=":")
for batch, (x, y) in ratios.items():
    axes[1].plot(x, y, "ko", ms=4)
    axes[1].annotate(f"batch {batch}", (x, y), textcoords="offset points", xytext=(6, -3), fontsize=8)
fig.colorbar(shade, ax=axes, label="cascade over the better pair, %")
figure("cascade-pays", fig, "where a cascade pays")
