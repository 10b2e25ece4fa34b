# %% [markdown]
# # 06. Tree verification
#
# **Question.** How does one forward verify a whole tree of drafts, and which tree is the best?
#
# **Watch for.** A mask lets every node see its own ancestors only, so one forward answers for all paths. What
# a tree accepts, and which tree is the best, follow from where the target's choices rank in the draft's list.
#
# **Takes.** about 10 s; needs numpy, matplotlib, tokenizers, safetensors.
#
# **Leaves out.** Time: demo 05 says what sending more nodes costs on a chip.

# %%
from dataclasses import dataclass

from console import (NonNegative, OneOf, Within, assumptions, figure, observe, print_table, print_text,
                     progress, subplots)

import numpy as np

from decode_lab import (Run, Sampler, acceptance_probability, autoregressive_generate, overlap,
                        residual, tree_generate)
from lab.drafters.best_tree import accept_lengths, best_tree, draft_ranks, rank_table
from lab.drafters.trees import ConfidentTreeDrafter, TreeDrafter, TreeShape, tokens_to
from lab import toy
from lab.models.quant import quantize_params
from lab.toy.transformer import TransformerLM, config_like, truncate

Short, Levels = Within(8, 256), Within(1, 8)


@dataclass(frozen=True)
class Assumptions:
    target: OneOf(*toy.NAMES) = "large"                    # Trained toy that is the target.
    draft: OneOf(*toy.NAMES) = "small"                     # Trained toy that drafts from section 2 on.
    text: OneOf("code", "prose") = "code"                  # Held-out text that the prompts stand in.
    prompts: Within(1, 256) = 16                                    # Prompts to measure on, and as many to compare on.
    prompt_tokens: Short = 24                              # Length of a prompt, tokens.
    new_tokens: Short = 48                                 # Greedy continuation of each, tokens.
    verified: Within(1, 256) = 1                                    # Prompts on which section 1 runs every tree.
    compared: Within(1, 256) = 4                                    # Prompts on which section 2 runs its trees.
    depth: Levels = 8                                      # Most levels of the best tree.
    width: Within(1, 64) = 8                               # Most candidates per node of the best tree.
    beam: Within(1, 64) = 4                                # Nodes of a level that a confident tree expands.
    temperature: Within(0.01, 100.0) = 1.0                 # Of target and draft in section 3.
    top_k: Within(1, 1024) = 8                                       # Tokens that may be drawn there.
    samples: Within(1, 1_000_000) = 300                                   # Runs sampled there.
    seed: NonNegative = 0                                  # Of all sampling.


A = assumptions(Assumptions)
for sentence in toy.past_training(A.prompt_tokens + A.new_tokens):
    print_text(sentence)

# %% [markdown]
# ## 1. One forward for a tree
#
# All nodes are sent at once, a node's position is its depth, and a mask hides all but its ancestors.
# Verification walks from the root to the child that is the target's choice, as long as there is one. On the
# target's own greedy text that can be predicted: the rank of each next token in the draft's logits names the
# child, and the next round starts where this one ended. The drafts are those of demo 05.
#
# Demo 05 averaged over all starts. Rounds begin at some of them only, behind a token of the target's
# own, the bonus token, with which every round ends. The others, inside accepted drafts or at a refused token,
# never happen, and they may be harder or easier to guess.

# %%
TREES = {"x".join(map(str, t)): TreeShape.branching(t) for t in (
    (1,), (1, 1), (1,) * 4, (1,) * 6, (2, 2, 2), (3, 3, 3), (4, 2, 2, 1), (8, 4, 2, 1), (4, 4, 4, 4))}
params, config = toy.load_params(A.target)
target, draft = toy.load(A.target), toy.load(A.draft)
first = TransformerLM(truncate(params, 1), config_like(config, n_layers=1), "first layer")
int4 = TransformerLM(quantize_params(params, "int4-g32", include_lm_head=True)[0], config, "int4")


