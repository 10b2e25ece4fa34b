"""A scripted model to chat with, and what tests ask of a chat."""

import re

import decode_lab as lab
from lab.chat.settings import Settings
from lab.measure.scripted import FakeDecoder, table_logits

ALPHABET = "$\n :" + "abcdefghijklmnopqrstuvwxyz.UA?S"
EOS, V = 0, len(ALPHABET)


class Talker(FakeDecoder):
    """A decoder of characters with a chat template: U:message$ A:answer$, each on a line."""

    eos = (EOS,)

    def __init__(self, seed=3, eos_at=40, max_length=None, template=True, name="talker"):
        table = table_logits(V, seed, order=2)

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


def shown(out):
    """(text without styles, [(style, text)] of what has one)."""
    return re.sub(r"\x1b\[[\d;]*[mK]", "", out), re.findall(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m", out, re.DOTALL)
