# %% [markdown]
# # 08. How deep to draft
#
# **Question.** The best draft length depends on the text. Which simple rule finds it while the text
# is written?
#
# **Watch for.** A rule that knows what a round costs, beside rules that only see what was accepted:
# where drafting pays, and where it does not.
#
# **Takes.** about 15 s; needs numpy, matplotlib, tokenizers, safetensors.
#
# **Leaves out.** Trees (demo 06). Lookups and a real model (demo 16). Memory (demo 05).

# %%
from dataclasses import dataclass
from functools import cache
from itertools import product

from console import (Count, OneOf, Within, assumptions, figure, observe, print_table, progress,
                     record_samples, subplots)

import numpy as np

from hw_specs import CHIPS, chip
from lab import toy
from lab.drafters.best_tree import chain_accept_lengths
from lab.drafters.draft_length import (AIMD, CostAware, Fixed, Floor, Oracle, generate_in_a_row,
                                       round_seconds, steps)
from lab.drafters.model import ConfidentDrafter, ModelDrafter
from lab.measure.known_texts import KnownText, Remembered
from lab.measure.spread import disturbed
from lab.measure.tree_ranks import new_token_ranks
from lab.toy.drafts import time_forwards
from lab.toy.transformer import generate_batch
from llm_math import MODELS, model, verify_time


@dataclass(frozen=True)
class Assumptions:
    draft: OneOf("small", "medium") = "small"     # Draft model; the target is the large toy.
    requests: Within(2, 16) = 6                   # Prompts of each text, one after the other.
    candidates: Within(16, 200) = 48              # Prompts of each kind to choose them from.
    prompt: Within(8, 64) = 32                    # Tokens of each prompt.
    new_tokens: Within(16, 200) = 64              # Tokens written after each.
    gamma_max: Within(4, 32) = 12                 # Longest draft.
    chip: OneOf(*CHIPS) = "h100-sxm"              # Chip of the cost models.
    target: OneOf(*MODELS) = "llama-3.1-8b"       # Model that gives a target step's time.
    priced: OneOf(*MODELS) = "llama-3.2-1b"       # Model that gives a draft step's time.
    batches: tuple[Count, ...] = (1, 32, 256)     # Sequences decoded together on the chip.
    context: Count = 1024                         # Tokens cached for each of them.
    floor: Within(0.0, 1.0) = 0.35                # Acceptance below which Floor drafts less.
    threshold: Within(0.0, 1.0) = 0.4             # Probability below which Confident stops.
    fitted: Within(0.0, 1.0) = 0.6                # The same for Fitted: best on the default texts.


A = assumptions(Assumptions)

# %% [markdown]
# ## 1. Three texts
#
# The target continues many prompts. Agreement is the share of its tokens that are the draft model's
# likeliest, too. The prompts with the highest agreement make the easy text, those with the lowest
# the hard one. In the alternating text easy and hard prompts take turns.

# %%
target = toy.load("large")
written = generate_batch(target, [ids for kind in toy.KINDS for ids in toy.prompts(
    kind, A.candidates, A.prompt)], A.new_tokens)
# (prompts, new tokens): the rank of the target's token in the draft's list; 0 is its likeliest.
ranks = new_token_ranks(toy.load(A.draft), written, A.prompt)
order = np.argsort((ranks == 0).mean(axis=1), kind="stable")
TEXTS = {"easy": order[::-1][:A.requests], "hard": order[:A.requests]}      # numbers of prompts
TEXTS["alternating"] = np.ravel([TEXTS["easy"], TEXTS["hard"]], order="F")[:A.requests]

# %%
rows = [[text, ranks[at].size, (ranks[at] == 0).mean()] for text, at in TEXTS.items()]
print_table("texts", ["text", "tokens", "agreement"], rows, formats={"agreement": ".2f"})
observe("easy-and-hard", "Agreement is {x:.2f} higher on the easy text than on the hard one.",
        value=rows[0][2] - rows[1][2], at_least=0.2)

# %% [markdown]
# ## 2. What a round costs
#
# A round with gamma drafts takes t(gamma + 1) + gamma c plain steps. t(n): the time of sending n
# tokens over that of sending one. c: a draft step's time over a target step's. The toys write all
# texts. Their costs are those of Llama models, as in demo 05, or those of the toys, measured here.

