"""Classes whose trees or contexts need care: each gave wrong text without a word, or a traceback."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import transformers

from decode_lab import autoregressive_generate, speculative_generate, tree_generate
from lab.drafters.trees import TreeDrafter, TreeShape
from lab.measure.scripted import from_text
from lab.models.decoder import HFDecoder

pytestmark = pytest.mark.slow

COMMON = dict(vocab_size=96, hidden_size=32, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
              pad_token_id=None)
NEO = ("GPTNeo", dict(COMMON, num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]], window_size=6))
FALCON = ("Falcon", dict(COMMON, num_hidden_layers=4, num_attention_heads=4, multi_query=False, alibi=True,
                         new_decoder_architecture=False, parallel_attn=False))
PHI = ("Phi3", dict(COMMON, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                    original_max_position_embeddings=16,
                    rope_scaling={"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
                                  "rope_theta": 10000.0}))
MPT = ("Mpt", dict(vocab_size=96, d_model=32, n_layers=2, n_heads=4, max_seq_len=64))


def build(kind, options):
    torch.manual_seed(7)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**options)).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.25)
    return model


@pytest.mark.parametrize("kind, options", [NEO, FALCON])
def test_trees_go_as_paths_where_a_layer_has_its_own_way_with_masks(kind, options):
    decoder, draft = HFDecoder(build(kind, options)), HFDecoder(build(kind, options))
    assert decoder.tree_as_paths
    for seed in range(3):
        prompt = np.random.default_rng(seed).integers(0, 96, 10)
        plain, _ = autoregressive_generate(decoder, prompt, 20)
        text, run = tree_generate(decoder, TreeDrafter(draft, TreeShape.branching((3, 2, 1))), prompt, 20)
        assert text.tolist() == plain.tolist() and run.tau > 2


def test_longrope_ends_with_its_original_context():
    decoder = HFDecoder(build(*PHI))
    assert decoder.max_length == 16
    prompt = np.random.default_rng(0).integers(0, 96, 9)
    plain, run = autoregressive_generate(decoder, prompt, 16)
    assert run.stop == "context" and len(plain) == 16
    text, _ = speculative_generate(decoder, from_text(plain.tolist(), {11, 14}, 96), prompt, 16, 4)
    assert text.tolist() == plain.tolist()


def test_a_limit_under_another_name_ends_a_text():
    decoder = HFDecoder(build(*MPT))
    assert decoder.max_length == 64
    text, run = autoregressive_generate(decoder, list(range(60)), 10)
    assert run.stop == "context" and len(text) == 64
