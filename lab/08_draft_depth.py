# %% [markdown]
# # 08. How deep to draft
#
# **Question.** The best draft length depends on the text, and that changes as it is written. Which simple rule finds it,
# without knowing the text?
#
# **Watch for.** What a length fixed for one text costs on another. A rule that knows only acceptance, one that knows
# what a round costs as well, and one that looks at how sure the draft is of each token. What is lost where nothing
# pays, and how far all of them stay behind an oracle.
#
# **Takes.** about 12 s; needs numpy, matplotlib, tokenizers, safetensors.
#
# **Leaves out.** Trees (demo 06). Whether a batch fits in memory (demo 05). Lookups, whose drafts cost nothing, and a
# real model (demo 16).

# %%
from dataclasses import dataclass
from time import perf_counter

from console import (BadInput, Count, OneOf, Within, assumptions, figure, observe, print_table,
                     progress, record_samples, subplots)

import numpy as np

from decode_lab import Run, speculative_generate
from lab.drafters.best_tree import accept_lengths_to_end, draft_ranks
from lab.drafters.model import ModelDrafter
from lab.drafters.trees import TreeShape
from hw_specs import CHIPS, chip
from lab import toy
from lab.drafters.draft_length import AIMD, CostAware, Fixed, Floor, Oracle, round_seconds, steps
from lab.drafters.model import ConfidentDrafter
from lab.measure.known_texts import KnownText, Remembered
from lab.toy.transformer import generate_batch
from llm_math import MODELS, model, verify_time


@dataclass(frozen=True)
class Assumptions:
    draft: OneOf("small", "medium") = "small"              # Draft model of the toy family; the large one is the target.
    requests: Within(2, 16) = 6                            # Prompts of each text, one after the other.
    candidates: Within(8, 200) = 48                        # Prompts of each kind of held-out text to choose them from.
    new_tokens: Within(16, 200) = 64                       # Tokens written after each.
    gamma_max: Within(4, 32) = 12                          # Longest draft of any policy.
    chip: OneOf(*CHIPS) = "h100-sxm"                       # Chip of the cost models.
    target: OneOf(*MODELS) = "llama-3.1-8b"                # Model whose step is the price of a target step there.
    priced: OneOf(*MODELS) = "llama-3.2-1b"                # Model whose step is the price of a draft step there.
    batches: tuple[Count, ...] = (1, 32, 256)              # Sequences decoded together on it.
    context: Count = 1024                                  # Tokens cached for each of them.
    overhead_target_ms: Within(0.0, 1e4) = 1.0             # A target forward besides bytes and FLOPs, ms.
    overhead_draft_ms: Within(0.0, 1e4) = 0.3              # The same for a draft step, ms.
    floor: Within(0.0, 1.0) = 0.35                         # Acceptance below which the floor policy drafts less.
    threshold: Within(0.0, 1.0) = 0.4                      # Probability below which the confident draft ends.
    repeats: Within(1, 1000) = 15                          # Timings of each forward on this machine.

    def __post_init__(self):
        if self.requests > self.candidates:
            raise BadInput(f"--requests is {self.requests}, but only {self.candidates} --candidates are there to choose "
                           "from")


A = assumptions(Assumptions)

# %% [markdown]
# ## 1. Three texts
#
# The target continues prompts of held-out code and prose. How many tokens of a draft it would accept is known behind
# each of its tokens, without speculating: as many as it agrees on. The prompts with the most agreement make the easy
# text, those with the least the hard one, and the best of both take turns in the third. Greedy text of a small model
# soon repeats itself: an easy text is often a loop that the draft joins, a hard one a loop that it does not.
#
# A text is a stream of requests: a policy goes on from one to the next, and does not know where they end. Accept length:
# accepted tokens of the longest draft, on average over all places where one could begin.

# %%
PROMPT, target = 32, toy.load("large")
draft = Remembered(toy.load(A.draft))                      # a greedy draft behind a text is the same under every policy
pool = np.array([ids for kind in toy.KINDS for ids in toy.prompts(kind, A.candidates, PROMPT)])
written = generate_batch(target, pool, A.new_tokens)
ranks = draft_ranks(toy.load(A.draft).full_logits(written)[:, PROMPT - 1:], written[:, PROMPT - 1:])
order, half = np.argsort((ranks == 0).mean(axis=1), kind="stable"), (A.requests + 1) // 2
chosen = {"easy": order[::-1][:A.requests], "hard": order[:A.requests]}
chosen["alternating"] = np.ravel([chosen["easy"][:half], chosen["hard"][:half]], order="F")[:A.requests]
chain = TreeShape.branching((1,) * A.gamma_max)
# Behind each new token of a text, the drafted tokens that would be accepted.
accepts = {text: np.concatenate([accept_lengths_to_end(row, chain) for row in ranks[requests]])
           for text, requests in chosen.items()}
