"""The contract of `decode_lab.Decoder`, over every implementation in the registry."""

from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest

from decode_lab import autoregressive_generate, prefill, speculative_generate, tree_generate
from lab.drafters.lookup import PromptLookup
from lab.measure.scripted import ScriptedDrafter, tree
from registry import DECODERS, names


@pytest.fixture(params=names(DECODERS))
def case(request):
    return DECODERS[request.param]


@pytest.fixture
def limited(case):
    if case.limit is None:
        pytest.skip("this model has no limit")
    return case.limit()


def ids(model, n, seed=0):
    return np.random.default_rng(seed).integers(model.vocab_size, size=n).tolist()


def close(case, got, want):
    """Equal to rounding; parts of the spread, as a wrong key moves logits by a tenth of it."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    finite = np.isfinite(want)
    assert (np.isfinite(got) == finite).all()
    worst, spread = np.abs(got - want)[finite].max(initial=0.0), want[finite].std()
    assert spread > 0 and worst <= case.tolerance * spread, f"{worst:.2e} apart, spread {spread:.2e}"


def plain(case, text):
    """Logits (n, V) of a fresh decoder that is sent the text in one piece."""
    return _plain(case, tuple(int(t) for t in text))


@lru_cache(maxsize=4096)
def _plain(case, text):
    return np.asarray(case.make().send(list(text))).copy()


def after(case, text):
    """The row behind a text, from a fresh decoder."""
    return plain(case, text)[-1]


def lengths(model):
    return model.length, model.committed


def paths_of(parents):
    """Of each node, the nodes from the root to it."""
    paths = []
    for i, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), i])
    return paths


TREES = {
    "root alone": [-1], "chain": [-1, 0, 1, 2], "width 4": [-1] * 4, "two branches": [-1, -1, 0, 1, 2, 3],
    "ragged": [-1, 0, 0, 1, 3, 2, -1, 6, 4], "late root": [-1, 0, 1, -1, 3, 2],
}


# -- one forward, several ways -------------------------------------------------------------------------------

def test_the_logits_say_something(case):
    """Else all the equalities below would hold of a model of zeros."""
    model = case.make()
    text = ids(model, 20)
    rows = plain(case, text)
    rows = np.where(np.isfinite(rows), rows, -9.0)
    assert rows.std() > 0.05 and len(set(rows.argmax(-1).tolist())) > 2
    if case.reads_all:
        other = [(text[0] + 1) % model.vocab_size, *text[1:]]
        assert np.abs(plain(case, other)[4] - rows[4]).max() > 10 * case.tolerance * rows.std(), "an early token shows"


@pytest.mark.parametrize("pieces", [[40], [1] * 40, [1, 2, 30, 1, 6], [39, 1]])
@pytest.mark.parametrize("committing", [False, True])
def test_a_chain_in_pieces_is_one_chain(case, pieces, committing):
    model, at, rows = case.make(), 0, []
    text = ids(model, 40)
    for n in pieces:
        rows.append(np.asarray(model.send(text[at:at + n])))
        at += n
        if committing:
            model.commit(range(n))
        assert lengths(model) == (at, at if committing else 0)
    close(case, np.concatenate(rows), plain(case, text))


def test_a_cache_that_grows_loses_no_row(case):
    """Past the rows that a cache begins with: 64 in the toy, 256 in the real decoder."""
    model = case.make()
    n = min(getattr(model, "max_length", None) or 300, 300)
    text, cuts = ids(model, n), [0, n // 30, 2 * n // 3, 2 * n // 3 + 1, n - 1, n]
    rows = []
    for a, b in pairwise(cuts):
        rows.append(np.asarray(model.send(text[a:b])))
        model.commit(range(b - a))
    close(case, np.concatenate(rows), plain(case, text))


def test_a_chain_may_be_sent_as_nodes_with_parents(case):
    model = case.make()
    text = ids(model, 12)
    rows = [np.asarray(model.send(text[:5], range(-1, 4))), np.asarray(model.send(text[5:9])),
            np.asarray(model.send(text[9:], [8, 9, 10]))]
    close(case, np.concatenate(rows), plain(case, text))
    assert lengths(model) == (12, 0)
    model.commit(range(12))
    close(case, model.send(text[:2]), plain(case, text + text[:2])[-2:])


@pytest.mark.parametrize("shape", TREES)
def test_a_node_is_a_forward_on_its_path(case, shape):
    """Behind committed tokens: each node sees these and its ancestors, at its parent's position plus one."""
    model, parents = case.make(), TREES[shape]
    text, nodes = ids(model, 9), ids(model, len(parents), 1)
    prefill(model, text)
    rows = np.asarray(model.send(nodes, parents))
    assert lengths(model) == (9 + len(parents), 9)
    for row, path in zip(rows, paths_of(parents)):
        close(case, row, after(case, text + [nodes[i] for i in path]))


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("parts", [2, 3])
def test_a_tree_behind_a_pending_chain_in_several_calls(case, shape, parts):
    """The chain's tokens are nodes too: a tree behind it, cut anywhere, is the tree sent at once."""
    parents = [-1, 0, 1] + [p + 3 if p >= 0 else 2 for p in TREES[shape]]
    for first in range(3, len(parents)):
        model = case.make()
        text, nodes = ids(model, 7), ids(model, len(parents), 2)
        prefill(model, text)
        cuts = [0, 3, first, len(parents)] if parts == 3 else [0, first, len(parents)]
        rows = []
        for a, b in pairwise(cuts):
            if a < b:
                rows += list(np.asarray(model.send(nodes[a:b], None if a == 0 and b == 3 else parents[a:b])))
        for row, path in zip(rows, paths_of(parents)):
            close(case, row, after(case, text + [nodes[i] for i in path]))
        assert lengths(model) == (7 + len(parents), 7)


