# %% [markdown]
# # 02. The KV cache
#
# **Question.** What does a KV cache save, what does it cost, and what is left to do in a decode step?
#
# **Watch for.** The same text with and without a cache. Without one, each token costs more than the last, and
# the whole grows with the square of its length. With one, the work per token hardly grows, but there is very
# little of it per byte read. That last number is why the following demos exist.
#
# **Takes.** about 5 s; needs numpy, safetensors, tokenizers, matplotlib.
#
# **Leaves out.** Batches, caches in fewer bits, paged allocation, and the bytes of activations.

# %%
from dataclasses import dataclass

from console import (BadInput, Count, OneOf, Within, assumptions, figure, fmt_bytes, observe, print_table, print_text, progress,
                     record_samples, subplots)

import numpy as np

from decode_lab import Run, autoregressive_generate
from hw_specs import CHIPS, chip
from lab import toy


@dataclass(frozen=True)
class Assumptions:
    model: OneOf(*toy.NAMES) = "large"
    """Toy model that writes."""
    kind: OneOf("code", "prose") = "code"
    """Held-out text that the prompts are taken from."""
    prompt_tokens: Count = 16
    """Prompt of sections 1 and 2, tokens."""
    new_tokens: Count = 176
    """Tokens written after it, at least 16."""
    repeats: Within(1, 1000) = 2
    """Generations timed with a cache, and then without one."""
    rounding_steps: Count = 256
    """Most float32 steps, of the largest logit's size, that two equal computations may differ by."""
    prompts: tuple[Count, ...] = (16, 64, 240)
    """Prompts of section 4, tokens."""
    answer_tokens: Count = 16
    """Tokens written after each of those, at least 2."""
    chip: OneOf(*CHIPS) = "h100-sxm"
    """Chip whose ridge the FLOP per byte are compared with."""


A = assumptions(Assumptions)
C = toy.load(A.model).config
FLOAT = 4                                            # bytes: the toy computes and caches in float32
SHAPE = C.shape(f"toy {A.model}", FLOAT)
TEXT = toy.encode(toy.heldout(A.kind))
for prompt_name, prompt, name, new, least in (
        ("--prompt-tokens", A.prompt_tokens, "--new-tokens", A.new_tokens, 16),
        ("--prompts", max(A.prompts), "--answer-tokens", A.answer_tokens, 2)):
    if new < least or prompt + new > C.max_length:
        raise BadInput(f"{prompt_name} up to {prompt} with {name} = {new} is impossible: at least {least} of these, "
                       f"and together at most the {C.max_length} that the model holds")
for sentence in toy.past_training(C.max_length):
    print_text(sentence)

# %% [markdown]
# ## 1. The same text, with and without
#
# A transformer's layers meet the past in one place: attention reads the keys and values of all tokens before.
# They do not change when the text grows, so they can be kept. One decoding loop runs both versions below; one
# sends the new token alone, the other the whole sequence again. Logits agree up to the rounding of float32,
# because products of other shapes add in another order.
#
# FLOPs and bytes are counted where they are spent, two per multiply-add, and set beside the formulas of
# llm_math. A masked product computes what it masks, and the formula counts only what may be seen: where whole
# sequences are sent, the count is above it by what is masked.
#
# "float32 step there" is the distance from the largest logit to the next float32; "closest choice" the least
# lead, in logits, that a written token had over the second: rounding far below it changes no token. FLOP /
# formula and B / formula are counted FLOPs and bytes over the formula's.


# %%
class Toy:
    """The toy as a Decoder, with its cache or recomputing all, that notes what each forward took."""

    def __init__(self, cached: bool):
        self.lm, self.cached, self.tokens, self.committed = toy.load(A.model), cached, [], 0
        self.vocab_size, self.max_length = C.vocab_size, C.max_length

    @property
    def length(self) -> int:
        return len(self.tokens)

    def rewind(self, length: int):
        self.tokens, self.committed = self.tokens[:length], min(self.committed, length)
        if length == 0:                                           # a new text
            self.forwards = []                                    # (sent, FLOPs, bytes, last row of logits)
        self.lm.rewind(length if self.cached else 0)

    def commit(self, nodes):
        self.committed = len(self.tokens)                         # plain decoding keeps all that it sends
        if self.cached:
            self.lm.commit(nodes)

    def prefill(self, tokens):
        self.tokens += map(int, tokens)
        self.committed = len(self.tokens)
        if self.cached:
            self.note(len(tokens), lambda: self.lm.prefill(tokens))

    def send(self, tokens, parents=None):
        self.tokens += map(int, tokens)
        if self.cached:
            return self.note(len(tokens), lambda: self.lm.send(tokens, parents))
        return self.note(len(self.tokens), lambda: self.lm.full_logits([self.tokens])[0])[-len(tokens):]

    def note(self, sent: int, forward):
        flops, read, rows = self.lm.flops, self.lm.bytes_read, forward()
        last = None if rows is None else rows[-1].copy()
        self.forwards.append((sent, self.lm.flops - flops, self.lm.bytes_read - read, last))
        return rows


