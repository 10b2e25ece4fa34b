# %% [markdown]
# # 05. Speculative decoding on hardware
#
# **Question.** How long should a draft be on a given chip, and when does speculation stop paying?
#
# **Watch for.** Verifying a few tokens takes as long as writing one: reading the weights takes
# longer than the arithmetic. A batch uses up that spare arithmetic. A tree uses it up faster.
#
# **Takes.** about 3 s; needs numpy, matplotlib, tokenizers, safetensors.
#
# **Leaves out.** Measured times (demo 14), and running the trees of section 3 (demo 06).

# %%
from dataclasses import dataclass, replace

from console import (Alpha, Count, OneOf, Share, Within, assumptions, figure, fmt_bytes, observe,
                     print_table, sliders)

import numpy as np

from hw_specs import CHIPS, chip
from lab.measure.tree_ranks import TREES, taus
from lab.support.charts import heat_map
from llm_math import MODELS, best_round, max_batch, model, verify_time


@dataclass(frozen=True)
class Assumptions:
    chip: OneOf(*CHIPS) = "h100-sxm"                # Chip.
    target: OneOf(*MODELS) = "llama-3.1-8b"         # Target model.
    draft: OneOf(*MODELS) = "llama-3.2-1b"          # Draft model, sections 1 and 2.
    batch: Count = 1                                # Sequences decoded together, section 1.
    context: Count = 1024                           # Tokens cached per sequence, sections 1 and 3.
    alpha: Alpha = 0.8                              # Acceptance rate of a drafted token.
    alphas: tuple[Alpha, ...] = (0.6, 0.7, 0.8, 0.9)  # Acceptance rates of section 1.
    sent: tuple[Count, ...] = (1, 2, 5, 9, 33, 129, 257)  # Tokens of one target forward.
    batches: tuple[Count, ...] = (1, 4, 16, 64, 128, 256, 512)  # Batches of section 2.
    contexts: tuple[Count, ...] = (512, 2048, 8192, 32768)  # Contexts of section 2, tokens.
    overhead_target_ms: Within(0.0, 1e6) = 1.0      # Added to a target forward (launches), ms.
    overhead_draft_ms: Within(0.0, 1e6) = 0.3       # The same for the draft model, ms.
    flop_efficiency: Share = 0.6                    # Share of the peak FLOP rate that is reached.
    byte_efficiency: Share = 0.8                    # Share of the peak bandwidth that is reached.
    tree_batches: tuple[Count, ...] = (1, 32)       # Batches of section 3.
    trained_layer: Within(0.0, 1e6) = 0.05          # Time of the trained layer over the target's.
    int4_bytes: Within(0.5, 1.0) = 0.5625           # Bytes per int4 weight, 1 scale for 32 weights.
    sequences: Within(1, 512) = 64                  # Texts that the toy writes.


A = assumptions(Assumptions)
CHIP, TARGET, DRAFT = chip(A.chip), model(A.target), model(A.draft)
EFFICIENCY = {"flop_efficiency": A.flop_efficiency, "byte_efficiency": A.byte_efficiency}

# %% [markdown]
# ## 1. One chip, one pair of models
#
# The time of a forward is the larger of two times, plus an overhead:
#
# 1. Reading: the weights once, and the cache of every sequence.
# 2. Arithmetic: 2 FLOPs per weight and token sent, plus attention to all earlier tokens, the sent
#    ones included.
#
# A step is a forward of one token. c is a draft step's time over a target step's.

# %%
def seconds(n=1, batch=A.batch, context=A.context, shape=TARGET, extra_ms=A.overhead_target_ms):
    """Time of one forward that sends n tokens for each sequence."""
    return verify_time(shape, CHIP, batch, context, n, extra_ms / 1e3, **EFFICIENCY)


def step_row(shape, extra_ms):
    """[model, bytes of its weights, overhead, its step (both in ms), c]"""
    step = seconds(shape=shape, extra_ms=extra_ms)
    return [shape.name, fmt_bytes(shape.streamed_bytes()), extra_ms, step * 1e3, step / seconds()]


print_table("one-step", ["model", "weights read", "overhead, ms", "step, ms", "c"],
            [step_row(TARGET, A.overhead_target_ms), step_row(DRAFT, A.overhead_draft_ms)],
            title=f"One decode step on {CHIP.name}, batch {A.batch}, context {A.context}")
observe("fits", "Memory holds both models and {x} sequences of {n} tokens.", n=A.context,
        value=max_batch(TARGET, CHIP, A.context, draft=DRAFT), at_least=A.batch)

