"""Faster products for float32 weights on a CPU: oneDNN's blocked layout."""

from __future__ import annotations

from contextlib import contextmanager

import torch


class PackedLinear(torch.nn.Module):
    """A Linear with a second copy of its weight, in the blocked layout that oneDNN's products read.

    PyTorch's float32 product of a few rows with a weight reads it at a third to two thirds of the speed that it
    reaches in this layout (the ratio is measured in demo 15). The product is the same up to the order of its sums.
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
