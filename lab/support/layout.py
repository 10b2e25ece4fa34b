"""How tables, markdown and hanging sentences are laid out in the width there is. rich draws them."""

import textwrap

from lab.support import output
from lab.support.output import emit, gap, shown

BREAK_FROM = 24  # characters: a longer word of text is broken if the table does not fit otherwise


def draw_table(columns: list[str], texts: list[list[str]], title: str, right: list[bool]) -> None:
    """Print a table; `right` marks the columns of numbers. Numbers are never wrapped, broken or cut.

    A table too wide for the output gets its headers wrapped, then its texts, then long words broken. Then it is
    printed in parts that repeat the first column. A part that is too wide even so makes longer lines.
    """
    from rich.text import Text

    columns = [shown(c) for c in columns]
    texts = [[shown(t) for t in row] for row in texts]
    gap()
    if title:
        emit(Text(shown(title), style="bold"))
    space, limits = 2, [_limits(columns[i], [row[i] for row in texts], right[i]) for i in range(len(columns))]
    if fitted(limits, output.width(), space) is None:
        space = 1
    parts = [list(range(len(columns)))]
    if fitted(limits, output.width(), space) is None:
        space, parts = 2, parted(limits, output.width(), 2)
    for part in parts:
        chosen = [limits[i] for i in part]
        widths = fitted(chosen, output.width(), space) or [least[-1] for least in chosen]
        _draw_part([columns[i] for i in part], [[row[i] for i in part] for row in texts], [right[i] for i in part],
                   widths, space)


def _limits(header: str, cells: list[str], right: bool) -> tuple[int, ...]:
    """Widths of a column: natural; with the header wrapped; with the cells wrapped too; with long words broken."""
    from rich.cells import cell_len

    def longest(texts) -> int:
        return max(map(cell_len, [*texts, " "]))

    words = longest(cells if right else [word for cell in cells for word in cell.split()])
    name = longest(header.split())
    return (longest([header, *cells]), max(name, longest(cells)), max(name, words),
            max(min(name, BREAK_FROM), words if right else min(words, BREAK_FROM)))


def fitted(limits: list[tuple[int, ...]], width: int, space: int) -> list[int] | None:
    """Widths of columns with these limits that fit beside one another; None where even the least do not."""
    room, widths = width - space * (len(limits) - 1), [each[0] for each in limits]
    for level in range(1, len(limits[0]) if limits else 0):
        while sum(widths) > room:
            # Take from the column with the most to spare, so that one long text does not squeeze the rest.
            spare = [have - each[level] for have, each in zip(widths, limits)]
            if max(spare) <= 0:
                break
            widths[spare.index(max(spare))] -= 1
    return widths if sum(widths) <= room else None


def parted(limits: list[tuple[int, ...]], width: int, space: int) -> list[list[int]]:
    """The columns of each part of a table that does not fit: the first one, and as many of the others as fit."""
    parts = [[0]]
    for i in range(1, len(limits)):
        if len(parts[-1]) > 1 and fitted([limits[k] for k in (*parts[-1], i)], width, space) is None:
            parts.append([0])
        parts[-1].append(i)
    return parts


def _draw_part(columns, texts, right, widths, space) -> None:
    from rich.box import Box
    from rich.table import Table
    from rich.text import Text

    dash = "─" if output.encoding().lower().startswith("utf") else "-"
    line = Box(f"    \n    \n {dash}{dash} \n    \n    \n    \n    \n    \n", ascii=dash == "-")
    table = Table(box=line, show_edge=False, pad_edge=False, padding=(0, space - 1, 0, 0), header_style="bold")
    for name, wide, to_right in zip(columns, widths, right):
        table.add_column(Text(name, overflow="fold"), justify="right" if to_right else "left", vertical="top",
                         overflow="fold", width=wide)
    for row in texts:
        table.add_row(*[Text(text, overflow="fold") for text in row])
    emit(table, "", columns=max(output.width(), sum(widths) + space * len(widths)))


def draw_markdown(text: str) -> None:
    """Print a markdown cell; headings are underlined."""
    from rich.markdown import Heading, Markdown
    from rich.text import Text

    class LeftHeading(Heading):
        def __rich_console__(self, console, options):
            self.text.justify = "left"
            self.text.stylize("bold")
            yield self.text
            if self.tag in ("h1", "h2"):
                mark = "=" if self.tag == "h1" else "-"
                yield Text(mark * min(self.text.cell_len, options.max_width))

    class Plain(Markdown):
        elements = {**Markdown.elements, "heading_open": LeftHeading}

    gap()
    emit(Plain(shown(text), hyperlinks=False), "")


def draw_hanging(mark: str, style: str, text: str) -> None:
    """Print a sentence behind a mark in a style of rich's; further lines stand below its beginning."""
    from rich.text import Text

    lines = textwrap.wrap(shown(text), output.width() - len(mark), break_on_hyphens=False,
                          break_long_words=False) or [""]
    emit(Text.assemble((mark, style), lines[0]), *[Text(" " * len(mark) + line) for line in lines[1:]])
