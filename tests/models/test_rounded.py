"""lab/models/rounded.py on small random models of the real classes, against lab/models/quant.py."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from console import BadInput
from decode_lab import autoregressive_generate, speculative_generate
from lab.drafters.model import ModelDrafter
from lab.models import quant
from lab.models.decoder import HFDecoder
from lab.models.kernels import PackedLinear, packed
from lab.models.layers import LayerDraft
from lab.models.rounded import _Blocked, _Integer, _linears, draft_bytes, integer_kernels, quantized
from layered import CLASSES, GQA, N, V, build, close, layer_list, tokens

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=CLASSES)
def target(request):
    return HFDecoder(build(request.param), name=request.param)


@pytest.fixture(scope="module")
def llama():
    return HFDecoder(build("llama"), name="llama")


def dense(linear):
    """What a Linear of a quantized copy multiplies by, read off its outputs."""
    size = linear.blocked.shape[1] if hasattr(linear, "blocked") else linear.weight.shape[1]
    with torch.inference_mode():
        zero = linear(torch.zeros(1, size))
        return (linear(torch.eye(size)) - zero).T.numpy()


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "int4"])
@pytest.mark.parametrize("kind", ["llama", "neox"])
def test_the_weights_are_those_of_lab_quant(kind, scheme, pack):
    model = build(kind)
    target = HFDecoder(packed(model) if pack else model, name=kind)
    before = {name: p.clone() for name, p in model.named_parameters()}
    copied, how = quantized(target, scheme), quant.parse_scheme(scheme)
    new_ones = [m for m in copied.model.modules() if isinstance(m, _Blocked) or type(m) is torch.nn.Linear]
    for old, new in zip(_linears(model), new_ones, strict=True):
        wanted = quant.dequantize(*quant.quantize(old.weight.detach().numpy().T, how), how).T
        close(dense(new), wanted, 2e-6)
        assert np.abs(wanted - old.weight.detach().numpy()).max() > 1e-4
        assert isinstance(new, _Blocked) == isinstance(old, PackedLinear)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    shared = {id(p) for p in model.parameters()}
    assert sum(id(p) in shared for p in copied.model.parameters()) >= 2 * N  # the norms and the embedding at least


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_bytes_of_a_step(tied, head):
    model = LlamaForCausalLM(LlamaConfig(**GQA, tie_word_embeddings=tied)).eval()
    target = HFDecoder(model)
    inside, norms, table = N * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64), (2 * N + 1) * 32, 32 * V
    rows = N * (2 * 32 + 2 * 16 + 2 * 64 + 32) + (V if head else 0)          # output channels, one scale each
    wanted = inside + (table if head else 4 * table) + 2 * rows + 4 * norms
    draft = quantized(target, "int8", head)
    assert draft_bytes(draft) == wanted and draft.streamed_bytes() == target.streamed_bytes()
    four = quantized(target, "int4-g32", head)
    groups = N * (2 * 32 + 2 * 16 + 2 * 64 + 32 * 2) + (V if head else 0)
    assert draft_bytes(four) == inside // 2 + (table // 2 if head else 4 * table) + 2 * groups + 4 * norms
    first = LayerDraft(target, range(2))
    assert draft_bytes(first) == 4 * (inside * 2 // N + table + 5 * 32)
    assert draft_bytes(target) == target.streamed_bytes() == 4 * (inside + table + norms)
    assert (copy_of := draft.model.get_input_embeddings().weight) is model.get_input_embeddings().weight
    assert torch.equal(copy_of, model.get_input_embeddings().weight)


@pytest.mark.slow
def test_a_quantized_copy_drafts_with_its_own_cache(target):
    draft = quantized(target, "int8")
    prompt = tokens(11)
    plain, _ = autoregressive_generate(target, prompt, 30)
    text, run = speculative_generate(target, ModelDrafter(draft), prompt, 30, 3)
    assert text.tolist() == plain.tolist() and run.alpha > 0.8
    assert draft.cache is not target.cache and draft.tokenizer == target.tokenizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "int4-g64", "int4"])
@pytest.mark.slow
def test_integer_kernels_compute_what_the_rounded_weights_do(scheme, dtype):
    torch.manual_seed(1)
    sizes = dict(GQA, hidden_size=64, intermediate_size=640, vocab_size=96)  # more than one part of 256 channels
    target = HFDecoder(LlamaForCausalLM(LlamaConfig(**sizes)).eval().to(dtype))
    fast, slow = integer_kernels(target, scheme), quantized(target, scheme)
    x = torch.randn(3, 64, dtype=dtype)
    for a, b in zip(layer_list(fast.model)[0].modules(), layer_list(slow.model)[0].modules()):
        if isinstance(a, _Integer) and b.weight.shape[1] == 64:
            with torch.inference_mode():
                size = float(b(x).float().abs().max())
                close(a(x).float() / size, b(x).float() / size, 0.02)      # 16-bit activations and scales
                other = (b.weight + 0.3 * b.weight.roll(1, 0)).to(dtype)   # and wrong weights are further away
                assert (a(x) - x @ other.T).abs().max() > 0.1 * size
    assert fast.send([5, 6, 7]).shape == (3, 96)
    assert draft_bytes(fast) == draft_bytes(slow) and fast.streamed_bytes() < target.streamed_bytes() * (
        0.4 if dtype == torch.float32 else 0.7)


def test_kernels_that_do_not_exist_are_refused_with_the_reason(llama, monkeypatch):
    with pytest.raises(BadInput, match="one scale per output channel"):
        integer_kernels(llama, "int8-g32")
    with pytest.raises(BadInput, match="multiple of 16 outputs"):
        integer_kernels(llama, "int4-g32")               # 97 tokens in the vocabulary
    with pytest.raises(BadInput, match="groups of 32, 64, 128 or 256"):
        integer_kernels(llama, "int4-g16")
    with pytest.raises(BadInput, match="unknown quantization"):
        quantized(llama, "int5")
    monkeypatch.setattr(llama, "device", torch.device("cuda"))
    with pytest.raises(BadInput, match="no integer kernels for llama on cuda"):
        integer_kernels(llama, "int8")


def test_a_draft_with_another_tokenizer_is_refused_with_both_names():
    """Two tokenizers of the tokenizers library, trained on different texts to the same size."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    def trained(text):
        made = Tokenizer(models.BPE(unk_token="?"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        made.train_from_iterator([text], trainers.BpeTrainer(vocab_size=40, special_tokens=["?"], show_progress=False))
        return PreTrainedTokenizerFast(tokenizer_object=made)

    one, two = trained("the cat sat on the mat, the cat"), trained("a quick brown fox jumps over a lazy dog")
    model = build("llama")
    target, draft = HFDecoder(model, one, "the cat"), HFDecoder(build("llama"), two, "the fox")
    with pytest.raises(BadInput, match="the fox and the cat have different tokenizers"):
        speculative_generate(target, ModelDrafter(draft), tokens(4) % 20, 4, 2)
    for fits in (LayerDraft(target, range(2)), quantized(target, "int8"), HFDecoder(model, one)):
        speculative_generate(target, ModelDrafter(fits), tokens(4) % 20, 4, 2)
