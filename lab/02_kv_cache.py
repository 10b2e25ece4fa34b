# %% [markdown]
# # 02. The KV cache
#
# **Question.** What does a KV cache save, what does it cost, and what work is left in a step?
#
# **Watch for.** Without a cache, the work for a text grows with the square of its length. With one,
# about in proportion. But a decode step then does only about one FLOP per byte, in 16 bits.
#
# **Takes.** about 6 s; needs numpy, safetensors, tokenizers, matplotlib.
#
# **Leaves out.** Batches, caches in fewer bits, paged allocation, and the bytes of activations.

# %%
from dataclasses import dataclass

from console import (Count, OneOf, Within, assumptions, figure, observe, print_table, print_text,
                     progress, record_samples, require, subplots)

import numpy as np

from decode_lab import Run, autoregressive_generate
from hw_specs import CHIPS, chip
from lab import toy
from lab.measure.spread import disturbed
from lab.toy.counting import counted


@dataclass(frozen=True)
class Assumptions:
    model: OneOf(*toy.NAMES) = "large"  # Toy model that writes.
    kind: OneOf("code", "prose") = "code"  # Held-out text that the prompts are taken from.
    prompt_tokens: Within(2, 496) = 16  # Prompt of sections 1 and 2, tokens.
    new_tokens: Within(16, 511) = 176  # Tokens written after it.
    repeats: Within(1, 1000) = 3  # Times that this text is written with a cache, and without one.
    rounding_steps: Count = 256  # Float32 steps that rounding may add up to.
    prompts: tuple[Within(2, 510), ...] = (16, 64, 240)  # Prompts of section 4, tokens.
    answer_tokens: Within(2, 511) = 16  # Tokens written after each of those.
    chip: OneOf(*CHIPS) = "h100-sxm"  # Chip that a decode step is compared with.


A = assumptions(Assumptions)
LM = toy.load(A.model)
SHAPE = LM.config.shape(f"toy {A.model}")  # in fp32, as the toy computes and caches
TEXT = toy.encode(toy.heldout(A.kind))
require(A.prompt_tokens + A.new_tokens <= LM.max_length, "--new-tokens", A.new_tokens,
        f"at most {LM.max_length - A.prompt_tokens} with --prompt-tokens {A.prompt_tokens}")
require(max(A.prompts) + A.answer_tokens <= LM.max_length, "--answer-tokens", A.answer_tokens,
        f"at most {LM.max_length - max(A.prompts)} with --prompts {max(A.prompts)}")
print_text(" ".join(toy.past_training(max(A.prompt_tokens + A.new_tokens, *A.prompts))))

# %% [markdown]
# ## 1. The same text, with a cache and without
#
# Only attention looks at earlier tokens: it reads their keys and values. These do not change when
# the text grows, so a *KV cache* keeps them. With a cache, each forward sends the newest token
# alone. Without one, each forward sends the whole text again. (`send` runs a forward, `commit`
# keeps of the sent tokens those named, `rewind` cuts the cache to a length.)
#
# Both add the same numbers in different orders, so they agree up to rounding. A *logit* is the
# score of a token. The *least lead* is the smallest distance between the two highest logits.


# %%
def write(cached, n_new):
    """Greedy decoding after the prompt: the text, and the forward for each new token."""
    text, forwards = TEXT[:A.prompt_tokens], []
    LM.rewind(0)
    if cached:
        LM.prefill(text[:-1])
    for _ in range(n_new):
        if cached:
            forwards.append(counted(LM, LM.send, text[-1:]))
            LM.commit([0])
        else:
            forwards.append(counted(LM, LM.full_logits, [text]))
        text.append(int(forwards[-1].logits.argmax()))
    return np.array(text), forwards


def repeat(cached):
    """What write() returns, once for each repetition, after a short warm-up."""
    lengths = [4, *[A.new_tokens] * A.repeats]
    return [write(cached, n) for n in progress(lengths, "writing")][1:]


def compare():
    """A row of the table below: both versions over the whole text."""
    (text, cached), (other, recomputed) = WRITTEN[True][0], WRITTEN[False][0]
    ours, theirs = np.stack([f.logits for f in cached]), np.stack([f.logits for f in recomputed])
    best, different = np.sort(theirs)[:, -2:], int((text != other).sum())
    lead = (best[:, 1] - best[:, 0]).min()
    return [len(cached), different, np.abs(theirs).max(), np.abs(ours - theirs).max(), lead]


