"""NgramDrafter: which tier proposes what, when it stops, what it learns from, and lossless runs with it."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console import BadInput
from decode_lab import Sampler, autoregressive_generate, speculative_generate
from lab import toy
from lab.drafters.lookup import PromptLookup, SuffixLookup
from lab.drafters.tiers import NgramDrafter
from lab.measure.enumeration import exact, outcomes, same_distribution
from lab.measure.scripted import ScriptedDrafter, chain, random_decoder, script, table_logits
from lab.ngram.counting import build_table

V = 50
quick = settings(max_examples=60, deadline=None, derandomize=True)


class FakeTable:
    """{context: (successor, count, total)}, with what the drafter asks of a lab.ngram.table.NgramTable."""

    def __init__(self, rows, order=None, vocab_size=V, tokenizer=None, path="fake.ngram"):
        self.rows, self.order = {tuple(context): found for context, found in rows.items()}, order
        self.order = order or len(next(iter(self.rows))) + 1
        self.vocab_size, self.tokenizer, self.path = vocab_size, tokenizer, path

    def best(self, tokens):
        assert all(type(t) is int for t in tokens)
        return self.rows.get(tuple(tokens[1 - self.order:]))


def counted(tokens, order, **options):
    """A table of the n-grams of a list of tokens, the lower id first where counts are equal."""
    rows = {}
    for gram, n in sorted(Counter(zip(*(tokens[i:] for i in range(order)))).items()):
        best, count, total = rows.get(gram[:-1], (0, 0, 0))
        rows[gram[:-1]] = (gram[-1], n, total + n) if n > count else (best, count, total + n)
    return FakeTable(rows, order, **options)


def proposed(tokens, gamma, tables=(), lookup=None, n_ids=V, **options):
    drafter = NgramDrafter(tables, lookup, **options)
    drafter.start(script([0], n_ids), Sampler(), list(tokens))
    draft = drafter.propose(tokens, gamma)
    assert draft.parents is None and draft.q == [None] * len(draft.tokens) and len(draft.tokens) <= gamma
    return list(zip(draft.tokens, draft.sources, strict=True))


SURE = 9, 9                                                    # count and total: a first guess of 0.9


# -- tiers ---------------------------------------------------------------------------------------------------

BIGRAM = FakeTable({(1,): (2, *SURE), (2,): (3, *SURE), (3,): (4, *SURE), (7,): (8, *SURE)})
TRIGRAM = FakeTable({(1, 2): (7, *SURE), (4, 5): (6, *SURE), (7, 8): (9, *SURE)})
FOURGRAM = FakeTable({(5, 1, 2): (11, *SURE), (1, 2, 3): (12, *SURE)})


@pytest.mark.parametrize("tokens, expected", [
    ([5, 1], [(2, "bigram"), (11, "4-gram")]),                 # token by token, behind the draft so far
    ([1], [(2, "bigram"), (7, "trigram"), (8, "bigram"), (9, "trigram")]),
    ([6, 1, 2], [(7, "trigram"), (8, "bigram"), (9, "trigram")]),  # the bigram would have said 3
    ([0, 4, 5], [(6, "trigram")]),
    ([1, 2, 3], [(12, "4-gram")]),
    ([2, 3], [(4, "bigram")]),
    ([30], []),                                                # no entry: no draft, not token 0
])
def test_the_highest_order_that_has_an_entry(tokens, expected):
    for tables in ([BIGRAM, TRIGRAM, FOURGRAM], [FOURGRAM, BIGRAM, TRIGRAM]):
        for price in (0, 0.3):
            assert proposed(tokens, 8, tables, price=price) == expected
    for gamma in (0, 1, 2):
        assert proposed(tokens, gamma, tables) == expected[:gamma]
    assert proposed(np.array(tokens), 8, tables) == expected


def test_the_lookup_comes_first_and_the_tables_go_on_where_it_ends():
    tables = [BIGRAM, TRIGRAM]
    assert proposed([1, 2, 1], 3, tables, SuffixLookup(), price=0) == [(2, "lookup"), (1, "lookup"), (2, "lookup")]
    assert proposed([5, 1], 2, tables, SuffixLookup(), price=0) == [(2, "bigram"), (7, "trigram")], "no match"
    for boundary in ([7], [7, 0]):                             # the copy ends there: 3 4 7, then what follows 7
        assert proposed([1, 3, 4, 7, 9, 1], 5, tables, SuffixLookup(boundary=boundary), price=0) == [
            (3, "lookup"), (4, "lookup"), (7, "lookup"), (8, "bigram"), (9, "trigram")]
    assert proposed([1, 2, 1], 2, [], PromptLookup(), price=0) == [(2, "lookup"), (1, "lookup")]
    assert NgramDrafter(tables).lookup.matched == 0, "by default there is one, that tells its match"


def test_entries_seen_too_seldom_and_ids_that_the_target_lacks_are_no_entries():
    rare = FakeTable({(1, 2): (9, 2, 3), (2, 30): (40, *SURE)})
    tables = [rare, FakeTable({(2,): (30, *SURE), (30,): (3, *SURE), (3,): (50, *SURE)})]
    assert proposed([1, 2], 1, tables, min_count=2) == [(9, "trigram")]
    assert proposed([1, 2], 1, tables, min_count=3) == [(30, "bigram")]
    assert proposed([1, 2], 3, tables, min_count=3) == [(30, "bigram"), (40, "trigram")]
    names = dict(tokenizer="t")
    for n_ids, expected in ((41, [(30, "bigram"), (40, "trigram")]), (40, [(30, "bigram"), (3, "bigram")]), (30, [])):
        drafter = NgramDrafter([FakeTable(t.rows, vocab_size=99, **names) for t in tables], None, min_count=3)
        drafter.start(script([0], n_ids, **names), Sampler(), [1, 2])
        draft = drafter.propose([1, 2], 3)
        assert list(zip(draft.tokens, draft.sources)) == expected, "padded differently, never beyond the target's"


# -- the price -----------------------------------------------------------------------------------------------

LINE = {(i,): (i + 1, *SURE) for i in range(40)}


def best_length(chances, price):
    """How many tokens give the most tokens per step, by trying all: each chance given those before it."""
    reached = np.cumprod(chances)
    rates = [(1 + reached[:n].sum()) / (1 + n * price) for n in range(len(chances) + 1)]
    return int(np.argmax(rates)) if price else len(chances)


def test_the_best_length_by_hand():
    """At price 0.3, two tokens of chance .95 and .6 give 1.575 tokens a step; a third gives less, 1.506."""
    assert best_length([0.95, 0.6, 0.6, 0.6], 0.3) == 2
    rows = {(0,): (1, 19, 19), (1,): (2, 12, 19), (2,): (3, 12, 19), (3,): (4, 12, 19)}
    assert [rows[0,][1] / 20, rows[1,][1] / 20] == [0.95, 0.6]
    assert len(proposed([0], 4, [FakeTable(rows)], price=0.3)) == 2


@quick
@given(counts=st.lists(st.integers(1, 19), min_size=1, max_size=10), price=st.floats(0.001, 1))
def test_a_token_is_drafted_while_it_raises_the_tokens_per_step(counts, price):
    counts = sorted(counts, reverse=True)                    # falling chances: stopping at the first loss is best
    table = FakeTable({(i,): (i + 1, count, 19) for i, count in enumerate(counts)})
    assert len(proposed([0], 10, [table], price=price)) == best_length([count / 20 for count in counts], price)


@pytest.mark.parametrize("price", [0.0, 0.02, 0.1, 0.5, 0.89, 0.91])
def test_a_token_is_drafted_while_all_up_to_it_are_likely_enough(price):
    assert len(proposed([0], 12, [FakeTable(LINE)], price=price)) == best_length([0.9] * 12, price)


@pytest.mark.parametrize("price", [0.0, 0.05, 0.09, 0.16, 0.3, 0.34])
def test_a_copy_is_trusted_by_its_length(price):
    """1/3, 2/4, 3/5, ... behind a match of one token; a longer match begins further on."""
    lookup = SuffixLookup()
    n = best_length([i / (i + 2) for i in range(1, 7)], price)
    if price == 0.34:
        assert n == 0
    assert len(proposed([1, 2, 3, 4, 5, 1], 6, [], lookup, price=price)) == n and lookup.matched == 1
    assert len(proposed([*range(20), 30, *range(20)], 6, [], SuffixLookup(), price=0.7)) == best_length(
        [i / (i + 2) for i in range(20, 26)], 0.7)
    assert len(proposed([1, 2, 3, 4, 5, 1], 6, [], PromptLookup(), price=price)) == n, "one that tells no length: 1"


def test_a_copy_that_is_not_worth_it_leaves_the_word_to_the_tables():
    tokens = [1, 5, 1]
    assert proposed(tokens, 2, [BIGRAM], SuffixLookup(), price=0.4) == [(2, "bigram"), (3, "bigram")]
    assert proposed(tokens, 2, [BIGRAM], SuffixLookup(), price=0.3) == [(5, "lookup")]


def play(drafter, text, start, n, gamma=4, reset=True):
    """n rounds on a known text, that grows as the loop does -> (what was drafted in each, the length at the end)."""
    target, drafts, tokens = script([0], V), [], list(text[:start])
    if reset:
        drafter.start(target, Sampler(), tokens)
    for _ in range(n):
        draft = drafter.propose(tokens, gamma).tokens
        right = next((i for i, t in enumerate(draft) if t != text[len(tokens) + i]), len(draft))
        tokens = list(text[:len(tokens) + right + 1])
        drafter.verified(tokens, [], None)
        drafts.append(draft)
    return drafts, len(tokens)


def test_what_is_never_accepted_is_given_up_and_tried_again_seldom():
    wrong = FakeTable({(i,): ((i + 2) % 40, *SURE) for i in range(40)})
    text = [i % 40 for i in range(3000)]
    drafted = {}
    for discount in (0.9, 0.98, 1):
        drafts, _ = play(NgramDrafter([wrong], None, price=0.1, discount=discount, weight=1), text, 1, 1000)
        lengths = drafted[discount] = [len(d) for d in drafts]
        assert lengths[:2] == [4, 2] and max(lengths[2:]) == 1
    # 8 tests bring 0.9 down to 0.1; so many are remembered where one round in 8 * (1 - discount) is a test.
    assert 0.7 < sum(drafted[0.9][200:]) / 800 < 0.9 and 0.14 < sum(drafted[0.98][200:]) / 800 < 0.18
    assert not any(drafted[1][9:]), "who forgets nothing stays away"
    always, _ = play(NgramDrafter([wrong], None, price=0), text, 1, 50)
    assert {len(d) for d in always} == {4}, "a price of 0 drafts always"


def test_it_comes_back_when_the_text_turns_and_stays():
    table = FakeTable({(i,): ((i + 1) % 40, *SURE) for i in range(40)})
    text = [0, 5] * 300 + [i % 40 for i in range(3000)]
    drafter = NgramDrafter([table], None, price=0.1)
    at = play(drafter, text, 1, 600)[1]
    drafts, _ = play(drafter, text, at, 150, reset=False)
    assert len(drafts[-1]) == 4 and sum(map(len, drafts[50:])) > 350


def test_only_tested_tokens_teach():
    """Trigrams are refused, each time before the bigram behind them is tested: it keeps its first guess."""
    tables = [FakeTable({(1, 2): (3, 8, 9), (2, 3): (4, *SURE)}), FakeTable({(4,): (5, 9, 12), (1,): (2, 9, 12)})]
    drafter = NgramDrafter(tables, None, price=0.3, discount=1)
    drafter.start(script([0], V), Sampler(), [0])
    assert drafter.propose([1, 2], 3).sources == ["trigram", "trigram", "bigram"]
    for _ in range(4):
        drafter.verified([1, 2, 9], [], None)
        drafter.propose([1, 2], 3)
    assert drafter.propose([1, 2], 3).tokens == []
    assert drafter.propose([1], 1).tokens == [2], "9 / 13 is above 0.3 still"


def test_each_kind_has_its_own_chance():
    """A row of 4/10 is refused, and rows of a quarter to a half are given up, as 0.4 / 2 is below the price. One of
    5/10 would be too, were it of that kind. The same for copies: those behind one token, and those behind two."""
    rows = FakeTable({(1,): (2, 4, 9), (3,): (4, 5, 9), (5,): (6, 3, 9)})
    drafter = NgramDrafter([rows], None, price=0.3, discount=1)
    drafter.start(script([0], V), Sampler(), [0])
    assert [drafter.propose([t], 1).tokens for t in (3, 5, 1)] == [[4], [6], [2]]
    drafter.verified([1, 9], [], None)
    assert [drafter.propose([t], 1).tokens for t in (3, 5, 1)] == [[4], [], []]
    lookup = SuffixLookup()
    drafter = NgramDrafter(lookup=lookup, price=0.3, discount=1)
    drafter.start(script([0], V), Sampler(), [1, 2, 1])
    assert drafter.propose([1, 2, 1], 1).tokens == [2]
    drafter.verified([1, 2, 1, 9], [], None)
    assert drafter.propose([1, 2, 1, 9, 2], 1).tokens == [], "a match of one token"
    assert drafter.propose([1, 2, 1, 9, 2, 1], 1).tokens == [9], "of two"


@pytest.mark.parametrize("weight, n", [(0.5, 1), (1, 2), (3, 4), (9, 10)])
def test_the_weight_of_the_first_guess(weight, n):
    """Given up below half the first guess: after more than `weight` tests."""
    drafter = NgramDrafter([FakeTable({(0,): (1, *SURE)})], None, price=0.4499, discount=1, weight=weight)
    drafter.start(script([0], V), Sampler(), [0])
    for _ in range(n):
        assert drafter.propose([0], 1).tokens == [1]
        drafter.verified([0, 9], [], None)
    assert drafter.propose([0], 1).tokens == []


def test_tokens_cut_off_by_the_end_teach_nothing_and_each_draft_is_read_once():
    table = FakeTable({(i,): (i + 1, 9, 12) for i in range(12)})           # first guesses of 9/13, one kind
    drafter = NgramDrafter([table], None, price=0.3, discount=1)
    drafter.start(script([0], V), Sampler(), [0])
    assert len(drafter.propose([0], 9).tokens) == best_length([9 / 13] * 9, 0.3) > 1
    drafter.verified([0, 1], [], None)                                     # the budget ended behind the first of them
    drafter.verified([0, 1, 9, 9, 9], [], None)                            # a round without a draft
    guess = (1 + 9 / 13) / 2                                               # one test, kept
    assert len(drafter.propose([0], 9).tokens) == best_length([guess] * 9, 0.3)


def test_a_start_forgets_and_repeats():
    text = ([0, 5] * 30 + list(range(20)) * 3) * 3
    drafter = NgramDrafter([FakeTable(LINE), counted(text, 3)], price=0.1)
    first = play(drafter, text, 9, 40)
    assert play(drafter, text, 9, 40) == first and any(first[0])
    wrong = NgramDrafter([FakeTable({(i,): (i + 2, *SURE) for i in range(20)})], None, price=0.1)
    for _ in range(2):
        drafts, _ = play(wrong, list(range(40)), 1, 6)
        assert len(drafts[0]) == 4 and len(drafts[-1]) == 1


def test_a_lookup_that_draws_keeps_its_distributions():
    q = np.full(V, 1 / V)
    drafter = NgramDrafter([BIGRAM], ScriptedDrafter(lambda tokens, gamma: chain([1], [q])), price=0)
    drafter.start(script([0], V), Sampler(1.0), [0])
    draft = drafter.propose([5, 6], 2)
    assert draft.tokens == [1, 2] and draft.q[0] is q and draft.q[1] is None


def test_the_lookup_is_told_what_was_kept():
    lookup = ScriptedDrafter(lambda tokens, gamma: [])
    drafter = NgramDrafter([BIGRAM], lookup)
    tokens, run = speculative_generate(script([1, 2, 3, 4, 5, 6, 7], V), drafter, [1], 5, 2)
    assert len(lookup.prompts) == 1 and lookup.told[-1] == tokens.tolist() and len(lookup.told) == len(run.rounds)


# -- misuse --------------------------------------------------------------------------------------------------

def test_a_table_of_another_tokenizer_is_refused_before_the_first_forward():
    table = counted([1, 2, 3], 2, tokenizer="theirs", path="other.ngram")
    for target, message in ((script([1] * 9, V, tokenizer="ours"), "other.ngram and fake have different tokenizers"),
                            (script([1] * 9, V + 1), "other.ngram has a vocabulary of 50 and fake of 51")):
        with pytest.raises(BadInput, match=message):
            speculative_generate(target, NgramDrafter([table]), [1, 2], 3, 2)
        assert target.forwards == 0
    same = script(range(9), V + 14, tokenizer="theirs")
    assert speculative_generate(same, NgramDrafter([table]), [0, 1], 3, 2)[0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("options, named", [
    (dict(price=-0.1), "price is -0.1"), (dict(price=1.5), "price is 1.5"), (dict(price=float("nan")), "price is nan"),
    (dict(discount=0), "discount is 0"), (dict(discount=1.1), "discount is 1.1"), (dict(weight=0), "weight is 0"),
    (dict(min_count=0), "min_count is 0"), (dict(lookup=None, name="mine"), "mine has neither"),
])
def test_impossible_values_are_one_sentence(options, named):
    with pytest.raises(BadInput, match=named):
        NgramDrafter(**options)


# -- in the loop ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("gamma", [0, 1, 5])
@pytest.mark.parametrize("price", [0, 0.1])
def test_greedy_output_is_that_of_plain_decoding(gamma, price):
    for seed in range(6):
        rng = np.random.default_rng(seed)
        prompt, known = rng.integers(5, size=6), rng.integers(5, size=60).tolist()
        eos = [4] if seed % 2 else ()
        drafter = NgramDrafter([counted(known, n, vocab_size=5) for n in (2, 3)], price=price)
        plain, _ = autoregressive_generate(random_decoder(5, seed), prompt, 40, eos=eos)
        tokens, run = speculative_generate(random_decoder(5, seed), drafter, prompt, 40, gamma, eos=eos)
        assert tokens.tolist() == plain.tolist()
        assert (run.drafted == 0) == (gamma == 0) or len(plain) < 20


@pytest.mark.parametrize("price", [0, 0.3])
@pytest.mark.parametrize("lookup", ["suffixes", None])
def test_sampled_output_has_the_targets_distribution(lookup, price):
    """Every way that the draws can fall is summed; what was refused in one round changes what the next one drafts."""
    prompt, n_new, sampler = [1, 0, 1, 2, 1], 4, Sampler(0.9)
    tables, rounds = [counted([0, 1, 0, 1, 2, 2, 0, 1], n, vocab_size=3) for n in (2, 3)], set()

    def written(rng):
        tokens, run = speculative_generate(random_decoder(3, 4), NgramDrafter(tables, lookup, price=price), prompt,
                                           n_new, 2, rng=rng, sampler=sampler)
        rounds.add(tuple(r.drafted for r in run.rounds))
        return tuple(tokens[len(prompt):].tolist())

    seen = outcomes(written)
    assert same_distribution(seen, exact(table_logits(3, 4), sampler, prompt, n_new))
    assert len(rounds) > 3 and any(sum(r) > 1 for r in rounds)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Bigram and trigram of the toy's first thousands of held-out characters of code and prose."""
    texts, folder = [toy.encode(toy.heldout(kind)[:20_000]) for kind in ("code", "prose")], tmp_path_factory.mktemp("t")
    made = [build_table(folder / f"{order}.ngram", (np.array(text, np.uint32) for text in texts), order=order, top_k=2,
                        vocab_size=toy.tokenizer().get_vocab_size(), tokenizer=toy.tokenizer_id()) for order in (2, 3)]
    yield made
    for table in made:
        table.close()


@pytest.mark.parametrize("kind", ["code", "prose"])
def test_the_trained_toy_writes_the_same_text_and_each_token_tells_its_tier(tables, kind):
    prompt = toy.encode(toy.heldout(kind)[30_000:30_300])
    plain, _ = autoregressive_generate(toy.load("small"), prompt, 80)
    for price in (0, 0.05):
        drafter = NgramDrafter(tables, price=price)
        tokens, run = speculative_generate(toy.load("small"), drafter, prompt, 80, 6)
        assert tokens.tolist() == plain.tolist()
        assert set(run.by_source) == {"lookup", "trigram", "bigram"} and run.accepted > 10
        assert sum(accepted for _, accepted in run.by_source.values()) == run.accepted
        assert sum(tested for tested, _ in run.by_source.values()) == sum(r.tested for r in run.rounds)
