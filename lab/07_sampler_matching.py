# %% [markdown]
# # 07. Matching samplers
#
# **Question.** The target samples with a temperature, filters and a penalty. How should its draft
# model sample?
#
# **Watch for.** A drafted token is accepted as often as the two distributions overlap. A draft
# must tell the rule which q it drew from. A wrong one may raise acceptance, but changes the text.
#
# **Takes.** about 20 s; needs numpy, matplotlib, tokenizers, safetensors.
#
# **Leaves out.** What a draft costs (demo 05): here all cost the same. Trees (demo 06).

# %%
from dataclasses import dataclass, replace

from console import (NonNegative, OneOf, Within, assumptions, figure, observe, print_table,
                     progress, sliders, subplots)

import numpy as np

from decode_lab import Run, Sampler, speculative_generate
from lab import toy
from lab.drafters.lookup import PromptLookup
from lab.drafters.model import ModelDrafter
from lab.measure.acceptance import Texts, first_token, where_tested
from lab.measure.chance import most_errors
from lab.support.text import fmt_sampler
from llm_math import expected_tokens


@dataclass(frozen=True)
class Assumptions:
    draft: OneOf("small", "medium") = "medium"  # Draft model of the toy family, for its large one.
    temperature: Within(0.05, 10.0) = 0.6       # Temperature of the target with filters.
    top_k: Within(0, 64) = 0                    # Its top-k: only the k likeliest; 0 is off.
    top_p: Within(0.05, 1.0) = 0.95             # Its top-p: the likeliest up to this sum; 1 is off.
    min_p: Within(0.0, 0.9) = 0.05              # Its min-p: least share of the top's; 0 is off.
    penalties: tuple[Within(1.0, 4.0), ...] = (1.1, 1.3)  # Repetition penalties to try.
    ratios: tuple[Within(0.05, 10.0), ...] = (0.5, 1.5)  # Draft's T over the target's, section 1.
    grid: tuple[Within(0.05, 10.0), ...] = (.4, .5, .6, .7, .8, .9, 1.1, 1.3, 1.6, 2)  # Section 2.
    gamma: Within(1, 32) = 4                    # Draft length.
    prompts: Within(2, 64) = 4                  # Prompts of held-out code, and as many of prose.
    new_tokens: Within(8, 200) = 40             # Tokens written after each.
    bug_top_k: Within(2, 32) = 8                # Tokens that may be drawn in section 4.
    seed: NonNegative = 0                       # Of everything random.


A = assumptions(Assumptions)

# %% [markdown]
# ## 1. Acceptance is overlap
#
# The target draws from p and the draft model from q, both after temperature, filters and penalty.
# A token from q is accepted with probability sum of min(p, q), the *overlap* (arXiv 2211.17192,
# corollary 3.6). The table has its mean over the tested tokens, and the share of them that was
# *accepted*. *std errors*: their difference in standard errors. By chance some rows may reach 2.
#
# The draft has its target's filters and penalty, at the temperature in column *draft*: "matched" is
# the target's own, "greedy" takes the likeliest token, others are --ratios x its T (or x 1).

# %%
LARGE, DRAFT, RNG = toy.load("large"), toy.load(A.draft), np.random.default_rng([A.seed, 1])
PROMPTS = [ids for kind in toy.KINDS for ids in toy.prompts(kind, A.prompts, 32)]


def penalised(T):
    """Samplers at temperature T, without a penalty and with each."""
    return [Sampler(T, repetition_penalty=x) for x in sorted({1.0, *A.penalties})]


def speculate(drafter, sampler):
    """The texts behind all prompts, which of their tokens were tested, and the rounds."""
    made = [speculative_generate(LARGE, drafter, ids, A.new_tokens, A.gamma, rng=RNG,
                                 sampler=sampler) for ids in PROMPTS]
    tested = [where_tested(run.rounds, A.new_tokens) for _, run in made]
    return Texts([ids for ids, _ in made], 32), np.array(tested), Run.pool([run for _, run in made])


def draft_rows(target):
    """Rows of the table below: a target with each of its drafts."""
    found, scaled = [], [ratio * (target.temperature or 1.0) for ratio in A.ratios]
    for T in sorted({0.0, target.temperature, *scaled}):
        draft, name = replace(target, temperature=T), f"T {T:g}" if T else "greedy"
        texts, tested, run = speculate(ModelDrafter(DRAFT, draft), target)
        overlap = texts.overlaps((LARGE, target), (DRAFT, draft))[tested]
        error = (overlap * (1 - overlap)).sum()**0.5 / overlap.size   # 0: nothing left to chance
        difference = run.alpha - overlap.mean()
        found.append([fmt_sampler(target), "matched" if draft == target else name, overlap.mean(),
                      run.alpha, difference, difference / (error or 1.0)])
    return found