decoders, written, runs = {True: Toy(True), False: Toy(False)}, {}, {True: [], False: []}
# One kind after the other: after a large forward the next small ones take longer, caches being cold.
order = [(cached, i) for cached in decoders for i in range(-1, A.repeats)]
for cached, i in progress(order, "writing with and without a cache"):
    n_new = A.new_tokens if i >= 0 else 4            # a short warm-up first
    written[cached], run = autoregressive_generate(decoders[cached], TEXT[:A.prompt_tokens], n_new)
    runs[cached] += [run] if i >= 0 else []

steps = {cached: [f for f in decoder.forwards if f[3] is not None] for cached, decoder in decoders.items()}
equal = written[True] == written[False]
n_same = (len(equal) if equal.all() else int(equal.argmin()) + 1) - A.prompt_tokens
ours, theirs = (np.stack([f[3] for f in steps[cached][:n_same]]) for cached in (True, False))
difference, largest = float(np.abs(ours - theirs).max()), float(np.abs(theirs).max())
step, best = float(np.spacing(np.float32(largest))), np.sort(theirs, axis=-1)
print_table("logits", ["forwards", "largest difference", "largest logit", "float32 step there", "closest choice"],
            [[n_same, difference, largest, step, float((best[:, -1] - best[:, -2]).min())]],
            title="Logits with a cache and without", measured=["largest difference"],
            formats={"largest difference": ".1e", "float32 step there": ".1e"})
observe("rounding",
        "The logits differ by at most {d:.1e}, {n:.0f} float32 steps of the largest logit, within {m}: "
        "rounding.", d=difference, n=difference / step, m=A.rounding_steps, measured=True,
        holds=difference <= A.rounding_steps * step)
observe("same-tokens", "Both versions wrote the same {n} tokens.", n=A.new_tokens, holds=equal.all())


# %%
def formula(n: int, context: int) -> tuple[float, float, float]:
    """FLOPs, FLOPs with what the mask hides, and bytes, of sending n tokens after `context` cached ones."""
    hidden = SHAPE.n_kv_layers * 4 * SHAPE.n_heads * SHAPE.head_dim * n * (n - 1) / 2
    flops = SHAPE.flops(n, context)
    return flops, flops + hidden, SHAPE.streamed_bytes() + SHAPE.kv_bytes(context + n, FLOAT)


table = []
for i in sorted({round(i) for i in np.linspace(0, A.new_tokens - 1, 4)}):
    at = A.prompt_tokens + i                         # tokens in the sequence: this forward predicts the next
    for cached in (True, False):
        n, f, b, _ = steps[cached][i]
        seen, computed, read = formula(n, at - n)
        table.append([at, cached, n, f / 1e6, f / seen, f / computed, b / 1e6, b / read])
ratios = ["FLOP / formula", "with masked", "B / formula"]
print_table("counted-work", ["tokens so far", "cache", "sent", "MFLOP", *ratios[:2], "MB", ratios[2]], table,
            title="Counted work of one forward, and its ratio to the formula",
            formats=dict.fromkeys(ratios, ".3f"))
worst = max(abs(row[k] - 1) for row in table for k in (5, 7))
observe("work-as-formula",
        "Count and formula agree within {worst:.1%}, below 1%, in FLOPs, masked included, and in bytes.",
        worst=worst, holds=worst < 0.01)

