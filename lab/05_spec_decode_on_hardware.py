# %% [markdown]
# # 05. Speculative decoding on hardware
#
# **Question.** On a given chip, with a given pair of models, how long should a draft be, and when does
# speculation stop paying?
#
# **Watch for.** Verifying several tokens costs as much as writing one, as long as reading the weights takes
# longer than the arithmetic. A batch uses up that spare arithmetic; a tree uses it up faster than a chain.
#
# **Takes.** about 3 s; needs numpy, matplotlib, tokenizers, safetensors.
#
# **Leaves out.** Times are formulas: bytes and FLOPs over assumed shares of the data sheet, plus an overhead.
# No kernels, no scheduling, no several chips. Demo 06 verifies the trees of section 3, 14 a real model.

# %%
from dataclasses import dataclass

from console import (Alpha, Count, Share, NonNegative, OneOf, Within, assumptions, figure, fmt_bytes,
                     fmt_count, fmt_time, observe, print_table, print_text, sliders, subplots)

import numpy as np

from lab.drafters.best_tree import draft_ranks, tree_accept_lengths
from lab.drafters.trees import TreeShape
from hw_specs import CHIPS, chip
from lab import toy
from lab.models.quant import quantize_params
from lab.toy.transformer import TransformerLM, config_like, generate_batch, init_params, truncate
from llm_math import MODELS, best_round, expected_tokens, max_batch, model, verify_time

Cost, Short = Within(0.0, 1e6), Within(6, 128)             # the deepest tree has 6 levels


@dataclass(frozen=True)
class Assumptions:
    chip: OneOf(*CHIPS) = "h100-sxm"                       # Chip.
    target: OneOf(*MODELS) = "llama-3.1-8b"                # Target model.
    draft: OneOf(*MODELS) = "llama-3.2-1b"                 # Draft model, sections 1 and 2.
    batch: Count = 1                                       # Sequences decoded together, section 1.
    context: Count = 1024                                  # Tokens cached per sequence, sections 1 and 3.
    alpha: Alpha = 0.8                                     # Acceptance rate of a drafted token.
    alphas: tuple[Alpha, ...] = (0.6, 0.7, 0.8, 0.9)       # Acceptance rates, section 1.
    sent: tuple[Count, ...] = (1, 2, 3, 5, 9, 17, 33, 65, 129, 257)            # Tokens of one target forward.
    batches: tuple[Count, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)       # Batches of section 2.
    contexts: tuple[Count, ...] = (512, 4096, 32768)       # Contexts of section 2.
    overhead_target_ms: Cost = 1.0                         # A target forward besides bytes and FLOPs, ms.
    overhead_draft_ms: Cost = 0.3                          # The same for a draft step, ms.
    flop_efficiency: Share = 0.6                           # Share of the peak rate that large products reach.
    byte_efficiency: Share = 0.8                           # Share of the bandwidth that streaming reaches.
    tree_batches: tuple[Count, ...] = (1, 32)              # Batches of section 3.
    level_cost: Cost = 0.05                                # Drafting a tree level, share of a plain step.
    text: OneOf("code", "prose") = "code"                  # Held-out text that the toy's sequences continue.
    sequences: Within(1, 512) = 64                         # Greedy sequences of the toy.
    prompt_tokens: Short = 16                              # Prompt of each, tokens.
    new_tokens: Short = 48                                 # Greedy continuation of each, tokens.
    seed: NonNegative = 0                                  # Of the random weights.


A = assumptions(Assumptions)
for sentence in toy.past_training(A.prompt_tokens + A.new_tokens):
    print_text(sentence)

# %% [markdown]
# ## 1. One chip, one pair of models
#
# A forward takes the larger of two times, reading bytes and doing arithmetic, plus an overhead. A draft step
# costs c of that. A round makes gamma draft steps, then sends gamma + 1 tokens to the target in one forward.
# tau: tokens per round, one of the target's own, the bonus token, included. Verify ratio: time of verifying
# gamma + 1 tokens over that of one plain step. The speedup is tau / (gamma c + verify ratio).

# %%
CHIP, TARGET, DRAFT = chip(A.chip), model(A.target), model(A.draft)
EFFICIENCY = dict(flop_efficiency=A.flop_efficiency, byte_efficiency=A.byte_efficiency)
MEMORY = f"{CHIP.memory / 1e9:.0f} GB"


def seconds(n=1, batch=A.batch, context=A.context, draft=False):
    """Time of one forward that sends n tokens per sequence."""
    shape, overhead_ms = (DRAFT, A.overhead_draft_ms) if draft else (TARGET, A.overhead_target_ms)
    return verify_time(shape, CHIP, batch, context, n, overhead_ms / 1e3, **EFFICIENCY)


