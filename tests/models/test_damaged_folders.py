"""Every way in which a model's folder can be damaged ends in one sentence that names the file, before anything runs."""

import json
import shutil

import pytest

torch = pytest.importorskip("torch")

import small
from console import BadInput
from lab.models import finding, loading

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 1234\n"


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return small.save(tmp_path_factory.mktemp("models") / "sound")


@pytest.fixture
def folder(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "damaged")


def changed(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def refused(folder) -> str:
    with pytest.raises(BadInput) as error:
        loading.load(str(folder))
    sentence = str(error.value)
    assert "\n" not in sentence and sentence.count("cannot be loaded") <= 1
    return sentence


def test_a_sound_folder_loads_and_says_nothing(folder):
    assert loading.load(str(folder)).notes == ()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content, reason", [(POINTER, "git lfs pull"), (b"", "empty"), (b"print('hello')", "")])
def test_a_file_that_is_not_what_its_name_says(folder, name, content, reason):
    (folder / name).write_bytes(content)
    sentence = refused(folder)
    assert name in sentence and reason in sentence
    if name.startswith("tokenizer"):
        with pytest.raises(BadInput, match=name):
            loading.load_tokenizer(str(folder))


@pytest.mark.parametrize("share", [0.999, 0.5, 0.0001])
def test_weights_that_were_cut_short(folder, share):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:int(share * len(whole))])
    assert "model.safetensors" in refused(folder)


@pytest.mark.parametrize("content", [POINTER, b"", b"import os", b"PK\x03\x04half"])
def test_weights_in_pytorchs_own_format(folder, content):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    assert str(folder) in refused(folder)


@pytest.mark.parametrize("values", [{"intermediate_size": 96}, {"vocab_size": 400}, {"num_attention_heads": 3},
                                    {"hidden_size": 65}, {"max_position_embeddings": None}, {"model_type": "nothing"}])
def test_a_configuration_that_does_not_fit(folder, values):
    changed(folder, **values)
    assert str(folder) in refused(folder)


def test_missing_layers_are_not_filled_with_random_ones(folder):
    changed(folder, num_hidden_layers=6)
    assert "lacks" in (sentence := refused(folder)) and "layers.4" in sentence


def test_layers_that_nothing_reads_are_said(folder):
    changed(folder, num_hidden_layers=3)
    note, = loading.load(str(folder)).notes
    assert "layers.3" in note and "read by no layer" in note


def test_a_folder_without_a_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert str(folder) in refused(folder)


def test_a_message_with_a_token_that_the_model_has_no_row_for_is_named(folder):
    """As Gemma 3 1B's tokenizer has one id more than the model has rows; without the token all is well."""
    codec = small.tokenizer(["a b c"])
    codec.add_tokens(["<image>"], special_tokens=True)
    n = len(codec) - 1
    changed(folder, vocab_size=n)
    from transformers import LlamaConfig, LlamaForCausalLM
    LlamaForCausalLM(LlamaConfig(**json.loads((folder / "config.json").read_text()))).save_pretrained(folder)
    codec.save_pretrained(folder)
    decoder = loading.load(str(folder))
    for template in (None, "{{ messages[0].content }}"):
        decoder.hf_tokenizer.chat_template = template
        with pytest.raises(BadInput) as error:
            decoder.chat("what is <image> here?")
        words = "what is <image> here?", "'<image>'", f"id {n}", f"0 to {n - 1}"
        assert all(word in str(error.value) for word in words)
        assert max(decoder.chat("what is here?")) < n


def test_code_of_a_folders_own_is_neither_run_nor_asked_about(folder, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("nobody may be asked"))
    changed(folder, model_type="odd", auto_map={"AutoConfig": "odd.Config", "AutoModelForCausalLM": "odd.Model"})
    (folder / "odd.py").write_text("raise SystemExit('run')")
    assert str(folder) in refused(folder)


@pytest.mark.parametrize("content", [b"", b"GGUF" + bytes(40), POINTER])
@pytest.mark.parametrize("name", ["model.gguf", "MODEL.GGUF"])
def test_a_damaged_gguf_file_however_its_name_is_written(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert name in refused(tmp_path / name)


@pytest.mark.parametrize("index", ["", '{"weight_map": {', "[]", '{"weight_map": {}}', "{}"])
def test_a_broken_index_is_no_model(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert not finding.has_weights(tmp_path)
