# %% [markdown]
# # 01. The memory ceiling
#
# **Question.** Why does a chip that does hundreds of trillions of operations per second write only some
# dozens of tokens per second?
#
# **Watch for.** To write one token, a forward (one run of the model over its inputs) reads every weight once,
# and the cache of everything written so far. The bytes of a forward over the bandwidth set a ceiling that no
# amount of arithmetic raises.
#
# **Takes.** about 3 s; needs numpy, matplotlib.
#
# **Leaves out.** Activations, kernel launches, several chips, and how close to its data sheet a chip really
# comes: sections 1, 2 and 4 are ceilings, section 3 assumes efficiencies. Demo 14 measures a real model.

# %%
from dataclasses import dataclass, replace

from console import (Count, Share, OneOf, Positive, assumptions, figure, fmt_bytes, fmt_time, observe,
                     print_table, sliders, subplots)

import numpy as np

from hw_specs import CHIPS, chip, measure_this_machine
from lab.toy.transformer import Config
from llm_math import ELEMENT_BYTES, MODELS, ModelShape, critical_batch, max_batch, model, verify_time


@dataclass(frozen=True)
class Assumptions:
    chip: OneOf(*CHIPS) = "rtx-4090"
    """Chip of section 1."""
    model: OneOf(*MODELS) = "27b-4bit"
    """Model of section 1."""
    contexts: tuple[Count, ...] = (4096, 32768, 131072, 262144)
    """Context lengths, tokens; the last one is the long one of section 1."""
    models: tuple[OneOf(*MODELS), ...] = ("llama-3.1-70b", "27b-4bit", "llama-3.1-8b", "smollm2-135m")
    """Models of the table over chips."""
    strong: OneOf(*CHIPS) = "l4"
    """A chip with more arithmetic than the next one."""
    wide: OneOf(*CHIPS) = "m3-ultra"
    """A chip with more bandwidth than the last one."""
    serving_chip: OneOf(*CHIPS) = "h100-sxm"
    """Chip of the batches."""
    serving_model: OneOf(*MODELS) = "llama-3.1-8b"
    """Model of the batches."""
    batches: tuple[Count, ...] = (1, 4, 16, 64, 128, 256, 512)
    """Sequences decoded together."""
    serving_context: Count = 1024
    """Context of each sequence, and length of the prefilled prompt, tokens."""
    flop_efficiency: Share = 0.6
    """Share of the peak rate that large products reach."""
    byte_efficiency: Share = 0.8
    """Share of the peak bandwidth that streaming reaches."""
    measure_s: Positive = 1.0
    """Seconds spent on measuring this machine."""


A = assumptions(Assumptions)

# %% [markdown]
# ## 1. One model on one chip
#
# A decode step multiplies a vector with every matrix of the model. Each weight is read from memory, used for
# one multiplication and one addition, and thrown away. So forwards per second, the column passes/s (a pass is
# a forward), are at most bandwidth over bytes, and the share of the chip's arithmetic in use is that rate
# times the FLOPs of a forward. The KV cache is read too, all of it, in every step. Only attention layers have
# one; linear-attention and convolution layers carry a small fixed state. 27B 4-bit has the shape of
# Qwen3.5-27B, its weights in 4 bits, scales and some layers in more.


# %%
def ceiling(shape: ModelShape, on, context: int, kv_dtype: str = "fp16") -> dict:
    """Bytes of a decode step, passes/s at full bandwidth, share of the peak arithmetic, whether it fits."""
    cache = shape.kv_bytes(context, kv_dtype)
    passes = on.bandwidth / (shape.streamed_bytes() + cache)
    return dict(cache=cache, total=shape.streamed_bytes() + cache, passes=passes,
                used=passes * shape.flops(1, context) / on.peak(),
                fits=shape.weight_bytes() + cache <= on.memory)


