"""Drafts made from a real target: some of its layers on its own cache, and its weights rounded to integers.

Sources: self-speculative decoding, arXiv 2309.08168 (skipped layers, found by a search); LayerSkip, arXiv 2404.16710
(first layers, on the target's keys and values); ShortGPT, arXiv 2403.03853 (the influence of a layer).
"""

from __future__ import annotations

import copy
from collections import OrderedDict

import numpy as np
import torch
from torch import nn

from console import BadInput, progress
from lab.models.cache import Cache, GrowingLayer, ModelCache, replicated
from lab.models.decoder import HFDecoder
from lab.models.kernels import PackedLinear
from lab.models.pending import checked_ids
from lab.models.quant import SCALE_BYTES, Scheme, dequantize, parse_scheme, quantize

# ------------------------------------------------------------------------------- a model made of another's modules


def _twin(module: nn.Module) -> nn.Module:
    """A second module around the same tensors, whose children and forward hooks can be changed alone."""
    twin = copy.copy(module)
    twin._modules, twin._parameters = dict(module._modules), dict(module._parameters)
    twin._buffers = dict(module._buffers)
    twin._forward_hooks, twin._forward_pre_hooks = OrderedDict(), OrderedDict()
    return twin


def _stack(model) -> tuple[list[str], nn.ModuleList]:
    """(the names of the modules down to it, the list of the decoder's layers)."""
    n = model.config.get_text_config(decoder=True).num_hidden_layers
    for name, module in model.named_modules():
        if name.split(".")[-1] == "layers" and isinstance(module, nn.ModuleList) and len(module) == n:
            return name.split(".")[:-1], module
    raise BadInput(f"{type(model).__name__} keeps its {n} layers where the lab does not look for them: in a list named "
                   "layers")


def _with_layers(model, layers: list[nn.Module], kinds: list[int]):
    """The model with other layers between its embedding, and its final norm and head; nothing is copied.

    kinds[i]: the index, among the model's own layers, of one whose type (attention, window, convolution) the i-th has.
    """
    path, _ = _stack(model)
    root = module = _twin(model)
    root.config = copy.deepcopy(model.config)
    config = root.config.get_text_config(decoder=True)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[i] for i in kinds]
    for name in path:
        module._modules[name] = module = _twin(module._modules[name])
        module.config = config if hasattr(module, "layers") else root.config
    module.layers = nn.ModuleList(layers)
    return root


def _renumbered(layer: nn.Module, index: int) -> nn.Module:
    """The layer, its place in the cache now `index`; the modules that do not know their place are shared."""
    if not any(hasattr(module, "layer_idx") for module in layer.modules()):
        return layer
    twin = _twin(layer)
    if hasattr(twin, "layer_idx"):
        twin.layer_idx = index
    for name, child in layer._modules.items():
        if child is not None:
            twin._modules[name] = _renumbered(child, index)
    return twin


def _checked_layers(target: HFDecoder, layers) -> tuple[int, ...]:
    kept, n = tuple(int(i) for i in layers), target.config.num_hidden_layers
    if not kept or kept[0] != 0 or any(b <= a for a, b in zip(kept, kept[1:])) or kept[-1] >= n:
        raise BadInput(f"layers {list(kept)} cannot be kept of {target.name}: increasing numbers from 0, which alone "
                       f"reads the embeddings, to at most {n - 1} would be right")
    types = getattr(target.config, "layer_types", None)
    if types is not None and all(types[i] == "conv" for i in kept):
        other = min(i for i, kind in enumerate(types) if kind != "conv")
        raise BadInput(f"layers {list(kept)} of {target.name} are convolutions, which do not count positions: at least "
                       f"one layer of attention would be right, such as {other}")
    return kept


# ----------------------------------------------------------------------------------------- some layers of the target


