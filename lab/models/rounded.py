"""A target with integers for weights: rounded and unpacked again, or packed and run by integer kernels."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from console import progress
from lab.models.decoder import HFDecoder
from lab.models.kernels import PackedLinear, read_bytes
from lab.models.layers import twin_of
from lab.models.quant import SCALE_BYTES, Scheme, dequantize, parse_scheme, quantize
from lab.support.errors import BadInput


class Quantized(HFDecoder):
    """A copy of a target with integers for weights; `packed_bytes` of them and of the rest are read by one forward."""

    def __init__(self, target: HFDecoder, model, name: str, packed_bytes: int, streamed: int):
        self._target = target
        super().__init__(model, target.hf_tokenizer, name)
        self.random, self.notes = getattr(target, "random", False), ()
        self.packed_bytes, self._streamed = packed_bytes, streamed

    def _why_not(self, model) -> str:
        return ""                                          # the target was checked, and only its weights are others

    def _admit(self) -> str:
        self.tree_as_paths = self._target.tree_as_paths
        return ""

    def streamed_bytes(self) -> int:
        """Bytes of the weights that one forward here reads: of rounded weights as floats, of integer kernels packed."""
        return self._streamed


class _Blocked(nn.Module):
    """PackedLinear without the dense weight."""

    def __init__(self, weight, bias):
        super().__init__()
        self.blocked, self.bias = torch.ops.mkldnn._reorder_linear_weight(weight, 8), bias

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.blocked, self.bias, "none", [], "")


def quantized(target: HFDecoder, scheme: str, head: bool = True) -> Quantized:
    """A copy of the target whose Linear weights are rounded as lab.models.quant rounds them, dequantized; own cache.

    scheme: "int8", "int4-g32" and the like. Rounded is the weight of every Linear module: those inside the layers, and
    with head=True the output head. An input embedding stays, also where the head is tied to it; so do norms, biases and
    convolutions, all of them the target's own tensors. The copy says what the quantized model would, in the target's
    dtype, and takes the target's time; its weights lie in memory once, packed where the target's are (kernels.packed).
    BadInput for another scheme, or weights that have no float16 scale.
    """
    how = parse_scheme(scheme)
    # One buffer for all weights that are packed: freed one by one, they would leave holes too small for the next.
    sizes = [linear.weight.numel() for linear in _linears(target.model) if isinstance(linear, PackedLinear)]
    buffer = torch.empty(max(sizes, default=0), dtype=target.dtype)

    def rounded(linear):
        pack, shape = isinstance(linear, PackedLinear), linear.weight.shape
        weight = buffer[:shape.numel()].view(shape) if pack else torch.empty_like(linear.weight)
        for rows, codes, scales in _codes(linear.weight, how):
            weight[rows] = torch.from_numpy(dequantize(codes, scales, how).T).to(weight)
        if pack:
            return _Blocked(weight, linear.bias)
        n_out, n_in = shape
        new = nn.Linear(n_in, n_out, bias=False, device="meta")
        new.weight, new.bias = nn.Parameter(weight, requires_grad=False), linear.bias
        return new

    model = _replaced(target, rounded, head, f"{scheme} rounding of {target.name}")
    linears = _rounded_linears(target, head)
    packed_bytes = _bytes_with(target, linears, [_integer_bytes(linear.weight, how) for linear in linears])
    return Quantized(target, model, f"{target.name} in {scheme}", packed_bytes, target.streamed_bytes())


def _replaced(target, new, head: bool, doing: str):
    """The target's model with new(linear) for each Linear module, in a copy of the modules around them."""
    made = {}
    for linear in progress(_rounded_linears(target, head), doing):
        made[linear] = new(linear)
    return _rebuilt(target.model, made)


def _rebuilt(module, made: dict):
    """The module, those that are keys of `made` replaced; what holds none of them is shared."""
    if module in made:
        return made[module]
    if not any(inner in made for inner in module.modules()):
        return module
    twin = twin_of(module)
    for name, child in module._modules.items():
        if child is not None:
            twin._modules[name] = _rebuilt(child, made)
    return twin


def _linears(module) -> list[nn.Linear | PackedLinear]:
    """The Linear modules in a module, in its order; not those inside a PackedLinear."""
    if isinstance(module, PackedLinear) or type(module) is nn.Linear:
        return [module]
    return [linear for child in module.children() for linear in _linears(child)]


def _rounded_linears(target, head: bool) -> list[nn.Linear | PackedLinear]:
    """The Linear modules of a target that are rounded: all, or with head=False all but the output head."""
    leave = None if head else target.model.get_output_embeddings()
    return [linear for linear in _linears(target.model) if linear is not leave]


def _codes(weight, how: Scheme):
    """(slice of output channels, codes (in, out), float16 scales (groups, out)) of a weight (out, in), part by part."""
    for first in range(0, len(weight), 256):                   # a part stays in the processor's cache
        rows = slice(first, first + 256)
        part = np.ascontiguousarray(weight[rows].detach().float().cpu().numpy().T)
        yield rows, *quantize(part, how)


