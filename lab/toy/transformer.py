"""A small Llama-like transformer in numpy: the lab's toy model, and the first implementation of `decode_lab.Decoder`.

RMSNorm, rotary positions (RoPE, arXiv 2104.09864), grouped-query attention (arXiv 2305.13245), SwiGLU
(arXiv 2002.05202), tied embeddings. A cached step, an uncached forward and a forward over a tree of drafted tokens
are one function, `TransformerLM._forward`: they differ only in which keys exist and which of them a token may see.

Weights are stored (in, out), so that a layer reads `x @ w`.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from threadpoolctl import ThreadpoolController

from lab.models.pending import Pending, check_room, check_settled, checked_ids
from lab.support.errors import BadInput, require
from lab.toy.cache import KVCache
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
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        if self.n_heads % self.n_kv_heads:
            raise BadInput(f"n_kv_heads = {self.n_kv_heads} does not divide n_heads = {self.n_heads}: each KV head "
                           "serves the same number of query heads.")
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


@lru_cache(maxsize=1)
def _blas():
    """The OpenBLAS that numpy's products run in, as threadpoolctl sees it; None for another library."""
    found = ThreadpoolController().select(internal_api="openblas").lib_controllers
    return found[0] if found else None


@contextmanager
def one_blas_thread():
    """Inside, numpy's products run on one thread; afterwards on as many as before.

    The toy's products are too small to share: threads gain nothing, and on a busy machine wait for each other.
    """
    blas = _blas()
    before = blas.get_num_threads() if blas is not None else 1
    if before > 1:
        blas.set_num_threads(1)
    try:
        yield
    finally:
        if before > 1:
            blas.set_num_threads(before)


