"""lab/chat.py and lab/screen.py: turns, streaming, Ctrl-C, the context's end and bad input, on scripted models."""

import contextlib
import io
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

import console
import decode_lab as lab
import fakes
from console import BadInput
from lab import __main__ as runner
from lab.chat import conversation as chat, screen
from lab.ngram import counting
from lab import toy
from lab.chat.conversation import Chat, Settings

ROOT = Path(__file__).resolve().parents[2]
ALPHABET = "$\n :" + "abcdefghijklmnopqrstuvwxyz.UA?S"
EOS, V = 0, len(ALPHABET)


class Talker(fakes.FakeDecoder):
    """A decoder of characters with a chat template: U:message$ A:answer$, each on a line."""

    eos = (EOS,)

    def __init__(self, seed=3, eos_at=40, max_length=None, template=True, name="talker"):
        table = fakes.table_logits(V, seed, order=2)

        def logits(history):                                    # ends its text now and then, writes no template
            row = table(history).copy()
            row[[0, *range(V - 4, V)]] = -9
            row[EOS] += 30.0 * (len(history) % eos_at == 0)
            return row

        super().__init__(logits, V, max_length, name=name)
        self.template = template

    def encode(self, text):
        return [ALPHABET.index(c if c in ALPHABET else "?") for c in text]

    chat = encode

    def decode(self, tokens):
        return "".join(ALPHABET[t] for t in tokens if t != EOS)

    def render(self, turns):
        if self.template:
            return "".join(f"{turn['role'][0].upper()}:{turn['content']}$\n" for turn in turns) + "A:"


def settings(**changes):
    return Settings(**{"max_new_tokens": 60, **changes})


def say(one, message):
    prompt = one.prompt(message)
    return prompt, one.answer(message, prompt)


def plain(model, prompt, n, **how):
    fresh = type(model)(max_length=model.max_length, **how)
    return lab.autoregressive_generate(fresh, prompt, n, eos=fresh.eos)[0].tolist()


# -- turns ---------------------------------------------------------------------------------------------------

def test_a_conversation_is_its_template_s_text_and_only_what_is_new_is_read(capsys):
    model = Talker()
    one = Chat(model, settings(system="be kind"))
    prompt, run = say(one, "hello")
    assert one.model.decode(prompt).startswith("S:be kind") and model.decode(prompt).endswith("U:hello\nA:")
    assert one.ids == plain(model, prompt, 60) and one.ids[-1] == EOS and run.stop == "eos"
    before, sent = one.ids, len(model.called("prefill"))
    for message in ("more", "and more?"):
        prompt, _ = say(one, message)
        assert prompt[:len(before)] == before                  # what was written stands there as it was
        assert prompt[len(before):] == model.encode(f"\nU:{message}$\nA:")
        assert one.ids == plain(model, prompt, 60)
        assert len(model.called("prefill")[sent:]) == 1
        assert model.called("prefill")[sent] == prompt[len(before) - 1:-1]
        before, sent = one.ids, sent + 1
    out = capsys.readouterr().out
    assert one.status == 0 and len(re.findall(r"\d+ rounds, tau", out)) == 3
    assert f"{len(model.called('prefill')[-1]) + 1} of the prompt's {len(prompt)} read" in " ".join(out.split())


def test_an_answer_that_the_budget_ends_is_closed_by_the_template():
    model = Talker(eos_at=1000)
    one = Chat(model, settings(max_new_tokens=7))
    first, run = say(one, "hello")
    assert run.stop == "budget" and len(one.ids) == len(first) + 7
    second, _ = say(one, "more")
    assert second == one.ids[:len(first) + 7] + model.encode("$\nU:more$\nA:")


