"""Assumptions as flags: what a field may hold, reading flags with tyro, and one sentence for what cannot be used."""

import ast
import dataclasses
import inspect
import io
import math
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Annotated, Any

from lab.support import output
from lab.support.errors import HELP, BadInput, cut, nearest_words

MOST = 10**12  # of a whole number; products of several assumptions, and quotients, then stay finite


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a value of an annotated field must be: put it into Annotated[type, Rule(words, test)]."""

    words: str
    test: Callable[[Any], bool]
    names: tuple[str, ...] = ()


Count = Annotated[int, Rule("a whole number of at least 1 and at most 1e12", lambda x: 1 <= x <= MOST)]
NonNegative = Annotated[int, Rule("a whole number of at least 0 and at most 1e12", lambda x: 0 <= x <= MOST)]
Positive = Annotated[float, Rule("a number above 0, from 1e-9 to 1e12", lambda x: 1e-9 <= x <= 1e12)]
Fraction = Annotated[float, Rule("a number from 0 to 1", lambda x: 0 <= x <= 1)]
Share = Annotated[float, Rule("a number above 0 and at most 1", lambda x: 0 < x <= 1)]
Alpha = Annotated[float, Rule("at least 0 and below 1", lambda x: 0 <= x < 1)]


def Within(low, high):
    """The type of a field that holds a number from low to high, whole when both are: windows: Within(1, 100) = 6."""
    kind = int if isinstance(low, int) and isinstance(high, int) else float
    words = f"a {'whole ' if kind is int else ''}number from {low:,} to {high:,}"
    return Annotated[kind, Rule(words, lambda x: low <= x <= high)]


def OneOf(*names: str):
    """The type of a field that holds one of these names: chip: OneOf(*CHIPS) = "h100-sxm".

    A flag may spell a name with other capitals, and with spaces or underscores for hyphens.
    """
    return Annotated[str, choice(*names)]


def choice(*names: str) -> Rule:
    """The rule of OneOf(*names). A type checker accepts no call as a type, but Annotated[str, choice(*names)]."""
    return Rule("one of the known names", lambda x: x in names, names)


def flags(cls, argv: Sequence[str], prog: str, title: str = ""):
    """An instance of the frozen dataclass `cls` from flags, checked as `assumptions` does; nothing is printed.

    prog: the command as a user types it. BadInput for flags that cannot be read, SystemExit(0) after --help.
    """
    return instance(cls, parsed(cls, list(argv), prog, title))


def instance(cls, values: dict | None = None):
    """`cls(**values)`, each value checked by its annotation; values are those of flags, None for the defaults.

    BadInput names what was given as a flag, and an impossible default as the field.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    values = {name: spelled(value, hints[name]) for name, value in (values or {}).items()}
    for field in dataclasses.fields(cls):  # before __post_init__, which may compare them
        value = values.get(field.name, _default(field))
        given = field.name in values and value != _default(field)
        _check(flag_of(field.name) if given else field.name, value, hints[field.name])
    return cls(**values)


def _default(field: dataclasses.Field):
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def spelled(value, hint):
    """`value` as the OneOf in `hint` spells it, if it is one: h100-sxm for "H100 SXM"."""
    if isinstance(value, tuple):
        return tuple(spelled(item, typing.get_args(_bare(hint))[0]) for item in value)
    names = [name for rule in _rules(hint) for name in rule.names]
    alike = [name for name in names if re.sub(r"[ _]", "-", f"{value}".lower()) == name.lower()]
    return alike[0] if alike and value not in names else value