class TransformerLM:
    """The toy as a `decode_lab.Decoder` (and `Timing`): one growing sequence with a KV cache.

    Counts what it does: `flops` (two per multiply-add of every matrix product) and `bytes_read` (weights once per
    forward, the head only where logits are wanted, keys and values that a forward attends to), so that a demo can
    set them beside the formulas.
    """

    tokenizer: str | None = None                 # fingerprint; a trained model's loader sets it
    device = "cpu"
    rewind_floor = 0                             # all rows are kept, so it can go back to any length

    def __init__(self, params: dict, config: Config, name: str = "toy"):
        if len(params["layers"]) != config.n_layers:
            raise BadInput(f"{name}: the parameters have {len(params['layers'])} layers and the configuration "
                           f"{config.n_layers}; config_like(config, n_layers=…) makes them agree.")
        self.params, self.config, self.name = params, config, name
        self.vocab_size, self.max_length = config.vocab_size, config.max_length
        # Projections that read the same input are one product each, as engines do it.
        self._layers = [(p["attn_norm"], np.concatenate([p["wq"], p["wk"], p["wv"]], axis=1), p["wo"], p["ffn_norm"],
                         np.concatenate([p["w_gate"], p["w_up"]], axis=1), p["w_down"]) for p in params["layers"]]
        self._head = np.ascontiguousarray(params["embed"].T)
        self._head_bytes = self._head.nbytes
        self._layer_bytes = 4 * config.n_params() - self._head_bytes
        half = config.head_dim // 2
        angle = np.arange(config.max_length)[:, None] * config.rope_theta ** (-np.arange(half) / half)
        self._cos, self._sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        self.hidden = np.zeros((0, config.hidden), np.float32)
        self.flops = self.bytes_read = 0
        self.cache, self.committed = KVCache(config), 0
        self._pending = Pending(self)

    # -- the Decoder protocol -------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens of the sequence: committed, and sent since."""
        return self.committed + len(self._pending)

    def send(self, tokens, parents=None) -> np.ndarray:
        """Run tokens (n,) behind the sequence, or as nodes of a tree -> logits (n, V), row i behind tokens[i].

        parents: of each token an earlier node (nodes count from the last commit on) or -1, the last committed token;
        None: a chain behind the last token sent. Nothing is committed.
        """
        ids = self._pending.add(tokens, parents)
        n, before = len(ids), self.cache.rows - (len(self._pending) - len(ids))      # rows of what is committed
        mask = None
        if n > 1 or not self._pending.is_chain:
            mask = np.concatenate([np.ones((n, before), bool), self._pending.visible(n)], axis=1)
        self.hidden = self._forward(ids[None], self._pending.positions(n), mask, self.cache)[0]
        return self._logits(self.hidden)

    def prefill(self, tokens) -> None:
        """Send and commit a chain whose predictions nobody reads: the output head is not run."""
        check_settled(self)
        ids = checked_ids(self, tokens)
        stop = self.committed + len(ids)
        check_room(self, stop)
        mask = np.tri(len(ids), self.cache.rows + len(ids), self.cache.rows, dtype=bool)
        self.hidden = self._forward(ids[None], np.arange(self.committed, stop), mask, self.cache)[0]
        self.committed = stop

    def commit(self, nodes) -> None:
        """Of the tokens sent since the last commit this path stays, root first; the rest is forgotten."""
        nodes = self._pending.path(nodes)
        first = self.cache.rows - len(self._pending)
        self.cache.select([first + i for i in nodes], first)
        self.committed += len(nodes)
        self._pending.clear()

    def rewind(self, length: int) -> None:
        """Forget all tokens past `length`; 0 empties the cache."""
        left = self._pending.rewound(length)
        self.cache.truncate(self.cache.rows - len(self._pending) + left)
        self._pending.cut(max(left, 0))
        self.committed = min(self.committed, length)

    # -- Timing ---------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Nothing to wait for: numpy computes at once."""

    def streamed_bytes(self) -> int:
        """Bytes of the weights that one forward reads, the tied head once."""
        return self._layer_bytes + self._head_bytes

    # -- without a cache ------------------------------------------------------------------------------------

    def full_logits(self, tokens) -> np.ndarray:
        """(n, T) ids -> (n, T, V) logits, each sequence from its beginning, the cache neither read nor written."""
        tokens = np.asarray(tokens)
        if tokens.ndim != 2:
            raise BadInput(f"{self.name}: full_logits takes (n, T) ids, got shape {tokens.shape}.")
        tokens = checked_ids(self, tokens.reshape(-1)).reshape(tokens.shape)
        n = tokens.shape[1]
        check_room(self, n)
        return self._logits(self._forward(tokens, np.arange(n), np.tri(n, dtype=bool)))

    # -- the one forward ------------------------------------------------------------------------------------

    def _forward(self, tokens, positions, mask, cache=None):
        """Final hidden states (B, T, d), after the last norm.

        tokens (B, T); positions (T,), for RoPE; mask (T, S) bool, True where a token may look, None when it may look
        everywhere. With a cache, the T new keys and values become its last rows, and S counts all of them; without,
        S = T.
        """
        with one_blas_thread():
            return self._run(tokens, positions, mask, cache)

    def _run(self, tokens, positions, mask, cache):
        c, (batch, n) = self.config, tokens.shape
        heads, kv, group, hd = c.n_heads, c.n_kv_heads, c.n_heads // c.n_kv_heads, c.head_dim
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]          # (T, 1, head_dim / 2)
        first = 0 if cache is None else cache.append(positions)
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
                k, v = cache.write(i, first, k, v)
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
        self.bytes_read += self._layer_bytes + 4 * 2 * c.n_layers * batch * (first + n) * kv * hd
        return rms_norm(x, self.params["norm"], c.norm_eps)

    def _logits(self, hidden):
        self.bytes_read += self._head_bytes
        with one_blas_thread():
            return self._product(hidden, self._head)

    def _product(self, a, b):
        out = a @ b
        self.flops += 2 * out.size * a.shape[-1]
        return out


def generate_batch(lm: TransformerLM, tokens, n_new: int, temperature: float = 0.0, rng=None) -> np.ndarray:
    """(n, T) prompts -> (n, T + n_new) ids, one forward for the next token of all; greedy at temperature 0.

    For experiments over many sequences of one length; the cache of `lm` itself is not touched.
    """
    rng = np.random.default_rng(0) if rng is None else rng
    tokens, start = np.asarray(tokens, dtype=np.int64), 0
    n, prompt = tokens.shape
    checked_ids(lm, tokens.reshape(-1))
    check_room(lm, prompt + n_new)
    cache = KVCache(lm.config, n, prompt + n_new)
    for end in range(prompt, prompt + n_new):
        mask = np.tri(end - start, end, start, dtype=bool)
        logits = lm._logits(lm._forward(tokens[:, start:], np.arange(start, end), mask, cache)[:, -1])
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
        raise BadInput(f"sample_tokens cannot make {n_seq} sequences of {length} tokens: 1 or more of each would be "
                       "right.")
    rng = np.random.default_rng(seed)
    first = rng.integers(config.vocab_size, size=(n_seq, 1))
    return generate_batch(TransformerLM(params, config), first, length - 1, temperature, rng)
