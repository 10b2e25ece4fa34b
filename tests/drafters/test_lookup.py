"""SuffixLookup: the suffix automaton against the definition, searched for, and lossless runs with it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console import BadInput
from decode_lab import Sampler, autoregressive_generate, speculative_generate
from lab.drafters.lookup import PromptLookup, SuffixLookup
from lab.measure.enumeration import exact, outcomes, same_distribution
from lab.measure.scripted import Counted, random_decoder, script, table_logits

V = 16
quick = settings(max_examples=60, deadline=None, derandomize=True)


def looked_up(tokens, gamma=4, **options):
    drafter = SuffixLookup(**options)
    drafter.start(None, None, tokens)
    draft = drafter.propose(tokens, gamma)
    assert draft.parents is None and draft.q == [None] * len(draft.tokens)
    assert draft.sources == ["suffix automaton"] * len(draft.tokens)
    return draft.tokens, drafter.matched


# -- the definition, by search -------------------------------------------------------------------------------

def ends(tokens, piece):
    """Where `piece` ends in `tokens`."""
    n = len(piece)
    return [end for end in range(n, len(tokens) + 1) if tokens[end - n:end] == piece]


def longest_match(tokens):
    """The longest suffix that also ends before the end; [] for none."""
    return next((tokens[-n:] for n in range(len(tokens) - 1, 0, -1) if ends(tokens[:-1], tokens[-n:])), [])


def place(tokens):
    """Where the match ended before: the latest place at which it was the longest match too. Where there is none, the
    same of the longest string that the match was always the end of so far; else the first place."""
    past, piece = tokens[:-1], longest_match(tokens)
    matches = {n: longest_match(tokens[:n]) for n in range(1, len(tokens))}
    always = piece
    while len({tuple(past[end - len(always) - 1:end]) for end in ends(past, always) if end > len(always)}) == 1 \
            and min(ends(past, always)) > len(always):
        first = ends(past, always)[0]
        always = past[first - len(always) - 1:first]
    for string in (piece, always):
        same = [n for n, match in matches.items() if match == string]
        if same:
            return max(same)
    return min(ends(past, piece))


def slow(tokens, gamma, min_match, boundary):
    piece = longest_match(tokens)
    if len(piece) < min_match:
        return [], len(piece)
    end, longer = place(tokens), list(tokens)
    for at in range(end, end + gamma):
        longer.append(longer[at])
        if longer[-1] in boundary:
            break
    return longer[len(tokens):], len(piece)


@quick
@given(tokens=st.integers(1, 4).flatmap(lambda v: st.lists(st.integers(0, v), min_size=1, max_size=30)),
       gamma=st.integers(0, 6), min_match=st.integers(1, 4), boundary=st.sets(st.integers(0, 4), max_size=1),
       step=st.integers(1, 5))
def test_the_automaton_equals_a_search(tokens, gamma, min_match, boundary, step):
    drafter = SuffixLookup(min_match, boundary)
    drafter.start(None, None, tokens[:1])
    for n in range(1, len(tokens) + 1, step):                  # a sequence grows by one token or several
        drafter.verified(tokens[:n], [], None)
        expected, length = slow(tokens[:n], gamma, min_match, boundary)
        assert drafter.matched == length, "a policy reads it before anything is proposed"
        assert drafter.propose(tokens[:n], gamma).tokens == expected


@pytest.mark.parametrize("tokens, options, expected, matched", [
    ([1, 2, 3, 4], {}, [], 0),                                     # no match: no draft, not token 0
    ([0], {}, [], 0),
    ([0, 1], {}, [], 0),
    ([7, 7], {}, [7, 7, 7, 7], 1),                                 # one repetition goes on
    ([7] * 9, {}, [7, 7, 7, 7], 8),                                # the match overlaps itself
    ([1, 2, 1, 2, 1], {}, [2, 1, 2, 1], 3),
    ([1, 2, 3, 9, 1, 2, 3], {}, [9, 1, 2, 3], 3),
    ([4, 1, 2, 5, 1, 2, 3, 1, 2], dict(min_match=3), [], 2),
    ([1, 2, 3, 4, 5, 3], {}, [4, 5, 3, 4], 1),                     # fewer than gamma follow: copy on
    ([3, 4, 8, 4, 9, 3, 4], {}, [8, 4, 9, 3], 2),                  # the longest suffix wins over the latest
    ([3, 1, 7, 3, 2, 8, 3], {}, [2, 8, 3, 2], 1),                  # of equally long ones, the latest
    ([3, 1, 5, 3, 2, 5, 3], {}, [2, 5, 3, 2], 2),
    ([2, 3, 7, 1, 3, 8, 2, 3, 9, 4, 3], {}, [8, 2, 3, 9], 1),      # ... that matched no longer: not after 2 3
    ([4, 2, 9, 0, 5, 3, 2], dict(boundary=[0]), [9, 0], 1),        # not past the document's end
    ([4, 2, 0, 5, 5, 3, 2], dict(boundary=[0]), [0], 1),
    ([4, 2, 9, 0, 5, 3, 2], {}, [9, 0, 5, 3], 1),
])
def test_suffix_lookup(tokens, options, expected, matched):
    assert looked_up(tokens, **options) == (expected, matched)
    for gamma in (0, 1, 2):
        assert looked_up(tokens, gamma, **options) == (expected[:gamma], matched)
    assert looked_up(np.array(tokens), **options) == (expected, matched)


def test_a_long_match_is_found_whole():
    """What a lookup of n-grams cannot tell apart: the last three tokens agree, the 40 before them do not."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(5, 100, (2, 40)).tolist()
    tokens = [*a, 1, 2, 3, 101, *b, 1, 2, 3, 102, *a, 1, 2, 3]
    assert looked_up(tokens, 1) == ([101], 43)


