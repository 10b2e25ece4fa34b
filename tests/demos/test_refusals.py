"""What a toy demo cannot do it refuses before its first section, in one sentence that names the flags."""

import pytest

import console
from console import BadInput
from lab.__main__ import demos

TOY = {number: path for number, path in demos().items() if number < 14}


@pytest.mark.parametrize("number, flags, words", [
    (2, ["--prompt-tokens", 10**12], ["--prompt-tokens", "496"]), (2, ["--prompts", 500], ["--prompts", "--answer-tokens"]),
    (2, ["--repeats", 10**12], ["--repeats"]), (3, ["--context", 10**12], ["--context", "500"]),
    (3, ["--layers", 10**12], ["--layers", "6"]), (4, ["--gammas", 1, 8], ["--gamma-max", "--gammas", "--new-tokens"]),
    (4, ["--new-tokens", 10**12], ["--new-tokens"]), (4, ["--prompts", 10**12], ["--prompts"]),
    (4, ["--gamma-max", 5], ["--gamma-max", "--gammas"]), (4, ["--samples", 10**12], ["--samples"]),
    (6, ["--prompts", 10**12], ["--prompts"]), (6, ["--samples", 10**12], ["--samples"]),
    (7, ["--penalties", 0.5], ["--penalties"]), (7, ["--prompts", 10**12], ["--prompts"]),
    (8, ["--requests", 17], ["--requests", "16"]),
    (8, ["--requests", 10**12], ["--requests"]), (9, ["--inner", 8, "--gamma", 8], ["--inner", "--gamma"]),
    (9, ["--middle", "pythia-70m"], ["--small", "--middle", "--large"]), (11, ["--prompts", 10**12], ["--prompts"])])
def test_it_refuses_before_the_first_section(number, flags, words, capsys):
    with pytest.raises(BadInput) as caught:
        console.run_demo(TOY[number], flags)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)
    assert "## 1." not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("number", TOY)
@pytest.mark.parametrize("value", [-1, 10**30])
def test_no_whole_number_is_too_small_or_too_large_for_a_sentence(number, value):
    import ast
    tree = ast.parse(TOY[number].read_text(encoding="utf-8"))
    found, = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Assumptions")
    for field in found.body:
        if not isinstance(field, ast.AnnAssign) or not any(
                isinstance(node, ast.Constant) and type(node.value) is int for node in ast.walk(field.value)):
            continue
        flag = "--" + field.target.id.replace("_", "-")
        with pytest.raises(BadInput, match=flag):
            console.run_demo(TOY[number], [flag, value])


def test_output_that_cannot_be_written_stops_demo_11_in_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(console, "OUT", tmp_path / "file")
    with pytest.raises(BadInput, match="DECODE_LAB_OUT"):
        console.run_demo(TOY[11])
