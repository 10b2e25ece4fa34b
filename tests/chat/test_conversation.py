"""A conversation on a scripted model: turns, Ctrl-C, the context's end, tables, and what does not fit the model."""

import contextlib
import io
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

import decode_lab as lab
from console import BadInput
from lab import __main__ as runner
from lab import toy
from lab.chat import command, conversation, screen
from lab.chat.conversation import Chat
from lab.chat.settings import checked, gathered
from lab.drafters.tiers import NgramDrafter
from lab.ngram import NgramTable, build_table, disk
from records import numbers
from talker import ALPHABET, EOS, Talker, V, plain, say, settings

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
    model.render = lambda turns: "".join(turn["content"].replace(conversation.ANSWER, "").upper()[:1] for turn in turns)
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
    rng, sampler = np.random.default_rng(how.get("seed", 0)), checked(settings(**how))
    model, drafter = Talker(), NgramDrafter()
    first, _ = lab.speculative_generate(model, drafter, Chat(Talker(), settings()).prompt("hello"), 60, 10, rng=rng,
                                        sampler=sampler, eos=(EOS,))
    assert texts[0][:len(first)] == first.tolist()
    assert texts[0] != Chat(Talker(), settings()).ids


def test_the_answer_is_streamed_as_the_rounds_end():
    """Written when a round ends, not at the end of the answer."""
    model, seen = Talker(), []
    one = Chat(model, settings())
    forward = model.send

    def send(tokens, parents=None):
        seen.append(out.getvalue())
        return forward(tokens, parents)

    model.send = send
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
    for name in ("send", "prefill"):
        def forward(*sent, name=name):
            count[0] += 1
            for _ in range(times * (count[0] in at)):
                signal.raise_signal(signal.SIGINT)
            return getattr(Talker, name)(model, *sent)
        setattr(model, name, forward)
    return model


@pytest.mark.parametrize("at, written", [({1}, 0), ({2}, None), ({6}, None)])
def test_ctrl_c_ends_the_answer_after_a_round_and_the_conversation_goes_on(at, written, capsys):
    model = interrupting(Talker(eos_at=1000), at)
    one, handler = Chat(model, settings(check=True)), signal.getsignal(signal.SIGINT)
    with one.interrupts:
        prompt, run = say(one, "hello")
    assert one.interrupts.asked and run.stop == "" and signal.getsignal(signal.SIGINT) is handler
    assert one.ids == plain(model, prompt, 60, eos_at=1000)[:len(prompt) + run.n_tokens]
    assert len(run.rounds) == max(at) - 1 if written is None else one.ids == prompt
    assert "Ctrl-C" in capsys.readouterr().out and one.status == 0
    with one.interrupts:
        second, _ = say(one, "more")
    assert not one.interrupts.asked
    assert second == one.ids[:len(second)] and one.ids == plain(model, second, 60, eos_at=1000)
    assert "plain decoding writes the same 60 tokens" in capsys.readouterr().out


def test_a_second_ctrl_c_leaves_at_once():
    one, handler = Chat(interrupting(Talker(eos_at=1000), {4}, times=2), settings()), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), one.interrupts:
        say(one, "hello")
    assert signal.getsignal(signal.SIGINT) is handler


def test_at_the_prompt_a_ctrl_c_leaves_only_where_the_last_thing_was_one(monkeypatch, capsys):
    def events(*said):
        said = iter(said)

        def asked():
            word = next(said)
            if word in (KeyboardInterrupt, EOFError):
                raise word
            return word

        monkeypatch.setattr(command, "asked", asked)
        try:
            return command.conversation(Chat(interrupting(Talker(eos_at=1000), {2}), settings(max_new_tokens=5)))
        finally:
            assert not list(said)                               # it did not leave early

    c = KeyboardInterrupt
    assert events(c, c) == 130 and events(c, "", c) == 130      # an empty line says nothing
    assert capsys.readouterr().out.count("Once more, or the end of input (Ctrl-D), leaves.") == 2
    assert events("hello", c) == 130                            # the first one ended the answer
    assert events("hello", "more", c, "more", EOFError) == 0    # an answer lies between
    assert events(EOFError) == 0


def said(out, words):
    """From these words on to the end of their sentence, on one line."""
    text = " ".join(out.split())
    assert words in text
    return text[text.index(words):].split(". ")[0]


# -- the context's end ---------------------------------------------------------------------------------------

