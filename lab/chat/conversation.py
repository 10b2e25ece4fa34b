"""python -m lab chat: a conversation with a model whose answers are drafted from n-gram statistics.

    python -m lab chat                                  with the default target; drafts from what was said so far
    python -m lab chat --table code3.ngram code2.ngram  with tables too (python -m lab ngram build makes them)
    python -m lab chat --text "Why is the sky blue?" --check
    python -m lab chat --target lfm3-vl --image photo.jpg

An answer is written as it is decoded, each token in the colour of the tier that drafted it. Below it stand what it
took and, with tables, what was read of them. The cache stays from turn to turn, so that only what is new is read.
"""

from __future__ import annotations

import copy
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

import console
from console import BadInput, Count, NonNegative, OneOf, fmt_bytes, fmt_time, print_table, progress, put
from decode_lab import Draft, Drafter, Run, Sampler, autoregressive_generate, speculative_generate
from lab.ngram import disk
from lab import toy
from lab.ngram.table import NgramTable
from lab.measure.replay import KeptPrefix, same_start
from lab.chat.screen import Screen, colour, note
from lab.drafters.tiers import NgramDrafter, tier_name

RUNS = 3                                     # of --bench, after a warm-up
LEFT = 0.2                                   # of the context: from here on each answer tells how much is left
ANSWER = "\ufffc answer \ufffc"              # stands in a template's text where the ids of an answer stand


@dataclass(frozen=True)
class Settings:
    text: str = ""                   # one message: it is answered, and that is all
    image: tuple[str, ...] = ()      # image files that the first message shows, for a model that reads images
    system: str = ""                 # what the model is told before the conversation
    target: str = "smollm2-135m"     # the model: a known name, a folder, a .gguf file, a hub id, or toy
    device: str = "auto"             # auto, cpu, cuda, cuda:1, ...
    dtype: OneOf("float32", "bfloat16", "float16") = "float32"  # of the weights.
    max_new_tokens: Count = 512      # tokens of an answer, at most
    gamma: NonNegative = 10          # tokens drafted a round, at most; 0 is plain decoding
    table: tuple[str, ...] = ()      # n-gram tables of the model's tokenizer, such as a trigram and a bigram
    table_io: OneOf("mmap", "ram") = "mmap"  # tables are mapped, or read whole at the start.
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


def gathered(argv: Sequence[str], *flags: str) -> list[str]:
    """argv with the values of these flags, each of which may be given several times, behind one of each."""
    rest, values, taker = [], {flag: [] for flag in flags}, None
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
            refuse(not Path(name).expanduser().is_file(), f'{flag}: there is no file "{name}"')
    return sampler


def load(settings: Settings):
    """The decoder that the settings name: `hf.load`, or a toy model with what a chat asks of a decoder."""
    name, _, size = settings.target.partition(":")
    if name == "toy":
        model = toy.load(size or "large")
        model.name, model.encode, model.decode, model.chat = f"toy {model.name}", toy.encode, toy.decode, toy.encode
        model.render, model.eos = lambda turns: None, (toy.EOS,)
        return model
    from lab.models import hf
    from transformers.utils import logging
    logging.set_verbosity_error()                # what transformers says of faster kernels would stand in the text
    return hf.load(settings.target, settings.device, settings.dtype)


# -- the conversation ----------------------------------------------------------------------------------------

