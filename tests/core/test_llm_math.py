from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import llm_math
from console import BadInput
from hw_specs import CHIPS, H100, RTX_4090
from llm_math import (
    LLAMA31_8B,
    LLAMA32_1B,
    MODELS,
    QWEN3_4B,
    ModelShape,
    alpha_from_tau,
    best_cascade,
    best_gamma,
    best_round,
    cascade_cost,
    critical_batch,
    element_bytes,
    expected_tokens,
    extra_arithmetic,
    from_hf_config,
    max_batch,
    model,
    speedup,
    tau_from_positions,
    verify_time,
)

alphas = st.floats(0, 0.999)
gammas = st.integers(1, 40)


# ----------------------------------------------------------------------------------------------- model shapes


@pytest.mark.parametrize("name, parameters, kv_bytes", [
    ("llama-3.1-8b", 8_030_261_248, 131_072),
    ("llama-3.1-70b", 70_553_706_496, 327_680),
    ("llama-3.2-1b", 1_235_814_400, 32_768),
    ("smollm2-135m", 134_515_008, 23_040),
    ("lfm2-350m", 354_483_968, 12_288),
    ("lfm2-1.2b", 1_170_340_608, 12_288),
    ("pythia-70m", 70_426_624, 12_288),
    ("pythia-160m", 162_322_944, 36_864),
    ("pythia-410m", 405_334_016, 98_304),
    ("pythia-1b", 1_011_781_632, 131_072),
    ("pythia-1.4b", 1_414_647_808, 196_608),
    ("pythia-2.8b", 2_775_208_960, 327_680),
    ("qwen3-4b", 4_022_468_096, 147_456),
    ("gpt2", 124_337_664, 36_864),
    ("gpt2-biases", 124_439_808, 36_864),
])
def test_published_parameters_and_cache(name, parameters, kv_bytes):
    assert MODELS[name].n_params() == parameters
    assert MODELS[name].kv_bytes_per_token() == kv_bytes


def test_qwen3_4b_streams_its_matrices():
    assert QWEN3_4B.streamed_weights() == 4_022_272_000
    norms = 36 * (2 * 2560 + 2 * 128) + 2560
    assert QWEN3_4B.n_params() - QWEN3_4B.streamed_weights() == norms


def test_gpt2s_two_counts_differ_by_the_biases():
    per_layer = 2 * 768 + 3 * 768 + 768 + 3072 + 768  # two LayerNorms, qkv, attention out, up, down
    assert MODELS["gpt2-biases"].n_params() - MODELS["gpt2"].n_params() == 12 * per_layer + 768


def test_an_untied_input_embedding_is_not_streamed_and_a_tied_one_is_once():
    embedding = LLAMA31_8B.vocab_size * LLAMA31_8B.hidden
    tied = replace(LLAMA31_8B, tied=True)
    assert tied.streamed_weights() == LLAMA31_8B.streamed_weights()
    assert LLAMA31_8B.n_params() - tied.n_params() == embedding
    norms = (2 * 32 + 1) * 4096
    assert LLAMA31_8B.n_params() - LLAMA31_8B.streamed_weights() == embedding + norms


def test_kv_bytes_follow_heads_and_dtype():
    half = replace(LLAMA31_8B, n_kv_heads=4)
    assert half.kv_bytes_per_token() * 2 == LLAMA31_8B.kv_bytes_per_token()
    for dtype, size in (("fp16", 2), ("int8", 1), ("int4", 0.5), (0.5625, 0.5625)):
        assert LLAMA31_8B.kv_bytes_per_token(dtype) == 65_536 * size
    assert element_bytes("fp32") == 4
    with pytest.raises(BadInput, match='unknown dtype "int5"'):
        element_bytes("int5")


