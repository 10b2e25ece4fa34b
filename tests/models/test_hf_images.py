"""Images in lab/models/images.py: a small random LFM3-VL from a folder, against transformers' own functions."""

import io
import json
import os
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from console import BadInput
from decode_lab import Sampler, autoregressive_generate, speculative_generate, tree_generate
from lab.chat.check import compared
from lab.chat.command import run as run_chat
from lab.measure import divergence
from lab.measure.scripted import ScriptedDrafter, from_text, tree
from lab.models import loading
from lab.models.decoder import HFDecoder
from lab.models.kept_prefix import KeptPrefix

pytestmark = pytest.mark.slow

torch.set_num_threads(1)
if not hasattr(transformers, "Lfm3VlForConditionalGeneration"):
    pytest.skip(f"transformers {transformers.__version__} has no LFM3-VL", allow_module_level=True)

SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>"]
PAD = SPECIAL.index("<|image_pad|>")
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'image' -%}
<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QUESTION = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model's folder as save_pretrained writes it, and images beside it."""
    place = tmp_path_factory.mktemp("vl") / "tiny-vl"
    vocabulary = {t: i for i, t in enumerate(SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    codec = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    codec.pre_tokenizer, codec.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=codec, eos_token="<|im_end|>",
                                                     pad_token="<|pad|>", additional_special_tokens=SPECIAL)
    tokenizer.chat_template = TEMPLATE
    text = dict(model_type="lfm3", vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=4,
                num_attention_heads=2, num_key_value_heads=1, head_dim=8, intermediate_size=24, conv_L_cache=4,
                sliding_window=6, layer_types=["conv", "sliding_attention", "full_attention", "conv"],
                max_position_embeddings=512, bos_token_id=None, eos_token_id=2, pad_token_id=0)
    vision = dict(hidden_size=16, intermediate_size=24, patch_size=4, num_hidden_layers=3, num_attention_heads=2,
                  num_key_value_heads=1)
    config = transformers.Lfm3VlConfig(text_config=text, vision_config=vision, image_token_id=PAD,
                                       video_token_id=PAD + 1, vision_start_token_id=3, vision_end_token_id=4,
                                       projector_hidden_size=16)
    model = transformers.Lfm3VlForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.4, generator=generator)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    (place / "preprocessor_config.json").write_text(json.dumps(dict(
        image_processor_type="Qwen2VLImageProcessor", patch_size=4, merge_size=2, temporal_patch_size=2,
        size=dict(shortest_edge=64, longest_edge=1024))))
    rng = np.random.default_rng(0)
    for name, (high, wide) in {"a": (30, 50), "b": (30, 50), "c": (16, 16)}.items():
        Image.fromarray(rng.integers(0, 255, (high, wide, 3), dtype=np.uint8)).save(place.parent / f"{name}.png")
    (place.parent / "text.png").write_text("no image")
    return place


@pytest.fixture(scope="module")
def decoder(folder):
    return loading.load(folder)


def inputs(decoder, folder, *names):
    images = [Image.open(folder.parent / f"{name}.png") for name in names]
    return dict(decoder.images.processor(images=images, return_tensors="pt"))


@torch.inference_mode()
def direct(decoder, ids, **images):
    """(n, V) logits of transformers' own forward, without a cache."""
    return decoder.model(input_ids=torch.tensor([list(ids)]), use_cache=False, **images).logits[0].numpy()


def shown(decoder, folder, *names):
    decoder.rewind(0)
    turns = [{"role": "user", "content": [{"type": "image"}] * len(names) + [{"type": "text", "text": "what?"}]}]
    return decoder.show(decoder.encode(decoder.render(turns)), [decoder.see(folder.parent / f"{n}.png") for n in names])


def test_an_image_takes_the_place_that_transformers_processor_gives_it(decoder, folder):
    """The processor's own rule; the class as a whole needs a package for videos that the lab does without."""
    from transformers.models.lfm3_vl.processing_lfm3_vl import Lfm3VlProcessor
    ids = shown(decoder, folder, "a", "c")
    own = SimpleNamespace(image_processor=decoder.images.processor, image_token="<|image_pad|>")
    text = decoder.render([{"role": "user", "content": [{"type": "image"}, *QUESTION[0]["content"]]}])
    for i in range(2):
        pads = Lfm3VlProcessor.replace_image_token(own, inputs(decoder, folder, "a", "c"), i)
        text = text.replace("<|image_pad|>", pads.replace("image", "IMAGE"), 1)
    assert ids == decoder.encode(text.replace("IMAGE", "image")) and ids.count(PAD) > 10