# %% [markdown]
# ## 2. Linear against quadratic
#
# A total in proportion to the number of tokens has a second half as dear as the first: ratio 1. A total that
# grows with the square has a second half three times as dear. The clock stands beside the count; a small
# forward takes time for its calls, whatever it computes, which flattens the measured curve.
#
# TTFT is the time to the first token, TPOT the median time per later one, here and in section 4. TTFT is two
# forwards with a cache (the prompt but its last token, then that one), one without: after so short a prompt
# the cache brings the first token no sooner.

# %%
seconds = {cached: np.array([[r.verify_s for r in run.rounds] for run in runs[cached]]) for cached in runs}
for cached, name in ((True, "with a cache"), (False, "without")):
    record_samples(f"seconds per token, {name}", seconds[cached])
flops = {cached: np.array([f[1] for f in steps[cached]], float) for cached in steps}
bins = np.array_split(np.arange(A.new_tokens), 8)
ms = {cached: np.array([np.quantile(t[:, b], [0.25, 0.5, 0.75]) for b in bins]) * 1e3
      for cached, t in seconds.items()}
spans = [f"{A.prompt_tokens + b[0]}-{A.prompt_tokens + b[-1]}" for b in bins]
names = ["with: ms", "with: quartiles", "without: ms", "without: quartiles", "ratio"]
print_table("by-position", ["tokens so far", *names, "FLOP ratio"],
            [[span, x[1], f"{x[0]:.2f}-{x[2]:.2f}", y[1], f"{y[0]:.2f}-{y[2]:.2f}", y[1] / x[1],
              flops[False][b].sum() / flops[True][b].sum()]
             for span, b, x, y in zip(spans, bins, ms[True], ms[False])],
            title="Time per token by position", measured=names,
            formats=dict.fromkeys(names, ".2f") | {"ratio": ".1f", "FLOP ratio": ".1f"})
table = []
for cached in (True, False):
    run, total = Run.pool(runs[cached]), float(np.median(seconds[cached].sum(axis=1)))
    (f1, f2), (t1, t2) = ([half.sum() for half in np.array_split(values, 2)]
                          for values in (flops[cached], ms[cached][:, 1]))
    table.append([cached, A.new_tokens, (f1 + f2) / 1e9, f2 / f1, total, t2 / t1, run.ttft * 1e3,
                  float(np.median(seconds[cached][:, 1:])) * 1e3])  # a pause of the machine moves means
columns = ["cache", "tokens", "GFLOP", "2nd half / 1st", "s", "2nd / 1st, timed", "TTFT, ms", "TPOT, ms"]
print_table("whole-text",
            columns, table, title="The whole text", formats=dict.fromkeys((columns[3], columns[5]), ".2f"),
            measured=columns[4:])
(a, b), (a_timed, b_timed) = ([row[k] for row in table] for k in (3, 5))
observe("growth-flops",
        "By FLOPs the second half costs {a:.2f} times the first with a cache, below 2 and near linear (1), "
        "and {b:.2f} times without, above 2 and near quadratic (3).", a=a, b=b, holds=a < 2 < b)
observe("growth-time",
        "By the clock it costs {a:.2f} times the first with a cache, and more without: {b:.2f} times, above "
        "1.4.", a=a_timed, b=b_timed, measured=True, holds=a_timed < b_timed and b_timed > 1.4)

fig, (left, right) = subplots(1, 2, size=(9.0, 3.6))
position = A.prompt_tokens + np.arange(A.new_tokens)
for cached, color, name in ((True, "C0", "with a cache"), (False, "C1", "without")):
    middle = [position[b].mean() for b in bins]
    left.plot(middle, ms[cached][:, 1], "o-", color=color, label=name)
    left.fill_between(middle, ms[cached][:, 0], ms[cached][:, 2], color=color, alpha=0.25)
    right.plot(position, np.cumsum(flops[cached]) / 1e9, color=color, label=f"{name}, counted")
    law = np.cumsum([formula(1, at - 1)[1] if cached else formula(at, 0)[1] for at in position])
    right.plot(position, law / 1e9, "k:", label=None if cached else "formula")
left.set(xlabel="tokens so far", ylabel="ms per token", title="Measured: time of one token", ylim=(0, None))
right.set(xlabel="tokens so far", ylabel="GFLOP in all", title="Counted: work so far", yscale="log")
for axis in (left, right):
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
figure("time-per-token", fig, "time per token, and work so far")