def test_windowed_layers_stop_growing():
    lfm3 = MODELS["lfm3-1.7b"]
    assert (lfm3.n_kv_layers, lfm3.n_windowed, lfm3.n_conv) == (11, 5, 13)
    layer = 2 * 4 * 128 * 2
    state = 13 * 6 * 2048 * 2  # a window of 7 needs the 6 inputs before the current one
    assert lfm3.kv_bytes(100) == 11 * 100 * layer + state
    assert lfm3.kv_bytes(1000) == (6 * 1000 + 5 * 256) * layer + state
    assert np.all(np.diff(lfm3.kv_bytes(np.array([256, 257, 512]))) == np.array([1, 255]) * 6 * layer)


def test_the_27b_of_demo_01():
    shape = MODELS["27b-4bit"]
    assert shape.streamed_bytes() == pytest.approx(17e9)
    assert (shape.n_kv_layers, shape.n_kv_heads, shape.head_dim) == (16, 4, 256)
    assert 26e9 < shape.n_params() < 28e9
    passes = {dtype: RTX_4090.bandwidth / (17e9 + shape.kv_bytes(262_144, dtype))
              for dtype in ("int4", "fp16")}
    assert round(RTX_4090.bandwidth / shape.streamed_bytes()) == 59
    assert round(passes["int4"]) == 47 and round(passes["fp16"]) == 29


def test_flops_count_attention():
    one = LLAMA31_8B.flops(1, 0)
    assert one == 2 * LLAMA31_8B.streamed_weights() + 4 * 32 * 32 * 128
    steps = sum(LLAMA31_8B.flops(1, i) for i in range(10))
    assert LLAMA31_8B.flops(10, 0) == pytest.approx(steps)  # ten tokens at once cost what ten steps do


def _transformers_shapes():
    """Configurations as transformers has them, and what their models are called here."""
    layers = dict(layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 16)
    return [
        ("LlamaConfig", dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                             num_attention_heads=9, num_key_value_heads=3,
                             tie_word_embeddings=True), "smollm2-135m"),
        ("LlamaConfig", dict(vocab_size=128256, hidden_size=4096, intermediate_size=14336,
                             num_hidden_layers=32, num_attention_heads=32,
                             num_key_value_heads=8), "llama-3.1-8b"),
        ("GPTNeoXConfig", dict(vocab_size=50304, hidden_size=512, num_hidden_layers=6, num_attention_heads=8,
                               intermediate_size=2048), "pythia-70m"),
        ("GPT2Config", {}, "gpt2-biases"),
        ("Qwen3Config", dict(vocab_size=151936, hidden_size=2560, intermediate_size=9728,
                             num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
                             head_dim=128, tie_word_embeddings=True), "qwen3-4b"),
        ("Lfm2Config", dict(vocab_size=65536, hidden_size=1024, block_ff_dim=6656, num_hidden_layers=16,
                            num_attention_heads=16, num_key_value_heads=8,
                            full_attn_idxs=[2, 5, 8, 10, 12, 14]), "lfm2-350m"),
        ("Lfm2Config", dict(vocab_size=65536, hidden_size=2048, intermediate_size=12288, num_hidden_layers=16,
                            num_attention_heads=32, num_key_value_heads=8,
                            full_attn_idxs=[2, 5, 8, 10, 12, 14]), "lfm2-1.2b"),
        ("Lfm3Config", {}, "lfm3-1.7b"),
        ("Qwen3_5TextConfig", dict(hidden_size=5120, intermediate_size=17408, num_hidden_layers=64,
                                   num_attention_heads=24, linear_num_value_heads=48, **layers), "27b-4bit"),
    ]


