"""python -m lab clean: delete the models that were unpacked once and kept; they are unpacked again when next needed."""

import console
from lab.models import unpacked
from lab.support.errors import BadInput


def run(words: list[str]) -> int:
    """Delete the cache and say what that freed."""
    if words:
        raise BadInput(f'clean takes nothing after it, so "{words[0]}" is not possible there')
    folder, freed = unpacked.cache_folder(), unpacked.clean()
    found = f"{console.fmt_bytes(freed)} of unpacked models deleted from" if freed else "No unpacked models in"
    console.print_text(found)
    print(folder)  # not wrapped, so that it can be copied
    return 0