target, on, long = model(A.model), chip(A.chip), A.contexts[-1]
cases = {"0": (0, "fp16"), f"{long:,} in 4 bits": (long, "int4"), f"{long:,} in 16 bits": (long, "fp16")}
found = {name: ceiling(target, on, *case) for name, case in cases.items()}
print_table("bytes", ["tokens cached", "weights", "cache and state", "passes/s", "arithmetic",
             f"fits {on.memory / 1e9:.0f} GB"],
            [[name, target.streamed_bytes(), c["cache"], c["passes"], c["used"], c["fits"]]
             for name, c in found.items()],
            title=f"{target.name} on {on.name}: bytes of one forward, and the most passes per second",
            formats={"weights": fmt_bytes, "cache and state": fmt_bytes, "passes/s": ".1f",
                     "arithmetic": ".1%"})
empty, small, large = found.values()
observe("little-arithmetic",
        "{name} reads {size} per forward, so {chip} makes at most {passes:.0f} forwards per second and uses "
        "{used:.1%} of its arithmetic: less than a tenth.", name=target.name,
        size=fmt_bytes(empty["total"]), chip=on.name, passes=empty["passes"], used=empty["used"],
        holds=empty["used"] < 0.1)
observe("long-cache-slows",
        "A cache of {n:,} tokens in 4 bits lowers the ceiling to {a:.0f} forwards per second, in 16 bits "
        "to {b:.0f}, less than half of {c:.0f}.", n=long, a=small["passes"], b=large["passes"],
        c=empty["passes"], holds=large["passes"] < empty["passes"] / 2)
observe("long-cache-fits-small", "In 16 bits that cache does not fit beside the weights; in 4 bits it does.",
        holds=small["fits"] and not large["fits"])

# %% [markdown]
# ## 2. Chips, models, caches
#
# The same division for other chips and models. A dash marks weights that do not fit in the chip's memory. The
# ridge is the number of operations a chip can do while it reads one byte; a decode step in 16 bits offers one
# operation per byte.

# %%
models = [model(name) for name in A.models]
print_table("chips", ["chip", "GB/s", "ridge", *(m.name for m in models)],
            [[c.name, c.bandwidth / 1e9, c.ridge(),
              *(ceiling(m, c, 0)["passes"] if m.weight_bytes() <= c.memory else None for m in models)]
             for c in CHIPS.values()],
            title="Most passes per second at batch 1, no cache",
            formats={"GB/s": ".0f", "ridge": ".0f"} | {m.name: ",.0f" for m in models})
strong, wide = chip(A.strong), chip(A.wide)
rate = strong.peak() / wide.peak()
both = [m for m in models if m.weight_bytes() <= min(strong.memory, wide.memory)]
example = max(both or models, key=ModelShape.weight_bytes)
one, other = (ceiling(example, c, 0)["passes"] for c in (strong, wide))
observe("bandwidth-decides",
        "Bandwidth decides, not arithmetic: {a} computes {x:.2f} times as fast as {b}, but of {model}, "
        "which fits both, it makes at most {y:,.0f} forwards per second, fewer than the {z:,.0f} of {b}.",
        a=strong.name, b=wide.name, x=rate, model=example.name, y=one, z=other,
        holds=bool(both) and rate > 1 and one < other)

# %%
dtypes = ("fp16", "int8", "int4")
grid = {(n, d): ceiling(target, on, n, d) for n in A.contexts for d in dtypes}
print_table("cache-dtypes", ["context", *(f"{d} cache" for d in dtypes), *(f"{d} passes/s" for d in dtypes)],
            [[n, *(grid[n, d]["cache"] for d in dtypes), *(grid[n, d]["passes"] for d in dtypes)]
             for n in A.contexts],
            title=f"{target.name} on {on.name}: the cache's dtype and the context",
            formats={f"{d} cache": fmt_bytes for d in dtypes} | {f"{d} passes/s": ".1f" for d in dtypes})
equal = target.streamed_bytes() / target.kv_bytes_per_token("fp16")
observe("cache-outgrows-weights",
        "From {n:,.0f} tokens on, a 16-bit cache is more than the weights; the table reaches that.", n=equal,
        holds=equal <= max(A.contexts))

