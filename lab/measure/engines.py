"""What a user would run instead of our loops, as methods that take turns with them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from lab.measure import generate as transformers_generate
from lab.measure import llama_cpp
from lab.measure.costs import StepCurve
from lab.measure.prediction import predict_rounds


def generate_method(as_loaded: bool = False, **how):
    """transformers' `generate` (`transformers_generate.generate` with the options `how`), to be called as a Method is.

    as_loaded: in PyTorch's own products, as without this lab, instead of `lab.models.kernels`'.
    """
    def call(decoder, prompt, n_new, eos=()):
        with decoder.as_loaded() if as_loaded else nullcontext():
            made = transformers_generate.generate(decoder, prompt, n_new, eos=eos, **how)
        return made.tokens, made.run
    return call


def llama_method(path, **how):
    """llama.cpp on a GGUF file (`llama_cpp.llama_cpp` with the options `how`), to be called as a Method is.

    It runs on as many threads as PyTorch does at each call, so that an engine is loaded again where that has changed.
    """
    engine = lru_cache(1)(lambda threads: llama_cpp.llama_cpp(path, threads=threads, **how))

    def call(decoder, prompt, n_new, eos=()):
        made = engine(torch.get_num_threads())(prompt, n_new, eos)
        return made.tokens, made.run
    return call


@dataclass(frozen=True)
class Contender:
    """A method that is compared with plain decoding, called as a Method is.

    way: what it does, such as "lookup", whatever its settings. kernels: "packed" (`lab.models.kernels`'), "loaded"
    (PyTorch's own, as without this lab) or "its own" (another engine's). c: the time of a drafted token in steps of the
    target; None where a lookup drafts, or nothing does.
    """

    call: Callable
    way: str
    kernels: str = "packed"
    c: float | None = None

    def __call__(self, decoder, prompt, n_new, eos=()):
        return self.call(decoder, prompt, n_new, eos=eos)


LOOKUPS: dict[str, dict[str, Any]] = {f"lookup {n}": {"prompt_lookup": n} for n in (3, 5, 10)}
ASSISTED: dict[str, dict[str, Any]] = {"assisted": {}} | {
    f"assisted {n}": {"num_assistant_tokens": n, "schedule": "constant"} for n in (2, 4, 8)}
LLAMA_LOOKUP = 10              # tokens that llama.cpp's lookup copies: the package's own default


def generate_contenders(target, assistant, prompt, n_new: int, t: StepCurve, c: float) -> dict[str, Contender]:
    """{name: contender} of transformers' `generate` on a prompt: plain, its prompt lookup, and assisted by a model.

    A lookup and an assisted run are made with each setting in LOOKUPS and ASSISTED; the one whose rounds take the least
    time at t, the time of sending n tokens, and c, that of a step of the assistant, is kept. "loaded" ones run
    PyTorch's own products.
    """
    def fastest(settings, c=0.0, **how):
        def speed(name):
            run = generate_method(**settings[name], **how)(target, prompt, n_new, target.eos)[1]
            return predict_rounds(run, t, c).speedup
        return max(settings, key=speed)

    lookup, assisted = fastest(LOOKUPS), fastest(ASSISTED, c, assistant=assistant)
    found = {}
    settings: dict[str, dict[str, Any]] = {"generate": {}, lookup: LOOKUPS[lookup]}
    for (name, how), way in zip(settings.items(), ("generate", "lookup"), strict=True):
        found[name] = Contender(generate_method(**how), way)
        found[f"{name}, loaded"] = Contender(generate_method(as_loaded=True, **how), way, "loaded")
    found[assisted] = Contender(generate_method(assistant=assistant, **ASSISTED[assisted]), "assisted", c=c)
    return found


def llama_contenders(gguf) -> dict[str, Contender]:
    """{name: contender} of llama.cpp on a GGUF file, plain and with its lookup; {} without the package or a file."""
    if not gguf or not llama_cpp.has_llama_cpp():
        return {}
    lookup = llama_method(gguf, prompt_lookup=LLAMA_LOOKUP)
    return {"llama.cpp": Contender(llama_method(gguf), "llama.cpp", "its own"),
            f"llama.cpp lookup {LLAMA_LOOKUP}": Contender(lookup, "llama.cpp lookup", "its own")}
