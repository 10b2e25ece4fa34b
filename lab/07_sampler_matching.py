# %% [markdown]
# # 07. Matching samplers
#
# **Question.** The target samples with a temperature, filters and penalties. How should its draft sample?
#
# **Watch for.** Acceptance is the overlap of the two distributions as they are sampled, not of what the models say.
# The draft's best temperature. A penalty on repetition, and a draft that repeats. A draft that reports another
# distribution than it drew from: more is accepted, and the text is no longer the target's.
#
# **Takes.** about 20 s; needs numpy, matplotlib, tokenizers, safetensors.
#
# **Leaves out.** What a draft costs (demo 05): here a step of every draft costs the same. Trees (demo 06).

# %%
from dataclasses import dataclass, replace

from console import (BadInput, NonNegative, OneOf, Within, assumptions, figure, observe, print_table, progress,
                     sliders, subplots)

import numpy as np

from decode_lab import Run, Sampler, accept, autoregressive_generate, draw, speculative_generate
from lab.drafters.lookup import PromptLookup
from lab.drafters.model import ModelDrafter
from lab import toy
from llm_math import expected_tokens

Ratio = Within(0.05, 10.0)


@dataclass(frozen=True)
class Assumptions:
    draft: OneOf("small", "medium") = "medium"             # Draft model of the toy family; the large one is the target.
    temperature: Within(0.05, 10.0) = 0.6                  # Of the target with filters.
    top_p: Within(0.05, 1.0) = 0.95                        # Its top-p (nucleus); 1 is off.
    min_p: Within(0.0, 0.9) = 0.05                         # Its min-p, a share of the likeliest token; 0 is off.
    penalties: tuple[Within(1.0, 4.0), ...] = (1.1, 1.3)   # Repetition penalties of further targets.
    ratios: tuple[Ratio, ...] = (0.5, 0.75, 1.25, 1.5)     # The draft's temperature over the target's, section 1.
    gamma: Within(1, 32) = 4                               # Draft length.
    prompts: Within(2, 64) = 4                             # Prompts of held-out code, and as many of prose.
    new_tokens: Within(8, 200) = 40                        # Tokens written after each.
    top_k: Within(2, 64) = 8                               # Tokens that may be drawn in section 4.
    draws: Within(1, 1_000_000) = 4000                                    # Rounds drawn there for each bug and position.
    seed: NonNegative = 0                                  # Of everything random.

    def __post_init__(self):
        if len(set(self.penalties) - {1.0}) < len(self.penalties) or not self.penalties:
            raise BadInput(f"--penalties are {self.penalties}: different ones above 1 would be right; 1, none, is there "
                           "by itself")


A = assumptions(Assumptions)

# %% [markdown]
# ## 1. Acceptance is overlap
#
# The rule accepts a drawn token with probability sum of min(p, q), where p and q are what target and draft sample
# from, after temperature, filters and penalties (arXiv 2211.17192, corollary 3.6). So it can be predicted without
# speculation: the mean of that sum over a text that the target wrote alone. A greedy draft is a point mass on its
# likeliest token; its acceptance falls to the target's probability of that token. A greedy target is a point mass
# as well, and a draft that samples for it is accepted as often as it happens to draw that token.
#
# "off": accepted less predicted, on two texts that were drawn apart; its standard error is as if tokens were independent.
# "x 0.5" is a draft with the target's filters and penalty, at half its temperature; for the greedy target, at 0.5.

# %%
rng, PROMPT = np.random.default_rng(A.seed), 32
target, draft = toy.load("large"), toy.load(A.draft)
prompts = [ids for kind in toy.KINDS for ids in toy.prompts(kind, A.prompts, PROMPT)]
TARGETS = {"greedy": Sampler(0.0), f"T {A.temperature:g}, filters": Sampler(A.temperature, 0, A.top_p, A.min_p),
           "T 1": Sampler(1.0), **{f"T 1, penalty {x:g}": Sampler(1.0, repetition_penalty=x) for x in A.penalties}}
DRAFTS = {"greedy": 0.0, **{f"x {x:g}" if x != 1 else "matched": x for x in sorted({*A.ratios, 1.0})}}