def ranks(lm: TransformerLM, texts: np.ndarray) -> np.ndarray:
    """(texts, new tokens): ranks of the tokens that the target wrote in lm's logits."""
    new = np.s_[:, A.prompt_tokens - 1:]                   # from the row that predicts the first new token
    return draft_ranks(lm.full_logits(texts)[new], texts[new])


def walk(text_ranks: np.ndarray, shape: TreeShape) -> list[int]:
    """Where the rounds that write a text of these ranks begin, and its end."""
    lengths = accept_lengths(np.append(text_ranks, [target.vocab_size] * shape.depth), shape)
    at = [0]
    while at[-1] < len(text_ranks):
        at.append(min(at[-1] + int(lengths[at[-1]]) + 1, len(text_ranks)))
    return at


def runs(drafter, n: int) -> tuple[list[Run], bool]:
    """The drafter on the first n prompts to compare on, and whether each text is that of plain decoding."""
    made = [tree_generate(target, drafter, text[:A.prompt_tokens], A.new_tokens) for text in unseen[:n]]
    return [run for _, run in made], all((a == b).all() for (a, _), b in zip(made, unseen))


prompts = toy.prompts(A.text, 2 * A.prompts, A.prompt_tokens)
texts = np.array([autoregressive_generate(target, t, A.new_tokens)[0] for t in progress(prompts, "decoding")])
seen, unseen = texts[::2], texts[1::2]                     # to measure ranks on, and to compare trees on
rows, checks = [], []
for name, shape in progress(TREES.items(), "verifying trees"):
    rows.append([name, len(shape)])
    for lm in (first, int4):
        made, ok = runs(TreeDrafter(lm, shape), A.verified)
        known = ranks(lm, unseen[:A.verified])
        steps = [(np.diff(walk(row, shape)) - 1).tolist() for row in known]
        rows[-1] += [Run.pool(made).tau, 1 + np.mean(sum(steps, [])), 1 + accept_lengths(known, shape).mean()]
        checks.append((ok, [[r.accepted for r in run.rounds] for run in made] == steps, sum(map(len, steps))))
heads = [f"{lm}: {way}" for lm in ("first layer", "whole in int4") for way in ("run", "walk", "all")]
print_table("tau", ["tree", "nodes", *heads], rows, title="tau: runs with a tree mask, the walk, all starts")
same, exact, rounds = zip(*checks)
observe("greedy-text",
        "With every tree and draft the text is that of plain greedy decoding.", holds=all(same))
observe("rounds-as-walk",
        "Each of {n} rounds accepted what the walk over the ranks says.", n=sum(rounds), holds=all(exact))
rows = []
for lm, name in ((lm, name) for lm in (first, int4, draft) for name in ("1x1x1x1", "2x2x2", "4x2x2x1")):
    known, shape = ranks(lm, texts), TREES[name]
    lengths = accept_lengths(known, shape).reshape(len(known), -1)
    begins = np.array([np.isin(range(lengths.shape[1]), walk(row, shape)) for row in known])
    rows.append([lm.name, name, begins.mean(), *(1 + lengths[where].mean() if where.any() else None
                                                 for where in (begins, ~begins, begins | True))])
print_table("starts", ["draft", "tree", "starts walked", "tau there", "tau elsewhere", "all starts"], rows,
            title="Starts at which a round begins, and the rest", formats={"starts walked": ".0%"})
off = max(abs(row[5] / row[3] - 1) for row in rows)
observe("average-close",
        "In this table, over all prompts, the average over all starts is not the tau of the rounds, but less "
        "than a tenth off (at most {x:.1%}).", x=off, holds=0 < off < 0.1)

# %% [markdown]
# ## 2. The best tree
#
# For each level, let the shares of starts be known at which the target's choice is the draft's first, second,
# third candidate. A node is worth the product of the shares on its path, and dynamic programming finds the
# best tree of n nodes from the best trees one level down. Shares are measured on one half of the prompts,
# trees compared on the other. A tree shaped by confidence grows, in each round, where the draft's own
# probabilities are high.

# %%
table, trial = rank_table(ranks(draft, seen), A.depth, A.width), ranks(draft, unseen)
common = trial.shape[1] - 7                                # starts at which 8 levels can be walked


