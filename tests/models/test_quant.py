"""Quantization: error bound, exactness, bytes by hand, names, and what must not change."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from console import BadInput
from lab.models.quant import Scheme, dequantize, parse_scheme, quantize, quantize_params
from lab.toy.transformer import QCFG, Config, TransformerLM, init_params, sample_tokens

SCHEMES = ("int8", "int8-g64", "int4", "int4-g32", "int4-g128", "int4-g7")


def round_trip(weight, scheme):
    codes, scales = quantize(weight, scheme)
    return dequantize(codes, scales, scheme), codes, scales


def steps(scales, scheme, n_in):
    return np.repeat(scales.astype(np.float64), scheme.group or n_in, axis=0)[:n_in]


schemes = st.builds(Scheme, st.sampled_from([4, 8]), st.integers(0, 9))
weights = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=12),
                     elements=st.floats(-1e5, 1e5, width=32))


@settings(deadline=None, max_examples=150)
@given(weights, schemes)
def test_every_weight_is_within_half_a_step_and_no_code_is_out_of_range(weight, scheme):
    new, codes, scales = round_trip(weight, scheme)
    assert new.dtype == np.float32 and new.shape == weight.shape and codes.dtype == np.int8
    assert scales.shape == (scheme.n_groups(len(weight)), weight.shape[1])
    assert np.abs(codes.astype(int)).max() <= scheme.qmax
    error = np.abs(new.astype(np.float64) - weight)
    assert (error <= steps(scales, scheme, len(weight)) / 2 * (1 + 1e-9)).all()


@settings(deadline=None, max_examples=100)
@given(st.data(), schemes, st.integers(1, 12), st.integers(1, 4))
@pytest.mark.slow
def test_values_that_the_codes_can_express_come_back_exactly(data, scheme, n_in, n_out):
    """Codes times float16 scales, with the largest code in each group (else the scale is another one)."""
    groups, group = scheme.n_groups(n_in), scheme.group or n_in
    scales = data.draw(hnp.arrays(np.float16, (groups, n_out), elements=st.floats(2**-14, 1024, width=16)))
    codes = data.draw(hnp.arrays(np.int8, (n_in, n_out), elements=st.integers(-scheme.qmax, scheme.qmax)))
    codes[::group] = scheme.qmax
    weight = dequantize(codes, scales, scheme)
    again, codes_again, scales_again = round_trip(weight, scheme)
    assert np.array_equal(again, weight) and np.array_equal(codes_again, codes)
    assert np.array_equal(scales_again, scales)


@settings(deadline=None, max_examples=100)
@given(weights, schemes)
def test_sign_and_scale_pass_through(weight, scheme):
    new, codes, _ = round_trip(weight, scheme)
    assert np.array_equal(round_trip(-weight, scheme)[0], -new)
    assert (np.sign(codes) * np.sign(weight) >= 0).all()


def test_int8_error_is_bounded_by_half_a_step_by_hand():
    weight = np.array([[1.27], [0.5], [-0.004], [0.0]], np.float32)      # scale 0.01, up to float16 rounding
    new, codes, scales = round_trip(weight, Scheme(8))
    assert codes.ravel().tolist() == [127, 50, 0, 0]
    assert 0.01 <= float(scales[0, 0]) < 0.01 * (1 + 2**-10)
    assert np.abs(new - weight).max() <= float(scales[0, 0]) / 2


def test_a_scale_rounds_up_so_that_the_largest_weight_is_not_clipped():
    weight = np.linspace(0.1, 1, 3001, dtype=np.float32)[None]           # 3001 channels of one weight each
    _, codes, scales = round_trip(weight, Scheme(8))
    assert (scales.astype(float) * 127 >= weight * (1 - 1e-7)).all() and (codes == 127).all()


def test_zeros_tiny_and_huge_weights():
    assert not round_trip(np.zeros((5, 3), np.float32), Scheme(4, 2))[0].any()
    tiny = np.full((4, 2), 3e-9, np.float32)
    new, _, scales = round_trip(tiny, Scheme(8))
    assert np.abs(new - tiny).max() <= float(scales.max()) / 2           # the smallest scale float16 has
    for bad in (np.full((2, 2), 1e8, np.float32), np.array([[np.nan]]), np.array([[np.inf]])):
        with pytest.raises(BadInput, match="float16 scale"):
            quantize(bad, Scheme(8))


def test_a_group_is_local_to_its_channel_and_its_rows():
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((10, 3)).astype(np.float32)
    base = round_trip(weight, Scheme(4, 4))[0]                           # groups of rows 0-3, 4-7, 8-9
    weight[9, 1] = 100.0
    changed = round_trip(weight, Scheme(4, 4))[0] != base
    assert changed[8:, 1].any() and not changed[:8].any() and not changed[:, [0, 2]].any()


def test_names():
    assert parse_scheme("int8") == Scheme(8) and parse_scheme("int4-g128") == Scheme(4, 128)
    for name in ("int3", "int4-g0", "int4-32", "int8-g", "INT8", "fp8", "", "int4-g32 ", None, "int4-g-1"):
        with pytest.raises(BadInput, match="int4-g32"):
            parse_scheme(name)
    with pytest.raises(BadInput, match="int5"):
        quantize_params(init_params(QCFG, 0), "int5")


TINY = Config(vocab_size=10, hidden=8, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=4, ffn=6)


def test_bytes_by_hand():
    params = init_params(TINY, 0)
    # Per layer: wq 8x8, wk 8x4, wv 8x4, wo 8x8, gate 8x6, up 8x6, down 6x8: 336 weights; two norms of 8.
    # Codes 168 bytes in int4. Groups of 3 along 8 inputs: 3 scales a channel (6 inputs: 2).
    scales = 2 * (3 * (8 + 4 + 4 + 8 + 6 + 6) + 2 * 8)
    layer = 168 + scales + 2 * 8 * 4
    head = 10 * 8 // 2 + 2 * 3 * 10
    norm = 8 * 4
    _, report = quantize_params(params, "int4-g3")
    assert report.bytes == 2 * layer + head + norm
    assert report.original_bytes == 4 * TINY.n_params()
    assert report.bits_per_weight == 8 * report.bytes / TINY.n_params()
    _, kept = quantize_params(params, "int4-g3", include_lm_head=False)
    assert kept.bytes == 2 * layer + 10 * 8 * 4 + norm
    _, half = quantize_params(params, "int4-g3", include_lm_head=False, float_bytes=2)
    assert half.bytes == 2 * (168 + scales + 2 * 8 * 2) + 10 * 8 * 2 + 8 * 2
    assert half.original_bytes == 2 * TINY.n_params()


def test_bits_per_weight_of_a_matrix_counts_its_scales():
    _, report = quantize_params(init_params(Config(), 0), "int4-g32")
    by_name = {t.name: t for t in report.tensors}
    assert by_name["layers.0.wq"].bits_per_weight == 4 + 16 / 32
    assert by_name["embed"].bits_per_weight == 4.5 and by_name["embed"].bits == 4
    norm = by_name["norm"]
    assert norm.bits is None and norm.bits_per_weight == 32 and norm.error == 0
    assert sum(t.bytes for t in report.tensors) == report.bytes
    assert sum(np.prod(t.shape) for t in report.tensors) == Config().n_params()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_structure_norms_and_the_originals_stay(scheme):
    params = init_params(TINY, 1)
    before = copy.deepcopy(params)
    for include in (True, False):
        new, report = quantize_params(params, scheme, include_lm_head=include)
        assert new.keys() == params.keys()
        assert [layer.keys() for layer in new["layers"]] == [layer.keys() for layer in params["layers"]]
        assert np.array_equal(new["norm"], params["norm"])
        assert np.array_equal(new["embed"], params["embed"]) is not include
        for ours, theirs, old in zip(new["layers"], params["layers"], before["layers"]):
            for key, weight in theirs.items():
                assert ours[key].shape == weight.shape and ours[key].dtype == np.float32
                assert np.array_equal(weight, old[key])
                assert np.array_equal(ours[key], weight) == (weight.ndim == 1)
        assert np.array_equal(params["embed"], before["embed"])
        assert 0 < report.error < 0.2
        TransformerLM(new, TINY).full_logits([[1, 2, 3]])


def test_the_head_is_grouped_along_its_input():
    """Row v of the embedding is output channel v of the head: an outlier there leaves other rows alone."""
    params = init_params(TINY, 2)
    base, _ = quantize_params(params, "int8")
    params["embed"][3, 5] = 50.0
    new, _ = quantize_params(params, "int8")
    changed = (new["embed"] != base["embed"]).any(axis=1)
    assert changed.tolist() == [v == 3 for v in range(10)]


def test_more_bits_and_smaller_groups_mean_less_error():
    params = init_params(Config(), 0)
    error = {name: quantize_params(params, name)[1].error
             for name in ("int8", "int8-g64", "int4", "int4-g128", "int4-g32")}
    assert error["int8-g64"] < error["int8"] < error["int4-g32"] < error["int4-g128"] <= error["int4"]
    # By hand for normal weights: one step is max|w| / 7 and rounding has RMS step / sqrt(12).
    weight = np.random.default_rng(0).standard_normal((32, 4000))
    new, _, scales = round_trip(weight, Scheme(4))
    expected = np.sqrt((scales.astype(float) ** 2).mean() / 12)
    assert np.sqrt(np.mean((new - weight) ** 2)) == pytest.approx(expected, rel=0.03)


def test_random_weight_experiments_have_what_they_need():
    params = init_params(QCFG, 0)
    new, _ = quantize_params(params, "int4-g32")
    tokens = sample_tokens(new, QCFG, n_seq=2, length=8, seed=0)
    assert tokens.shape == (2, 8) and tokens.max() < QCFG.vocab_size


@pytest.mark.parametrize("scheme", ["int4-g999999999", "int4-g99999999999999999999"])
def test_a_group_larger_than_the_channel_is_the_channel(scheme):
    params = init_params(QCFG, 0)
    large, whole = (quantize_params(params, name)[0]["layers"][0]["wq"] for name in (scheme, "int4"))
    assert (large == whole).all()
