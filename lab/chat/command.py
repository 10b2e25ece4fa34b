"""python -m lab chat: a conversation with a model whose answers are drafted from n-gram statistics.

    python -m lab chat                                  with the default target; drafts from what was said so far
    python -m lab chat --table code3.ngram code2.ngram  with tables too (python -m lab ngram build makes them)
    python -m lab chat --text "Why is the sky blue?" --check
    python -m lab chat --target lfm3-vl --image photo.jpg

An answer is written as it is decoded, each token in the colour of the tier that drafted it. Below it stand what it
took and, with tables, what was read of them. The cache stays from turn to turn, so that only what is new is read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

import console
from console import BadInput, put
from lab import models
from lab.chat.check import bench
from lab.chat.conversation import Chat
from lab.chat.screen import legend, note
from lab.chat.settings import Settings, checked, gathered


def run(argv: Sequence[str]) -> int:
    """Do what the flags ask for -> exit status: 0; 1 where --check found a bug; 130 where Ctrl-C left."""
    settings = console.flags(Settings, gathered(argv, "--table", "--image"), "python -m lab chat",
                             (__doc__ or "").partition("\n")[0].partition(": ")[2])
    sampler = checked(settings)
    chat = Chat(load(settings), settings, sampler)
    try:
        if settings.bench:
            bench(chat, settings.text)
        elif settings.text:
            with chat.interrupts:
                chat.answer(settings.text, chat.prompt(settings.text))
            if chat.interrupts.asked:
                return 130
        else:
            return conversation(chat)
    except KeyboardInterrupt:
        put("\n")
        return 130
    return chat.status


def load(settings: Settings):
    """The decoder that the settings name, by `lab.models.load`."""
    if settings.target.partition(":")[0] == "toy":
        model = models.load(settings.target)
        model.name = f"toy {model.name}"
        return model
    from transformers.utils import logging
    logging.set_verbosity_error()                # what transformers says of faster kernels would stand in the text
    return models.load(settings.target, settings.device, settings.dtype)


def conversation(chat: Chat) -> int:
    """Answer one line after the other until the input ends, or the context -> exit status."""
    note(f"{chat.model.name}. Ctrl-C ends an answer; a second one, or the end of input, leaves.")
    for sentence in getattr(chat.model, "notes", ()):
        note(sentence)
    legend(chat)
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no text
    while True:
        try:
            message = asked()
            if message.strip():
                with chat.interrupts:
                    if turn(chat, message):
                        return chat.status
        except EOFError:
            return chat.status
        except KeyboardInterrupt:
            put("\n")
            if chat.interrupts.asked:            # by the last Ctrl-C, and nothing was said since
                return 130
            chat.interrupts.asked = True
            note("Once more, or the end of input (Ctrl-D), leaves.")


def turn(chat: Chat, message: str) -> bool:
    """Answer a message, or say why that is impossible -> whether the context is full."""
    try:
        prompt = chat.prompt(message)
    except BadInput as error:
        note(f"{str(error).rstrip('.')}.")
        return False
    chat.answer(message, prompt)
    if not chat.full():
        return False
    note(f"The context of {chat.model.name} is full, {chat.left()} of {chat.model.max_length} tokens are left: the "
         "chat ends here, and a new one would begin with an empty context.")
    return True


def asked() -> str:
    """The next message, without the end of its line; EOFError where the input has ended."""
    terminal = sys.stdin is not None and sys.stdin.isatty()
    if terminal and console.columns():
        with suppress(ImportError):
            import readline  # noqa: F401 - lines can be edited, and called back
        try:
            return input("> ")
        except EOFError:
            put("\n")
            raise
    line = sys.stdin.readline() if sys.stdin is not None else ""
    if not line:
        raise EOFError
    if line.strip():
        put(f"> {line.rstrip()}\n")              # so that what is read later has both sides
    return line.rstrip("\r\n")
