"""A small Llama-like transformer in numpy: the lab's toy model, and the first implementation of `decode_lab.Decoder`.

RMSNorm, rotary positions (RoPE, arXiv 2104.09864), grouped-query attention (arXiv 2305.13245), SwiGLU
(arXiv 2002.05202), tied embeddings. A cached step, an uncached forward and a forward over a tree of drafted tokens
are one function, `TransformerLM._forward`: they differ only in which keys exist and which of them a token may see.

Weights are stored (in, out), so that a layer reads `x @ w`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from threadpoolctl import ThreadpoolController

from console import BadInput
from decode_lab import checked_ids, checked_path, tree_layout
from llm_math import ModelShape


@dataclass(frozen=True)
class Config:
    """Shape of a toy model. Defaults: the largest of the trained family, about one million parameters."""

    vocab_size: int = 1024
    hidden: int = 128
    n_layers: int = 6
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 256
    max_length: int = 512
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self):
        for name in ("vocab_size", "hidden", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn", "max_length"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} = {getattr(self, name)} is impossible: 1 or more would be right.")
        if self.n_heads % self.n_kv_heads:
            raise BadInput(f"n_kv_heads = {self.n_kv_heads} does not divide n_heads = {self.n_heads}: each KV head serves "
                           "the same number of query heads.")
        if self.head_dim % 2:
            raise BadInput(f"head_dim = {self.head_dim} is odd: RoPE rotates pairs, so an even number would be right.")

    def n_params(self) -> int:
        """Parameters, the tied embedding counted once."""
        d, q, kv = self.hidden, self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        return self.vocab_size * d + self.n_layers * (d * (2 * q + 2 * kv + 3 * self.ffn) + 2 * d) + d

    def shape(self, name: str = "toy", bytes_per_weight: float = 4.0) -> ModelShape:
        """The same as a `llm_math.ModelShape`, for predictions; the toy computes in float32, 4 bytes."""
        return ModelShape(name, self.n_layers, self.hidden, self.n_heads, self.n_kv_heads, self.head_dim, self.ffn,
                          self.vocab_size, bytes_per_weight=bytes_per_weight)


# Small enough that thousands of sampled tokens take a second, for experiments with random weights.
QCFG = Config(vocab_size=256, hidden=64, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=16, ffn=128, max_length=256)


def config_like(config: Config, **changes) -> Config:
    """The same shape with some fields changed, e.g. `config_like(config, n_layers=1)`."""
    return replace(config, **changes)


def init_params(config: Config, seed: int) -> dict:
    """Random parameters: {"embed": (V, d), "norm": (d,), "layers": [{...}]}, float32, weights (in, out).

    Normal with standard deviation 0.02 for the embedding and 1/sqrt(fan in) elsewhere, the two projections that
    write into the residual stream divided by sqrt(2 * layers) as in GPT-2.
    """
    rng = np.random.default_rng(seed)
    d, q, kv = config.hidden, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    out = (2 * config.n_layers) ** -0.5

    def normal(fan_in, fan_out, scale=1.0):
        return (rng.standard_normal((fan_in, fan_out)) * scale * fan_in**-0.5).astype(np.float32)

    layers = [{"attn_norm": np.ones(d, np.float32),
               "wq": normal(d, q), "wk": normal(d, kv), "wv": normal(d, kv), "wo": normal(q, d, out),
               "ffn_norm": np.ones(d, np.float32),
               "w_gate": normal(d, config.ffn), "w_up": normal(d, config.ffn), "w_down": normal(config.ffn, d, out)}
              for _ in range(config.n_layers)]
    embed = (rng.standard_normal((config.vocab_size, d)) * 0.02).astype(np.float32)
    return {"embed": embed, "norm": np.ones(d, np.float32), "layers": layers}


def truncate(params: dict, n_layers: int) -> dict:
    """The first `n_layers` layers with the final norm and the head of the whole model (shared, not copied)."""
    if not 1 <= n_layers <= len(params["layers"]):
        raise BadInput(f"Cannot keep {n_layers} layers: the model has {len(params['layers'])}, so 1 to "
                       f"{len(params['layers'])} would be right.")
    return {**params, "layers": params["layers"][:n_layers]}


def rms_norm(x, weight, eps):
    """x / root mean square of x over the last axis, times weight (arXiv 1910.07467)."""
    return x * (weight / np.sqrt(np.vecdot(x, x)[..., None] / x.shape[-1] + eps))


def softmax(x):
    """Over the last axis, shifted by the maximum so that nothing overflows."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def silu(x):
    """x * sigmoid(x), by way of tanh, which does not overflow."""
    return x * (0.5 + 0.5 * np.tanh(0.5 * x))


