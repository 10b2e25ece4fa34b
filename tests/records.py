"""What the tests of demos look up in a record."""

import re


def table(record, id):
    """The table of this id, as a list of {column: cell}."""
    found = whole_table(record, id)
    return [dict(zip(found["columns"], row)) for row in found["rows"]]


def whole_table(record, id):
    """The table of this id as it was recorded: title, columns, rows, measured."""
    return _found(record["tables"], id)


def observation(record, id):
    """The observation of this id."""
    return _found(record["observations"], id)


def numbers(text):
    """The numbers in a sentence, in order, whatever its words: [48, 0.51] of "Of 48 texts 51% differ."."""
    found = re.findall(r"(?<![\w.])([+-]?\d[\d,]*(?:\.\d+)?)(%?)", text)
    return [float(number.replace(",", "")) / (100 if percent else 1) for number, percent in found]


def figures(record):
    """The paths of the figures, in order."""
    return [figure["path"] for figure in record["figures"]]


def claims(record, measured=None):
    """{id: holds} of the observations; of the readings of the machine alone, or of the others, if asked."""
    return {o["id"]: o["holds"] for o in record["observations"] if measured in (None, o["measured"])}


def _found(entries, id):
    known = {entry["id"]: entry for entry in entries}
    assert id in known, f"{id!r} is none of {sorted(known)}"
    return known[id]
