"""trees.likeliest on rows of numpy and of a device: the same ids, and of a device only as many as are asked for."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from decode_lab import Sampler
from lab.drafters.trees import likeliest, log_probs

ROWS = {"spread": np.random.default_rng(0).standard_normal(50),
        "ties everywhere": np.zeros(50),
        "ties at every edge": np.random.default_rng(1).integers(0, 4, 50) / 2.0,
        "all but two are out": np.where(np.arange(50) % 30 == 7, 1.0, -np.inf)}


def wanted(row, n, vocab_size=None):
    return np.argsort(-np.asarray(row[:vocab_size], float), kind="stable")[:n].tolist()


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("n", [0, 1, 2, 7, 49, 50, 60])
@pytest.mark.parametrize("vocab_size", [None, 30])
def test_a_tensor_gives_the_ids_of_numpy(name, n, vocab_size):
    row = ROWS[name].astype(np.float32)
    found = likeliest(torch.from_numpy(row), n, vocab_size=vocab_size)
    assert found == likeliest(row, n, vocab_size=vocab_size) == wanted(row, n, vocab_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_16_bits_have_ties_too(dtype):
    row = torch.from_numpy(np.random.default_rng(2).standard_normal(2000)).to(dtype)
    assert likeliest(row, 40) == wanted(row.float().numpy(), 40)


def test_a_penalty_counts_on_a_tensor_too():
    row = np.linspace(2, 1, 20).astype(np.float32)
    sampler = Sampler(repetition_penalty=1.5)
    found = likeliest(torch.from_numpy(row), 4, sampler, [0, 1, 5])
    assert found == likeliest(row, 4, sampler, [0, 1, 5]) == [2, 3, 4, 6]
    assert likeliest(torch.from_numpy(row), 4, sampler, []) == [0, 1, 2, 3]


def test_log_probs_of_a_tensor_are_those_of_numpy():
    row = np.random.default_rng(3).standard_normal(50).astype(np.float32)
    for vocab_size in (50, 30):
        np.testing.assert_allclose(log_probs(torch.from_numpy(row), [3, 7], vocab_size),
                                   log_probs(row, [3, 7], vocab_size), rtol=1e-6)


def test_only_a_few_numbers_come_to_the_host(monkeypatch):
    sizes, cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self, *a, **k: sizes.append(self.numel()) or cpu(self, *a, **k))
    likeliest(torch.from_numpy(np.random.default_rng(4).standard_normal(5000)), 8)
    assert sizes and max(sizes) <= 9
