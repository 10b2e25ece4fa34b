"""README.md shows what the commands print now, and its links lead somewhere."""

import re

import console
from lab import readme


def test_output_blocks_and_table_of_demos_are_what_is_printed_now():
    text = readme.README.read_text(encoding="utf-8")
    assert text.count("<!-- output:") >= 2 and "<!-- demos -->" in text
    assert readme.refreshed(text) == text, "README.md is stale: make readme"


def test_the_picture_was_drawn_from_the_values_of_the_demo():
    assert readme.picture_fingerprint() == readme.fingerprint(console.run_demo(readme.PICTURE_OF))


def test_every_link_and_every_make_target_exists():
    text = readme.README.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (readme.ROOT / link).exists(), link
    makefile = (readme.ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make (lab|test|setup|notebooks|readme)\b", text):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_a_changed_block_is_noticed():
    text = readme.README.read_text(encoding="utf-8")
    changed = re.sub(r"(<!-- output: [^\n]*\n```\n[^\n]*)", r"\1 x", text, count=1)
    assert changed != text and readme.refreshed(changed) == text
