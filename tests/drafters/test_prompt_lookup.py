"""PromptLookup: what it copies, against a search, and how little it reads."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from console import BadInput
from decode_lab import speculative_generate
from lab.drafters.lookup import LastTokens, PromptLookup
from lab.measure.scripted import Counted, script
from loops import V, quick, run_script

# -- prompt lookup -------------------------------------------------------------------------------------------

def looked_up(tokens, gamma=4, **options):
    drafter = PromptLookup(**options)
    drafter.start(None, None, tokens)
    draft = drafter.propose(tokens, gamma)
    assert len(draft.q) == len(draft.sources) == len(draft.tokens) and draft.parents is None
    assert all(q is None for q in draft.q)
    return draft.tokens


@pytest.mark.parametrize("tokens, options, expected", [
    ([1, 2, 3, 4], {}, []),                                                  # no match: no draft, not token 0
    ([0], {}, []),
    ([7, 7], {}, [7, 7, 7, 7]),                                              # one repetition goes on
    ([1, 2, 3, 9, 1, 2, 3], {}, [9, 1, 2, 3]),
    ([5, 1, 2, 3, 5], {}, [1, 2, 3, 5]),
    ([1, 2, 3, 4, 5, 3], {}, [4, 5, 3, 4]),                        # fewer than gamma follow: copy on
    ([1, 2, 1, 2], {}, [1, 2, 1, 2]),                              # the match ends two before the end
    ([3, 4, 8, 4, 9, 3, 4], {}, [8, 4, 9, 3]),                     # the longest suffix wins over the latest
    ([3, 4, 8, 3, 4, 9, 3, 4], {}, [9, 3, 4, 9]),                  # of equally long ones, the latest
    ([1, 2, 3, 9, 5, 3, 7, 1, 2, 3], dict(max_ngram=1), [7, 1, 2, 3]),
    ([4, 2, 9, 3, 2], dict(min_ngram=2), []),                      # one token would match, two do not
    ([4, 2, 9, 0, 5, 3, 2], dict(boundary=[0]), [9, 0]),                     # not past the document's end
    ([4, 2, 0, 5, 5, 3, 2], dict(boundary=[0]), [0]),
    ([4, 2, 9, 0, 5, 3, 2], {}, [9, 0, 5, 3]),
])
def test_lookup(tokens, options, expected):
    assert looked_up(tokens, **options) == expected
    assert looked_up(tokens, 2, **options) == expected[:2]
    assert looked_up(np.array(tokens), **options) == expected


def slow_lookup(tokens, gamma, max_ngram, min_ngram):
    """The definition, by search from the end."""
    for n in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n:end] == tokens[-n:]:
                longer = list(tokens)
                while len(longer) < len(tokens) + gamma:
                    longer.append(longer[end + len(longer) - len(tokens)])
                return longer[len(tokens):]
    return []


@quick
@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40), gamma=st.integers(1, 6),
       sizes=st.tuples(st.integers(1, 3), st.integers(0, 2)), step=st.integers(1, 5))
def test_lookup_in_an_index_that_grows_equals_a_search(tokens, sizes, gamma, step):
    low, high = sizes[0], sum(sizes)
    drafter = PromptLookup(high, low)
    drafter.start(None, None, tokens[:1])
    for n in range(1, len(tokens) + 1, step):
        drafter.verified(tokens[:n], [], None)
        assert drafter.propose(tokens[:n], gamma).tokens == slow_lookup(tokens[:n], gamma, high, low)


def test_lookup_does_little_work_on_a_long_prompt():
    rng, work = np.random.default_rng(0), {}
    for size in (500, 50_000):
        tokens, drafter = Counted(rng.integers(300, size=size).tolist()), PromptLookup()
        Counted.reads = 0
        drafter.start(None, None, tokens)
        drafter.propose(tokens, 5)
        assert Counted.reads <= 8 * size, "the index reads each suffix of the prompt once"
        work[size] = []
        for _ in range(20):
            tokens.extend(rng.integers(300, size=3).tolist())
            Counted.reads = 0
            drafter.verified(tokens, [], None)
            assert drafter.propose(tokens, 5).tokens or size == 500
            work[size].append(Counted.reads)
    assert max(work[50_000]) <= 60, "a later proposal reads what is new, whatever the length"


def test_lookup_forgets_the_last_run():
    drafter = PromptLookup()
    speculative_generate(script([1, 2, 3] * 8, V), drafter, [1, 2, 3, 1, 2, 3], 9, 4)
    drafter.start(None, None, [4, 5, 6, 2])
    assert drafter.propose([4, 5, 6, 2], 4).tokens == [], "2 is followed by 3 in the last run only"
    drafter.start(None, None, [4, 2, 5, 8, 2])
    assert drafter.propose([4, 2, 5, 8, 2], 3).tokens == [5, 8, 2]


def test_lookup_is_used_when_asked_for():
    """With a drafter asked for, at least one token is drafted, and a text that repeats is copied."""
    text = [1, 2, 3, 4, 5] * 8
    _, tokens, run = run_script(PromptLookup(), 25, 4, text=text, prompt=text[:8])
    assert tokens == text[:33] and run.alpha == 1 and run.by_source == {"lookup": (20, 20)}
    with pytest.raises(BadInput):
        PromptLookup(2, 3)


@pytest.mark.parametrize("tokens, gamma, expected", [([1, 2, 3, 4], 2, [3, 4]), ([1, 2], 5, [1, 2]), ([1, 2], 0, [])])
def test_the_last_tokens_are_drafted_again(tokens, gamma, expected):
    draft = LastTokens().propose(tokens, gamma)
    assert draft.tokens == expected and draft.q == [None] * len(expected) and draft.parents is None
