"""gamma, n_new, ids and sizes of drafts are whole numbers: what is not is refused by name, and no drafter is blamed."""

import numpy as np
import pytest

from console import BadInput
from decode_lab import Sampler, autoregressive_generate, speculative_generate
from lab.drafters.cascade import CascadeDrafter
from lab.drafters.lookup import PromptLookup, SuffixLookup
from lab.drafters.model import ModelDrafter
from lab.drafters.tiers import NgramDrafter
from lab.drafters.trees import ConfidentTreeDrafter, TreeShape
from lab.measure.scripted import FakeDecoder, random_decoder

NAN = float("nan")
DRAFTERS = {"lookup": SuffixLookup, "model": lambda: ModelDrafter(random_decoder(6, 2))}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("gamma, named", [
    (1.33, "gamma is 1.33"), (NAN, "gamma is nan"), (float("inf"), "gamma is inf"), (-0.5, "gamma is -0.5"),
    (lambda run: 1 + len(run.rounds) / 3, "gamma is 1.33"), (lambda run: run.alpha, "gamma is nan"),
    (lambda run: float("inf"), "gamma is inf"), (lambda run: np.float32(2.5), "gamma is 2.5"),
    ("3", "gamma is '3'"), ([2], "gamma is "), (2j, "gamma is 2j"), (lambda run: None, "gamma is None")])
def test_a_gamma_that_is_no_whole_number_is_refused_by_name(drafter, gamma, named):
    with pytest.raises(BadInput, match=named) as error:
        speculative_generate(random_decoder(6, 1), DRAFTERS[drafter](), [1, 2, 1], 40, gamma)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


@pytest.mark.parametrize("n_new", [2.5, NAN, float("inf"), 0, -1, 0.5, None])
def test_an_n_new_that_is_no_whole_number_is_refused_by_name(n_new):
    for generate in (lambda target: autoregressive_generate(target, [1], n_new),
                     lambda target: speculative_generate(target, SuffixLookup(), [1], n_new, 2)):
        target = random_decoder(6, 1)
        with pytest.raises(BadInput, match=f"n_new is {n_new}"):
            generate(target)
        assert target.forwards == 0


@pytest.mark.parametrize("number", [3, 3.0, np.int64(3), np.float32(3)])
def test_whole_numbers_may_come_in_any_type(number):
    want = speculative_generate(random_decoder(6, 1), SuffixLookup(), [1, 2, 1], 3, 3)[0].tolist()
    for gamma in (number, lambda run: number):
        assert speculative_generate(random_decoder(6, 1), SuffixLookup(), [1, 2, 1], number, gamma)[0].tolist() == want


SIZES = {
    "top_k": lambda value: Sampler(1.0, top_k=value),
    "width of level 1": lambda value: TreeShape.branching([2, value]),
    "n_nodes": lambda value: ConfidentTreeDrafter(random_decoder(6, 2), value, 4, 2),
    "depth": lambda value: ConfidentTreeDrafter(random_decoder(6, 2), 8, value, 2),
    "width": lambda value: ConfidentTreeDrafter(random_decoder(6, 2), 8, 4, value),
    "max_ngram": PromptLookup, "min_ngram": lambda value: PromptLookup(9, value), "min_match": SuffixLookup,
    "min_count": lambda value: NgramDrafter(min_count=value),
    "inner_gamma": lambda value: CascadeDrafter(random_decoder(6, 2), PromptLookup(), value),
    "eos": lambda value: autoregressive_generate(random_decoder(6, 1), [1], 3, eos=[value]),
}


@pytest.mark.parametrize("value", [NAN, float("inf"), 2.5, -1, "3", None])
@pytest.mark.parametrize("name", SIZES)
def test_every_other_whole_number_is_refused_by_name_too(name, value):
    with pytest.raises(BadInput) as error:
        SIZES[name](value)
    assert f"{name} is {value}" in str(error.value).replace("'", "") and "whole number" in str(error.value)


@pytest.mark.parametrize("eos", [4, np.int64(4), [4], (4.0,), {4}, np.array([4]), frozenset({4, 9})])
def test_an_end_may_come_as_one_id_or_as_several(eos):
    for given, text in ((eos, [1, 2, 3, 4]), (None, [1, 2, 3, 4, 5]), ((), [1, 2, 3, 4, 5])):
        counting = FakeDecoder(lambda history: np.eye(6)[history[-1] + 1], 6)
        assert autoregressive_generate(counting, [1], 4, eos=given)[0].tolist() == text