def test_without_a_template_the_text_goes_on_and_with_one_that_rewrites_answers_all_is_read():
    model = Talker(template=False)
    one = Chat(model, settings(max_new_tokens=5))
    assert one.prompt("hello") == model.encode("hello")
    prompt, _ = say(one, "hello")
    assert one.prompt("more")[-6:] == model.encode("\n\nmore")
    with pytest.raises(BadInput, match="talker has no chat template, so --system"):
        Chat(Talker(template=False), settings(system="x"))
    model = Talker()
    model.render = lambda turns: "".join(turn["content"].replace(chat.ANSWER, "").upper()[:1] for turn in turns)
    model.encode = lambda text: [5 + len(text)]
    one = Chat(model, settings(max_new_tokens=5))
    say(one, "hello")
    assert one.prompt("more") == [5 + len(model.render([*one.turns, {"content": "more"}]))] == [8]


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "top_k": 5, "seed": 4}, {"repetition_penalty": 1.3}])
def test_an_answer_is_what_the_loop_writes_and_depends_on_the_seed_alone(how):
    texts = []
    for _ in range(2):
        one = Chat(Talker(), settings(**how))
        for message in ("hello", "more"):
            prompt, _ = say(one, message)
        texts.append(one.ids)
    assert texts[0] == texts[1]
    rng, sampler = np.random.default_rng(how.get("seed", 0)), chat.checked(settings(**how))
    model, drafter = Talker(), chat.NgramDrafter()
    first, _ = lab.speculative_generate(model, drafter, Chat(Talker(), settings()).prompt("hello"), 60, 10, rng=rng,
                                        sampler=sampler, eos=(EOS,))
    assert texts[0][:len(first)] == first.tolist()
    assert texts[0] != Chat(Talker(), settings()).ids


# -- streaming -----------------------------------------------------------------------------------------------

class ByteCodec:
    eos = (0,)

    def decode(self, tokens):
        return bytes(t for t in tokens if t).decode("utf-8", errors="replace")


def test_pieces_give_the_text_whole_characters_at_a_time():
    text = "a\u00e9\u20ac\U0001f600z \u00fc.\n"
    pieces = screen.Pieces(ByteCodec().decode)
    parts = [pieces.add(b) for b in text.encode()] + [pieces.end()]
    assert "".join(parts) == text and [p for p in parts if p] == list(text)
    pieces = screen.Pieces(ByteCodec().decode)
    bad = [0xE2, 0x82, 65, 0x80, 0x80, 0x80, 0x80, 0x80, 66, 0xF0]           # bytes that never become a character
    parts = [pieces.add(b) for b in bad]
    assert any(parts[4:8]) and "".join([*parts, pieces.end()]) == bytes(bad).decode("utf-8", errors="replace")


class FirstSpaceLost:
    """As tokenizers of the SentencePiece kind: the space of a text's first token is left out."""

    eos = ()

    def decode(self, tokens):
        return "".join([" the", " cat", "s", " sat"][t] for t in tokens).removeprefix(" ")


def test_pieces_keep_the_space_between_words():
    pieces = screen.Pieces(FirstSpaceLost().decode)
    assert [pieces.add(t) for t in (0, 1, 2, 3)] == ["the", " cat", "s", " sat"]


@pytest.fixture
def terminal(monkeypatch):
    """stdout taken for a terminal of 80 columns with colours."""
    monkeypatch.setattr(console, "_on_terminal", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)


