# %% [markdown]
# # 09. A cascade of three models
#
# **Question.** A small model drafts for a middle one, and both for a large one. Does that pay?
#
# **Watch for.** Which q the large model tests with. How good and how cheap the two drafts must be.
# How often the large one accepts the small one's tokens: that pair needs no middle one.
#
# **Takes.** about 15 s; needs numpy, matplotlib, tokenizers, safetensors.
#
# **Leaves out.** A third draft, trees, and the memory of the third model.

# %%
from dataclasses import dataclass
from functools import cache, partial

from console import (Alpha, BadInput, Count, NonNegative, OneOf, Within, assumptions, figure,
                     observe, print_table, progress, sliders, subplots)

import numpy as np

from decode_lab import Sampler, speculative_generate
from hw_specs import CHIPS, chip
from lab import toy
from lab.drafters.cascade import CascadeDrafter
from lab.drafters.model import ModelDrafter
from lab.measure.enumeration import loop_tv
from lab.measure.exactness import Misreporting, Table
from lab.measure.known_texts import KnownText, Remembered
from lab.measure.acceptance import Texts
from llm_math import MODELS, best_cascade, cascade_cost, expected_tokens, model, verify_time


@dataclass(frozen=True)
class Assumptions:
    small: OneOf(*MODELS) = "pythia-70m"        # Its step time is used as the small model's.
    middle: OneOf(*MODELS) = "pythia-410m"      # Its step time is used as the middle model's.
    large: OneOf(*MODELS) = "pythia-2.8b"       # Its step time is used as the target's.
    chip: OneOf(*CHIPS) = "h100-sxm"            # Chip whose times these are.
    batches: tuple[Count, ...] = (1, 32, 128)   # Batch sizes; all but one table use the first.
    context: Count = 512                        # Tokens cached for each sequence.
    layer_us: Within(0.0, 1e4) = 10.0           # Time of a layer besides bytes and FLOPs, us.
    alpha_12: Alpha = 0.8                       # Share of small's tokens that middle accepts.
    alpha_23: Alpha = 0.8                       # Share of middle's tokens that large accepts.
    gamma: Within(2, 32) = 12                   # Longest draft for the large model.
    inner: Within(1, 31) = 10                   # Longest draft for the middle one.
    prompts: Within(1, 32) = 3                  # Prompts of held-out code, and as many of prose.
    new_tokens: Within(8, 200) = 40             # Tokens written after each.
    seed: NonNegative = 0                       # Of everything random.

    def __post_init__(self):
        sizes = [model(name).n_params() for name in (self.small, self.middle, self.large)]
        if not sizes[0] < sizes[1] < sizes[2]:
            raise BadInput(f"--small {self.small}, --middle {self.middle} and --large {self.large}"
                           " must grow in this order")
        if self.inner >= self.gamma:
            raise BadInput(f"--inner is {self.inner}: below --gamma {self.gamma} would be right")


A = assumptions(Assumptions)
CHIP, RNG = chip(A.chip), np.random.default_rng(A.seed)

# %% [markdown]
# ## 1. Which q?
#
# The middle model tests the small one's tokens by the rule of demo 04. What comes out, accepted or
# replaced, has the middle model's distribution. It is the draft for the large model, which tests it
# by the same rule. So its q must be the middle model's, even for a token of the small one.
#
# Three random models with a vocabulary of 3 show it. We run the loop for every outcome of its
# random choices, and add up the probabilities of each text of 3 tokens. *TV* (total variation)
# is half the sum of the differences to what the large model writes alone. 0 is lossless.

# %%
def tv_rows():
    """The rows of the table below."""
    large, one, two = RNG.dirichlet(np.ones(3), (3, 3))
    middle, small = (large + one) / 2, (large + one + 2 * two) / 4
    right = CascadeDrafter(Table(middle), ModelDrafter(Table(small)), 2)
    drafters = {"the middle model's": right, "the small model's": Misreporting(right, small)}
    return [[q, loop_tv(Table(large), drafter, 3, 2)] for q, drafter in drafters.items()]


rows = tv_rows()
print_table("exact", ["q reported", "TV"], rows, title="A cascade", formats={"TV": ".3f"})
observe("middle-q-right", "With the right q the TV is {x:.0e}.", value=rows[0][1], at_most=1e-9)
observe("small-q-wrong", "With the wrong q the TV is {x:.3f}.", value=rows[1][1], at_least=0.01)