# %% tags=["notebook"]
sliders(lambda context, bits: print_table("slider",
    ["context", "bits", "cache", "passes/s"],
    [[context * 1024, bits, (c := ceiling(target, on, context * 1024, bits / 8))["cache"], c["passes"]]],
    formats={"cache": fmt_bytes, "passes/s": ".1f"}), context=(0, 512, 16, 256), bits=(2, 16, 1, 4))

# %% [markdown]
# ## 3. Batches
#
# Weights read once can serve many sequences. Decoding a batch costs hardly more time than decoding one
# sequence, up to the critical batch, where the arithmetic takes as long as the reading. That holds for the
# weights. Each sequence's cache serves that sequence alone: where reading it takes longer than the sequence's
# arithmetic, no batch ever becomes bound by arithmetic, and throughput levels off for want of bandwidth.

# %%
server, served, n_ctx = chip(A.serving_chip), model(A.serving_model), A.serving_context
how = dict(overhead=0.0, flop_efficiency=A.flop_efficiency, byte_efficiency=A.byte_efficiency)
batches = np.array(A.batches)
bare = verify_time(served, server, batches, 0, 1, **how)
full = verify_time(served, server, batches, n_ctx, 1, **how)
most = max_batch(served, server, n_ctx)
at = f"{n_ctx} tokens"
columns = ["batch", "step, no cache", "tokens/s, no cache", f"step, {at}", f"tokens/s, {at}", "each", "fits"]
print_table("batches", columns,
            [[int(b), t, b / t, u, b / u, 1 / u, b <= most] for b, t, u in zip(batches, bare, full)],
            title=f"{served.name} on {server.name}: throughput and latency",
            formats={"step, no cache": fmt_time, f"step, {at}": fmt_time} | {
                name: ",.0f" for name in ("tokens/s, no cache", f"tokens/s, {at}", "each")})
critical = critical_batch(server, served.bytes_per_weight, flop_efficiency=A.flop_efficiency,
                          byte_efficiency=A.byte_efficiency)
below = int(batches[batches <= critical].max(initial=batches.min()))
growth = verify_time(served, server, below, 0, 1, **how) / verify_time(served, server, 1, 0, 1, **how)
observe("critical-batch",
        "The critical batch is {n:.0f} tokens per forward: without a cache, decoding {b} sequences "
        "takes {x:.2f} times the time of one, less than 1.05.", n=critical, b=below, x=growth,
        holds=below > 1 and growth < 1.05)
cache_s = served.kv_bytes(n_ctx) / (server.bandwidth * A.byte_efficiency)
math_s = served.flops(1, n_ctx) / (server.peak() * A.flop_efficiency)
observe("cache-bound",
        "With {n} tokens of cache each, a further sequence costs {a} of reading, more than its {b} of "
        "arithmetic, so no batch is bound by arithmetic.", n=n_ctx, a=fmt_time(cache_s), b=fmt_time(math_s),
        holds=cache_s > math_s)

# %% [markdown]
# ## 4. The roofline
#
# Operations per byte on one axis, operations per second on the other. Left of the ridge a program is bound by
# bandwidth, right of it by arithmetic. Prefill sends a whole prompt through the weights at once, and
# speculative decoding will move decode steps to the right by verifying several tokens in one forward. The
# points are ceilings, at the peak rates of the data sheet.


# %%
def point(shape: ModelShape, machine, batch: int, context: int, n: int) -> tuple[float, float]:
    """(FLOP per byte, FLOP/s) of one forward at full efficiency."""
    flops = batch * shape.flops(n, context)
    seconds = verify_time(shape, machine, batch, context, n, 0.0, flop_efficiency=1, byte_efficiency=1)
    return flops / (shape.streamed_bytes() + batch * shape.kv_bytes(context)), flops / seconds


largest = max(int(batches[batches <= most].max(initial=1)), 1)
points = {"decode, batch 1": (1, n_ctx, 1), f"decode, batch {largest}": (largest, n_ctx, 1),
          "decode, 8 tokens at once": (1, n_ctx, 8), f"prefill, {n_ctx} tokens": (1, 0, n_ctx)}