def test_a_full_context_is_told_before_it_is_hit(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n" + "x" * 60 + "\nmore\n" + "y\n" * 9))
    one = Chat(Talker(eos_at=1000, max_length=100), settings(max_new_tokens=36))
    assert command.conversation(one) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.findall(r"(\d+) of 100 tokens of context left", out) == ["5"]            # not after the first answer
    refused, ended = said(out, "The message"), said(out, "The context of")
    assert numbers(refused) == [68, 100, 52] and "talker" in refused
    assert numbers(ended)[:2] == [5, 100] and "talker" in ended
    assert len(one.ids) == 95 and "> y" not in out


def test_an_answer_that_meets_the_end_of_the_context_says_so(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nmore\n"))
    one = Chat(Talker(eos_at=1000, max_length=40), settings())
    assert command.conversation(one) == 0 and len(one.ids) == 40
    out = " ".join(capsys.readouterr().out.split())
    assert numbers(said(out, "the context is full"))[:2] == numbers(said(out, "The context of talker"))[:2] == [0, 40]
    assert "> more" not in out


def test_a_first_message_longer_than_the_context_is_bad_input(capsys, monkeypatch):
    monkeypatch.setattr(command, "load", lambda settings: Talker(max_length=20))
    with pytest.raises(SystemExit) as end:
        runner.entry(["chat", "--text", "x" * 14])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert numbers(error) == [20, 20] and "talker" in error and error.count("\n") == 1
    assert runner.entry(["chat", "--text", "x" * 13]) == 0      # room for one token


def test_lengths_far_beyond_the_model_end_with_its_context(capsys):
    one = Chat(Talker(eos_at=1000, max_length=60), settings(max_new_tokens=10**12, gamma=10**12))
    prompt, run = say(one, "hello")
    assert run.stop == "context" and one.ids == plain(Talker(eos_at=1000, max_length=60), prompt, 60, eos_at=1000)
    assert numbers(said(capsys.readouterr().out, "the context is full")) == [0, 60]


# -- tokens that the model has no row for --------------------------------------------------------------------

class Short(Talker):
    """Its tokenizer knows one token more than the model has rows for, as Gemma 3's does: "#"."""

    def __init__(self, **how):
        super().__init__(**how)
        self.tokenizer = "talker's"

    def encode(self, text):
        return [V if c == "#" else ALPHABET.index(c if c in ALPHABET else "?") for c in text]

    chat = encode

    def decode(self, tokens):
        return "".join((ALPHABET + "#")[t] for t in tokens if t != EOS)


@pytest.mark.parametrize("template", [True, False])
def test_a_text_with_a_token_that_the_model_lacks_is_named(template, capsys, monkeypatch):
    one = Chat(Short(template=template), settings(max_new_tokens=5))
    with pytest.raises(BadInput, match="a # b.*'#'") as error:
        one.prompt("a # b")
    assert numbers(str(error.value)) == [V, 0, V - 1] and "talker" in str(error.value)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\na # b\nmore\n"))
    assert command.conversation(one) == 0                       # the conversation goes on after it
    out = " ".join(capsys.readouterr().out.split())
    assert str(error.value) in out and len(re.findall(r"tau [\d.]+", out)) == 2
    if template:
        with pytest.raises(BadInput, match="--system.*be #.*'#'"):
            Chat(Short(), settings(system="be #")).prompt("hello")


def test_a_message_without_tokens_is_one_sentence():
    model = Talker(template=False)
    model.chat = lambda text: []
    with pytest.raises(BadInput, match='The message "x" gives no tokens'):
        Chat(model, settings()).prompt("x")


def test_a_table_of_a_tokenizer_with_more_ids_than_the_model_has_rows(tmp_path, capsys):
    """It is taken where the fingerprints agree, and the ids that the model lacks are never drafted."""
    path, ids = tmp_path / "t.ngram", np.array([*range(V + 1)] * 3 + [5, V] * 9, np.uint32)
    build_table(path, [ids], order=2, top_k=2, vocab_size=V + 1, tokenizer="talker's").close()
    one = Chat(Short(eos_at=1000), settings(table=(str(path),), check=True))
    with NgramTable.open(path) as table:
        assert table.best([5])[0] == V
    drafted = [token for tokens, _, _ in proposals(one, "hello a") for token in tokens]
    assert drafted and max(drafted) < V
    assert "plain decoding writes the same" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(BadInput, match=f"vocabulary of {V + 1} ids, the model only {V}"):
        Chat(Talker(), settings(table=(str(path),)))


def proposals(one, message):
    """(tokens, sources, what was asked for) of each draft of an answer."""
    made, drafter = [], one.drafter

    def watched():
        found = drafter()
        propose = found.propose

        def watch(tokens, gamma, rng=None):
            draft = propose(tokens, gamma, rng)
            made.append((list(draft.tokens), list(draft.sources), gamma))
            return draft

        found.propose = watch
        return found

    one.drafter = watched
    say(one, message)
    return made


# -- tables --------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """A trigram and a bigram table of the toy's tokenizer, and one of another's."""
    folder, ids = tmp_path_factory.mktemp("tables"), np.array(toy.encode(toy.heldout("code")[:20000]), np.uint32)
    for order in (2, 3):
        build_table(folder / f"{order}.ngram", [ids], order=order, top_k=2, vocab_size=1024,
                             tokenizer=toy.tokenizer_id()).close()
    build_table(folder / "other.ngram", [ids], order=2, top_k=2, vocab_size=1024, tokenizer="other").close()
    return folder


@pytest.mark.parametrize("how", [[], ["--table-io", "ram"], ["--cold-table"]])
def test_tables_draft_and_their_reading_is_told(how, tables, capsys):
    flags = ["--target", "toy:small", "--max-new-tokens", "40", "--text", "def main(self):", "--check"]
    assert command.run([*flags, "--table", str(tables / "2.ngram"), "--table", str(tables / "3.ngram"), *how]) == 0
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

    monkeypatch.setattr(disk, "evict", evict)
    one, files = None, (str(tables / "2.ngram"), str(tables / "3.ngram"))
    for how, cold in (("ram", True), ("mmap", False)):
        one = Chat(command.load(settings(target="toy:small")), settings(table=files, table_io=how, cold_table=cold))
        assert [table.io for table in one.tables] == [how] * 2
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
    line = screen.io_line([Silent()], [before], disk.IoUse(None, None, None), False)
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
    (["--temperature", "-1"], "temperature is -1"), (["--table"], "--table needs a value"),
    (["--frob"], "unknown flag --frob"), (["--check", "hello"], '--check takes no value, so "hello"'),
    (["--target", "toy:huge"], "No trained toy model"),
    (["--target", "toy:small", "--system", "x"], "has no chat template"),
    (["--device", "cuda:99"], "--device cuda:99 is for a real model"),
    (["--dtype", "float16"], "--dtype float16 is for a real model"),
    (["--table", "x" * 5000, "--text", "x"], '--table: there is no file "xxx'),
    (["--table", "two\nlines"], '--table: there is no file "two lines"'),
    (["--gamma", "-1"], "--gamma must be a whole number"), (["--gamma", "nan"], "--gamma must be a whole number"),
    (["--temperature", "nan"], "--temperature must be a finite number"),
])
def test_bad_input_is_one_sentence(flags, words, capsys):
    with pytest.raises(SystemExit) as end:
        runner.entry(["chat", "--target", "toy:small", *flags])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and words in err and err.startswith("error: ") and err.count("\n") == 1


