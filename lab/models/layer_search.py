"""Which layers of a target draft well together.

Sources: self-speculative decoding, arXiv 2309.08168 (a search over skipped layers); ShortGPT, arXiv 2403.03853 (the
influence of a layer).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from console import progress
from lab.models.decoder import HFDecoder
from lab.models.layers import stack_of, why_no_layers, with_layers
from lab.models.pending import checked_ids
from lab.support.errors import BadInput


class _Known(nn.Module):
    """In the place of the first layers: what they gave. What the model asks of a layer, `like` answers."""

    def __init__(self, given, like):
        super().__init__()
        self.given, self._like = given, [like]                   # in a list, it is no module of this one

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._like[0], name)

    def forward(self, *args, **kwargs):
        return self.given


@torch.inference_mode()
def search_layers(target: HFDecoder, texts, n_layers: int, seed: int = 0, *, tokens: int = 128, width: int = 4,
                  swaps: int = 12) -> tuple[int, ...]:
    """n_layers of the target's layers that together draft well -> their indices, increasing, 0 among them.

    texts: held-out sequences of ids; of each, as many ids are read as the shortest has, `tokens` in all at most.
    Starting from all layers, one after another is taken out: of the `width` layers that turn their input least (by its
    angle to their output; arXiv 2403.03853, 3.2), the one whose loss costs least. Then `swaps` pairs, drawn by `seed`,
    of a layer left out and one kept are tried, and stay if they help. A subset is worth its mean overlap with the
    target, the sum over ids of min(p, q): the chance that a sampled draft token is accepted (arXiv 2211.17192,
    Corollary 3.6).

    Each trial is one forward without a cache, from the first layer that differs on; the draft itself reads better keys
    and values than that (see LayerDraft). BadInput for a number of layers, or texts, that cannot be.
    """
    n, types = target.config.num_hidden_layers, getattr(target.config, "layer_types", None) or []
    needed = {0, next((i for i, kind in enumerate(types) if kind != "conv"), 0)}  # a convolution counts no positions
    if not len(needed) <= n_layers <= n:
        raise BadInput(f"{n_layers} layers of {target.name} cannot be kept: {len(needed)} to {n} would be right")
    if reason := why_no_layers(target):
        raise BadInput(f"no layers of {target.name} can draft alone: {reason}")
    ids = [checked_ids(target, text) for text in texts]
    if not ids:
        raise BadInput("search_layers has no texts: at least one held-out sequence of ids would be right")
    size = max(1, min(tokens // len(ids), *map(len, ids)))
    batch = torch.from_numpy(np.stack([text[:size] for text in ids])).to(target.device)
    layers = stack_of(target.model)[1]
    kept: list[int] = []
    seen: dict[int, tuple] = {}               # seen[i]: what layer i of those kept was given and gave

    def before(i):
        """What a layer in front of layer i would return, in the form in which layer i does; and layer i."""
        hidden, out = seen[i]
        return hidden if torch.is_tensor(out) else (hidden, *out[1:]), layers[i]

    def run(new):
        """Logits of these layers, and what each after the first that differs from `kept` was given and gave."""
        at = next((k for k, (a, b) in enumerate(zip(kept, new)) if a != b), min(len(kept), len(new)))
        first = [_Known(*before(kept[at]))] if kept else []
        found, hooks = {}, []
        for i in new[at:]:
            def note(module, args, options, out, i=i):
                found[i] = args[0] if args else options["hidden_states"], out
            hooks.append(layers[i].register_forward_hook(note, with_kwargs=True))
        try:
            model = with_layers(target.model, first + [layers[i] for i in new[at:]], [0] * len(first) + new[at:])
            return model(input_ids=batch, use_cache=False).logits.float(), found
        finally:
            for hook in hooks:
                hook.remove()

    logits, seen = run(list(range(n)))
    p, kept, best = torch.softmax(logits, -1), list(range(n)), 1.0

    def worth(new):
        return float(torch.minimum(p, torch.softmax(run(new)[0], -1)).sum(-1).mean())

    for _ in progress(range(n - n_layers), "layers taken out"):
        turned = {i: float(torch.cosine_similarity(hidden.float(), (out if torch.is_tensor(out) else out[0]).float(),
                                                   dim=-1).mean()) for i, (hidden, out) in seen.items() if i in kept}
        near = sorted(set(kept) - needed, key=lambda i: (-turned[i], i))[:width]
        best, kept_next = max((worth(new), new) for i in near for new in [[j for j in kept if j != i]])
        seen.update(run(kept_next)[1])
        kept = kept_next
    rng = np.random.default_rng(seed)
    for _ in progress(range(swaps if len(needed) < n_layers < n else 0), "layers swapped"):
        back = rng.choice(sorted(set(range(n)) - set(kept)))
        out = rng.choice(sorted(set(kept) - needed))
        new = sorted({*kept, int(back)} - {int(out)})
        if (value := worth(new)) > best:
            best, found = value, run(new)[1]
            seen.update(found)
            kept = new
    return tuple(kept)
