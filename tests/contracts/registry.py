"""What the contract suites run over. A new decoder, drafter or policy joins with one entry here.

DECODERS: name -> DecoderCase. DRAFTERS: name -> DrafterCase. POLICIES: name -> PolicyCase.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec

import numpy as np

from console import BadInput
from lab import toy
from lab.drafters.cascade import CascadeDrafter
from lab.drafters.draft_length import AIMD, CostAware, Fixed, Floor, Oracle
from lab.drafters.lookup import LastTokens, PromptLookup, SuffixLookup
from lab.drafters.model import ConfidentDrafter, ModelDrafter
from lab.drafters.tiers import NgramDrafter
from lab.drafters.trees import ConfidentTreeDrafter, TreeDrafter, TreeShape
from lab.measure.exactness import Table
from lab.measure.known_texts import KnownText, Remembered
from lab.measure.scripted import FakeDecoder, ProtocolError, table_logits
from lab.models.kept_prefix import KeptPrefix
from lab.models.pending import check_settled
from lab.toy.transformer import Config, TransformerLM, config_like, init_params, truncate
from marks import few
from minimal import MinimalDecoder, MinimalDrafter

# -- decoders --------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class DecoderCase:
    """make: () -> an empty decoder; two of them are the same model with a cache each.

    tolerance: how far two honest ways to the same logits may lie apart, in parts of the logits' spread.
    refusal: what it raises for a call that cannot be. limit: () -> an empty one that holds at most 12 tokens, or None
    where the model has no limit. reads_all: its logits depend on the whole text, so a wrong key shows in them.
    as_paths: of a real model, whether it sends a tree as a batch of its paths; None for any other decoder.
    """

    make: Callable
    tolerance: float = 1e-4
    refusal: type = BadInput
    limit: Callable | None = None
    reads_all: bool = True
    as_paths: bool | None = None


TINY = Config(vocab_size=40, hidden=24, n_layers=3, n_heads=6, n_kv_heads=2, head_dim=8, ffn=40, max_length=160)


@cache
def tiny_params(heads=6, kv=2):
    """Random weights, embeddings and layers large enough that attention and position change the logits."""
    config = Config(**{**TINY.__dict__, "n_heads": heads, "n_kv_heads": kv})
    params = init_params(config, 0)
    params["embed"] = params["embed"] * np.float32(25)
    for layer in params["layers"]:
        layer["wq"], layer["wo"] = layer["wq"] * np.float32(2), layer["wo"] * np.float32(4)
    return params, config


def tiny(max_length=160, heads=6, kv=2):
    params, config = tiny_params(heads, kv)
    return TransformerLM(params, Config(**{**config.__dict__, "max_length": max_length}), "tiny")


def tiny_exit(max_length=160):
    """Two of the three layers, as an early exit drafts."""
    params, config = tiny_params()
    return TransformerLM(truncate(params, 2), config_like(config, n_layers=2, max_length=max_length), "tiny exit")


def long_memory(vocab_size):
    """Logits that each token of the text and its place change."""
    table = np.random.default_rng(0).standard_normal((64, vocab_size, vocab_size))
    return lambda history: sum(0.8 ** (len(history) - i) * table[i % 64, t] for i, t in enumerate(history))


def fake(max_length=None):
    return FakeDecoder(long_memory(12), 12, max_length=max_length)


@cache
def real_model(name):
    from model_classes import build
    return build(name)


def real(name, limit=64):
    """A small random model of one of transformers' classes (tests/models/model_classes.py)."""
    from lab.models.decoder import HFDecoder
    decoder = HFDecoder(real_model(name), name=name)
    decoder.max_length = limit
    return decoder


def real_case(name):
    from model_classes import AS_PATHS
    return DecoderCase(lambda: real(name), limit=lambda: real(name, 12), as_paths=name in AS_PATHS)


class WithItsTarget:
    """The first layers of a model, with the target that commits for them: together a decoder.

    First layers compute the keys that the target computed, so that a fresh one is the reference. Their own commit and
    prefill are refused: tests/models/test_layers.py.
    """

    def __init__(self, target, n_layers):
        from lab.models.layers import LayerDraft
        self.target, self.draft = target, LayerDraft(target, range(n_layers))
        self.draft.max_length = target.max_length

    def __getattr__(self, name):
        return getattr(self.draft, name)

    def send(self, tokens, parents=None):
        return self.draft.send(tokens, parents)

    def prefill(self, tokens):
        check_settled(self)
        self.target.prefill(tokens)

    def commit(self, nodes):
        pending = self.draft._pending
        tokens = [pending.tokens[i] for i in pending.path(nodes)]
        self.draft.commit([])
        if tokens:
            self.target.prefill(tokens)

    def rewind(self, length):
        if length == 0 or self.rewind_floor <= length < self.committed:
            self.target.rewind(length)
        self.draft.rewind(length)


