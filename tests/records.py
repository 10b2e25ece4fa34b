"""What the tests of demos look up in a record."""


def table(record, part):
    """The one table whose title contains `part`, as a list of {column: cell}."""
    found, = [t for t in record["tables"] if part in t["title"]]
    return [dict(zip(found["columns"], row)) for row in found["rows"]]


def observation(record, part):
    """The one observation whose text contains `part`."""
    found, = [o for o in record["observations"] if part in o["text"]]
    return found