class Text:
    """Continuations that the target wrote with a sampler, and what both models say at each new token."""

    def __init__(self, sampler: Sampler):
        self.sampler = sampler
        self.tokens = np.array([autoregressive_generate(target, ids, A.new_tokens, rng=rng, sampler=sampler)[0]
                                for ids in prompts])
        self.rows = [model.full_logits(self.tokens)[:, PROMPT - 1:-1] for model in (target, draft)]
        self.p = self.read(0, sampler)

    def read(self, model: int, sampler: Sampler) -> np.ndarray:
        """(prompts, new tokens, V): what the target (0) or the draft (1) samples from at each new token."""
        return np.array([[sampler.probs(row, text[:PROMPT + i]) for i, row in enumerate(rows)]
                         for text, rows in zip(self.tokens, self.rows[model])])

    def drafting(self, ratio: float) -> Sampler:
        """The target's sampler at `ratio` times its temperature, at `ratio` itself where the target is greedy."""
        return replace(self.sampler, temperature=ratio * (self.sampler.temperature or 1.0))

    def overlaps(self, ratio: float) -> np.ndarray:
        """(prompts, new tokens): the overlap with a draft at this ratio."""
        return np.minimum(self.p, self.read(1, self.drafting(ratio))).sum(axis=-1)


def speculate(drafter, sampler: Sampler) -> Run:
    """The rounds of all prompts."""
    return Run.pool([speculative_generate(target, drafter, ids, A.new_tokens, A.gamma, rng=rng, sampler=sampler)[1]
                     for ids in prompts])


texts = {name: Text(sampler) for name, sampler in progress(TARGETS.items(), "the target writes")}
cells = [(name, how) for name in TARGETS for how in DRAFTS if not (name == "greedy" and how == "matched")]
predicted, alpha, tau, error = {}, {}, {}, {}
for name, how in progress(cells, "speculating"):
    overlaps = texts[name].overlaps(DRAFTS[how])
    run = speculate(ModelDrafter(draft, texts[name].drafting(DRAFTS[how])), TARGETS[name])
    predicted[name, how], alpha[name, how], tau[name, how] = float(overlaps.mean()), run.alpha, run.tau
    tests = sum(r.tested for r in run.rounds)
    error[name, how] = float(np.sqrt(overlaps.var() / overlaps.size + run.alpha * (1 - run.alpha) / tests))
print_table("samplers", ["target", "draft", "overlap", "accepted", "off", "std error", "tau"],
            [[*cell, predicted[cell], alpha[cell], alpha[cell] - predicted[cell], error[cell], tau[cell]] for cell in cells],
            title=f"Overlap predicted, share accepted, and tokens a round at gamma = {A.gamma}",
            formats=dict.fromkeys(["overlap", "accepted", "tau"], ".2f") | {"off": "+.3f", "std error": ".3f"})
misses = np.array([alpha[cell] - predicted[cell] for cell in cells])
observe("overlap-predicts",
        "Over {n} pairs of samplers acceptance is off the predicted overlap by {miss:.3f} on average, less than 0.06, "
        "though overlaps run from {low:.2f} to {high:.2f}.", n=len(cells), miss=np.abs(misses).mean(),
        low=min(predicted.values()), high=max(predicted.values()), holds=np.abs(misses).mean() < 0.06)
sampled = [name for name in TARGETS if name != "greedy"]
choices = {name: texts[name].read(1, Sampler(0.0, repetition_penalty=TARGETS[name].repetition_penalty)).argmax(-1)
           for name in sampled}
p_of_argmax = {name: float(np.take_along_axis(texts[name].p, choices[name][..., None], -1).mean()) for name in sampled}
observe("greedy-draft-falls",
        "Where the target samples, a greedy draft's acceptance falls to the target's probability of its token: {a} "
        "predicted, {b} accepted. A draft that draws as the target does overlaps by {c}.",
        a=", ".join(f"{p:.2f}" for p in p_of_argmax.values()),
        b=", ".join(f"{alpha[name, 'greedy']:.2f}" for name in sampled),
        c=", ".join(f"{predicted[name, 'matched']:.2f}" for name in sampled),
        holds=all(abs(p - alpha[name, "greedy"]) < 0.1 and p < predicted[name, "matched"] for name, p in p_of_argmax.items()))
hot = max((how for how in DRAFTS if ("greedy", how) in predicted), key=DRAFTS.get)
observe("greedy-best-for-greedy",
        "For the greedy target a greedy draft is best: {a:.2f} of its tokens are the target's, of those drawn at "
        "temperature {t:g} {b:.2f}.", a=predicted["greedy", "greedy"], t=DRAFTS[hot], b=predicted["greedy", hot],
        holds=predicted["greedy", "greedy"] == max(predicted["greedy", how] for how in DRAFTS if ("greedy", how) in predicted))

# %% [markdown]
# ## 2. The draft's best temperature
#
# The matched temperature is the best one where the draft knows as much as the target. A weaker draft may do better
# a little colder or hotter. Chosen on every other text, and judged on those in between, so that the best of many is
# not taken for a gain; "matched" is here the mean over the latter.

# %%
grid = np.unique([*np.round(np.geomspace(0.4, 2.0, 14), 3), 1.0])
curves = {name: np.array([texts[name].overlaps(x).mean(axis=1) for x in grid])          # (ratios, texts)
          for name in progress(sampled, "temperatures")}