def test_the_check_at_load_finds_trees_right_where_they_are(case):
    """Where a mask, a position or a commit of a tree is wrong it sends paths, which are right: it shows here alone."""
    if case.as_paths is None:
        pytest.skip("it has no two ways to send a tree")
    model = case.make()
    assert model.tree_as_paths == case.as_paths
    prefill(model, ids(model, 5))
    model.send(ids(model, 4, 1), [-1, -1, 0, 0])
    assert model.cache.rows == 5 + (0 if case.as_paths else 4)


def test_a_tree_on_an_empty_cache(case):
    model, parents = case.make(), TREES["ragged"]
    nodes = ids(model, len(parents), 3)
    for row, path in zip(np.asarray(model.send(nodes, parents)), paths_of(parents)):
        close(case, row, after(case, [nodes[i] for i in path]))


def test_siblings_may_be_the_same_token(case):
    model = case.make()
    text, (a, b) = ids(model, 5), ids(model, 2, 4)
    prefill(model, text)
    rows = np.asarray(model.send([a, a, b, b], [-1, -1, 0, 1]))
    close(case, rows[1], rows[0])
    close(case, rows[3], rows[2])
    model.commit([1, 3])
    close(case, model.send([b]), plain(case, [*text, a, b, b])[-1:])


# -- commit ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape", TREES)
def test_a_committed_path_goes_on_as_a_fresh_decoder(case, shape):
    """Every path, the empty one too, and twice in a row: what follows is as if nothing else had been sent."""
    parents = TREES[shape]
    for path in [[], *paths_of(parents)]:
        model = case.make()
        text = ids(model, 6)
        prefill(model, text)
        for seed in (5, 6):
            nodes = ids(model, len(parents), seed)
            model.send(nodes, parents)
            model.commit(path)
            text = text + [nodes[i] for i in path]
            assert lengths(model) == (len(text), len(text))
        end = ids(model, 3, 7)
        close(case, model.send(end), plain(case, text + end)[-3:])


def test_nodes_may_come_as_a_range_an_array_or_numpy_numbers(case):
    model = case.make()
    text = ids(model, 8)
    for nodes in (range(2), np.arange(2), [np.int64(0), np.int64(1)]):
        at = model.length
        model.send(np.array(text[at:at + 2]), np.array([-1, 0]))
        model.commit(nodes)
    close(case, model.send(text[6:]), plain(case, text)[6:])


def test_commit_of_nothing_drops_what_was_sent(case):
    model = case.make()
    text = ids(model, 8)
    prefill(model, text[:4])
    model.send(ids(model, 3, 1))
    model.commit([])
    assert lengths(model) == (4, 4)
    close(case, model.send(text[4:]), plain(case, text)[4:])


def test_prefill_is_send_and_commit(case):
    model = case.make()
    text = ids(model, 20)
    for a, b in ((0, 1), (1, 9), (9, 15)):
        prefill(model, text[a:b])
        assert lengths(model) == (b, b)
    prefill(model, [])
    assert lengths(model) == (15, 15)
    close(case, model.send(text[15:]), plain(case, text)[15:])


