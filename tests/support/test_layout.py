"""Tables in the width there is: no cell ever loses a character, whatever its size."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import console
from lab.support import layout, output


@pytest.fixture(autouse=True)
def plain_pipe(monkeypatch):
    monkeypatch.setattr("lab.support.record.run", None)
    monkeypatch.delenv("COLUMNS", raising=False)


def lines_of(capsys, *args, **options) -> list[str]:
    capsys.readouterr()
    console.print_table("table", *args, **options)
    return capsys.readouterr().out.splitlines()


def test_a_number_wider_than_the_output_is_printed_whole(capsys):
    lines = lines_of(capsys, ["name", "digits"], [["a", 111], ["b", 10**90]])
    assert "1" + "0" * 90 in "".join(lines) and "…" not in "".join(lines)
    lines = lines_of(capsys, ["a" * 60, "b" * 60], [[1.0, 2.0]], formats={"a" * 60: ".2f", "b" * 60: ".2f"})
    assert "…" not in "\n".join(lines) and "1.00" in lines[-2].split() and "2.00" in lines[-2].split()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.booleans(), st.integers(1, 70)), min_size=1, max_size=14))
def test_no_cell_loses_a_character(shapes):
    """shapes: of each column the header's length, whether it holds a number, and the cell's length."""
    import io
    from contextlib import redirect_stdout

    columns = [f"{chr(97 + i)}" * n for i, (n, _, _) in enumerate(shapes)]
    cells = [int(f"{i % 9 + 1}" * n) if number else f"{chr(65 + i)}" * n for i, (_, number, n) in enumerate(shapes)]
    with redirect_stdout(io.StringIO()) as out:
        console.print_table("table", columns, [cells])
    text = out.getvalue()
    assert "…" not in text
    for column, cell in zip(columns, cells):
        if isinstance(cell, int):
            assert str(cell) in text.split()  # never broken
        else:
            assert text.count(cell[0]) >= len(cell)
        assert text.count(column[0]) >= len(column)


@pytest.mark.parametrize("asked, width", [("100", 100), ("60", 60), ("7", 40), ("100000", 300), ("", 80), ("wide", 80),
                                          ("-5", 80), ("9" * 5000, 80)])
def test_columns_of_the_environment_count_in_a_pipe_too(monkeypatch, asked, width):
    monkeypatch.setenv("COLUMNS", asked)
    assert output.width() == width


def test_a_wider_output_keeps_a_table_in_one_part(capsys, monkeypatch):
    names = [f"column{i}" for i in range(14)]
    narrow = lines_of(capsys, names, [[1.5] * 14])
    monkeypatch.setenv("COLUMNS", "160")
    wide = lines_of(capsys, names, [[1.5] * 14])
    assert len(wide) == 4 < len(narrow) and max(map(len, narrow)) <= 80 < max(map(len, wide)) <= 160


def test_a_part_repeats_the_first_column():
    limits = [(10, 10, 10, 10)] * 8
    assert layout.fitted(limits, 80, 2) is None
    parts = layout.parted(limits, 80, 2)
    assert [part[0] for part in parts] == [0, 0] and sorted(set(sum(parts, []))) == list(range(8))
    assert all(layout.fitted([limits[i] for i in part], 80, 2) for part in parts)


def test_numbers_are_to_the_right_and_have_three_digits(capsys):
    lines = lines_of(capsys, ["name", "n", "value"],
                   [["a", 1, 0.012345], ["long", 12345, 98765.4], ["x", None, 0.0]])
    assert lines[:2] == ["name      n   value", "───────────────────"]
    assert lines[2:5] == ["a         1  0.0123", "long  12345   98765", "x         -       0"]


@pytest.mark.parametrize("columns", [6, 9, 14, 25])
def test_a_wide_table_fits_and_breaks_no_number(capsys, columns):
    names = [f"rather long header number{i}" for i in range(columns)]
    numbers = [f"{1234567.25 + i:,.2f}" for i in range(columns)]
    lines = lines_of(capsys, names, [[1234567.25 + i for i in range(columns)]],
                   formats={name: ",.2f" for name in names})
    text = "\n".join(lines)
    assert all(len(line) <= 80 for line in lines)
    for number in numbers:
        assert number in text.split()
    for i in range(columns):
        assert f"number{i}" in text.split()
    assert "…" not in text and "..." not in text


def test_long_texts_wrap_between_words_and_numbers_stay(capsys):
    words = "a sentence of quite some length that has to be wrapped between its words to fit " * 2
    lines = lines_of(capsys, ["verdict", "n"], [[words, 123456789]])
    assert all(len(line) <= 80 for line in lines)
    assert " ".join(" ".join(lines[2:]).split()).replace("123456789 ", "") == words.strip()
    unbroken = lines_of(capsys, ["path", "n"], [["x" * 200, 7]])
    assert all(len(line) <= 80 for line in unbroken) and "".join(unbroken).count("x") == 200


def test_observations_hang(capsys):
    console.observe("words", "word " * 40, holds=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[ ok ] word") and all(line.startswith("       word") for line in lines[1:])
    assert all(len(line) <= 80 for line in lines)
