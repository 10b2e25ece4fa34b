"""Products of a model's weights: oneDNN's blocked layout, faster for float32 on a CPU; and what a step reads."""

from __future__ import annotations

from contextlib import contextmanager

import torch


class PackedLinear(torch.nn.Module):
    """A Linear with a second copy of its weight, in the blocked layout that oneDNN's products read.

    PyTorch's float32 product of a few rows with a weight reads it at a third to two thirds of the speed that it
    reaches in this layout (the ratio is measured in demo 20). The product is the same up to the order of its sums.
    """

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        self.linear, self.use = linear, True
        # The layout is chosen for this number of rows; that for 8 is as fast for one as any, and faster for a few.
        self.blocked = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 8)

    @property
    def weight(self):
        return self.linear.weight

    @property
    def bias(self):
        return self.linear.bias

    def forward(self, x):
        if self.use:
            return torch.ops.mkldnn._linear_pointwise(x, self.blocked, self.linear.bias, "none", [], "")
        return self.linear(x)


def packed(model):
    """The model itself, each of its Linear modules packed where that helps: float32 on a CPU with oneDNN.

    The operators are those that torch.compile uses for frozen weights. Where this PyTorch lacks them, nothing changes.
    """
    there = hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if model.device.type == "cpu" and model.dtype == torch.float32 and there and torch.backends.mkldnn.is_available():
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if type(child) is torch.nn.Linear and not isinstance(module, PackedLinear):
                    setattr(module, name, PackedLinear(child))
    return model


@contextmanager
def as_loaded(model):
    """Inside, the model runs PyTorch's own products, as it does for anyone who loads it with transformers."""
    before = {module: module.use for module in model.modules() if isinstance(module, PackedLinear)}
    for layer in before:
        layer.use = False
    try:
        yield
    finally:
        for layer, use in before.items():
            layer.use = use


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")


def read_bytes(model) -> dict[int, int]:
    """{id of a parameter: its bytes that a forward over one token of text reads}, counted on the loaded model.

    Left out: a vision part; an input embedding that is not the output head too (one row of it is read); the experts
    that a router does not choose for the token (several tokens read more).
    """
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    config = model.config.get_text_config(decoder=True)
    whole = config is model.config                               # else the text is a part of the model
    parts = [model] if whole else [model.get_decoder(), *([head] if head is not None else [])]
    n, chosen = _first(config, EXPERTS), _first(config, EXPERTS_PER_TOKEN)
    share, read = chosen / n if 0 < chosen < n else 1, {}
    for part in parts:
        for name, p in part.named_parameters():
            size = p.numel() * p.element_size()
            read[id(p)] = round(size * share) if _of_experts(name, p, n) else size
    if head is not None and head.weight is not table.weight:
        read.pop(id(table.weight), None)
    return read


def _first(config, names) -> int:
    """The first of these entries that a configuration, or DBRX's part of it, has; 0 for none."""
    places = (config, getattr(config, "ffn_config", None))
    found = (getattr(place, name, None) for place in places for name in names)
    return next((value for value in found if isinstance(value, int)), 0)


def _of_experts(name: str, parameter, n: int) -> bool:
    """Whether a parameter belongs to the n routed experts: in a module of that name, or all of them in one tensor."""
    stacked = parameter.ndim == 3 and len(parameter) == n and "conv" not in name
    return ".experts." in name or stacked
