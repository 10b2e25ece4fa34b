"""The numpy transformer against itself: cached, uncached, as a tree."""

import numpy as np
import pytest
import threadpoolctl

from console import BadInput
from lab.models.pending import Pending
from lab.toy.cache import KVCache
from lab.toy.transformer import TransformerLM, config_like, generate_batch, init_params, truncate
from toys import MODELS, TINY, branches, close, path_to, random_lm, text_for

# -- one forward, three ways ---------------------------------------------------------------------------------

@pytest.mark.parametrize("pieces", [[70], [1] * 70, [1, 2, 3, 30, 1, 33], [64, 1, 5]])
def test_cached_equals_uncached(lm, pieces):
    """However the text is cut into forwards; 70 tokens cross the cache's first growth."""
    text = text_for(lm, 70)
    want, at, got = lm.full_logits(text[None])[0], 0, []
    for n in pieces:
        got.append(lm.send(text[at:at + n]))
        at += n
        assert lm.length == at and lm.hidden.shape == (n, lm.config.hidden)
    close(np.concatenate(got), want)


def test_prefill_is_send_and_commit_without_logits(lm):
    text = text_for(lm, 30)
    assert lm.prefill(text[:20]) is None and lm.length == lm.committed == 20
    close(lm.send(text[20:]), lm.full_logits(text[None])[0, 20:])


def test_batched_equals_single(lm):
    batch = np.stack([text_for(lm, 25, seed) for seed in range(3)])
    batch[1] = batch[1][::-1]
    together = lm.full_logits(batch)
    assert together.shape == (3, 25, lm.vocab_size)
    for row, text in zip(together, batch):
        close(row, lm.full_logits(text[None])[0])
    assert lm.length == 0, "full_logits leaves the cache alone"


def test_no_token_sees_what_follows_it(lm):
    text = text_for(lm, 30)
    other = text.copy()
    other[20:] = other[20:][::-1]
    a, b = lm.full_logits(np.stack([text, other]))
    close(a[:20], b[:20])
    assert np.abs(a[21:] - b[21:]).max() > 0.1


@pytest.mark.parametrize("shape", ["random", "width 4", "chain", "root alone", "duplicate siblings"])
def test_tree_nodes_equal_separate_forwards_on_their_paths(lm, shape):
    """Each node sees the sequence and its ancestors, at the position that is its depth."""
    parents = {"random": branches(12, 3), "width 4": [-1] * 4, "chain": [-1, 0, 1, 2, 3], "root alone": [-1],
               "duplicate siblings": [-1, 0, 0, 1, 2]}[shape]
    text, tokens = text_for(lm, 61), text_for(lm, 90)[-len(parents):].copy()
    if shape == "duplicate siblings":
        tokens[2], tokens[4] = tokens[1], tokens[3]
    lm.prefill(text)
    got = lm.send(tokens, parents)
    assert lm.committed == 61 and lm.length == 61 + len(parents) and lm.hidden.shape[0] == len(parents)
    for i, row in enumerate(got):
        alone = np.concatenate([text, tokens[path_to(i, parents)]])
        close(row, lm.full_logits(alone[None])[0, -1])
    if shape == "duplicate siblings":
        close(got[2], got[1])
        close(got[4], got[3])


def test_a_tree_sent_level_by_level_equals_one_sent_at_once(lm):
    text, parents = text_for(lm, 20), [-1, -1, 0, 0, 1, 2, 4]
    tokens = text_for(lm, 60)[-7:]
    lm.prefill(text)
    once = lm.send(tokens, parents)
    lm.rewind(20)
    pieces = [lm.send(tokens[a:b], parents[a:b]) for a, b in ((0, 2), (2, 5), (5, 7))]
    close(np.concatenate(pieces), once)
    lm.commit([0, 2, 5])
    alone = np.concatenate([text, tokens[[0, 2, 5]], text[:4]])
    close(lm.send(text[:4]), lm.full_logits(alone[None])[0, -4:])