def test_a_table_of_another_tokenizer_and_an_image_for_a_model_of_text_are_refused(tables, tmp_path):
    with pytest.raises(BadInput, match="other.ngram was built with another tokenizer"):
        command.run(["--target", "toy:small", "--text", "x", "--table", str(tables / "other.ngram")])
    (tmp_path / "a.png").write_bytes(b"png")
    model = Talker()
    with pytest.raises(BadInput, match="talker reads text only: an LFM3-VL model would be right"):
        Chat(model, settings(image=(str(tmp_path / "a.png"),)))


def test_flags_that_may_be_repeated():
    words = ["--table", "a", "--gamma", "3", "--table", "b", "c", "--table=d", "--text", "x"]
    assert gathered(words, "--table") == ["--gamma", "3", "--text", "x", "--table", "a", "b", "c", "d"]
    assert gathered(["--table"], "--table") == ["--table"] and gathered([], "--table") == []


@pytest.mark.parametrize("flag", ["--text", "--system"])
def test_bytes_that_are_no_utf8_on_the_command_line_are_refused_before_a_model_is_loaded(flag, monkeypatch):
    """In a pipe they are read as U+FFFD: see test_chat_command.py."""
    monkeypatch.setattr(command, "load", lambda settings: pytest.fail("loaded"))
    with pytest.raises(BadInput, match="caf\ufffd \ufffd+.* holds bytes that are no UTF-8") as said:
        command.run(["--max-new-tokens", "3", flag, "caf\udce9 \udce2\udc82"])
    assert "\n" not in str(said.value)