# %%
SENT = sorted({*(n for n in (1, 2, 3, 5, 9) if n <= A.gamma_max), A.gamma_max + 1})
SECONDS = time_forwards({n: (target, n) for n in SENT} | {"c": (toy.load(A.draft), 1)}, A.prompt)
record_samples("seconds of a forward of the toy", SECONDS)


def costs():
    """{where: ({n: t(n)}, c)}"""
    found, n = {}, np.arange(1, A.gamma_max + 2)
    for batch in A.batches:
        place = chip(A.chip), batch, A.context
        seconds = verify_time(model(A.target), *place, n, overhead=1e-3)
        draft = verify_time(model(A.priced), *place, 1, overhead=0.3e-3)
        found[f"batch {batch}"] = dict(zip(n, seconds / seconds[0])), draft / seconds[0]
    here = {name: np.median(SECONDS[name]) / np.median(SECONDS[1]) for name in SECONDS}
    return found | {"this machine": ({n: here[n] for n in SENT}, here["c"])}


COSTS = costs()
ON_CHIP = [*COSTS][:-1]

# %%
heads = [*(f"t({n})" for n in SENT), "c"]
rows = [[cost, *map(t.get, SENT), c] for cost, (t, c) in COSTS.items()]
print_table("costs", ["costs", *heads], rows, formats=dict.fromkeys(heads, ".2f"), measured=heads,
            title=f"{A.target} and {A.priced} on {A.chip}; the toy on this machine")

# %% [markdown]
# ## 3. Which policy is fastest?
#
# A policy chooses gamma before a round, or stops while it drafts. These know no costs:
#
# - **Always 4.** (**Best fixed** is the best length for a text and cost, found afterwards.)
# - **AIMD.** Begin at 4. After a full acceptance draft one more, after a refusal half as many, at
#   least 1. **AIMD least 4** never drafts fewer than 4.
# - **Floor.** Begin at 4.
#   1. After every 8 tested tokens: if less than `floor` was accepted, halve gamma, down to 0.
#      Otherwise double it, up to 4.
#   2. At 0, wait 32 rounds, then go on with gamma 1.
# - **Confident.** Stop behind the first token that the draft model gives a probability below
#   `threshold`. **Fitted** has the threshold that is best on the default texts.
#
# **Cost-aware** knows t(n) and c:
#
# 1. Estimate the acceptance at each draft position. Recent rounds count more.
# 2. For each gamma from 0, divide the expected tokens by the time of the round. Take the best.
# 3. If that is 0, spend 1% of the time on trying a draft.
#
# The **oracle** knows in advance what would be accepted. Regret is the extra time over its time, a
# mean over texts. The texts are written already, so what a round accepts is looked up there.

# %%
chain = ModelDrafter(Remembered(toy.load(A.draft)))           # runs each forward once


def policies(text, cost):
    """{name: (policy, drafter)}"""
    accepts = chain_accept_lengths(ranks[TEXTS[text]], A.gamma_max)
    return {
        "plain": (Fixed(0), chain),
        "always 4": (Fixed(4), chain),
        "AIMD": (AIMD(first=4, least=1, most=A.gamma_max), chain),
        "AIMD least 4": (AIMD(first=4, least=4, most=A.gamma_max), chain),
        "floor": (Floor(4, A.floor), chain),
        "confident": (Fixed(A.gamma_max), ConfidentDrafter(chain.model, A.threshold)),
        "fitted": (Fixed(A.gamma_max), ConfidentDrafter(chain.model, A.fitted)),
        "cost-aware": (CostAware(*COSTS[cost], A.gamma_max), chain),
        "oracle": (Oracle(accepts, *COSTS[cost], A.gamma_max), chain),
    }


def decode(text, policy, drafter, by=None):
    """(texts, rounds) of all prompts: by a decoder, or counted on what the target wrote."""
    decoders = [by or KnownText(written[i], target) for i in TEXTS[text]]
    prompts = written[TEXTS[text], :A.prompt]
    return generate_in_a_row(decoders, drafter, prompts, A.new_tokens, policy)


@cache
def fixed(text, gamma):
    return decode(text, Fixed(gamma), chain)[1]


def speed(run, cost):
    """Tokens in the time of a plain step."""
    return run.n_tokens / steps(run, round_seconds(*COSTS[cost], A.gamma_max))


def speeds(cost, text):
    """{policy: speed}"""
    best = max(speed(fixed(text, gamma), cost) for gamma in range(A.gamma_max + 1))
    return {"best fixed": best} | {name: speed(decode(text, *how)[1], cost)
                                   for name, how in policies(text, cost).items()}


