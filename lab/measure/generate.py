"""transformers' own `generate`, read off from outside: which forwards it makes, and which tokens they emit.

It decodes greedily from the same token ids in the same process, so that a demo can pair it with the loops of
`decode_lab`. What it did is reported as a `decode_lab.Run`: each forward of the target is a round, what it was sent
beyond the last token is the draft, and the tokens that came out after it are what it emitted.

The loop of `generate`, its defaults and its drafts are those of transformers.generation.utils; prompt lookup copies
what followed the first (leftmost) earlier occurrence of the last two tokens, or of the last one.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from unittest import mock

import numpy as np
from transformers.generation import CandidateGenerator

from decode_lab import Draft, Drafter, Round, Run, Sampler, name_of
from lab.drafters.model import check_vocabulary
from lab.models.pending import checked_ids
from lab.support.errors import BadInput, require


@dataclass
class Rival:
    """One generation of a rival. tokens: (n,) int64, prompt and output. seconds: of the whole call, its own
    preparations included. run: its rounds, to be pooled and read as those of our loops are."""

    tokens: np.ndarray
    run: Run
    seconds: float

    @property
    def forwards(self) -> int:
        """Forwards of the target. The first one holds the prompt, and counts, as it emits the first tokens."""
        return len(self.run.rounds)

    @property
    def tokens_per_forward(self) -> float:
        """New tokens over forwards: what `Run.tau` is for our loops."""
        return self.run.tau

    @property
    def ttft(self) -> float:
        """Seconds from the call to the first tokens: preparations, the first draft and the prompt's forward."""
        return self.run.ttft

    @property
    def tpot(self) -> float:
        """Seconds per token after the first forward's; nan when there was only one forward."""
        return self.run.tpot


def generate(decoder, prompt, n_new: int, *, prompt_lookup: int = 0, assistant=None, early_exit: int = 0,
             drafter: Drafter | None = None, gamma: int = 10, eos: Collection[int] = (), max_ngram: int | None = None,
             num_assistant_tokens: int | None = None, schedule: str | None = None,
             confidence: float | None = None) -> Rival:
    """transformers' `generate` on an HFDecoder's model: greedy, batch 1, its own cache, as a user would call it.

    prompt: ids (n,), at least one. n_new: tokens wanted, at least one; fewer where the context ends. eos: ids that end
    the text. The rest chooses at most one way of drafting: prompt_lookup: tokens to copy (`prompt_lookup_num_tokens`,
    with suffixes of up to max_ngram tokens). assistant: the HFDecoder of another model with the same tokenizer.
    early_exit: the target's first layers draft, recomputing their keys and values (`assistant_early_exit`). For the
    latter two: num_assistant_tokens, schedule ("constant", "heuristic", "heuristic_transient") and confidence, the
    draft's probability below which it stops. None leaves each to transformers' default. drafter: one of ours, of chains
    of up to gamma tokens, in place of transformers' own (`DraftCandidates`); the rounds then tell its sources.
    The model's own generation defaults (sampling, penalties) do not apply. The decoder's cache is left as it is, its
    `hidden` is not.
    BadInput before the first forward for what cannot work.
    """
    from transformers import GenerationConfig
    model = decoder.model
    ids, budget = _checked(decoder, prompt, n_new)
    n_layers = decoder.config.num_hidden_layers
    _check_draft(decoder, prompt_lookup, assistant, early_exit, drafter, gamma, n_layers)
    drafting = {"num_assistant_tokens": num_assistant_tokens, "num_assistant_tokens_schedule": schedule,
                "assistant_confidence_threshold": confidence}
    own = GenerationConfig(**drafting)            # of the model that drafts; it also replaces the checkpoint's defaults
    how = GenerationConfig(max_new_tokens=budget, do_sample=False, eos_token_id=sorted(map(int, eos)) or None,
                           prompt_lookup_num_tokens=gamma if drafter else prompt_lookup or None,
                           max_matching_ngram_size=max_ngram,
                           assistant_early_exit=early_exit or None)
    sent: list[tuple[float, Any]] = []            # when a forward of the target began, and its ids on the device
    got: list[tuple[float, list[int]]] = []       # when new tokens reached the host, and the tokens

    def before(module, args, kwargs):
        if not early_exit or decoder.config.num_hidden_layers == n_layers:      # else it is a step of the draft
            sent.append((perf_counter(), kwargs["input_ids"]))

    def beyond(module, args):
        if decoder.config.num_hidden_layers != n_layers:
            raise BadInput(f"{decoder.name} cannot exit early: its forward always runs all {n_layers} layers.")

    import torch
    with ExitStack() as stack:
        if drafter is not None:
            # generate takes no CandidateGenerator from outside: a prompt lookup was asked for, and is replaced.
            drafter.start(decoder, Sampler(), ids.tolist())
            candidates = DraftCandidates(drafter, gamma, len(ids) + budget, eos)
            stack.enter_context(mock.patch.object(model, "_get_candidate_generator", lambda **_: candidates))
        for each in {model, assistant.model if assistant else model}:
            stack.enter_context(mock.patch.object(each, "generation_config", own))
        stack.enter_context(_quiet())
        stack.callback(model.register_forward_pre_hook(before, with_kwargs=True).remove)
        if early_exit:
            stack.callback(setattr, decoder.config, "num_hidden_layers", n_layers)   # an exception would leave it cut
            stack.callback(_layers(decoder)[early_exit].register_forward_pre_hook(beyond).remove)
        inputs = torch.from_numpy(ids)[None].to(decoder.device)
        decoder.synchronize()
        started = perf_counter()
        output = model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=how,
                                streamer=_Clock(got), assistant_model=assistant.model if assistant else None)
        tokens = output[0].cpu().numpy()
        seconds = perf_counter() - started
    sent = [(at, row[0].tolist()[len(ids) if i == 0 else 1:]) for i, (at, row) in enumerate(sent)]
    run = as_run(started, sent, got, eos, "budget" if budget == n_new else "context")
    for past, sources in zip(run.rounds, candidates.sources if drafter is not None else []):
        past.sources = sources[:past.tested]
    return Rival(tokens, run, seconds)


