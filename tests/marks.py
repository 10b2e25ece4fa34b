"""Which parameters of a test belong to make check."""

import pytest


def few(names, chosen) -> list:
    """The names as parameters: those chosen as they are, the others marked slow, for make test."""
    assert set(chosen) <= set(names), f"{set(chosen) - set(names)} are no parameters"
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.slow) for name in names]