rows, gains = [], {}
for name, curve in curves.items():
    chosen = int(curve[:, ::2].mean(axis=1).argmax())
    best, matched = float(curve[chosen, 1::2].mean()), float(texts[name].overlaps(1.0)[1::2].mean())
    gains[name] = best - matched
    taus = [expected_tokens(x, A.gamma) for x in (matched, best)]
    rows.append([name, grid[chosen], matched, best, gains[name], taus[1] / taus[0] - 1])
print_table("tuned", ["target", "best ratio", "matched", "at the best", "gain", "gain in tau"], rows, formats={
    "best ratio": ".2f", "matched": ".3f", "at the best": ".3f", "gain": "+.3f", "gain in tau": "+.1%"},
    title=f"Ratio chosen on half the texts, overlap on the other half; tau by the textbook at gamma = {A.gamma}")
observe("tuning-little",
        "Tuning the draft's temperature changes the overlap by {a:+.3f} to {b:+.3f}, less than 0.03, while a draft that "
        "samples otherwise than the target loses up to {c:.2f}.", a=min(gains.values()), b=max(gains.values()),
        c=max(predicted[name, "matched"] - predicted[name, how] for name in sampled for how in DRAFTS),
        holds=max(gains.values()) < 0.03)
fig, axis = subplots(size=(7.0, 4.0))
for name, curve in curves.items():
    axis.plot(grid, curve.mean(axis=1), "o-", ms=3, label=name)
axis.axvline(1, color="grey", lw=1)
axis.set(xlabel="the draft's temperature over the target's", ylabel="overlap, mean over the text", xscale="log",
         xticks=(0.4, 0.6, 0.8, 1, 1.4, 2), xticklabels=("0.4", "0.6", "0.8", "1", "1.4", "2"),
         title="What the draft's temperature costs", ylim=(0, 1))
axis.minorticks_off()
axis.legend(title="target")
figure("overlap", fig, "overlap over the draft's temperature")

# %% tags=["notebook"]
def at(temperature, top_p, draft_temperature):
    """Overlap and textbook tau on the text that the target wrote at T 1, for other samplers of both."""
    text, one = texts["T 1"], Sampler(temperature, top_p=top_p)
    overlaps = np.minimum(text.read(0, one), text.read(1, replace(one, temperature=draft_temperature))).sum(-1).mean()
    print_table("slider", ["overlap", "tau"], [[overlaps, expected_tokens(overlaps, A.gamma)]],
                formats={"overlap": ".3f", "tau": ".2f"})


sliders(at, temperature=(0.1, 2.0, 0.1, 1.0), top_p=(0.5, 1.0, 0.05, 1.0), draft_temperature=(0.1, 2.0, 0.1, 1.0))

# %% [markdown]
# ## 3. A penalty, and a draft that copies
#
# The repetition penalty lowers the logit of every token that stands in the text (arXiv 1909.05858). A draft model
# can apply the same penalty ("matched"), or leave it out ("plain"). A lookup cannot apply it: all that it proposes
# stands in the text. Its overlap is the target's probability of the token that it would propose first, over the places
# of the text where it has one; what is accepted is a share of the tokens tested.

# %%
rows, copied = [], {}
for T in (0.0, 1.0):
    for penalty in progress((1.0, *A.penalties), "copying"):
        sampler, chances = Sampler(T, repetition_penalty=penalty), []
        text = next((each for each in texts.values() if each.sampler == sampler), None) or Text(sampler)
        for ids, p in zip(text.tokens, text.p):
            lookup = PromptLookup()
            lookup.start(target, sampler, ids[:PROMPT].tolist())
            for i, row in enumerate(p):
                read = ids[:PROMPT + i].tolist()
                lookup.verified(read, [], None)
                chances += [row[x] for x in lookup.propose(read, 1).tokens]
        run = speculate(PromptLookup(), sampler)
        copied[T, penalty] = run.alpha
        plain = float(np.minimum(text.p, text.read(1, Sampler(T))).sum(axis=-1).mean())
        rows.append([f"{T:g}", f"{penalty:g}", np.mean(chances), sum(r.tested for r in run.rounds), run.alpha, run.tau,
                     float(text.overlaps(1.0 if T else 0.0).mean()), plain])
print_table("penalty",
            ["T", "penalty", "overlap", "tested", "accepted", "tau", "matched", "plain"], rows, formats=dict.fromkeys(
    ["overlap", "accepted", "tau", "matched", "plain"], ".2f"), title="A lookup under a penalty; beside it, overlaps of "
    f"the {A.draft} model, with the penalty and without")
