# %% [markdown]
# # 01. The memory ceiling
#
# **Question.** Why does a chip that does hundreds of trillions of operations per second write only
# a few dozen tokens per second?
#
# **Watch for.** To write one token, the chip reads every weight and the whole cache once. Bandwidth
# over bytes is a ceiling that no amount of arithmetic raises.
#
# **Takes.** about 3 s; needs numpy, matplotlib.
#
# **Leaves out.** Activations, kernel launches, several chips. Data sheets give ceilings; demo 14
# measures a real model.

# %%
from dataclasses import dataclass, replace

from console import (Count, OneOf, Positive, Share, assumptions, figure, observe, print_table,
                     sliders, subplots)

import numpy as np

from hw_specs import CHIPS, chip, measure_this_machine
from llm_math import MODELS, critical_batch, max_batch, model, verify_time


@dataclass(frozen=True)
class Assumptions:
    chip: OneOf(*CHIPS) = "rtx-4090"  # Chip of section 1.
    model: OneOf(*MODELS) = "27b-4bit"  # Model of section 1.
    context: Count = 262144  # Tokens in the long cache of section 1.
    models: tuple[OneOf(*MODELS), ...] = (
        "llama-3.1-70b", "27b-4bit", "llama-3.1-8b", "smollm2-135m")  # Models of section 2.
    strong: OneOf(*CHIPS) = "l4"  # Section 2: a chip with more FLOPs per second than `wide`.
    wide: OneOf(*CHIPS) = "m3-ultra"  # Section 2: a chip with more bandwidth than `strong`.
    serving_chip: OneOf(*CHIPS) = "h100-sxm"  # Chip of section 3.
    serving_model: OneOf(*MODELS) = "llama-3.1-8b"  # Model of section 3.
    batches: tuple[Count, ...] = (1, 4, 16, 64, 128, 256, 512)  # Sequences decoded together.
    serving_context: Count = 1024  # Tokens in each sequence's cache; also the length of a prompt.
    flop_efficiency: Share = 0.6  # Share of the peak rate that large products reach.
    byte_efficiency: Share = 0.8  # Share of the peak bandwidth that reading weights reaches.
    measure_s: Positive = 1.0  # Seconds spent on measuring this machine.


A = assumptions(Assumptions)

# %% [markdown]
# ## 1. One model on one chip
#
# A *forward* is one run of the model. A forward that writes one token is a *step*. A step reads
# each weight from memory and uses it for one multiplication and one addition: 2 FLOPs. It also
# reads the whole KV cache, the keys and values of all tokens so far, and does a few FLOPs for each
# value in it. So:
#
# 1. bytes read = weights + cache
# 2. forwards per second = bandwidth / bytes read, at most
# 3. arithmetic in use = forwards per second x FLOPs of a forward / peak FLOPs per second
#
# The model 27B 4-bit is Qwen3.5-27B with most of its weights in 4 bits. Some of its layers keep a
# state of fixed size instead of a cache. That state is read too, so its cache is above 0 bytes even
# at 0 tokens. Peak rates are for 16-bit numbers, without sparsity. A dash means that weights and
# cache do not fit in the chip's memory.

# %%
def step(shape, on, tokens=0, bits=16):
    """Bytes, FLOPs and top rate of a step with `tokens` cached, at `bits` bits per value."""
    cache, flops = shape.kv_bytes(tokens, bits / 8), shape.flops(1, tokens)
    read, held = shape.streamed_bytes() + cache, shape.weight_bytes() + cache
    rate = None if held > on.memory else on.bandwidth / read
    used = None if rate is None else rate * flops / on.peak()
    return {"cache": cache, "read": read, "held": held, "flops": flops, "rate": rate, "used": used}


def cache_row(tokens, bits):
    """A row of the table below."""
    s = step(TARGET, ON, tokens, bits)
    return [tokens, bits, s["cache"] / 1e9, s["read"] / 1e9, s["flops"] / 1e9, s["rate"], s["used"]]


def show_caches(id, cases):
    """The table of (tokens, bits) cases."""
    columns = ["cached tokens", "bits per value", "cache, GB", "read, GB", "GFLOP", "forwards/s"]
    print_table(id, [*columns, "arithmetic in use"], [cache_row(*case) for case in cases],
                title=f"One step of {TARGET.name} on {ON.name} ({ON.bandwidth / 1e9:.0f} GB/s, "
                f"{ON.peak() / 1e12:.0f} TFLOP/s)", formats={"arithmetic in use": ".1%"})


