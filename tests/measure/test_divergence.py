"""lab/measure/divergence.py: a difference between greedy texts is explained by its margin, or is a bug."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from decode_lab import autoregressive_generate
from lab.measure.divergence import explain_divergence
from lab.models.decoder import HFDecoder
from model_classes import V, build


def test_a_divergence_is_explained_by_its_margin():
    model = build("Llama")
    decoder, prompt = HFDecoder(model), np.random.default_rng(0).integers(3, V, 6)
    plain, _ = autoregressive_generate(decoder, prompt, 12)
    assert explain_divergence(decoder, plain, plain) is None
    other = plain.copy()
    other[9] = (other[9] + 1) % V
    with torch.inference_mode():
        row = model(torch.tensor(plain[:9])[None], use_cache=False).logits[0, -1].numpy()
    found = explain_divergence(decoder, plain, other)
    assert (found.position, found.plain, found.other) == (9, plain[9], other[9]) and not found.explained
    assert found.margin == pytest.approx(row[plain[9]] - row[other[9]], abs=1e-4)
    assert found.step == np.spacing(np.float32(max(abs(row[plain[9]]), abs(row[other[9]]))))
    shorter = explain_divergence(decoder, plain, plain[:-2])
    assert shorter.position == len(plain) - 2 and shorter.other is None and not shorter.explained
    with torch.no_grad():                                       # the two tokens now have the same logit
        model.get_output_embeddings().weight[other[9]] = model.get_output_embeddings().weight[plain[9]]
    assert explain_divergence(decoder, plain, other).explained
