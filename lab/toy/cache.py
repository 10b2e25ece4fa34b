"""The toy's KV cache: an object with rows and positions, so that rows can be dropped without moving the sequence."""

from __future__ import annotations

import numpy as np


class KVCache:
    """Keys and values of all layers: two arrays (layers, batch, n_kv_heads, slots, head_dim), float32.

    rows: how many slots are in use; a row's index says where it lies, and nothing else. positions: (rows,), the
    position in the sequence that each row's key was rotated to. The slots double when an append needs more.
    """

    def __init__(self, config, batch: int = 1, slots: int = 64):
        shape = (config.n_layers, batch, config.n_kv_heads, slots, config.head_dim)
        self.k, self.v = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self._positions = np.zeros(slots, np.int64)
        self.rows = 0

    @property
    def positions(self) -> np.ndarray:
        return self._positions[:self.rows]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, used or not."""
        return self.k.nbytes + self.v.nbytes

    def append(self, positions) -> int:
        """Make room for rows at these positions (n,) -> the first new row; `write` then fills them, layer by layer."""
        first, have = self.rows, self.k.shape[3]
        self.rows += len(positions)
        if self.rows > have:
            more = max(self.rows, 2 * have) - have
            grow = [(0, 0)] * 3 + [(0, more), (0, 0)]
            self.k, self.v = np.pad(self.k, grow), np.pad(self.v, grow)
            self._positions = np.pad(self._positions, (0, more))
        self._positions[first:self.rows] = positions
        return first

    def write(self, layer: int, first: int, k, v):
        """Store the new rows of one layer, (batch, n_kv_heads, n, head_dim) -> keys and values of all its rows."""
        self.k[layer, :, :, first:self.rows], self.v[layer, :, :, first:self.rows] = k, v
        return self.k[layer, :, :, :self.rows], self.v[layer, :, :, :self.rows]

    def select(self, rows, start: int = 0) -> None:
        """Of the rows from `start` on keep these, in this order; those before `start` stay."""
        rows, stop = list(rows), start + len(rows)
        if rows != list(range(start, stop)):                     # else they already lie where they belong
            for array in (self.k, self.v):
                array[..., start:stop, :] = array[..., rows, :]  # fancy indexing copies first: overlap is safe
            self._positions[start:stop] = self._positions[rows]
        self.rows = stop

    def truncate(self, rows: int) -> None:
        """Forget all but the first `rows` rows."""
        self.rows = rows
