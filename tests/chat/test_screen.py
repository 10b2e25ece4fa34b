"""lab/chat/screen.py: whole characters, tiers by colour, rejected drafts, and lines that break at words."""

import numpy as np
import pytest

import decode_lab as lab
from lab.chat import screen
from talker import shown


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
    monkeypatch.setattr("lab.support.output.on_terminal", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)


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
    monkeypatch.setattr("lab.support.output.on_terminal", lambda: False)
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