class Chat:
    """A conversation: turns of text, and the ids that the model read and wrote.

    model: a decoder with encode, decode, chat (ids of a first message), render (the text of turns in a template, or
    None) and eos, as `hf.HFDecoder`; see and show where there are images. status: 1 once a check has found a bug.
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
        # An end of text that the model wrote is left out: what follows an answer in the template says it anew.
        ids = self.ids[:-1] if self.ids and self.ids[-1] in self.model.eos else list(self.ids)
        turns = self.turns if first else [*self.turns[:-1], {"role": "assistant", "content": ANSWER}]
        text = self.model.render([*turns, asked])
        if text is None:
            new = self.model.chat(message) if first else self.model.encode("\n\n" + message)
        elif first or ANSWER in text:
            new = self.model.encode(text if first else text.rpartition(ANSWER)[2])
        else:                                    # a template that rewrites answers: the whole is read as it says
            ids, new = [], self.model.encode(self.model.render([*self.turns, asked]))
        if first and self.images:
            new = self.model.show(new, self.images)
        limit = getattr(self.model, "max_length", None)
        if limit is not None and len(ids) + len(new) >= limit:
            left = f", of which {max(limit - len(ids) - 1, 0)} are left" if ids else ""
            raise BadInput(f"The message takes {len(new)} tokens, and {self.model.name} holds {limit}{left}: a shorter "
                           f"one{' or a new chat' if ids else ''} would be right")
        return ids + new

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


def conversation(chat: Chat) -> int:
    """Answer one line after the other until the input ends, or the context -> exit status."""
    note(f"{chat.model.name}. Ctrl-C ends an answer; a second one, or the end of input, leaves.")
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
        try:
            import readline  # noqa: F401 - lines can be edited, and called back
        except ImportError:
            pass
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


class Stopped(Exception):
    """The answer was ended by Ctrl-C."""


class Interrupts:
    """Inside, the first Ctrl-C only sets `asked`, which entering clears; a second one is a KeyboardInterrupt."""

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
    """A drafter whose rounds are told to `told(new tokens, the draft)` as they end; without one it proposes nothing.

    tokens: the sequence so far. shown_s: seconds that `told` took after the first round.
    """

    def __init__(self, drafter: Drafter | None, prompt: Sequence[int], told: Callable = lambda new, draft: None):
        self.drafter, self.told, self.name = drafter, told, getattr(drafter, "name", "none")
        self.tokens, self.n_prompt, self.shown_s, self._draft = list(prompt), len(prompt), 0.0, Draft()

    def reset(self, target, sampler):
        if self.drafter is not None:
            self.drafter.reset(target, sampler)

    def propose(self, tokens, gamma, rng) -> Draft:
        self._draft = self.drafter.propose(tokens, gamma, rng) if self.drafter is not None else Draft()
        return self._draft

    def kept(self, tokens):
        if self.drafter is not None:
            self.drafter.kept(tokens)
        started, seen, draft = perf_counter(), len(self.tokens), self._draft
        self.tokens, self._draft = list(tokens), Draft()
        self.told(self.tokens[seen:], draft)
        self.shown_s += perf_counter() - started if seen > self.n_prompt else 0.0


# -- what is shown -------------------------------------------------------------------------------------------

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


# -- beside the conversation -----------------------------------------------------------------------------------

def compared(decoder, plain: list[int], other: list[int], n_prompt: int, sampler: Sampler) -> tuple[str, bool]:
    """(a sentence on whether two greedy texts are the same, whether their difference is a bug)."""
    if plain == other:
        return f"plain decoding writes the same {len(plain) - n_prompt} tokens.", False
    if not hasattr(decoder, "dtype_name"):
        at = same_start(plain, other) - n_prompt + 1
        return f"plain decoding writes another text from token {at} of the answer on: a bug.", True
    from lab.models import hf
    found = hf.explain_divergence(decoder, plain, other, sampler)
    tokens = ["its end" if token is None or token in decoder.eos else repr(decoder.decode([token]))
              for token in (found.plain, found.other)]
    return (f"plain decoding writes another text from token {found.position - n_prompt + 1} of the answer on, "
            f"{tokens[0]} for {tokens[1]}. Their logits are {found.margin:.2g} apart, and rounding in "
            f"{decoder.dtype_name} explains up to {found.allowed:.2g}: {'no' if found.explained else 'a'} bug.",
            not found.explained)


def bench(chat: Chat, message: str) -> None:
    """Time plain and drafted decoding in turn, in this process, and print what came out."""
    prompt, settings = chat.prompt(message), chat.settings
    made: dict[str, list] = {"plain": [], "drafted": []}
    for k in progress(range(RUNS + 1), "plain and drafted in turn"):
        for name in list(made)[::-1 if k % 2 else 1]:
            options = dict(rng=np.random.default_rng(settings.seed), sampler=chat.sampler, eos=chat.model.eos)
            if name == "plain":
                found = autoregressive_generate(chat.model, prompt, settings.max_new_tokens, **options)
            else:
                before, cold = disk.io_use(), chat.open_tables()
                found = speculative_generate(chat.model, chat.drafter(), prompt, settings.max_new_tokens,
                                             settings.gamma, **options)
                used = disk.io_use() - before
            made[name].append(found)
    made = {name: found[1:] for name, found in made.items()}     # without the warm-up
    base, rows = [run.per_token for _, run in made["plain"]], []
    for name, found in made.items():
        runs = [run for _, run in found]
        pooled = Run.pool(runs)
        later = pooled.later().rounds
        rows.append([name, median(run.n_tokens for run in runs), 1 / median(run.per_token for run in runs),
                     1e3 * pooled.ttft, pooled.tau, sum(r.drafted for r in later) / len(later),
                     pooled.alpha if pooled.drafted else None, 1e3 * median(r.draft_s for r in later),
                     1e3 * median(r.verify_s for r in later),
                     median(b / run.per_token for b, run in zip(base, runs))])
    times = ["tokens/s", "TTFT, ms", "draft, ms", "verify, ms", "speedup"]
    print_table(["", "tokens", "tokens/s", "TTFT, ms", "tau", "drafts", "alpha", "draft, ms", "verify, ms", "speedup"],
                rows, measured=times, formats={"tokens": "g", "tau": ".2f", "drafts": ".1f", "alpha": ".2f",
                                               "speedup": ".2f"},
                title=f"{chat.model.name}, medians of {RUNS} runs in turn; drafts and times of a round")
    tiers = made["drafted"][0][1].by_source                      # the same in every run
    if tiers:
        print_table(["tier", "tested", "accepted", "share"], [[name, t, a, a / t] for name, (t, a) in tiers.items()],
                    title="Acceptance by tier", formats={"share": ".2f"})
    if chat.tables:
        note(io_line(chat.tables, [type(table.use)() for table in chat.tables], used,
                     cold if settings.cold_table else None))
    if chat.sampler.greedy:
        (plain, _), (drafted, _) = made["plain"][0], made["drafted"][0]
        sentence, bug = compared(chat.model, plain.tolist(), drafted.tolist(), len(prompt), chat.sampler)
        note(f"Check: {sentence}")
        chat.status = int(bug)
