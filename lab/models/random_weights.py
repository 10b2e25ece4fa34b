"""Models of a registered shape with drawn weights: for times and bytes; what they write means nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import console
from console import BadInput, fmt_bytes
from lab.models.decoder import HFDecoder
from lab.models.kernels import packed
from lab.models.loading import checked_device, torch_dtype
from llm_math import ModelShape, from_hf_config
from llm_math import model as registered

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def random_config(shape: ModelShape):
    """transformers' configuration of a model of this shape.

    The class follows from the shape: GPT-2 by its position table, GPT-NeoX by LayerNorm, LFM2 and LFM3 by their
    convolutions, Qwen3 by its normalised queries and keys, else Llama. What a shape leaves open (the order of a
    hybrid's layers, the positions a model holds, its rotation) changes neither bytes nor FLOPs: LFM2 gets its attention
    layers evenly spread, the rest the class's defaults. BadInput where the class cannot have the shape, by what
    from_hf_config reads back.
    """
    import transformers
    if shape.n_linear:
        raise BadInput(f"{shape.name} cannot be drawn: its linear-attention layers are registered as sums of weights, "
                       f"without the heads that transformers' class asks for")
    common: dict[str, Any] = dict(vocab_size=shape.vocab_size, tie_word_embeddings=shape.tied, bos_token_id=None,
                                  eos_token_id=None, pad_token_id=None)
    config: PreTrainedConfig
    if shape.positions:
        config = transformers.GPT2Config(n_embd=shape.hidden, n_layer=shape.n_layers, n_head=shape.n_heads,
                                         n_inner=shape.ffn, n_positions=shape.positions, **common)
    else:
        common |= dict(hidden_size=shape.hidden, num_hidden_layers=shape.n_layers, intermediate_size=shape.ffn,
                       num_attention_heads=shape.n_heads)
        grouped: dict[str, Any] = dict(num_key_value_heads=shape.n_kv_heads, head_dim=shape.head_dim)
        attention = shape.n_layers - shape.n_conv
        passed = [i * attention // shape.n_layers for i in range(shape.n_layers + 1)]
        spread = ["full_attention" if b > a else "conv" for a, b in pairwise(passed)]
        if shape.norm_bias:
            config = transformers.GPTNeoXConfig(attention_bias=shape.attention_bias, **common)
        elif shape.n_conv and shape.n_windowed:
            config = transformers.Lfm3Config(conv_L_cache=shape.conv_window, sliding_window=shape.window, **common,
                                             **grouped)
        elif shape.n_conv:
            config = transformers.Lfm2Config(num_key_value_heads=shape.n_kv_heads, conv_L_cache=shape.conv_window,
                                             block_auto_adjust_ff_dim=False, layer_types=spread, **common)
        else:
            kind = transformers.Qwen3Config if shape.qk_norm else transformers.LlamaConfig
            config = kind(attention_bias=shape.attention_bias, **common, **grouped)
    made = replace(from_hf_config(config, shape.name), bytes_per_weight=shape.bytes_per_weight)
    differ = [f"{name} {value!r}, not {getattr(shape, name)!r}" for name, value in vars(made).items()
              if value != getattr(shape, name)]
    if differ:
        raise BadInput(f"{shape.name} cannot be drawn: transformers' {type(config).__name__.removesuffix('Config')} "
                       f"would have {', '.join(differ)}")
    return config


def random_model(shape_name: str, device: str = "cpu", dtype: str = "float32", seed: int = 0) -> HFDecoder:
    """A model of a registered shape (llm_math.MODELS) as a decoder: transformers' own class, its weights drawn.

    The class's own initialisation (normal, deviation 0.02; norms 1, biases 0) runs on the device, in the dtype. Bytes
    and times are those of a trained model of this shape; what it writes, and so every acceptance, means nothing
    (`decoder.random`). It has no tokenizer and no end of text: it takes token ids (`random_ids`).
    Raises BadInput for an unknown name, a shape that `random_config` cannot express, and one that memory cannot hold.
    """
    weights = torch_dtype(dtype)
    place, shape = checked_device(device), registered(shape_name)
    config = random_config(shape)
    # Packed weights (below) are held twice.
    need = shape.n_params() * weights.itemsize * (2 if (place.type, dtype) == ("cpu", "float32") else 1)
    memory = torch.cuda.mem_get_info(place)[0] if place.type == "cuda" else console.host()["memory"] or need
    if need > memory:
        raise BadInput(f"{shape.name} in {dtype} takes {fmt_bytes(need)} and {place} has {fmt_bytes(memory)}: a "
                       f"smaller shape or a dtype of fewer bytes would be right")
    import transformers
    with torch.random.fork_rng([place] if place.type == "cuda" else []), place:
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=weights)
    decoder = HFDecoder(packed(model), name=shape.name)
    decoder.random = True
    return decoder


def random_ids(decoder: HFDecoder, n: int, seed: int = 0) -> list[int]:
    """n token ids drawn evenly from the decoder's vocabulary."""
    return np.random.default_rng(seed).integers(0, decoder.vocab_size, n).tolist()