@pytest.mark.parametrize("seed", range(4))
def test_the_compacted_cache_equals_plain_decodings(lm, seed):
    """Keep a path of a random tree, twice, then the sequence goes on: keys, values and logits."""
    plain = TransformerLM(lm.params, lm.config)
    text, parents = text_for(lm, 50), branches(9, seed)
    tokens = text_for(lm, 80)[-9:]
    lm.prefill(text)
    sequence = list(text)
    for _ in range(2):
        lm.send(tokens, parents)
        path = path_to(int(np.random.default_rng(seed).integers(3, 9)), parents)
        lm.commit(path)
        sequence += tokens[path].tolist()
        assert lm.length == len(sequence)
    plain.prefill(sequence)
    close(lm.cache.k[..., :lm.length, :], plain.cache.k[..., :lm.length, :])
    close(lm.cache.v[..., :lm.length, :], plain.cache.v[..., :lm.length, :])
    close(lm.send(text[:3]), plain.send(text[:3]))


@pytest.mark.parametrize("to", [0, 1, 40, 69, 70])
def test_rewind_forgets_what_follows_in_every_layer(lm, to):
    text = text_for(lm, 90)
    lm.prefill(text[:70])
    lm.rewind(to)
    assert lm.length == to
    other = text[::-1][:12]
    close(lm.send(other), lm.full_logits(np.concatenate([text[:to], other])[None])[0, to:])


def test_rewind_and_commit_of_nothing_forget_a_pending_tree(lm):
    text = text_for(lm, 20)
    for forget in (lambda: lm.rewind(10), lambda: lm.commit([])):
        lm.rewind(0)
        lm.prefill(text[:10])
        lm.send(text[15:18], [-1, 0, 0])
        forget()
        assert lm.length == 10
        close(lm.send(text[10:]), lm.full_logits(text[None])[0, 10:])


def test_the_cache_grows_by_doubling_and_reports_its_bytes():
    lm = random_lm()
    text, sizes = text_for(lm, 96), []
    for t in text:
        lm.prefill([t])
        sizes.append(lm.cache.k.shape[3])
    assert sizes[0] == 64 and sizes[-1] == 128 and len(set(sizes)) == 2
    assert lm.cache.nbytes == 2 * 3 * 2 * 128 * 8 * 4
    assert lm.cache.rows == 96 and lm.cache.positions.tolist() == list(range(96))


def test_a_cache_appends_selects_and_truncates_rows_with_their_positions():
    cache = KVCache(TINY, slots=4)
    assert cache.append([0, 1, 2]) == 0
    for layer in range(TINY.n_layers):
        new = np.arange(3, dtype=np.float32)[:, None] + np.zeros((1, TINY.n_kv_heads, 3, TINY.head_dim), np.float32)
        cache.write(layer, 0, new, -new)
    assert cache.append([3, 3, 4]) == 3 and cache.k.shape[3] >= 6, "two nodes of a tree may have one position"
    for layer in range(TINY.n_layers):
        new = np.arange(3, 6, dtype=np.float32)[:, None] + np.zeros((1, TINY.n_kv_heads, 3, TINY.head_dim), np.float32)
        keys, values = cache.write(layer, 3, new, -new)
    assert keys.shape[2] == 6
    assert (keys[0, 0, :, 0] == np.arange(6)).all() and (values[0, 0, :, 0] == -np.arange(6)).all()
    cache.select([4, 5], 3)
    assert cache.rows == 5 and cache.positions.tolist() == [0, 1, 2, 3, 4]
    assert (cache.k[:, :, :, :5, 0] == [0, 1, 2, 4, 5]).all() and (cache.v[:, :, :, :5, 0] == [0, -1, -2, -4, -5]).all()
    cache.truncate(2)
    assert cache.rows == 2 and cache.positions.tolist() == [0, 1]


@pytest.mark.parametrize("forward", [
    lambda lm, text: lm.send(text[:3]), lambda lm, text: lm.send(text[:3], [-1, 0, 1]),
    lambda lm, text: lm.prefill(text[:3]),
    lambda lm, text: lm.full_logits(text[None, :9]), lambda lm, text: generate_batch(lm, text[None, :7], 2),
    lambda lm, text: [lm.send(text[:1], [-1]), lm.send(text[:2], [0, 1])]])
