"""Values and sentences as text: numbers with units, and characters that an encoding lacks written out."""

import math
import re
import unicodedata
from collections.abc import Sequence

from lab.support.errors import BadInput

# What an encoding without these characters gets instead. One cell each where boxes and bullets are concerned,
# because those stand in text that is laid out already.
WRITTEN_OUT = {
    "×": "x", "·": "*", "–": "-", "—": "-", "−": "-", "…": "...", "→": "->", "←": "<-", "↔": "<->", "⇒": "=>",
    "≤": "<=", "≥": ">=", "≠": "!=", "≈": "~", "±": "+/-", "µ": "u", "μ": "mu", "∞": "inf", "√": "sqrt",
    "∈": "in",
    "∑": "sum", "Σ": "sum", "∏": "prod", "Π": "prod", "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta",
    "Δ": "Delta", "ε": "epsilon", "θ": "theta", "κ": "kappa", "λ": "lambda", "π": "pi", "ρ": "rho",
    "σ": "sigma",
    "τ": "tau", "φ": "phi", "χ": "chi", "ω": "omega", "‘": "'", "’": "'", "“": '"', "”": '"', "•": "*",
    "▌": "|",
    "\u00a0": " ", "°": " deg ", "½": "1/2", "¼": "1/4", "✓": "ok", "✗": "no",
    "─": "-", "━": "-", "│": "|", "┃": "|", "═": "=", "║": "|",
}


def plain(text: str, encoding: str) -> str:
    """`text` with what the encoding cannot show written out."""
    if text.isascii():
        return text
    out = []
    for char in text:
        try:
            char.encode(encoding)
            out.append(char)
            continue
        except (UnicodeEncodeError, LookupError):
            pass
        written = WRITTEN_OUT.get(char)
        if written is None and "\u2500" <= char <= "\u257f":
            written = "+"
        if written is None:
            written = unicodedata.normalize("NFKD", char).encode("ascii", "ignore").decode() or "?"
        out.append(written)
    return "".join(out)


def kebab(id: str) -> str:
    """`id` in small letters, digits, dots and hyphens; BadInput where nothing is left."""
    name = re.sub(r"[^a-z0-9.]+", "-", str(id).lower()).strip("-")
    if not name:
        raise BadInput(f'"{id}" is no id: a few words in small letters with hyphens between them would be right')
    return name


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    if not math.isfinite(value):
        return str(value)
    for at, (size, unit) in enumerate(units):
        # 999.7 rounds to 1000: then the next larger unit is the right one.
        if abs(value) >= size * 0.9995 or at == len(units) - 1:
            return f"{significant(value / size)} {unit}".strip()
    raise AssertionError("units are never empty")


def significant(value: float, digits: int = 3) -> str:
    """`value` with this many significant digits, without exponent where that reads well: 0.0123, 98.7."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    if exponent < -4 or exponent >= 7:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{max(0, digits - 1 - exponent)}f}"


def fmt_time(seconds: float) -> str:
    """A time in s as text with three digits: "6.65 ms"."""
    return _scaled(seconds, [(1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")])


def fmt_bytes(n: float) -> str:
    """A number of bytes as text with three digits, in powers of 1000: "17.0 GB"."""
    if abs(n) < 1000 and n == int(n):
        return f"{int(n)} B"
    return _scaled(n, [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB"), (1.0, "B")])


def fmt_count(n: float) -> str:
    """A count as text with three digits, in powers of 1000: "8.03 B" (billion), "135 M"."""
    if abs(n) < 1000 and n == int(n):
        return str(int(n))
    return _scaled(n, [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"), (1.0, "")])


def fmt_sampler(sampler) -> str:
    """A decode_lab.Sampler by what is on: "greedy", "T 1, no filter", "T 0.6, top-p 0.95, penalty 1.1"."""
    settings = {"top-k": (sampler.top_k, 0), "top-p": (sampler.top_p, 1), "min-p": (sampler.min_p, 0),
                "penalty": (sampler.repetition_penalty, 1)}
    on = [f"{name} {value:g}" for name, (value, off) in settings.items() if value != off]
    if sampler.greedy:  # filters do nothing
        return ", ".join(["greedy", *(text for text in on if text.startswith("penalty"))])
    return ", ".join([f"T {sampler.temperature:g}", *(on or ["no filter"])])