class LayerDraft(HFDecoder):
    """Some layers of the target under its own final norm and head, on the target's own cache.

    A layer's keys and values for the committed tokens are those that the target computed. In the layers up to the first
    gap they are what the draft would have computed; behind it they are better, as the target saw all its layers
    (arXiv 2309.08168, 3.1). So nothing is drafted twice: `committed` is what the target holds, and `length` counts what was
    sent here since it last moved. When the target moves, that is forgotten. Its rows lie behind the target's, in its buffers,
    where its next forward writes anyway; where they do not fit, the draft goes on in buffers of its own. Where a layer
    holds a state (LFM2, LFM3), the draft begins with that of the target and keeps its own.

    target: the HFDecoder to draft for, with no tree pending while the draft runs. layers: increasing indices of its
    layers, 0 first. It commits nothing itself, and `rewind` to what the target holds, or less, forgets what was
    sent. BadInput for other layers, and for convolutions alone.
    """

    def __init__(self, target: HFDecoder, layers, name: str | None = None):
        self.layers, self._target = _checked_layers(target, layers), target
        own = _stack(target.model)[1]
        model = _with_layers(target.model, [_renumbered(own[i], j) for j, i in enumerate(self.layers)], self.layers)
        first = self.layers == tuple(range(len(self.layers)))
        super().__init__(model, target.hf_tokenizer, name or f"{'first ' if first else ''}{len(self.layers)} of "
                         f"{target.config.num_hidden_layers} layers of {target.name}")
        self.random = getattr(target, "random", False)

    @property
    def committed(self) -> int:
        """Tokens that the target holds, those that it has sent and not committed among them (in a cascade)."""
        return self._target.length

    @committed.setter
    def committed(self, value: int) -> None:
        """The target alone moves the sequence."""

    @property
    def length(self) -> int:
        """Tokens that the target holds, and those sent here since."""
        return self.committed + (len(self._pending) if self._follows else 0)

    @property
    def rewind_floor(self) -> int:
        return 0

    @property
    def _follows(self) -> bool:
        """Whether the target is where it was when its cache was borrowed, and no other draft has borrowed it since."""
        return self._borrowed == self._target.moves and getattr(self._target.cache, "borrower", None) is self

    def _reset(self):
        self._borrowed = None
        self.cache = ModelCache(self.config)
        self._settle(0)

    def _follow(self) -> None:
        """Borrow the target's cache where it has moved."""
        target = self._target
        if not target._pending.is_chain:
            raise BadInput(f"{self.name}: {target.name} has a tree pending; a draft before or after it would be right")
        if self._follows:
            return
        self.cache = ModelCache(self.config)
        if target.length:
            theirs = target.cache
            self.cache.hf = Cache(layers=[_borrowed(theirs.hf.layers[i], theirs.rows) for i in self.layers])
            self.cache.rows, self.cache.positions = theirs.rows, theirs.positions
        target.cache.borrower, self._borrowed = self, target.moves
        self._settle(target.length)

    def send(self, tokens, parents=None) -> torch.Tensor:
        self._follow()
        return super().send(tokens, parents)

    prefill = property()                           # as if there were none: the target alone commits a prompt

    def rewind(self, length: int) -> None:
        if length <= self.committed:
            self._borrowed = None
            self._pending.clear()
            return
        self._follow()
        super().rewind(length)

    def commit(self, nodes) -> None:
        """Forget what was sent here; the target commits."""
        if list(nodes):
            raise BadInput(f"{self.name}: its sequence is {self._target.name}'s, which alone commits")
        self.rewind(self.committed)


def _borrowed(layer, length: int):
    """A layer of the draft's cache that begins with the first `length` rows of the target's, or with its state."""
    if not isinstance(layer, GrowingLayer):
        return replicated(layer, 1)                        # these replace their tensors, and write in none
    twin = GrowingLayer()
    twin.buffers, twin.device, twin.is_initialized = layer.buffers, layer.device, True
    twin.keys, twin.values = (buffer[..., :length, :] for buffer in layer.buffers)
    return twin


# --------------------------------------------------------------------------------------------- which layers to keep