print_table("texts", ["text", "requests", "tokens", "agreement", "accept length"], [
    [text, len(requests), len(accepts[text]), (ranks[requests] == 0).mean(), np.mean(accepts[text])]
    for text, requests in chosen.items()], formats={"agreement": ".2f", "accept length": ".2f"},
    title=f"Where the {A.draft} draft's likeliest token is the target's, and tokens accepted of {A.gamma_max} on average")
agree = {text: float((ranks[requests] == 0).mean()) for text, requests in chosen.items()}
observe("easy-and-hard",
        "The draft agrees on {a:.0%} of the easy text and {b:.0%} of the hard one.", a=agree["easy"], b=agree["hard"],
        holds=agree["easy"] > agree["hard"] + 0.2)

# %% [markdown]
# ## 2. What a round costs
#
# A round of gamma drafts costs t(gamma + 1), the time of sending gamma + 1 tokens over that of one, and gamma c,
# the draft's steps. On the chip both come from demo 05's model; on this machine from timing the toy itself.

# %%
def step(shape, batch, n, overhead_ms):
    return verify_time(shape, chip(A.chip), batch, A.context, n, overhead_ms / 1e3)


costs = {}
for batch in A.batches:
    one = step(model(A.target), batch, 1, A.overhead_target_ms)
    costs[f"batch {batch}"] = ({n: step(model(A.target), batch, n, A.overhead_target_ms) / one
                                for n in range(1, A.gamma_max + 2)},
                               step(model(A.priced), batch, 1, A.overhead_draft_ms) / one)
sent, small, HERE = sorted({*(n for n in (1, 2, 3, 5, 9) if n <= A.gamma_max), A.gamma_max + 1}), toy.load(A.draft), "this machine"
timed = {**{n: (target, n) for n in sent}, "draft": (small, 1)}
seconds = {name: [] for name in timed}
for _ in range(A.repeats + 2):
    for name, (each, n) in timed.items():                  # in turn, so that a slow moment hits all alike
        each.rewind(0)
        each.send(written[0][:PROMPT])
        started = perf_counter()
        each.send(np.resize(written[0], PROMPT + n)[PROMPT:])
        seconds[name].append(perf_counter() - started)
here = {name: float(np.median(x[2:])) for name, x in seconds.items()}
record_samples("seconds of a forward of the toy", seconds)
costs[HERE] = {n: here[n] / here[1] for n in sent}, here["draft"] / here[1]
COSTS = [name for name in costs if name != HERE]
for names, measured in ((COSTS, []), ([HERE], [f"t({n})" for n in sent] + ["c"])):
    print_table(f"costs-{'models' if names == COSTS else 'here'}",
                ["cost model", *(f"t({n})" for n in sent), "c"], [[name, *(costs[name][0][n] for n in sent),
                                                                   costs[name][1]]
                for name in names], formats=dict.fromkeys([*(f"t({n})" for n in sent), "c"], ".2f"), measured=measured,
                title=f"{model(A.target).name} and {model(A.priced).name} on {chip(A.chip).name}" if names == COSTS else
                "The toy on this machine")

# %% [markdown]
# ## 3. The policies
#
# The rules stand in lab/drafters/draft_length.py.
#
# - **Fixed**: always the same gamma. *Best fixed* is the best one for this text and cost, found afterwards.
# - **AIMD**: one token more after a full acceptance, half as many after a refusal, at least 1. *AIMD least 4* may not
#   go below 4.
# - **Floor**: look at the last 8 tested tokens. If fewer than a share of them were accepted, draft half as many, down to
#   none; else twice as many, up to 4. After 32 rounds without drafts, try one token.
# - **Confident**: draft until the draft model gives its own token little chance. That token is still sent, so at least
#   one is drafted.
# - **Cost-aware**: the gamma, 0 included, with the most expected tokens for its cost. It estimates the acceptance at
#   each draft position from the last ten rounds or so. Where nothing pays, 1% of the time goes into trying. *With
#   confidence* it also ends a draft as Confident does.
# - **Oracle**: knows every accept length in advance. *Regret* is the share by which a text costs more than with it.
#
# AIMD and Floor begin at 4. No number is fitted to these texts, and no policy knows the acceptance in advance.
#
# A greedy text depends on the target alone. So the rounds are counted on the text that it wrote, with no forward of
# the target, and the same rounds are priced by every cost model.