@pytest.mark.parametrize("step", [1000, 7, 1])
def test_logits_behind_images_are_those_of_transformers(decoder, folder, step):
    ids = shown(decoder, folder, "a", "c")
    wanted = direct(decoder, ids, **inputs(decoder, folder, "a", "c"))
    assert abs(wanted - direct(decoder, ids)).max() > 0.1       # the images matter
    rows = np.concatenate([decoder.send(ids[i:i + step]) for i in range(0, len(ids), step)])
    np.testing.assert_allclose(rows, wanted, rtol=0, atol=1e-4)
    head = decoder.model.get_output_embeddings()
    np.testing.assert_allclose(head(decoder.hidden[-1]).detach(), wanted[-1], rtol=0, atol=1e-4)


def test_a_rewind_into_an_image_and_on_again(decoder, folder):
    ids = shown(decoder, folder, "a")
    wanted = direct(decoder, ids, **inputs(decoder, folder, "a"))
    for length in (len(ids) - 2, ids.index(PAD) + 4, 2):
        decoder.rewind(0)
        decoder.send(ids)
        decoder.rewind(length)
        np.testing.assert_allclose(decoder.send(ids[length:]), wanted[length:], rtol=0, atol=1e-4)
    decoder.rewind(0)
    other = [9 if t == PAD else t for t in ids]                 # no image where the text has none
    np.testing.assert_allclose(decoder.send(other), direct(decoder, other), rtol=0, atol=1e-4)


@pytest.mark.parametrize("how", ["plain", "chain", "tree"])
def test_greedy_text_about_an_image_is_that_of_generate(decoder, folder, how):
    ids = shown(decoder, folder, "a")
    with torch.inference_mode():
        sent = torch.tensor([ids])
        wanted = decoder.model.generate(input_ids=sent, attention_mask=torch.ones_like(sent), max_new_tokens=16,
                                        do_sample=False, **inputs(decoder, folder, "a"))[0].tolist()
    drafter = from_text(wanted, wrong={len(ids) + 3, len(ids) + 8}, vocab_size=decoder.vocab_size)
    if how == "plain":
        out, run = autoregressive_generate(decoder, ids, 16, eos=decoder.eos)
    elif how == "chain":
        out, run = speculative_generate(decoder, drafter, ids, 16, 4, eos=decoder.eos)
        assert run.accepted > 5
    else:
        plan = drafter.plan

        def branching(tokens, gamma):
            chain = plan(tokens, min(gamma, 3))
            return tree([*chain, 7], [*range(-1, len(chain) - 1), -1])

        out, run = tree_generate(decoder, ScriptedDrafter(branching), ids, 16, eos=decoder.eos)
        assert run.accepted > 5
    assert out.tolist() == wanted


def test_a_tree_behind_an_image_that_is_not_committed(decoder, folder):
    """The chain goes with the tree, as a part of its paths, and so do the rows of the image."""
    ids = shown(decoder, folder, "a")
    at = ids.index(PAD) + 3
    decoder.prefill(ids[:at])
    decoder.send(ids[at:])
    rows = decoder.send([9, 10, 11], [len(ids) - at - 1] * 2 + [len(ids) - at + 1])
    for row, path in zip(rows, ([9], [10], [10, 11])):
        wanted = direct(decoder, [*ids, *path], **inputs(decoder, folder, "a"))
        np.testing.assert_allclose(row, wanted[-1], rtol=0, atol=1e-4)


def test_another_image_in_the_same_place_is_not_taken_for_the_first(decoder, folder):
    """The ids are the same, so a cache that is kept by ids must not survive the exchange."""
    kept = KeptPrefix(decoder)
    for name in "ab":
        rows = decoder.see(folder.parent / f"{name}.png")
        ids = kept.show(decoder.encode(decoder.render(QUESTION)), [rows])
        assert kept.shared(ids) == 0
        out, _ = autoregressive_generate(kept, ids, 8)
        kept.rewind(0)
        kept.prefill(ids[:-1])
        np.testing.assert_allclose(kept.send(ids[-1:])[0], direct(decoder, ids, **inputs(decoder, folder, name))[-1],
                                   rtol=0, atol=1e-4)
        kept.commit([0])
        # More text behind keeps the image, also in the cache.
        more = [*out.tolist(), *kept.show([5, 9, 10], at=len(out))]
        kept.rewind(0)
        kept.prefill(more)
        assert kept.sent == len(more) - len(ids)
        wanted = direct(decoder, more[:len(ids)] + [9] * 3, **inputs(decoder, folder, name))
        kept.rewind(0)
        np.testing.assert_allclose(kept.send(more[:len(ids)] + [9] * 3), wanted, rtol=0, atol=1e-4)