class _Known(nn.Module):
    """In the place of the first layers: what they gave."""

    def __init__(self, hidden):
        super().__init__()
        self.hidden = hidden

    def forward(self, hidden_states, *args, **kwargs):
        return self.hidden


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
    ids = [checked_ids(target, text) for text in texts]
    if not ids:
        raise BadInput("search_layers has no texts: at least one held-out sequence of ids would be right")
    size = max(1, min(tokens // len(ids), *map(len, ids)))
    batch = torch.from_numpy(np.stack([text[:size] for text in ids])).to(target.device)
    layers = _stack(target.model)[1]
    kept, seen = [], {}                       # seen[i]: what layer i of those kept was given and gave

    def run(new):
        """Logits of these layers, and what each after the first that differs from `kept` was given and gave."""
        at = next((k for k, (a, b) in enumerate(zip(kept, new)) if a != b), min(len(kept), len(new)))
        first = [_Known(seen[kept[at]][0])] if kept else []
        found, hooks = {}, []
        for i in new[at:]:
            def note(module, args, out, i=i):
                found[i] = args[0], out if torch.is_tensor(out) else out[0]
            hooks.append(layers[i].register_forward_hook(note))
        try:
            model = _with_layers(target.model, first + [layers[i] for i in new[at:]], [0] * len(first) + new[at:])
            return model(input_ids=batch, use_cache=False).logits.float(), found
        finally:
            for hook in hooks:
                hook.remove()

    logits, seen = run(list(range(n)))
    p, kept, best = torch.softmax(logits, -1), list(range(n)), 1.0

    def worth(new):
        return float(torch.minimum(p, torch.softmax(run(new)[0], -1)).sum(-1).mean())

    for _ in progress(range(n - n_layers), "layers taken out"):
        turned = {i: float(torch.cosine_similarity(*(x.float() for x in seen[i]), dim=-1).mean()) for i in kept}
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


# ---------------------------------------------------------------------------------------------- integers as weights


class Quantized(HFDecoder):
    """A copy of a target with integers for weights; `packed_bytes` of them and of the rest are read by one forward."""

    def __init__(self, target: HFDecoder, model, name: str, packed_bytes: int, streamed: int):
        super().__init__(model, target.hf_tokenizer, name)
        self.random = getattr(target, "random", False)
        self.packed_bytes, self._streamed = packed_bytes, streamed

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
    """A copy of the target whose Linear weights are rounded as lab.models.quant rounds them, and dequantized: own cache.

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
        new = nn.Linear(*weight.shape[::-1], bias=False, device="meta")
        new.weight, new.bias = nn.Parameter(weight, requires_grad=False), linear.bias
        return new

    model = _replaced(target, rounded, head, f"{scheme} rounding of {target.name}")
    return Quantized(target, model, f"{target.name} in {scheme}", _packed_bytes(target, how, head),
                     target.streamed_bytes())


def _is_linear(module) -> bool:
    return isinstance(module, PackedLinear) or type(module) is nn.Linear


def _replaced(target, new, head: bool, doing: str):
    """The target's model with new(linear) for each Linear module, in a copy of the modules around them."""
    leave = None if head else target.model.get_output_embeddings()
    made = {}
    for linear in progress([m for m in _linears(target.model) if m is not leave], doing):
        made[linear] = new(linear)
    return _rebuilt(target.model, made)


def _rebuilt(module, made: dict):
    """The module, those that are keys of `made` replaced; what holds none of them is shared."""
    if module in made:
        return made[module]
    if not any(inner in made for inner in module.modules()):
        return module
    twin = _twin(module)
    for name, child in module._modules.items():
        if child is not None:
            twin._modules[name] = _rebuilt(child, made)
    return twin


def _linears(module) -> list[nn.Module]:
    """The Linear modules in a module, in its order; not those inside a PackedLinear."""
    if _is_linear(module):
        return [module]
    return [linear for child in module.children() for linear in _linears(child)]


def _codes(weight, how: Scheme):
    """(slice of output channels, codes (in, out), float16 scales (groups, out)) of a weight (out, in), part by part."""
    for first in range(0, len(weight), 256):                   # a part stays in the processor's cache
        rows = slice(first, first + 256)
        part = np.ascontiguousarray(weight[rows].detach().float().cpu().numpy().T)
        yield rows, *quantize(part, how)


def _packed_bytes(target, how: Scheme, head: bool) -> int:
    """Bytes that a forward would read of packed integers, their float16 scales, and the weights that stay."""
    leave = None if head else target.model.get_output_embeddings()
    linears = [m for m in _linears(target.model) if m is not leave]
    rounded = {id(linear.weight) for linear in linears}
    table = target.model.get_input_embeddings().weight
    read = {id(table)} if leave is None or leave.weight is not table else set()
    rest = sum(p.numel() * p.element_size() for p in target.model.parameters() if id(p) not in rounded | read)
    return rest + sum(_integer_bytes(linear.weight, how) for linear in linears)


def _integer_bytes(weight, how: Scheme) -> int:
    n_out, n_in = weight.shape
    return -(-weight.numel() * how.bits // 8) + SCALE_BYTES * n_out * how.n_groups(n_in)


def draft_bytes(draft: HFDecoder) -> int:
    """Bytes of weights that one step of a draft reads; over the target's streamed_bytes(), what bytes say of c.

    Of some layers of a target: theirs, and the norm and head. Of rounded weights: the integers as they would be packed,
    with float16 scales, and what stays as it was. Of another model: all it streams.
    """
    return draft.packed_bytes if isinstance(draft, Quantized) else draft.streamed_bytes()


# ------------------------------------------------------------------------------------------------ integer kernels


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
        codes, scales = [], []
        for _, part, steps in _codes(linear.weight, how):
            part = torch.from_numpy(part.T.copy())                                           # (out, in)
            if self.group:
                part = torch.ops.aten._convert_weight_to_int4pack_for_cpu(part.int() + 8, 1)
            codes.append(part)
            scales.append(torch.from_numpy(steps).to(dtype))                                 # (groups, out)
        self.codes, scales = torch.cat(codes), torch.cat(scales, dim=1)
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
    leave = None if head else target.model.get_output_embeddings()
    linears = [linear for linear in _linears(target.model) if linear is not leave]
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
    own = sum(module.bytes for module in model.modules() if isinstance(module, _Integer))
    whole = _packed_bytes(target, how, head)
    rest = whole - sum(_integer_bytes(linear.weight, how) for linear in linears)
    return Quantized(target, model, f"{target.name} in {scheme} kernels", whole, rest + own)
