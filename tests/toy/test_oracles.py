"""The toy against torch and transformers, its parameters, and sampling in batches."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from console import BadInput
from decode_lab import autoregressive_generate
from lab import toy
from lab.toy import transformer
from lab.toy.transformer import (
    QCFG,
    Config,
    TransformerLM,
    config_like,
    generate_batch,
    init_params,
    sample_tokens,
    truncate,
)
from toys import MHA, MQA, TINY, close, random_lm, text_for

# -- oracles -------------------------------------------------------------------------------------------------

def trainer():
    path = Path(toy.WEIGHTS).parent / "train.py"
    spec = importlib.util.spec_from_file_location("train", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_logits_equal_those_of_the_training_script(lm):
    import torch
    train = trainer()
    flat = {k: torch.from_numpy(np.ascontiguousarray(w)) for k, w in train.flatten(lm.params).items()}
    batch = np.stack([text_for(lm, 64, seed) for seed in range(2)])
    with torch.no_grad():
        out = train.forward(flat, lm.config, torch.from_numpy(batch), exits=(1, 2))
    close(lm.full_logits(batch), out[lm.config.n_layers].numpy(), 4)
    for n in (1, 2):                                        # early exits are truncated models
        short = TransformerLM(truncate(lm.params, n), config_like(lm.config, n_layers=n))
        close(short.full_logits(batch), out[n].numpy(), 4)


def llama(lm):
    """transformers' LlamaForCausalLM with the same weights, in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    c = lm.config
    options = dict(vocab_size=c.vocab_size, hidden_size=c.hidden, intermediate_size=c.ffn,
                   num_hidden_layers=c.n_layers, num_attention_heads=c.n_heads,
                   num_key_value_heads=c.n_kv_heads, head_dim=c.head_dim, rms_norm_eps=c.norm_eps,
                   max_position_embeddings=c.max_length,
                   rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
                   tie_word_embeddings=True, attn_implementation="eager")
    model = LlamaForCausalLM(LlamaConfig(**options)).eval()
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "wq": "self_attn.q_proj",
             "wk": "self_attn.k_proj", "wv": "self_attn.v_proj", "wo": "self_attn.o_proj",
             "w_gate": "mlp.gate_proj", "w_up": "mlp.up_proj", "w_down": "mlp.down_proj"}
    state = {"model.embed_tokens.weight": lm.params["embed"], "model.norm.weight": lm.params["norm"],
             "lm_head.weight": lm.params["embed"]}
    for i, layer in enumerate(lm.params["layers"]):
        assert set(layer) == set(names)
        state.update({f"model.layers.{i}.{names[k]}.weight": w.T for k, w in layer.items()})
    model.load_state_dict({k: torch.from_numpy(np.ascontiguousarray(w)) for k, w in state.items()})
    return model


def test_logits_equal_those_of_transformers_llama(lm):
    import torch
    model, batch = llama(lm), np.stack([text_for(lm, 64, seed) for seed in range(2)])
    with torch.no_grad():
        out = model(torch.from_numpy(batch), output_hidden_states=True)
    close(lm.full_logits(batch), out.logits.numpy(), 4)
    lm.prefill(batch[1])
    close(lm.hidden, out.hidden_states[-1][1].numpy(), 4)
    assert sum(p.numel() for p in model.parameters()) == lm.config.n_params()


# -- parameters ----------------------------------------------------------------------------------------------

def arrays(params):
    return [params["embed"], params["norm"]] + [w for layer in params["layers"] for w in layer.values()]


@pytest.mark.parametrize("config", [Config(), QCFG, TINY, MHA, MQA])
def test_n_params_counts_the_arrays(config):
    params = init_params(config, 0)
    assert config.n_params() == sum(w.size for w in arrays(params))
    assert all(w.dtype == np.float32 for w in arrays(params)) and isinstance(params["layers"], list)
    assert params["embed"].shape == (config.vocab_size, config.hidden)
    assert len(params["layers"]) == config.n_layers
    assert params["layers"][0]["wk"].shape == (config.hidden, config.n_kv_heads * config.head_dim)


