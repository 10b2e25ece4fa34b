"""What HFDecoder holds after a forward that fails, after steps back in parts, and after commits of nothing."""

import inspect

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from console import BadInput
from lab.models.decoder import HFDecoder
from lab.models.kept_prefix import KeptPrefix
from model_classes import V, build

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = ["Llama", "Mistral", "LFM2", "LFM3", "GPT-Neo", "Gemma 3"]
PARENTS = [-1, 0, 0, 1]


@pytest.fixture(scope="module", params=NAMES)
def decoder(request):
    return HFDecoder(build(request.param), name=request.param)


@torch.inference_mode()
def direct(decoder, ids):
    """(n, V) logits of transformers' own forward over the whole sequence, without a cache."""
    return decoder.model(torch.tensor(np.asarray(ids))[None], use_cache=False).logits[0].numpy()


def tokens(n, seed=0):
    return np.random.default_rng(seed).integers(3, V, n).tolist()


def same(rows, wanted):
    rows, wanted = np.asarray(rows), np.asarray(wanted)
    assert rows.shape == wanted.shape and abs(rows - wanted).max() < 1e-3 * wanted.std()


class Fails:
    """Inside, the decoder's forwards fail in the model's last layer, when the others have written to the cache."""

    def __init__(self, decoder, error):
        inner = decoder.model.base_model
        self.layer, self.error = (inner.layers if hasattr(inner, "layers") else inner.h)[-1], error

    def __enter__(self):
        def fail(module, args, out):
            raise self.error
        self.hook = self.layer.register_forward_hook(fail)

    def __exit__(self, kind, error, trace):
        self.hook.remove()


