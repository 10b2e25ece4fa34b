"""lab/models/admission.py: every class of model_classes.py is right, as it is or with trees as paths, or is refused."""

import inspect

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from console import BadInput
from decode_lab import autoregressive_generate, speculative_generate, tree_generate
from lab.drafters.trees import TreeDrafter, TreeShape
from lab.measure.scripted import from_text
from lab.models import admission
from lab.models.decoder import HFDecoder
from marks import few
from model_classes import AS_PATHS, CLASSES, REFUSED, V, build

pytestmark = pytest.mark.usefixtures("one_thread")
RIGHT = few([name for name in CLASSES if name not in REFUSED],
              {"Llama", "LFM2", "GPT-Neo"})
LENGTHS = (1, 3, 5, 6, 7, 13)                                   # around windows of 6 and kernels of 4
PARENTS = [-1, 0, 0, 1, 2, 4, -1]


@torch.inference_mode()
def direct(model, ids):
    """(n, V) logits of transformers' own forward over the whole sequence, without a cache."""
    return model(torch.tensor(np.asarray(ids))[None], use_cache=False).logits[0].numpy()


@torch.inference_mode()
def behind(model, ids, paths):
    """(paths, V) logits behind each path after ids, by one forward. Shorter paths are filled; no row looks ahead."""
    longest = max(map(len, paths))
    sent = [[*ids, *path, *[ids[0]] * (longest - len(path))] for path in paths]
    logits = model(torch.tensor(sent), use_cache=False).logits
    return np.stack([logits[i, len(ids) + len(path) - 1].numpy() for i, path in enumerate(paths)])


def tokens(n, seed=0):
    return np.random.default_rng(seed).integers(3, V, n).tolist()


def same(rows, wanted):
    """Within a thousandth of the logits' spread: a wrong mask or position is three orders of magnitude further off."""
    rows, wanted = np.asarray(rows), np.asarray(wanted)
    assert rows.shape == wanted.shape and abs(rows - wanted).max() < 1e-3 * wanted.std()


def path(node):
    return [*(path(PARENTS[node]) if PARENTS[node] >= 0 else []), node]


# -- classes ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", RIGHT)
def test_chain_tree_and_rewinds_give_the_logits_of_a_forward_without_a_cache(name):
    model = build(name)
    decoder = HFDecoder(model, name=name)
    assert decoder.tree_as_paths == (name in AS_PATHS) and decoder.length == 0
    limit = decoder.max_length or 64
    text, other, nodes = tokens(min(20, limit)), tokens(4, 1), tokens(len(PARENTS), 2)
    wanted = direct(model, text)
    for n in (n for n in LENGTHS if n + 11 <= limit):
        decoder.rewind(0)
        decoder.prefill(text[:n])
        same(decoder.send(text[n:n + 5]), wanted[n:n + 5])
        same(decoder.send(text[n + 5:n + 6]), wanted[n + 5:n + 6])
        decoder.rewind(n + 4)                                   # twice in a row, and on from there
        decoder.rewind(n + 1)
        branch = [*text[:n + 1], *other]
        same(decoder.send(other), direct(model, branch)[n + 1:])
        decoder.commit(range(3))                                # one of the text, two of the branch
        kept = branch[:n + 3]
        rows = [*decoder.send(nodes[:4], PARENTS[:4]), *decoder.send(nodes[4:], PARENTS[4:])]
        for row, wanted_row in zip(rows, behind(model, kept, [[nodes[j] for j in path(i)] for i in range(len(nodes))]),
                                   strict=True):
            same(row, wanted_row)
        decoder.commit(path(5))
        kept += [nodes[j] for j in path(5)]
        assert decoder.committed == len(kept) and set(decoder.cache.lengths()) == {len(kept)}
        same(decoder.send(other), direct(model, [*kept, *other])[-4:])


@pytest.mark.parametrize("name", RIGHT)
def test_greedy_text_by_chain_and_tree_is_that_of_plain_decoding(name):
    model = build(name)
    decoder, draft = HFDecoder(model, name=name), HFDecoder(build(name, deviation=0.24), name="draft")
    for n in (n for n in (2, 6) if n + 12 <= (decoder.max_length or 64)):
        text = tokens(n, n)
        for _ in range(12):
            text.append(int(direct(model, text)[-1].argmax()))
        plain, _ = autoregressive_generate(decoder, text[:n], 12)
        chain, run = speculative_generate(decoder, from_text(text, {n + 2, n + 7}, V), text[:n], 12, 4)
        tree, _ = tree_generate(decoder, TreeDrafter(draft, TreeShape.branching((3, 2, 1))), text[:n], 12)
        assert plain.tolist() == chain.tolist() == tree.tolist() == text and run.accepted > 5


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_in_one_sentence_with_the_reason(name):
    model = build(name)
    with pytest.raises(BadInput, match=f"^it .* cannot be used: .*{REFUSED[name]}[^\n]*\\.$"):
        HFDecoder(model, name="it")
    assert not model.base_model._forward_hooks


def test_the_list_is_long_and_each_name_is_in_it():
    assert len({kind for kind, _ in CLASSES.values()}) > 80 and AS_PATHS | REFUSED.keys() <= CLASSES.keys()