def test_no_path_holds_more_tokens_than_the_model(forward):
    """It holds 8, of which 6 are there; a tree counts by its depth, so four nodes of depth two fit."""
    lm = random_lm(config_like(TINY, max_length=8))
    text = text_for(random_lm(), 12)
    lm.prefill(text[:6])
    with pytest.raises(BadInput, match="8"):
        forward(lm, text)
    lm.rewind(6)
    assert lm.send(text[:4], [-1, 0, 0, -1]).shape[0] == 4


def test_a_toy_model_leaves_the_threads_of_blas_as_they_were():
    controller = threadpoolctl.ThreadpoolController().select(internal_api="openblas")
    with controller.limit(limits=2):
        before = [blas.num_threads for blas in controller.lib_controllers]
        lm = random_lm()
        lm.prefill(text_for(lm, 5))
        lm.send([1])
        assert [blas.num_threads for blas in controller.lib_controllers] == before


def test_flops_and_bytes_are_those_of_the_formula():
    """Two per multiply-add: every weight once per token; q.k and the weighted sum over the keys."""
    lm, c = random_lm(), TINY
    lm.prefill(text_for(lm, 10))
    lm.flops = lm.bytes_read = 0
    lm.send([5])
    matrices = c.n_params() - (2 * c.n_layers + 1) * c.hidden
    assert lm.flops == 2 * matrices + c.n_layers * 2 * 2 * c.n_heads * c.head_dim * 11
    assert lm.bytes_read == 4 * c.n_params() + 4 * 2 * c.n_layers * c.n_kv_heads * c.head_dim * 11


# -- checks that can fail ------------------------------------------------------------------------------------

def broken_write(monkeypatch):
    """Keys of the last layer go one row too far."""
    write = KVCache.write

    def shifted(self, layer, first, k, v):
        found = write(self, layer, first, k, v)
        if layer == TINY.n_layers - 1:
            self.k[layer, :, :, first:self.rows] = np.roll(self.k[layer, :, :, first:self.rows], 1, axis=-2)
        return found

    monkeypatch.setattr(KVCache, "write", shifted)


def broken_select(monkeypatch):
    """A commit moves no rows: those of refused siblings stay in the place of the path's."""
    monkeypatch.setattr(KVCache, "select", lambda self, rows, start: self.truncate(start + len(rows)))


def broken_commit(monkeypatch):
    """A commit keeps one row too many."""
    select = KVCache.select

    def more(self, rows, start):
        had = self.rows
        select(self, rows, start)
        self.rows = min(self.rows + 1, had)

    monkeypatch.setattr(KVCache, "select", more)


def broken_rewind(monkeypatch):
    """A rewind forgets one row too few."""
    truncate = KVCache.truncate
    monkeypatch.setattr(KVCache, "truncate", lambda self, rows: truncate(self, min(rows + 1, self.rows) if rows else 0))


def broken_positions(monkeypatch):
    """Cached steps start counting at 0 again."""
    forward = TransformerLM._forward
    monkeypatch.setattr(TransformerLM, "_forward", lambda self, tokens, positions, *rest: forward(
        self, tokens, positions - positions[0], *rest))


def broken_depth(monkeypatch):
    """Tree nodes stand at the place where they were sent, not at their depth."""
    monkeypatch.setattr(Pending, "positions",
                        lambda self, n: self.model.committed + np.arange(len(self) - n, len(self)))


def broken_siblings(monkeypatch):
    """A node sees its siblings."""
    monkeypatch.setattr(Pending, "visible", lambda self, n: np.tri(n, len(self), len(self) - n, dtype=bool))


def broken_mask(monkeypatch):
    """Every token of a forward sees all the others."""
    forward = TransformerLM._forward
    monkeypatch.setattr(TransformerLM, "_forward", lambda self, tokens, positions, mask, *rest: forward(
        self, tokens, positions, None if mask is None else np.ones_like(mask), *rest))


def dropped_layer(monkeypatch):
    """Only the first layer's entries are taken over into a larger cache."""
    append = KVCache.append

    def first_only(self, positions):
        had = self.k.shape[3]
        first = append(self, positions)
        if self.k.shape[3] > had:
            self.k[1:] = 0
        return first

    monkeypatch.setattr(KVCache, "append", first_only)


