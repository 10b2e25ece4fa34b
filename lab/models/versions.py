"""Which transformers the lab can use; to be imported before transformers is."""

from __future__ import annotations

import importlib.metadata
import re

from lab.support.errors import BadInput

OLDEST = (5, 18)  # transformers: the first whose caches record their past for every kind of layer used here


class TooOld(BadInput, ImportError):
    """A transformers that the lab cannot use; an ImportError too, as it is found before transformers is imported."""


def check_transformers(version: str) -> None:
    """TooOld, a BadInput, for a version of transformers before OLDEST."""
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST:
        wanted = "transformers >= " + ".".join(map(str, OLDEST))
        error = TooOld(f"transformers {version} is installed, whose caches cannot take back a draft in every model: "
                       f"{wanted} would be right (make setup installs the tested version)")
        error.name = wanted
        raise error

check_transformers(importlib.metadata.version("transformers"))
