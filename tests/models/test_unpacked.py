"""A GGUF file is unpacked once; what is kept is the same model, and a damaged or foreign one is not used."""

import shutil

import pytest

pytest.importorskip("torch")
import torch

from lab.__main__ import main
from lab.models import loading, unpacked
from lab.models.finding import locate


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DECODE_LAB_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept" / "unpacked"


class Saves:
    """Stands for a model or a tokenizer: writes one file."""

    def __init__(self, name, content=b"{}"):
        self.name, self.content = name, content

    def save_pretrained(self, folder):
        (folder / self.name).write_bytes(self.content)


WEIGHTS = (2).to_bytes(8, "little") + b"{}"


def kept_by(folder):
    unpacked.keep(folder, Both(), Saves("tokenizer.json"))


class Both:
    def save_pretrained(self, folder):
        Saves("model.safetensors", WEIGHTS).save_pretrained(folder)
        Saves("config.json").save_pretrained(folder)


def test_the_folder_is_named_by_content(cache, tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"one")
    (tmp_path / "b.gguf").write_bytes(b"two")
    first, second = unpacked.place(tmp_path / "a.gguf"), unpacked.place(tmp_path / "b.gguf")
    assert first != second and first.parent == second.parent == cache
    (tmp_path / "a.gguf").write_bytes(b"another version")
    assert unpacked.place(tmp_path / "a.gguf") != first


def test_all_or_nothing_and_the_first_wins(cache):
    folder = cache / "model"
    assert not unpacked.is_kept(folder)
    kept_by(folder)
    assert unpacked.is_kept(folder)
    before = (folder / "config.json").stat().st_ino
    kept_by(folder)
    assert (folder / "config.json").stat().st_ino == before
    assert [path.name for path in cache.iterdir()] == ["model"], "nothing half made is left"


def test_what_is_damaged_is_removed(cache):
    folder = cache / "model"
    kept_by(folder)
    (folder / "model.safetensors").write_bytes(WEIGHTS[:5])
    assert not unpacked.is_kept(folder) and not folder.exists()


def test_a_folder_that_cannot_be_written_is_no_error(cache):
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    kept_by(cache / "model")
    assert not unpacked.is_kept(cache / "model")


def test_clean_deletes_what_is_kept_and_nothing_else(cache, capsys):
    kept_by(cache / "model")
    (cache / ".making-killed").mkdir()
    (cache.parent / "mine.txt").write_text("mine")
    assert unpacked.size() > 0 and main(["clean"]) == 0
    assert not cache.exists() and (cache.parent / "mine.txt").exists()
    assert "deleted" in capsys.readouterr().out
    assert main(["clean"]) == 0 and "No unpacked models" in capsys.readouterr().out


@pytest.mark.slow
def test_the_kept_model_is_the_unpacked_one(cache, monkeypatch):
    path = locate(None)[1]
    model, tokenizer = loading._load_gguf(path, torch.float32)
    monkeypatch.setattr(loading, "_load_gguf", lambda *how: (model, tokenizer))     # not read a second time
    loading._load_unpacked(path, torch.float32)
    again, tokenizer_again = loading._load_unpacked(path, torch.float32)
    kept = unpacked.place(path)
    assert unpacked.is_kept(kept)
    for (name, one), (_, other) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(one, other), name
    names = ("vocab_size", "eos_token_id", "bos_token_id", "tie_word_embeddings", "rope_parameters", "rms_norm_eps",
             "max_position_embeddings", "head_dim", "num_key_value_heads", "hidden_act")
    assert [getattr(model.config, name) for name in names] == [getattr(again.config, name) for name in names]
    assert tokenizer.get_vocab() == tokenizer_again.get_vocab()
    turns = [{"role": "user", "content": "What is 2 + 2?"}]
    rendered = [each.apply_chat_template(turns, tokenize=False) for each in (tokenizer, tokenizer_again)]
    assert rendered[0] == rendered[1]
    for text in ("plain", " leading", "two  spaces\n\n\ttab", "naïve café 漢字 🙂", "<|im_start|>user", "", "x" * 300):
        assert tokenizer(text)["input_ids"] == tokenizer_again(text)["input_ids"], text
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == tokenizer_again.decode(ids)
    shutil.rmtree(kept)