def test_a_prefill_behind_what_is_not_committed_is_refused(case):
    model = case.make()
    if not hasattr(model, "prefill"):
        pytest.skip("it has no prefill of its own")
    text = ids(model, 8)
    model.send(text[:3])
    model.commit(range(2))
    model.send(text[2:4])
    with pytest.raises(case.refusal):
        model.prefill(text[4:6])
    assert lengths(model) == (4, 2)
    close(case, model.send(text[4:]), plain(case, text)[4:])


# -- rewind ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("sent", ["chain", "tree"])
def test_rewind_to_any_length_that_is_not_committed(case, sent):
    parents = [-1, 0, 1, 2, 3] if sent == "chain" else [-1, 0, -1, 2, 1]
    for left in range(6):
        model = case.make()
        text, nodes = ids(model, 6), ids(model, 5, 1)
        prefill(model, text)
        model.send(nodes, None if sent == "chain" else parents)
        model.rewind(6 + left)
        assert lengths(model) == (6 + left, 6)
        more = ids(model, 2, 2)                                # two more nodes, behind the last one that is left
        rows = np.asarray(model.send(more, [left - 1, left]))
        path = [nodes[i] for i in paths_of(parents)[left - 1]] if left else []
        close(case, rows, plain(case, text + path + more)[-2:])
        model.commit([*(paths_of(parents)[left - 1] if left else []), left, left + 1])
        close(case, model.send(more), plain(case, text + path + more + more)[-2:])


def test_rewind_to_nothing_from_everywhere(case):
    model = case.make()
    text, other = ids(model, 9), ids(model, 9, 1)
    for prepare in (lambda: None, lambda: prefill(model, text), lambda: model.send(text),
                    lambda: (prefill(model, text), model.send(text[:3], [-1, -1, 0]))):
        prepare()
        model.rewind(0)
        assert lengths(model) == (0, 0)
        close(case, model.send(other), plain(case, other))
        model.rewind(0)


def test_rewind_goes_as_far_as_it_says_and_no_further(case):
    """From rewind_floor (without it: committed) to length, and 0; all else is refused and changes nothing."""
    for to in range(-1, 13):
        model = case.make()
        text = ids(model, 10)
        prefill(model, text[:6])
        model.send(text[6:])
        floor = getattr(model, "rewind_floor", model.committed)
        if to == 0 or max(floor, 0) <= to <= 10:
            model.rewind(to)
            assert lengths(model) == (to, min(to, 6))
            more = ids(model, 3, 3)
            close(case, model.send(more), plain(case, text[:to] + more)[to:])
        else:
            with pytest.raises(case.refusal):
                model.rewind(to)
            assert lengths(model) == (10, 6)
            close(case, model.send(text[:2]), plain(case, text + text[:2])[-2:])


def test_after_a_rewind_to_nothing_there_is_nothing_to_go_back_to(case):
    model = case.make()
    text = ids(model, 8)
    prefill(model, text)
    model.rewind(0)
    with pytest.raises(case.refusal):
        model.rewind(4)
    assert lengths(model) == (0, 0)
    close(case, model.send(text[::-1]), plain(case, text[::-1]))


# -- what cannot be --------------------------------------------------------------------------------------------

def assert_unchanged(case, call):
    """The call is refused, and the decoder then goes on as if it had not been made."""
    model = case.make()
    text, nodes = ids(model, 6), ids(model, 3, 1)
    prefill(model, text)
    model.send(nodes, [-1, 0, -1])
    with pytest.raises(case.refusal):
        call(model)
    assert lengths(model) == (9, 6)
    close(case, model.send([nodes[0]], [1]), plain(case, [*text, nodes[0], nodes[1], nodes[0]])[-1:])
    model.commit([0, 1, 3])
    close(case, model.send(text), plain(case, [*text, nodes[0], nodes[1], nodes[0], *text])[-6:])


@pytest.mark.parametrize("nodes", [[1], [0, 2], [1, 0], [0, 0], [0, 1, 2], [3], [-1], [2, 1]])
def test_a_commit_of_what_is_no_path_is_refused(case, nodes):
    assert_unchanged(case, lambda model: model.commit(nodes))


@pytest.mark.parametrize("tokens, parents", [
    ([], None), ([], []), ([1.5], None), (["V"], None), ([-1], None), ([0, 1, "V"], None), ([0, -1], [-1, 3]),
    ([1], []), ([1, 0], [-1]), ([1], [0, 1]), ([1], [3]), ([1, 0], [4, -1]), ([1], [-2]), ([1, 0], [-1, 5])])
def test_tokens_and_parents_that_cannot_be_sent_are_refused(case, tokens, parents):
    assert_unchanged(case, lambda model: model.send([model.vocab_size if t == "V" else t for t in tokens], parents))


