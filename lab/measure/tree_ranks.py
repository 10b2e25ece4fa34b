"""What trees of drafts accept, read off ranks: where each token of a target's own greedy text stands in a draft's list.

Demos 05 and 06 share this: the same trees, the same toy drafts, the same texts, and so the same numbers.
"""

from __future__ import annotations

import numpy as np

from decode_lab import Drafter, Run, tree_generate
from lab import toy
from lab.drafters.best_tree import accept_lengths, draft_ranks
from lab.drafters.trees import TreeDrafter, TreeShape
from lab.support.errors import unknown
from lab.toy.drafts import first_layers, rounded
from lab.toy.transformer import TransformerLM, generate_batch

WIDTHS = ((1,), (1, 1), (1,) * 4, (1,) * 6, (2, 2, 2), (3, 3, 3), (4, 2, 2, 1), (8, 4, 2, 1), (4, 4, 4, 4))
TREES = {"x".join(map(str, widths)): TreeShape.branching(widths) for widths in WIDTHS}
DEEPEST = max(shape.depth for shape in TREES.values())
DRAFTS = ("first layer", "int4 copy")
PROMPT = 16                                                    # tokens of each prompt


def toy_draft(name: str, target: str) -> TransformerLM:
    """A draft made of a toy target.

    "first layer": its first layer under its own head; "int4 copy": the whole model in int4, a scale for 32 weights.
    """
    if name not in DRAFTS:
        raise unknown("toy draft", name, DRAFTS)
    model = toy.load_params(target)
    sized = first_layers(1, target, model, 2.0) if name == "first layer" else rounded("int4-g32", target, model, 2.0)
    return sized.lm


def greedy_texts(target: str, kind: str, n: int, n_new: int) -> np.ndarray:
    """(n, PROMPT + n_new) ids: prompts spread over a held-out text, and what a toy target writes behind each."""
    return generate_batch(toy.load(target), toy.prompts(kind, n, PROMPT), n_new)


def other_texts(target: str, kind: str, n: int, n_new: int) -> np.ndarray:
    """The same behind other prompts, about n of them, from places between those of `greedy_texts`."""
    own = toy.prompts(kind, n, PROMPT)
    between = [prompt for prompt in toy.prompts(kind, 2 * n - 1, PROMPT)[1::2] if prompt not in own]
    return generate_batch(toy.load(target), between, n_new)


def taus(draft: str, target: str, kind: str, n: int, n_new: int = 48) -> dict[str, float]:
    """{tree: tau over all starts} of a draft of `toy_draft`, on the `greedy_texts` of its target."""
    ranks = new_token_ranks(toy_draft(draft, target), greedy_texts(target, kind, n, n_new))
    return {tree: tau_of_all_starts(ranks, shape) for tree, shape in TREES.items()}


def new_token_ranks(draft: TransformerLM, texts: np.ndarray, n_prompt: int = PROMPT) -> np.ndarray:
    """(n, T) ids -> (n, T - n_prompt): the rank of each new token in the draft's logits, 0 the likeliest."""
    new = np.s_[:, n_prompt - 1:]                            # from the row that predicts the first new token
    return draft_ranks(draft.full_logits(texts)[new], texts[new])


def lengths_by_start(ranks: np.ndarray, shape: TreeShape, depth: int = DEEPEST) -> np.ndarray:
    """Ranks (n, T) -> accept lengths (n, T - depth + 1): at the starts behind which `depth` tokens follow.

    With the same depth for all trees, a tree that contains another accepts at least as much at each start.
    """
    starts = ranks.shape[-1] - depth + 1
    return accept_lengths(ranks, shape).reshape(len(ranks), -1)[:, :starts]


def tau_of_all_starts(ranks: np.ndarray, shape: TreeShape, depth: int = DEEPEST) -> float:
    """1 (the target's own token) and the mean accept length over all starts of `lengths_by_start`."""
    return 1 + float(lengths_by_start(ranks, shape, depth).mean())


def deepest_start(ranks: np.ndarray, shape: TreeShape) -> tuple[int, int]:
    """(text, place) where a tree accepts most tokens; of several, where their ranks (n, T) are largest."""
    lengths = lengths_by_start(ranks, shape)
    most = lengths.max()
    row, at = max(np.argwhere(lengths == most), key=lambda place: ranks[place[0], place[1]:place[1] + most].sum())
    return int(row), int(at)


def round_starts(ranks: np.ndarray, shape: TreeShape) -> list[int]:
    """Where the rounds begin that write a text of these ranks (T,), and T: each round starts where the last ended."""
    padded = np.append(ranks, np.full(shape.depth, np.iinfo(np.int64).max))      # nothing is accepted past the end
    lengths, at = accept_lengths(padded, shape), [0]
    while at[-1] < len(ranks):
        at.append(min(at[-1] + int(lengths[at[-1]]) + 1, len(ranks)))
    return at


def run_trees(target: TransformerLM, drafter: Drafter, texts: np.ndarray) -> tuple[list[Run], int]:
    """(a run of the loop behind each prompt, how many of them wrote another text): texts (n, T) of plain decoding."""
    made = [tree_generate(target, drafter, text[:PROMPT], len(text) - PROMPT) for text in texts]
    return [run for _, run in made], sum(bool((tokens != text).any()) for (tokens, _), text in zip(made, texts))


def rounds_off(runs: list[Run], ranks: np.ndarray, shape: TreeShape) -> int:
    """How many rounds of `run_trees` accepted another number of tokens than the ranks (n, T) of the same texts say."""
    off = 0
    for run, row in zip(runs, ranks):
        accepted = [r.accepted for r in run.rounds]
        predicted = (np.diff(round_starts(row, shape)) - 1).tolist()
        off += sum(a != b for a, b in zip(accepted, predicted)) + abs(len(accepted) - len(predicted))
    return off


def check_trees(target: TransformerLM, draft: TransformerLM, texts: np.ndarray) -> tuple[int, int, int]:
    """(rounds, texts that differ from plain decoding, rounds that differ from the ranks), over all TREES."""
    ranks, rounds, texts_off, off = new_token_ranks(draft, texts), 0, 0, 0
    for shape in TREES.values():
        runs, other = run_trees(target, TreeDrafter(draft, shape), texts)
        rounds += sum(len(run.rounds) for run in runs)
        texts_off += other
        off += rounds_off(runs, ranks, shape)
    return rounds, texts_off, off