def test_init_params_depends_on_the_seed_alone():
    a, b, c = (arrays(init_params(TINY, seed)) for seed in (0, 0, 1))
    assert all((x == y).all() for x, y in zip(a, b)) and not (a[0] == c[0]).all()
    layer = init_params(config_like(Config(), n_layers=2), 0)["layers"][0]
    assert layer["wq"].std() == pytest.approx(128 ** -0.5, rel=0.05)
    assert layer["w_down"].std() == pytest.approx(256 ** -0.5 / 2, rel=0.05)
    assert init_params(Config(), 0)["embed"].std() == pytest.approx(0.02, rel=0.05)


def test_config_like_and_truncate_share_the_arrays():
    params = init_params(TINY, 0)
    short = truncate(params, 2)
    assert config_like(TINY, n_layers=2).n_layers == 2 and config_like(TINY, n_layers=2).ffn == TINY.ffn
    assert len(short["layers"]) == 2 and short["embed"] is params["embed"] and len(params["layers"]) == 3
    assert short["layers"][1]["wq"] is params["layers"][1]["wq"]


# -- sampling in batches -------------------------------------------------------------------------------------

def assert_plain_greedy(lm, tokens, prompt):
    """Each row of tokens is what plain decoding says, or differs where the two best are within rounding."""
    for row in tokens:
        want, _ = autoregressive_generate(lm, row[:prompt], len(row) - prompt)
        differ = np.flatnonzero(row != want)
        if len(differ):
            z = lm.full_logits(want[None, :differ[0]])[0, -1]
            assert abs(z[row[differ[0]]] - z[want[differ[0]]]) < 1e-4


@pytest.mark.parametrize("trained", [False, True])
def test_sample_tokens_at_temperature_zero_equal_plain_decoding(trained):
    lm = toy.load("small") if trained else random_lm()
    tokens = sample_tokens(lm.params, lm.config, 4, 40, seed=3, temperature=0)
    assert tokens.shape == (4, 40) and tokens.dtype == np.int64
    assert_plain_greedy(lm, tokens, 1)


def test_generate_batch_equals_plain_decoding_of_each_prompt():
    lm = random_lm()
    prompts = np.stack([text_for(lm, 9, seed) for seed in range(3)])
    tokens = generate_batch(lm, prompts, 20)
    assert tokens.shape == (3, 29) and (tokens[:, :9] == prompts).all() and lm.length == 0
    assert_plain_greedy(lm, tokens, 9)
    assert generate_batch(lm, prompts, 0).tolist() == prompts.tolist()
    drawn = [generate_batch(lm, prompts, 20, 1.0, rng) for rng in (None, np.random.default_rng(0))]
    assert (drawn[0] == drawn[1]).all() and not (drawn[0] == tokens).all(), "without an rng, seed 0"
    with pytest.raises(BadInput):
        generate_batch(lm, [[1, 40]], 3)


def test_sample_tokens_follow_the_models_distribution():
    """First transitions of many sequences against softmax of the logits; the seed is fixed."""
    lm = random_lm(config_like(TINY, vocab_size=5))
    for temperature in (1.0, 2.0):
        tokens = sample_tokens(lm.params, lm.config, 6000, 2, seed=0, temperature=temperature)
        z = lm.full_logits(np.arange(5)[:, None])[:, 0].astype(np.float64) / temperature
        for first in range(5):
            second = tokens[tokens[:, 0] == first, 1]
            assert len(second) > 1000
            share = np.bincount(second, minlength=5) / len(second)
            assert np.abs(share - transformer.softmax(z[first])).max() < 0.06      # four standard deviations


def test_sample_tokens_depend_on_the_seed_alone():
    params = init_params(QCFG, 0)
    a, b, c = (sample_tokens(params, QCFG, 2, 12, seed) for seed in (0, 0, 1))
    assert (a == b).all() and not (a == c).all() and a.min() >= 0 and a.max() < 256


def test_nothing_overflows():
    """Large activations: softmax and the gate stay finite, without a warning."""
    with np.errstate(over="raise", invalid="raise"):
        assert transformer.softmax(np.array([1e4, 0.0, -1e4], np.float32)).tolist() == [1, 0, 0]
        gate = transformer.silu(np.array([-200.0, 0.0, 200.0], np.float32))
        np.testing.assert_allclose(gate, [0, 0, 200], atol=1e-30)


@pytest.mark.parametrize("change", [{"n_kv_heads": 3}, {"head_dim": 15}, {"n_layers": 0}])
def test_impossible_shapes_are_refused(change):
    with pytest.raises(BadInput):
        config_like(QCFG, **change)