# %%
def forward_row(n):
    """[tokens, reading, arithmetic, the whole forward (all in ms), its time over a step's]"""
    read = TARGET.streamed_bytes() + A.batch * TARGET.kv_bytes(A.context)
    reading = read / (CHIP.bandwidth * A.byte_efficiency)
    arithmetic = A.batch * TARGET.flops(n, A.context) / (CHIP.peak() * A.flop_efficiency)
    return [n, reading * 1e3, arithmetic * 1e3, seconds(n) * 1e3, seconds(n) / seconds()]


print_table("verify-ratio", ["tokens", "reading, ms", "arithmetic, ms", "time, ms", "verify ratio"],
            [forward_row(n) for n in A.sent], formats={"verify ratio": ".3f"},
            title="One target forward; verify ratio: its time over a step's")

# %% [markdown]
# A round makes gamma draft steps, then one target forward of gamma + 1 tokens. It yields tau
# tokens: the accepted ones and the target's own. The speedup is tau / (gamma c + verify ratio).
# *pays above*: one drafted token pays if alpha is above this, c - 1 + the verify ratio of 2 tokens.

# %%
COLUMNS = {"gamma": "d", "c": ".3f", "tau": ".2f", "verify ratio": ".2f", "speedup": ".2f",
           "pays above": ".2f"}  # and the digits that they show


def plan(context, batch, alpha):
    """{column: value} at the best gamma; a gamma of 0 is plain decoding."""
    overheads = A.overhead_target_ms / 1e3, A.overhead_draft_ms / 1e3
    gamma, best = best_round(TARGET, DRAFT, CHIP, batch, context, alpha, *overheads, **EFFICIENCY)
    found = (best.tau, best.verify_ratio, best.speedup) if best else (1.0, 1.0, 1.0)
    step = seconds(1, batch, context)
    c = seconds(1, batch, context, DRAFT, A.overhead_draft_ms) / step
    return dict(zip(COLUMNS, [gamma, c, *found, c + seconds(2, batch, context) / step - 1]))


print_table("best-gamma", ["alpha", *COLUMNS], formats=COLUMNS, title="The best draft length",
            rows=[[alpha, *plan(A.context, A.batch, alpha).values()] for alpha in A.alphas])
best = plan(A.context, A.batch, A.alpha)
observe("verify-cheap", "At alpha {a:g} verifying {n} tokens takes {x:.1%} more than a step.",
        a=A.alpha, n=best["gamma"] + 1, value=best["verify ratio"] - 1, at_most=0.05)
observe("fast-enough", "At alpha {a:g} the best gamma, {g}, has a speedup of {x:.2f}.",
        a=A.alpha, g=best["gamma"], value=best["speedup"], at_least=1.5)

# %% [markdown]
# ## 2. Batch and context
#
# The weights are read once for the whole batch, but each sequence needs its own arithmetic: a large
# batch leaves none to spare. A long cache raises c: the draft slows by a larger share. At a large
# batch a long cache also helps: while it is read, the arithmetic units are free to verify.

# %%
def fits(context, batch):
    return batch <= max_batch(TARGET, CHIP, context, draft=DRAFT)


PLACES = [(n, b) for n in A.contexts for b in A.batches]
CELLS = {(n, b): plan(n, b, A.alpha) for n, b in PLACES if fits(n, b)}
print_table("grid", ["context", "batch", *COLUMNS],
            [[*place, *row.values()] for place, row in CELLS.items()], formats=COLUMNS,
            title=f"The best draft length where both models fit, alpha {A.alpha:g}")
observe("pays-where-fits", "At alpha {a:g} drafting pays in {x} of {n} cases.", n=len(CELLS),
        a=A.alpha, value=sum(row["gamma"] > 0 for row in CELLS.values()), at_least=len(CELLS))


def compare(id, places, **bounds):
    """Observe the speedup at the last of some places in the table over that at the first."""
    if len(places) > 1:
        (n, b), (m, k) = min(places), max(places)
        observe(id, "Context {m}, batch {k} has {x:.2f} x the speedup of context {n}, batch {b}.",
                n=n, b=b, m=m, k=k, value=CELLS[m, k]["speedup"] / CELLS[n, b]["speedup"], **bounds)


large = max((b for n, b in CELLS if n > min(A.contexts)), default=0)   # fits a longer context, too
compare("batch-lowers", [at for at in CELLS if at[0] == min(A.contexts)], at_most=0.95)
compare("context-small-batch", [at for at in CELLS if at[1] == min(A.batches)], at_least=0.9)
compare("context-large-batch", [at for at in CELLS if at[1] == large], at_least=1.0)

# %%
def speedup_map(alpha):
    """The speedup over batch and context, as a figure."""
    found = [plan(n, b, alpha)["speedup"] if fits(n, b) else np.nan for n, b in PLACES]
    rows = np.reshape(found, (len(A.contexts), len(A.batches)))
    title = f"Speedup at alpha = {alpha:g} on {CHIP.name} ({CHIP.memory / 1e9:.0f} GB)"
    return heat_map(rows, ("batch, sequences", A.batches), ("context, tokens", A.contexts), title,
                    "speedup over plain decoding", absent="too big")


