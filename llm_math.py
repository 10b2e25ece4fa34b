"""The paper side of the lab: model shapes, and from them parameters, bytes, FLOPs, step times and speedups.

Conventions. Time in seconds, rates per second, GB is 1e9 bytes. n is the number of tokens sent per sequence
in one forward: 1 in a plain decode step, gamma + 1 when gamma drafts are verified. tau counts the target's
own token. Functions of alpha, gamma, c, n, batch or context take arrays too, and return an array then, a
number otherwise.

Not modelled: activations and their traffic, writes of the KV cache, kernel launches one by one (they are
inside the overhead), a draft's extra step after a fully accepted round, communication between chips.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from hw_specs import Chip
from lab.support.errors import BadInput, checked, require, unknown

FLOP_EFFICIENCY = 0.6  # share of the peak rate that large matrix products reach: an assumption
BYTE_EFFICIENCY = 0.8  # share of the peak bandwidth that weight streaming reaches: an assumption
ELEMENT_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5, "int4": 0.5}


def element_bytes(dtype: str | float) -> float:
    """Bytes per element of a dtype in ELEMENT_BYTES; a positive number is taken as it is (scales
    included)."""
    if isinstance(dtype, str):
        if dtype not in ELEMENT_BYTES:
            raise unknown("dtype", dtype, ELEMENT_BYTES)
        return ELEMENT_BYTES[dtype]
    return float(checked("bytes per element", dtype, 0, above=True))


def _plain(array):
    """A Python float for a 0-d result, the array otherwise."""
    return float(array) if np.ndim(array) == 0 else array


# ----------------------------------------------------------------------------------------------- model shapes


@dataclass(frozen=True)
class ModelShape:
    """What decoding costs depend on, of a decoder-only transformer or a hybrid of attention and other layers.

    Every layer has one mixer and one feed-forward block. The mixer is attention over the whole context,
    attention over the last `window` tokens (n_windowed layers), a gated short convolution (n_conv layers,
    LFM2 and LFM3), or a linear-attention layer of fixed state (n_linear layers, each `linear_params` weights
    and `linear_state` values).
    """

    name: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    tied: bool = True  # input and output embedding are one matrix
    gated_ffn: bool = True  # three matrices (SwiGLU) rather than two
    n_windowed: int = 0
    window: int = 0
    n_conv: int = 0
    conv_window: int = 0
    n_linear: int = 0
    linear_params: int = 0
    linear_state: int = 0
    attention_gate: int = 0  # width of the projection that gates the attention output
    qk_norm: bool = False
    norms_per_layer: int = 2
    norm_bias: bool = False  # LayerNorm rather than RMSNorm
    attention_bias: bool = False
    ffn_bias: bool = False
    positions: int = 0  # rows of a learned position table
    bytes_per_weight: float = 2.0  # of the streamed weights, quantization scales included

    def __post_init__(self):
        for name in ("n_layers", "hidden", "n_heads", "n_kv_heads", "head_dim", "ffn", "vocab_size"):
            checked(f"{name} of {self.name}", getattr(self, name), 1, whole=True)
        for name in ("n_windowed", "window", "n_conv", "conv_window", "n_linear", "positions"):
            checked(f"{name} of {self.name}", getattr(self, name), 0, whole=True)
        checked(f"bytes_per_weight of {self.name}", self.bytes_per_weight, 0, above=True)
        require(self.n_heads % self.n_kv_heads == 0, f"n_kv_heads of {self.name}", self.n_kv_heads,
                f"a divisor of {self.n_heads}")
        if self.n_windowed + self.n_conv + self.n_linear > self.n_layers:
            raise BadInput(f"{self.name} has {self.n_layers} layers, fewer than its parts")

    @property
    def n_kv_layers(self) -> int:
        """Layers that hold a KV cache."""
        return self.n_layers - self.n_conv - self.n_linear

    def _mixer_and_ffn_weights(self) -> int:
        """Weights of all layers' matrices and convolution kernels; no biases, no norms."""
        d, q, kv = self.hidden, self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        attention = d * (q + 2 * kv) + q * d + d * self.attention_gate
        conv = 4 * d * d + self.conv_window * d  # in (d to 3d), out (d to d), one kernel per channel
        ffn = (3 if self.gated_ffn else 2) * d * self.ffn
        return (self.n_kv_layers * attention + self.n_conv * conv + self.n_linear * self.linear_params
                + self.n_layers * ffn)

    def n_params(self) -> int:
        """All parameters: matrices, both embeddings where untied, norms, biases, learned positions."""
        d, q, kv = self.hidden, self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        norm = d * (2 if self.norm_bias else 1)
        total = self._mixer_and_ffn_weights() + self.vocab_size * d * (1 if self.tied else 2)
        total += self.positions * d + (self.n_layers * self.norms_per_layer + 1) * norm
        total += self.n_kv_layers * (2 * self.head_dim if self.qk_norm else 0)
        total += self.n_kv_layers * (q + 2 * kv + d if self.attention_bias else 0)
        total += self.n_layers * ((2 if self.gated_ffn else 1) * self.ffn + d if self.ffn_bias else 0)
        return total

    def streamed_weights(self) -> int:
        """Weights that one forward reads: every layer's matrices and the output head once.

        An untied input embedding is not streamed (a forward reads one row per token), nor is a position
        table. Norms and biases, under 0.1 % of the models here, are left out.
        """
        return self._mixer_and_ffn_weights() + self.vocab_size * self.hidden

    def streamed_bytes(self) -> float:
        """Bytes of streamed_weights()."""
        return self.streamed_weights() * self.bytes_per_weight

    def weight_bytes(self) -> float:
        """Bytes of all parameters in memory, each at bytes_per_weight."""
        return self.n_params() * self.bytes_per_weight

    def kv_bytes_per_token(self, kv_dtype: str | float = "bf16") -> float:
        """Bytes that one token adds to the KV cache, windowed layers included."""
        return self.n_kv_layers * 2 * self.n_kv_heads * self.head_dim * element_bytes(kv_dtype)

    def state_bytes(self, dtype: str | float = "bf16") -> float:
        """Bytes of one sequence's fixed state: conv_window - 1 inputs per convolution, linear states."""
        values = self.n_conv * max(self.conv_window - 1, 0) * self.hidden + self.n_linear * self.linear_state
        return values * element_bytes(dtype)

    def kv_bytes(self, context, kv_dtype: str | float = "bf16"):
        """Bytes of one sequence's cache after `context` tokens.

        KV, no more than a window's worth where there is one, and the fixed state at two bytes per value.
        """
        context = checked("context", context, 0)
        layer = 2 * self.n_kv_heads * self.head_dim * element_bytes(kv_dtype)
        full = (self.n_kv_layers - self.n_windowed) * context
        windowed = self.n_windowed * np.minimum(context, self.window)
        return _plain(layer * (full + windowed) + self.state_bytes())

    def flops(self, n, context=0):
        """FLOPs of one sequence's forward over n tokens after `context` cached ones, with logits for each.

        Two per streamed weight and token, and 4 x heads x head_dim per attention layer, token and position
        attended to (on average context + (n + 1) / 2 positions). A linear layer's state update is left out.
        """
        n, context = checked("n", n, 1, whole=True), checked("context", context, 0)
        attended = context + (n + 1) / 2
        layers = ((self.n_kv_layers - self.n_windowed) * attended
                  + self.n_windowed * np.minimum(attended, self.window))
        return _plain(n * (2 * self.streamed_weights() + 4 * self.n_heads * self.head_dim * layers))


