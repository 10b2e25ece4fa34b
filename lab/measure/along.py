"""Reading along: what draft models would have drafted at every position of the target's own text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from decode_lab import greedy_ids, prefill, to_numpy
from lab.drafters.model import fit_row
from lab.models.layers import LayerDraft


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