def first_layers(name, limit=64):
    return WithItsTarget(real(name, limit), 2)


def rounded(name, limit=64):
    """The model with its weights rounded to 8 bits, in a cache of its own."""
    from lab.models.rounded import quantized
    decoder = quantized(real(name), "int8")
    decoder.max_length = limit
    return decoder


def real_cases():
    """Rows alone (Llama, Qwen3, GPT-NeoX), rows and states (LFM2, LFM3), trees as paths (GPT-Neo, Mistral's window)."""
    names = "Qwen3", "GPT-NeoX", "LFM2", "LFM3", "GPT-Neo", "Mistral"
    return {"Llama": DecoderCase(partial(real, "Llama", 320), limit=partial(real, "Llama", 12), as_paths=False)} | {
        name: real_case(name) for name in names} | {
        f"{name}, first layers": DecoderCase(partial(first_layers, name), limit=partial(first_layers, name, 12))
        for name in ("Llama", "LFM3")} | {
        "Llama, rounded": DecoderCase(partial(rounded, "Llama"), limit=partial(rounded, "Llama", 12))}


REAL = real_cases() if find_spec("torch") else {}
DECODERS = REAL | {
    "toy": DecoderCase(tiny, limit=lambda: tiny(12)),
    "toy, a head each": DecoderCase(lambda: tiny(heads=3, kv=3), limit=lambda: tiny(12, 3, 3)),
    "toy, one KV head": DecoderCase(lambda: tiny(heads=4, kv=1), limit=lambda: tiny(12, 4, 1)),
    "toy, first layers": DecoderCase(tiny_exit, limit=lambda: tiny_exit(12)),
    "toy, trained": DecoderCase(lambda: toy.load("small")),
    "toy, kept prefix": DecoderCase(lambda: KeptPrefix(tiny()), limit=lambda: KeptPrefix(tiny(12))),
    "toy, remembered": DecoderCase(lambda: Remembered(tiny()), limit=lambda: Remembered(tiny(12))),
    "known text": DecoderCase(lambda: KnownText(np.random.default_rng(0).integers(40, size=200), tiny()),
                              reads_all=False),
    "table": DecoderCase(lambda: Table(np.random.default_rng(0).dirichlet(np.ones(9), 9)), reads_all=False),
    "scripted": DecoderCase(fake, refusal=ProtocolError, limit=lambda: fake(12)),
    "scripted, kept prefix": DecoderCase(lambda: KeptPrefix(fake()), refusal=(BadInput, ProtocolError),
                                         limit=lambda: KeptPrefix(fake(12))),
    "minimal": DecoderCase(lambda: MinimalDecoder(logits=long_memory(12))),
    "minimal, kept prefix": DecoderCase(lambda: KeptPrefix(MinimalDecoder(logits=long_memory(12)))),
    "minimal, remembered": DecoderCase(lambda: Remembered(MinimalDecoder(logits=long_memory(12)))),
}


# -- drafters --------------------------------------------------------------------------------------------------

class NextTable:
    """A table for NgramDrafter: t is followed by t + 1."""

    order, path, tokenizer = 2, "next.ngram", None

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def best(self, tokens):
        return (tokens[-1] + 1) % self.vocab_size, 9, 9


@dataclass(frozen=True)
class DrafterCase:
    """make: (model, vocab_size) -> a drafter; model(name) gives a new draft model, the names "draft" or "small".

    main: name of the attribute path to the draft model whose cache follows the text, "" for none.
    twin: where that model is the target itself, the kinds of run ("greedy", "sampled") in which all is accepted.
    lag: after such a round, how many tokens its cache is behind the target's; None where the round says it.
    levels: the deepest draft in tests that enumerate.
    """

    make: Callable
    main: str = ""
    twin: tuple = ()
    lag: int | None = None
    levels: int = 2
    inner: str = ""


def ngrams(vocab_size, **options):
    return NgramDrafter([NextTable(vocab_size)], **{"price": 0, **options})