# %% [markdown]
# ## 2. When it pays
#
# - *c1*, *c2*: the time of a step of the small and of the middle model, over the large one's.
# - *alpha_12*: the share of the small model's tokens that the middle one accepts. *alpha_23*,
#   *alpha_13*: what the large one accepts of the middle one's and of the small one's.
# - *gamma*: tokens drafted for the large model. The middle one writes them in rounds of its own, in
#   each of which the small one drafts up to *inner* tokens.
# - *gain*: the cascade's predicted speed over that of the faster *pair* (one draft and the large
#   model) or plain decoding, each at its best inner and gamma. Formula: llm_math.best_cascade.
# - Each alpha is constant, and alpha_13 is alpha_12 x alpha_23: two independent tests to pass.

# %%
@cache
def step(name, n=1, batch=A.batches[0]):
    """Time of a forward of n tokens per sequence, over a step of the large model."""
    times = [verify_time(shape, CHIP, batch, A.context, m, A.layer_us / 1e6 * shape.n_layers)
             for shape, m in ((model(getattr(A, name)), n), (model(A.large), 1))]
    return times[0] / times[1]


def predict(c1, c2, alpha_12, alpha_23, alpha_13=None):
    """({drafts: (inner, gamma, speed)} at the best lengths, gain), of numbers or arrays."""
    alpha_13 = alpha_12 * alpha_23 if alpha_13 is None else alpha_13
    found = {"small": best_cascade(0.0, alpha_13, 0.0, c1, 0, A.gamma),  # inner 0: a pair
             "middle": best_cascade(0.0, alpha_23, 0.0, c2, 0, A.gamma),
             "cascade": best_cascade(alpha_12, alpha_23, c1, c2, A.inner, A.gamma)}
    return found, found["cascade"][2] / np.maximum(found["small"][2], found["middle"][2])


COSTS = {n: (step("small", 1, n), step("middle", 1, n)) for n in A.batches}
rows = [[n, *c, predict(*c, A.alpha_12, A.alpha_23)[1]] for n, c in COSTS.items()]
print_table("one-step", ["batch", "c1", "c2", "gain"], rows, title=f"Costs on {CHIP.name};"
            f" gain at alpha_12 {A.alpha_12:g}, alpha_23 {A.alpha_23:g}", formats={"gain": ".2f"})

# %%
def case_row(alpha_12, alpha_23):
    """A row of the table below."""
    found, gain = predict(C1, C2, alpha_12, alpha_23)
    inner, gamma, _ = found["cascade"]
    longest = inner == A.inner or A.gamma in [x[1] for x in found.values()]
    return [alpha_12, alpha_23, *(x[2] for x in found.values()), gain, inner, gamma, longest]


C1, C2 = COSTS[A.batches[0]]
CASES = sorted({(A.alpha_12, A.alpha_23), (0.6, 0.6), (0.6, 0.9), (0.9, 0.6), (0.9, 0.9)})
columns = ["alpha_12", "alpha_23", "small", "middle", "cascade", "gain", "inner", "gamma"]
rows = [case_row(*case) for case in CASES]
print_table("cascades", [*columns, "at limit"], rows, formats=dict.fromkeys(columns[2:6], ".2f"),
            title="Predicted speed (plain decoding: 1) where small, middle or both draft for large."
            " at limit: inner or gamma is the largest allowed")
observe("beats-pairs", "If the acceptances were independent, the cascade would beat both pairs in"
        " {x} of these cases.", at_least=1, value=sum(bool(row[5] > 1.005) for row in rows))
observe("longest", "{x} of the cases are at a limit, where longer drafts might be better.",
        value=sum(row[-1] for row in rows), at_most=0)


# %%
def gain_map(c1, c2, cases):
    """The gain over the two acceptances, as a figure, with a mark and its gain for each case."""
    fig, axis = subplots(size=(7.0, 4.6))
    alpha = np.linspace(0.3, 0.98, 35)
    gain = predict(c1, c2, alpha[None, :], alpha[:, None])[1]
    shade = axis.contourf(alpha, alpha, np.clip(gain, 0.7, 1.4), np.linspace(0.7, 1.4, 15),
                          cmap="RdBu", vmin=0.6, vmax=1.4)
    axis.contour(alpha, alpha, gain, levels=[1.005], colors="k", linewidths=1)
    for case in cases:
        axis.plot(*case, "ko", ms=4)
        axis.annotate(f"  {predict(c1, c2, *case)[1]:.2f}", case, va="bottom", fontsize=9)
    axis.set(xlabel="alpha_12, middle accepts small's", ylabel="alpha_23, large accepts middle's",
             title=f"Predicted gain if independent, c1 = {c1:.3f}, c2 = {c2:.3f}")
    fig.colorbar(shade, label="speed over the faster pair's; line: pays by 0.5%")
    return fig


figure("cascade-pays", gain_map(C1, C2, CASES), "where a cascade pays")