def tau(shape: TreeShape) -> float:
    """1 + mean accept length on the prompts to compare on, over the starts that all trees have."""
    return 1 + accept_lengths(trial, shape).reshape(len(trial), -1)[:, :common].mean()


best = {name: best_tree(table, len(shape)) for name, shape in TREES.items()}
rows = [[name, len(shape), tau(shape), " ".join(map(str, np.bincount(tree.depths)[1:])), expected, tau(tree),
         tau(tree) / tau(shape) - 1] for (name, shape), (tree, expected) in zip(TREES.items(), best.values())]
print_table("best-trees", ["tree", "nodes", "tau", "best: nodes by level", "expected", "tau of best", "gain"], rows,
            title=f"Trees for {draft.name!r}, on prompts not measured", formats={"gain": "+.1%"})
gains = [row[6] for row in rows if row[1] > TREES[row[0]].depth]
observe("best-beats",
        "With as many nodes, the best tree beats each of the {n} hand-made trees that are no chains, by "
        "{x:.0%} to {y:.0%}.", n=len(gains), x=min(gains), y=max(gains), holds=min(gains) > 0)
rows = []
for name in progress(("2x2x2", "4x2x2x1"), "comparing trees"):
    for kind, by in ((name, TreeDrafter(draft, TREES[name])), ("best", TreeDrafter(draft, best[name][0])),
                     ("by confidence", ConfidentTreeDrafter(draft, len(TREES[name]), A.depth, A.beam))):
        made, equal = runs(by, A.compared)
        rows.append([kind, len(TREES[name]), len(Run.pool(made).rounds), Run.pool(made).tau, equal])
print_table("unmeasured",
            ["tree", "nodes", "rounds", "tau", "text as plain"], rows, title="Run on prompts not measured")
hand, fixed, confident = (sum(row[2] for row in rows[i::3]) for i in range(3))
observe("fewer-rounds",
        "These texts take {a} rounds with the hand-made trees, {b} with the best, and {c} with "
        "trees shaped by confidence.", a=hand, b=fixed, c=confident,
        holds=confident <= fixed < hand)
shape = best["2x2x2"][0]
lengths = accept_lengths(trial, shape).reshape(len(trial), -1)
row, at = max(np.ndindex(lengths.shape), key=lambda i: (lengths[i], trial[i[0], i[1]:][:lengths[i]].sum()))
text, drafter = unseen[row, :A.prompt_tokens + at].tolist(), TreeDrafter(draft, shape)
after, run = tree_generate(target, drafter, text, shape.depth + 1)
accepted = after[len(text):][:run.rounds[0].accepted].tolist()
drafter.start(target, Sampler(), text)
drawn = drafter.propose(text, shape.depth, None)           # the same tree once more, to draw it
children, height = drawn.children(), {}


def place(node: int) -> float:
    """Height of a node in the figure: its children's mean, or the next free line."""
    below = [place(child) for child in children.get(node, [])]
    height[node] = np.mean(below) if below else -sum(leaf not in children for leaf in height)
    return height[node]


place(-1)
fig, axis = subplots(size=(7.2, 5))
for node, y in height.items():
    path = tokens_to(drawn, node)
    color, width = ("C2", 3) if path == accepted[:len(path)] else ("0.8", 1)
    if path:
        parent = len(path) - 1, height[drawn.parents[node]]
        axis.plot(*zip(parent, (len(path), y)), color=color, linewidth=width, zorder=1)
    axis.text(len(path), y, ascii(toy.decode((path or text)[-1:]))[1:-1].replace(" ", "_"), ha="center",
              va="center", parse_math=False, bbox={"boxstyle": "round", "fc": "white", "ec": color})
axis.set(xlim=(-0.5, shape.depth + 0.5), xticks=range(shape.depth + 1), yticks=[], xlabel="level, _ a space",
         title=f"The best tree of {len(shape)} nodes in one round: {len(accepted)} levels accepted")
figure("tree", fig, "a tree of drafts and the path that the target accepted")

