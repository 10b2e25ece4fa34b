"""The trained toy family: loads the models, the tokenizer and the held-out text that stand in lab/toy/weights/."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import numpy as np

from lab.support.errors import BadInput
from lab.support.files import replacing
from lab.support.vocabulary import fingerprint
from lab.toy.transformer import Config, TransformerLM

WEIGHTS = Path(__file__).resolve().parent / "weights"
NAMES = ("small", "medium", "large", "large-exit")
KINDS = ("code", "prose")
DOCUMENT_BREAK = "\n<|end|>\n"
EOS = 0
TRAINED_LENGTH = 256           # tokens of the longest text in training; the models hold more, and predict it badly


@lru_cache(maxsize=1)
def tokenizer():
    """The family's byte-level BPE tokenizer (tokenizers.Tokenizer); id 0 is <|end|>."""
    from tokenizers import Tokenizer
    return Tokenizer.from_file(str(WEIGHTS / "tokenizer.json"))


def past_training(n_tokens: int) -> list[str]:
    """What is to be said of texts of n_tokens: a sentence where they are longer than any in training, else nothing."""
    if n_tokens <= TRAINED_LENGTH:
        return []
    return [f"The toy models were trained on texts of up to {TRAINED_LENGTH} tokens. Here they read {n_tokens}: past "
            f"{TRAINED_LENGTH} they predict badly, so read times and bytes there, not acceptance or quality."]


def encode(text: str) -> list[int]:
    return tokenizer().encode(text).ids


def decode(tokens) -> str:
    return tokenizer().decode([int(t) for t in tokens], skip_special_tokens=False)


@lru_cache(maxsize=1)
def tokenizer_id() -> str:
    """Fingerprint of the family's vocabulary, which its decoders have as `tokenizer`."""
    return fingerprint(tokenizer())


def heldout(kind: str) -> str:
    """Text the models have not seen: "code" (standard library files) or "prose" (the language reference)."""
    if kind not in KINDS:
        raise BadInput(f"No held-out text of kind {kind!r}: code or prose would be right.")
    return (WEIGHTS / f"heldout_{kind}.txt").read_text(encoding="utf-8")


def prompts(kind: str, n: int, n_tokens: int) -> list[list[int]]:
    """Ids of n prompts of held-out text, spread over it, each from the beginning of a line and n_tokens long."""
    text = heldout(kind)
    starts = [text.index("\n", int(at)) + 1 for at in np.linspace(0, 0.9 * len(text), n)]
    return [encode(text[at:at + 20 * n_tokens])[:n_tokens] for at in starts]


def passages(kind: str, n: int, n_tokens: int) -> np.ndarray:
    """(n, n_tokens) ids of held-out text, spread evenly over all of it."""
    ids = np.array(encode(heldout(kind)))
    starts = np.linspace(0, len(ids) - n_tokens, n).astype(int)
    return ids[starts[:, None] + np.arange(n_tokens)]


def corpus(kind: str) -> Path:
    """A file of training text for tables of n-grams, JSON Lines compressed by zstandard: "code" or "prose"."""
    if kind not in KINDS:
        raise BadInput(f"No corpus of kind {kind!r}: code or prose would be right.")
    return WEIGHTS / f"corpus_{kind}.jsonl.zst"


@lru_cache(maxsize=8)
def load_params(name: str = "large") -> tuple[dict, Config]:
    """(params, config) of a trained model, float16 on disk, float32 here. Do not change the arrays: they are shared."""
    from safetensors import safe_open
    path = WEIGHTS / f"{name}.safetensors"
    if name not in NAMES or not path.exists():
        raise BadInput(f"No trained toy model {name!r} in lab/toy/weights; one of {', '.join(NAMES)} would be right.")
    with safe_open(path, framework="np") as f:
        meta = f.metadata()
        flat = {key: f.get_tensor(key).astype(np.float32) for key in f.keys()}  # noqa: SIM118 - a file is no dict
    if meta["tokenizer"] != tokenizer_id():
        raise BadInput(f"{path.name} was trained with another tokenizer than lab/toy/weights/tokenizer.json.")
    config = Config(**json.loads(meta["config"]))
    layers: list[dict[str, np.ndarray]] = [{} for _ in range(config.n_layers)]
    for key, w in flat.items():
        if key.startswith("layers."):
            _, i, part = key.split(".")
            layers[int(i)][part] = w
    return {"embed": flat["embed"], "norm": flat["norm"], "layers": layers}, config


class TrainedToy(TransformerLM):
    """A trained model of the family as a decoder, and as a `decode_lab.Text`; it has no chat template."""

    eos = (EOS,)
    trained_length = TRAINED_LENGTH

    def __init__(self, name: str):
        super().__init__(*load_params(name), name=name)
        self.tokenizer = tokenizer_id()

    def encode(self, text: str) -> list[int]:
        return encode(text)

    def decode(self, tokens) -> str:
        return decode(tokens)

    def chat(self, message: str) -> list[int]:
        """The message's own ids: the family was trained on plain text."""
        return encode(message)

    def render(self, turns) -> None:
        return None


def load(name: str = "large") -> TrainedToy:
    """A trained model as a decoder with an empty cache of its own."""
    return TrainedToy(name)


def save(name: str, flat: dict, config: Config, tokenizer_id: str) -> None:
    """Write {"layers.0.wq": array, …} in float16, whole or not at all."""
    from safetensors.numpy import save_file
    with replacing(WEIGHTS / f"{name}.safetensors") as temporary:
        save_file({k: np.ascontiguousarray(w, dtype=np.float16) for k, w in flat.items()}, temporary,
                  {"config": json.dumps(asdict(config)), "tokenizer": tokenizer_id})
