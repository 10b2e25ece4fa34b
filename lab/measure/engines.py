"""What a user would run instead of our loops, as methods that take turns with them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache

import torch

from lab.measure import generate as transformers_generate
from lab.measure import llama_cpp


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


def usual_methods(assistant, name: str, gguf=None) -> dict[tuple[str, str], Callable]:
    """{(name, kernels): method} of what one would use instead: transformers' `generate`, plain, with its prompt lookup,
    and with a model, called by `name`, that assists; where llama-cpp-python is installed, llama.cpp on a GGUF file."""
    found = {(f"generate{how}", kernels): generate_method(kernels == "loaded", prompt_lookup=n)
             for kernels in ("loaded", "packed") for how, n in (("", 0), (" lookup 5", 5), (" lookup 10", 10))}
    found[f"{name} assists", "packed"] = generate_method(assistant=assistant)
    if gguf and llama_cpp.has_llama_cpp():
        found |= {(f"llama.cpp{how}", "its own"): llama_method(gguf, prompt_lookup=n, threads=torch.get_num_threads())
                  for how, n in (("", 0), (" lookup 10", 10), (" lookup 20", 20))}
    return found