# %%
WRITTEN = {True: repeat(True), False: repeat(False)}
columns = ["forwards", "different tokens", "largest logit", "largest difference", "least lead"]
found = dict(zip(columns, compare()))
print_table("logits", columns, [found.values()], measured=columns[3:4], title="Both versions")
observe("rounding", "The logits differ by {x:.1e}. Float32 numbers near the largest differ by"
        " {gap:.1e}.", gap=np.spacing(found["largest logit"]), value=found["largest difference"],
        at_most=A.rounding_steps * np.spacing(found["largest logit"]), measured=True)
# No assumption breaks this one. It is the point of a cache: less work, the same text.
observe("same-tokens", "{x} of the {n} tokens differ between the two versions.", n=A.new_tokens,
        value=found["different tokens"], at_most=0)

# %% [markdown]
# ## 2. Linear against quadratic
#
# The toy counts FLOPs and bytes where it spends them. Predicted for a forward of n tokens:
#
# 1. FLOPs: 2 for each weight and sent token. Attention pairs each sent token with all that are
#    cached or sent, masked or not: 4 x heads x head_dim FLOPs for each pair in each layer.
# 2. Bytes: all weights, and the keys and values of all tokens so far. Without a cache these are
#    computed again, then read. So a cache saves arithmetic, not reading.
#
# If work grows in proportion, the second half of a text takes as much as its first; attention adds
# a bit. With the square, about three times as much. In seconds less: part of each call is fixed.


# %%
def predicted(cached, i):
    """FLOPs (masked positions are computed too) and bytes of the forward for new token i."""
    n, held = (1, A.prompt_tokens + i - 1) if cached else (A.prompt_tokens + i, 0)
    masked = SHAPE.n_layers * 4 * SHAPE.n_heads * SHAPE.head_dim * n * (n - 1) / 2
    read = SHAPE.streamed_bytes() + SHAPE.kv_bytes(held + n, "fp32")
    return SHAPE.flops(n, held) + masked, read


def curves(cached):
    """For each new token: FLOPs and bytes, counted and predicted, (n, 2); seconds, (repeats, n)."""
    work = np.array([(f.flops, f.bytes) for f in WRITTEN[cached][0][1]], float)
    law = np.array([predicted(cached, i) for i in range(A.new_tokens)])
    times = [f.seconds for _, forwards in WRITTEN[cached] for f in forwards]
    return work, law, np.reshape(times, (A.repeats, A.new_tokens))


def halves(values):
    """The second half of a text over the first."""
    first, second = np.array_split(values, 2)
    return float(second.sum() / first.sum())


def text_row(cached):
    """A row of the table below; of seconds the median of the repetitions."""
    work, law, times = curves(cached)
    (flops, read), ratio, typical = work.sum(0), work.sum(0) / law.sum(0), np.median(times, axis=0)
    growth = halves(work[:, 0]), typical.sum(), halves(typical)
    return [cached, flops / 1e9, ratio[0], read / 1e9, ratio[1], *growth]


# %%
columns = ["cache", "GFLOP", "GFLOP / predicted", "GB", "GB / predicted", "FLOP, 2nd half / 1st",
           "seconds", "seconds, 2nd half / 1st"]
rows = [dict(zip(columns, text_row(cached))) for cached in (True, False)]
print_table("whole-text", columns, [row.values() for row in rows], measured=columns[6:],
            title=f"Work of {SHAPE.n_layers} layers, {SHAPE.n_heads} heads of {SHAPE.head_dim}",
            formats=dict.fromkeys(columns[2:6], ".3f") | {columns[7]: ".2f"})
observe("work-as-predicted", "The counts differ from the predictions by at most {x:.2%}.",
        value=max(abs(row[name] - 1) for row in rows for name in columns[2:5:2]), at_most=0.01)
observe("growth-with", "With a cache, the second half takes {x:.2f} times the FLOPs of the first.",
        value=rows[0][columns[5]], at_most=1.2)
observe("growth-without", "Without a cache, the second half takes {x:.2f} times the FLOPs of the"
        " first.", value=rows[1][columns[5]], at_least=2)
observe("growth-time", "Without a cache, the second half takes {x:.2f} times as long as the first.",
        value=rows[1][columns[7]], at_least=1.4, measured=True,
        not_judged=disturbed(curves(False)[2]))


