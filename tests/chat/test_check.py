"""lab/chat/check.py: --check and --bench on scripted models."""

import contextlib
import io
import re

import numpy as np
import pytest

from lab.chat import command
from lab.chat.conversation import Chat
from talker import Talker, say, settings


class Unsteady(Talker):
    """Its logits after several tokens at once are not those after one: what --check is for."""

    def send(self, tokens, parents=None):
        rows = super().send(tokens, parents)
        return np.roll(rows, 3, axis=1) if len(tokens) > 1 and self.length > 30 else rows


@pytest.mark.parametrize("kind, status", [(Talker, 0), (Unsteady, 1)])
def test_check_tells_whether_plain_decoding_writes_the_same(kind, status, monkeypatch, capsys):
    monkeypatch.setattr(command, "load", lambda settings: kind())
    for flag in ("--check", "--bench"):
        assert command.run(["--text", "aaa bbb aaa bbb aaa", flag]) == status
        out = " ".join(capsys.readouterr().out.split())
        assert ("plain decoding writes the same" in out) == (status == 0)
        assert bool(re.search(r"writes another text from token \d+ of the answer on: a bug", out)) == (status == 1)


def test_bench_times_both_in_turn_and_reads_tau_off_the_rounds(monkeypatch, capsys):
    monkeypatch.setattr(command, "load", lambda settings: Talker())
    assert command.run(["--text", "aaa bbb aaa", "--bench"]) == 0
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