# %%
SAMPLING = [Sampler(A.temperature, A.top_k, A.top_p, A.min_p), *penalised(1.0)]
rows = sum(map(draft_rows, progress([Sampler(), *SAMPLING], "speculating")), [])
columns = ["target", "draft", "overlap", "accepted", "difference", "std errors"]
print_table("samplers", columns, rows, title="The overlap, and what was accepted",
            formats=dict(zip(columns[2:], [".3f", ".3f", "+.3f", "+.1f"])))
observe("overlap-predicts", "Of {n} differences the largest is {x:.1f} standard errors.",
        n=len(rows), value=max(abs(row[5]) for row in rows), at_most=most_errors(len(rows)))
observe("greedy-best-for-greedy", "For the greedy target, the matched draft's overlap is {x:.3f}"
        " times the next best.", at_least=1,
        value=rows[0][2] / max(row[2] for row in rows[1:] if row[0] == "greedy"))

# %% [markdown]
# ## 2. The draft's best temperature
#
# So acceptance can be predicted without drafting: the target writes texts alone, and we take the
# mean overlap at every token. (New texts, other means.) Is a draft better a bit colder or hotter?
# *best ratio*: the draft's temperature over the target's, where the overlap is largest of those
# tried. *gain* is that overlap less the matched one. Part of it may be chance.

# %%
def overlap(target, **changes):
    """Mean overlap on the target's texts; the draft's sampler is the target's with `changes`."""
    return TEXTS[target].overlaps((LARGE, target), (DRAFT, replace(target, **changes))).mean()


def curve(target):
    """{ratio of the temperatures: overlap}"""
    return {x: overlap(target, temperature=x * target.temperature) for x in sorted({1.0, *A.grid})}


def tuned_row(target):
    """A row of the table below."""
    found, greedy = CURVES[target], overlap(target, temperature=0.0)
    best = max(found, key=found.get)
    return [fmt_sampler(target), greedy, found[1.0], best, found[best], found[best] - found[1.0]]


# %%
RNG = np.random.default_rng(A.seed)
TEXTS = {sampler: Texts.written(LARGE, PROMPTS, A.new_tokens, sampler, RNG)
         for sampler in progress([*SAMPLING, *penalised(0.0)], "the target writes")}
CURVES = {target: curve(target) for target in progress(SAMPLING, "temperatures")}
rows = [tuned_row(target) for target in SAMPLING]
columns = ["target", "greedy", "matched", "best ratio", "at the best", "gain"]
print_table("tuned", columns, rows, title="Overlap with a greedy, the matched and the best draft",
            formats=dict(zip(columns[1:], [".3f", ".3f", "g", ".3f", "+.3f"])))
observe("greedy-draft-falls", "The greedy draft overlaps less than the matched one, by at least"
        " {x:.3f}.", value=min(row[2] - row[1] for row in rows), at_least=0.03)
observe("tuning-little", "The largest gain from another temperature is {x:.3f} of overlap.",
        value=max(row[5] for row in rows), at_most=0.03)  # holds for all values tried


# %%
def draw_curves():
    """The figure: the overlap over the ratio of temperatures, a line for each target."""
    fig, axis = subplots()
    for target, found in CURVES.items():
        axis.plot(list(found), list(found.values()), "o-", ms=3, label=fmt_sampler(target))
    axis.set(xlabel="the draft's temperature over the target's", ylabel="mean overlap",
             title="A draft at other temperatures than its target", xscale="log")
    axis.set_xticks([0.4, 0.6, 0.8, 1, 1.4, 2], ["0.4", "0.6", "0.8", "1", "1.4", "2"])
    axis.minorticks_off()
    axis.legend(title="target")
    figure("overlap", fig, "overlap over the draft's temperature")


draw_curves()

# %% tags=["notebook"]
def move(temperature, top_p, draft_temperature):
    """Overlap and tokens per round with other samplers."""
    target, draft = (Sampler(T, 0, top_p) for T in (temperature, draft_temperature))
    found = TEXTS[Sampler(1.0)].overlaps((LARGE, target), (DRAFT, draft)).mean()
    print_table("slider", ["overlap", "tau"], [[found, expected_tokens(found, A.gamma)]],
                title="On the text that the target wrote at T 1", formats={"overlap": ".3f"})


