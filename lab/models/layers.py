"""A draft made of some of a target's layers, on the target's own cache.

Sources: self-speculative decoding, arXiv 2309.08168 (skipped layers); LayerSkip, arXiv 2404.16710 (first layers, on the
target's keys and values).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from weakref import WeakKeyDictionary

import torch
from torch import nn

from lab.models.admission import ALLOWED
from lab.models.cache import Cache, GrowingLayer, ModelCache, first_line, replicated
from lab.models.decoder import HFDecoder
from lab.support.errors import BadInput

# -- a model made of another's modules -------------------------------------------------------------------------


def twin_of(module: nn.Module) -> nn.Module:
    """A second module around the same tensors, whose children and forward hooks can be changed alone."""
    twin = copy.copy(module)
    twin._modules, twin._parameters = dict(module._modules), dict(module._parameters)
    twin._buffers = dict(module._buffers)
    twin._forward_hooks, twin._forward_pre_hooks = OrderedDict(), OrderedDict()
    return twin


def stack_of(model) -> tuple[list[str], nn.ModuleList]:
    """(the names of the modules down to it and its own, the list of the decoder's layers)."""
    config = model.config.get_text_config(decoder=True)
    n = config.num_hidden_layers
    inside = set((model if config is model.config else model.get_decoder()).modules())   # a vision part has its own
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == n and module in inside:
            return name.split("."), module
    raise BadInput(f"{type(model).__name__} keeps its {n} layers in no list of {n} modules")


def with_layers(model, layers: list[nn.Module], kinds: Sequence[int]):
    """The model with other layers between its embedding, and its final norm and head; nothing is copied.

    kinds[i]: the index, among the model's own layers, of one whose type (attention, window, convolution) the i-th has.
    """
    (*path, own), _ = stack_of(model)
    root = module = twin_of(model)
    root.config = whole = copy.deepcopy(model.config)
    config = whole.get_text_config(decoder=True)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[i] for i in kinds]
    for name in path:
        module._modules[name] = module = twin_of(module.get_submodule(name))
        if hasattr(module, "config"):
            module.config = config if own in module._modules else whole
    module._modules[own] = nn.ModuleList(layers)
    return root


PLACE = ("layer_idx", "layer_id")                                 # GPT-Neo says layer_id


def _renumbered(layer: nn.Module, index: int) -> nn.Module:
    """The layer, its place in the cache now `index`; the modules that do not know their place are shared."""
    if not any(hasattr(module, name) for module in layer.modules() for name in PLACE):
        return layer
    twin = twin_of(layer)
    for name in PLACE:
        if hasattr(twin, name):
            setattr(twin, name, index)
    for name, child in layer._modules.items():
        if child is not None:
            twin._modules[name] = _renumbered(child, index)
    return twin


_reasons: WeakKeyDictionary = WeakKeyDictionary()                 # {model: why its layers cannot draft}


def why_no_layers(target: HFDecoder) -> str:
    """Why no draft can be made of some of a target's layers; "" where it can.

    Found by trying, once per model: all its layers in a copy of the modules around them must give what the model gives,
    and two of them must be a model that decodes (lab.models.admission).
    """
    if target.model not in _reasons:
        _reasons[target.model] = _tried(target)
    return _reasons[target.model]


@torch.inference_mode()
def _tried(target: HFDecoder) -> str:
    if getattr(target.config, "num_kv_shared_layers", 0):
        return "some of its layers read the keys of others"
    types = getattr(target.config, "layer_types", None) or []
    ids = torch.arange(4, device=target.device)[None] % target.vocab_size
    try:
        layers = list(stack_of(target.model)[1])
    except BadInput as error:
        return str(error)
    try:
        wanted = target.model(input_ids=ids, use_cache=False).logits.float()
        again = with_layers(target.model, layers, range(len(layers)))
        given = again(input_ids=ids, use_cache=False).logits.float()
        if not bool((given - wanted).square().mean().sqrt() <= ALLOWED.get(target.dtype, 0.3) * wanted.std()):
            return "all of them together do not give what the model gives"
        other = next((i for i, kind in enumerate(types) if kind != "conv"), 1)
        kept = sorted({0, min(other, len(layers) - 1)})
        part = [_renumbered(layers[i], j) for j, i in enumerate(kept)]
        HFDecoder(with_layers(target.model, part, kept), name="a part")
    except Exception as error:                                   # a model's own code may raise anything
        return f"two of them do not make a model ({first_line(error).rstrip('.')})"
    return ""


