"""An observation: a sentence with a value in it, the bound that the value is held against, and the verdict."""

import math
from dataclasses import dataclass
from string import Formatter

from lab.support.errors import BadInput
from lab.support.text import significant

MOST_DIGITS = 6  # that are added to a value to tell it from its bound


@dataclass(frozen=True)
class Claim:
    """What observe() prints and records. holds: None where it was not judged, and `why` then says why.

    bounded: the sentence states a value and its bound, so it is true even where it does not hold.
    """

    sentence: str
    holds: bool | None
    why: str = ""
    bounded: bool = False

    @property
    def mark(self) -> tuple[str, str]:
        """The mark in front of the sentence, and its style."""
        if self.holds is None:
            return "[ -- ] ", "yellow"
        return ("[ ok ] ", "green") if self.holds else ("[ no ] ", "bold red")

    @property
    def text(self) -> str:
        """The sentence as it is printed behind the mark."""
        if self.holds is None:
            return f"Not judged: {self.why} {self.sentence}"
        return self.sentence if self.holds or self.bounded else f"Does not hold: {self.sentence}"


def claim(id: str, text: str, value, at_most, at_least, holds, not_judged: str, values: dict) -> Claim:
    """The claim of console.observe's arguments; BadInput where they do not fit together."""
    bounds = [bound for bound in (at_least, at_most) if bound is not None]
    if (holds is None) == (not bounds):
        raise BadInput(f'observation "{id}" needs either a value with at_most or at_least, or holds=')
    if bounds:
        if value is None and not not_judged:
            raise BadInput(f'observation "{id}" has a bound but no value')
        holds = value is not None and all(value >= x for x in [at_least] if x is not None) \
            and all(value <= x for x in [at_most] if x is not None)
        texts = shown(_spec(text), value, bounds)
        values = {**values, "x": _Verbatim(texts[0])}
        text = f"{text} {_expected(at_least, at_most, texts[1:])}".replace("  ", " ")
    elif value is not None:
        values = {**values, "x": value}
    try:
        sentence = text.format(**values)
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise BadInput(f'observation "{id}" cannot be filled in from {sorted(values)}: {error}') from None
    return Claim(sentence, None if not_judged else bool(holds), not_judged, bool(bounds))


class _Verbatim(str):
    """A text that is already formatted: a format spec changes nothing."""

    def __format__(self, spec):
        return str(self)


def _spec(text: str) -> str:
    """The format spec of {x} in a sentence, "" where it has none."""
    try:
        return next((spec or "" for _, name, spec, _ in Formatter().parse(text) if name == "x"), "")
    except ValueError:  # a lone brace: str.format says so
        return ""


def shown(spec: str, value, bounds: list) -> list[str]:
    """Value and bounds as text, with as many digits as it takes to see which is the larger one."""
    texts: list[str] = []
    for extra in range(MOST_DIGITS + 1):
        texts = [_format(x, spec, extra) for x in (value, *bounds)]
        alike = [text == texts[0] for text in texts[1:]]
        if value is None or not any(same and value != bound for same, bound in zip(alike, bounds)):
            break
    return texts


def _format(x, spec: str, extra: int) -> str:
    """x by a format spec whose precision is raised by `extra` digits."""
    if x is None or (isinstance(x, float) and math.isnan(x)):
        return "nothing" if x is None else "nan"
    if not spec:
        return str(x) if isinstance(x, int) else significant(float(x), 3 + extra)
    head, dot, rest = spec.rpartition(".")
    if not dot:
        return format(x, spec)
    digits = "".join(c for c in rest if c.isdigit())
    return format(x, f"{head}.{int(digits) + extra}{rest[len(digits):]}")


def _expected(at_least, at_most, shown: list[str]) -> str:
    """What the value was held against, as a sentence."""
    if at_least is not None and at_most is not None:
        return f"Expected: {shown[0]}." if at_least == at_most else f"Expected: {shown[0]} to {shown[1]}."
    if at_most == 0:
        return f"Expected: {shown[0]}."
    return f"Expected: {'at most' if at_most is not None else 'at least'} {shown[0]}."
