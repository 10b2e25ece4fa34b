"""The flags of python -m lab chat, and what they must not contradict."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from console import BadInput, Count, NonNegative
from decode_lab import Sampler
from lab.support.flags import choice


@dataclass(frozen=True)
class Settings:
    text: str = ""                   # one message: it is answered, and that is all
    image: tuple[str, ...] = ()      # image files that the first message shows, for a model that reads images
    system: str = ""                 # what the model is told before the conversation
    target: str = "smollm2-135m"     # the model: a known name, a folder, a .gguf file, a hub id, or toy
    device: str = "auto"             # auto, cpu, cuda, cuda:1, ...
    dtype: Annotated[str, choice("float32", "bfloat16", "float16")] = "float32"  # of the weights.
    max_new_tokens: Count = 512      # tokens of an answer, at most
    gamma: NonNegative = 10          # tokens drafted a round, at most; 0 is plain decoding
    table: tuple[str, ...] = ()      # n-gram tables of the model's tokenizer, such as a trigram and a bigram
    table_io: Annotated[str, choice("mmap", "ram")] = "mmap"  # tables are mapped, or read whole at the start.
    cold_table: bool = False         # before each answer the system drops the tables from memory
    show_drafts: bool = False        # also show the drafts that were rejected, struck through
    check: bool = False              # decode each answer plainly too: both must be the same text
    bench: bool = False              # time plain and drafted decoding of --text in turn
    temperature: float = 0.0         # 0 takes the likeliest token; above, tokens are drawn
    top_k: NonNegative = 0           # draw from the k likeliest tokens; 0 is off
    top_p: float = 1.0               # draw from the likeliest tokens that hold this share; 1 is off
    min_p: float = 0.0               # draw from tokens with this share of the likeliest one's probability; 0 is off
    repetition_penalty: float = 1.0  # above 1, tokens that were there before become less likely
    seed: NonNegative = 0            # of the drawing


def gathered(argv: Sequence[str], *flags: str) -> list[str]:
    """argv with each of these flags once, behind it all values that it was given: they may be repeated."""
    rest: list[str] = []
    values: dict[str, list[str]] = {flag: [] for flag in flags}
    taker: list[str] | None = None
    for word in argv:
        flag, equals, value = word.partition("=")
        if word.startswith("--"):
            taker = values.get(flag)
            if taker is not None and equals:
                taker.append(value)
                taker = None
                continue
        (rest if taker is None else taker).append(word)
    for flag, words in values.items():
        words = [word for word in words if word != flag]
        rest += [flag, *words] if words else [flag] if flag in argv else []
    return rest


def checked(settings: Settings) -> Sampler:
    """The sampler that the settings ask for. BadInput where they contradict one another or name missing files."""
    def refuse(holds, sentence: str) -> None:
        if holds:
            raise BadInput(sentence)

    sampler = Sampler(settings.temperature, settings.top_k, settings.top_p, settings.min_p,
                      settings.repetition_penalty)
    if sampler.greedy:
        for name in ("top_k", "top_p", "min_p"):
            refuse(getattr(settings, name) != getattr(Settings, name), f"--{name.replace('_', '-')} shapes what tokens "
                   "are drawn from, and at --temperature 0 none is drawn: a temperature above 0 would be right")
    refuse(settings.check and not sampler.greedy, "--check compares greedy texts, and texts that are drawn differ by "
           "chance: --temperature 0 would be right")
    refuse(settings.bench and not settings.text, '--bench times the answer to one message: --text "..." is missing')
    refuse(settings.bench and settings.check, "--bench compares the texts that it times: leave --check out")
    refuse(settings.cold_table and not settings.table, "--cold-table needs a --table")
    refuse(settings.table_io != "mmap" and not settings.table, f"--table-io {settings.table_io} needs a --table")
    for name in ("table", "check", "bench", "show_drafts"):
        refuse(not settings.gamma and getattr(settings, name), f"--gamma 0 drafts nothing, which leaves nothing for "
               f"--{name.replace('_', '-')} to do: 1 or more would be right")
    for flag, names in (("--image", settings.image), ("--table", settings.table)):
        for name in names:
            refuse(not os.path.isfile(Path(name).expanduser()), f'{flag}: there is no file "{name}"')
    if settings.target.partition(":")[0] == "toy":
        for name in ("device", "dtype"):
            value = getattr(settings, name)
            refuse(value != getattr(Settings, name), f"--{name} {value} is for a real model, and the toy runs on numpy "
                   f"alone: leave --{name} out")
    return sampler