def _checked_layers(target: HFDecoder, layers) -> tuple[int, ...]:
    kept, n = tuple(int(i) for i in layers), target.config.num_hidden_layers
    if not kept or kept[0] != 0 or any(b <= a for a, b in pairwise(kept)) or kept[-1] >= n:
        raise BadInput(f"layers {list(kept)} cannot be kept of {target.name}: increasing numbers from 0, which alone "
                       f"reads the embeddings, to at most {n - 1} would be right")
    if reason := why_no_layers(target):
        raise BadInput(f"no layers of {target.name} can draft alone: {reason}")
    types = getattr(target.config, "layer_types", None)
    if types is not None and all(types[i] == "conv" for i in kept):
        other = min(i for i, kind in enumerate(types) if kind != "conv")
        raise BadInput(f"layers {list(kept)} of {target.name} are convolutions, which do not count positions: at least "
                       f"one layer of attention would be right, such as {other}")
    return kept


# -- some layers of the target ---------------------------------------------------------------------------------


class LayerDraft(HFDecoder):
    """Some layers of the target under its own final norm and head, on the target's own cache.

    A layer's keys and values for the committed tokens are those that the target computed. In the layers up to the first
    gap they are what the draft would have computed; behind it they are better, as the target saw all its layers
    (arXiv 2309.08168, 3.1). So nothing is drafted twice: `committed` is what the target holds, and `length` counts what
    was sent here since it last moved. When the target moves, that is forgotten. The draft's rows lie behind the
    target's, in its buffers, where its next forward writes anyway; where they do not fit, the draft goes on in buffers
    of its own. Where a layer holds a state (LFM2, LFM3), the draft begins with that of the target and keeps its own.

    target: the HFDecoder to draft for, with no tree pending while the draft runs. layers: increasing indices of its
    layers, 0 first. It commits nothing itself. BadInput for other layers, and for convolutions alone.
    """

    def __init__(self, target: HFDecoder, layers, name: str | None = None):
        self.layers, self._target = _checked_layers(target, layers), target
        own = stack_of(target.model)[1]
        model = with_layers(target.model, [_renumbered(own[i], j) for j, i in enumerate(self.layers)], self.layers)
        first = self.layers == tuple(range(len(self.layers)))
        super().__init__(model, target.hf_tokenizer, name or f"{'first ' if first else ''}{len(self.layers)} of "
                         f"{target.config.num_hidden_layers} layers of {target.name}")
        self.random, self.notes = getattr(target, "random", False), ()

    def _why_not(self, model) -> str:
        return ""                                          # the target was checked, and the modules are its own

    def _admit(self) -> str:
        self.tree_as_paths = self._target.tree_as_paths
        return ""

    @property
    def committed(self) -> int:
        """Tokens of the target's cache that the draft begins with: all, or as far as it was rewound since the target
        moved. In a cascade, those that the target has sent and not committed are among them."""
        return self._held if self._follows else self._target.length

    @committed.setter
    def committed(self, value: int) -> None:
        self._held = value

    @property
    def length(self) -> int:
        """Tokens that the draft begins with, and those sent here since."""
        return self.committed + (len(self._pending) if self._follows else 0)

    @property
    def rewind_floor(self) -> int:
        return self._target.rewind_floor

    @property
    def _follows(self) -> bool:
        """Whether the target is where it was when its cache was borrowed, and no other draft has borrowed it since."""
        return self._borrowed == self._target.moves and self._target.cache.borrower is self

    def _reset(self):
        self._borrowed = None
        self.cache = ModelCache(self.config)
        self._settle(0)

    def _follow(self) -> None:
        """Borrow the target's cache where it has moved."""
        target = self._target
        if not target._pending.is_chain or target._tree is not None:
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
        """As `Decoder.rewind`; 0 forgets what was sent here, and the target's cache stays as it is."""
        if length == 0:
            self._borrowed = None
            self._pending.clear()
            return
        self._follow()
        super().rewind(length)
        if self._held < self._target.length:
            # The target's own rows lie behind: the next ones go into buffers of the draft.
            for layer in self.cache.hf.layers:
                if isinstance(layer, GrowingLayer):
                    layer.buffers = ()

    def commit(self, nodes) -> None:
        """Forget what was sent here; the target commits."""
        if list(nodes):
            raise BadInput(f"{self.name}: its sequence is {self._target.name}'s, which alone commits")
        self._borrowed = None
        self._pending.clear()


def _borrowed(layer, length: int):
    """A layer of the draft's cache that begins with the first `length` rows of the target's, or with its state."""
    if not isinstance(layer, GrowingLayer):
        return replicated(layer, 1)                        # these replace their tensors, and write in none
    twin = GrowingLayer()
    if not layer.is_initialized:
        return twin
    twin.buffers, twin.device, twin.is_initialized = layer.buffers, layer.device, True
    twin.keys, twin.values = (buffer[..., :length, :] for buffer in layer.buffers)
    return twin
