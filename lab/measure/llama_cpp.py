"""llama.cpp on a GGUF file, where the optional package llama-cpp-python is installed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Collection
from pathlib import Path
from time import perf_counter
from unittest import mock

import numpy as np

from lab.measure.generate import Rival, as_run
from lab.support.errors import BadInput

LLAMA_PACKAGE = "llama-cpp-python"


def has_llama_cpp() -> bool:
    """Whether the optional package llama-cpp-python can be imported here."""
    return importlib.util.find_spec("llama_cpp") is not None


def llama_cpp(path: str | Path, *, prompt_lookup: int = 0, max_ngram: int = 2, threads: int = 1,
              context: int = 1024) -> Callable[..., Rival]:
    """llama.cpp on a GGUF file -> generate(prompt, n_new, eos=()) -> Rival, greedy, on the CPU.

    The file's weights stay packed, and the products round their inputs to 8 bits, so the text may differ from that of
    the same weights unpacked: compare it with llama.cpp's own plain text. prompt_lookup: tokens that the package's
    LlamaPromptLookupDecoding copies (0: plain decoding), after suffixes of up to max_ngram tokens. threads: for one
    token and for several. context: tokens that prompt and output may have. BadInput where the package is missing.
    """
    if not has_llama_cpp():
        raise BadInput(f'{LLAMA_PACKAGE} is not installed; "pip install {LLAMA_PACKAGE}" builds it from source')
    if not os.path.isfile(path):
        raise BadInput(f'there is no GGUF file "{path}"; the path of one that exists would be right')
    if min(threads, context) < 1 or prompt_lookup < 0:
        raise BadInput(f"llama.cpp with {threads} threads, a context of {context} and prompt_lookup = {prompt_lookup} "
                       "is impossible: 1 or more threads and tokens, and 0 (off) or more, would be right.")
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
    draft = LlamaPromptLookupDecoding(max_ngram, prompt_lookup) if prompt_lookup else None
    # One batch holds a whole prompt, so that it is one forward. logits_all: without it, the package's buffer for a
    # draft's logits has n_batch rows, but is indexed by position.
    engine = Llama(str(path), n_ctx=context, n_batch=context, n_ubatch=context, n_threads=threads,
                   n_threads_batch=threads, draft_model=draft, logits_all=draft is not None, verbose=False)
    evaluate = engine.eval

    def run(prompt, n_new: int, eos: Collection[int] = ()) -> Rival:
        prompt, stop = [int(t) for t in prompt], frozenset(map(int, eos))
        if not prompt or n_new < 1 or len(prompt) + n_new > context:
            raise BadInput(f"{len(prompt)} prompt tokens and {n_new} new ones do not fit: at least one of each, and at "
                           f"most {context} together, would be right.")
        sent: list[tuple[float, list[int]]] = []     # when a forward began, and its drafted ids
        got: list[tuple[float, list[int]]] = []      # when new tokens came, and the tokens
        new: list[int] = []

        def timed(tokens):
            if not sent and list(tokens) != prompt:
                raise RuntimeError(f"llama.cpp prefilled {len(tokens)} of {len(prompt)} prompt tokens.")
            sent.append((perf_counter(), [int(t) for t in tokens[len(prompt) if not sent else 1:]]))
            got.append((0.0, []))
            evaluate(tokens)

        engine.reset()                               # else a prompt seen before would not be prefilled
        with mock.patch.object(engine, "eval", timed):
            started = perf_counter()
            for token in engine.generate(prompt, temp=0.0, repeat_penalty=1.0):
                new.append(int(token))
                got[-1] = perf_counter(), got[-1][1] + [int(token)]
                if len(new) == n_new or token in stop:
                    break
            seconds = perf_counter() - started
        return Rival(np.array(prompt + new, dtype=np.int64), as_run(started, sent, got, eos, "budget"), seconds)

    return run