def shown(out):
    """(text without styles, [(style, text)] of what has one)."""
    return re.sub(r"\x1b\[[\d;]*[mK]", "", out), re.findall(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m", out, re.DOTALL)


def word_model():
    words = ["", " cat", " dog", " a", "\n", " extraordinarily", "s", "x" * 100]
    model = FirstSpaceLost()
    model.decode = lambda tokens: "".join(words[t] for t in tokens)
    return model


def test_rounds_are_shown_by_tier_and_rejected_drafts_struck_through(terminal, capsys, monkeypatch):
    sources = ["lookup", "trigram", "bigram", "4-gram"]
    draft = lab.Draft([1, 6, 2, 5], [None] * 4, sources)
    rejected = lab.Draft([4, 1], [None] * 2, ["bigram", "bigram"])
    for show in (False, True):
        s = screen.Screen(word_model(), show)
        s.round([1, 6, 2, 5, 3], draft)
        s.round([2], rejected)
        s.end()
    text, styles = shown(capsys.readouterr().out)
    assert styles[:4] == [("32", " cat".strip()), ("36", "s"), ("33", "dog"), ("35", "extraordinarily")]
    assert len(styles) == 10 and styles[8:] == [("9;33", "\\n"), ("9;33", "cat")]
    assert text == " cats dog extraordinarily a dog" + " cats dog extraordinarily a\\n cat dog"
    monkeypatch.setattr(console, "_on_terminal", lambda: False)
    s = screen.Screen(word_model(), True)
    s.round([1, 6, 2, 5, 3], draft)
    s.round([2], rejected)
    s.round([1, 3], lab.Draft([1, 3], [None] * 2, ["bigram"] * 2))           # the last was drafted right: none struck
    s.end()
    assert capsys.readouterr().out == " cats dog extraordinarily a[-\\n cat-] dog cat a"
    model = word_model()
    model.eos = (2,)                                            # the end of a text has a text of its own
    s = screen.Screen(model, True)
    s.round([1, 2], lab.Draft([1, 2, 3], [None] * 3, ["bigram"] * 3))
    s.end()
    assert capsys.readouterr().out == " cat"


def test_lines_break_at_words_on_a_terminal_and_nothing_moves_the_cursor(terminal, capsys):
    s, rng = screen.Screen(word_model(), False), np.random.default_rng(0)
    tokens = rng.choice([1, 2, 3, 4, 5, 6], 300, p=[.2, .2, .2, .02, .18, .2])
    for token in tokens:
        s.round([token], lab.Draft())
    s.end()
    out = capsys.readouterr().out
    assert max(map(len, out.split("\n"))) <= 80 and out.split() == word_model().decode(tokens).split()
    assert sum(len(line) > 60 for line in out.split("\n")) > 5
    s = screen.Screen(word_model(), False)
    s.round([7], lab.Draft())                                   # a word longer than a line is left to the terminal
    s._write("a\x1b[2Jb\x07\r\x9bc\u200bd\te")
    s.end()
    assert capsys.readouterr().out == "x" * 100 + "a[2Jbc\u200bd    e"


def test_the_answer_is_streamed_as_the_rounds_end():
    """Written when a round ends, not at the end of the answer."""
    model, seen = Talker(), []
    one = Chat(model, settings())
    forward = model.extend

    def extend(tokens):
        seen.append(out.getvalue())
        return forward(tokens)

    model.extend = extend
    with contextlib.redirect_stdout(io.StringIO()) as out:
        prompt, run = say(one, "hello")
    answer = model.decode(one.ids[len(prompt):])
    assert out.getvalue().startswith(answer + "\n") and len(seen) == len(run.rounds) > 5
    for text, r in zip(np.cumsum([0, *(r.accepted + 1 for r in run.rounds)]), seen):
        assert r == answer[:text]


# -- Ctrl-C --------------------------------------------------------------------------------------------------

def interrupting(model, at, times=1):
    """The model presses Ctrl-C in its forwards number `at`, counted over both kinds."""
    count = [0]
    for name in ("extend", "prefill"):
        def forward(tokens, name=name):
            count[0] += 1
            for _ in range(times * (count[0] in at)):
                signal.raise_signal(signal.SIGINT)
            return getattr(Talker, name)(model, tokens)
        setattr(model, name, forward)
    return model


@pytest.mark.parametrize("at, written", [({1}, 0), ({2}, None), ({6}, None)])
def test_ctrl_c_ends_the_answer_after_a_round_and_the_conversation_goes_on(at, written, capsys):
    model = interrupting(Talker(eos_at=1000), at)
    one = Chat(model, settings(check=True))
    with one.interrupts:
        prompt, run = say(one, "hello")
    assert one.interrupts.asked and run.stop == "" and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert one.ids == plain(model, prompt, 60, eos_at=1000)[:len(prompt) + run.n_tokens]
    assert len(run.rounds) == max(at) - 1 if written is None else one.ids == prompt
    assert "Ctrl-C" in capsys.readouterr().out and one.status == 0
    with one.interrupts:
        second, _ = say(one, "more")
    assert not one.interrupts.asked
    assert second == one.ids[:len(second)] and one.ids == plain(model, second, 60, eos_at=1000)
    assert "plain decoding writes the same 60 tokens" in capsys.readouterr().out


def test_a_second_ctrl_c_leaves_at_once():
    one = Chat(interrupting(Talker(eos_at=1000), {4}, times=2), settings())
    with pytest.raises(KeyboardInterrupt), one.interrupts:
        say(one, "hello")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_at_the_prompt_a_ctrl_c_leaves_only_where_the_last_thing_was_one(monkeypatch, capsys):
    def events(*said):
        said = iter(said)

        def asked():
            word = next(said)
            if word in (KeyboardInterrupt, EOFError):
                raise word
            return word

        monkeypatch.setattr(chat, "asked", asked)
        try:
            return chat.conversation(Chat(interrupting(Talker(eos_at=1000), {2}), settings(max_new_tokens=5)))
        finally:
            assert not list(said)                               # it did not leave early

    c = KeyboardInterrupt
    assert events(c, c) == 130 and events(c, "", c) == 130      # an empty line says nothing
    assert capsys.readouterr().out.count("Once more, or the end of input (Ctrl-D), leaves.") == 2
    assert events("hello", c) == 130                            # the first one ended the answer
    assert events("hello", "more", c, "more", EOFError) == 0    # an answer lies between
    assert events(EOFError) == 0


SCRIPT = """
    import sys, time
    sys.path[:0] = [{tests!r}, {root!r} + "/tests", {root!r}]
    import test_chat
    from lab import __main__ as runner
    from lab.chat import conversation as chat

    class Slow(test_chat.Talker):
        def extend(self, tokens):
            time.sleep(self.seconds)
            return super().extend(tokens)

    def load(settings):
        model = Slow(eos_at=1000, max_length=2000)
        model.seconds = {seconds}
        return model

    chat.load = load
    sys.exit(runner.entry(["chat", *sys.argv[1:]]))
"""


def script_of(seconds):
    return textwrap.dedent(SCRIPT.format(tests=str(ROOT / "tests" / "chat"), root=str(ROOT), seconds=seconds))


class Terminal:
    """A chat on a pseudo-terminal of 80 columns."""

    def __init__(self, seconds, *flags):
        pty = pytest.importorskip("pty")
        master, slave = pty.openpty()
        import fcntl
        import struct
        import termios
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 80, 0, 0))
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "PYTHONIOENCODING")}

        def terminal_of_its_own():
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen([sys.executable, "-c", script_of(seconds), *flags], stdin=slave, stdout=slave,
                                        stderr=slave, preexec_fn=terminal_of_its_own,
                                        env={**environment, "TERM": "xterm-256color"})
        os.close(slave)
        self.master, self.seen, self.at = master, "", 0

    def read(self, end):
        """What comes next, "" at the end; fails when the clock passes `end`."""
        while not select.select([self.master], [], [], 5)[0]:
            # A signal that comes between readline's prompt and its wait for keys is seen when the line ends.
            self.type("\r")
            if time.monotonic() > end:
                break
        if time.monotonic() > end:
            self.process.kill()
            pytest.fail(f"too slow after {self.seen!r}")
        try:
            return os.read(self.master, 4096).decode()
        except OSError:                                         # the other side is closed
            return ""

    def until(self, pattern):
        """Read until something new matches."""
        end = time.monotonic() + 60
        while not (found := re.search(pattern, self.seen[self.at:])):
            new = self.read(end)
            assert new, f"no {pattern!r} in {self.seen!r}"
            self.seen += new
        self.at += found.end()

    def type(self, text):
        os.write(self.master, text.encode())

    def status(self):
        """Read to the end -> exit status."""
        end = time.monotonic() + 60
        while new := self.read(end):
            self.seen += new
        os.close(self.master)
        return self.process.wait(timeout=60)


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_on_a_terminal_one_ctrl_c_ends_the_answer_and_two_leave():
    t = Terminal(0.02, "--max-new-tokens", "1500")
    t.until("leaves.*(?s:.*)Colours: (?s:.*)> ")
    t.type("hello\r")
    t.until(r"hello\r\n.*[a-z]")
    t.type("\x03")
    t.until("stopped by Ctrl-C(?s:.*)> ")
    t.type("more\r")                                            # the chat goes on
    t.until(r"more\r\n.*[a-z]")
    t.type("\x03")
    t.until("stopped by Ctrl-C(?s:.*)> ")
    t.type("\x03")
    assert t.status() == 130 and "Traceback" not in t.seen and "Error" not in t.seen
    assert max(len(line) for line in shown(t.seen)[0].split("\r\n")) <= 80
    assert "of context left" not in t.seen and t.seen.endswith("\r\n")


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_on_a_terminal_the_first_ctrl_c_at_the_prompt_only_warns_and_end_of_input_leaves():
    t = Terminal(0)
    t.until("> ")
    t.type("\x03")
    t.until(r"Once more, or the end of input(?s:.*)> ")
    t.type("hello\r")
    t.until("tokens, the first(?s:.*)> ")                       # the next prompt: before it, Ctrl-C is the answer's
    t.type("\x03")
    t.until(r"Once more, or the end of input(?s:.*)> ")         # an answer lies between, so this is a first one again
    t.type("\x04")
    assert t.status() == 0 and "Traceback" not in t.seen