CALLS = {
    "a token": lambda d: d.send([7]),
    "a chain": lambda d: d.send(tokens(6, 1)),
    "a tree": lambda d: d.send(tokens(4, 2), PARENTS),
    "a tree at the second node": lambda d: d.send(tokens(2, 2), [0, 0]),
}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyboardInterrupt()], ids=["memory", "Ctrl-C"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("n", [0, 4, 9])
@pytest.mark.slow
def test_a_forward_that_fails_changes_nothing(decoder, n, call, error):
    text, pending = tokens(n), tokens(3, 3)
    decoder.rewind(0)
    if n:
        decoder.prefill(text)
    decoder.send(pending)
    with Fails(decoder, error), pytest.raises(type(error)):
        CALLS[call](decoder)
    assert decoder.length == n + 3 and decoder.committed == n and set(decoder.cache.lengths()) == {n + 3}
    assert decoder.hidden.shape[0] == 3
    wanted = direct(decoder, [*text, *pending, 7, 8])
    same(decoder.send([7]), wanted[n + 3:n + 4])
    decoder.commit(range(4))
    same(decoder.send([8]), wanted[n + 4:])


@pytest.mark.parametrize("n", [0, 9])
def test_a_part_of_a_tree_that_fails_leaves_the_part_before(decoder, n):
    text, nodes = tokens(n), tokens(4, 2)
    decoder.rewind(0)
    if n:
        decoder.prefill(text)
    decoder.send(nodes[:3], PARENTS[:3])
    with Fails(decoder, MemoryError()), pytest.raises(MemoryError):
        decoder.send([9], [2])
    same(decoder.send(nodes[3:], PARENTS[3:]), direct(decoder, [*text, nodes[0], nodes[1], nodes[3]])[-1:])
    decoder.commit([0, 1, 3])
    same(decoder.send([5]), direct(decoder, [*text, nodes[0], nodes[1], nodes[3], 5])[-1:])


def test_a_prefill_that_fails_changes_nothing(decoder):
    decoder.rewind(0)
    decoder.prefill(tokens(5))
    with Fails(decoder, MemoryError()), pytest.raises(MemoryError):
        decoder.prefill(tokens(7, 1))
    assert decoder.length == decoder.committed == 5
    same(decoder.send([7]), direct(decoder, [*tokens(5), 7])[-1:])


def test_the_first_forward_may_fail_too(decoder):
    decoder.rewind(0)
    with Fails(decoder, MemoryError()), pytest.raises(MemoryError):
        decoder.prefill(tokens(7, 1))
    assert decoder.length == 0
    same(decoder.send(tokens(9)), direct(decoder, tokens(9)))


@pytest.mark.parametrize("n", [0, 5, 13])
def test_a_chain_goes_back_step_by_step_and_on(decoder, n):
    """Past the window and the kernel: each step back needs what lies before the one before it."""
    text, sent = tokens(n), tokens(9, 1)
    decoder.rewind(0)
    if n:
        decoder.prefill(text)
    decoder.send(sent)
    for left in (7, 6, 3, 1):
        decoder.rewind(n + left)
        assert decoder.length == n + left and decoder.committed == n
        same(decoder.send([50]), direct(decoder, [*text, *sent[:left], 50])[-1:])
        decoder.rewind(n + left)
    decoder.commit([])
    assert decoder.length == n
    same(decoder.send([51, 52]), direct(decoder, [*text, 51, 52])[-2:])


def test_a_tree_goes_back_in_parts(decoder):
    text, nodes, parents = tokens(8), tokens(6, 1), [-1, 0, 0, 2, 1, 3]
    decoder.rewind(0)
    decoder.prefill(text)
    decoder.send(nodes, parents)
    decoder.rewind(8 + 4)                                       # nodes 4 and 5 go
    same(decoder.send([30], [3]), direct(decoder, [*text, nodes[0], nodes[2], nodes[3], 30])[-1:])
    decoder.rewind(8 + 2)                                       # what is left is a chain
    same(decoder.send([31]), direct(decoder, [*text, nodes[0], nodes[1], 31])[-1:])
    decoder.commit([0, 1])
    same(decoder.send([32]), direct(decoder, [*text, nodes[0], nodes[1], 32])[-1:])
    decoder.rewind(10)
    decoder.send(nodes[:3], parents[:3])
    decoder.rewind(10)                                          # all of it
    same(decoder.send([33]), direct(decoder, [*text, nodes[0], nodes[1], 33])[-1:])


def test_commits_of_nothing(decoder):
    decoder.rewind(0)
    decoder.commit([])
    assert decoder.length == 0
    decoder.send(tokens(4))
    decoder.commit([])
    assert decoder.length == 0
    decoder.send(tokens(4, 2), PARENTS)
    decoder.commit([])
    same(decoder.send(tokens(9)), direct(decoder, tokens(9)))
    decoder.commit(range(9))
    decoder.commit([])
    same(decoder.send([5]), direct(decoder, [*tokens(9), 5])[-1:])


def test_a_state_goes_back_to_the_last_commit_and_no_further(decoder):
    decoder.rewind(0)
    decoder.prefill(tokens(9))
    decoder.send([5, 6])
    if decoder.cache.recorded:
        assert decoder.rewind_floor == 9
        with pytest.raises(BadInput, match="cannot rewind to 8: from 9"):
            decoder.rewind(8)
        assert decoder.length == 11
    else:
        decoder.rewind(4)
        assert decoder.committed == decoder.length == 4
        same(decoder.send([5]), direct(decoder, [*tokens(9)[:4], 5])[-1:])


def test_hidden_states_are_those_of_the_decoder_s_own_forward():
    """Two decoders of one model do not see each other's, and none lives on in the model's hooks."""
    model = build("Llama")
    one, two = HFDecoder(model), HFDecoder(model)
    one.send([5, 6, 7])
    seen = one.hidden.clone()
    two.send([8])
    assert torch.equal(one.hidden, seen) and two.hidden.shape == (1, 32) and not model.base_model._forward_hooks


def test_a_kept_prefix_follows_what_another_call_made_the_model_forget():
    model = build("Llama")
    kept = KeptPrefix(HFDecoder(model))
    kept.prefill(tokens(9))
    kept.model.rewind(5)                                        # as `show` does
    kept.send([40, 41])
    kept.commit([0, 1])
    assert kept.shared([*tokens(9)[:5], 40, 41]) == 7 and kept.shared(tokens(9)) == 5


def test_the_signature_of_send_is_the_protocols():
    assert list(inspect.signature(HFDecoder.send).parameters) == ["self", "tokens", "parents"]
