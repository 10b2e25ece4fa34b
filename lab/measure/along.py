"""Reading along: what draft models would have drafted at every position of the target's own text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from decode_lab import greedy_ids, prefill, to_numpy
from lab.drafters.best_tree import draft_ranks
from lab.drafters.model import fit_row
from lab.models.layers import LayerDraft
from lab.toy.transformer import softmax


def read_along(target, drafts: Mapping[str, Any], prompt, n_new: int, visit) -> list[int]:
    """The target's greedy text, prompt and up to n_new tokens, while drafts say what they would have drafted first.

    visit(name, p, q): called for each draft with the rows (n, V), float64, of target and draft before each new token.
    Drafts that read the target's cache take part step by step, as they would; others read the text in one forward.
    """
    target.rewind(0)
    prefill(target, prompt[:-1])
    text = list(prompt)
    rows: dict[str, list[np.ndarray]] = {name: [] for name in ("", *drafts)}
    shared = {name: model for name, model in drafts.items() if isinstance(model, LayerDraft)}
    while len(text) < len(prompt) + n_new and text[-1] not in (target.eos if len(text) > len(prompt) else ()):
        for name, model in shared.items():
            rows[name].append(to_numpy(model.send(text[-1:])[-1]))
        row = target.send(text[-1:])
        target.commit([0])
        rows[""].append(to_numpy(row[-1]))
        text += greedy_ids(row)
    for name, model in drafts.items():
        if name not in shared:
            model.rewind(0)
            prefill(model, prompt[:-1])
            rows[name] = [to_numpy(fit_row(row, target.vocab_size)) for row in model.send(text[len(prompt) - 1:-1])]
        visit(name, np.array(rows[""]), np.array(rows.pop(name)))
    return text


@dataclass
class Agreement:
    """How a draft agrees with its target on the target's own texts.

    ranks: per text, where each of the target's choices stands in the draft's list, 0 first. overlaps: per text, the sum
    of min(p, q) at each new token.
    """

    ranks: list[np.ndarray] = field(default_factory=list)
    overlaps: list[np.ndarray] = field(default_factory=list)

    @property
    def alpha(self) -> float:
        """The chance that a sampled draft token is accepted (arXiv 2211.17192, corollary 3.6), over all texts."""
        return float(np.concatenate(self.overlaps).mean())

    def among(self, k: int) -> float:
        """How often the target's choice is among the draft's first k: at 1, the acceptance of a greedy draft token."""
        return float((np.concatenate(self.ranks) < k).mean())


class Agreements(NamedTuple):
    """texts: the target's greedy texts, prompts and all. drafts: {name: Agreement} on them."""

    texts: list[list[int]]
    drafts: dict[str, Agreement]


def agreements(target, drafts: Mapping[str, Any], prompts: Sequence[Sequence[int]], n_new: int,
               temperature: float = 1.0) -> Agreements:
    """`read_along` after each prompt: the target's texts, and how each draft agrees with it on them."""
    found = {name: Agreement() for name in drafts}

    def visit(name, p, q):
        found[name].ranks.append(draft_ranks(np.append(q, q[-1:], 0), [0, *p.argmax(-1)]))
        found[name].overlaps.append(np.minimum(softmax(p / temperature), softmax(q / temperature)).sum(axis=-1))

    return Agreements([read_along(target, drafts, prompt, n_new, visit) for prompt in prompts], found)
