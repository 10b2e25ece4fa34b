"""Which module may import which, read from their sources; how long modules are; what rooms say of themselves."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted([*ROOT.glob("*.py"), *(ROOT / "lab").rglob("*.py")])
ROOMS = sorted(path.parent for path in (ROOT / "lab").glob("*/__init__.py"))
LONGEST = 450
# Files that are still to be parted.
TOO_LONG = ("decode_lab.py", "llm_math.py")
# A module imports what stands in a lower row, or in its own room; hw_specs and console do not know one another.
ORDER = {"lab.support": 0, "console": 1, "hw_specs": 1, "llm_math": 2, "decode_lab": 3, "room": 4, "demo": 5,
         "lab.__main__": 6, "lab.commands": 6}
LIGHT = ("console", "hw_specs", "llm_math", "decode_lab", "lab.toy", "lab.support", "lab.models.pending")
ALLOWED = {"numpy", "threadpoolctl"}  # the second is one small file, by which the toy asks numpy's BLAS for one thread
OWN = {path.stem for path in ROOT.glob("*.py")} | {"lab"}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, late: bool = True) -> set[str]:
    """Full names that a file imports; with late=False those of its top level only, which are imported with it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree) if late else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(name_of(path).split(".")[:-node.level]) + "." if node.level else ""
            found |= {f"{package}{node.module or ''}.{alias.name}".strip(".") for alias in node.names}
    return found


def place_of(name: str) -> tuple[str, int] | None:
    """(the room or module that a full name belongs to, its row); None for what is not of the lab."""
    parts = name.split(".")
    if parts[0] in ORDER:
        return parts[0], ORDER[parts[0]]
    if parts[0] != "lab" or len(parts) == 1:
        return None
    if parts[1][:2].isdigit():
        return name, ORDER["demo"]
    room = ".".join(parts[:2])
    return room, ORDER.get(room, ORDER["room"])


def test_imports_go_one_way():
    wrong = []
    for path in FILES:
        mine = place_of(name_of(path))
        for name in imported(path) if mine else ():
            other = place_of(name)
            if other and other[0] != mine[0] and other[1] >= mine[1] and not (other[1] == mine[1] in (4, 6)):
                wrong.append(f"{name_of(path)} imports {name}")
    assert wrong == []


def test_nothing_imports_a_demo():
    lines = [(path, line) for path in FILES for line in path.read_text(encoding="utf-8").splitlines()]
    numbered = [f"{name_of(path)}: {line}" for path, line in lines if "import_module(" in line and "lab." in line]
    assert numbered == []  # a name that begins with a digit can be imported in no other way


def test_the_core_and_the_toy_import_numpy_and_nothing_heavier():
    wrong = []
    for path in FILES:
        name = name_of(path)
        if name == "lab.toy.train" or not name.startswith(LIGHT):
            continue
        heavy = {each.split(".")[0] for each in imported(path, late=False)} - ALLOWED - OWN - sys.stdlib_module_names
        torch = {each.split(".")[0] for each in imported(path)} & {"torch", "transformers"}
        wrong += [f"{name} imports {each}" for each in sorted(heavy | torch)]
    assert wrong == []


def test_importing_them_brings_in_nothing_heavier():
    modules = [name_of(path) for path in FILES
               if name_of(path).startswith(LIGHT) and name_of(path) != "lab.toy.train"]
    code = f"import sys, importlib\nbefore = set(sys.modules)\nfor name in {modules}: importlib.import_module(name)\n" \
           "new = {name.split('.')[0] for name in set(sys.modules) - before}\n" \
           f"print(sorted(new - {ALLOWED | OWN} - sys.stdlib_module_names))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_console_itself_does_not_even_bring_numpy():
    done = subprocess.run([sys.executable, "-c", "import sys, console; print('numpy' in sys.modules)"], cwd=ROOT,
                          capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_room_says_what_belongs_there_and_what_does_not(room):
    doc = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) or ""
    assert "Here: " in doc and "Not here: " in doc and len(doc.splitlines()) <= 5


def test_every_folder_of_modules_is_a_room():
    folders = {path.parent for path in (ROOT / "lab").rglob("*.py")} - {ROOT / "lab"}
    assert {folder for folder in folders if not (folder / "__init__.py").exists()} == set()


def test_no_module_is_long():
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
               for path in FILES if not path.name[:2].isdigit()}
    assert {name: n for name, n in lengths.items() if n > LONGEST and not name.startswith(TOO_LONG)} == {}
    assert lengths["console.py"] <= 400


def test_a_demo_imports_console_before_anything_that_takes_its_time():
    """From then on Ctrl-C and a missing package end in a sentence or quietly, and lab/ hides no package."""
    for path in (path for path in FILES if path.name[:2].isdigit()):
        names = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                 for node in ast.parse(path.read_text(encoding="utf-8")).body
                 if isinstance(node, (ast.Import, ast.ImportFrom))]
        first = next(name for name in names if name.split(".")[0] not in sys.stdlib_module_names)
        assert first == "console", path.name


def test_no_function_stands_twice():
    """Of three statements or more, whatever its name and docstring."""
    found = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                if sum(isinstance(each, ast.stmt) for part in body for each in ast.walk(part)) > 2:
                    found.setdefault(ast.dump(ast.Module(body, [])), []).append(f"{name_of(path)}.{node.name}")
    assert [names for names in found.values() if len(names) > 1] == []


@pytest.mark.parametrize("call, home", [("os.replace", "lab.support.files"), ("os.cpu_count", "lab.support.host"),
                                        ("os.sched_getaffinity", "lab.support.host"),
                                        ("platform.processor", "lab.support.host")])
def test_what_the_lab_does_in_one_place_it_does_nowhere_else(call, home):
    """To write a file whole or not at all, and to ask what machine this is."""
    callers = {name_of(path) for path in FILES for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
               if isinstance(node, ast.Attribute) and ast.unparse(node) == call}
    assert callers == {home}