# %%
TARGET, ON = model(A.model), chip(A.chip)
show_caches("bytes", [(0, 16), (A.context, 4), (A.context, 8), (A.context, 16)])
empty = step(TARGET, ON)
observe("little-arithmetic", "With an empty cache a step does {a:.1f} FLOPs per byte, so at most"
        " {x:.1%} of the arithmetic of {chip} can be in use.", a=empty["flops"] / empty["read"],
        chip=ON.name, value=empty["flops"] / empty["read"] / ON.ridge(), at_most=0.05)
observe("long-cache-slows", "With {n:,} tokens cached in 16 bits a step reads {x:.2f} times as many"
        " bytes.", n=A.context, at_least=2,
        value=step(TARGET, ON, A.context)["read"] / empty["read"])
observe("long-cache-fits-in-4-bits", "In 4 bits that cache and the whole model take"
        " {x:.0%} of the chip's {memory:.0f} GB.", memory=ON.memory / 1e9, at_most=1,
        value=step(TARGET, ON, A.context, 4)["held"] / ON.memory)

# %% tags=["notebook"]
sliders(lambda cached, bits: show_caches("slider", [(cached, bits)]),
        cached=(0, 524288, 16384, 262144), bits=(2, 16, 1, 4))

# %% [markdown]
# ## 2. Other models, other chips
#
# First, how much of each model a step reads. The input embedding is a table with one row per token
# of the vocabulary, and a step reads one row of it. In some models (*tied*) the same table is also
# the output head, which is read whole. In others the head is a table of its own.

# %%
SHAPES = [model(name) for name in A.models]
print_table("models", ["model", "parameters", "in memory, GB", "read by a step, GB"],
            [[m.name, m.n_params(), m.weight_bytes() / 1e9, m.streamed_bytes() / 1e9]
             for m in SHAPES], formats={"parameters": ",d", "in memory, GB": ".1f"})

# %% [markdown]
# Now each model on each chip: bandwidth over the bytes that a step *reads*, not those in memory. A
# dash means that the weights do not fit in the chip's memory (GB). The *ridge* is the number of
# FLOPs that a chip does in the time in which it reads one byte. A step in 16 bits does about 1 per
# byte: 2 FLOPs for the 2 bytes of a weight.


# %%
def chip_row(on):
    """Bandwidth, ridge, memory, and the forwards per second of each model."""
    rates = [step(m, on)["rate"] for m in SHAPES]
    return [on.name, on.bandwidth / 1e9, on.ridge(), on.memory / 1e9, *rates]


# %%
columns = ["chip", "GB/s", "ridge", "GB", *(m.name for m in SHAPES)]
print_table("chips", columns, [chip_row(on) for on in CHIPS.values()],
            formats=dict.fromkeys(columns[3:], ",.0f"),
            title="Forwards per second, at most: one sequence, empty cache")
strong, wide = chip(A.strong), chip(A.wide)
observe("bandwidth-decides", "{a} can do {r:.2f} times the FLOPs of {b}, but {x:.2f} times its"
        " forwards per second.", a=strong.name, b=wide.name, r=strong.peak() / wide.peak(),
        value=strong.bandwidth / wide.bandwidth, at_most=1)

# %% [markdown]
# ## 3. More tokens per forward
#
# Weights that were read once can serve many sequences. A step of a whole batch costs hardly more
# time than a step of one sequence, up to the *critical batch*. Beyond it the arithmetic takes
# longer than the reading. The critical batch is ridge x bytes per weight / 2 FLOPs x
# flop_efficiency / byte_efficiency. These two are the shares of its peak rates that a chip reaches.
#
# That holds for the weights. A cache serves only its own sequence. Where reading it takes longer
# than the sequence's arithmetic, memory stays the limit, however large the batch.


# %%
SERVER, SERVED, N = chip(A.serving_chip), model(A.serving_model), A.serving_context
REACHED = {"flop_efficiency": A.flop_efficiency, "byte_efficiency": A.byte_efficiency}


def batch_row(batch):
    """Time of a step and tokens per second, without caches and with; whether both fit."""
    bare = verify_time(SERVED, SERVER, batch, 0, n=1, overhead=0, **REACHED)
    full = verify_time(SERVED, SERVER, batch, N, n=1, overhead=0, **REACHED)
    fits = batch <= max_batch(SERVED, SERVER, N)
    return [batch, bare * 1e3, batch / bare, full * 1e3, batch / full, fits]


# %%
columns = ["batch", "step, ms", "tokens/s", "ms with caches", "tokens/s with caches", "fits"]
print_table("batches", columns, [batch_row(batch) for batch in A.batches],
            title=f"{SERVED.name} on {SERVER.name}, without caches and with {N:,} tokens each",
            formats=dict.fromkeys((columns[2], columns[4]), ",.0f"))