@pytest.mark.parametrize("kind, settings_, name", _transformers_shapes(), ids=lambda value: str(value)[:12])
def test_configurations_agree_with_transformers(kind, settings_, name):
    """The oracle: the model that transformers builds from the same configuration, without storage."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, kind)(**settings_)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    parameters = sum(p.numel() for p in built.parameters())
    for form in (config, config.to_dict()):
        shape = from_hf_config(form)
        assert shape.n_params() == parameters
        known = MODELS[name]
        assert replace(shape, name=known.name, bytes_per_weight=known.bytes_per_weight) == known


def test_a_composite_configuration_is_read_through_its_text_part():
    text = dict(model_type="llama", vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                num_attention_heads=4)
    shape = from_hf_config(dict(model_type="some_vl", text_config=text), "vl")
    assert shape == from_hf_config(text, "vl") and shape.n_kv_heads == 4 and not shape.tied


@pytest.mark.parametrize("config, message", [
    (dict(model_type="mamba"), "model_type 'mamba' is not modelled"),
    ({}, "model_type None"),
    (dict(model_type="llama", hidden_size=64), "no 'num_attention_heads'"),
    (dict(model_type="lfm2", hidden_size=64, num_attention_heads=4, num_hidden_layers=2, intermediate_size=96,
          vocab_size=10), "neither 'layer_types' nor"),
    (dict(model_type="qwen3", hidden_size=64, num_attention_heads=4, num_hidden_layers=2,
          intermediate_size=96, vocab_size=10, layer_types=["full_attention"]), "must name 2 layers"),
])
def test_unusable_configurations(config, message):
    with pytest.raises(BadInput, match=message):
        from_hf_config(config)


def test_unusable_shapes_and_names():
    with pytest.raises(BadInput, match="n_kv_heads of x is 3 but must be a divisor of 4"):
        ModelShape("x", 2, 64, 4, 3, 16, 96, 100)
    with pytest.raises(BadInput, match="n_layers of x is 0"):
        ModelShape("x", 0, 64, 4, 2, 16, 96, 100)
    with pytest.raises(BadInput, match="fewer than its parts"):
        ModelShape("x", 2, 64, 4, 2, 16, 96, 100, n_conv=3)
    with pytest.raises(BadInput, match="llama-3.1-8b"):
        model("llama-8b")
    assert model("LLAMA-3.1-8B") is LLAMA31_8B


# ------------------------------------------------------------------------------------------------- step times


def test_a_decode_step_by_hand():
    bytes_ = 2 * (8_030_261_248 - 128256 * 4096 - 65 * 4096) + 1024 * 131_072
    assert verify_time(LLAMA31_8B, H100, 1, 1024, 1) == pytest.approx(bytes_ / (H100.bandwidth * 0.8) + 1e-3)
    flops = 512 * LLAMA31_8B.flops(1, 0)
    assert verify_time(LLAMA31_8B, H100, 512, 0, 1, 0) == pytest.approx(flops / (989.4e12 * 0.6))
    assert verify_time(LLAMA31_8B, H100, 1, 1024, 1, 0, flop_efficiency=1, byte_efficiency=1) \
        == pytest.approx(bytes_ / H100.bandwidth)


def test_served_speed_is_near_the_published_one():
    """SGLang's table: Llama-3.1-8B at batch 1 on an H100 makes 158 tokens/s, 76 % of bandwidth over bytes."""
    ceiling = H100.bandwidth / LLAMA31_8B.weight_bytes()
    assert 158 / ceiling == pytest.approx(0.76, abs=0.01)
    assert 1 / verify_time(LLAMA31_8B, H100, 1, 1024, 1) == pytest.approx(158, rel=0.06)


def test_step_times_are_vectorized():
    n = np.array([1, 2, 257])
    times = verify_time(LLAMA31_8B, H100, 1, 1024, n)
    assert times.shape == (3,) and isinstance(verify_time(LLAMA31_8B, H100, 1, 1024, 1), float)
    assert list(times) == [verify_time(LLAMA31_8B, H100, 1, 1024, int(k)) for k in n]


@settings(max_examples=50, deadline=None)
@given(name=st.sampled_from(sorted(MODELS)), chip_name=st.sampled_from(sorted(CHIPS)),
       batch=st.integers(1, 512), context=st.integers(0, 100_000), n=st.integers(1, 256))
def test_more_work_never_takes_less_time(name, chip_name, batch, context, n):
    shape, chip = MODELS[name], CHIPS[chip_name]
    time = verify_time(shape, chip, batch, context, n)
    assert verify_time(shape, chip, batch + 1, context, n) >= time
    assert verify_time(shape, chip, batch, context + 1, n) >= time
    assert verify_time(shape, chip, batch, context, n + 1) >= time
    assert verify_time(shape, chip, batch, context, n, kv_dtype="int8") <= time


