"""lab/measure/divergence.py: a difference between greedy texts is explained by its margin, or is a bug."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from decode_lab import autoregressive_generate, speculative_generate
from lab.measure.divergence import Divergence, divergences, explain_divergence
from lab.measure.scripted import from_text
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


class OffByOne(HFDecoder):
    """Wrong: behind its first forward of several tokens, each token stands one position too far."""

    def _forward(self, ids, positions, cache, **options):
        wrong = ids.shape[1] > 1 and positions[0, 0] > 0 and self.broken
        return super()._forward(ids, positions + int(wrong), cache, **options)

    broken = False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow
def test_a_position_that_is_off_by_one_is_a_bug(dtype):
    """In 16 bits, too: most texts of the broken decoder differ by more than its honest paths do."""
    model = build("Llama").to(dtype)
    decoder, broken, bugs, found = HFDecoder(model), OffByOne(model), 0, 0
    broken.broken = True
    for seed in range(6):
        prompt = np.random.default_rng(seed).integers(3, V, 6)
        plain, _ = autoregressive_generate(decoder, prompt, 24)
        drafter = from_text(plain.tolist(), wrong={9, 15}, vocab_size=V)
        text, _ = speculative_generate(broken, drafter, prompt, 24, 4)
        if difference := explain_divergence(decoder, plain, text):
            found += 1
            bugs += not difference.explained
    assert found >= 4 and bugs >= found / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow
def test_what_a_right_decoder_writes_is_explained(dtype):
    model = build("Llama").to(dtype)
    decoder, differ = HFDecoder(model), 0
    for seed in range(12):
        prompt = np.random.default_rng(seed).integers(3, V, 6)
        plain, _ = autoregressive_generate(decoder, prompt, 24)
        drafter = from_text(plain.tolist(), wrong={9, 15}, vocab_size=V)
        text, _ = speculative_generate(decoder, drafter, prompt, 24, 4)
        difference = explain_divergence(decoder, plain, text)
        differ += difference is not None
        assert difference is None or difference.explained
    assert dtype != torch.float32 or differ == 0


def test_of_several_texts_the_one_hardest_to_explain_comes_first():
    decoder, prompt = HFDecoder(build("Llama")), np.random.default_rng(0).integers(3, V, 6)
    plain, _ = autoregressive_generate(decoder, prompt, 8)
    others = [plain.copy() for _ in range(4)]
    for k, other in enumerate(others[1:]):
        other[7 + k] = (other[7 + k] + 1 + k) % V
    found = divergences(decoder, [(plain, other) for other in others])
    hardness = [d.margin / d.allowed for d in found]
    assert len(found) == 3 and hardness == sorted(hardness, reverse=True)
    assert Divergence(9, 4, None, 3.0, 0.5, 1.0).cells == (9, "4 / None", "6 of 2")
