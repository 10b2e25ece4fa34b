"""A conversation: turns of text, the ids that the model read and wrote, and an answer as it is decoded."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import shorten
from time import perf_counter

import numpy as np

from console import BadInput, fmt_time, put
from decode_lab import Draft, Drafter, Run, Sampler, speculative_generate
from lab.chat.check import compared
from lab.chat.screen import Screen, io_line, note
from lab.chat.settings import Settings, checked
from lab.drafters.tiers import NgramDrafter
from lab.models.kept_prefix import KeptPrefix
from lab.ngram import disk
from lab.ngram.table import NgramTable
from lab.support.vocabulary import without_a_row

LEFT = 0.2                                   # of the context: from here on each answer tells how much is left
ANSWER = "\ufffc answer \ufffc"              # stands in a template's text where the ids of an answer stand


class Chat:
    """A conversation: turns of text, and the ids that the model read and wrote.

    model: a decoder with encode, decode, chat (ids of a first message), render (the text of turns in a template, or
    None) and eos, as `lab.models.decoder.HFDecoder`; see and show where there are images. status: 1 once a check has
    found a bug.
    interrupts: ends an answer at a round's end. BadInput for images that the model does not read, and for tables that
    do not fit.
    """

    def __init__(self, model, settings: Settings, sampler: Sampler | None = None):
        self.settings, self.sampler = settings, sampler or checked(settings)
        self.model, self.cached = model, KeptPrefix(model)
        self.rng = np.random.default_rng(settings.seed)
        self.ids: list[int] = []
        self.images: list = []
        self.turns = [{"role": "system", "content": settings.system}] if settings.system else []
        if (settings.image or settings.system) and model.render([*self.turns, self._turn("")]) is None:
            raise BadInput(f"{model.name} has no chat template, so --system and --image have no place in its text")
        if settings.image and not hasattr(model, "see"):
            raise BadInput(f"{model.name} reads text only: an LFM3-VL model would be right for --image")
        self.images = [model.see(Path(path).expanduser()) for path in settings.image]
        self.tables: list[NgramTable] = []
        self.interrupts, self.status = Interrupts(), 0
        self.open_tables()

    def open_tables(self) -> bool:
        """Open the tables, with --cold-table after the system has dropped them from memory -> whether it did."""
        for table in self.tables:
            table.close()
        paths = [Path(path).expanduser() for path in self.settings.table]
        cold = self.settings.cold_table and all([disk.evict(path) for path in paths])
        self.tables = [NgramTable.open(path, self.settings.table_io, getattr(self.model, "tokenizer", None),
                                       self.model.vocab_size) for path in paths]
        return cold

    def drafter(self) -> Drafter | None:
        return NgramDrafter(self.tables) if self.settings.gamma else None

    def prompt(self, message: str) -> list[int]:
        """The ids of the conversation with one more message, up to where the answer begins; nothing is kept of it yet.

        Of the conversation so far these are the ids that were read and written, not those that its text would have.
        BadInput where they fill the context.
        """
        first, asked = not self.ids, self._turn(message)
        # An end of text that the model wrote is left out: the template writes it again after an answer.
        ids = self.ids[:-1] if self.ids and self.ids[-1] in self.model.eos else list(self.ids)
        turns = self.turns if first else [*self.turns[:-1], {"role": "assistant", "content": ANSWER}]
        text = self.model.render([*turns, asked])
        if text is None:
            new = self.model.chat(message) if first else self.model.encode("\n\n" + message)
        elif first or ANSWER in text:
            new = self.model.encode(text if first else text.rpartition(ANSWER)[2])
        else:                                    # a template that rewrites answers: the whole is read as it says
            ids, new = [], self.model.encode(self.model.render([*self.turns, asked]))
        self._check_ids(ids + new, message)
        if first and self.images:
            new = self.model.show(new, self.images)
        limit = getattr(self.model, "max_length", None)
        if limit is not None and len(ids) + len(new) >= limit:
            left = f", of which {max(limit - len(ids) - 1, 0)} are left" if ids else ""
            raise BadInput(f"The message takes {len(new)} tokens, and {self.model.name} holds {limit}{left}: a shorter "
                           f"one{' or a new chat' if ids else ''} would be right")
        return ids + new

    def _check_ids(self, ids: list[int], message: str) -> None:
        """BadInput for a prompt without tokens, and for one with a token that the model has no row for."""
        if not ids:
            raise BadInput(f'The message "{message}" gives no tokens: a longer one would be right')
        size = self.model.vocab_size
        unknown = next((token for token in ids if token >= size), None)
        if unknown is None:
            return
        sources = {"The message": message, "--system": self.settings.system}
        source = next((name for name, text in sources.items() if unknown in self.model.encode(text)), "The template")
        text = f' "{shorten(sources[source], 60)}"' if source in sources else ""
        raise without_a_row(self.model, unknown, source + text)

    def _turn(self, message: str) -> dict:
        """A message as templates take it; the first one shows the images."""
        shown = [{"type": "image"}] * len(self.images) if not self.ids else []
        return {"role": "user", "content": [*shown, {"type": "text", "text": message}] if shown else message}

    def answer(self, message: str, prompt: list[int]) -> Run:
        """Write the answer to a message, whose `prompt` this is, as it is decoded, and what it took -> its rounds."""
        before = disk.io_use()
        cold = self.open_tables() if self.settings.cold_table else None
        used = [copy.copy(table.use) for table in self.tables]
        screen = Screen(self.model, self.settings.show_drafts)
        unread = len(prompt) - self.cached.shared(prompt)
        screen.wait(f"reading {unread} tokens ..." if unread > 500 else "")
        watch = Watched(self.drafter(), prompt, screen.round)
        tokens, run = self.decode(prompt, watch, self.settings.max_new_tokens, screen.end)
        self.turns += [self._turn(message), {"role": "assistant", "content": self.model.decode(tokens[len(prompt):])}]
        self.ids = tokens
        put("\n")
        note(self._took(run, watch))
        if self.tables:
            note(io_line(self.tables, used, disk.io_use() - before, cold))
        if self.settings.check and run.rounds:
            self.check(prompt, tokens)
        put("\n")
        return run

    def decode(self, prompt, watch: Watched, n_new: int, finish: Callable = lambda: None) -> tuple[list[int], Run]:
        """(ids of prompt and answer, rounds), ended early where `interrupts` asks for it; then calls `finish`."""
        rounds = Run()

        def gamma(run):
            nonlocal rounds
            rounds = run                         # all rounds so far are whole
            if self.interrupts.asked:
                raise Stopped
            return self.settings.gamma

        try:
            tokens, rounds = speculative_generate(self.cached, watch, prompt, n_new, gamma, rng=self.rng,
                                                  sampler=self.sampler, eos=self.model.eos)
            return tokens.tolist(), rounds
        except Stopped:
            return watch.tokens, rounds
        finally:
            finish()

    def check(self, prompt, tokens) -> None:
        """Say whether plain decoding writes the same, and if not, whether rounding explains it."""
        plain, _ = self.decode(prompt, Watched(None, prompt), len(tokens) - len(prompt))
        if self.interrupts.asked:
            note("Check: not finished.")
            return
        sentence, bug = compared(self.cached, plain, tokens, len(prompt), self.sampler)
        note(f"Check: {sentence}")
        self.status = max(self.status, int(bug))

    def left(self) -> int | None:
        """Tokens that the context still holds; None where it has no end."""
        limit = getattr(self.model, "max_length", None)
        return None if limit is None else limit - len(self.ids)

    def full(self) -> bool:
        """Whether not even a short message would fit."""
        left = self.left()
        if left is None or left > 1000:
            return False
        try:
            self.prompt("?")
        except BadInput:
            return True
        return False

    def _took(self, run: Run, watch: Watched) -> str:
        if not run.rounds:
            return "No answer: stopped by Ctrl-C while the prompt was read."
        later = Run([r for r in run.rounds if not r.first])
        parts = [f"{run.n_tokens} tokens, the first after {fmt_time(run.ttft)}"
                 + (f", then {later.n_tokens / max(later.seconds - watch.shown_s, 1e-9):.1f} a second" if later.rounds
                    else "")]
        parts.append(f"{self.cached.sent + 1} of the prompt's {watch.n_prompt} read")
        if self.settings.gamma:
            parts.append(f"{len(run.rounds)} rounds, tau {run.tau:.2f}")
            tiers = [f"{source} {accepted} of {tested}" for source, (tested, accepted) in run.by_source.items()]
            parts.append("accepted: " + ", ".join(tiers) if tiers else "nothing drafted")
        ends = {"budget": f"stopped by --max-new-tokens {self.settings.max_new_tokens}",
                "context": "the context is full"}
        if not run.stop or run.stop in ends:
            parts.append(ends.get(run.stop, "stopped by Ctrl-C"))
        left = self.left()
        if left is not None and left < LEFT * self.model.max_length:
            parts.append(f"{left} of {self.model.max_length} tokens of context left")
        return "; ".join(parts) + "."


class Stopped(Exception):
    """The answer was ended by Ctrl-C."""


class Interrupts:
    """In its `with` block the first Ctrl-C only sets `asked`; the second one raises KeyboardInterrupt."""

    asked = False

    def __enter__(self):
        self.asked = False
        self._before = signal.signal(signal.SIGINT, self._on)
        return self

    def _on(self, *_signal):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *_exc):
        signal.signal(signal.SIGINT, self._before)


class Watched:
    """A drafter that reports each round as it ends: it calls told(new tokens, the draft). drafter None: no drafts.

    tokens: the sequence so far. shown_s: seconds that `told` took after the first round.
    """

    def __init__(self, drafter: Drafter | None, prompt: Sequence[int], told: Callable = lambda new, draft: None):
        self.drafter, self.told, self.name = drafter, told, getattr(drafter, "name", "none")
        self.tokens, self.n_prompt, self.shown_s, self._draft = list(prompt), len(prompt), 0.0, Draft()

    def start(self, target, sampler, prompt):
        if self.drafter is not None:
            self.drafter.start(target, sampler, prompt)

    def propose(self, tokens, gamma, rng) -> Draft:
        self._draft = self.drafter.propose(tokens, gamma, rng) if self.drafter is not None else Draft()
        return self._draft

    def verified(self, tokens, path, hidden):
        if self.drafter is not None:
            self.drafter.verified(tokens, path, hidden)
        started, seen, draft = perf_counter(), len(self.tokens), self._draft
        self.tokens, self._draft = list(tokens), Draft()
        self.told(self.tokens[seen:], draft)
        self.shown_s += perf_counter() - started if seen > self.n_prompt else 0.0