# %% [markdown]
# ## 3. What the cache takes
#
# Keys and values of every layer: layers x 2 x n_kv_heads x head_dim values per token. n_kv_heads counts the
# heads with keys and values of their own, each shared by several query heads. A slot is room for one token.
# The toy doubles its slots whenever they are full, so up to half stand empty; engines that serve many
# sequences allocate pages instead (PagedAttention, arXiv 2309.06180).

# %%
each, lm, table = SHAPE.kv_bytes_per_token(FLOAT), toy.load(A.model), []
for n in sorted({n for n in (16, 48, 100, 160, 256, 300) if n < C.max_length} | {C.max_length}):
    lm.prefill(TEXT[lm.length:n])
    slots, allocated = lm.cache.k.shape[3], lm.cache.nbytes
    table.append([n, n * each, slots, allocated, allocated / (slots * each), allocated / (n * each),
                  n * each / SHAPE.weight_bytes()])
ratios = ["per slot / formula", "allocated / needed", "needed / weights"]
print_table("cache-bytes", ["tokens", "needed", "slots", "allocated", *ratios], table,
            title=f"KV cache of {SHAPE.name}, {each:,.0f} B per token by the formula",
            formats={"needed": fmt_bytes, "allocated": fmt_bytes} | dict.fromkeys(ratios, ".2f"))
observe("slot-as-formula",
        "A slot takes the {b:,.0f} B of the formula; at its longest, {n} tokens, the cache holds {size}, "
        "{x:.0%} of the weights.", b=each, n=n, size=fmt_bytes(n * each), x=table[-1][6],
        holds=all(row[4] == 1 for row in table))

# %% [markdown]
# ## 4. Prefill and decode
#
# A prompt can be sent in one forward: its weights are read once for all its tokens. A decode step reads them
# for one token. FLOPs over bytes, the arithmetic intensity, tells the two apart: below a chip's ridge the
# memory sets the time, above it the arithmetic. Nobody reads a prompt's predictions, so prefill skips the
# output head.

# %%
table, decoder = [], decoders[True]
for n in progress(A.prompts, "prefill and decode"):
    run = Run.pool([autoregressive_generate(decoder, TEXT[:n], A.answer_tokens)[1] for _ in range(5)])
    (sent, f, b, logits), (_, last_f, last_b, _) = decoder.forwards[0], decoder.forwards[-1]
    tpot = float(np.median([r.verify_s for r in run.rounds if not r.first]))
    head = 0 if logits is not None else SHAPE.vocab_size * SHAPE.hidden    # weights prefill does not need
    (_, want_f, want_b), (_, last_want_f, last_want_b) = formula(sent, 0), formula(1, n + A.answer_tokens - 2)
    table.append([n, f / b, f / b / ((want_f - 2 * sent * head) / (want_b - FLOAT * head)), last_f / last_b,
                  last_f / last_b / (last_want_f / last_want_b), run.ttft * 1e3, tpot * 1e3,
                  run.ttft / n / tpot])
columns = ["prompt", "prefill FLOP/B", "prefill / formula", "decode FLOP/B", "decode / formula", "TTFT, ms",
           "TPOT, ms", "TTFT per token / TPOT"]
print_table("intensity",
            columns, table, title="Arithmetic intensity in 32 bits; time to first token and per output token",
            formats=dict.fromkeys((columns[2], columns[4], columns[7]), ".2f"), measured=columns[5:])
n, prefill, _, decode, _, _, _, share = max(table)
observe("prefill-denser",
        "Prefilling {n} tokens does {a:.1f} FLOP per byte, a decode step after them {b:.2f}: {x:.0f} times "
        "less, more than 10.", n=n, a=prefill, b=decode, x=prefill / decode, holds=prefill > 10 * decode)
observe("below-ridge",
        "A decode step's {b:.2f} FLOP per byte, {c:.2f} in 16 bits, are below a tenth of the ridge of "
        "{chip}, {r:.0f}: most of that chip's arithmetic would wait.", b=decode, c=2 * decode,
        chip=chip(A.chip).name, r=chip(A.chip).ridge(), holds=2 * decode < chip(A.chip).ridge() / 10)
observe("prompt-token-cheaper",
        "A token of the prompt of {n} costs {x:.2f} of one written after it, less than 1.", n=n, x=share,
        measured=True, holds=share < 1)