def test_critical_batch():
    assert round(critical_batch(H100)) == 221
    critical = critical_batch(H100)
    # Without a cache and attention, that is where the two times of verify_time cross.
    bare = replace(LLAMA31_8B, n_layers=1, head_dim=1, n_heads=1, n_kv_heads=1)
    below, above = (verify_time(bare, H100, b, 0, 1, 0) for b in (int(critical * 0.99), int(critical * 1.02)))
    assert below == pytest.approx(bare.streamed_bytes() / (H100.bandwidth * 0.8), rel=1e-3)
    assert above > below * 1.01
    assert critical_batch(H100, 0.5) == pytest.approx(critical / 4)


def test_max_batch():
    context = 4096
    free = 80e9 - 2 * 8_030_261_248
    assert max_batch(LLAMA31_8B, H100, context) == int(free // (context * 131_072))
    with_draft = (free - 2 * 1_235_814_400) // (context * (131_072 + 32_768))
    assert max_batch(LLAMA31_8B, H100, context, draft=LLAMA32_1B) == int(with_draft)
    assert max_batch(MODELS["llama-3.1-70b"], H100, 1) == 0
    with pytest.raises(BadInput, match="memory of H100 SXM is not known"):
        max_batch(LLAMA31_8B, replace(H100, memory=float("nan")), 1)


@pytest.mark.parametrize("call, message", [
    (lambda: verify_time(LLAMA31_8B, H100, 0, 1024, 1), "batch is 0 but must be a whole number of"),
    (lambda: verify_time(LLAMA31_8B, H100, 1, -1, 1), "context is -1"),
    (lambda: verify_time(LLAMA31_8B, H100, 1, 1, 1.5), "n is 1.5 but must be a whole number"),
    (lambda: verify_time(LLAMA31_8B, H100, 1, 1, 1, byte_efficiency=1.2), "byte_efficiency is 1.2"),
    (lambda: verify_time(LLAMA31_8B, H100, 1, 1, 1, -1e-3), "overhead is -0.001"),
    (lambda: expected_tokens(1.3, 4), "alpha is 1.3 but must be a number of at least 0 and at most 1"),
    (lambda: expected_tokens(float("nan"), 4), "alpha is nan"),
    (lambda: expected_tokens("high", 4), "alpha is 'high' but must be a number"),
    (lambda: expected_tokens(0.5, -1), "gamma is -1"),
    (lambda: speedup(0.5, 3, -0.1), "c is -0.1"),
    (lambda: alpha_from_tau(5.1, 4), "tau is 5.1 but 4 drafts give at most 5"),
    (lambda: alpha_from_tau(0.9, 4), "tau is 0.9"),
    (lambda: alpha_from_tau(1.5, 0), "gamma is 0"),
    (lambda: tau_from_positions([0.5, 1.2]), "alphas is 1.2"),
    (lambda: best_round(LLAMA31_8B, LLAMA32_1B, H100, 1, 1024, -0.1), "alpha is -0.1"),
])
def test_impossible_values(call, message):
    with pytest.raises(BadInput, match=message):
        call()


# ------------------------------------------------------------------------------------- acceptance and speedup


@pytest.mark.parametrize("alpha, gamma, extra, tokens", [
    (0.6, 2, 1.531, 1.960), (0.7, 3, 1.579, 2.533), (0.8, 5, 1.626, 3.689), (0.9, 10, 1.603, 6.862)])
def test_expected_tokens_and_extra_arithmetic(alpha, gamma, extra, tokens):
    assert expected_tokens(alpha, gamma) == pytest.approx(tokens, abs=5e-4)
    assert extra_arithmetic(alpha, gamma) == pytest.approx(extra, abs=5e-4)


@pytest.mark.parametrize("alpha, row", [
    (0.5, [(5, 1.875), (3, 1.630), (2, 1.458), (1, 1.250)]),
    (0.7, [(9, 2.972), (6, 2.353), (4, 1.981), (3, 1.583)]),
    (0.8, [(14, 4.232), (8, 3.092), (6, 2.470), (4, 1.868)]),
    (0.9, [(24, 7.486), (13, 4.674), (10, 3.431), (7, 2.373)])])
def test_best_gamma(alpha, row):
    for c, (gamma, gain) in zip((0.01, 0.05, 0.1, 0.2), row):
        found, value = best_gamma(alpha, c)
        assert found == gamma and value == pytest.approx(gain, abs=6e-4)


def test_published_predictions():
    """T5-XXL with small and large drafts: Leviathan et al., Table 2; and the lab's inverse."""
    assert speedup(0.75, 7, 0.02) == pytest.approx(3.2, abs=0.05)
    assert alpha_from_tau(1.8, 3) == pytest.approx(0.47, abs=0.005)
    assert alpha_from_tau(2.0, 3) == pytest.approx(0.54, abs=0.005)


@pytest.mark.parametrize("positions, tau", [
    ((.79, .74, .72, .73, .67), 3.31), ((.74, .69, .67, .67, .66), 2.97), ((.76, .69, .67, .68, .68), 3.04)])
def test_tau_from_positions_of_eagle(positions, tau):
    assert tau_from_positions(positions) == pytest.approx(tau, abs=5e-3)


def test_edges_of_expected_tokens():
    assert expected_tokens(0, 5) == 1 and expected_tokens(1, 5) == 6 and expected_tokens(0.7, 0) == 1
    assert expected_tokens(1 - 1e-12, 5) == pytest.approx(6)
    assert expected_tokens(np.array([0.5, 0.8]), np.array([[1], [3]])).shape == (2, 2)
    assert tau_from_positions([]) == 1 and best_gamma(0.1, 0.2) == (0, 1.0)


@settings(deadline=None)
@given(alpha=alphas, gamma=gammas)
def test_expected_tokens_is_monotone_and_bounded(alpha, gamma):
    tokens = expected_tokens(alpha, gamma)
    assert 1 <= tokens <= gamma + 1
    assert expected_tokens(alpha, gamma + 1) >= tokens
    assert expected_tokens(min(1.0, alpha + 1e-3), gamma) > tokens
    assert tokens == pytest.approx(sum(alpha**i for i in range(gamma + 1)))
    assert tokens == pytest.approx(tau_from_positions([alpha] * gamma))


@settings(deadline=None)
@given(alpha=alphas, gamma=gammas)
def test_alpha_from_tau_is_the_inverse(alpha, gamma):
    assert alpha_from_tau(expected_tokens(alpha, gamma), gamma) == pytest.approx(alpha, abs=1e-9)


@settings(deadline=None)
@given(alpha=st.floats(0.01, 0.99), c=st.floats(0.01, 2))
def test_speculation_pays_only_above_c(alpha, c):
    gamma, gain = best_gamma(alpha, c)
    assert (gamma == 0) == (gain == 1)
    if alpha > c * (1 + 1e-9):
        assert gain > 1
    if alpha < c * (1 - 1e-9):
        assert gamma == 0
    neighbours = speedup(alpha, gamma + 1, c), speedup(alpha, max(gamma - 1, 0), c)
    assert gain >= max(neighbours) * (1 - 1e-12)               # at alpha = c all are 1 up to rounding


def enumerated_cost(alpha, gamma, n, c_small, c_middle):
    """The mean over every way that the tests of a middle model can fall until it has n tokens."""
    if n == 0:
        return 0.0
    drafts, cost = min(gamma, n - 1), 0.0
    for falls in product((True, False), repeat=drafts):
        kept = falls.index(False) if False in falls else drafts
        weight = np.prod([alpha if fall else 1 - alpha for fall in falls])
        cost += weight * (drafts * c_small + c_middle + enumerated_cost(alpha, gamma, n - kept - 1, c_small, c_middle))
    return cost


@pytest.mark.parametrize("alpha", [0, 0.3, 0.8, 1])
@pytest.mark.parametrize("gamma", [0, 1, 2, 4, 9])
def test_cascade_cost_is_the_mean_over_all_outcomes(alpha, gamma):
    expected = [enumerated_cost(alpha, gamma, n, 0.03, 0.2) for n in range(6)]
    assert cascade_cost(alpha, gamma, 5, 0.03, 0.2) == pytest.approx(expected, rel=1e-12)


def test_limits_of_the_cascades_cost():
    assert cascade_cost(0.7, 0, 4, 0.03, 0.2) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    assert cascade_cost(0.7, 3, 1, 0.03, 0.2) == pytest.approx([0, 0.2]), "nothing to draft before the last one"
    assert cascade_cost(0, 2, 4, 0.03, 0.2)[4] == pytest.approx(4 * 0.2 + (2 + 2 + 1 + 0) * 0.03)
    assert cascade_cost(1, 2, 6, 0.03, 0.2)[6] == pytest.approx(2 * 0.2 + 4 * 0.03)
    assert cascade_cost(1, 9, 6, 0, 0.2)[6] == pytest.approx(0.2) and cascade_cost(0.5, 2, 0, 1, 1) == [0]
    many = cascade_cost(0.8, 4, 2000, 0.03, 0.2)               # far from the end, each token costs the same
    assert many[2000] / 2000 == pytest.approx((4 * 0.03 + 0.2) / expected_tokens(0.8, 4), rel=2e-3)


def test_cascade_cost_and_best_cascade_broadcast():
    alphas_, costs = np.array([[0.2], [0.9]]), np.array([0.1, 0.2, 0.5])
    cost = cascade_cost(alphas_, 2, 5, 0.01, costs)
    assert cost.shape == (6, 2, 3) and cascade_cost(0.5, 2, 3, costs, 0.1).shape == (4, 3)
    for i, j in product(range(2), range(3)):
        assert cost[:, i, j] == pytest.approx(cascade_cost(alphas_[i, 0], 2, 5, 0.01, costs[j]))
    grids = [(alphas_, np.array([0.3, 0.6, 0.95]), 0.02, 0.3), (0.8, 0.7, np.array([[0.01], [0.1]]), costs),
             (alphas_, 0.9, costs / 10, costs)]
    for grid in grids:
        inner, gamma, gain = best_cascade(*grid)
        assert inner.shape == gamma.shape == gain.shape == (2, 3)
        each = np.broadcast_arrays(*grid)
        for at in np.ndindex(2, 3):
            assert (inner[at], gamma[at], gain[at]) == pytest.approx(best_cascade(*(float(x[at]) for x in each)))


@settings(deadline=None, max_examples=50)
@given(alpha_12=alphas, alpha_23=alphas, c_1=st.floats(0, 0.3), c_2=st.floats(0, 1))
def test_best_cascade_is_the_best_of_all(alpha_12, alpha_23, c_1, c_2):
    every = {(inner, gamma): expected_tokens(alpha_23, gamma) / (1 + cascade_cost(alpha_12, inner, gamma, c_1, c_2)[-1])
             for inner in range(4) for gamma in range(7)}
    inner, gamma, gain = best_cascade(alpha_12, alpha_23, c_1, c_2, 3, 6)
    assert type(inner) is type(gamma) is int and type(gain) is float
    assert gain == pytest.approx(max(every.values())) == pytest.approx(every[inner, gamma])
    assert inner < max(gamma, 1), "of equally fast ones, the shortest: a longer inner draft is never proposed"


@settings(deadline=None, max_examples=50)
@given(alpha_12=alphas, alpha_23=alphas, c_1=st.floats(0, 0.3), c_2=st.floats(0.01, 1))
def test_without_an_inner_draft_the_best_cascade_is_the_best_gamma(alpha_12, alpha_23, c_1, c_2):
    alone = best_gamma(alpha_23, c_2, 16)
    inner, gamma, gain = best_cascade(alpha_12, alpha_23, c_1, c_2, 0, 16)
    assert inner == 0 and gain == pytest.approx(alone[1])
    assert gamma == alone[0] or speedup(alpha_23, gamma, c_2) == pytest.approx(alone[1])     # a tie up to rounding
    assert best_cascade(alpha_12, alpha_23, c_1, c_2)[2] >= gain


def test_when_a_cascade_pays():
    inner, gamma, gain = best_cascade(0.8, 0.8, 0.01, 0.2)
    assert inner > 0 and gain > 1.1 * best_gamma(0.8, 0.2)[1], "a small model of 1 % speeds up a middle one of 20 %"
    assert best_cascade(0.1, 0.8, 0.1, 0.2)[0] == 0, "one that is seldom right does not"
    assert best_cascade(0.9, 0.1, 0.1, 0.9) == (0, 0, 1.0), "and where nothing pays, plain decoding"


@pytest.mark.parametrize("call, message", [
    (lambda: cascade_cost(1.1, 2, 3, 0.1, 0.2), "alpha is 1.1"),
    (lambda: cascade_cost(0.5, 1.5, 3, 0.1, 0.2), "gamma is 1.5"),
    (lambda: cascade_cost(0.5, 2, -1, 0.1, 0.2), "n is -1"),
    (lambda: cascade_cost(0.5, 2, 3, -0.1, 0.2), "c_small is -0.1"),
    (lambda: cascade_cost(0.5, 2, 3, 0.1, float("nan")), "c_middle is nan"),
    (lambda: best_cascade(0.5, [0.5, 2], 0.1, 0.2), "alpha_23 is 2"),
    (lambda: best_cascade(-1, 0.5, 0.1, 0.2), "alpha_12 is -1"),
    (lambda: best_cascade(0.5, 0.5, -0.1, 0.2), "c_1 is -0.1"),
    (lambda: best_cascade(0.5, 0.5, 0.1, "much"), "c_2 is 'much'"),
    (lambda: best_cascade(0.5, 0.5, 0.1, 0.2, max_inner=-1), "max_inner is -1"),
    (lambda: best_cascade(0.5, 0.5, 0.1, 0.2, max_gamma=1.5), "max_gamma is 1.5"),
])
def test_impossible_cascades_are_refused(call, message):
    with pytest.raises(BadInput, match=message):
        call()


def test_best_round_on_the_h100():
    gamma, found = best_round(LLAMA31_8B, LLAMA32_1B, H100, 1, 1024, 0.8)
    assert gamma == found.gamma == 4
    assert found.c == pytest.approx(0.19, abs=0.005) and found.speedup == pytest.approx(1.9, abs=0.05)
    assert found.verify_ratio == pytest.approx(1)
    assert found.tau == pytest.approx(expected_tokens(0.8, 4))
    assert found.seconds == pytest.approx(found.draft_s + found.verify_s)
    assert found.speedup == pytest.approx(found.tau * found.plain_s / found.seconds)
    assert found.speedup == pytest.approx(speedup(0.8, 4, found.c, found.verify_ratio))


def test_best_round_is_none_where_it_does_not_pay():
    assert best_round(LLAMA31_8B, LLAMA31_8B, H100, 1, 1024, 0.8, 1e-3, 1e-3) == (0, None)
    # Here verifying is bound by arithmetic.
    assert best_round(LLAMA31_8B, LLAMA32_1B, H100, 4096, 0, 0.8) == (0, None)
    crowded, alone = (best_round(LLAMA31_8B, LLAMA32_1B, H100, batch, 512, 0.8)[1] for batch in (512, 1))
    assert 1 < crowded.speedup < alone.speedup and crowded.verify_ratio > 1.3


def test_the_module_needs_nothing_heavier_than_numpy():
    import subprocess
    import sys
    code = "import sys, llm_math; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert llm_math.FLOP_EFFICIENCY == 0.6 and llm_math.BYTE_EFFICIENCY == 0.8


def test_whole_numbers_beyond_float64_are_refused_not_wrapped():
    for batch in (2**63, 99999999999999999999999999):
        with pytest.raises(BadInput, match="at most"):
            verify_time(LLAMA31_8B, H100, batch, 1024, 1)