sliders(move, temperature=(0.1, 2.0, 0.1, 1.0), top_p=(0.5, 1.0, 0.05, 1.0),
        draft_temperature=(0.1, 2.0, 0.1, 1.0))

# %% [markdown]
# ## 3. A repetition penalty
#
# A penalty above 1 lowers the logits of tokens that are in the text (arXiv 1909.05858). A lookup
# proposes only these tokens, and none where it finds no match. A draft model can apply its target's
# penalty ("matched"), or leave it out ("plain").

# %%
def lookup_row(target):
    """A row of the table below."""
    *_, run = speculate(PromptLookup(), target)
    return [target.temperature, target.repetition_penalty, run.alpha, run.tau]


rows = [lookup_row(target) for target in progress(penalised(0.0) + penalised(1.0), "copying")]
columns = ["T", "penalty", "accepted", "tau"]
print_table("lookup", columns, rows, formats=dict(zip(columns, ["g", "g", ".3f", ".2f"])),
            title="A lookup drafts: the share of tested tokens accepted, and tokens per round")
observe("penalty-lowers", "With a penalty of {p:g} at most {x:.0%} of a lookup's tokens are"
        " accepted.", p=max(A.penalties), at_most=0.3,
        value=max(row[2] for row in rows if row[1] == max(A.penalties)))

# %%
def penalty_row(target):
    """A row of the table below."""
    matched, plain = overlap(target), overlap(target, repetition_penalty=1.0)
    return [target.temperature, target.repetition_penalty, matched, plain, plain - matched]


rows = [penalty_row(target) for target in penalised(0.0) + penalised(1.0)]
columns = ["T", "penalty", "matched", "plain", "difference"]
print_table("penalty", columns, rows, title=f"Overlap of the {A.draft} model with its target",
            formats=dict(zip(columns, ["g", "g", ".3f", ".3f", "+.3f"])))
observe("draft-without-penalty", "Leaving out a penalty of {p:g} changes the overlap by {x:+.3f}"
        " at best.", p=max(A.penalties), at_most=-0.01,
        value=max(row[4] for row in rows if row[1] == max(A.penalties)))

# %% [markdown]
# ## 4. A draft that reports another q
#
# The rule needs the q that the token was drawn from. A common bug: the draft draws with one sampler
# and reports the probabilities of another. Nothing fails, and more may be accepted.
#
# A round's first token depends on three random choices: the token drawn, whether it is accepted,
# and the token that replaces it. At every tenth token we run the rule for all outcomes of these
# three and add up their probabilities: nothing is sampled. *TV* (total variation) says how far the
# output is from p: half the sum, over all tokens, of the difference in probability. 0 is lossless.

# %%
def bug_row(name):
    """A row of the table below: means over every tenth token of the texts at T 1."""
    samplers, found = (FEW, *BUGS[name]), []
    p, drawn_from, reported = (TEXTS[Sampler(1.0)].probs(model, sampler)[:, ::10]
                               for model, sampler in zip((LARGE, DRAFT, DRAFT), samplers))
    for at in np.ndindex(p.shape[:2]):
        accepted, output = first_token(p[at], drawn_from[at], reported[at])
        found.append((accepted, np.abs(output - p[at]).sum() / 2))
    return [name, *np.mean(found, axis=0)]


FEW, HALF = Sampler(1.0, top_k=A.bug_top_k), Sampler(1.0, top_k=A.bug_top_k // 2)
BUGS = {  # name: (the sampler that draws, the one that is reported)
    "none": (FEW, FEW),
    "drawn at T 0.5, reported at T 1": (replace(FEW, temperature=0.5), FEW),
    "drawn at T 1, reported at T 0.5": (FEW, replace(FEW, temperature=0.5)),
    "drawn greedily, reported at T 1": (Sampler(), FEW),
    f"drawn with top-k {HALF.top_k}, reported with {FEW.top_k}": (HALF, FEW),
}
rows = [bug_row(name) for name in progress(BUGS, "bugs")]
print_table("bugs", ["bug", "accepted", "TV"], rows, formats={"accepted": ".3f", "TV": ".3f"},
            title=f"The target samples at T 1 with top-k {A.bug_top_k}")
observe("right-if-reported", "Without a bug the TV is {x:.0e}.", value=rows[0][2], at_most=1e-9)
observe("bugs-move-output", "Each of the {n} bugs changes the output, by a TV of {x:.3f} or more.",
        n=len(rows) - 1, value=min(row[2] for row in rows[1:]), at_least=0.01)
observe("bugs-accept-more", "{x} of the bugs raise the share that is accepted.", at_least=1,
        value=sum(bool(row[1] > rows[0][1]) for row in rows[1:]))
