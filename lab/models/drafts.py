"""The target that a demo names, and the draft models that are made of it, each with what one step of it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lab.drafters.model import check_vocabulary
from lab.models import DEFAULT, load
from lab.models.layer_search import search_layers
from lab.models.layers import LayerDraft, why_no_layers
from lab.models.random_weights import random_ids, random_model
from lab.models.rounded import draft_bytes, integer_kernels, quantized
from lab.support.errors import BadInput


@dataclass(frozen=True)
class DraftModel:
    """A draft model for a target. kernels: "the target's", "integer", "dequantized" or "its own"."""

    name: str
    model: Any
    kernels: str

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a step reads; of dequantized weights those of the integers, as they would be packed."""
        return self.model.streamed_bytes() if self.kernels == "integer" else draft_bytes(self.model)

    def predicted_c(self, target) -> float:
        """The time of its step over one of the target's, were it only for the bytes that each reads."""
        return self.step_bytes / target.streamed_bytes()


def demo_target(name: str, random_weights: str = "", draft: str = "", device: str = "cpu", dtype: str = "float32",
                seed: int = 0):
    """The model that a demo decodes with: `name`, or weights of a registered shape drawn by `seed`.

    draft: the name of a further draft model, "" for none. BadInput where drawn weights are asked for beside a target or
    a draft, and for what `load` and `random_model` refuse.
    """
    if not random_weights:
        return load(name, device, dtype)
    if name != DEFAULT or draft:
        other = "--target" if name != DEFAULT else "--draft"
        raise BadInput(f"--random-weights {random_weights} takes the place of a target and has no family: leave out "
                       f"{other}, or it")
    model = random_model(random_weights, device, dtype, seed)
    model.notes = (*model.notes, "Its weights are drawn: times are real, but tau and acceptance mean nothing.")
    return model


def prompt_ids(target, text: str, seed: int = 0) -> list[int]:
    """A prompt's ids in the chat template; of a model with drawn weights as many random ids as the text has words."""
    return random_ids(target, len(text.split()), seed) if target.random else target.chat(text)


def draft_models(target, first: int, kept: int, schemes: Sequence[str], other: str, texts: Sequence[Sequence[int]],
                 seed: int = 0) -> dict[str, DraftModel]:
    """{name: draft model}: the target's first layers, `kept` of its layers, its roundings, and another model.

    Where no layers of the target can draft alone both are left out (`why_no_layers`). schemes: of the roundings. other:
    a name or folder, "" for none. texts: held-out ids, on which a search by `seed` decides which layers are kept.
    BadInput for numbers of layers that cannot be, and as `other_draft`.
    """
    found = []
    if not why_no_layers(target):
        found.append(DraftModel(f"first {first}", LayerDraft(target, range(first)), "the target's"))
        layers = search_layers(target, texts, kept, seed)
        found.append(DraftModel(f"{kept} kept", LayerDraft(target, layers), "the target's"))
    found += [rounded_draft(target, scheme) for scheme in schemes]
    found += [other_draft(target, other)] if other else []
    return {draft.name: draft for draft in found}


def rounded_draft(target, scheme: str) -> DraftModel:
    """The target with integers for weights: run by integer kernels where there are some, else dequantized."""
    try:
        return DraftModel(scheme, integer_kernels(target, scheme), "integer")
    except BadInput:
        return DraftModel(scheme, quantized(target, scheme), "dequantized")


def other_draft(target, name: str) -> DraftModel:
    """Another model by name or folder, on the target's device in its dtype. BadInput for another tokenizer."""
    model = load(name, str(target.device), target.dtype_name)
    check_vocabulary(target, model)
    return DraftModel(name, model, "its own")
