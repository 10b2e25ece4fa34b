"""Whether a model decodes as the lab needs it: a short check on the loaded model itself, before any text.

Rule: every HFDecoder is checked when it is made, however it is made, so one used from a script of your own is as safe
as a demo's. A further decoder of the same loaded model, and one that is made of a checked target's modules (some
layers, rounded weights), takes over the outcome.
"""

from __future__ import annotations

import re
from weakref import WeakKeyDictionary

import numpy as np
import torch

from lab.models.cache import first_line, only_rows

TOKENS = 8                           # of a check, behind the place where it begins
WALKED = 300                         # edges up to here are walked past: a few forwards of so many tokens are quick
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "max_target_positions",
                 "n_ctx", "seq_length", "context_length")
# Root mean square over the vocabulary, in parts of the row's standard deviation. A wrong mask or position is far above
# all of them; 16-bit rounding adds up over the layers, and may send a token to another expert.
ALLOWED = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.3}
_passed: WeakKeyDictionary = WeakKeyDictionary()                # {model: {what the check depends on: tree_as_paths}}


def context_limit(config) -> tuple[int | None, str]:
    """(most tokens that a sequence may have, a sentence about it), by a text configuration.

    None and a sentence where the configuration names no limit; "" where there is nothing to say.
    """
    found = (getattr(config, name, None) for name in CONTEXT_NAMES)
    limit = next((int(value) for value in found if isinstance(value, int) and value > 0), None)
    if limit is None:
        return None, "Its configuration names no longest context, so nothing stops a text where it was trained to stop."
    # Past the original context these change the rotation of all positions at once; what the cache holds was rotated
    # before (transformers' own generate drops its cache there). YaRN and the others rotate the same at any length.
    original = min((rope["original_max_position_embeddings"] for rope in _rotations(config)
                    if rope.get("rope_type") in ("longrope", "dynamic")), default=limit)
    if original < limit:
        return original, (f"Its context of {limit} tokens is used up to {original}: beyond that it rotates all "
                          "positions in another way, which the rows in a cache cannot follow.")
    return limit, ""


def _rotations(config) -> list[dict]:
    """The rotary settings of a configuration, of each kind of layer, with an original context."""
    given = getattr(config, "rope_parameters", None) or {}
    every = [given, *(value for value in given.values() if isinstance(value, dict))]
    outer = getattr(config, "original_max_position_embeddings", None)
    every = [{"original_max_position_embeddings": outer, **rope} for rope in every]
    return [rope for rope in every if rope["original_max_position_embeddings"]]


def edges(config, max_length: int | None = None) -> list[int]:
    """Lengths at which a text configuration changes what a token sees: sizes of windows and chunks, increasing."""
    found = {value for name, value in config.to_dict().items() if re.search("window|chunk|local_attention", name)
             and "layers" not in name and type(value) is int and value > 1}
    return sorted(value for value in found if max_length is None or value < max_length)


def admit(decoder) -> str:
    """Check a new decoder, and choose its `tree_as_paths` -> why it cannot be used; "" where it can.

    On the same ids, plain decoding, a chain, a rewind and a tree must give the logits of transformers' own forward
    without a cache, up to rounding; so too across each edge of its windows that is near. A tree goes as it is where
    that is right, else as paths. Where a window is too long to walk through, the configuration decides: masks of a
    window come from transformers, which a tree's mask would replace, so the tree goes as paths. The cache is empty
    afterwards.
    """
    limit, config = decoder.max_length, decoder.config
    if limit is not None and limit < TOKENS:
        return f"it holds {limit} tokens, and the lab's check needs {TOKENS}"
    passed = _passed.setdefault(decoder.model, {})
    key = config.to_json_string(), getattr(config, "_attn_implementation", ""), str(decoder.dtype), str(decoder.device)
    if key in passed:
        decoder.tree_as_paths = passed[key]
        return ""
    far = edges(config, limit)
    decoder.tree_as_paths = bool(far) or not only_rows(config)
    near = [edge - 4 for edge in far if edge <= WALKED and (limit is None or edge + 4 <= limit)]
    try:
        for start in [0, *(start for start in near if start > 0)]:
            reason = _chain(decoder, start) or _tree(decoder, start)
            if reason:
                return reason
    finally:
        decoder.rewind(0)
    passed[key] = decoder.tree_as_paths
    return ""


def _chain(decoder, start: int) -> str:
    """What is wrong with three steps, a chain and a rewind behind `start` tokens; "" for nothing."""
    ids = _ids(decoder, start + TOKENS)
    rows = []
    try:
        wanted = _cacheless(decoder, [ids])[0]
        decoder.rewind(0)
        if start:
            rows.append(decoder.send(ids[:start]))
            decoder.commit(range(start))
        for token in ids[start:start + 3]:
            rows.append(decoder.send([token]))
            decoder.commit([0])
        rows.append(decoder.send(ids[start + 3:]))
        decoder.rewind(start + 5)
        decoder.commit(range(2))
        again = decoder.send(ids[start + 5:])
    except Exception as error:                                   # a model's own code may raise anything
        return f"a forward with the lab's cache fails: {first_line(error)}"
    if not bool(torch.isfinite(wanted).all()):
        return "its logits are not finite numbers"
    if _differ(decoder, torch.cat(rows), wanted):
        return f"with a cache it computes other logits than without one, by token {start + TOKENS}"
    if _differ(decoder, again, wanted[start + 5:]):
        return f"after a rewind it computes other logits than without one, by token {start + TOKENS}"
    return ""


def _tree(decoder, start: int) -> str:
    """As `_chain`, with a tree of four nodes, one path of it committed, and a token behind; `tree_as_paths` is set."""
    ids = _ids(decoder, start + 9)
    prefix, (a, b, c, d, behind) = ids[:start + 4], ids[start + 4:]
    nodes, parents = [a, b, c, d], [-1, 0, 0, 2]                 # a, then b or c; d behind c
    try:
        first, second = _cacheless(decoder, [[*prefix, a, b, b], [*prefix, a, c, d]])
        after = _cacheless(decoder, [[*prefix, a, c, d, behind]])[0, -1:]
    except Exception as error:
        return f"a forward without a cache fails: {first_line(error)}"
    at = len(prefix)
    wanted = torch.stack([first[at], first[at + 1], second[at + 1], second[at + 2]])
    while True:
        try:
            decoder.rewind(0)
            decoder.send(prefix)
            decoder.commit(range(at))
            rows = decoder.send(nodes, parents)
            decoder.commit([0, 2, 3])
            right = not _differ(decoder, rows, wanted) and not _differ(decoder, decoder.send([behind]), after)
        except Exception:                                        # Falcon with ALiBi: no place for a mask
            right = False
        if right:
            return ""
        if decoder.tree_as_paths:
            return "the nodes of a tree get other logits than a forward over their path gives"
        decoder.tree_as_paths = True


def _ids(decoder, n: int) -> list[int]:
    return np.random.default_rng(0).integers(0, decoder.vocab_size, n).tolist()


@torch.inference_mode()
def _cacheless(decoder, batch) -> torch.Tensor:
    """(B, n, V) logits of transformers' own forward over whole sequences (B, n)."""
    return decoder.model(input_ids=torch.tensor(batch, device=decoder.device), use_cache=False).logits


def _differ(decoder, rows, wanted) -> bool:
    """Whether logits (n, V) differ from those wanted by more than rounding."""
    rows, wanted = rows.float(), wanted.float()
    off = (rows - wanted).square().mean(-1).sqrt()
    return not bool((off <= ALLOWED.get(decoder.dtype, 0.3) * wanted.std(-1)).all())