def _check(label: str, value, hint) -> None:
    inner = typing.get_args(_bare(hint))
    if typing.get_origin(_bare(hint)) is tuple and isinstance(value, tuple):
        for i, item in enumerate(value):
            _check(label, item, inner[0] if inner[-1] is Ellipsis else inner[min(i, len(inner) - 1)])
    if isinstance(value, float) and not math.isfinite(value):
        raise BadInput(f"{label} must be a finite number, not {value}")
    for rule in _rules(hint):
        if rule.test(value):
            continue
        if rule.names:
            raise BadInput(f'{label} has no choice "{cut(str(value))}"; {nearest_words(value, rule.names)}'
                           + (HELP if label.startswith("--") else ""))
        raise BadInput(f"{label} must be {rule.words}, not {cut(as_words(value))}")
    if isinstance(value, int) and abs(value) > MOST:
        raise BadInput(f"{label} must be a whole number of at most 1e12, not {cut(as_words(value))}")


def _rules(hint) -> list[Rule]:
    return [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Rule)]


def _bare(hint):
    return typing.get_args(hint)[0] if hasattr(hint, "__metadata__") else hint


def flag_of(name: str) -> str:
    """The flag of a field: --tree-batches for tree_batches."""
    return "--" + name.replace("_", "-")


def as_words(value) -> str:
    """A value as it is printed and given as a flag: "1 3 5" for a tuple, "yes" for True."""
    if isinstance(value, (tuple, list)):
        return " ".join(as_words(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return repr(value) if isinstance(value, float) else str(value) or '""'


def is_number(text: str) -> bool:
    """Whether a word of the command line is a number, as "-0.1" is, and so no flag."""
    try:
        float(text)
    except ValueError:
        return False
    return True


# ------------------------------------------------------------------------------------------------ the command line


def parsed(cls, argv: list[str], prog: str, title: str = "", source: str = "", with_json: bool = False) -> dict:
    """{field: value} of the flags in argv, "json" among them if asked for; BadInput, or exit 0 after --help."""
    import tyro
    from tyro import _errors  # its hook is the one way to learn what exactly was refused

    decodable(argv)
    made, text = _with_help(cls, source, with_json), io.StringIO()
    kinds = _kinds(made)
    for flag, values in _given(argv):  # tyro takes neither for a mistake
        if values in ([], [""]) and kinds.get(flag, bool) is not bool:
            raise BadInput(f"{flag} needs a value")
    try:
        with redirect_stdout(text), redirect_stderr(text), _errors.on_parse_error(_refusing(kinds, argv)):
            found = tyro.cli(made, args=argv, prog=prog, description=title, config=(tyro.conf.OmitArgPrefixes,))
    except SystemExit as end:
        if end.code in (0, None):
            output.write(output.trimmed(text.getvalue()))
            raise
        raise BadInput(f"these flags cannot be read: {cut(' '.join(argv))}{HELP}") from None
    return vars(found)


def decodable(argv: Iterable[str]) -> None:
    """BadInput for a word of the command line that holds bytes which are no UTF-8."""
    for word in argv:
        try:
            word.encode("utf-8")
        except UnicodeEncodeError:
            shown = word.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            raise BadInput(f'"{cut(shown)}" holds bytes that are no UTF-8: give it in UTF-8') from None


def _with_help(cls, source: str, with_json: bool):
    """A dataclass like `cls` without its __post_init__, with the docs of its fields as help, and with --json."""
    import tyro

    hints, docs, fields = typing.get_type_hints(cls, include_extras=True), field_docs(cls, source), []
    for field in dataclasses.fields(cls):
        names = [name for rule in _rules(hints[field.name]) for name in rule.names]
        words = " ".join([docs.get(field.name, ""), f"One of: {', '.join(names)}." if names else ""]).strip()
        fields.append((field.name, Annotated[hints[field.name], tyro.conf.arg(help=words)],
                       dataclasses.field(default=field.default, default_factory=field.default_factory)))
    if with_json:
        about = tyro.conf.arg(help="write the record of the run to this file", metavar="FILE", help_behavior_hint="")
        fields.append(("json", Annotated[str, about], dataclasses.field(default="")))
    made = dataclasses.make_dataclass(cls.__name__, fields, frozen=True)
    made.__doc__ = ""
    return made


def _kinds(cls) -> dict:
    """{flag: type} of a dataclass, without annotations."""
    return {flag_of(name): _bare(hint) for name, hint in typing.get_type_hints(cls, include_extras=True).items()}


def _refusing(kinds: dict, argv: list[str]) -> Callable:
    """A hook for tyro: raises BadInput, one sentence, for what it is about to refuse on several lines."""
    known = [*kinds, *("--no-" + flag[2:] for flag, kind in kinds.items() if kind is bool)]

    def refuse(event) -> None:
        argument = getattr(event, "argument", None)
        if argument is not None:
            flag = argument.lowered.name_or_flags[0]
            values = next((values for name, values in reversed(_given(argv)) if name == flag), [])
            raise BadInput(_refused_value(flag, kinds[flag], values))
        token = next(iter(getattr(event, "tokens", [])), "")
        if token.startswith("-") and not is_number(token):
            raise BadInput(f"unknown flag {cut(token)}; {nearest_words(token, known)}{HELP}")
        if token:
            raise BadInput(_refused_word(token, argv, kinds))

    return refuse


def _refused_value(flag: str, kind, values: list[str]) -> str:
    many = typing.get_origin(kind) is tuple
    kind = _bare(typing.get_args(kind)[0]) if many else kind
    what = {int: "a whole number", float: "a number"}.get(kind)
    if not values or what is None:
        return f"{flag} needs a value"
    more = ", several separated by spaces" if many else ""
    return f'{flag} must be {what}{more}, not "{cut(" ".join(values))}"'


def _refused_word(word: str, argv: list[str], kinds: dict) -> str:
    """What to say of a word that belongs to no flag."""
    before = [name for name, values in _given(argv) if word in values]
    flag = before[0] if before else ""
    if flag in kinds or flag.startswith("--no-"):
        takes = "no value" if kinds.get(flag, bool) is bool else "one value"
        return f'{flag} takes {takes}, so "{cut(word)}" is not possible there'
    example = next((flag for flag, kind in kinds.items() if kind in (int, float)), None)
    return (f'unexpected "{cut(word)}": flags begin with -- and are followed by their value, as in '
            f'{f"{example} 1" if example else "--json FILE"}')


def _given(argv: list[str]) -> list[tuple[str, list[str]]]:
    """Each flag of argv with the words behind it; words before the first flag stand behind ""."""
    found: list[tuple[str, list[str]]] = [("", [])]
    for word in argv:
        if word.startswith("-") and not is_number(word):
            name, equals, value = word.partition("=")
            found.append((name.replace("_", "-"), [value] if equals else []))
        else:
            found[-1][1].append(word)
    return found


# --------------------------------------------------------------------------------------- what is said about a field


def field_docs(cls, source: str = "") -> dict[str, str]:
    """The doc of each field: the string below it, or the comment beside it or above it.

    source: the file that `cls` stands in; else it is looked for in the notebook, and where Python finds it.
    """
    for text in _sources(cls, source):
        try:
            tree = ast.parse(text)
        except SyntaxError:  # a notebook cell with a magic command
            continue
        found = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == cls.__name__]
        if found:
            return _docs_in(found[-1].body, text.splitlines())
    return {}


def _docs_in(body: list, lines: list[str]) -> dict[str, str]:
    docs = {}
    for node, after in zip(body, [*body[1:], None]):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        behind = lines[(node.end_lineno or node.lineno) - 1][node.end_col_offset:]
        comment = re.search(r"\s#\s*(.*)$", behind) or re.match(r"\s*#\s*(.*)$", lines[node.lineno - 2])
        below = after.value if isinstance(after, ast.Expr) else None
        if isinstance(below, ast.Constant) and isinstance(below.value, str):
            docs[node.target.id] = " ".join(below.value.split())
        elif comment:
            docs[node.target.id] = comment.group(1).strip()
    return docs


def _sources(cls, source: str) -> Iterable[str]:
    if source:
        yield source
    if output.in_notebook():
        yield from reversed(sys.modules["IPython"].get_ipython().user_ns.get("In", []))
    with suppress(OSError, TypeError):
        yield textwrap.dedent(inspect.getsource(cls))