# %% [markdown]
# ## 3. Sampling with several candidates
#
# Candidates are drawn from the draft's q one by one, without replacement, and tested in turn with the rule of
# demo 04: after a refusal p becomes max(p - q, 0), normalised, and the next q is that of a draw without the
# ones before. First exactly, through all orders, for the toy's p and q after one prompt. Then by sampling
# whole rounds.

# %%
sampler = Sampler(A.temperature, top_k=A.top_k)
pairs = [[sampler.probs(lm.full_logits(np.array([t]))[0, -1]) for lm in (target, draft)] for t in prompts]
# Of these prompts, one whose next token is open, and where the models agree by half.
prompt, (p, q) = min(zip(prompts, pairs), key=lambda pair: pair[1][0].max() + abs(overlap(*pair[1]) - 0.5))
near = np.flatnonzero(p + q)                               # the few tokens that either may write


def outcome(p, q, n: int, claimed=None) -> tuple[np.ndarray, float]:
    """Exact distribution after n candidates from q, tested as if from `claimed`; chance that one is accepted."""
    if n == 0 or not q.any():
        return p, 0.0
    out, accepted, claim = np.zeros(len(p)), 0.0, q if claimed is None else claimed
    for x in np.flatnonzero(q):
        yes = acceptance_probability(p, x, claim)
        rest, later = outcome(residual(p, x, claim), residual(q, x), n - 1, claimed)
        out += q[x] * (1 - yes) * rest
        out[x] += q[x] * yes
        accepted += q[x] * (yes + (1 - yes) * later)
    return out, accepted


rows = []
for n in range(1, 5):
    (right, accepted), (wrong, _) = outcome(p[near], q[near], n), outcome(p[near], q[near], n, claimed=q[near])
    rows.append([n, accepted, *(abs(out - p[near]).sum() / 2 for out in (right, wrong))])
heads = ["candidates", "accepted", "TV from p", "TV, replacement assumed"]
print_table("one-round", heads, rows, title="One round, exactly", formats=dict(zip(heads[1:], (".1%", ".4f", ".4f"))))
observe("exact",
        "With 1 to {n} candidates the output is p to rounding, and one is accepted in {a:.0%} to {b:.0%} of "
        "rounds; a rule that believes they were drawn with replacement misses p by {x:.3f}.", n=n, a=rows[0][1],
        b=accepted, x=rows[-1][3], holds=max(row[2] for row in rows) < 1e-12 < 1e-3 < rows[-1][3])
rng, drafter = np.random.default_rng(A.seed), TreeDrafter(draft, TreeShape.branching((4, 2)), sample=True)
both = np.array([[*prompt, x] for x in near])              # exact distributions of two tokens, (near, V) each
joint, other = (np.array([sampler.probs(one)[x] * sampler.probs(then) for x, (one, then) in zip(
    near, lm.full_logits(both)[:, -2:])]) for lm in (target, draft))
counts, n = np.zeros(joint.shape), A.samples
for _ in progress(range(n), "sampling"):
    tokens = tree_generate(target, drafter, prompt, 3, rng=rng, sampler=sampler)[0]
    counts[near == tokens[-3], tokens[-2]] += 1
floor = abs(rng.multinomial(n, joint[joint > 0], size=200) / n - joint[joint > 0]).sum(axis=1) / 2
found, alone = abs(counts / n - joint).sum() / 2, 1 - overlap(joint, other)
print_table("sampled", ["tree 4x2", "plain, median", "plain, largest", "draft alone"],
            [[found, np.median(floor), floor.max(), alone]],
            title=f"TV of two tokens from the target's: {n} runs, and {len(floor)} plain samplings of {n}")
observe("as-near-as-plain",
        "Sampled through trees, {n} pairs of tokens are as near to the target's distribution as plain ones: "
        "TV {x:.3f}, {k} plain samplings reach {y:.3f}, and the draft alone is off by {z:.3f}.", n=n, x=found,
        k=len(floor), y=floor.max(), z=alone, holds=found <= floor.max() < alone)