def test_the_automaton_grows_by_at_most_two_states_a_token_and_reads_each_once():
    """Work, not time: 50,000 tokens, and later proposals that read what is new (Blumer et al.: 2 n - 1 states)."""
    for tokens in (np.random.default_rng(0).integers(300, size=50_000).tolist(), [1, 2] * 2_000):
        tokens, drafter = Counted(tokens), SuffixLookup()
        Counted.reads = 0
        drafter.start(None, None, tokens)
        drafter.propose(tokens, 5)
        assert Counted.reads <= len(tokens) + 5
        assert len(tokens) < len(drafter._next) < 2 * len(tokens)
        assert sum(map(len, drafter._next)) < 3 * len(tokens)
        tokens.extend([7, 8, 9])
        Counted.reads = 0
        drafter.verified(tokens, [], None)
        drafter.propose(tokens, 5)
        assert Counted.reads <= 8
        Counted.reads = 0


def test_a_start_forgets_the_last_run():
    drafter = SuffixLookup()
    speculative_generate(script([1, 2, 3] * 8, V), drafter, [1, 2, 3, 1, 2, 3], 9, 4)
    assert drafter.matched > 0
    drafter.start(None, None, [4, 5, 6, 2])
    assert drafter.matched == 0
    assert drafter.propose([4, 5, 6, 2], 4).tokens == [], "2 is followed by 3 in the last run only"
    drafter.start(None, None, [4, 2, 5, 8, 2])
    assert drafter.propose([4, 2, 5, 8, 2], 3).tokens == [5, 8, 2]


@pytest.mark.parametrize("make", [SuffixLookup, PromptLookup, lambda: PromptLookup(2, 2)])
@quick
@given(start=st.lists(st.integers(0, 2), min_size=1, max_size=8),
       rounds=st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=5), st.integers(0, 5), st.integers(0, 2),
                                 st.booleans()), max_size=8))
