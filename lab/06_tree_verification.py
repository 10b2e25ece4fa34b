# %% [markdown]
# # 06. Tree verification
#
# **Question.** How does one forward verify a whole tree of drafts, and which tree is the best?
#
# **Watch for.** A mask lets every node see its own ancestors only, so one forward answers for all
# paths. What a tree accepts follows from where the target's choices rank in the draft's list.
#
# **Takes.** about 30 s; needs numpy, matplotlib, tokenizers, safetensors.
#
# **Leaves out.** Time: demo 05 says what sending more nodes costs on a chip.

# %%
from dataclasses import dataclass

from console import (NonNegative, OneOf, Within, assumptions, figure, observe, print_table,
                     progress)

import numpy as np

from decode_lab import Run, Sampler, overlap, tree_generate
from lab import toy
from lab.drafters.best_tree import best_tree, rank_table
from lab.drafters.trees import ConfidentTreeDrafter, TreeDrafter, TreeShape, path_along
from lab.measure.exactness import counts_against_plain, next_two, several_candidates
from lab.measure.tree_ranks import (DRAFTS, PROMPT, TREES, check_trees, deepest_start,
                                    greedy_texts, new_token_ranks, other_texts, run_trees,
                                    tau_of_all_starts, toy_draft)
from lab.support.charts import draft_tree


@dataclass(frozen=True)
class Assumptions:
    target: OneOf(*toy.NAMES) = "large"  # Toy model that is the target.
    draft: OneOf(*toy.NAMES) = "small"  # Toy model that drafts.
    text: OneOf("code", "prose") = "code"  # Held-out text that the prompts come from.
    prompts: Within(2, 256) = 64  # Prompts of 16 tokens.
    new_tokens: Within(8, 240) = 48  # Tokens that the target writes after each.
    trees: tuple[OneOf(*TREES), ...] = ("1x1x1x1", "2x2x2")  # Trees that run on all prompts.
    checked: Within(1, 256) = 1  # Prompts on which every tree runs with every draft.
    depth: Within(1, 6) = 6  # Levels of the best tree, at most.
    width: Within(1, 64) = 8  # Candidates per node of it, at most.
    beam: Within(1, 64) = 4  # Nodes of a level that a confident tree expands.
    temperature: Within(0.01, 100.0) = 1.0  # Of target and draft in section 3.
    top_k: Within(1, 1024) = 8  # Tokens that may be drawn there, at most.
    samples: Within(1, 1_000_000) = 300  # Runs sampled there.
    seed: NonNegative = 0  # Of all sampling.


A = assumptions(Assumptions)
TARGET, DRAFT = toy.load(A.target), toy.load(A.draft)
TEXTS = greedy_texts(A.target, A.text, A.prompts, A.new_tokens)
RANKS = new_token_ranks(DRAFT, TEXTS)

# %% [markdown]
# ## 1. One forward for a tree
#
# A chain has one candidate per position. A tree has several: 2x2x2 has two below the root (the last
# token), two below each of these, and two below each of those.
#
# 1. All nodes are sent in one forward. The position of a node is that of its parent plus one, and
#    a mask shows it only its ancestors.
# 2. Begin at the root. While there is a child that is the target's choice, go down to it.
# 3. The nodes on this path are accepted. The target's own token ends the round.
#
# Demo 05 predicts tau without running a tree: a token of rank r in the draft's list is child r, if
# there is one. Predicted tau is 1 plus the levels that this goes down, on average from all places
# of the texts. A real round begins only where the last one ended.


# %%
def tau_row(tree):
    """[tree, nodes, rounds, tau predicted and measured, the second over the first]"""
    tau, measured = tau_of_all_starts(RANKS, TREES[tree]), Run.pool(LOOPS[tree][0])
    return [tree, len(TREES[tree]), len(measured.rounds), tau, measured.tau, measured.tau / tau]


LOOPS = {tree: run_trees(TARGET, TreeDrafter(DRAFT, TREES[tree]), TEXTS)
         for tree in progress(A.trees, "verifying trees")}
rows = [tau_row(tree) for tree in A.trees]
print_table("tau", ["tree", "nodes", "rounds", "predicted tau", "measured tau", "ratio"], rows,
            title=f"{A.draft} drafts for {A.target}, {A.prompts} texts")
observe("average-close", "Measured tau is off from the predicted one by up to {x:.1%}.",
        value=max(abs(row[5] - 1) for row in rows), at_most=0.1)