# %%
def decode(text: str, policy, drafter, on_target: bool = False) -> tuple[list[int], Run]:
    """A text's requests in a row -> (their tokens, their rounds): by the target itself, or on what it wrote."""
    stream, tokens = Run(), []
    for i in chosen[text]:
        before = len(stream.rounds)

        def gamma(run):
            stream.rounds[before:] = run.rounds
            return policy(stream)

        by = target if on_target else KnownText(written[i], target)
        made, run = speculative_generate(by, drafter, pool[i], A.new_tokens, gamma)
        stream.rounds[before:] = run.rounds
        tokens += made.tolist()
    return tokens, stream


priced = {cost: round_seconds(*how, A.gamma_max) for cost, how in costs.items()}          # of a round, by gamma
chained, confident, gammas = ModelDrafter(draft), ConfidentDrafter(draft, A.threshold), range(A.gamma_max + 1)
unpriced = {**{gamma: (Fixed(gamma), chained) for gamma in gammas}, "AIMD": (AIMD(least=1, most=A.gamma_max), chained),
            "AIMD least 4": (AIMD(least=4, most=A.gamma_max), chained), "floor": (Floor(4, A.floor), chained),
            "confident": (Fixed(A.gamma_max), confident)}
runs, speed, best = {}, {}, {}
for text in progress(chosen, "texts"):
    made = {name: decode(text, *how)[1] for name, how in unpriced.items()}
    for cost, how in costs.items():
        made["cost-aware"] = decode(text, CostAware(*how, A.gamma_max), chained)[1]
        made["with confidence"] = decode(text, CostAware(*how, A.gamma_max), confident)[1]
        made["oracle"] = decode(text, Oracle(accepts[text], *how, A.gamma_max), chained)[1]
        runs[text, cost] = dict(made)
        speed[text, cost] = {name: run.n_tokens / steps(run, priced[cost]) for name, run in made.items()}
        best[text, cost] = max(gammas, key=speed[text, cost].get)
        runs[text, cost]["best fixed"] = made[best[text, cost]]
        speed[text, cost]["best fixed"] = speed[text, cost][best[text, cost]]
POLICIES = ("AIMD", "AIMD least 4", "floor", "confident", "cost-aware", "with confidence", "oracle")


def regret(name, text: str, cost: str) -> float:
    """The share by which a text costs more than with the oracle."""
    return speed[text, cost]["oracle"] / speed[text, cost][name] - 1


usual, heads = min(4, A.gamma_max), [*chosen, *(f"regret {text}" for text in chosen)]
for cost in costs:
    print_table(f"speed-{cost}", ["policy", *heads], [
        [said, *(speed[text, cost][name] for text in chosen), *(regret(name, text, cost) for text in chosen)]
        for said, name in (("plain", 0), (f"fixed {usual}", usual), *((name, name) for name in ("best fixed", *POLICIES)))],
        title=f"Speedup: tokens for the cost of a plain step; regret against the oracle: {cost}",
        formats=dict.fromkeys(chosen, ".2f") | dict.fromkeys(heads[3:], ".0%"), measured=heads if cost == HERE else [])
rows, lengths = [], [f"{what} {text}" for text in chosen for what in ("gamma", "tau")]
for policy, cost in (*((name, "") for name in POLICIES[:4]), *((name, cost) for cost in COSTS for name in (
        "best fixed", *POLICIES[4:]))):
    each = [runs[text, cost or COSTS[0]][policy] for text in chosen]
    rows.append([policy, cost, *(x for run in each for x in (run.drafted / len(run.rounds), run.tau))])
print_table("lengths",
            ["policy", "cost model", *lengths], rows, title="Drafted per round (gamma), and tokens per round (tau)",
            formats=dict.fromkeys(lengths, ".1f") | dict.fromkeys(lengths[1::2], ".2f"))

places = [(text, cost) for cost in COSTS for text in chosen]
kept = {place: speed[place]["cost-aware"] / speed[place]["best fixed"] for place in places}
observe("near-best-fixed",
        "Told nothing of the text, the cost-aware policy keeps {low:.2f} or more of the best fixed gamma of each text "
        "under each cost model: at least 0.90.", low=min(kept.values()), holds=min(kept.values()) >= 0.9)
useless = [place for place in places if speed[place]["best fixed"] < 1.02]
low = min(speed[place]["cost-aware"] for place in places)
observe("never-slower",
        "In {n} of {of} cases no fixed gamma gains 2%. Nowhere does the policy fall below {low:.3f} of plain decoding's "
        "speed: at least 0.98.", low=low, n=len(useless), of=len(places), holds=low >= 0.98)
unaware = ("AIMD", "floor", usual)  # those that know no costs, and look at no draft's confidence