def plan(batch, context, alpha):
    """(best gamma, predicted round), or (0, None) where no draft pays."""
    return best_round(TARGET, DRAFT, CHIP, batch, context, alpha, A.overhead_target_ms / 1e3,
                      A.overhead_draft_ms / 1e3, **EFFICIENCY)


plain, step = seconds(), seconds(draft=True)
read, draft_read = (m.streamed_bytes() + A.batch * m.kv_bytes(A.context) for m in (TARGET, DRAFT))
print_table("one-step", ["model", "parameters", "bytes read", "overhead, ms", "step", "of target's"],
            [[TARGET.name, TARGET.n_params(), read, A.overhead_target_ms, plain, 1.0],
             [DRAFT.name, DRAFT.n_params(), draft_read, A.overhead_draft_ms, step, step / plain]],
            title=f"One decode step on {CHIP.name}, batch {A.batch}, context {A.context}",
            formats={"parameters": fmt_count, "bytes read": fmt_bytes, "step": fmt_time})
observe("fits",
        "Weights and caches of both, {n} tokens for each of {b} sequence(s), fit in {memory}.", n=A.context,
        b=A.batch, memory=MEMORY, holds=A.batch <= max_batch(TARGET, CHIP, A.context, draft=DRAFT))
c, share = step / plain, draft_read / read
observe("c-above-bytes",
        "c = {c:.3f}, more than the draft's share of the bytes, {share:.3f}: overhead shrinks less "
        "than the bytes.", c=c, share=share, holds=c > share)
reading = read / (CHIP.bandwidth * A.byte_efficiency) + A.overhead_target_ms / 1e3
print_table("verify-ratio", ["tokens sent", "forward", "verify ratio", "bound by"],
            [[n, t, t / plain, "arithmetic" if t > reading * (1 + 1e-9) else "bytes"]
             for n, t in zip(A.sent, seconds(np.array(A.sent)))],
            title="Verifying n tokens in one forward", formats={"forward": fmt_time, "verify ratio": ".3f"})
rounds = {alpha: plan(A.batch, A.context, alpha) for alpha in sorted({*A.alphas, A.alpha})}
print_table("best-gamma", ["alpha", "gamma", "c", "tau", "verify ratio", "speedup", "tokens/s"],
            [[alpha, gamma, c, *((r.tau, r.verify_ratio, r.speedup) if r else (1.0, None, 1.0)),
              A.batch * (r.speedup if r else 1.0) / plain] for alpha, (gamma, r) in rounds.items()],
            title=f"Best draft length ({A.batch / plain:.0f} tokens/s without speculation)",
            formats={"alpha": "g", "tau": ".2f", "verify ratio": ".3f", "speedup": ".2f", "tokens/s": ".0f"})
longest = 1 + max(gamma for gamma, _ in rounds.values())
observe("verify-cheap", "Verifying the longest of these drafts, {n} tokens, costs less than 5% more than one "
        "token ({x:.1%}).", n=longest, x=seconds(longest) / plain - 1, holds=seconds(longest) < 1.05 * plain)
gamma, best = rounds[A.alpha]
gain = best.speedup if best else 1.0
observe("fast-enough",
        "At alpha = {a:g} speculation makes decoding at least 1.5 times as fast ({s:.2f} times, with the "
        "best gamma, {g}; drafts that take no time would make it {t:.2f}).", a=A.alpha, g=gamma, s=gain,
        t=expected_tokens(A.alpha, gamma) * plain / seconds(gamma + 1), holds=gain >= 1.5)

# %% [markdown]
# ## 2. Batch and context
#
# Weights are read once for the whole batch, so each sequence has less arithmetic to spare. A cache is read
# once per sequence however many tokens are verified, so a long context leaves time for arithmetic; but the
# draft has a cache too, and c tends to the ratio of the two. Where gamma is 0 no draft pays, and the verify
# ratio is that of two tokens. Speculation stops paying at the alpha in the column "pays above": c plus what
# verifying a drafted token adds, in plain steps; never, from 1 on. "16+ too big": 16 and more do not fit.

# %%
COLUMNS = ["context", "batch", "gamma", "c", "tau", "verify ratio", "speedup", "pays above", "verdict"]
SHOWN = dict.fromkeys(COLUMNS[4:8], ".2f") | {"c": ".3f"}


def cell(batch, context, alpha=A.alpha) -> dict:
    """A row of the table; what does not fit is not computed."""
    if batch > max_batch(TARGET, CHIP, context, draft=DRAFT):
        return dict.fromkeys(COLUMNS) | dict(context=context, batch=batch, verdict=f"{batch}+ too big")
    gamma, r = plan(batch, context, alpha)
    tau, gain, verdict = (r.tau, r.speedup, "pays") if r else (1.0, 1.0, "does not pay")
    one, two, sent = seconds(np.array([1, 2, max(gamma, 1) + 1]), batch, context)
    c, two, ratio = seconds(1, batch, context, draft=True) / one, two / one, sent / one
    # One drafted token pays if 1 + alpha > c + two; each later one is accepted more rarely, at no lower cost.
    return dict(zip(COLUMNS, (context, batch, gamma, c, tau, ratio, gain, c + two - 1, verdict)))