# %%
def draw():
    """The figure: work so far with a cache, and without; the time of each token."""
    fig, (left, middle, right) = subplots(1, 3, size=(10.0, 3.4), sharex=True)
    place = A.prompt_tokens + np.arange(A.new_tokens)
    for cached, axis, name in ((True, left, "with a cache"), (False, middle, "without a cache")):
        work, law, times = curves(cached)
        axis.plot(place, work[:, 0].cumsum() / 1e9, linewidth=4, label="counted")
        axis.plot(place, law[:, 0].cumsum() / 1e9, "k:", label="predicted")
        axis.set(title=f"Work so far, {name}", ylabel="GFLOP")
        right.plot(place, np.median(times, axis=0) * 1e3, label=name)
        record_samples(f"seconds per token, {name}", times)
    right.set(title="Time of one token, measured", ylabel="ms")
    for axis in (left, middle, right):
        axis.set(xlabel="tokens so far", ylim=(0, None))
        axis.legend(fontsize=8)
    figure("work", fig, "work so far with a cache and without, and time per token")


draw()

# %% [markdown]
# ## 3. What the cache takes
#
# Each token adds layers x 2 x n_kv_heads x head_dim numbers of 4 bytes: keys and values. A *slot*
# is room for one token. The toy doubles its slots when they are full. Engines add slots by pages.


# %%
def cache_row(n):
    """A row of the table below: the cache grown to n tokens."""
    LM.rewind(0)
    LM.prefill(TEXT[:n])
    needed, slots = n * SHAPE.kv_bytes_per_token("fp32"), LM.cache.k.shape[3]
    return [n, needed / 1e3, needed / SHAPE.weight_bytes(), slots, LM.cache.nbytes / 1e3]


# %%
LM = toy.load(A.model)  # with an empty cache
rows = [cache_row(n) for n in sorted({16, 48, 100, 160, 256, 300, LM.max_length})]
print_table("cache-bytes", ["tokens", "needed, KB", "of weights", "slots", "allocated, KB"], rows,
            title=f"KV cache, {SHAPE.n_kv_heads} KV heads", formats={"of weights": ".0%"})
observe("less-than-weights", "At {n} tokens the cache needs {x:.0%} of the bytes of the weights.",
        n=rows[-1][0], value=rows[-1][2], at_most=0.5)

# %% [markdown]
# ## 4. Prefill and decode
#
# A prompt is sent in one forward (*prefill*), which reads the weights once for all of its tokens. A
# decode step reads them for one token. So prefill does more FLOPs per byte. Below a chip's ridge
# (demo 01) memory sets the time, above it arithmetic.
#
# TTFT is the time to the first token, TPOT the median time of a later one. "prompt token / TPOT" is
# (TTFT / tokens of the prompt) / TPOT.

# %%
def intensity_row(n):
    """FLOPs per byte, and times (verify_s: of a step), for a prompt of n tokens."""
    LM.rewind(0)
    prefill, step = counted(LM, LM.prefill, TEXT[:n - 1]), counted(LM, LM.send, TEXT[n - 1:n])
    LM.commit([0])
    run = Run.pool([autoregressive_generate(LM, TEXT[:n], A.answer_tokens)[1] for _ in range(5)])
    tpot = float(np.median([r.verify_s for r in run.later().rounds]))
    per_byte = [prefill.flops / prefill.bytes, step.flops / step.bytes]
    return [n, *per_byte, run.ttft * 1e3, tpot * 1e3, run.ttft / n / tpot]


# %%
columns = ["prompt", "prefill FLOP/B", "decode FLOP/B", "TTFT, ms", "TPOT, ms",
           "prompt token / TPOT"]
rows = [intensity_row(n) for n in progress(A.prompts, "prefill and decode")]
print_table("intensity", columns, rows, title="FLOPs per byte in 32 bits, and times",
            measured=columns[3:], formats={columns[5]: ".2f"})
last = dict(zip(columns, max(rows)))
observe("prefill-denser", "Prefill of {n} tokens does {x:.0f} times the FLOPs per byte of a step.",
        n=last["prompt"], value=last["prefill FLOP/B"] / last["decode FLOP/B"], at_least=10)
observe("below-ridge", "In 16 bits (half the bytes) a step does {a:.2f} FLOPs per byte, {x:.2%} of"
        " the ridge of {chip}.", a=2 * last["decode FLOP/B"], chip=chip(A.chip).name, at_most=0.01,
        value=2 * last["decode FLOP/B"] / chip(A.chip).ridge())
observe("prompt-token-cheaper", "A token of that prompt takes {x:.2f} of a later token's time.",
        value=last["prompt token / TPOT"], at_most=1, measured=True)
