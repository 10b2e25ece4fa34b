"""What tests of loops and of drafters share: a scripted text, and the invariants of a run."""

import numpy as np
from hypothesis import settings

from decode_lab import speculative_generate
from lab.drafters.model import ModelDrafter
from lab.drafters.trees import ConfidentTreeDrafter, TreeDrafter, TreeShape
from lab.measure.scripted import FakeDecoder, script

V = 16

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7]

PROMPT = TEXT[:3]

# Few examples and the same ones each time; no deadline, as a busy machine is no fault.
quick = settings(max_examples=40, deadline=None, derandomize=True)


class Watched:
    """A drafter passed through, with the invariants of each round checked as the loop goes by."""

    def __init__(self, drafter, target):
        self.drafter, self.target, self.name = drafter, target, drafter.name
        self.lengths = []

    def start(self, target, sampler, prompt):
        self.drafter.start(target, sampler, prompt)

    def propose(self, tokens, gamma, rng):
        assert gamma >= 1
        assert self.target.length == self.target.committed == len(tokens) - 1
        return self.drafter.propose(tokens, gamma, rng)

    def verified(self, tokens, path, hidden):
        assert self.target.length == self.target.committed == len(tokens) - 1, \
            "after a round the cache holds all tokens but the last"
        if isinstance(self.target, FakeDecoder):
            assert self.target.tokens == tokens[:-1] and not self.target.pending
        self.lengths.append(len(tokens))
        self.drafter.verified(tokens, path, hidden)


def run_script(drafter, n_new, gamma, text=TEXT, prompt=PROMPT, eos=(), **options):
    """Speculate on a scripted target -> (target, tokens, run), the invariants of every run checked."""
    target = script(text, V, **options)
    tokens, run = speculative_generate(target, Watched(drafter, target), prompt, n_new, gamma, eos=eos)
    check(target, tokens, run, prompt)
    return target, tokens.tolist(), run


def check(target, tokens, run, prompt):
    assert tokens.dtype == np.int64 and tokens[:len(prompt)].tolist() == list(prompt)
    assert run.n_tokens == len(tokens) - len(prompt) == len(run.rounds) + run.accepted
    assert target.forwards == len(run.rounds) + (len(prompt) > 1), "one forward per round, and the prefill"
    assert target.tokens == tokens[:-1].tolist(), "the cache holds all tokens but the last"
    assert run.stop in ("eos", "budget", "context")
    assert [r.first for r in run.rounds] == [True] + [False] * (len(run.rounds) - 1)
    for r in run.rounds:
        assert 0 <= r.accepted <= r.tested <= max(r.drafted, r.accepted)


def one_sentence(error):
    text = str(error.value)
    assert text.endswith(".") and "\n" not in text and len(text) < 250
    return text


# -- vocabularies --------------------------------------------------------------------------------------------

def drafters_of(model):
    return [ModelDrafter(model), TreeDrafter(model, TreeShape.branching([2, 1])),
            ConfidentTreeDrafter(model, 4, 2)]


IRREGULAR = TreeShape([(-1, 0), (-1, 1), (0, 0), (2, 0), (2, 1)])
