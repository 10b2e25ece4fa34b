"""lab/models/kernels.py: packed products are the dense ones, and the bytes that a step reads, counted by hand."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import transformers

from lab.models.decoder import HFDecoder
from lab.models.kernels import PackedLinear, packed
from lab.models.rounded import draft_bytes, quantized
from model_classes import CLASSES, V, build

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = {"llama": "Llama", "neox": "GPT-NeoX"}


def tokens(n, seed=0):
    return np.random.default_rng(seed).integers(3, V, n)


def direct(model, ids):
    """(n, V) logits of transformers' own forward over the whole sequence, without a cache."""
    with torch.inference_mode():
        return model(torch.tensor(np.asarray(ids))[None], use_cache=False).logits[0].numpy()


# -- packed products -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(1, 1), (1, 5), (2, 33)])
def test_a_packed_product_is_the_dense_one(bias, rows):
    torch.manual_seed(1)
    linear = torch.nn.Linear(48, 80, bias=bias)
    layer, x = PackedLinear(linear), torch.randn(*rows, 48)
    with torch.inference_mode():
        dense, packed = linear(x), layer(x)
        assert packed.shape == dense.shape
        torch.testing.assert_close(packed, dense, rtol=0, atol=1e-5)
        layer.use = False
        assert torch.equal(layer(x), dense)
    assert layer.weight is linear.weight and layer.bias is linear.bias


@pytest.mark.parametrize("kind", ["llama", "neox"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_is_the_model(kind, tied):
    model = build(NAMES[kind])
    model.config.tie_word_embeddings = tied
    if tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    ids = tokens(20)
    dense = direct(model, ids)
    n, streamed = sum(p.numel() for p in model.parameters()), HFDecoder(model).streamed_bytes()
    decoder = HFDecoder(packed(model))
    layers = [m for m in model.modules() if isinstance(m, PackedLinear)]
    assert len(layers) == sum(type(m) is torch.nn.Linear for m in model.modules()) > 9
    assert isinstance(model.get_output_embeddings(), PackedLinear)
    head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head is table) == tied and decoder.streamed_bytes() == streamed
    assert sum(p.numel() for p in model.parameters()) == n     # the second copy is no parameter
    rows = decoder.send(ids)
    np.testing.assert_allclose(rows, dense, rtol=0, atol=1e-4 * np.abs(dense).max())
    packed(model)                                            # packing twice changes nothing
    assert [m for m in model.modules() if isinstance(m, PackedLinear)] == layers


def test_as_loaded_runs_the_dense_products_and_goes_back_even_after_an_error():
    model = build("Llama")
    ids, dense = tokens(9), direct(model, tokens(9))
    decoder = HFDecoder(packed(model))
    uses = lambda: {m.use for m in model.modules() if isinstance(m, PackedLinear)}
    for layer in (m for m in model.modules() if isinstance(m, PackedLinear)):
        layer.blocked = None                                    # a packed product would fail now
    with decoder.as_loaded():
        assert uses() == {False} and np.array_equal(decoder.send(ids), dense)
        with decoder.as_loaded():
            pass
        assert uses() == {False}                                # nested: the inner one puts back what it found
    assert uses() == {True}
    with pytest.raises(ZeroDivisionError), decoder.as_loaded():
        1 / 0
    assert uses() == {True}


def test_other_dtypes_are_left_alone():
    model = packed(build("Llama").to(torch.bfloat16))
    assert not any(isinstance(m, PackedLinear) for m in model.modules())


# -- bytes of a step -------------------------------------------------------------------------------------------

def size(module):
    return sum(p.numel() * p.element_size() for p in module.parameters())


# Of each layer with experts: the weights of one. All have 4 experts, of which a token reads 2.
@pytest.mark.parametrize("name, layers, expert", [
    ("Mixtral", 3, 3 * 32 * 48), ("Qwen2-MoE", 3, 3 * 32 * 16), ("Qwen3-MoE", 3, 3 * 32 * 16),
    ("OLMoE", 3, 3 * 32 * 48),
    ("GPT-OSS", 3, 32 * 96 + 96 + 48 * 32 + 32), ("DeepSeek-V2", 2, 3 * 32 * 16), ("DeepSeek-V3", 2, 3 * 32 * 16),
    ("GraniteMoE", 3, 3 * 32 * 48), ("LFM2-MoE", 2, 3 * 32 * 16), ("ERNIE 4.5 MoE", 2, 3 * 32 * 16),
    ("DBRX", 3, 3 * 32 * 32), ("PhiMoE", 3, 3 * 32 * 48)])
def test_of_experts_only_those_of_one_token_are_read(name, layers, expert):
    model = build(name)
    head, table = model.get_output_embeddings().weight, model.get_input_embeddings()
    table = 0 if head is table.weight else size(table)
    assert HFDecoder(model).streamed_bytes() == size(model) - table - layers * 2 * expert * 4


def test_a_model_without_experts_reads_all_its_weights_but_the_table():
    for name, table in (("Llama", 4 * V * 32), ("GPT-2", 0)):
        assert HFDecoder(build(name)).streamed_bytes() == size(build(name)) - table


def test_the_part_that_sees_is_not_read_by_a_step_of_text():
    text = dict(model_type="lfm3", **{**CLASSES["LFM3"][1], "num_hidden_layers": 4})
    vision = dict(hidden_size=64, intermediate_size=96, patch_size=4, num_hidden_layers=6, num_attention_heads=2,
                  num_key_value_heads=1)
    config = transformers.Lfm3VlConfig(text_config=text, vision_config=vision, image_token_id=5, video_token_id=6,
                                       vision_start_token_id=3, vision_end_token_id=4, projector_hidden_size=16)
    model = transformers.Lfm3VlForConditionalGeneration(config).eval()
    decoder, alone = HFDecoder(model), HFDecoder(build("LFM3"))
    assert decoder.streamed_bytes() == alone.streamed_bytes() < size(model) / 3
    assert draft_bytes(quantized(decoder, "int8")) == draft_bytes(quantized(alone, "int8"))
