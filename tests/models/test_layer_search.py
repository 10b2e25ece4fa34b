"""lab/models/layer_search.py on small random models of the real classes."""

import copy

import pytest

torch = pytest.importorskip("torch")

from console import BadInput
from lab.models.decoder import HFDecoder
from lab.models.layer_search import search_layers
from layered import CLASSES, N, build, layer_list, tokens

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


@pytest.fixture(scope="module", params=CLASSES)
def target(request):
    return HFDecoder(build(request.param), name=request.param)


def overlap(target, kept, ids):
    """Mean sum of min(p, q), computed another way: layers left out pass their input on."""
    model = copy.deepcopy(target.model)
    batch = torch.tensor(ids)[None]
    with torch.inference_mode():
        p = model(batch, use_cache=False).logits.softmax(-1)
        for i, layer in enumerate(layer_list(model)):
            if i not in kept:
                layer.register_forward_hook(lambda module, args, out: args[0])
        q = model(batch, use_cache=False).logits.softmax(-1)
    return float(torch.minimum(p, q).sum(-1).mean())


def test_one_layer_left_out_is_the_best_one(target):
    ids = tokens(60)
    found = search_layers(target, [ids], N - 1, width=N, swaps=0)
    must = {0, 1} if target.name == "lfm2" else {0}
    every = {tuple(j for j in range(N) if j != i): None for i in range(N) if i not in must}
    values = {kept: overlap(target, kept, ids) for kept in every}
    assert found == max(values, key=values.get)


def test_the_search_finds_layers_that_do_nothing():
    model = build("llama")
    with torch.no_grad():
        for i in (1, 3):                                        # all they add to the residual stream is zero
            layer_list(model)[i].self_attn.o_proj.weight.zero_()
            layer_list(model)[i].mlp.down_proj.weight.zero_()
    target = HFDecoder(model)
    assert search_layers(target, [tokens(30), tokens(50, 1)], 3) == (0, 2, 4)
    assert not model._forward_hooks and not layer_list(model)[2]._forward_hooks


def test_swaps_help_and_the_seed_decides(target):
    ids = tokens(50)
    alone = search_layers(target, [ids], 3, width=1, swaps=0)
    swapped = search_layers(target, [ids], 3, width=1, swaps=12, seed=1)
    assert swapped == search_layers(target, [ids], 3, width=1, swaps=12, seed=1)
    assert overlap(target, swapped, ids) >= overlap(target, alone, ids) and swapped[0] == 0 and len(swapped) == 3
    for n, texts, message in ((0, [ids], "cannot be kept"), (6, [ids], "to 5 would"), (3, [], "no texts")):
        with pytest.raises(BadInput, match=message):
            search_layers(target, texts, n)
