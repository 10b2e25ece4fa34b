"""What the demos of the real target share: methods that take turns in one process, and readings of drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

from console import progress
from decode_lab import (Decoder, Drafter, Run, autoregressive_generate, greedy_ids, prefill,
                        speculative_generate, to_numpy, tree_generate)
from lab.drafters.best_tree import accept_lengths_to_end
from lab.drafters.model import fit_row
from lab.drafters.trees import TreeShape
from lab.measure import generate as rivals, timing
from lab.models.layers import LayerDraft
from lab.measure.known_texts import KnownText


class Made(NamedTuple):
    """One generation. tokens: (n,) ids, prompt and output. peak: most bytes held meanwhile, None where unknown."""

    tokens: np.ndarray
    run: Run
    peak: int | None


@dataclass(frozen=True)
class Method:
    """One of decode_lab's loops with its drafter: plain decoding without one, trees without a gamma.

    shape: of what a model drafts, for predictions. draft: that model's name.
    """

    drafter: Drafter | None = None
    gamma: int | Callable[[Run], int] | None = None
    shape: TreeShape | None = None
    draft: str = ""

    def __call__(self, decoder: Decoder, prompt, n_new: int, **options) -> tuple[np.ndarray, Run]:
        if self.drafter is None:
            return autoregressive_generate(decoder, prompt, n_new, **options)
        if self.gamma is None:
            return tree_generate(decoder, self.drafter, prompt, n_new, **options)
        return speculative_generate(decoder, self.drafter, prompt, n_new, self.gamma, **options)


def generate_method(as_loaded: bool = False, **how):
    """transformers' `generate` (`rivals.generate` with the options `how`), to be called as a Method is.

    as_loaded: in PyTorch's own products, as without this lab, instead of `hf.PackedLinear`'s.
    """
    def call(decoder, prompt, n_new, eos=()):
        with decoder.as_loaded() if as_loaded else nullcontext():
            made = rivals.generate(decoder, prompt, n_new, eos=eos, **how)
        return made.tokens, made.run
    return call


def llama_method(path, **how):
    """llama.cpp on a GGUF file (`rivals.llama_cpp` with the options `how`), to be called as a Method is."""
    run = rivals.llama_cpp(path, **how)

    def call(decoder, prompt, n_new, eos=()):
        made = run(prompt, n_new, eos)
        return made.tokens, made.run
    return call


def in_turn(methods: Mapping[str, Callable], decoder, prompt, n_new: int, runs: int, label: str) -> dict[str, list[Made]]:
    """{name: its generations}: all methods once, then all again in the opposite order, until each has made `runs`."""
    made: dict[str, list[Made]] = {name: [] for name in methods}
    for k in progress(range(runs), label):
        for name in list(methods)[::-1 if k % 2 else 1]:
            timing.reset_peak_memory(decoder.device)
            tokens, run = methods[name](decoder, prompt, n_new, eos=decoder.eos)
            made[name].append(Made(tokens, run, timing.peak_memory(decoder.device)))
    return made


def speedup(base: Sequence[Made], other: Sequence[Made]) -> float:
    """Time per token of `base` over that of `other`, first rounds apart: the median over the turns they shared."""
    return median(a.run.per_token / b.run.per_token for a, b in zip(base, other, strict=True))


def step_seconds(models: Sequence, ids, context: int, rounds: int) -> np.ndarray:
    """(models, rounds) seconds of a forward of one token behind `context` others, the models in turn, after a warm-up.

    models: the target first, then drafts, of which some may read the target's cache. ids: more than `context` tokens.
    """
    seconds, target = np.empty((len(models), rounds + 2)), models[0]
    for k in range(rounds + 2):
        for i, model in enumerate(models):
            if model.length != context:
                model.rewind(0)
                if model.length < context:       # a draft on the target's cache is already there
                    model.prefill(ids[:context])
            target.synchronize()
            started = perf_counter()
            model.send(ids[context:context + 1])
            target.synchronize()
            seconds[i, k] = perf_counter() - started
            model.rewind(context)
    return seconds[:, 2:]


def read_along(target, drafts: Mapping[str, Any], prompt, n_new: int, visit) -> list[int]:
    """The target's greedy text, prompt and up to n_new tokens, while drafts say what they would have drafted first.

    visit(name, p, q): called for each draft with the rows (n, V), float64, of target and draft before each new token.
    Drafts that read the target's cache take part step by step, as they would; others read the text in one forward.
    """
    target.rewind(0)
    prefill(target, prompt[:-1])
    text, rows = list(prompt), {name: [] for name in ("", *drafts)}
    shared = {name: model for name, model in drafts.items() if isinstance(model, LayerDraft)}
    while len(text) < len(prompt) + n_new and text[-1] not in (target.eos if len(text) > len(prompt) else ()):
        for name, model in shared.items():
            rows[name].append(to_numpy(model.send(text[-1:])[-1]))
        row = target.send(text[-1:])
        target.commit([0])
        rows[""].append(to_numpy(row[-1]))
        text += greedy_ids(row)
    for name, model in drafts.items():
        if name not in shared:
            model.rewind(0)
            prefill(model, prompt[:-1])
            rows[name] = [to_numpy(fit_row(row, target.vocab_size)) for row in model.send(text[len(prompt) - 1:-1])]
        visit(name, np.array(rows[""]), np.array(rows.pop(name)))
    return text


class StepCurve:
    """t(n), the time of sending n tokens over that of one: straight lines between measured medians.

    seconds: {n: seconds}, with n = 1. step_s: seconds of sending one.
    """

    def __init__(self, seconds: Mapping[int, float]):
        self.seconds, self.step_s = dict(sorted(seconds.items())), seconds[1]

    def __call__(self, n):
        return np.interp(n, list(self.seconds), list(self.seconds.values())) / self.step_s


def foretold(method: Method, t: StepCurve, c: Mapping[str, float], target, text, n_prompt: int,
             ranks=None) -> list[float]:
    """Of a later round of a method on a text: tau, and the steps of the target that drafting and verifying take.

    t: a StepCurve. c: of each draft model. ranks: (n,), where the text's new tokens stand in the draft model's list; tau
    is then 1 plus the mean accept length over all starts, rounds near the end of the text cut short. A lookup has no ranks: its rounds are counted on the known
    text, the first left out, and its own time there is read.
    """
    if method.shape is None:
        run = method(KnownText(text, target), text[:n_prompt], len(text) - n_prompt)[1].later()
        return [run.tau, float(np.mean([r.draft_s for r in run.rounds])) / t.step_s,
                float(np.mean([t(r.drafted + 1) for r in run.rounds]))]
    # Near the end of the text rounds are cut short: at each start, the tokens still missing but one are drafted at most.
    left, depths = np.arange(len(ranks))[::-1], np.array(method.shape.depths, int)
    opened = [0 if parent < 0 else depths[parent] for parent in {-1, *(p for p, _ in method.shape.nodes)}]  # by level
    levels = np.cumsum([0, *t(np.bincount(opened))])
    deep = np.minimum(left, max(method.shape.depth, 1))
    return [1 + float(accept_lengths_to_end(ranks, method.shape).mean()),
            float(c[method.draft] * levels[np.minimum(deep, len(levels) - 1)].mean()),
            float(np.mean([t(1 + (depths <= d).sum()) for d in deep]))]


@dataclass(frozen=True)
class Explained:
    """A speedup measured after the first round, beside what the pieces tell. Times of a round are in steps of the target.

    tau_told, draft_told, verify_told: as `foretold` gives them; tau, draft, verify: measured. drafts: drafted per round.
    alpha: None where nothing was drafted.
    """

    tau_told: float
    draft_told: float
    verify_told: float
    tau: float
    draft: float
    verify: float
    speedup: float
    drafts: float
    alpha: float | None

    @property
    def told(self) -> float:
        """The speedup that the pieces tell: tokens of a round over its steps."""
        return self.tau_told / (self.draft_told + self.verify_told)

    @property
    def off_in(self) -> str:
        """The piece that is furthest off, where the speedup told is by more than 20%; else "-"."""
        if abs(self.told / self.speedup - 1) <= 0.2:
            return "-"
        whole = self.draft + self.verify
        off = {"tau": self.tau_told / self.tau, "drafting": whole / (self.draft_told + self.verify),
               "verifying": whole / (self.draft + self.verify_told)}
        return max(off, key=lambda piece: abs(np.log(off[piece])))

    @property
    def verdict(self) -> str:
        """Whether it pays; within 3% of plain decoding, neither."""
        return "pays" if self.speedup > 1.03 else "loses" if self.speedup < 0.97 else "even"


def explain(told: Sequence[float], base: Sequence[Made], made: Sequence[Made]) -> Explained:
    """What was `foretold` of a method beside its runs, and those of plain decoding (`base`) in the same turns."""
    runs, step = [m.run.later() for m in made], median(m.run.per_token for m in base)
    draft, verify = (median(np.mean([getattr(r, what) for r in run.rounds]) for run in runs) / step
                     for what in ("draft_s", "verify_s"))
    run = runs[0]                                    # counts are the same in all
    return Explained(*told, run.tau, draft, verify, speedup(base, made), run.drafted / len(run.rounds),
                     run.alpha if run.drafted else None)


def usual_methods(assistant, name: str, gguf=None) -> dict[tuple[str, str], Callable]:
    """{(name, kernels): method} of what one would use instead: transformers' `generate`, plain, with its prompt lookup,
    and with a model, called by `name`, that assists; where llama-cpp-python is installed, llama.cpp on a GGUF file."""
    found = {(f"generate{how}", kernels): generate_method(kernels == "loaded", prompt_lookup=n)
             for kernels in ("loaded", "packed") for how, n in (("", 0), (" lookup 5", 5), (" lookup 10", 10))}
    found[f"{name} assists", "packed"] = generate_method(assistant=assistant)
    if gguf and rivals.has_llama_cpp():
        found |= {(f"llama.cpp{how}", "its own"): llama_method(gguf, prompt_lookup=n, threads=torch.get_num_threads())
                  for how, n in (("", 0), (" lookup 10", 10), (" lookup 20", 20))}
    return found


def distances(counts, p) -> tuple[np.ndarray, np.ndarray]:
    """(total variation, Pearson's chi-square) of counts (..., k) from the distribution p (k,), all p above 0."""
    n = counts.sum(axis=-1, keepdims=True)
    return abs(counts / n - p).sum(axis=-1) / 2, ((counts - n * p) ** 2 / (n * p)).sum(axis=-1)
