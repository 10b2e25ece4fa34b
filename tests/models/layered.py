"""Small random models of five layers, which tests of layers, their search and rounded weights share."""

import numpy as np
import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

V, N = 97, 5
SMALL = dict(vocab_size=V, hidden_size=32, num_hidden_layers=N, num_attention_heads=4, intermediate_size=64,
             max_position_embeddings=640, bos_token_id=1, eos_token_id=2)
GQA = dict(SMALL, num_key_value_heads=2)
TYPES = ["conv", "full_attention", "conv", "conv", "full_attention"]
CLASSES = {"llama": (LlamaForCausalLM, lambda: LlamaConfig(**GQA)),
           "neox": (GPTNeoXForCausalLM, lambda: GPTNeoXConfig(**SMALL)),
           "qwen3": (Qwen3ForCausalLM, lambda: Qwen3Config(**GQA, head_dim=8)),
           "mistral": (MistralForCausalLM, lambda: MistralConfig(**GQA, sliding_window=8)),
           "lfm2": (Lfm2ForCausalLM, lambda: Lfm2Config(**GQA, layer_types=list(TYPES)))}


def build(kind: str):
    torch.manual_seed(7)
    made, config = CLASSES[kind]
    model = made(config())
    with torch.no_grad():                                       # larger than usual, so that every layer and mask shows
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.2)
    return model.eval()


def tokens(n, seed=0):
    return np.random.default_rng(seed).integers(3, V, n)


def close(a, b, atol=3e-5):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=atol)


def layer_list(model):
    return model.base_model.layers


@torch.inference_mode()
def direct(model, ids):
    """(n, V) logits of transformers' own forward over the whole sequence, without a cache."""
    return model(torch.tensor(np.asarray(ids))[None], use_cache=False).logits[0].numpy()