batches, contexts, short = sorted({*A.batches}), sorted({*A.contexts}), min(A.contexts)
fine = sorted({*contexts, *(2**k for k in range(1, 20) if short < 2**k < contexts[-1])})     # of the figure
cells = {(n, b): cell(b, n) for n in fine for b in batches}
fits = {place: row for place, row in cells.items() if row["gamma"] is not None}
rows = [list(cells[n, b].values()) for n in contexts for i, b in enumerate(batches)
        if i == 0 or (n, batches[i - 1]) in fits]
print_table("grid", COLUMNS, rows, formats=SHOWN,
            title=f"{TARGET.name} with {DRAFT.name} on {CHIP.name} ({MEMORY}), alpha = {A.alpha:g}")
shown = [row["gamma"] > 0 for (n, _), row in fits.items() if n in contexts]
observe("pays-where-fits",
        "At alpha = {a:g} speculation pays in all cells that fit ({m} of {k}; {n} do not fit).", a=A.alpha,
        m=sum(shown), k=len(shown), n=len(contexts) * len(batches) - len(shown), holds=shown and all(shown))
near = [row for (n, _), row in fits.items() if n == short]
if len(near) > 1:
    (d, x, p), (e, y, q) = ([near[i][key] for key in ("batch", "speedup", "pays above")] for i in (0, -1))
    observe("batch-lowers",
            "A batch lowers the speedup, and raises the alpha above which speculation pays (context "
            "{n}: {x:.2f} and {p:.2f} at batch {d}, {y:.2f} and {q:.2f} at batch {e}).", n=short, d=d, x=x,
            p=p, e=e, y=y, q=q, holds=x > y and p < q)
full = [row["batch"] for row in near if row["verify ratio"] > 1 + 1e-9]                   # of arithmetic
far = list({b: row for (_, b), row in fits.items()}.values())                # the same at the longest context
for part, claim in ((1, "arithmetic is the limit, a longer context keeps more of the speedup"),
                    (0.9, "bytes are the limit, a longer context costs less than a tenth of the speedup")):
    for x, y in [(x, y) for x, y in zip(near, far) if y is not x and (x["batch"] in full) == (part == 1)][:1]:
        s, t, row = x["speedup"], y["speedup"], dict(b=x["batch"], m=y["context"], c=x["c"], d=y["c"])
        observe(f"context-{'arithmetic' if part == 1 else 'bytes'}",
                "Where " + claim + " (batch {b}: {s:.2f} at context {n}, {t:.2f} at {m}; the draft's "
                "cache takes c from {c:.3f} to {d:.3f}).", holds=t > part * s, s=s, t=t, n=short, **row)
if near and all(y is x for x, y in zip(near, far) if x["batch"] in full):
    print_text(f"At context {short} " + (
        f"arithmetic is the limit at batch {', '.join(map(str, full))}: no longer context to compare with."
        if full else "bytes are the limit at all batches that fit: a longer cache has nothing to hide."))
speed = np.array([[cells[n, b]["speedup"] or np.nan for b in batches] for n in fine])
fig, axis = subplots(size=(7.2, 4.2), subplot_kw={"facecolor": "0.9"})
shade = axis.imshow(speed, origin="lower", aspect="auto", vmin=1, vmax=max(2, np.nanmax(speed, initial=1)))
for (i, j), x in np.ndenumerate(speed):
    axis.text(j, i, "-" if np.isnan(x) else f"{x:.2f}", ha="center", va="center", fontsize=8,
              color="white" if shade.norm(x) < 0.6 else "black")
axis.set(xlabel="batch, sequences", xticks=range(len(batches)), xticklabels=batches,
         ylabel="context, tokens", yticks=range(len(fine)), yticklabels=fine,
         title=f"Speedup at alpha = {A.alpha:g} on {CHIP.name} (-: does not fit in {MEMORY})")
fig.colorbar(shade, label="times plain decoding")
figure("speedup", fig, "speedup over batch and context")

# %% tags=["notebook"]
sliders(lambda log2_batch, log2_context, alpha_percent: print_table("slider",
    COLUMNS, [list(cell(2**log2_batch, 2**log2_context, alpha_percent / 100).values())], formats=SHOWN),
    log2_batch=(0, 9, 1, 0), log2_context=(7, 17, 1, 10), alpha_percent=(5, 95, 5, 80))