# %% [markdown]
# Is the text that of plain decoding? Does each round accept what the ranks predict for the place
# where it begins? Every tree of demo 05 runs on fewer prompts with three drafts: the small toy, the
# target's first layer and its copy in 4 bits (demo 03).

# %%
drafts = {A.draft: DRAFT, **{name: toy_draft(name, A.target) for name in DRAFTS}}
rows = [[name, len(TREES), *check_trees(TARGET, draft, TEXTS[:A.checked])]
        for name, draft in progress(drafts.items(), "checking trees")]
print_table("checks", ["draft", "trees", "rounds", "texts that differ", "rounds that differ"], rows,
            title="Texts against plain decoding, rounds against the ranks")
# No assumption breaks these two: a wrong mask, position or walk does.
observe("greedy-text", "In this table, {x} texts differ from those of plain decoding.", at_most=0,
        value=sum(row[3] for row in rows))
observe("rounds-as-ranks", "In {x} rounds, ranks and loop differ in what is accepted.",
        value=sum(row[4] for row in rows), at_most=0)

# %% [markdown]
# ## 2. The best tree
#
# 1. Count on other texts, for each level: the share of the rounds that reach it in which the
#    target's choice is the draft's candidate 1, 2, ...
# 2. The product of these shares along the path to a node is the chance that it is accepted.
# 3. The best tree of n nodes has the largest sum of chances. Dynamic programming finds it: the
#    best subtrees of each size, from the deepest level up.

# %%
SHARES = rank_table(new_token_ranks(DRAFT, other_texts(
    A.target, A.text, A.prompts, A.new_tokens)), A.depth, A.width)
BEST = {tree: best_tree(SHARES, len(shape))[0] for tree, shape in TREES.items()}


def best_row(tree):
    """[tree, nodes, tau, the best tree's nodes on each level, its tau, that over the first]"""
    levels = " ".join(map(str, np.bincount(BEST[tree].depths)[1:]))
    tau, best = (tau_of_all_starts(RANKS, shape) for shape in (TREES[tree], BEST[tree]))
    return [tree, len(TREES[tree]), tau, levels, best, best / tau]


rows = [best_row(tree) for tree in TREES]
heads = ["tree", "nodes", "tau", "best: nodes by level", "its tau", "ratio"]
print_table("best-trees", heads, rows, formats=dict.fromkeys(["tau", "its tau", "ratio"], ".2f"),
            title="Predicted tau: trees made by hand, and the best of as many nodes")
observe("best-beats", "Chains aside, the best tree has at least {x:.2f} times the other's tau.",
        value=min(row[5] for row in rows if row[1] > TREES[row[0]].depth), at_least=1)

# %% [markdown]
# The best tree is the same in every round. A tree *by confidence* is not. A node's score is the
# product of the draft's own probabilities on the path to it.
#
# 1. On each level, expand the few nodes with the largest scores.
# 2. Of all nodes seen, send those with the largest scores, as many as the other trees have.

# %%
HAND = A.trees[-1]
CONFIDENT = ConfidentTreeDrafter(DRAFT, len(TREES[HAND]), A.depth, A.beam)


def run_row(name, runs, other):
    """[tree, rounds, measured tau, texts that differ from those of plain decoding]"""
    return [name, len(Run.pool(runs).rounds), Run.pool(runs).tau, other]


rows = [
    run_row(f"by hand, {HAND}", *LOOPS[HAND]),
    run_row("best", *run_trees(TARGET, TreeDrafter(DRAFT, BEST[HAND]), TEXTS)),
    run_row("by confidence", *run_trees(TARGET, CONFIDENT, TEXTS)),
]
print_table("runs", ["tree", "rounds", "measured tau", "texts that differ"], rows,
            title=f"Trees of {len(TREES[HAND])} nodes, run on all {A.prompts} prompts")
observe("best-rounds", "The best tree takes {x:.2f} of the rounds of the one made by hand.",
        value=rows[1][1] / rows[0][1], at_most=1)
observe("confident-rounds", "Trees by confidence take {x:.2f} of the rounds of the best tree.",
        value=rows[2][1] / rows[1][1], at_most=1)
observe("best-text", "In this table {x} texts differ from plain decoding's.", at_most=0,
        value=sum(row[3] for row in rows))


# %%
def one_round(shape):
    """The figure: the round in which a tree accepts most."""
    (row, at), drafter = deepest_start(RANKS, shape), TreeDrafter(DRAFT, shape)
    before, after = np.split(TEXTS[row], [PROMPT + at])
    drafter.start(TARGET, Sampler(), before)
    drafted = drafter.propose(before, shape.depth, None)
    labels = [ascii(toy.decode([token]))[1:-1] for token in (before[-1], *drafted.tokens)]
    return draft_tree(drafted.parents, [label.replace(" ", "␣") for label in labels],
                      path_along(drafted, after), r"One round. ␣: a space, \n: a new line")


