"""The target that a demo names, and the draft models made of it, on a small model in a folder."""

import pytest

torch = pytest.importorskip("torch")

from console import BadInput
from lab.models import drafts
from lab.models.layers import LayerDraft
from small import save

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return drafts.demo_target(str(save(tmp_path_factory.mktemp("models") / "small")))


def test_all_draft_models_of_a_target(target, monkeypatch):
    texts = [drafts.prompt_ids(target, text) for text in ("Why is the sky blue?", "What is a bridge?")]
    assert texts[0] == target.chat("Why is the sky blue?")
    found = drafts.draft_models(target, 2, 3, ["int8", "int4-g32", "int8-g32"], "", texts)
    assert {name: draft.kernels for name, draft in found.items()} == {
        "first 2": "the target's", "3 kept": "the target's", "int8": "integer", "int4-g32": "integer",
        "int8-g32": "dequantized"}
    assert found["first 2"].model.layers == (0, 1) and isinstance(found["3 kept"].model, LayerDraft)
    c = {name: draft.predicted_c(target) for name, draft in found.items()}
    assert 0 < c["int4-g32"] < c["int8"] < c["int8-g32"] < 0.4 < c["first 2"] < c["3 kept"] < 1
    assert found["int8-g32"].step_bytes < found["int8-g32"].model.streamed_bytes()      # as if packed
    monkeypatch.setattr(drafts, "why_no_layers", lambda model: "a reason")
    assert list(drafts.draft_models(target, 9, 9, ["int8"], "", texts)) == ["int8"]


def test_another_model_drafts_where_its_ids_mean_the_same(target, tmp_path):
    path = str(save(tmp_path / "other", seed=1, vocab_size=352))
    found = drafts.other_draft(target, path)
    assert (found.name, found.kernels) == (path, "its own") and found.model.dtype == target.dtype
    with pytest.raises(BadInput, match="different tokenizers"):
        drafts.other_draft(target, str(save(tmp_path / "stranger", texts=["other words, other tokens"] * 9)))


def test_drawn_weights_say_that_they_mean_nothing(monkeypatch):
    import llm_math
    monkeypatch.setattr(llm_math, "MODELS", {"tiny": llm_math.replace(
        llm_math.PYTHIA_70M, n_layers=2, hidden=64, n_heads=4, n_kv_heads=4, head_dim=16, ffn=128, vocab_size=320)})
    model = drafts.demo_target(drafts.DEFAULT, "tiny")
    assert model.random and "mean nothing" in model.notes[-1]
    assert len(drafts.prompt_ids(model, "four words are here")) == 4
    with pytest.raises(BadInput, match="takes the place of a target"):
        drafts.demo_target("some/folder", "tiny")
    with pytest.raises(BadInput, match="takes the place of a target"):
        drafts.demo_target(drafts.DEFAULT, "tiny", draft="small")