class KVCache:
    """Keys and values of all layers: two arrays (layers, batch, n_kv_heads, slots, head_dim), float32.

    `slots` doubles when a forward needs more, so a sequence can grow and a tree can stand past its end.
    """

    def __init__(self, config: Config, batch: int = 1, slots: int = 64):
        shape = (config.n_layers, batch, config.n_kv_heads, slots, config.head_dim)
        self.k, self.v = np.zeros(shape, np.float32), np.zeros(shape, np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, used or not."""
        return self.k.nbytes + self.v.nbytes

    def reserve(self, slots: int):
        have = self.k.shape[3]
        if slots > have:
            grow = [(0, 0)] * 3 + [(0, max(slots, 2 * have) - have), (0, 0)]
            self.k, self.v = np.pad(self.k, grow), np.pad(self.v, grow)

    def move(self, source: list[int], start: int):
        """Copy slots `source` to start, start + 1, …, in every layer."""
        stop = start + len(source)
        self.k[..., start:stop, :] = self.k[..., source, :]      # fancy indexing copies first: overlap is safe
        self.v[..., start:stop, :] = self.v[..., source, :]


@lru_cache(maxsize=1)
def _one_blas_thread():
    """The toy's products are too small to share: threads gain nothing, and on a busy machine wait for each other."""
    ThreadpoolController().select(internal_api="openblas").limit(limits=1)


class TransformerLM:
    """The toy as a `decode_lab.Decoder`: one growing sequence with a KV cache.

    Counts what it does: `flops` (two per multiply-add of every matrix product) and `bytes_read` (weights once per
    forward, the head only where logits are wanted, keys and values that a forward attends to), so that a demo can
    set them beside the formulas.
    """

    tokenizer: str | None = None                 # fingerprint; a trained model's loader sets it

    def __init__(self, params: dict, config: Config, name: str = "toy"):
        if len(params["layers"]) != config.n_layers:
            raise BadInput(f"{name}: the parameters have {len(params['layers'])} layers and the configuration "
                           f"{config.n_layers}; config_like(config, n_layers=…) makes them agree.")
        _one_blas_thread()
        self.params, self.config, self.name = params, config, name
        self.vocab_size, self.max_length = config.vocab_size, config.max_length
        # Projections that read the same input are one product each, as engines do it.
        self._layers = [(p["attn_norm"], np.concatenate([p["wq"], p["wk"], p["wv"]], axis=1), p["wo"], p["ffn_norm"],
                         np.concatenate([p["w_gate"], p["w_up"]], axis=1), p["w_down"]) for p in params["layers"]]
        self._head = np.ascontiguousarray(params["embed"].T)
        self._head_bytes = self._head.nbytes
        self._layer_bytes = 4 * config.n_params() - self._head_bytes
        half = config.head_dim // 2
        self._inv_freq = config.rope_theta ** (-np.arange(half) / half)
        self._rope_table(config.max_length)
        self.cache = KVCache(config)
        self.length = 0
        self._parents: list[int] = []            # of the tree nodes sent but not yet kept; -1 for the sequence's end
        self.hidden = np.zeros((0, config.hidden), np.float32)
        self.flops = self.bytes_read = 0

    # -- the Decoder protocol -------------------------------------------------------------------------------

    def extend(self, tokens) -> np.ndarray:
        """Append tokens (n,) to the sequence -> logits (n, V); row i predicts what follows tokens[i]."""
        logits = self._extend(tokens)
        return self._logits(logits)

    def prefill(self, tokens) -> None:
        """As `extend`, for tokens whose predictions nobody reads: the output head is not run."""
        self._extend(tokens)

    def rollback(self, length: int) -> None:
        """Forget all tokens past `length`, and any tree that was not kept."""
        if not 0 <= length <= self.length:
            raise BadInput(f"{self.name}: cannot roll back to {length}, the sequence has {self.length} tokens.")
        self.length, self._parents = int(length), []

    def extend_tree(self, tokens, parents) -> np.ndarray:
        """Send tree nodes (n,) -> logits (n, V), without committing them.

        parents[i] is the index of node i's parent among the nodes sent since the last commit (this call's nodes
        count on from those of earlier calls), smaller than node i's own; -1 is the last token of the sequence. A node
        sees the sequence and its own ancestors, and its position is its depth (`decode_lab.tree_layout`).
        """
        tokens, slot = checked_ids(self, tokens), self.length + len(self._parents)
        self._parents, depth, visible = tree_layout(self, self._parents, parents, len(tokens))
        mask = np.concatenate([np.ones((len(tokens), self.length), bool), visible], axis=1)
        self.hidden = self._forward(tokens[None], self.length + depth, mask, self.cache, slot)[0]
        return self._logits(self.hidden)

    def keep(self, nodes) -> None:
        """Commit this root-to-leaf path of the tree just sent, and forget the rest of it."""
        nodes = checked_path(self, self._parents, nodes)
        self.cache.move([self.length + i for i in nodes], self.length)
        self.length, self._parents = self.length + len(nodes), []

    # -- without a cache ------------------------------------------------------------------------------------

    def full_logits(self, tokens) -> np.ndarray:
        """(n, T) ids -> (n, T, V) logits, each sequence from its beginning, the cache neither read nor written."""
        tokens = np.asarray(tokens)
        if tokens.ndim != 2:
            raise BadInput(f"{self.name}: full_logits takes (n, T) ids, got shape {tokens.shape}.")
        tokens = checked_ids(self, tokens.reshape(-1)).reshape(tokens.shape)
        n = tokens.shape[1]
        return self._logits(self._forward(tokens, np.arange(n), np.tri(n, dtype=bool)))

    # -- the one forward ------------------------------------------------------------------------------------

    def _extend(self, tokens):
        tokens = checked_ids(self, tokens)
        if self._parents:
            raise BadInput(f"{self.name}: a tree is pending; keep a path or roll back before extending.")
        n, start = len(tokens), self.length
        if start + n > self.max_length:
            raise BadInput(f"{self.name}: {start + n} tokens are more than the {self.max_length} it can hold.")
        mask = None if n == 1 else np.tri(n, start + n, start, dtype=bool)
        self.hidden = self._forward(tokens[None], np.arange(start, start + n), mask, self.cache, start)[0]
        self.length = start + n
        return self.hidden

    def _forward(self, tokens, positions, mask, cache=None, slot=0):
        """Final hidden states (B, T, d), after the last norm.

        tokens (B, T); positions (T,), for RoPE; mask (T, S) bool, True where a token may look, None when it may look
        everywhere. With a cache, the T new keys go to slots slot … slot + T − 1 and S = slot + T; without, S = T.
        """
        c, (batch, n) = self.config, tokens.shape
        heads, kv, group, hd = c.n_heads, c.n_kv_heads, c.n_heads // c.n_kv_heads, c.head_dim
        cos, sin = self._rope(positions)
        if cache is not None:
            cache.reserve(slot + n)
        bias = None if mask is None or mask.all() else np.where(mask, np.float32(0), np.float32(-1e30))
        x = self.params["embed"][tokens]
        for i, (attn_norm, wqkv, wo, ffn_norm, w_gate_up, w_down) in enumerate(self._layers):
            qkv = self._product(rms_norm(x, attn_norm, c.norm_eps), wqkv).reshape(batch, n, heads + 2 * kv, hd)
            qk = qkv[:, :, :heads + kv]
            left, right = qk[..., :hd // 2], qk[..., hd // 2:]
            qk = np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
            k = qk[:, :, heads:].transpose(0, 2, 1, 3)                                   # (B, kv, T, hd)
            v = qkv[:, :, heads + kv:].transpose(0, 2, 1, 3)
            if cache is not None:
                cache.k[i, :, :, slot:slot + n], cache.v[i, :, :, slot:slot + n] = k, v
                k, v = cache.k[i, :, :, :slot + n], cache.v[i, :, :, :slot + n]
            # The `group` query heads that share a KV head are rows of one product.
            q = qk[:, :, :heads].reshape(batch, n, kv, group, hd).transpose(0, 2, 3, 1, 4)
            q = q.reshape(batch, kv, group * n, hd) * np.float32(hd**-0.5)
            scores = self._product(q, k.transpose(0, 1, 3, 2))                           # (B, kv, group * T, S)
            if bias is not None:
                scores = (scores.reshape(batch, kv, group, n, -1) + bias).reshape(scores.shape)
            out = self._product(softmax(scores), v).reshape(batch, kv, group, n, hd)
            out = out.transpose(0, 3, 1, 2, 4).reshape(batch, n, heads * hd)
            x = x + self._product(out, wo)
            gate_up = self._product(rms_norm(x, ffn_norm, c.norm_eps), w_gate_up)
            x = x + self._product(silu(gate_up[..., :c.ffn]) * gate_up[..., c.ffn:], w_down)
        seen = n if cache is None else slot + n
        self.bytes_read += self._layer_bytes + 4 * 2 * c.n_layers * batch * seen * kv * hd
        return rms_norm(x, self.params["norm"], c.norm_eps)

    def _logits(self, hidden):
        self.bytes_read += self._head_bytes
        return self._product(hidden, self._head)

    def _product(self, a, b):
        out = a @ b
        self.flops += 2 * out.size * a.shape[-1]
        return out

    def _rope_table(self, n):
        angle = np.arange(n)[:, None] * self._inv_freq
        self._cos, self._sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def _rope(self, positions):
        if positions[-1] >= len(self._cos) or positions.max() >= len(self._cos):
            self._rope_table(2 * int(positions.max()) + 2)
        return self._cos[positions][:, None], self._sin[positions][:, None]              # (T, 1, head_dim / 2)


def generate_batch(lm: TransformerLM, tokens, n_new: int, temperature: float = 0.0, rng=None) -> np.ndarray:
    """(n, T) prompts -> (n, T + n_new) ids, one forward for the next token of all; greedy at temperature 0.

    For experiments over many sequences of one length; the cache of `lm` itself is not touched.
    """
    rng = np.random.default_rng(0) if rng is None else rng
    tokens, start = np.asarray(tokens, dtype=np.int64), 0
    n, prompt = tokens.shape
    checked_ids(lm, tokens.reshape(-1))
    cache = KVCache(lm.config, n, prompt + n_new)
    for end in range(prompt, prompt + n_new):
        mask = np.tri(end - start, end, start, dtype=bool)
        logits = lm._logits(lm._forward(tokens[:, start:], np.arange(start, end), mask, cache, start)[:, -1])
        if temperature == 0:
            new = logits.argmax(axis=-1)
        else:
            edges = softmax(logits.astype(np.float64) / temperature).cumsum(axis=-1)
            new = (edges < rng.random((n, 1)) * edges[:, -1:]).sum(axis=-1)
        tokens, start = np.column_stack([tokens, new]), end
    return tokens


def sample_tokens(params: dict, config: Config, n_seq: int, length: int, seed: int, temperature: float = 1.0):
    """(n_seq, length) ids sampled from the model, each sequence from a random first token."""
    if n_seq < 1 or length < 1:
        raise BadInput(f"sample_tokens cannot make {n_seq} sequences of {length} tokens: 1 or more of each would be right.")
    rng = np.random.default_rng(seed)
    first = rng.integers(config.vocab_size, size=(n_seq, 1))
    return generate_batch(TransformerLM(params, config), first, length - 1, temperature, rng)