figure("tree", one_round(BEST[HAND]), "the best tree in one round; green: accepted")

# %% [markdown]
# ## 3. Sampling with several candidates
#
# 1. Draw candidates from q one after another, without replacement: each is taken out of q, which is
#    normalised again.
# 2. Test them in turn by the rule of demo 04, each against the q that it was drawn from. After
#    a refusal, p becomes the residual.
# 3. If all are refused, draw the recovered token from what p has become.
#
# Is that lossless? Take p and q of the toy models after one prompt, and enumerate all orders of
# the candidates. TV is half the sum of all differences from p. The wrong rule tests all candidates
# against the first q, as if they were drawn with replacement. Each refusal subtracts q from p. Once
# p holds no token that is left in q, one more candidate changes nothing.


# %%
def pick():
    """(prompt, p, q) where p is uncertain, and overlaps with q by about one half"""
    logits = (model.full_logits(TEXTS[:, :PROMPT])[:, -1] for model in (TARGET, DRAFT))
    pairs = [(SAMPLER.probs(a), SAMPLER.probs(b)) for a, b in zip(*logits)]
    off = [pair[0].max() + abs(overlap(*pair) - 0.5) for pair in pairs]
    return TEXTS[np.argmin(off), :PROMPT], *pairs[np.argmin(off)]


def exact_row(n):
    """[candidates, chance of an acceptance, TV with the rule, TV with the wrong one]"""
    p, q = P[NEAR], Q[NEAR]
    (right, accepted), (wrong, _) = several_candidates(p, q, n), several_candidates(p, q, n, q)
    return [n, accepted, abs(right - p).sum() / 2, abs(wrong - p).sum() / 2]


SAMPLER = Sampler(A.temperature, top_k=A.top_k)
BEFORE, P, Q = pick()
NEAR = np.flatnonzero(P + Q)  # tokens that either model may write
rows = [exact_row(n) for n in range(1, 5)]
print_table("one-round", ["candidates", "accepted", "TV", "TV, wrong rule"], rows,
            title="One position, exactly; accepted: any candidate; TV from p",
            formats={"accepted": ".1%", "TV": ".4f", "TV, wrong rule": ".4f"})
# No assumption breaks the first of these: the rule is lossless.
observe("exact", "With the rule, what is written is off from p by a TV of {x:.1g}.",
        value=max(row[2] for row in rows), at_most=1e-12)
observe("wrong-shows", "With the wrong rule and 4 candidates, the TV is {x:.4f}.",
        value=rows[-1][3], at_least=0.001)
observe("more-accepted", "4 candidates instead of 1 raise acceptance by {x:.3f}.",
        value=rows[3][1] - rows[0][1], at_least=0.05)

# %% [markdown]
# Now sample with whole trees, 4x2, after the same prompt. Each run writes three tokens: two
# levels and one more. We compare the first two. As in demo 04, the noise floor is the median TV of
# plain samples of the same size, and the p-value the share of them with at least the same TV.


# %%
def sampled(rng):
    """[samples, TV, noise floor, p-value, TV of the draft alone] of pairs of tokens"""
    exact = next_two(TARGET, BEFORE, SAMPLER, NEAR)
    counts, drafter = np.zeros(exact.shape, int), TreeDrafter(
        DRAFT, TreeShape.branching((4, 2)), sample=True)
    for _ in progress(range(A.samples), "sampling"):
        tokens, _ = tree_generate(TARGET, drafter, BEFORE, 3, rng=rng, sampler=SAMPLER)
        counts[NEAR == tokens[PROMPT], tokens[PROMPT + 1]] += 1
    alone = abs(next_two(DRAFT, BEFORE, SAMPLER, NEAR) - exact).sum() / 2
    return [A.samples, *counts_against_plain(counts.ravel(), exact.ravel(), rng), alone]


rows = [sampled(np.random.default_rng(A.seed))]
print_table("sampled", ["samples", "TV", "noise floor", "p-value", "TV, draft alone"], rows,
            title="Pairs of tokens, sampled through trees")
observe("like-plain", "The p-value is {x:.3f}.", value=rows[0][3], at_least=0.05)
observe("draft-alone", "The pairs of the draft alone are off by a TV of {x:.3f}.",
        value=rows[0][4], at_least=rows[0][2])