high = max(A.penalties)
observe("penalty-lowers",
        "A penalty of {p:g} takes what a lookup has accepted from {a:.0%} to {b:.0%} when greedy, and from {c:.0%} to "
        "{d:.0%} at T = 1.", p=high, a=copied[0.0, 1.0], b=copied[0.0, high], c=copied[1.0, 1.0], d=copied[1.0, high],
        holds=all(copied[T, high] < copied[T, 1.0] for T in (0.0, 1.0)))
lost = {row[0]: row[6] - row[7] for row in rows if row[1] == f"{high:g}"}
observe("draft-without-penalty",
        "A model that leaves out that penalty overlaps by {a:.2f} less when greedy and by {b:.2f} less at T = 1 than one that "
        "applies it.", a=lost["0"], b=lost["1"], holds=min(lost.values()) > 0)

# %% [markdown]
# ## 4. A draft that reports another q
#
# The rule needs the q that the token was drawn from. A common bug: the draft draws with one sampler, and reports
# the probabilities of another. Nothing fails; what is accepted may even rise. Exactly: of r drawn and q reported,
# the output is r min(1, p/q), and for the rest of the time the residual. Beside it, rounds drawn with the loop's
# own rule at a few of these places, and the exact TV (total variation) there. The noise floor is the TV of as many
# draws from p itself.

# %%
one = Sampler(1.0, top_k=A.top_k)
BUGS = {"none: drawn and reported alike": (one, one),
        "drawn at T 0.5, reported at T 1": (replace(one, temperature=0.5), one),
        "greedy, reported as if drawn": (Sampler(0.0), one),
        f"drawn from the top {A.top_k // 2}, reported before": (replace(one, top_k=A.top_k // 2), one),
        "drawn at T 1, reported at T 0.5": (one, replace(one, temperature=0.5))}


def output(p, r, q) -> tuple[np.ndarray, float]:
    """The distribution of a round's first token where r is drawn and q reported, and the share accepted."""
    kept = r * np.minimum(1, p / np.where(q > 0, q, 1))
    rest = np.maximum(p - q, 0)
    rest = rest / rest.sum() if rest.any() else p
    return kept + (1 - kept.sum()) * rest, float(kept.sum())


def tv(a, b) -> float:
    return float(np.abs(a - b).sum() / 2)


places = [(text, i) for text in range(len(prompts)) for i in range(0, A.new_tokens, 10)]
drawn_at, rows = places[::max(1, len(places) // 4)][:4], []
for name, (drawn, reported) in progress(BUGS.items(), "bugs"):
    exact, measured, floor = [], [], []
    for text, i in places:
        p, r, q = (s.probs(texts["T 1"].rows[model][text, i]) for model, s in ((0, one), (1, drawn), (1, reported)))
        exact.append([tv(output(p, r, q)[0], p), output(p, r, q)[1]])
        if (text, i) in drawn_at:
            counts = np.bincount([accept(p, [x], [q], rng)[1] for x in (draw(r, rng) for _ in range(A.draws))],
                                 minlength=len(p))
            measured.append([tv(counts / A.draws, p), exact[-1][0]])
            floor.append(np.median([tv(rng.multinomial(A.draws, p) / A.draws, p) for _ in range(50)]))
    rows.append([name, *np.mean(exact, axis=0)[::-1], *np.mean(measured, axis=0)[::-1], np.mean(floor)])
print_table("bugs", ["bug", "accepted", "TV", "TV there", "TV drawn", "noise floor"], rows, formats=dict.fromkeys(
    ["accepted", "TV", "TV there", "TV drawn", "noise floor"], ".3f"),
    title=f"A target at T 1 with the top {A.top_k}: exact over {len(places)} places, drawn {A.draws} times at "
          f"{len(drawn_at)} of them")
right, *wrong = rows
observe("right-if-reported",
        "Reported as drawn, the output is the target's: TV {a:.0e}, and {b:.3f} drawn, near the noise floor, {c:.3f}.",
        a=right[2], b=right[4], c=right[5], holds=right[2] < 1e-12 and right[4] < 1.5 * right[5])
observe("bugs-move-output",
        "Each of the {n} bugs moves it, by a TV of {a:.2f} to {b:.2f}; drawn, by {c:.1f} times the noise floor or more.",
        n=len(wrong), a=min(row[2] for row in wrong), b=max(row[2] for row in wrong),
        c=min(row[4] / row[5] for row in wrong), holds=all(row[2] > 0.01 for row in wrong))
better = [row for row in wrong if row[1] > right[1]]
observe("bugs-accept-more",
        "With {n} of the bugs more is accepted than without, up to {a:.0%} instead of {b:.0%}: acceptance alone does "
        "not show them.", n=len(better), a=max(row[1] for row in wrong), b=right[1], holds=len(better) > 0)