class DraftCandidates(CandidateGenerator):
    """A Drafter of chains, where the assisted loop of transformers' `generate` asks for candidates.

    drafter: already started for the target and the prompt. gamma: longest draft. max_length: tokens of prompt and
    output. eos: ids that end the text. sources: of each draft, the sources of its tokens. BadInput for a draft that is
    a tree.
    """

    def __init__(self, drafter: Drafter, gamma: int, max_length: int, eos: Collection[int] = ()):
        self.drafter, self.gamma, self.max_length, self.eos = drafter, gamma, max_length, frozenset(map(int, eos))
        self.sources: list[tuple[str, ...]] = []
        self._tokens: list[int] = []
        self._rng = np.random.default_rng(0)

    def get_candidates(self, input_ids, **kwargs):
        """Ids (1, n) on the device -> (ids and draft (1, n + k), None: there are no logits of the draft)."""
        self._read(input_ids)
        depth = min(self.gamma, self.max_length - len(self._tokens) - 1)
        draft = self.drafter.propose(self._tokens, depth, self._rng) if depth > 0 else Draft()
        if draft.parents is not None:
            raise BadInput(f"{name_of(self.drafter, 'the drafter')} drafts trees, which transformers cannot verify: "
                           "chains would do.")
        # The EOS itself is left to the target: the loop of older versions goes on behind an accepted one.
        n = next((i for i, token in enumerate(draft.tokens) if token in self.eos), len(draft.tokens))
        self.sources.append(tuple(draft.sources[:n]))
        import torch
        return torch.cat([input_ids, input_ids.new_tensor(draft.tokens[:n]).view(1, n)], dim=1), None

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        """After a round: the sequence as it is now."""
        self._read(input_ids)
        self.drafter.verified(self._tokens, [], None)

    def _read(self, input_ids):
        self._tokens += input_ids[0, len(self._tokens):].tolist()


def _checked(decoder, prompt, n_new):
    """Prompt ids (n,) int64, and how many new tokens there is room for."""
    ids, limit = checked_ids(decoder, prompt), decoder.max_length
    require(n_new >= 1, "n_new", n_new, "1 or more")
    if limit is not None and len(ids) >= limit:
        raise BadInput(f"The prompt has {len(ids)} tokens and the model holds {limit}: no room for a new one.")
    return ids, int(n_new if limit is None else min(n_new, limit - len(ids)))


def _check_draft(decoder, prompt_lookup, assistant, early_exit, drafter, gamma, n_layers):
    if (prompt_lookup != 0) + (assistant is not None) + (early_exit != 0) + (drafter is not None) > 1:
        raise BadInput("prompt_lookup, assistant, early_exit and drafter are ways of drafting: one of them would be "
                       "right.")
    if drafter is not None:
        from lab.models.layers import LayerDraft
        require(gamma >= 1, "gamma", gamma, "1 or more")
        if isinstance(getattr(drafter, "model", None), LayerDraft):
            raise BadInput(f"{name_of(drafter, 'the drafter')} drafts on the target's own cache, which generate does "
                           "not fill: early_exit would do, or a drafter with a cache of its own.")
    require(prompt_lookup >= 0, "prompt_lookup", prompt_lookup, "0 (off) or more")
    require(0 <= early_exit < n_layers, "early_exit", early_exit, f"0 (off) or 1 to {n_layers - 1}")
    if assistant is not None:
        check_vocabulary(decoder, assistant)
        if getattr(assistant, "model", decoder.model) is decoder.model:
            raise BadInput(f"{assistant.name} has no model of its own, which transformers asks of an assistant; "
                           "early_exit drafts with the target's first layers.")


def _layers(decoder):
    """The list of the model's layers: its first ModuleList of as many modules as the configuration counts layers."""
    import torch
    n = decoder.config.num_hidden_layers
    return next(m for m in decoder.model.base_model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == n)


@contextmanager
def _quiet():
    """transformers' warnings are about options that this module sets on purpose."""
    from transformers.utils import logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


class _Clock:
    """A transformers streamer that notes when tokens reach the host; the first ones it is given are the prompt."""

    def __init__(self, got):
        self._got, self._prompt_seen = got, False

    def put(self, value):
        if self._prompt_seen:
            self._got.append((perf_counter(), value.reshape(-1).tolist()))
        self._prompt_seen = True

    def end(self):
        """Nothing is held back."""


def as_run(started: float, sent, got, eos, limit: str) -> Run:
    """Rounds from outside. sent: (time, drafted ids) of each forward; got: (time, new tokens) of each.

    A round's draft_s is all the time from the tokens before it to its forward, the rival's loop included.
    """
    if len(sent) != len(got):
        raise RuntimeError(f"{len(sent)} forwards emitted tokens {len(got)} times: each must emit some.")
    run, before = Run(), started
    for (began, draft), (at, new) in zip(sent, got):
        n = len(new) - 1
        # The last token may have been a right draft too, cut by EOS or budget: it counts as the target's own.
        refused = n < len(draft) and draft[n] != new[n]
        run.rounds.append(Round(len(draft), n + refused, n, draft_s=began - before, verify_s=at - began,
                                first=not run.rounds))
        before = at
    run.stop = "eos" if got[-1][1][-1] in frozenset(map(int, eos)) else limit
    return run