def ratios(policy, other, costs=ON_CHIP):
    """(texts and costs,): a policy's speed over another's."""
    found = [SPEEDS[place] for place in product(costs, TEXTS)]
    return np.array([of[policy] / of[other] for of in found])


SPEEDS = {place: speeds(*place) for place in progress([*product(COSTS, TEXTS)], "policies")}

# %%
heads = [*TEXTS, "regret"]
for cost in COSTS:
    rows = [[name, *ratios(name, "plain", [cost]), ratios("oracle", name, [cost]).mean() - 1]
            for name in SPEEDS[cost, "easy"]]
    print_table(f"speed-{cost}", ["policy", *heads], rows, title=f"Speed over plain: {cost}",
                formats=dict.fromkeys(TEXTS, ".2f") | {"regret": ".0%"},
                measured=[] if cost in ON_CHIP else heads)

# %%
observe("near-best-fixed", "On the chip, cost-aware has at least {x:.2f} of best fixed's speed.",
        value=ratios("cost-aware", "best fixed").min(), at_least=0.9)
observe("never-slower", "On the chip, cost-aware has at least {x:.2f} of plain decoding's speed.",
        value=ratios("cost-aware", "plain").min(), at_least=0.98)
observe("length-matters", "On the chip, always 4 has as little as {x:.2f} of best fixed's speed.",
        value=ratios("always 4", "best fixed").min(), at_most=0.9)
REGRET = {name: ratios("oracle", name).mean() - 1 for name in SPEEDS[cost, "easy"]}
observe("oracle-fastest", "On the chip, the others have at most {x:.3f} of the oracle's speed.",
        value=max(ratios(name, "oracle").max() for name in [*REGRET][:-1]), at_most=1 + 1e-9)
observe("least-regret", "Over all batches, cost-aware has {x:.2f} x the least regret of"
        " always 4, AIMD, floor and confident.", at_most=1, value=REGRET["cost-aware"]
        / min(REGRET[name] for name in ("always 4", "AIMD", "floor", "confident")))
observe("fitting-helps", "Over all batches, cost-aware has {x:.2f} x the regret of fitted.",
        value=REGRET["cost-aware"] / REGRET["fitted"], at_least=1)
observe("plain-is-as-fast", "On this machine, plain decoding has {x:.2f} of cost-aware's speed.",
        value=ratios("plain", "cost-aware", ["this machine"]).mean(), at_least=0.9, measured=True,
        not_judged=disturbed(np.transpose([np.median(SECONDS[n], 1) for n in SENT])))

# %% [markdown]
# ## 4. By the target itself
#
# Now the target writes the alternating text with each policy, at the costs of the first batch.
# In the figure a bar is a round, as wide as the tokens that it wrote.

# %%
MADE = {name: decode("alternating", *how, by=target) for name, how in
        progress(policies("alternating", ON_CHIP[0]).items(), "by the target")}
observe("same-text", "{x} of its tokens differ from plain decoding's.", at_most=0, value=sum(
    int((texts != written[TEXTS["alternating"]]).sum()) for texts, _ in MADE.values()))
observe("same-rounds", "{x} of {n} policies differ in speed from section 3.", n=len(MADE),
        at_most=0, value=sum(speed(run, ON_CHIP[0]) != SPEEDS[ON_CHIP[0], "alternating"][name]
                             for name, (_, run) in MADE.items()))


def draw(names):
    """The figure: the rounds of these policies, one below the other."""
    fig, axes = subplots(len(names), 1, size=(8.0, 8.5), sharex=True, sharey=True)
    for axis, name in zip(axes, names):
        rounds = MADE[name][1].rounds
        ends = np.cumsum([0, *(r.accepted + 1 for r in rounds)])
        axis.stairs([r.drafted for r in rounds], ends, fill=True, color="0.8", label="drafted")
        axis.stairs([r.accepted for r in rounds], ends, fill=True, color="C0", label="accepted")
        axis.set(ylabel="tokens", title=name, xticks=range(0, ends[-1] + 1, A.new_tokens))
        axis.grid(axis="x", color="k", ls=":")
    axes[0].legend(loc="upper right", ncol=2)
    axes[-1].set_xlabel("tokens written; easy and hard prompts take turns at the dotted lines")
    figure("lengths", fig, "draft lengths over the alternating text")


draw(["AIMD", "floor", "confident", "cost-aware", "oracle"])
