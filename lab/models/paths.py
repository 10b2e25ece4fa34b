"""A tree sent as a batch of its root-to-leaf paths, for models whose layers have no place for a tree's mask."""

from __future__ import annotations

import copy

import numpy as np
import torch

from lab.models.cache import DynamicLayer, LinearAttentionLayer, ModelCache, replicated


class TreeAsPaths:
    """The paths of one tree, and a copy of the cache for each, in one batch.

    Nodes that paths share are repeated. Shorter paths are filled up on the right, where no node of theirs looks. A
    node's row is that of the first path that holds it.

    parents: (n,) of all nodes, -1 for the last committed token. cache: holds what is committed and nothing else.
    """

    def __init__(self, parents: list[int], cache: ModelCache):
        to: list[list[int]] = []                                 # the path to each node
        for i, parent in enumerate(parents):
            to.append([*(to[parent] if parent >= 0 else []), i])
        leaves = sorted(set(range(len(parents))) - set(parents))
        self.paths = [to[i] for i in leaves]
        self.deepest = max(map(len, self.paths))
        self.hf = copy.copy(cache.hf)
        self.hf.layers = [replicated(layer, len(self.paths)) for layer in cache.hf.layers]

    def batch(self, tokens) -> np.ndarray:
        """(paths, deepest) ids of the tree's nodes, whose tokens these are."""
        ids = np.zeros((len(self.paths), self.deepest), np.int64)
        for row, path in enumerate(self.paths):
            ids[row, :len(path)] = [tokens[i] for i in path]
        return ids

    def places(self, nodes) -> list[int]:
        """Where each node's row stands in the batch's rows (paths * deepest, ...)."""
        where: dict[int, int] = {}
        for row, path in enumerate(self.paths):
            for column, i in enumerate(path):
                where.setdefault(i, row * self.deepest + column)
        return [where[i] for i in nodes]

    @torch.inference_mode()
    def append_to(self, cache: ModelCache, nodes: list[int]) -> None:
        """Append what the path that begins with these nodes left in its copy of the cache to the cache itself."""
        row = next(i for i, path in enumerate(self.paths) if path[:len(nodes)] == nodes)
        for index, layer in enumerate(self.hf.layers):
            if isinstance(layer, LinearAttentionLayer):
                for i, state in layer.conv_states.items():
                    if state is None:
                        continue
                    first = state.shape[-1] - self.deepest
                    cache.hf.update_conv_state(state[row:row + 1, :, first:first + len(nodes)], index, i,
                                               conv_kernel_size=layer.conv_kernel_size[i])
            elif isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
                first = layer.keys.shape[-2] - self.deepest     # without rows it reads those of another layer
                new = slice(first, first + len(nodes))
                cache.hf.update(layer.keys[row:row + 1, :, new], layer.values[row:row + 1, :, new], index)
