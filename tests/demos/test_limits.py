"""A demo stays readable: the limits of CONTRIBUTING.md, counted in its source."""

import ast

import pytest

import console
from lab.support.cells import cells

LINES, COLUMNS, STATEMENT, NAMES = 250, 100, 3, 25
DEMOS = sorted((console.ROOT / "lab").glob("[0-9][0-9]_*.py"))
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def faults(source: str) -> list[str]:
    """What in a demo's source is beyond a limit, a line each."""
    tree, lines = ast.parse(source), source.splitlines()
    found = [f"{len(lines)} lines"] if len(lines) > LINES else []
    found += [f"line {n} has {len(line)} columns" for n, line in enumerate(lines, 1) if len(line) > COLUMNS]
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            found += _long(node)
        if isinstance(node, COMPREHENSIONS) and _inside(node, COMPREHENSIONS):
            found.append(f"line {node.lineno}: a comprehension inside another")
        if isinstance(node, ast.Lambda) and _inside(node, (ast.IfExp, ast.BoolOp)):
            found.append(f"line {node.lineno}: a lambda with a condition")
    names = _names(tree)
    found += [f"{len(names)} names at the top level: {' '.join(sorted(names))}"] if len(names) > NAMES else []
    for cell in cells(source):
        tables = 0 if cell.markdown else cell.text.count("print_table(")
        found += [f"the cell at line {cell.line} shows {tables} tables"] if tables > 1 else []
    return found


def _long(node: ast.stmt) -> list[str]:
    """A statement, or the head of a compound one, over STATEMENT lines; a list with an entry a line counts as one."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)) or _is_docstring(node):
        return []
    body = getattr(node, "body", None)
    end = body[0].lineno - 1 if isinstance(body, list) and body else node.end_lineno
    count = max(1, end - node.lineno + 1)
    for part in ast.walk(node):
        if isinstance(part, (ast.Dict, ast.List, ast.Tuple, ast.Set)) and part.lineno >= node.lineno and part.end_lineno <= end:
            entries = part.values if isinstance(part, ast.Dict) else part.elts
            starts = {entry.lineno for entry in entries}
            if len(starts) == len(entries) > 1 and all(entry.lineno == entry.end_lineno for entry in entries):
                count -= part.end_lineno - part.lineno
    return [f"line {node.lineno}: a statement of {count} lines"] if count > STATEMENT else []


def _is_docstring(node) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _inside(node, kinds) -> bool:
    return any(isinstance(part, kinds) for part in ast.walk(node) if part is not node)


def _names(tree: ast.Module) -> set[str]:
    """Variables and functions of the top level; imports and classes aside."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif not isinstance(node, (ast.ClassDef, ast.Import, ast.ImportFrom)):
            found |= {part.id for part in _outside_functions(node)
                      if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    return found


def _outside_functions(node):
    """The nodes below, but not those of comprehensions, whose names end with them."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*COMPREHENSIONS, ast.FunctionDef, ast.Lambda)):
            yield from _outside_functions(child)


@pytest.mark.parametrize("demo", DEMOS, ids=lambda demo: demo.stem[:2])
def test_a_demo_stays_within_the_limits(demo):
    found = faults(demo.read_text(encoding="utf-8"))
    assert not found, found


def test_every_limit_is_seen():
    assert faults("x = 1\n" * 250) == [] and faults("x = 1\n" * 251) == ["251 lines"]
    assert faults("# " + "x" * 99) == ["line 1 has 101 columns"]
    assert faults("f(1,\n  2,\n  3,\n  4)") == ["line 1: a statement of 4 lines"] and faults("f(1,\n  2,\n  3)") == []
    assert faults("if (a\n  and b\n  and c\n  and d):\n    pass") == ["line 1: a statement of 4 lines"]
    assert faults("def f():\n    return {\n        1: 2,\n        3: 4,\n        5: 6,\n    }") == []
    assert faults("x = [[a for a in b] for b in c]") == ["line 1: a comprehension inside another"]
    assert faults("f(lambda x: 1 if x else 2)") == ["line 1: a lambda with a condition"]
    assert len(faults("\n".join(f"x{i} = 1" for i in range(26)))) == 1
    assert faults('# %%\nprint_table("a")\nprint_table("b")') == ["the cell at line 1 shows 2 tables"]
