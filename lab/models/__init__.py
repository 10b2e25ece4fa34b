"""Real models: finding them, loading them, decoding with them; and models made of others (some layers, rounded).

Here: whatever implements decode_lab.Decoder, over any engine (transformers, llama.cpp). Not here: what proposes
tokens (drafters), the toy (toy).
"""

from typing import Annotated

from lab.models.finding import DEFAULT, DTYPES, HUB_IDS, find_models, gguf_file
from lab.support.flags import Rule

__all__ = ["DEFAULT", "DTYPES", "HUB_IDS", "Real", "find_models", "gguf_file", "load"]


def _is_real(name: str) -> bool:
    return name.partition(":")[0].lower() not in ("toy", "random")


# The type of an assumption of the demos from 14 on: what `load` takes, but for the toy and drawn weights.
Real = Annotated[str, Rule("a real model in the demos from 14 on (01 to 13 are the toy's)", _is_real)]


def load(name: str | None = None, device: str = "cpu", dtype: str = "float32"):
    """Any decoder by name, with an empty cache.

    name: None for the default target; "toy", "toy:small" and the like for the toy family; "random:pythia-70m" for a
    registered shape with drawn weights; else a real model, as `lab.models.loading.load` takes it. BadInput for a model
    that is not here or cannot be used.
    """
    kind, _, rest = str(name or DEFAULT).partition(":")
    if kind == "toy":
        from lab import toy
        return toy.load(rest or "large")
    if kind == "random":
        from lab.models.random_weights import random_model
        return random_model(rest, device, dtype)
    from lab.models import loading
    return loading.load(name, device, dtype)
