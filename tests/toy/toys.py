"""Toy models for tests, and what it means that two of their logits agree."""

import numpy as np

from lab import toy
from lab.toy.transformer import Config, TransformerLM, config_like, init_params

TINY = Config(vocab_size=40, hidden=24, n_layers=3, n_heads=6, n_kv_heads=2, head_dim=8, ffn=40,
              max_length=96)

MHA = config_like(TINY, n_heads=3, n_kv_heads=3)

MQA = config_like(TINY, n_heads=4, n_kv_heads=1, rope_theta=500.0, norm_eps=1e-3)


def random_lm(config=TINY, seed=0):
    """Random weights with larger embeddings and layers, so that attention and position change the logits."""
    params = init_params(config, seed)
    rng = np.random.default_rng(seed + 1)
    params["embed"] = params["embed"] * np.float32(25)
    params["norm"] = (1 + 0.3 * rng.standard_normal(config.hidden)).astype(np.float32)
    for layer in params["layers"]:
        layer["wq"], layer["wo"] = layer["wq"] * np.float32(2), layer["wo"] * np.float32(4)
        for norm in ("attn_norm", "ffn_norm"):
            layer[norm] = (1 + 0.3 * rng.standard_normal(config.hidden)).astype(np.float32)
    return TransformerLM(params, config, "random")


def text_for(lm, n, seed=0):
    """Real text for a trained model, random ids for another."""
    if lm.tokenizer:
        return np.array(toy.encode(toy.heldout("code")[3000:3000 + 8 * n])[:n])
    return np.random.default_rng(seed).integers(lm.vocab_size, size=n)


MODELS = {"random": random_lm, "all heads cached": lambda: random_lm(MHA),
          "one head cached": lambda: random_lm(MQA), "trained": lambda: toy.load("small")}


def close(got, want, factor=1.0):
    """Equal to float32 rounding: within 1e-4 of the values' spread (a wrong key moves them by a tenth)."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    worst, spread = np.abs(got - want).max(), want.std()
    assert spread > 0 and worst <= factor * 1e-4 * spread, f"{worst:.2e} apart, spread {spread:.2e}"


def branches(n, seed):
    """A random tree: parents[i] in -1 … i - 1."""
    rng = np.random.default_rng(seed)
    return [int(rng.integers(-1, i)) if i else -1 for i in range(n)]


def path_to(node, parents):
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]
