"""Numbers with units."""

import pytest

import console
from decode_lab import Sampler
from lab.support.text import fmt_sampler


@pytest.mark.parametrize("value, text", [
    (6.65e-3, "6.65 ms"), (0.0, "0 ns"), (1.5, "1.50 s"), (999.96e-6, "1.00 ms"), (2.5e-7, "250 ns"),
    (75.2, "75.2 s")])
def test_fmt_time(value, text):
    assert console.fmt_time(value) == text


def test_fmt_bytes_and_counts():
    assert console.fmt_bytes(17e9) == "17.0 GB" and console.fmt_bytes(23_040) == "23.0 KB"
    assert console.fmt_bytes(512) == "512 B" and console.fmt_bytes(0) == "0 B"
    assert console.fmt_count(8_030_261_248) == "8.03 B" and console.fmt_count(134_515_008) == "135 M"
    assert console.fmt_count(999_600) == "1.00 M" and console.fmt_count(64) == "64"


@pytest.mark.parametrize("sampler, words", [
    (Sampler(), "greedy"), (Sampler(0.0, top_k=20), "greedy"),
    (Sampler(0.0, repetition_penalty=1.3), "greedy, penalty 1.3"),
    (Sampler(1.0), "T 1, no filter"), (Sampler(0.6, top_k=20), "T 0.6, top-k 20"),
    (Sampler(0.6, 0, 0.95, 0.05), "T 0.6, top-p 0.95, min-p 0.05"),
    (Sampler(1.0, repetition_penalty=1.1), "T 1, penalty 1.1")])
def test_a_sampler_is_named_by_what_is_on(sampler, words):
    assert fmt_sampler(sampler) == words
