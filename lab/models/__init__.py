"""Real models: finding them, loading them, decoding with them; and models made of others (some layers, rounded).

Here: whatever implements decode_lab.Decoder over an engine. Not here: what proposes tokens (drafters), the toy (toy).
"""

from lab.models.finding import DEFAULT, DTYPES, HUB_IDS, find_models, gguf_file

__all__ = ["DEFAULT", "DTYPES", "HUB_IDS", "find_models", "gguf_file", "load"]


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