def _bytes_with(target, linears, sizes) -> int:
    """Bytes that a forward over one token reads, where the weights of `linears` take these sizes, not their own."""
    read = read_bytes(target.model)
    rest = dict(read)
    for linear in linears:
        rest.pop(id(linear.weight), None)
    shares = [read.get(id(linear.weight), 0) / (linear.weight.numel() * linear.weight.element_size())
              for linear in linears]                             # below 1 for an expert, 0 for a vision part
    return sum(rest.values()) + round(sum(share * size for share, size in zip(shares, sizes, strict=True)))


def _integer_bytes(weight, how: Scheme) -> int:
    """Bytes of a weight (out, in) as packed integers with their float16 scales."""
    n_out, n_in = weight.shape
    return -(-weight.numel() * how.bits // 8) + SCALE_BYTES * n_out * how.n_groups(n_in)


def draft_bytes(draft: HFDecoder) -> int:
    """Bytes of weights that one step of a draft reads; over the target's streamed_bytes(), what bytes say of c.

    Of some layers of a target: theirs, and the norm and head. Of rounded weights: the integers as they would be packed,
    with float16 scales, and what stays as it was. Of another model: all it streams.
    """
    return draft.packed_bytes if isinstance(draft, Quantized) else draft.streamed_bytes()


# -- integer kernels -------------------------------------------------------------------------------------------


class _Integer(nn.Module):
    """A Linear on packed integers, by PyTorch's own products for a CPU.

    They are fast for 16-bit activations alone, so that a float32 activation goes through bfloat16 and back, and the
    scales too are in the 16-bit dtype.
    """

    def __init__(self, linear, how: Scheme, dtype):
        super().__init__()
        self.bias, self.dtype, self.group = linear.bias, dtype, 0
        n_in = linear.weight.shape[1]
        if how.bits == 4:
            self.group = kernel_group(how, n_in)
        codes, parts = [], []
        for _, part, steps in _codes(linear.weight, how):
            part = torch.from_numpy(part.T.copy())                                           # (out, in)
            if self.group:
                part = torch.ops.aten._convert_weight_to_int4pack_for_cpu(part.int() + 8, 1)
            codes.append(part)
            parts.append(torch.from_numpy(steps).to(dtype))                                  # (groups, out)
        self.codes, scales = torch.cat(codes), torch.cat(parts, dim=1)
        if self.group:
            scales = scales.repeat_interleave((how.group or n_in) // self.group, dim=0)
            self.scales = torch.stack([scales, torch.zeros_like(scales)], dim=-1).contiguous()   # and zero points
        else:
            self.scales = scales[0]

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scales))

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1]).to(self.dtype)
        if self.group:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.codes, self.group, self.scales)
        else:
            y = torch.ops.aten._weight_int8pack_mm(rows, self.codes, self.scales)
        y = y.to(x.dtype).reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


def kernel_group(how: Scheme, n_in: int) -> int:
    """The group of weights per scale with which PyTorch's int4 kernel can run a scheme; 0: it cannot."""
    group = min(how.group or n_in, n_in)
    return next((g for g in (256, 128, 64, 32) if group % g == 0 and n_in % group == 0), 0)


def integer_kernels(target: HFDecoder, scheme: str, head: bool = True) -> Quantized:
    """As `quantized`, but packed, and run by integer kernels: for the time of a step, and what they say by themselves.

    The kernels are PyTorch's for a CPU, `_weight_int8pack_mm` and `_weight_int4pack_mm_for_cpu`. torchao's int4 tensor
    for a CPU calls the latter; its int8 one dequantizes the weight in every call unless torch.compile lowers it to the
    former. BadInput with the reason where there is none for the device, the scheme or a weight's size.
    """
    how = parse_scheme(scheme)
    names = "_weight_int8pack_mm", "_weight_int4pack_mm_for_cpu", "_convert_weight_to_int4pack_for_cpu"
    missing = [name for name in names if not hasattr(torch.ops.aten, name)]
    linears = _rounded_linears(target, head)
    if target.device.type != "cpu" or missing:
        raise BadInput(f"there are no integer kernels for {target.name} on {target.device}: the lab runs those of "
                       f"PyTorch for a CPU{', but this version lacks ' + missing[0] if missing else ''}")
    if how.bits == 8 and how.group:
        raise BadInput(f"there is no kernel for {scheme}: that for int8 has one scale per output channel, as in int8")
    for n_out, n_in in (linear.weight.shape for linear in linears):
        if how.bits == 4 and (not kernel_group(how, n_in) or n_out % 16):
            raise BadInput(f"there is no kernel for {scheme} and weights of {n_in} by {n_out}: that for int4 takes "
                           "groups of 32, 64, 128 or 256 that fill the rows, and a multiple of 16 outputs")
    dtype = torch.bfloat16 if target.dtype == torch.float32 else target.dtype
    model = _replaced(target, lambda linear: _Integer(linear, how, dtype), head, f"{scheme} packing of {target.name}")
    packed_bytes = _bytes_with(target, linears, [_integer_bytes(linear.weight, how) for linear in linears])
    own = [module.bytes for module in model.modules() if isinstance(module, _Integer)]
    streamed = _bytes_with(target, linears, own)
    return Quantized(target, model, f"{target.name} in {scheme} kernels", packed_bytes, streamed)