def mean_regret(name, where) -> float:
    """On average over texts and these cost models."""
    return float(np.mean([regret(name, text, cost) for cost in where for text in chosen]))


least = min(unaware, key=lambda name: mean_regret(name, COSTS))
observe("least-regret",
        "On average over texts and predicted cost models the cost-aware policy has a regret of {a:.0%}. Of AIMD, floor and "
        "always {n}, which know no costs, the best has {b:.0%}: the first is {x:.2f} times the second.", n=usual,
        a=mean_regret("cost-aware", COSTS), b=mean_regret(least, COSTS),
        value=mean_regret("cost-aware", COSTS) / mean_regret(least, COSTS), at_most=1)
observe("confidence-competes",
        "A confident draft, which knows no costs either, has {x:.2f} times the regret of the cost-aware policy.",
        value=mean_regret("confident", COSTS) / mean_regret("cost-aware", COSTS), at_most=1.2)
observe("plain-is-hard-to-beat",
        "With the toy's own times on this machine the cost-aware policy has a regret of {a:.0%}, and plain decoding {b:.0%}: "
        "a difference of {x:.1%}.", a=mean_regret("cost-aware", [HERE]), b=mean_regret(0, [HERE]), measured=True,
        value=mean_regret("cost-aware", [HERE]) - mean_regret(0, [HERE]), at_most=0.05)
wrong = {cost: speed["hard", cost][best["easy", cost]] / speed["hard", cost][best["hard", cost]] for cost in COSTS}
worst = min(wrong, key=wrong.get)
observe("other-length-costs",
        "A length fixed for another text costs time: the easy text's best, {g}, reaches {x:.2f} of what the hard text's "
        "best, {h}, does ({cost}).", g=best["easy", worst], h=best["hard", worst], x=wrong[worst], cost=worst,
        holds=wrong[worst] < 0.9)
low = min(speed[text, HERE]["cost-aware"] / max(speed[text, HERE]["best fixed"], 1) for text in chosen)
observe("near-best-here",
        "With the toy's own times on this machine it keeps {low:.2f} of the better of plain decoding and the best "
        "fixed gamma: at least 0.90.", low=low, measured=True, holds=low >= 0.9)
beaten = max(speed[place][name] / speed[place]["oracle"] for place in places for name in speed[place])
observe("oracle-fastest",
        "Nothing is faster than the oracle: {x:.3f} of its speed at most.", x=beaten, holds=beaten <= 1 + 1e-9)

# %% [markdown]
# ## 4. By the target itself
#
# The rounds above were counted on the target's text. Now the target writes the alternating text with each policy:
# the same tokens, in the same rounds. In the figure a bar is a round, as wide as the tokens it wrote; near the end of a
# request drafts are cut short.

# %%
cost, same, alike = COSTS[0], [], []
named = {"AIMD": unpriced["AIMD"], "floor": unpriced["floor"], "confident": unpriced["confident"],
         "cost-aware": (CostAware(*costs[cost], A.gamma_max), chained)}
for name, how in progress(named.items(), "the target itself"):
    tokens, run = decode("alternating", *how, on_target=True)
    same.append(tokens == written[chosen["alternating"]].ravel().tolist())
    alike.append([(r.drafted, r.accepted) for r in run.rounds]
                 == [(r.drafted, r.accepted) for r in runs["alternating", cost][name].rounds])
observe("same-text",
        "Under each of {n} policies the target writes what plain decoding writes, in the rounds that were counted.",
        n=len(same), holds=all(same) and all(alike))
fig, axes = subplots(len(named) + 1, 1, size=(8.0, 9.0), sharex=True, sharey=True)
for axis, name in zip(axes, (*named, "oracle")):
    rounds = runs["alternating", cost][name].rounds
    at = np.cumsum([0, *(r.accepted + 1 for r in rounds)])
    axis.stairs([r.drafted for r in rounds], at, fill=True, color="0.8", label="drafted")
    axis.stairs([r.accepted for r in rounds], at, fill=True, color="tab:blue", label="accepted")
    for i in range(A.requests):
        axis.axvline(i * A.new_tokens, color="k", lw=0.8, ls=":")
    axis.set(ylabel="tokens", title=name if name in unpriced else f"{name}, {cost}")
for i in range(A.requests):
    axes[0].text((i + 0.5) * A.new_tokens, 1.35 * A.gamma_max, ("easy", "hard")[i % 2], ha="center", va="top")
axes[0].set_ylim(0, 1.4 * A.gamma_max)
axes[1].legend(loc="upper right", ncol=2, fontsize=8)
axes[-1].set(xlabel="tokens written")
figure("lengths", fig, "draft length over the alternating text, and what was accepted")
