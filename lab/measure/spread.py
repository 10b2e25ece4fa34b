"""Whether readings of the same thing agree well enough to be judged."""

from __future__ import annotations

import numpy as np

MOST = 1.5  # times that the largest of several readings of one thing may exceed the smallest


def disturbed(readings, what: str = "the time of the same forward", most: float = MOST) -> str:
    """Why readings are not to be judged, as a sentence for observe(not_judged=...), or "" where they are good enough.

    readings: (repeats, things), each thing read several times. Taken is the median over things of the largest reading
    over the smallest, so that a single pause of the machine does not count; it may be `most`.
    """
    readings = np.asarray(readings, float)
    spread = float(np.median(readings.max(axis=0) / readings.min(axis=0)))
    return f"This machine was busy: readings of {what} differed by a factor of {spread:.1f}." if spread > most else ""