def piped(text, *flags, seconds=0):
    done = subprocess.run([sys.executable, "-c", script_of(seconds), *flags], input=text, capture_output=True,
                          timeout=60, env={**os.environ, "PYTHONIOENCODING": "utf-8"})
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_in_a_pipe_there_are_both_sides_and_no_colours():
    status, out, err = piped(b"hello\n\n \nmore\n\xff\xe2\x82", "--max-new-tokens", "30")
    assert (status, err) == (0, "") and out.count("\n> ") == 3 and "\x1b" not in out
    assert "\n> hello\n" in out and "\n> more\n" in out and "Colours" not in out
    answer = plain(Talker(max_length=2000), Chat(Talker(), settings()).prompt("hello"), 30, eos_at=1000)
    assert f"> hello\n{Talker().decode(answer[len('U:hello$ A:'):])}\n" in out
    status, out, err = piped(b"", "--max-new-tokens", "30")
    assert (status, err) == (0, "") and "talker" in out


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals between processes")
def test_a_signal_ends_the_one_answer_and_says_nothing_on_stderr():
    process = subprocess.Popen([sys.executable, "-u", "-c", script_of(0.05), "--text", "hello", "--max-new-tokens",
                                "900"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == b"" and b"stopped by Ctrl-C" in out


# -- the context's end ---------------------------------------------------------------------------------------

def test_a_full_context_is_told_before_it_is_hit(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n" + "x" * 60 + "\nmore\n" + "y\n" * 9))
    one = Chat(Talker(eos_at=1000, max_length=100), settings(max_new_tokens=36))
    assert chat.conversation(one) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.findall(r"(\d+) of 100 tokens of context left", out) == ["5"]            # not after the first answer
    assert "The message takes 68 tokens, and talker holds 100, of which 52 are left: a shorter one or a new chat" in out
    assert "The context of talker is full, 5 of 100 tokens are left" in out and len(one.ids) == 95 and "> y" not in out


def test_an_answer_that_meets_the_end_of_the_context_says_so(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nmore\n"))
    one = Chat(Talker(eos_at=1000, max_length=40), settings())
    assert chat.conversation(one) == 0 and len(one.ids) == 40
    out = " ".join(capsys.readouterr().out.split())
    assert "the context is full; 0 of 40 tokens of context left." in out and "> more" not in out
    assert "The context of talker is full, 0 of 40 tokens are left: the chat ends here" in out


def test_a_first_message_longer_than_the_context_is_bad_input(capsys, monkeypatch):
    monkeypatch.setattr(chat, "load", lambda settings: Talker(max_length=20))
    with pytest.raises(SystemExit) as end:
        runner.entry(["chat", "--text", "x" * 14])
    assert end.value.code == 2
    assert capsys.readouterr().err == ("error: The message takes 20 tokens, and talker holds 20: a shorter one would "
                                       "be right.\n")
    assert runner.entry(["chat", "--text", "x" * 13]) == 0      # room for one token


# -- check and bench -----------------------------------------------------------------------------------------

class Unsteady(Talker):
    """Its logits after several tokens at once are not those after one: what --check is for."""

    def extend(self, tokens):
        rows = super().extend(tokens)
        return np.roll(rows, 3, axis=1) if len(tokens) > 1 and len(self.tokens) > 30 else rows


@pytest.mark.parametrize("kind, status", [(Talker, 0), (Unsteady, 1)])
def test_check_tells_whether_plain_decoding_writes_the_same(kind, status, monkeypatch, capsys):
    monkeypatch.setattr(chat, "load", lambda settings: kind())
    for flag in ("--check", "--bench"):
        assert chat.run(["--text", "aaa bbb aaa bbb aaa", flag]) == status
        out = " ".join(capsys.readouterr().out.split())
        assert ("plain decoding writes the same" in out) == (status == 0)
        assert bool(re.search(r"writes another text from token \d+ of the answer on: a bug", out)) == (status == 1)


def test_bench_times_both_in_turn_and_reads_tau_off_the_rounds(monkeypatch, capsys):
    monkeypatch.setattr(chat, "load", lambda settings: Talker())
    assert chat.run(["--text", "aaa bbb aaa", "--bench"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out.splitlines()
            if line.startswith(("plain", "drafted", "lookup"))}
    one = Chat(Talker(), settings(max_new_tokens=512))
    with contextlib.redirect_stdout(io.StringIO()):
        _, run = say(one, "aaa bbb aaa")
    assert rows["plain"][1] == rows["drafted"][1] == str(run.n_tokens)
    assert rows["drafted"][4] == f"{run.tau:.2f}" and rows["plain"][4] == "1.00" and rows["plain"][-1] == "1.00"
    assert rows["lookup"][1:3] == [str(n) for n in run.by_source["lookup"]] and run.drafted
    assert max(map(len, out.splitlines())) <= 80


# -- tables --------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """A trigram and a bigram table of the toy's tokenizer, and one of another's."""
    folder, ids = tmp_path_factory.mktemp("tables"), np.array(toy.encode(toy.heldout("code")[:20000]), np.uint32)
    for order in (2, 3):
        counting.build_table(folder / f"{order}.ngram", [ids], order=order, top_k=2, vocab_size=1024,
                             tokenizer=toy.tokenizer_id()).close()
    counting.build_table(folder / "other.ngram", [ids], order=2, top_k=2, vocab_size=1024, tokenizer="other").close()
    return folder


@pytest.mark.parametrize("how", [[], ["--table-io", "ram"], ["--cold-table"]])
def test_tables_draft_and_their_reading_is_told(how, tables, capsys):
    flags = ["--target", "toy:small", "--max-new-tokens", "40", "--text", "def main(self):", "--check"]
    assert chat.run([*flags, "--table", str(tables / "2.ngram"), "--table", str(tables / "3.ngram"), *how]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"accepted: .*trigram \d+ of \d+", out) and "plain decoding writes the same" in out
    found = re.search(r"I/O(.*): (\d+) lookups, (\d+) blocks read first; pages in memory: 2.ngram (\S+ of \d+|unknown"
                      r"), 3.ngram (\S+ of \d+|unknown); from the device (.*B|unknown); faults: ", out)
    assert found and int(found[2]) > 40 and 0 < int(found[3]) < 200
    assert bool(found[1]) == ("--cold-table" in how)
    if "--table-io" in how and found[4] != "unknown":           # all of it was read
        assert len(set(found[4].split(" of "))) == 1


def test_tables_are_dropped_from_memory_while_none_is_open_and_read_as_asked(tables, monkeypatch, capsys):
    closed = []

    def evict(path):
        closed.append((path.name, [table._file.closed for table in one.tables] if one else []))
        return True

    monkeypatch.setattr(chat.disk, "evict", evict)
    one, files = None, (str(tables / "2.ngram"), str(tables / "3.ngram"))
    for io, cold in (("ram", True), ("mmap", False)):
        one = Chat(chat.load(settings(target="toy:small")), settings(table=files, table_io=io, cold_table=cold))
        assert [table.io for table in one.tables] == [io] * 2
    assert closed == [("2.ngram", []), ("3.ngram", [])]
    one = Chat(one.model, settings(table=files, cold_table=True))
    closed.clear()
    say(one, "def f(self):")
    assert closed == [("2.ngram", [True, True]), ("3.ngram", [True, True])]
    assert "I/O from a cold start: " in capsys.readouterr().out


def test_where_the_system_tells_nothing_it_is_unknown(tables):
    class Silent:
        path, use = Path("a.ngram"), type("Use", (), {"lookups": 3, "blocks": 1})()

        def resident(self):
            return None

    before = type("Use", (), {"lookups": 1, "blocks": 1})()
    line = chat.io_line([Silent()], [before], chat.disk.IoUse(None, None, None), False)
    assert line == ("I/O (not cold: this system keeps them in memory): 2 lookups, 0 blocks read first; pages in "
                    "memory: a.ngram unknown; from the device unknown; faults: unknown major, unknown minor.")


# -- bad input -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("flags, words", [
    (["--text", "x", "--image", "nowhere.png"], '--image: there is no file "nowhere.png"'),
    (["--table", "nowhere.ngram"], '--table: there is no file "nowhere.ngram"'),
    (["--check", "--temperature", "0.5"], "--check compares greedy texts"),
    (["--bench"], "--bench times the answer to one message"),
    (["--text", "x", "--bench", "--check"], "leave --check out"),
    (["--cold-table"], "--cold-table needs a --table"), (["--table-io", "ram"], "--table-io ram needs a --table"),
    (["--top-p", "0.5"], "--top-p shapes what tokens are drawn from"),
    (["--gamma", "0", "--check"], "--gamma 0 drafts nothing"), (["--max-new-tokens", "0"], "--max-new-tokens must be"),
    (["--temperature", "-1"], "temperature = -1.0 is impossible"), (["--table"], "--table needs a value"),
    (["--frob"], "unknown flag --frob"), (["--check", "hello"], '--check takes no value, so "hello"'),
    (["--target", "toy:huge"], "No trained toy model"),
    (["--target", "toy:small", "--system", "x"], "has no chat template"),
])
def test_bad_input_is_one_sentence(flags, words, capsys):
    with pytest.raises(SystemExit) as end:
        runner.entry(["chat", "--target", "toy:small", *flags])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and words in err and err.startswith("error: ") and err.count("\n") == 1


def test_a_table_of_another_tokenizer_and_an_image_for_a_model_of_text_are_refused(tables, tmp_path):
    with pytest.raises(BadInput, match="other.ngram was built with another tokenizer"):
        chat.run(["--target", "toy:small", "--text", "x", "--table", str(tables / "other.ngram")])
    (tmp_path / "a.png").write_bytes(b"png")
    model = Talker()
    with pytest.raises(BadInput, match="talker reads text only: an LFM3-VL model would be right"):
        Chat(model, settings(image=(str(tmp_path / "a.png"),)))


def test_flags_that_may_be_repeated():
    words = ["--table", "a", "--gamma", "3", "--table", "b", "c", "--table=d", "--text", "x"]
    assert chat.gathered(words, "--table") == ["--gamma", "3", "--text", "x", "--table", "a", "b", "c", "d"]
    assert chat.gathered(["--table"], "--table") == ["--table"] and chat.gathered([], "--table") == []