BOTH = ("greedy", "sampled")
DRAFTERS = {
    "minimal": DrafterCase(lambda model, v: MinimalDrafter()),
    "prompt lookup": DrafterCase(lambda model, v: PromptLookup()),
    "last tokens": DrafterCase(lambda model, v: LastTokens()),
    "suffix lookup": DrafterCase(lambda model, v: SuffixLookup()),
    "n-gram tiers": DrafterCase(lambda model, v: ngrams(v)),
    "n-gram tiers, priced": DrafterCase(lambda model, v: ngrams(v, price=0.3)),
    "model": DrafterCase(lambda model, v: ModelDrafter(model("draft")), "model", BOTH, 1),
    "confident": DrafterCase(lambda model, v: ConfidentDrafter(model("draft"), 0.3), "model", BOTH, 1),
    "tree": DrafterCase(lambda model, v: TreeDrafter(model("draft"), TreeShape.branching([2, 1, 1, 1])), "model",
                        ("greedy",)),
    "sampled tree": DrafterCase(lambda model, v: TreeDrafter(model("draft"), TreeShape.branching([2, 1, 1]),
                                                             sample=True), "model"),
    "sampled chain as a tree": DrafterCase(lambda model, v: TreeDrafter(model("draft"), TreeShape.branching([1] * 4),
                                                                        sample=True), "model", BOTH),
    "confident tree": DrafterCase(lambda model, v: ConfidentTreeDrafter(model("draft"), 8, 4, 2), "model", ("greedy",)),
    "cascade": DrafterCase(lambda model, v: CascadeDrafter(model("draft"), ModelDrafter(model("small")), 2), "model",
                           BOTH, 1, inner="model"),
    "cascade with prompt lookup": DrafterCase(lambda model, v: CascadeDrafter(model("draft"), PromptLookup(), 2),
                                              "model", BOTH, 1),
    "cascade with suffix lookup": DrafterCase(lambda model, v: CascadeDrafter(model("draft"), SuffixLookup(), 2),
                                              "model", BOTH, 1),
    "cascade with n-gram tiers": DrafterCase(lambda model, v: CascadeDrafter(model("draft"), ngrams(v), 2), "model",
                                             BOTH, 1),
    "cascade with a minimal drafter": DrafterCase(lambda model, v: CascadeDrafter(model("draft"), MinimalDrafter(), 2),
                                                  "model", BOTH, 1),
}


# -- policies --------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class PolicyCase:
    """make: (**changes) -> a policy. whole: its arguments that are whole numbers, with the least that is possible."""

    make: Callable
    whole: dict = field(default_factory=dict)


CURVE = {1: 1.0, 2: 1.2, 33: 7.4}
POLICIES = {
    "fixed": PolicyCase(lambda **k: Fixed(**{"gamma": 3, **k}), {"gamma": 0}),
    "AIMD": PolicyCase(AIMD, {"first": 4, "least": 1, "most": 4}),
    "AIMD from one": PolicyCase(lambda **k: AIMD(**{"first": 1, "least": 1, "most": 8, **k})),
    "floor": PolicyCase(lambda **k: Floor(**{"gamma": 4, "window": 3, "rest": 2, **k}),
                        {"gamma": 1, "window": 1, "rest": 1}),
    "cost-aware": PolicyCase(lambda **k: CostAware(CURVE, 0.05, **k), {"gamma_max": 0}),
    "oracle": PolicyCase(lambda **k: Oracle([3, 0, 1, 5, 2, 0, 4] * 4, CURVE, **k), {"gamma_max": 0}),
}


# Left to make test, because make check has others like them.
SLOW = {"Qwen3", "GPT-NeoX", "LFM3", "GPT-Neo", "Mistral", "Llama, first layers", "LFM3, first layers",
        "Llama, rounded", "toy, a head each", "toy, remembered", "toy, one KV head", "minimal, kept prefix",
        "scripted, kept prefix", "n-gram tiers, priced", "sampled chain as a tree", "cascade with prompt lookup",
        "cascade with suffix lookup", "cascade with a minimal drafter"}


def names(cases) -> list:
    """The names of cases as parameters of a suite."""
    return few(cases, cases.keys() - SLOW)


def logits_like(name, target_logits, vocab_size, seed):
    """Logits of a draft model that agrees with the target now and then; "small" less often than "draft"."""
    share, other = {"draft": 0.5, "small": 0.7}[name], table_logits(vocab_size, seed + {"draft": 50, "small": 90}[name])
    return lambda history: (1 - share) * target_logits(history) + share * other(history)