# %% [markdown]
# ## 3. Trees
#
# A tree proposes several candidates per position: 4x2x2x1 has four children at the root, two under each of
# them, and so on. Its tau can be known without drafting. On the target's own greedy text, the rank of each
# next token in the draft's logits says which child the walk takes, and whether the tree has it. Here tau is 1
# (the target's own token) plus the mean accept length over all starts. Verification sends nodes + 1 tokens.
#
# The ranks are the toy's, on tokens that it wrote. Prompts stand at even distances in held-out text, each
# from the beginning of a line; continuations are short, because greedy text of a small model soon repeats
# itself. The weak draft is the first layer, the strong one the whole model in int4. Beside them the same with
# random weights, as one might who has no trained model. The speedups assume these taus on the chip above.

# %%
TREES = {"x".join(map(str, t)): t for t in ((1,), (1, 1), (1,) * 4, (1,) * 6, (2, 2, 2), (3, 3, 3),
                                            (4, 2, 2, 1), (8, 4, 2, 1), (4, 4, 4, 4))}


def ranks(params: dict, config) -> dict[str, np.ndarray]:
    """{draft: (sequences, new_tokens) ranks of the target's greedy tokens in the draft's logits}."""
    prompts = toy.prompts(A.text, A.sequences, A.prompt_tokens)
    tokens = generate_batch(TransformerLM(params, config), prompts, A.new_tokens)
    drafts = {"weak": TransformerLM(truncate(params, 1), config_like(config, n_layers=1)),
              "strong": TransformerLM(quantize_params(params, "int4-g32", include_lm_head=True)[0], config)}
    new = np.s_[:, A.prompt_tokens - 1:]                   # from the row that predicts the first new token
    return {name: draft_ranks(lm.full_logits(tokens)[new], tokens[new]) for name, lm in drafts.items()}


params, config = toy.load_params("large")
found = {"random": ranks(init_params(config, A.seed), config), "trained": ranks(params, config)}
CASES = [(kind, draft) for draft in ("weak", "strong") for kind in ("random", "trained")]
HEADS = [f"{draft}, {kind}" for kind, draft in CASES]
nodes = {name: len(TreeShape.branching(t)) for name, t in TREES.items()}
tau = {(name, *case): 1 + float(tree_accept_lengths(found[case[0]][case[1]], t)[0].mean())
       for name, t in TREES.items() for case in CASES}
rows = [[name, nodes[name], len(t), *(tau[name, *case] for case in CASES)] for name, t in TREES.items()]
print_table("tree-tau", ["tree", "nodes", "levels", *HEADS], rows, formats=dict.fromkeys(HEADS, ".2f"),
            title="tau from ranks, by draft and weights")
ratio = {(name, b): seconds(n + 1, b) / seconds(1, b) for name, n in nodes.items() for b in A.tree_batches}
faster = {(name, *case, b): tau[name, *case] / (len(TREES[name]) * A.level_cost + ratio[name, b])
          for name, b in ratio for case in CASES}
choice = {}
for b in A.tree_batches:
    heads = ["tree", "tokens sent", "verify ratio", *HEADS]
    rows = [[t, nodes[t] + 1, ratio[t, b], *(faster[t, *case, b] for case in CASES)] for t in TREES]
    print_table(f"tree-speedup-{b}", heads, rows, formats=dict.fromkeys(heads[2:], ".2f"),
                title=f"Speedup at batch {b}, a draft level taking {A.level_cost:.0%} of a step")
    choice[b] = [max(TREES, key=lambda name: faster[name, *case, b]) for case in CASES]
print_table("fastest-trees",
            ["batch", *HEADS], [[b, *names] for b, names in choice.items()], title="The fastest of these")
few, many = min(choice), max(choice)
wide = {batch: sum(max(TREES[name]) > 1 for name in names) for batch, names in choice.items()}
if few < many:
    observe("width-at-batch",
            "Trees wider than a chain are fastest in more of {n} cases at batch {b} than at {d} ({k}, {m}): "
            "a batch leaves no arithmetic for width.", n=len(CASES), b=few, d=many, k=wide[few], m=wide[many],
            holds=wide[few] > wide[many])
largest, strong = max(TREES, key=nodes.get), ("trained", "strong")
gain = faster[largest, *strong, many]
observe("tau-no-speedup",
        "A high tau is no speedup yet: with tau = {x:.2f} from the strong draft, {t} makes decoding slower "
        "at batch {b}, by sending {n} tokens ({s:.2f} times as fast).", t=largest, x=tau[largest, *strong],
        n=nodes[largest] + 1, b=many, s=gain, holds=gain < 1)
x, y = tau["1x1x1x1", "random", "strong"], tau["1x1x1x1", *strong]
observe("random-misleads",
        "Random weights mislead: with them, tau of a chain of four from the strong draft is more than a "
        "fifth off ({x:.2f}, and {y:.2f} with trained ones).", x=x, y=y, holds=max(x, y) > 1.2 * min(x, y))