places = {name: point(served, server, *where) for name, where in points.items()}
print_table("roofline", ["forward", "FLOP/byte", "TFLOP/s", "of peak"],
            [[name, x, y / 1e12, y / server.peak()] for name, (x, y) in places.items()],
            title=f"{served.name} on {server.name}, ridge {server.ridge():.0f} FLOP/byte",
            formats={"of peak": ".1%"})
(decode, _), (prefill, _) = places["decode, batch 1"], places[f"prefill, {n_ctx} tokens"]
observe("two-sides",
        "Decode at batch 1 does {a:.2g} FLOP per byte, prefill {b:.0f}: they lie on two sides of the ridge "
        "at {r:.0f}.", a=decode, b=prefill, r=server.ridge(), holds=decode < server.ridge() < prefill)

fig, axis = subplots(size=(7.0, 4.2))
for machine, color in {server: "C0", on: "C7"}.items():
    x = np.geomspace(0.3, 3000, 400)
    axis.loglog(x, np.minimum(x * machine.bandwidth, machine.peak()), color=color, label=machine.name)
for (name, (x, y)), marker in zip(places.items(), "os^D"):
    axis.plot(x, y, marker, color="C0", label=f"{served.name}: {name}")
axis.plot(*point(target, on, 1, 0, 1), "o", color="C7", label=f"{target.name}: decode, batch 1")
axis.set(xlabel="FLOP per byte read", ylabel="FLOP/s", title="Roofline: what bounds a forward")
axis.legend(fontsize=8)
axis.grid(alpha=0.3)
figure("roofline", fig, "roofline with decode and prefill")

# %% [markdown]
# ## 5. This machine
#
# Measured with numpy: how fast memory is read, and how fast matrices are multiplied, in 32 bits. The ceilings
# that follow are for weights read from memory; the toy of the next demos is so small that a processor's cache
# can hold it, and may then run above its ceiling.

# %%
def low_to_high(spread: tuple[float, float]) -> str:
    return " to ".join(f"{rate / 1e9:.3g}" for rate in spread)


machine = measure_this_machine(A.measure_s)
print_table("this-machine", ["reading", "median", "quartiles"],
            [["read bandwidth, GB/s", machine.bandwidth / 1e9, low_to_high(machine.bandwidth_spread)],
             ["float32 rate, GFLOP/s", machine.peak() / 1e9, low_to_high(machine.flops_spread)],
             ["ridge, FLOP/byte", machine.ridge(), None]],
            title="This machine, measured", measured=["median", "quartiles"])
here = {}
smollm2 = model("smollm2-135m")
for shape, dtype in ((Config().shape(), "fp32"), (smollm2, "fp32"), (smollm2, "bf16")):
    sized = replace(shape, bytes_per_weight=ELEMENT_BYTES[dtype])
    here[shape.name, dtype] = sized, ceiling(sized, machine, 0, dtype)
print_table("ceilings-here", ["model", "parameters", "dtype", "bytes per forward", "passes/s at most", "arithmetic"],
            [[name, s.n_params(), dtype, s.streamed_bytes(), got["passes"], got["used"]]
             for (name, dtype), (s, got) in here.items()],
            title="Ceilings here, no cache", measured=["passes/s at most", "arithmetic"],
            formats={"parameters": ",d", "bytes per forward": fmt_bytes,
                     "passes/s at most": ",.0f", "arithmetic": ".0%"})
smol, its = here["SmolLM2-135M", "fp32"]
observe("smollm-bound",
        "SmolLM2-135M in 32 bits writes at most {n:.0f} tokens per second here, bound by memory too: its "
        "arithmetic would fill {used:.0%} of the time, less than all of it.", n=its["passes"],
        used=its["used"], measured=True, holds=its["used"] < 1)
width = critical_batch(machine, 4.0, flop_efficiency=1, byte_efficiency=1)
observe("width-here",
        "By these two rates alone, up to {n} tokens per forward would cost no more than one; demo 14 "
        "measures it. That is fewer than the {m:.0f} of {chip}, which rest on its data sheet and the "
        "efficiencies assumed in section 3.", n=max(int(width), 1), m=critical, chip=server.name,
        measured=True, holds=width < critical)