HF_TYPES = ("llama", "gpt_neox", "gpt2", "qwen3", "lfm2", "lfm3", "qwen3_5_text")


def from_hf_config(config, name: str | None = None) -> ModelShape:
    """The shape of a transformers configuration: an object, or a dictionary (config.json as released).

    Knows the model types in HF_TYPES, and composite models (LFM3-VL) whose text_config is one of them. Other
    types, and settings that would change the shape in a way not modelled, get BadInput.
    """
    if not isinstance(config, Mapping):
        config = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    kind = config.get("model_type")
    if kind not in HF_TYPES:
        if isinstance(config.get("text_config"), Mapping):
            return from_hf_config(config["text_config"], name)
        raise BadInput(f"model_type {kind!r} is not modelled; these are: {', '.join(HF_TYPES)}")

    def need(key):
        if config.get(key) is None:
            raise BadInput(f"the {kind} configuration has no {key!r}")
        return config[key]

    name = name or config.get("_name_or_path") or kind
    if kind == "gpt2":
        d, heads = need("n_embd"), need("n_head")
        return ModelShape(name, need("n_layer"), d, heads, heads, d // heads, config.get("n_inner") or 4 * d,
                          need("vocab_size"), config.get("tie_word_embeddings", True), gated_ffn=False,
                          norm_bias=True, attention_bias=True, ffn_bias=True, positions=need("n_positions"))
    d, heads, n_layers = need("hidden_size"), need("num_attention_heads"), need("num_hidden_layers")
    if kind == "gpt_neox":
        bias = config.get("attention_bias", True)
        return ModelShape(name, n_layers, d, heads, heads, d // heads, need("intermediate_size"),
                          need("vocab_size"), config.get("tie_word_embeddings", False), gated_ffn=False,
                          norm_bias=True, attention_bias=bias, ffn_bias=True)
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or d // heads
    tied = config.get("tie_word_embeddings", config.get("tie_embedding", kind in ("lfm2", "lfm3")))
    if kind == "lfm2" and "tie_embedding" in config:
        tied = config["tie_embedding"]
    more = dict(attention_bias=bool(config.get("attention_bias")), ffn_bias=bool(config.get("mlp_bias")),
                qk_norm=kind != "llama")
    ffn = (config.get("block_ff_dim") if kind == "lfm2" else None) or need("intermediate_size")
    layer_types = config.get("layer_types")
    if kind in ("lfm2", "lfm3"):
        if config.get("conv_bias"):
            raise BadInput("conv_bias is true but convolution layers are modelled without biases")
        if layer_types is None and config.get("full_attn_idxs") is not None:
            full = set(config["full_attn_idxs"])
            layer_types = ["full_attention" if i in full else "conv" for i in range(n_layers)]
        if layer_types is None:
            raise BadInput(f"the {kind} configuration has neither 'layer_types' nor 'full_attn_idxs'")
        more["conv_window"] = need("conv_L_cache")
    if kind == "lfm2" and config.get("block_auto_adjust_ff_dim", True):
        # The width used: two thirds of the number given, times the multiplier, rounded up (modeling_lfm2.py).
        multiple = config.get("block_multiple_of", 256)
        ffn = int((config.get("block_ffn_dim_multiplier") or 1.0) * int(2 * ffn / 3))
        ffn = multiple * -(-ffn // multiple)
    if kind == "lfm3":
        more["attention_gate"] = heads if config.get("use_attention_gate", True) else 0
        more["norms_per_layer"] = 4 if config.get("use_sandwich_norm", True) else 2
    if kind == "qwen3_5_text":
        keys = need("linear_num_key_heads") * need("linear_key_head_dim")
        value_heads, value_dim = need("linear_num_value_heads"), need("linear_value_head_dim")
        values, kernel = value_heads * value_dim, need("linear_conv_kernel_dim")
        mixed = 2 * keys + values
        more["linear_params"] = (d * (mixed + values + 2 * value_heads) + kernel * mixed + values * d
                                 + 2 * value_heads + value_dim)
        more["linear_state"] = values * config["linear_key_head_dim"] + (kernel - 1) * mixed
        more["attention_gate"] = heads * head_dim
    types = list(layer_types or ["full_attention"] * n_layers)
    known = {"full_attention", "sliding_attention", "conv", "linear_attention"}
    if set(types) - known or len(types) != n_layers:
        raise BadInput(f"layer_types must name {n_layers} layers of {', '.join(sorted(known))}")
    windowed = types.count("sliding_attention")
    return ModelShape(name, n_layers, d, heads, kv_heads, head_dim, ffn, need("vocab_size"), bool(tied),
                      n_windowed=windowed, window=need("sliding_window") if windowed else 0,
                      n_conv=types.count("conv"), n_linear=types.count("linear_attention"), **more)


def _pythia(size: str, n_layers: int, hidden: int, n_heads: int) -> ModelShape:
    """GPT-NeoX: LayerNorm, biases everywhere but in the head, plain MLP of 4 x hidden, untied embeddings."""
    return ModelShape(f"Pythia-{size}", n_layers, hidden, n_heads, n_heads, hidden // n_heads, 4 * hidden,
                      50304, tied=False, gated_ffn=False, norm_bias=True, attention_bias=True, ffn_bias=True)


def _gpt2(name: str, biases: bool) -> ModelShape:
    return ModelShape(name, 12, 768, 12, 12, 64, 3072, 50257, gated_ffn=False, norm_bias=biases,
                      attention_bias=biases, ffn_bias=biases, positions=1024)


# Shapes from the configuration each model is published with.
LLAMA31_8B = ModelShape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, False)
LLAMA31_70B = ModelShape("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256, False)
LLAMA32_1B = ModelShape("Llama-3.2-1B", 16, 2048, 32, 8, 64, 8192, 128256, True)
SMOLLM2_135M = ModelShape("SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49152, True)
QWEN3_4B = ModelShape("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151936, True, qk_norm=True)
LFM2_350M = ModelShape("LFM2-350M", 16, 1024, 16, 8, 64, 4608, 65536, True, qk_norm=True,
                       n_conv=10, conv_window=3)
LFM2_1_2B = ModelShape("LFM2-1.2B", 16, 2048, 32, 8, 64, 8192, 65536, True, qk_norm=True,
                       n_conv=10, conv_window=3)
LFM3_1_7B = ModelShape("LFM3-1.7B", 24, 2048, 16, 4, 128, 7680, 128000, True, qk_norm=True,
                       n_conv=13, conv_window=7, n_windowed=5, window=256, attention_gate=16,
                       norms_per_layer=4)
PYTHIA_70M = _pythia("70M", 6, 512, 8)
PYTHIA_160M = _pythia("160M", 12, 768, 12)
PYTHIA_410M = _pythia("410M", 24, 1024, 16)
PYTHIA_1B = _pythia("1B", 16, 2048, 8)
PYTHIA_1_4B = _pythia("1.4B", 24, 2048, 16)
PYTHIA_2_8B = _pythia("2.8B", 32, 2560, 32)
# GPT-2 is counted in two ways: 124,337,664 without biases (nanoGPT's transformer_sizing.ipynb, bias=False),
# and 124,439,808 as released, with 102,144 biases of linear layers and LayerNorms.
GPT2 = _gpt2("GPT-2", biases=False)
GPT2_BIASES = _gpt2("GPT-2 with biases", biases=True)
# Qwen3.5-27B's text model, in 4 bits: 16 attention layers with an output gate, 48 gated-delta-rule layers.
# bytes_per_weight is set so that one pass streams 17 GB, about the size at which it is offered in 4 bits,
# scales and the layers kept in more bits included. The untied input embedding, which a pass does not read, is
# not in those 17 GB.
QWEN35_27B_4BIT = from_hf_config(dict(
    model_type="qwen3_5_text", num_hidden_layers=64, hidden_size=5120, num_attention_heads=24,
    num_key_value_heads=4, head_dim=256, intermediate_size=17408, vocab_size=248320,
    tie_word_embeddings=False, layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 16,
    linear_num_key_heads=16, linear_key_head_dim=128,
    linear_num_value_heads=48, linear_value_head_dim=128, linear_conv_kernel_dim=4), "27B 4-bit")
QWEN35_27B_4BIT = replace(QWEN35_27B_4BIT, bytes_per_weight=17e9 / QWEN35_27B_4BIT.streamed_weights())

MODELS: dict[str, ModelShape] = {
    "llama-3.1-8b": LLAMA31_8B, "llama-3.1-70b": LLAMA31_70B, "llama-3.2-1b": LLAMA32_1B,
    "pythia-70m": PYTHIA_70M, "pythia-160m": PYTHIA_160M, "pythia-410m": PYTHIA_410M, "pythia-1b": PYTHIA_1B,
    "pythia-1.4b": PYTHIA_1_4B, "pythia-2.8b": PYTHIA_2_8B, "smollm2-135m": SMOLLM2_135M,
    "lfm2-350m": LFM2_350M, "lfm2-1.2b": LFM2_1_2B, "lfm3-1.7b": LFM3_1_7B, "qwen3-4b": QWEN3_4B,
    "gpt2": GPT2, "gpt2-biases": GPT2_BIASES, "27b-4bit": QWEN35_27B_4BIT,
}


def model(name: str) -> ModelShape:
    """The shape of that name in MODELS (capitals and underscores are forgiven), or BadInput."""
    key = name.strip().lower().replace("_", "-")
    if key not in MODELS:
        raise unknown("model", name, MODELS)
    return MODELS[key]


# ------------------------------------------------------------------------------------------------- step times


def verify_time(shape: ModelShape, chip: Chip, batch, context, n, overhead: float = 1e-3, *,
                kv_dtype: str | float = "bf16", flop_efficiency: float = FLOP_EFFICIENCY,
                byte_efficiency: float = BYTE_EFFICIENCY):
    """Seconds of one forward that sends n tokens for each of `batch` sequences of `context` cached tokens.

    max(FLOPs / (peak x flop_efficiency), bytes / (bandwidth x byte_efficiency)) + overhead. Bytes are the
    streamed weights, once for the batch, and every sequence's cache, once however many tokens are sent. FLOPs
    run at the chip's default dtype, also when weights are stored in fewer bits. overhead in seconds: 1 ms for
    a target, 0.3 ms for a draft are what the lab assumes.
    """
    batch, n = checked("batch", batch, 1, whole=True), checked("n", n, 1, whole=True)
    overhead = checked("overhead", overhead, 0)
    flop_efficiency = checked("flop_efficiency", flop_efficiency, 0, 1, above=True)
    byte_efficiency = checked("byte_efficiency", byte_efficiency, 0, 1, above=True)
    arithmetic = batch * shape.flops(n, context) / (chip.peak() * flop_efficiency)
    moved = shape.streamed_bytes() + batch * shape.kv_bytes(context, kv_dtype)
    return _plain(np.maximum(arithmetic, moved / (chip.bandwidth * byte_efficiency)) + overhead)


def max_batch(shape: ModelShape, chip: Chip, context: int, *, kv_dtype: str | float = "bf16",
              draft: ModelShape | None = None) -> int:
    """Most sequences of `context` tokens whose cache fits beside the weights; 0 when not one does.

    With a draft, its weights and its cache count too. Activations and the serving engine's own memory do not.
    """
    context = int(checked("context", context, 1, whole=True))
    models = [shape] if draft is None else [shape, draft]
    free = chip.memory - sum(m.weight_bytes() for m in models)
    per_sequence = sum(m.kv_bytes(context, kv_dtype) for m in models)
    if not math.isfinite(free):
        raise BadInput(f"the memory of {chip.name} is not known, so neither is the largest batch")
    return max(0, int(free // per_sequence))


def critical_batch(chip: Chip, bytes_per_weight: float = 2.0, *, flop_efficiency: float = FLOP_EFFICIENCY,
                   byte_efficiency: float = BYTE_EFFICIENCY) -> float:
    """Tokens per forward at which a matrix product takes as long as streaming its weights (KV cache aside).

    Each weight costs 2 FLOPs per token and bytes_per_weight once: ridge x bytes_per_weight / 2, corrected for
    the two efficiencies. 221 tokens on an H100 SXM in bf16 at 60 % and 80 %.
    """
    width = checked("bytes_per_weight", bytes_per_weight, 0, above=True)
    flop_efficiency = checked("flop_efficiency", flop_efficiency, 0, 1, above=True)
    byte_efficiency = checked("byte_efficiency", byte_efficiency, 0, 1, above=True)
    return _plain(chip.ridge() * flop_efficiency / byte_efficiency * width / 2)


# ------------------------------------------------------------------------------------- acceptance and speedup


def expected_tokens(alpha, gamma):
    """E[tokens per target forward] with a chain of gamma drafts: (1 - alpha^(gamma+1)) / (1 - alpha).

    Leviathan, Kalman, Matias 2023 (arXiv 2211.17192), equation 1. alpha in [0, 1], gamma a whole number >= 0.
    """
    alpha, gamma = checked("alpha", alpha, 0, 1), checked("gamma", gamma, 0, whole=True)
    alpha, gamma = np.broadcast_arrays(alpha, gamma)
    near_one = alpha > 1 - 1e-9  # the quotient loses its digits there, and its limit is gamma + 1
    power = (1 - np.where(near_one, 0, alpha) ** (gamma + 1.0)) / np.where(near_one, 1, 1 - alpha)
    return _plain(np.where(near_one, gamma + 1.0, power))


def speedup(alpha, gamma, c, verify_ratio=1.0):
    """Speed over plain decoding: E / (gamma c + 1), Theorem 3.8 of arXiv 2211.17192.

    c is one draft step's time over one target step's; verify_ratio, 1 in the paper, is the time of verifying
    gamma + 1 tokens over that of one.
    """
    c = checked("c", c, 0)
    verify_ratio = checked("verify_ratio", verify_ratio, 0, above=True)
    return _plain(expected_tokens(alpha, gamma) / (np.asarray(gamma) * c + verify_ratio))


def extra_arithmetic(alpha, gamma, c_flops=0.0):
    """FLOPs per token over plain decoding's: (gamma c_flops + gamma + 1) / E.

    Theorem 3.11 of arXiv 2211.17192. c_flops is one draft step's FLOPs over one target step's; 0 is a draft
    of no cost.
    """
    c_flops = checked("c_flops", c_flops, 0)
    return _plain((np.asarray(gamma) * (c_flops + 1) + 1) / expected_tokens(alpha, gamma))


def best_gamma(alpha: float, c: float, max_gamma: int = 256) -> tuple[int, float]:
    """(gamma, speedup) of the highest speedup(alpha, gamma, c) up to max_gamma; (0, 1.0) if none pays."""
    gammas = np.arange(int(checked("max_gamma", max_gamma, 0, whole=True)) + 1)
    values = np.atleast_1d(speedup(float(checked("alpha", alpha, 0, 1)), gammas, float(checked("c", c, 0))))
    best = int(np.argmax(values))
    return best, float(values[best])


def cascade_cost(alpha, gamma: int, n: int, c_small, c_middle) -> np.ndarray:
    """(n + 1, ...): what drafting 0 to n tokens costs a middle model for which a small one drafts, in target steps.

    The middle verifies up to gamma tokens of the small model's at a time, one fewer than are still missing at most;
    each is accepted with probability alpha, on its own. c_small and c_middle are a step of either over one of the
    target's; verifying counts as one step of the middle. With gamma = 0 the middle works alone: n c_middle. The mean
    over the first round's outcomes, of each the cost of what then is missing. Arrays are broadcast.
    """
    gamma, n = int(checked("gamma", gamma, 0, whole=True)), int(checked("n", n, 0, whole=True))
    alpha, c_small, c_middle = np.broadcast_arrays(
        checked("alpha", alpha, 0, 1), checked("c_small", c_small, 0), checked("c_middle", c_middle, 0))
    cost = [np.zeros(alpha.shape)]
    for missing in range(1, n + 1):
        drafts = min(gamma, missing - 1)
        rest = sum(alpha**k * (1 - alpha) * cost[missing - k - 1] for k in range(drafts))
        cost.append(drafts * c_small + c_middle + rest + alpha**drafts * cost[missing - drafts - 1])
    return np.array(cost)


def best_cascade(alpha_12, alpha_23, c_1, c_2, max_inner: int = 8, max_gamma: int = 16):
    """(inner gamma, gamma, speedup) of the fastest cascade: model 1 drafts for 2, whose tokens are drafted for 3.

    Speedup over the plain decoding of 3: E(alpha_23, gamma) over 1 + cascade_cost. An inner gamma of 0 leaves model 1
    out, a gamma of 0 both; of equally fast ones, the shortest drafts. Arrays are broadcast, and arrays returned.
    """
    inners, gammas = (range(int(checked(name, value, 0, whole=True)) + 1)
                      for name, value in (("max_inner", max_inner), ("max_gamma", max_gamma)))
    alpha_12, alpha_23, c_1, c_2 = np.broadcast_arrays(
        checked("alpha_12", alpha_12, 0, 1), checked("alpha_23", alpha_23, 0, 1), checked("c_1", c_1, 0),
        checked("c_2", c_2, 0))
    tokens = np.array([expected_tokens(alpha_23, gamma) for gamma in gammas])
    gains = np.concatenate([tokens / (1 + cascade_cost(alpha_12, inner, gammas[-1], c_1, c_2)) for inner in inners])
    best = gains.argmax(axis=0)                                # of (inner gammas x gammas, ...)
    inner, gamma, gain = best // len(gammas), best % len(gammas), gains.max(axis=0)
    return (inner, gamma, gain) if best.ndim else (int(inner), int(gamma), float(gain))


def alpha_from_tau(tau, gamma):
    """The alpha at which expected_tokens(alpha, gamma) is tau: tau from 1 to gamma + 1, gamma >= 1."""
    gamma = checked("gamma", gamma, 1, whole=True)
    tau, gamma = np.broadcast_arrays(checked("tau", tau, 1), gamma)
    if np.any(tau > gamma + 1):
        worst = np.argmax(tau - gamma)
        drafts = gamma.flat[worst]
        raise BadInput(f"tau is {tau.flat[worst]:g} but {drafts} drafts give at most {drafts + 1}")
    low, high = np.zeros(tau.shape), np.ones(tau.shape)
    for _ in range(60):
        middle = (low + high) / 2
        above = expected_tokens(middle, gamma) > tau
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return _plain(np.where(tau == gamma + 1, 1.0, np.where(tau == 1, 0.0, (low + high) / 2)))


def tau_from_positions(alphas) -> float:
    """tau = 1 + sum over i of alpha_1 ... alpha_i; 1 for an empty list.

    alpha_i is the acceptance at draft position i, given that the positions before it were accepted.
    """
    return float(1 + np.sum(np.cumprod(checked("alphas", alphas, 0, 1))))


@dataclass(frozen=True)
class PredictedRound:
    """One round of speculation, predicted. Times in seconds; verify_ratio is verify_s / plain_s."""

    gamma: int
    alpha: float
    c: float
    tau: float
    draft_s: float  # all gamma draft steps
    verify_s: float
    plain_s: float
    verify_ratio: float
    speedup: float

    @property
    def seconds(self) -> float:
        """Time of the round."""
        return self.draft_s + self.verify_s


def best_round(target: ModelShape, draft: ModelShape, chip: Chip, batch: int, context: int, alpha: float,
               overhead_t: float = 1e-3, overhead_d: float = 0.3e-3, *, max_gamma: int = 64,
               kv_dtype: str | float = "bf16", flop_efficiency: float = FLOP_EFFICIENCY,
               byte_efficiency: float = BYTE_EFFICIENCY) -> tuple[int, PredictedRound | None]:
    """(gamma, round) of the chain length with the highest predicted speedup; (0, None) when none is above 1.

    A round is gamma draft steps and one target forward of gamma + 1 tokens per sequence, each by verify_time.
    Whether it fits in memory is not asked: see max_batch.
    """
    alpha = float(checked("alpha", alpha, 0, 1))
    gammas = np.arange(1, int(checked("max_gamma", max_gamma, 1, whole=True)) + 1)
    seconds = partial(verify_time, kv_dtype=kv_dtype, flop_efficiency=flop_efficiency, byte_efficiency=byte_efficiency)
    plain = seconds(target, chip, batch, context, 1, overhead_t)
    step = seconds(draft, chip, batch, context, 1, overhead_d)
    verify = seconds(target, chip, batch, context, gammas + 1, overhead_t)
    taus = expected_tokens(alpha, gammas)
    speedups = taus * plain / (gammas * step + verify)
    i = int(np.argmax(speedups))
    if speedups[i] <= 1:
        return 0, None
    gamma = int(gammas[i])
    return gamma, PredictedRound(gamma, alpha, step / plain, float(taus[i]), gamma * step, float(verify[i]),
                                 plain, float(verify[i] / plain), float(speedups[i]))
