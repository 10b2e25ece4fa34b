"""Whether readings of the same thing agree well enough to be judged."""

from __future__ import annotations

import numpy as np

MOST = 1.5  # times that the slowest of several equal forwards may take the fastest one's seconds


def disturbed(seconds, what: str = "the same forward") -> str:
    """Why readings are not to be judged, as a sentence for observe(not_judged=...), or "" where they are good enough.

    seconds: (repeats, things) of timing each thing several times. Taken is the median over things of the slowest
    reading over the fastest, so that a single pause of the machine does not count.
    """
    seconds = np.asarray(seconds, float)
    spread = float(np.median(seconds.max(axis=0) / seconds.min(axis=0)))
    return f"This machine was busy: {what} took up to {spread:.1f} times as long." if spread > MOST else ""