def test_ids_that_cannot_be_prefilled_are_refused(case):
    model = case.make()
    if not hasattr(model, "prefill"):
        pytest.skip("it has no prefill of its own")
    text = ids(model, 6)
    prefill(model, text)
    for bad in ([model.vocab_size], [0, -1]):
        for empty in (False, True):
            if empty:
                model.rewind(0)
                bad = text[:2] + bad
            with pytest.raises(case.refusal):
                model.prefill(bad)
            assert lengths(model) == ((0, 0) if empty else (6, 6))
        prefill(model, text)
    close(case, model.send(text[:3]), plain(case, text + text[:3])[-3:])


# -- the context -----------------------------------------------------------------------------------------------

def test_the_context_can_be_filled_and_not_overfilled(limited, case):
    """12 tokens, on every path; what does not fit is refused before anything changes."""
    text = ids(limited, 14)
    paths = {
        "a chain": lambda: limited.send(text[8:13]),
        "a tree by its depth": lambda: limited.send(text[:6], [-1, 0, 1, 2, 3, -1]),
        "a node behind the last": lambda: (limited.send(text[8:12]), limited.send(text[12:13], [3])),
    }
    if hasattr(limited, "prefill"):
        paths["a prefill"] = lambda: limited.prefill(text[8:13])
    for name, overfill in paths.items():
        limited.rewind(0)
        prefill(limited, text[:8])
        with pytest.raises(case.refusal):
            overfill()
        assert lengths(limited) == (12 if "last" in name else 8, 8), name
        limited.rewind(8)
        close(case, limited.send(text[8:12]), plain(case, text[:12])[8:])


def test_a_wide_tree_needs_room_for_its_depth_alone(limited, case):
    text, parents = ids(limited, 10), [-1, -1, -1, 0, 0, 1]
    nodes = ids(limited, 6, 1)
    prefill(limited, text)
    for row, path in zip(np.asarray(limited.send(nodes, parents)), paths_of(parents)):
        close(case, row, after(case, text + [nodes[i] for i in path]))
    limited.commit([0, 4])
    assert lengths(limited) == (12, 12)


def test_an_empty_cache_can_be_overfilled_no_more_than_a_full_one(limited, case):
    text = ids(limited, 13)
    for call in (limited.send, getattr(limited, "prefill", limited.send)):
        with pytest.raises(case.refusal):
            call(text)
        assert lengths(limited) == (0, 0)
    close(case, limited.send(text[:12]), plain(case, text[:12]))


# -- hidden states ---------------------------------------------------------------------------------------------

def test_hidden_has_a_row_per_token_sent(case):
    model, fresh = case.make(), case.make()
    if not hasattr(model, "hidden"):
        pytest.skip("it has no hidden states")
    text, parents = ids(model, 9), [-1, -1, 0, 2]
    prefill(model, text[:5])
    model.send(text[5:])
    assert len(model.hidden) == 4
    chain = np.asarray(model.hidden).copy()
    fresh.send(text)
    close(case, chain, np.asarray(fresh.hidden)[5:])
    model.commit(range(4))
    nodes = ids(model, 4, 1)
    model.send(nodes, parents)
    assert len(model.hidden) == 4
    want = []
    for path in paths_of(parents):
        fresh.rewind(0)
        fresh.send(text + [nodes[i] for i in path])
        want.append(np.asarray(fresh.hidden)[-1])
    close(case, model.hidden, want)


# -- in every loop ---------------------------------------------------------------------------------------------

def test_it_runs_in_every_loop(case):
    """Plain, over a chain, over a tree, with a drafter that knows the text in part: the same text."""
    model = case.make()
    prompt = ids(model, 4)
    text = autoregressive_generate(model, prompt, 20)[0].tolist()

    def right(tokens, gamma):
        return [t if at % 5 else (t + 1) % model.vocab_size
                for at, t in enumerate(text[len(tokens):len(tokens) + gamma], len(tokens))]

    def branches(tokens, gamma):
        line = right(tokens, gamma)
        return tree([0, *line], [-1, -1, *range(1, len(line))]) if line else tree([], [])

    for drafter in (ScriptedDrafter(right), PromptLookup()):
        assert speculative_generate(model, drafter, prompt, 20, 3)[0].tolist() == text
    tokens, run = speculative_generate(model, ScriptedDrafter(branches), prompt, 20, 3)
    assert tokens.tolist() == text and (run.accepted > 5 or len(set(text)) < 3)
    assert tree_generate(model, ScriptedDrafter(branches), prompt, 20)[0].tolist() == text
    assert lengths(model) == (23, 23)