critical = critical_batch(SERVER, SERVED.bytes_per_weight, **REACHED)
below = max((b for b in A.batches if b <= critical), default=min(A.batches))
observe("critical-batch", "The critical batch is {n:.0f}. Without caches a step of {b} sequences"
        " takes {x:.2f} times as long as a step of one.", n=critical, b=below,
        value=batch_row(below)[1] / batch_row(1)[1], at_most=1.05)
observe("cache-bound", "Reading a sequence's cache takes {x:.2f} times as long as its arithmetic.",
        at_least=1, value=SERVED.kv_bytes(N) / SERVED.flops(1, N) * SERVER.ridge()
        * A.flop_efficiency / A.byte_efficiency)

# %% [markdown]
# The *roofline* shows this as a picture: FLOPs per byte against FLOPs per second, at peak rates.
# Left of the ridge memory is the limit, right of it arithmetic. Prefill sends a whole prompt in one
# forward. Speculative decoding will send a few tokens at once, and so move a step to the right.


# %%
def point(shape, on, batch, tokens, n):
    """FLOPs per byte and per second; each sequence sends n tokens behind `tokens` cached ones."""
    read = shape.streamed_bytes() + batch * shape.kv_bytes(tokens)
    per_byte = batch * shape.flops(n, tokens) / read
    return per_byte, min(on.peak(), per_byte * on.bandwidth)


def roofline(points):
    """The figure: the most that two chips can do, and the points under it."""
    fig, axis = subplots(size=(7.0, 4.2))
    x = np.geomspace(0.3, 3000, 400)
    for on, color in {SERVER: "C0", ON: "C7"}.items():
        most = np.minimum(x * on.bandwidth, on.peak())
        axis.loglog(x, most, color=color, label=f"{on.name}, at most")
    for (name, place), marker in zip(points.items(), "os^D"):
        axis.plot(*place, marker, color="C0", label=f"{SERVED.name}: {name}")
    axis.plot(*point(TARGET, ON, 1, 0, 1), "o", color="C7", label=f"{TARGET.name}: decode, batch 1")
    axis.set(xlabel="FLOPs per byte read", ylabel="FLOPs per second", title="What limits a forward")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
    return fig


# %%
largest = max((b for b in A.batches if batch_row(b)[-1]), default=1)
POINTS = {
    "decode, batch 1": point(SERVED, SERVER, 1, N, 1),
    f"decode, batch {largest}": point(SERVED, SERVER, largest, N, 1),
    "decode, 8 tokens at once": point(SERVED, SERVER, 1, N, 8),
    f"prefill, {N} tokens": point(SERVED, SERVER, 1, 0, N),
}
print_table("roofline", ["forward", "FLOP/byte", "TFLOP/s", "of peak"],
            [[name, x, y / 1e12, y / SERVER.peak()] for name, (x, y) in POINTS.items()],
            title=f"{SERVED.name} on {SERVER.name}", formats={"of peak": ".1%"})
observe("prefill-past-the-ridge", "The ridge is at {r:.0f} FLOPs per byte. Prefill of {n:,} tokens"
        " does {x:.0f}.", r=SERVER.ridge(), n=N, value=point(SERVED, SERVER, 1, 0, N)[0],
        at_least=SERVER.ridge())

# %%
figure("roofline", roofline(POINTS), "roofline with decode and prefill")

# %% [markdown]
# ## 4. This machine
#
# Now the same numbers for your machine. numpy measures how fast it reads memory, and how fast it
# multiplies matrices of 32-bit numbers. From the two follow a critical batch and a ceiling. Demo 14
# measures how close SmolLM2-135M, the model of the real demos, comes to its ceiling.

# %%
HERE = measure_this_machine(A.measure_s)
print_table("this-machine", ["billions per second", "median", "1st quartile", "3rd quartile"], [
    ["bytes read", HERE.bandwidth / 1e9, *np.divide(HERE.bandwidth_spread, 1e9)],
    ["float32 FLOPs", HERE.peak() / 1e9, *np.divide(HERE.flops_spread, 1e9)],
], title="This machine, measured", measured=["median", "1st quartile", "3rd quartile"])
observe("width-here", "The critical batch here is {x:.0f}, against {n:.0f} on {chip}.",
        measured=True, at_most=critical, n=critical, chip=SERVER.name,
        value=critical_batch(HERE, 4.0, flop_efficiency=1, byte_efficiency=1))
smollm2 = step(replace(model("smollm2-135m"), bytes_per_weight=4), HERE)
observe("smollm-bound", "SmolLM2-135M in 32 bits makes at most {n:.0f} forwards per second here,"
        " which keep {x:.0%} of the arithmetic in use.", n=HERE.bandwidth / smollm2["read"],
        value=smollm2["flops"] / smollm2["read"] / HERE.ridge(), at_most=1, measured=True)