def test_misuse_is_one_sentence(decoder, folder, tmp_path):
    place = folder.parent
    rows = decoder.see(place / "a.png")
    for name in ("missing.png", "text.png"):
        with pytest.raises(BadInput, match=f'{name}" cannot be read as an image'):
            decoder.see(place / name)
    ids = shown(decoder, folder, "a")
    decoder.send(ids)
    with pytest.raises(BadInput, match="2 images were given and the text has a place for 1"):
        decoder.show([9, PAD, 9], [rows, rows])
    assert decoder.length == len(ids) and decoder.images._rows  # as before
    assert decoder.show([9, PAD, 9]) == [9, PAD, 9]             # the model may write that token itself
    Image.new("RGB", (3000, 2)).save(tmp_path / "line.png")
    with pytest.raises(BadInput, match="line.png.* cannot be read as an image: .*ratio"):
        decoder.see(tmp_path / "line.png")
    text = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))
    with pytest.raises(BadInput, match="small reads text only"):
        HFDecoder(text, name="small").see(place / "a.png")


def test_without_an_image_processor_text_goes_on_and_an_image_is_refused(folder, tmp_path):
    for file in folder.iterdir():
        if file.name != "preprocessor_config.json":
            os.link(file, tmp_path / file.name)
    decoder = loading.load(tmp_path)
    assert len(autoregressive_generate(decoder, [9, 10, 11], 3)[0]) == 6
    with pytest.raises(BadInput, match="has no image processor"):
        decoder.see(folder.parent / "a.png")


def test_a_template_that_refuses_is_one_sentence(decoder, monkeypatch):
    monkeypatch.setattr(decoder.hf_tokenizer, "chat_template", "{{ raise_exception('no system here') }}")
    with pytest.raises(BadInput, match="tiny-vl's chat template refuses these messages: no system here"):
        decoder.render(QUESTION)


def test_a_divergence_is_told_with_its_margin_after_the_penalty(decoder):
    sampler = Sampler(repetition_penalty=1.5)
    plain = autoregressive_generate(decoder, [9, 10, 11], 6, sampler=sampler)[0].tolist()
    row = sampler.penalised(direct(decoder, plain[:6])[-1], plain[:6])
    for token in (plain[4] + 1, plain[4]):                      # one that the penalty does not touch, one that it does
        other = [*plain[:6], token]
        found = divergence.explain_divergence(decoder, plain, other, sampler)
        assert found.position == 6 and abs(found.margin - (row[plain[6]] - row[token])) < 1e-4 and not found.explained
        sentence, bug = compared(decoder, plain, other, 3, sampler)
        assert bug and "from token 4 of the answer on, " in sentence and sentence.endswith("a bug.")
        assert f"{found.margin:.2g} apart" in sentence and "float32" in sentence
    assert compared(decoder, plain, plain, 3, sampler) == ("plain decoding writes the same 6 tokens.", False)


def test_a_chat_about_an_image(folder, monkeypatch, capsys):
    """A hybrid over two turns: the second reads only what is new, and both write what plain decoding does."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("what?\nand now?\n"))
    flags = ["--target", str(folder), "--max-new-tokens", "24", "--image", str(folder.parent / "a.png")]
    assert run_chat([*flags, "--check"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("plain decoding writes the same") == 2
    read = [(int(new), int(whole)) for new, whole in re.findall(r"(\d+) of the prompt's (\d+) read", out)]
    assert read[0][0] == read[0][1] and 10 < read[1][0] < 60 < read[1][1]
    with pytest.raises(BadInput, match='text.png" cannot be read as an image'):
        run_chat([*flags[:-1], str(folder.parent / "text.png"), "--text", "what?"])
    assert capsys.readouterr().out == ""