figure("speedup", speedup_map(A.alpha), "speedup over batch and context")

# %% tags=["notebook"]
sliders(lambda alpha: figure("moved", speedup_map(alpha), f"alpha = {alpha:g}"),
        alpha=(0.05, 0.95, 0.05, 0.8))

# %% [markdown]
# ## 3. Trees
#
# A tree has several candidates per position: 4x2x2x1 has four at the root, two below each of these,
# and so on. Its tau follows from *ranks*. The draft sorts all tokens by probability: the likeliest
# has rank 0. A node's first child is the token of rank 0, its second the token of rank 1.
#
# 1. A toy target writes texts greedily. Find the rank of each new token in the draft's list.
# 2. From any token, walk down the tree: to the child with the next token's rank, if it exists.
# 3. tau is 1 plus the number of levels gone down, on average over all starts.
#
# - **First layer**: the first layer of the target, and its output head. Not trained to predict.
# - **Trained layer**: the first layer of *large-exit* (demo 03), for that target.
# - **Int4 copy**: the whole target in 4 bits.

# %%
TAU = {
    "first layer": taus("first layer", "large", "code", A.sequences),
    "trained layer": taus("first layer", "large-exit", "code", A.sequences),
    "int4 copy": taus("int4 copy", "large", "code", A.sequences),
}


def tau_row(tree):
    return [tree, len(TREES[tree]), *(TAU[draft][tree] for draft in TAU)]


print_table("tree-tau", ["tree", "nodes", *TAU], [tau_row(tree) for tree in TREES], title="tau",
            formats=dict.fromkeys(TAU, ".2f"))

# %% [markdown]
# Next: the toy's taus with section 1's times. The costs of the first layer and the int4 copy are
# those of section 1's target, cut or rounded like this. The trained layer plays the part of EAGLE
# (arXiv 2401.15077), a drafter of one layer. Its cost is assumed, and less than the first layer's:
# EAGLE-3 has a smaller output head. One forward of w tokens drafts the children of w nodes.

# %%
def draft_forward(draft, n, batch):
    """Time of one forward of a draft that sends n tokens for each sequence."""
    if draft == "trained layer":
        return A.trained_layer * seconds(n, batch)
    if draft == "int4 copy":
        return seconds(n, batch, shape=replace(TARGET, bytes_per_weight=A.int4_bytes))
    layer = replace(TARGET, n_layers=1, n_windowed=0, n_conv=0, n_linear=0)
    return seconds(n, batch, shape=layer, extra_ms=A.overhead_target_ms / TARGET.n_layers)


print_table("draft-prices", ["draft", "c"], title="A draft's step over the target's, batch 1",
            rows=[[draft, draft_forward(draft, 1, 1) / seconds(1, 1)] for draft in TAU])

# %%
def tree_speedup(tree, draft, batch):
    """Speed of a tree over plain decoding's."""
    levels = [1, *np.bincount(TREES[tree].depths)[1:-1].tolist()]   # nodes with children
    drafting = sum(draft_forward(draft, n, batch) for n in levels)
    return TAU[draft][tree] * seconds(1, batch) / (drafting + seconds(len(TREES[tree]) + 1, batch))


def tree_row(tree, batch):
    """[tree, tokens sent, verify ratio, the speedup with each draft]"""
    sent = len(TREES[tree]) + 1
    speedups = [tree_speedup(tree, draft, batch) for draft in TAU]
    return [tree, sent, seconds(sent, batch) / seconds(1, batch), *speedups]


for batch in A.tree_batches:
    print_table(f"tree-speedup-{batch}", ["tree", "tokens sent", "verify ratio", *TAU],
                [tree_row(tree, batch) for tree in TREES], title=f"Speedup at batch {batch}",
                formats=dict.fromkeys(["verify ratio", *TAU], ".2f"))

# %%
many = max(A.tree_batches)
observe("width-at-batch", "Trained layer at batch {b}: 4x2x2x1 has {x:.2f} of the speed of"
        " 1x1x1x1.", b=many, at_most=1, value=tree_speedup("4x2x2x1", "trained layer", many)
        / tree_speedup("1x1x1x1", "trained layer", many))
observe("tau-no-speedup", "int4 copy, 4x4x4x4: tau is {t:.2f}, the speed at batch {b} is {x:.2f} of"
        " plain decoding's.", t=TAU["int4 copy"]["4x4x4x4"], b=many, at_most=1,
        value=tree_speedup("4x4x4x4", "int4 copy", many))
