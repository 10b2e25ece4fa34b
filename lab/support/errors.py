"""Input that cannot be used: the one error for it, in one sentence, with the nearest names and what would be right."""

import difflib
import math
import os
from collections.abc import Iterable, Sequence

HELP = " (--help lists them)"
SHOWN_AT_MOST = 60  # characters of a value in a sentence


class BadInput(ValueError):
    """Input that cannot be used, in one sentence that names the value and what would be right.

    A demo run as a script prints it to stderr as "error: ..." and exits with status 2; a notebook shows that line.
    """

    def _render_traceback_(self) -> list[str]:
        """What IPython prints instead of a traceback."""
        return [f"error: {self}"]


def require(ok, name: str, value, right: str) -> None:
    """Raise BadInput unless `ok`: require(gamma >= 0, "gamma", gamma, "a whole number of at least 0")."""
    if not ok:
        raise BadInput(f"{name} is {brief(value)} but must be {right}.")


def checked(name: str, value, low: float = -math.inf, high: float = math.inf, *, whole: bool = False,
            above: bool = False):
    """`value`, a number or many, as an array of float64 (int64 with whole=True); BadInput for one outside the range.

    low, high: the range, both ends included; with above=True low is left out. NaN and infinity never are in it.
    """
    import numpy as np

    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise BadInput(f"{name} is {brief(value)} but must be a number") from None
    most = min(high, 2.0**53) if whole else high  # beyond, float64 does not tell whole numbers apart
    possible = (array > low if above else array >= low) & (array <= most) & np.isfinite(array)
    if whole:
        possible &= array == np.floor(array)
    if not np.all(possible):
        kind = "a whole number" if whole else "a number"
        words = [f"above {low:g}" if above else f"of at least {low:g}"] if low > -math.inf else []
        first = float(array[~possible].flat[0])
        words += [f"at most {most:g}"] if high < math.inf or most < first < math.inf else []
        require(False, name, first, " ".join([kind, " and ".join(words)]).strip())
    return array.astype(np.int64) if whole else array


def whole(name: str, value, low: int) -> int:
    """`value` as an int; BadInput unless it is one whole number of at least `low`."""
    import numpy as np

    # Text, a list, the None of a function that returns nothing: none of them is a number.
    number = np.shape(value) == () and (isinstance(value, int) or np.asarray(value).dtype.kind in "biuf")
    require(number, name, value, f"a whole number of at least {low}")
    return int(checked(name, value, low, whole=True))


def brief(value) -> str:
    """A value as a sentence shows it: a float without digits that say nothing, a long value cut."""
    try:
        text = f"{value:g}" if isinstance(value, float) else repr(value)
    except ValueError:  # Python writes out no whole number of more than 4,300 digits
        text = "a number of thousands of digits"
    return cut(text)


def cut(text: str) -> str:
    """`text`, or its beginning and its length where it is too long for a sentence."""
    return text if len(text) <= SHOWN_AT_MOST else f"{text[:SHOWN_AT_MOST - 20]}... ({len(text):,} characters)"


def nearest(name: str, names: Iterable[str], n: int = 3) -> list[str]:
    """The up to n names most like `name`, best first: alike in their letters, or in how they begin."""
    def likeness(known: str) -> float:
        shared = len(os.path.commonprefix([name.lower(), known.lower()]))  # noqa: RUF071 - of letters, not paths
        alike = difflib.SequenceMatcher(None, name.lower(), known.lower()).ratio()
        return alike + 2 * shared / max(len(name), 1)

    name, names = str(name), [str(known) for known in names]
    best = sorted(names, key=likeness, reverse=True)
    close = [known for known in best if likeness(known) >= 0.6 * likeness(best[0]) and likeness(known) > 0.5]
    return close[:n] or (sorted(names) if len(names) <= 12 else best[:n])


def unknown(kind: str, name: str, names: Iterable[str]) -> BadInput:
    """The BadInput for a name that is none of `names`: raise unknown("chip", "h1000", CHIPS)."""
    return BadInput(f'unknown {kind} "{cut(str(name))}"; {nearest_words(name, names)}')


def nearest_words(name: str, names: Iterable[str]) -> str:
    close = nearest(name, names)
    return f"the nearest {'is' if len(close) == 1 else 'are'} {listed(close)}"


def listed(words: Sequence[str]) -> str:
    """Words as a sentence lists them: "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else "none"