@pytest.mark.parametrize("name", ["Llama", "Mistral", "LFM3", "Mixtral"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_admitted(name, dtype):
    decoder = HFDecoder(build(name, deviation=0.1).to(dtype))
    assert decoder.tree_as_paths == (name in AS_PATHS) and decoder.send([5, 6, 7]).dtype == dtype


# -- what the check sees ---------------------------------------------------------------------------------------

def test_a_mask_that_is_cut_by_index_inside_attention_is_seen_without_a_name(monkeypatch):
    """GPT-Neo's windows, where the configuration does not say so."""
    monkeypatch.setattr(admission, "edges", lambda *_: [])
    monkeypatch.setattr(admission, "TOKENS", 12)
    decoder = HFDecoder(build("GPT-Neo", window_size=3))
    assert decoder.tree_as_paths


def wrong(model, monkeypatch, change):
    """The model, whose forwards with a cache take other positions."""
    forward = type(model).forward

    def changed(self, *args, position_ids=None, use_cache=None, **kwargs):
        if position_ids is not None:
            position_ids = change(position_ids)
        return forward(self, *args, position_ids=position_ids, use_cache=use_cache, **kwargs)

    changed.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(type(model), "forward", changed)
    return model


@pytest.mark.parametrize("change", [lambda p: p + (p > 3), lambda p: p + (p.shape[1] > 1) * (p > 0),
                                    lambda p: p - (p > 5).long()])
def test_positions_that_are_one_off_are_refused(monkeypatch, change):
    with pytest.raises(BadInput, match="with a cache it computes other logits than without one"):
        HFDecoder(wrong(build("Llama"), monkeypatch, change))


def test_logits_that_are_no_numbers_are_refused():
    model = build("Llama")
    with torch.no_grad():
        model.lm_head.weight[3, 3] = float("nan")
    with pytest.raises(BadInput, match="not finite numbers"):
        HFDecoder(model)


@pytest.mark.parametrize("name, forwards", [("Llama", 11), ("LFM2", 12), ("GPT-Neo", 24)])
def test_a_check_takes_few_forwards_of_few_tokens(name, forwards):
    model, sizes = build(name), []
    hook = model.register_forward_hook(lambda module, args, kwargs, out: sizes.append(out.logits.shape[:2].numel()),
                                       with_kwargs=True)
    HFDecoder(model)
    hook.remove()
    assert len(sizes) <= forwards and max(sizes) <= 3 * 14


def test_a_second_decoder_of_the_same_model_is_not_checked_again_unless_the_attention_is_another():
    model, calls = build("Llama"), []
    HFDecoder(model)
    model.register_forward_hook(lambda *_: calls.append(1))
    assert not HFDecoder(model).tree_as_paths and not calls
    model.set_attn_implementation("eager")
    assert not HFDecoder(model).tree_as_paths and len(calls) == 11


def test_a_window_too_long_to_walk_through_is_decided_by_the_configuration():
    model, sizes = build("Mistral", sliding_window=4096, max_position_embeddings=8192), []
    model.register_forward_hook(lambda module, args, out: sizes.append(out.logits.shape[1]))
    assert HFDecoder(model).tree_as_paths and max(sizes) < 20


# -- contexts --------------------------------------------------------------------------------------------------

def test_longrope_is_used_up_to_its_original_context_and_says_so():
    model = build("Phi-3 longrope")
    decoder = HFDecoder(model, name="phi")
    assert decoder.max_length == 16 and "64 tokens is used up to 16" in decoder.notes[0]
    plain, run = autoregressive_generate(decoder, tokens(12), 16)
    assert len(plain) == 16 and run.stop == "context"
    for gamma in (1, 2, 4):
        text, run = speculative_generate(decoder, from_text(plain, {13}, V), tokens(12), 16, gamma)
        assert text.tolist() == plain.tolist() and run.stop == "context"


@pytest.mark.parametrize("name", ["Llama dynamic NTK", "Llama YaRN"])
def test_rotations_that_hold_keep_their_context(name):
    model = build(name)
    decoder, text = HFDecoder(model), tokens(60)
    assert decoder.max_length == 64 and decoder.notes == ()
    same(np.concatenate([decoder.send(text[:20]), decoder.send(text[20:])]), direct(model, text))


@pytest.mark.parametrize("name, limit", [("MPT", 64), ("GPT-2", 64), ("XGLM", 64), ("DBRX", 64), ("BLOOM", None)])
def test_a_context_limit_under_another_name_ends_a_text(name, limit):
    decoder = HFDecoder(build(name), name="it")
    assert decoder.max_length == limit
    if limit is None:
        assert decoder.notes == ("it: Its configuration names no longest context, so nothing stops a text where it was "
                                 "trained to stop.",)
        return
    text, run = autoregressive_generate(decoder, tokens(60), 10)
    assert len(text) == 64 and run.stop == "context"


@pytest.mark.parametrize("name", admission.CONTEXT_NAMES)
def test_every_name_of_a_limit_is_read(name):
    class Config:
        pass

    config = Config()
    assert admission.context_limit(config)[0] is None
    setattr(config, name, 32)
    assert admission.context_limit(config) == (32, "")


def test_a_context_shorter_than_the_check_is_refused():
    with pytest.raises(BadInput, match="it holds 4 tokens, and the lab's check needs 8"):
        HFDecoder(build("Llama", max_position_embeddings=4))
    assert HFDecoder(build("Llama", max_position_embeddings=9)).max_length == 9