@pytest.mark.parametrize("damage, caught", [
    (broken_write, "cached"), (broken_positions, "cached"), (broken_mask, "cached"),
    (dropped_layer, "cached"), (broken_mask, "tree"), (broken_positions, "tree"), (broken_depth, "tree"),
    (broken_siblings, "tree"), (broken_select, "compacted"), (broken_commit, "compacted"), (broken_rewind, "rewound")])
def test_the_equality_checks_fail_on_a_broken_model(monkeypatch, damage, caught):
    """A check that cannot fail is a defect: each passes on the model as it is and fails on a damaged one."""
    check = {"cached": lambda: test_cached_equals_uncached(random_lm(), [1, 2, 3, 30, 1, 33]),
             "tree": lambda: test_tree_nodes_equal_separate_forwards_on_their_paths(random_lm(), "random"),
             "rewound": lambda: test_rewind_forgets_what_follows_in_every_layer(random_lm(), 40),
             "compacted": lambda: test_the_compacted_cache_equals_plain_decodings(random_lm(), 1)}[caught]
    check()
    damage(monkeypatch)
    with pytest.raises(AssertionError):
        check()


def test_an_all_zero_model_does_not_pass_for_a_working_one():
    """Zero weights make all logits equal, and cached = uncached trivially: `close` compares against their
    spread, and the models above have one."""
    for make in MODELS.values():
        lm = make()
        logits = lm.full_logits(text_for(lm, 30)[None])[0]
        assert logits.std() > 0.5 and len(set(logits.argmax(-1).tolist())) > 5
        moved = lm.full_logits(text_for(lm, 30)[None, ::-1])[0]
        assert np.abs(moved[-1] - logits[0]).max() > 0.1, "the same last token after another past"


# -- errors --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("call, named", [
    (lambda lm: lm.send([]), "non-empty"), (lambda lm: lm.send([[1, 2]]), "(1, 2)"),
    (lambda lm: lm.send([1, 40]), "40"), (lambda lm: lm.send([-1]), "-1"),
    (lambda lm: lm.prefill([40]), "40"),
    (lambda lm: lm.full_logits([1, 2]), "(2,)"), (lambda lm: lm.full_logits([[1, 40]]), "40"),
    (lambda lm: lm.rewind(6), "6"), (lambda lm: lm.rewind(-1), "-1"),
    (lambda lm: lm.send([1, 2], [-1]), "[-1]"),
    (lambda lm: lm.send([1, 2], [-1, 1]), "[-1, 1]"),
    (lambda lm: lm.send([1], [-2]), "[-2]"), (lambda lm: lm.send([], []), "non-empty"),
    (lambda lm: lm.send([40], [-1]), "40"), (lambda lm: lm.commit([0]), "[0]"),
])
def test_bad_input_is_one_sentence_and_changes_nothing(call, named):
    lm = random_lm()
    text = text_for(lm, 9)
    lm.prefill(text[:5])
    with pytest.raises(BadInput) as error:
        call(lm)
    assert named in str(error.value) and str(error.value).endswith(".") and "\n" not in str(error.value)
    close(lm.send(text[5:]), lm.full_logits(text[None])[0, 5:])


def test_only_a_path_is_committed_and_a_prefill_waits_for_it():
    lm = random_lm()
    lm.prefill([1, 2, 3])
    lm.send([4, 5, 6], [-1, 0, -1])
    for call in (lambda: lm.prefill([1]), lambda: lm.commit([1]), lambda: lm.commit([0, 2]),
                 lambda: lm.commit([0, 1, 2]), lambda: lm.commit([3]), lambda: lm.commit([-1])):
        with pytest.raises(BadInput):
            call()
        assert lm.committed == 3 and lm.length == 6
    lm.commit([0, 1])
    assert lm.length == 5


def test_layers_that_do_not_fit_the_configuration_are_refused():
    with pytest.raises(BadInput, match="3 layers"):
        TransformerLM(init_params(TINY, 0), config_like(TINY, n_layers=2))
    for n in (0, 4):
        with pytest.raises(BadInput, match=str(n)):
            truncate(init_params(TINY, 0), n)


def test_no_more_tokens_than_the_model_holds():
    lm = random_lm()
    lm.prefill(text_for(lm, lm.max_length - 1))
    with pytest.raises(BadInput, match="hold"):
        lm.prefill([1, 2])
    assert lm.length == lm.max_length - 1
