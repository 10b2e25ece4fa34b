"""python -m lab chat in a process of its own: on a terminal, in a pipe, and ended by signals."""

import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from lab.chat.conversation import Chat
from talker import Talker, plain, settings, shown

ROOT = Path(__file__).resolve().parents[2]


SCRIPT = """
    import sys, time
    sys.path[:0] = [{tests!r}, {root!r} + "/tests", {root!r}]
    import talker
    from lab import __main__ as runner
    from lab.chat import command

    class Slow(talker.Talker):
        def send(self, tokens, parents=None):
            time.sleep(self.seconds)
            return super().send(tokens, parents)

    def load(settings):
        model = Slow(eos_at=1000, max_length=2000)
        model.seconds = {seconds}
        return model

    command.load = load
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


@pytest.mark.nightly
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


@pytest.mark.nightly
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


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform == "win32", reason="no such signals between processes")
def test_a_signal_ends_the_one_answer_and_says_nothing_on_stderr():
    process = subprocess.Popen([sys.executable, "-u", "-c", script_of(0.05), "--text", "hello", "--max-new-tokens",
                                "900"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == b"" and b"stopped by Ctrl-C" in out