def test_a_lookup_grows_with_verified_tokens_only(make, start, rounds):
    """In a cascade it is asked behind tentative text, then told what was verified: that alone it remembers."""
    used, tokens = make(), list(start)
    used.start(None, None, start)
    for tentative, accepted, own, asked in rounds:
        if asked:
            for n in range(len(tentative) + 1):
                used.propose(tokens + tentative[:n], 3)
        tokens += [*tentative[:accepted], own]
        used.verified(tokens, [], None)
        assert_as_fresh(used, make, tokens)


def assert_as_fresh(used, make, tokens):
    fresh = make()
    fresh.start(None, None, tokens)
    assert used.propose(tokens, 4).tokens == fresh.propose(tokens, 4).tokens
    assert getattr(used, "matched", None) == getattr(fresh, "matched", None)


@quick
@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=20), tentative=st.lists(st.integers(0, 2), max_size=6))
def test_behind_tentative_text_the_longest_suffix_found_in_verified_text_is_copied(text, tentative):
    drafter = SuffixLookup()
    drafter.start(None, None, text)
    whole, past = text + tentative, text if tentative else text[:-1]
    draft = drafter.propose(whole, 1).tokens
    longest = next((n for n in range(len(whole), 0, -1) if ends(past, whole[-n:])), 0)
    if longest == 0:
        assert draft == []
    else:
        assert draft[0] in {whole[end] for end in ends(past, whole[-longest:])}


@pytest.mark.parametrize("make", [SuffixLookup, PromptLookup])
def test_a_refused_token_is_neither_copied_nor_missed(make):
    lookup = make()
    lookup.start(None, None, [1, 2, 3])
    lookup.propose([1, 2, 3, 9, 1], 2)                         # behind a text whose 9 1 is tentative
    lookup.verified([1, 2, 3, 7], [], None)                    # 7 came instead, and nothing was asked for a while
    lookup.verified([1, 2, 3, 7, 8, 5], [], None)
    for tokens, copied in (([1, 2, 3, 7, 8, 5, 3], [7, 8]), ([1, 2, 3, 7, 8, 5, 3, 7], [8, 5]),
                           ([1, 2, 3, 7, 8, 5, 3, 9], [])):     # 9 is no more
        assert lookup.propose(tokens, 2).tokens == copied


def test_min_match_below_one_is_refused():
    with pytest.raises(BadInput, match="min_match is 0"):
        SuffixLookup(0)


# -- in the loop ---------------------------------------------------------------------------------------------

def test_a_text_that_repeats_is_copied():
    text = [1, 2, 3, 4, 5] * 8
    tokens, run = speculative_generate(script(text, V), SuffixLookup(), text[:8], 25, 4)
    assert tokens.tolist() == text[:33] and run.alpha == 1 and run.by_source == {"suffix automaton": (20, 20)}


@pytest.mark.parametrize("min_match", [1, 2, 3])
@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_greedy_output_is_that_of_plain_decoding(min_match, gamma):
    for seed in range(8):
        prompt = np.random.default_rng(seed).integers(5, size=6)
        eos, drafter = [4] if seed % 2 else (), SuffixLookup(min_match, boundary=[4])
        plain, _ = autoregressive_generate(random_decoder(5, seed), prompt, 40, eos=eos)
        tokens, run = speculative_generate(random_decoder(5, seed), drafter, prompt, 40, gamma, eos=eos)
        assert tokens.tolist() == plain.tolist()
        assert (run.drafted == 0) == (gamma == 0) or len(plain) < 20


@pytest.mark.parametrize("min_match", [1, 2])
def test_sampled_output_has_the_targets_distribution(min_match):
    prompt, n_new, sampler, logits = [1, 0, 1, 2, 1, 0], 3, Sampler(0.9), table_logits(3, 4)

    def written(rng):
        tokens, _ = speculative_generate(random_decoder(3, 4), SuffixLookup(min_match), prompt, n_new, 2, rng=rng,
                                         sampler=sampler)
        return tuple(tokens[len(prompt):].tolist())

    seen = outcomes(written)
    assert same_distribution(seen, exact(logits, sampler, prompt, n_new))