# %% tags=["notebook"]
sliders(lambda c1, c2, **case: figure("moved", gain_map(c1, c2, [tuple(case.values())])),
        c1=(0.0, 0.5, 0.01, 0.04), c2=(0.05, 1.0, 0.05, 0.2),
        alpha_12=(0.3, 0.95, 0.05, 0.8), alpha_23=(0.3, 0.95, 0.05, 0.8))

# %% [markdown]
# ## 3. The toy family
#
# Now acceptance is measured on three trained toy models: the mean overlap (demo 07) on texts that
# the large one writes alone. *product* is alpha_12 times alpha_23. The higher alpha_13 is, the
# faster the small model alone: a cascade then gains less than is predicted *with the product*.

# %%
TOY = dict(zip(("small", "middle", "large"), map(toy.load, ("small", "medium", "large"))))
DRAFT = {name: Remembered(TOY[name]) for name in ("small", "middle")}   # no forward twice
PROMPTS = [ids for kind in toy.KINDS for ids in toy.prompts(kind, A.prompts, 32)]
TEXTS = {T: Texts.written(TOY["large"], PROMPTS, A.new_tokens, Sampler(T), RNG) for T in (0, 1)}


def alpha_row(T):
    """A row of the table below."""
    small, middle, large = ((model, Sampler(T)) for model in TOY.values())
    pairs = (small, middle), (middle, large), (small, large)
    a12, a23, a13 = (float(TEXTS[T].overlaps(*pair).mean()) for pair in pairs)
    gains = [predict(C1, C2, a12, a23, x)[1] for x in (a13, a12 * a23)]
    return [str(T), a12, a23, a13, a12 * a23, *gains]


rows = [alpha_row(T) for T in TEXTS]
ALPHA = rows[0][1:4]   # at T 0
columns = ["alpha_12", "alpha_23", "alpha_13", "product", "gain", "with the product"]
print_table("overlap", ["T", *columns], rows, title="Acceptance in the toy family",
            formats=dict(zip(columns, [".3f"] * 4 + [".2f"] * 2)))
observe("not-independent", "alpha_13 is above the product by {x:.3f} or more.", at_least=0.02,
        value=min(row[3] - row[4] for row in rows))

# %% [markdown]
# Now the loop runs at T 0, with the best inner and gamma for these texts. *predicted* is from the
# alphas above, *counted* from the forwards that were run. *differ*: texts that changed.

# %%
def decode(name, inner, gamma, target):
    """(speed, texts that differ from plain ones); target(text): the model that verifies."""
    if name == "cascade":
        drafter, c = CascadeDrafter(DRAFT["middle"], ModelDrafter(DRAFT["small"]), inner), 0.0
    else:
        drafter, c = ModelDrafter(DRAFT[name]), step(name)
    steps = differ = 0
    for text in TEXTS[0].tokens.tolist():
        found, run = speculative_generate(target(text), drafter, text[:32], A.new_tokens, gamma)
        steps += sum(step("large", r.drafted + 1) + r.drafted * c for r in run.rounds)
        for r in drafter.run.rounds if name == "cascade" else []:
            steps += step("middle", r.drafted + 1) + r.drafted * C1
        differ += found.tolist() != text
    return len(PROMPTS) * A.new_tokens / steps, differ


def best_lengths(name):
    """(inner, gamma) with the best speed on the known texts, without a forward of the target."""
    inners = range(1, A.inner + 1) if name == "cascade" else [0]
    lengths = [(i, g) for g in range(1, A.gamma + 1) for i in inners if i < g]
    known = partial(KnownText, model=TOY["large"])
    return max(progress(lengths, name), key=lambda at: decode(name, *at, known)[0])


def run_row(name):
    """A row of the table below."""
    inner, gamma = best_lengths(name)
    alpha, c = (ALPHA[2], C1) if name == "small" else (ALPHA[1], C2)
    drafting = cascade_cost(ALPHA[0], inner, gamma, C1, c)[-1]
    predicted = expected_tokens(alpha, gamma) / (1 + drafting)
    speed, differ = decode(name, inner, gamma, lambda text: TOY["large"])
    return [name, inner, gamma, predicted, speed, predicted / speed, differ]


rows = [run_row(name) for name in ("small", "middle", "cascade")]
columns = ["drafts", "inner", "gamma", "predicted", "counted", "ratio", "differ"]
print_table("runs", columns, rows, title="The speed of both pairs and of the cascade at T 0",
            formats=dict.fromkeys(columns[3:6], ".3f"))
observe("same-text", "{x} texts differ from plain decoding's.", at_most=0,
        value=sum(row[6] for row in rows))
observe("formula-close", "The formula is off by {x:.1%} or less.", at_most=0.1,
        value=max(abs(row[5] - 1) for row in rows))
observe("gain-greedy", "The cascade has {x:.2f} of the speed of the faster pair.", at_most=1.05,
        value=rows[2][4] / max(row[4] for row in rows[:2]))
