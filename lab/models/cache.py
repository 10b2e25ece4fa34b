"""Caches of transformers that can go back: growing rows, and the recorded past of layers that hold a state."""

from __future__ import annotations

import copy
import inspect

import lab.models.versions  # noqa: F401  (first: it refuses a transformers that is too old)

# isort: split
import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionLayer


def why_not(model) -> str:
    """Why this model's cache cannot be rolled back; "" when it can.

    Whether a layer with a state holds more than a convolution's inputs, which can be cut, shows only once it
    has run: such a model is sent one token.
    """
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model, and the lab decodes with decoder-only ones"
    recurrent = "it keeps a recurrent state, which holds no past to go back to"
    if getattr(model, "_is_stateful", False):
        return recurrent
    if not {"cache", "past_key_values"} & set(inspect.signature(model.forward).parameters):
        return "its forward takes no cache, so every token would cost a forward over the whole text"
    kinds = {type(layer).__name__ for layer in DynamicCache(config=config).layers}
    other = sorted(kinds - {"DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "DummyLayer"})
    if other:
        return f"its cache has layers of the kind {other[0]}, which the lab cannot roll back"
    if kinds == {"LinearAttentionLayer"}:
        return "none of its layers is attention, and transformers counts positions by the rows of one"
    if "LinearAttentionLayer" in kinds:
        cache = empty_cache(config)
        try:
            with torch.inference_mode():
                model.eval()(torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=True,
                             **{cache_name(model): cache})
        except Exception as error:                               # a model's own code may raise anything
            return f"a forward of one token with the lab's cache fails: {first_line(error)}"
        if not cache.is_croppable:
            return recurrent
    return ""


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def only_rows(config) -> bool:
    """Whether all layers of the cache hold rows of the whole sequence: no window, and no state."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


def cache_name(model) -> str:
    """What the model's forward calls its cache: the argument was renamed during transformers 5."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def empty_cache(config) -> Cache:
    """A cache that can be rolled back: of growing layers alone, or where some layers hold a state, of the kinds that
    transformers chooses, its recording switched on and growing layers in place of its DynamicLayer."""
    layers = DynamicCache(config=config).layers
    if not any(isinstance(layer, LinearAttentionLayer) for layer in layers):
        return Cache(layer_class_to_replicate=GrowingLayer)
    cache = Cache(layers=[GrowingLayer() if type(layer) is DynamicLayer else layer for layer in layers])
    cache.activate_past_recording()
    return cache


def replicated(layer, n: int):
    """A layer that holds the same for each of n sequences. Nothing is copied before it is updated, and `layer` stays as
    it is."""
    if isinstance(layer, LinearAttentionLayer):
        states = copy.copy(layer)
        for name, value in vars(layer).items():
            if isinstance(value, dict):                         # one entry per state of the layer
                setattr(states, name, dict(value))
        states.conv_states = {i: None if state is None else state.expand(n, -1, -1)
                              for i, state in layer.conv_states.items()}
        return states
    twin = DynamicLayer() if isinstance(layer, GrowingLayer) else copy.copy(layer)
    if layer.is_initialized:
        twin.keys, twin.values = layer.keys.expand(n, -1, -1, -1), layer.values.expand(n, -1, -1, -1)
        twin.device, twin.is_initialized = layer.device, True
    return twin


class GrowingLayer(DynamicLayer):
    """One layer's keys and values, in a buffer that doubles when it is full.

    transformers' own DynamicLayer copies the whole cache to append one token. `keys` and `values` are views
    of the rows in use, so its `crop` works on them unchanged.
    """

    buffers: tuple[torch.Tensor, ...] = ()

    def update(self, key_states, value_states, *args, **kwargs):
        start = self.get_seq_length()
        stop = start + key_states.shape[-2]
        if not self.buffers or stop > self.buffers[0].shape[-2]:
            rows = max(256, 2 * stop)
            old = (self.keys, self.values) if start else (None, None)
            self.buffers = tuple(new.new_empty(*new.shape[:-2], rows, new.shape[-1])
                                 for new in (key_states, value_states))
            for buffer, kept in zip(self.buffers, old):
                if kept is not None:
                    buffer[..., :start, :] = kept
        for buffer, new in zip(self.buffers, (key_states, value_states)):
            buffer[..., start:stop, :] = new
        self.keys, self.values = (buffer[..., :stop, :] for buffer in self.buffers)
        self.device, self.is_initialized = key_states.device, True
        return self.keys, self.values


class ModelCache:
    """A transformers cache as rows with positions: append, select, truncate, settle; and back to a mark.

    rows: how many are in use in each attention layer. positions: (rows,), each row's position in the sequence.
    recorded: some layers hold a state, which goes back through its recorded past as far as the last `settle` and no
    further.
    hf: the transformers cache itself, for the model's forward.
    """

    def __init__(self, config):
        self.hf, self.rows, self.positions = empty_cache(config), 0, np.zeros(0, np.int64)
        self.recorded = any(isinstance(layer, LinearAttentionLayer) for layer in self.hf.layers)
        self.borrower: object | None = None                      # the draft that last read these rows (LayerDraft)

    def append(self, positions) -> None:
        """The next forward adds rows at these positions (n,) to every layer."""
        self.positions = np.append(self.positions, positions)
        self.rows += len(positions)

    def select(self, rows, start: int) -> None:
        """Of the rows from `start` on keep these, in this order; those before `start` stay."""
        rows, stop = list(rows), start + len(rows)
        if rows != list(range(start, stop)):                     # else they already lie where they belong
            for layer in self._layers_in_use():
                index = torch.tensor(rows, device=layer.keys.device)
                layer.keys[..., start:stop, :] = layer.keys.index_select(-2, index)
                layer.values[..., start:stop, :] = layer.values.index_select(-2, index)
            self.positions = np.concatenate([self.positions[:start], self.positions[rows]])
        self.truncate(stop)

    def truncate(self, rows: int) -> None:
        """Forget all but the first `rows` rows."""
        drop = self.rows - rows
        if drop > 0 and not self.recorded:
            self.hf.crop(-drop)
        elif drop > 0:
            # transformers' own crop also cuts what lies before the window or kernel that ends here. A second step back,
            # still behind the last `settle`, needs it.
            for layer in self.hf.layers:
                states = getattr(layer, "conv_states", {})
                for i, state in states.items():
                    states[i] = state[..., :-drop]
                for name in ("keys", "values"):
                    kept = getattr(layer, name, None)
                    if kept is not None:
                        setattr(layer, name, kept[..., :-drop, :])
                if hasattr(layer, "cumulative_length"):
                    layer.cumulative_length -= drop
        self.rows, self.positions = rows, self.positions[:rows]

    def settle(self) -> None:
        """What the cache holds is final: a recorded past is no longer needed."""
        if self.recorded and self.rows:
            self.hf.crop(0)

    def mark(self):
        """All that a forward changes, for `back_to`. Layers put new tensors in the place of old ones, or write behind
        the rows in use, so that none is copied."""
        layers = [{name: dict(value) if isinstance(value, dict) else value for name, value in vars(layer).items()}
                  for layer in self.hf.layers]
        return list(self.hf.layers), layers, self.rows, self.positions

    def back_to(self, mark) -> None:
        """As it was at the mark, also where a forward failed between two layers."""
        layers, inside, self.rows, self.positions = mark
        self.hf.layers[:] = layers
        for layer, values in zip(layers, inside):
            vars(layer).clear()
            vars(layer).update(values)

    def lengths(self) -> list[int]:
        """Rows that each attention layer really holds; all equal `rows`."""
        return [int(layer.get_seq_length()) for layer in self._layers_in_use()]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows in use and of the states."""
        states = [state for layer in self.hf.layers for state in getattr(layer, "conv_states", {}).values()]
        rows = [rows for layer in self._layers_in_use() for rows in (layer.keys, layer.values)]
        return sum(held.numel() * held.element_size() for held in [*rows, *states] if held is not None)

    def _layers_in_use(self):
        """The layers that hold rows: not states, and not those that read the rows of another layer (Gemma 3n)."""
        return [layer for layer in self.hf.layers if getattr(layer, "is_initialized", False) and
                getattr(layer, "keys", None) is not None]
