"""gamma and n_new are whole numbers: what is not is refused by name, and no drafter is blamed for it."""

import numpy as np
import pytest

from console import BadInput
from decode_lab import autoregressive_generate, speculative_generate
from lab.drafters.lookup import SuffixLookup
from lab.drafters.model import ModelDrafter
from lab.measure.scripted import random_decoder

NAN = float("nan")
DRAFTERS = {"lookup": SuffixLookup, "model": lambda: ModelDrafter(random_decoder(6, 2))}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("gamma, named", [
    (1.33, "gamma is 1.33"), (NAN, "gamma is nan"), (float("inf"), "gamma is inf"), (-0.5, "gamma is -0.5"),
    (lambda run: 1 + len(run.rounds) / 3, "gamma is 1.33"), (lambda run: run.alpha, "gamma is nan"),
    (lambda run: float("inf"), "gamma is inf"), (lambda run: np.float32(2.5), "gamma is 2.5")])
def test_a_gamma_that_is_no_whole_number_is_refused_by_name(drafter, gamma, named):
    with pytest.raises(BadInput, match=named) as error:
        speculative_generate(random_decoder(6, 1), DRAFTERS[drafter](), [1, 2, 1], 40, gamma)
    assert str(error.value).count(" but must be ") == 1 and "\n" not in str(error.value)


@pytest.mark.parametrize("n_new", [2.5, NAN, float("inf"), 0, -1, 0.5])
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
