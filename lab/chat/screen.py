"""What a chat shows: an answer while it grows, each token in the colour of the tier that drafted it, and remarks."""

from __future__ import annotations

import copy
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len

import console
from console import fmt_bytes, put
from decode_lab import Draft
from lab.drafters.tiers import tier_name
from lab.ngram import disk
from lab.ngram.table import NgramTable

if TYPE_CHECKING:
    from lab.chat.conversation import Chat

COLOURS = {"lookup": "green", "trigram": "cyan", "bigram": "yellow"}


def colour(source: str) -> str:
    """Of a draft's source, in rich's words; magenta for tables of higher orders."""
    return COLOURS.get(source, "magenta")


def note(text: str) -> None:
    """A remark beside a conversation, indented and wrapped, dim on a terminal."""
    put(textwrap.fill(text, console.columns() or console.WIDTH, initial_indent="  ", subsequent_indent="  ",
                      break_on_hyphens=False, break_long_words=False), "dim")
    put("\n")


class Pieces:
    """The text of a growing sequence, piece by piece: a character's bytes may come in several tokens."""

    def __init__(self, decode: Callable[[list[int]], str]):
        self.decode, self._start, self._end = decode, 0, 0
        self.tokens: list[int] = []

    def add(self, token: int) -> str:
        """What this token adds to the text; "" in the middle of a character."""
        self.tokens.append(token)
        text = self._rest()
        partial = text.endswith("\N{REPLACEMENT CHARACTER}") and len(self.tokens) - self._end < 4
        return "" if partial else self._take(text)

    def end(self) -> str:
        """What was held back."""
        return self._take(self._rest())

    def _rest(self) -> str:
        # Decoded behind the piece before, because some tokenizers drop the space of a first token.
        return self.decode(self.tokens[self._start:])[len(self.decode(self.tokens[self._start:self._end])):]

    def _take(self, text: str) -> str:
        self._start, self._end = self._end, len(self.tokens)
        return text


class Screen:
    """Writes an answer as its rounds end: coloured and wrapped at words on a terminal, as it stands elsewhere.

    show_drafts: rejected drafts too, struck through; elsewhere they stand as [-text-].
    """

    def __init__(self, model, show_drafts: bool):
        self.eos, self.show_drafts, self.width = frozenset(model.eos), show_drafts, console.columns()
        self._pieces, self._column, self._gap, self._waiting = Pieces(model.decode), 0, "", False
        self._word: list[tuple[str, str]] = []            # (text, style) of the word that is growing

    def wait(self, text: str) -> None:
        """On a terminal, a line that stays until the answer begins."""
        if text and self.width:
            self._waiting = True
            put(text, "dim")

    def round(self, new: Sequence[int], draft: Draft) -> None:
        """Write the tokens that a round brought: drafted ones, those rejected, the target's own."""
        self._begin()
        n = len(new) - 1
        for token, source in zip(new[:n], draft.sources):
            self._write(self._pieces.add(token), colour(source))
        rejected = [token for token in draft.tokens[n:] if token not in self.eos]
        if self.show_drafts and rejected and draft.tokens[n] != new[n]:
            apart = copy.copy(self._pieces)
            apart.tokens = list(apart.tokens)
            text = "".join([*(apart.add(token) for token in rejected), apart.end()]).replace("\n", "\\n")
            style = f"strike {colour(draft.sources[n])}"
            self._write(text if self.width else f"[-{text}-]", style)
        if new[n] not in self.eos:
            self._write(self._pieces.add(new[n]))

    def end(self) -> None:
        """Write what was held back."""
        self._begin()
        self._write(self._pieces.end())
        self._flush()

    def _begin(self) -> None:
        if self._waiting:
            put("\r\x1b[K")
        self._waiting = False

    def _write(self, text: str, style: str = "") -> None:
        # Other control characters could move the cursor, or worse.
        text = "".join(c for c in text if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f"))
        if not self.width:
            put(text)
            return
        for run in re.findall(r"\n|[^\S\n]+|\S+", text):
            if not run.isspace():
                self._word.append((run, style))
                continue
            self._flush()
            if run == "\n":
                put("\n")
                self._column, self._gap = 0, ""
            else:
                self._gap += run.replace("\t", "    ")

    def _flush(self) -> None:
        """Write the word that has grown until now, on a new line where it does not fit."""
        length = sum(cell_len(text) for text, _ in self._word)
        if self._word and self.width:
            if self._column and self._column + len(self._gap) + length > self.width:
                put("\n")
                self._column, self._gap = 0, ""
            put(self._gap)
            for text, style in self._word:
                put(text, style)
            self._column = (self._column + len(self._gap) + length - 1) % self.width + 1
            self._word, self._gap = [], ""


def legend(chat: Chat) -> None:
    """Which colour is whose, where there are colours."""
    if chat.settings.gamma and console.columns():
        put("Colours: ", "dim")
        for name in ["lookup", *dict.fromkeys(tier_name(table.order) for table in chat.tables)]:
            put(name, colour(name))
            put(", ", "dim")
        struck = "; struck through: rejected" if chat.settings.show_drafts else ""
        put(f"else the target's own{struck}.\n", "dim")
    put("\n")


def io_line(tables: Sequence[NgramTable], since: Sequence, use: disk.IoUse, cold: bool | None) -> str:
    """What was read of tables. since: their `use` at the start. cold: whether that was cold; None: nobody asked."""
    def known(value, text=str):
        return "unknown" if value is None else text(value)

    lookups, blocks = (sum(getattr(table.use, what) - getattr(before, what) for table, before in zip(tables, since))
                       for what in ("lookups", "blocks"))
    pages = [f"{table.path.name} {known(table.resident(), lambda found: f'{found[0]:,} of {found[1]:,}')}"
             for table in tables]
    start = "" if cold is None else " from a cold start" if cold else " (not cold: this system keeps them in memory)"
    return (f"I/O{start}: {lookups:,} lookups, {blocks:,} blocks read first; pages in memory: {', '.join(pages)}; "
            f"from the device {known(use.bytes_read, fmt_bytes)}; faults: {known(use.major_faults)} major, "
            f"{known(use.minor_faults)} minor.")
