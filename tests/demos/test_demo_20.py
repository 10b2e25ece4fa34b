"""The record of demo 20: on small random models in folders, with a llama.cpp that is scripted, and with a wrong engine."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import console
from lab.measure import engines, generate as transformers_generate, llama_cpp
from records import observation, table

DEMO = Path(__file__).resolve().parents[2] / "lab" / "20_against_others.py"
SMALL = ["--copied", "12", "--new-tokens", "8", "--timings", "2", "--context", "16"]
LLAMA, LFM2 = "small-llama", "small-lfm2"
OURS = ["our lookup", "our chain"]

pytestmark = pytest.mark.usefixtures("one_thread", "read_once")


def run(target, *flags):
    return console.run_demo(DEMO, [*SMALL, "--target", str(target), *map(str, flags)])


@pytest.fixture(scope="module")
def record(folders, timed_once):
    with timed_once():
        return run(folders / LLAMA)


def check(record, more=(), repeats=1):
    """What holds of every record. more: the methods of an engine with weights of its own."""
    assert [t["id"] for t in record["tables"]] == [
        "forward-times", "why-repeat", "why-open", "rivals-repeat", "rivals-open", "same-text"]
    times = table(record, "forward-times")
    assert [row["tokens"] for row in times] == [1, 2, 3, 4, 5, 7, 9, 13, 17]
    for kernels in ("packed", "loaded"):
        for row in times:
            assert row[f"verify ratio {kernels}"] == pytest.approx(row[f"{kernels}, ms"] / times[0][f"{kernels}, ms"])
    named = []
    for kind in ("repeat", "open"):
        plain, *whys = table(record, f"why-{kind}")
        speeds = table(record, f"rivals-{kind}")
        names = [row["method"] for row in speeds]
        assert plain["method"] == "our plain" and [row["method"] for row in whys] == names
        lookup, assisted = names[4], names[6]
        assert names == [*OURS, "generate", "generate, loaded", lookup, f"{lookup}, loaded", assisted, *more]
        assert lookup in engines.LOOKUPS and assisted in engines.ASSISTED
        named += [(kind, name) for name in names]
        for why, speed in zip(whys, speeds):
            assert (why["c"] is not None) == (why["method"] in ("our chain", assisted))
            assert 1 <= why["tau"] <= why["drafted"] + 1 + 1e-9 and why["tokens/s"] > 0
            samples = record["samples"][f"seconds per token, {kind}, {why['method']}"]
            ratios = (np.array(samples["before"]) + samples["after"]) / 2 / samples["method"]
            assert len(ratios) == repeats and speed["measured speedup"] == pytest.approx(np.median(ratios))
            assert (speed["predicted speedup"] is None) == (why["method"] in more)
        for name in ("generate", lookup):                      # other kernels, the same rounds
            a, b = (row for row in whys if row["method"] in (name, f"{name}, loaded"))
            assert (a["drafted"], a["alpha"], a["tau"]) == (b["drafted"], b["alpha"], b["tau"])
        step = next(row for row in speeds if row["method"] == "generate")
        assert step["predicted speedup"] == pytest.approx(1)   # as plain decoding, were it for its forwards alone
    texts = table(record, "same-text")
    assert [(row["text"], row["method"]) for row in texts] == named and {row["texts"] for row in texts} == {repeats}
    for each in record["observations"]:
        assert (each["holds"] is None) == ("not_judged" in each)
    kernels = ["kernels"] if record["assumptions"]["dtype"] == "float32" else []      # elsewhere nothing is packed
    assert [each["id"] for each in record["observations"]] == [
        "verify-cheap", *kernels, "lookup-against-theirs", "lookup-same-kernels", "plain-against-theirs", "open-keeps",
        "rivals-same-text"]
    return texts


@pytest.mark.slow
def test_a_small_llama(record):
    texts = check(record)
    assert {row["differ"] for row in texts} == {0} and observation(record, "rivals-same-text")["holds"]
    assert max(row["tau"] for row in table(record, "why-repeat")) > 1.5          # else the tables say nothing


@pytest.mark.slow
def test_a_hybrid_in_bfloat16(folders, one_repeat):
    record = run(folders / LFM2, "--dtype", "bfloat16", "--scheme", "int8")
    check(record)
    assert observation(record, "rivals-same-text")["holds"]


@pytest.mark.nightly
@pytest.mark.parametrize("draft, own", [(LLAMA, True), ("padded", False)])
def test_a_draft_of_its_own_needs_as_many_output_rows(folders, draft, own):
    """transformers takes another number of output rows for another tokenizer; a rounding of the target is there instead."""
    record = run(folders / LLAMA, "--draft", folders / draft)
    check(record, repeats=5)
    chain = next(row for row in table(record, "why-repeat") if row["method"] == "our chain")
    assert not own or chain["alpha"] is None or chain["alpha"] == 1              # the target itself is always right


@pytest.mark.nightly
def test_random_weights_mean_nothing(monkeypatch, capsys):
    import llm_math
    monkeypatch.setattr(llm_math, "MODELS", {"tiny": llm_math.replace(
        llm_math.PYTHIA_70M, n_layers=4, hidden=64, n_heads=4, n_kv_heads=4, head_dim=16, ffn=128, vocab_size=320)})
    check(console.run_demo(DEMO, [*SMALL, "--random-weights", "tiny"]), repeats=5)
    assert "tau and acceptance mean nothing" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_llama_cpp_has_its_rows_where_it_is_installed(folders, monkeypatch, one_repeat):
    """Scripted: it writes something else than the target, and as many threads are asked of it as PyTorch runs on."""
    asked = []

    def scripted(path, *, prompt_lookup=0, threads):
        asked.append((path, prompt_lookup, threads))

        def generate(prompt, n_new, eos=()):
            run = transformers_generate.as_run(0.0, [(0.1 * k, []) for k in range(n_new)],
                                               [(0.1 * k + 0.05, [7]) for k in range(n_new)], eos, "budget")
            return transformers_generate.Rival(np.array([*prompt, *[7] * n_new]), run, 1.0)
        return generate

    monkeypatch.setattr(llama_cpp, "has_llama_cpp", lambda: True)
    monkeypatch.setattr(llama_cpp, "llama_cpp", scripted)
    monkeypatch.setattr("lab.models.gguf_file", lambda name: "x.gguf")
    record = run(folders / LLAMA)
    texts = check(record, ["llama.cpp", "llama.cpp lookup 10"])
    foreign = [row for row in texts if row["method"].startswith("llama")]
    assert len(foreign) == 4 and all((row["differ"], row["bugs"]) == (0, None) for row in foreign)
    assert {(path, n) for path, n, _ in asked} == {("x.gguf", 0), ("x.gguf", 10)}
    assert {threads for *_, threads in asked} <= {1, 2, 4, 8, 16, torch.get_num_threads()}


@pytest.mark.slow
def test_an_engine_that_writes_another_text_is_seen(folders, monkeypatch, one_repeat):
    right = transformers_generate.generate

    def wrong(decoder, prompt, n_new, *, prompt_lookup=0, **how):
        made = right(decoder, prompt, n_new, prompt_lookup=prompt_lookup, **how)
        if prompt_lookup:
            made.tokens[len(prompt) + 2] = (made.tokens[len(prompt) + 2] + 1) % 300 + 1
        return made

    monkeypatch.setattr(transformers_generate, "generate", wrong)
    record = run(folders / LLAMA)
    bugs = {row["method"] for row in table(record, "same-text") if row["bugs"]}
    assert bugs and all(name.startswith("lookup") for name in bugs)
    assert not observation(record, "rivals-same-text")["holds"]


# -- bad input -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("flags, message", [
    (["--scheme", "int3"], "--scheme must be a rounding such as int8 or int4-g32, not int3"),
    (["--random-weights", "pythia-70m"], "takes the place of a target and has no family"),
    (["--context", "1000"], "1000 tokens are more than the 512"), (["--draft", "nothing"], 'there is no model "nothing"'),
    (["--target", "toy"], "must be a real model in the demos from 14 on"),
    (["--repeats", "4"], "--repeats must be a whole number from 5")])
def test_bad_flags_get_one_sentence(folders, flags, message):
    with pytest.raises(console.BadInput, match=message) as error:
        run(folders / LLAMA, *flags)
    assert "\n" not in str(error.value)


def test_a_draft_with_another_tokenizer_is_refused(folders):
    with pytest.raises(console.BadInput, match="stranger and small-llama have different tokenizers"):
        run(folders / LLAMA, "--draft", folders / "stranger")
