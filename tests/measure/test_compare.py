"""Comparisons on a scripted machine: methods whose rounds take the seconds that a script says."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

from console import BadInput
from decode_lab import Round, Run
from lab.measure.compare import compare, not_judged, undecided


class Machine:
    """Stands for a target and its clock. pace(k): how slow the machine is at its k-th generation."""

    device, eos = SimpleNamespace(type="scripted"), (9,)

    def __init__(self, pace=lambda k: 1.0):
        self.pace, self.made = pace, []

    def synchronize(self):
        """Nothing is pending."""

    def method(self, name, accepted=0, round_s=1.0):
        """A method that writes two rounds, of which the first is slow and is not to count."""
        def call(target, prompt, n_new, eos=()):
            assert target is self and eos == (9,)
            seconds = round_s * self.pace(len(self.made))
            self.made.append((name, n_new))
            later = Round(accepted, accepted, accepted, 0.0, seconds)
            return np.array(prompt), Run([Round(0, 0, 0, 0.0, 50.0, first=True), later])
        return call


def run(machine, methods, texts=("one",), **options):
    plain = options.pop("baseline", machine.method("A"))
    return compare(methods, {text: [1, 2] for text in texts}, machine, 8, baseline=plain, **options)


def test_every_method_runs_between_two_runs_of_its_baseline_after_a_warm_up():
    machine = Machine()
    run(machine, {"B": machine.method("B"), "C": machine.method("C")})
    assert machine.made[:3] == [("A", 3), ("B", 3), ("C", 3)]
    timed = "".join(name for name, n in machine.made[3:])
    assert timed == "ABACA" "CABA" "BACA" "CABA" "BACA"   # and a repetition begins with the last one's baseline run
    assert {n for _, n in machine.made[3:]} == {8}


def test_a_row_has_the_median_of_paired_ratios_and_its_quartiles():
    machine = Machine()
    row, = run(machine, {"B": machine.method("B", accepted=2, round_s=1.5)})
    assert (row.text, row.method) == ("one", "B")
    assert row.tau == 3 and row.speedup == pytest.approx(2.0) and row.quartiles == pytest.approx((2.0, 2.0))
    assert row.judged and row.not_judged == "" and row.spread == 0 and row.ttft == 50.0
    assert row.per_token == pytest.approx(0.5)
    assert {name: len(x) for name, x in row.samples.items()} == {"before": 5, "method": 5, "after": 5}


def test_a_drifting_machine_does_not_bend_a_paired_ratio():
    """At a pace that rises evenly the mean of before and after is the pace between."""
    machine = Machine(lambda k: 1 + 0.01 * k)
    row, = run(machine, {"B": machine.method("B", accepted=1)})
    assert row.ratios == pytest.approx([2.0] * 5) and row.judged


def test_a_machine_whose_plain_decoding_spreads_is_not_judged():
    machine = Machine(lambda k: 3.0 if k % 4 == 2 else 1.0)
    row, = run(machine, {"B": machine.method("B", accepted=1)})
    assert not row.judged and "busy" in row.not_judged and f"{row.spread:.0%}" in row.not_judged


def test_a_number_just_past_its_bound_does_not_read_like_it(monkeypatch):
    """Not "spreads over 20%, more than 20%"."""
    machine = Machine(lambda k: 1.4 if k % 4 == 2 else 1.0)
    row, = run(machine, {"B": machine.method("B", accepted=1)})
    monkeypatch.setattr("lab.measure.compare.MOST_SPREAD", row.spread - 0.0004)
    number, bound = re.search(r"spreads over (\S+) .* more than (\S+)\. Run", row.not_judged).groups()
    assert number != bound and float(number.strip("%")) > float(bound.strip("%"))


def test_a_speedup_above_tokens_per_round_is_not_judged():
    """As where plain decoding was disturbed and the method was not: 2.81 times at 1.14 tokens a round."""
    machine = Machine()
    methods = {"B": machine.method("B", accepted=0, round_s=0.4)}
    row, = run(machine, methods)
    assert not row.judged and "2.50 times plain decoding at 1.00 tokens a round" in row.not_judged
    other, = run(machine, methods, unbounded=["B"])            # another engine's forward may be faster
    assert other.judged and other.speedup == pytest.approx(2.5)


def test_a_busy_text_is_read_again_once_after_when_busy():
    machine, calls = Machine(), []
    machine.pace = lambda k: 1.0 if calls or k % 2 else 2.0
    row, = run(machine, {"B": machine.method("B", accepted=3)}, when_busy=lambda: calls.append(1))
    assert len(calls) == 1 and row.judged and row.speedup == pytest.approx(4.0)
    assert not row.earlier.judged and len(row.samples["before, not judged"]) == 5
    machine.pace, calls = (lambda k: 1.0 + 2.0 * (k // 2 % 2)), []
    row, = run(machine, {"B": machine.method("B")}, when_busy=lambda: calls.append(1))
    assert len(calls) == 1 and not row.judged and not_judged([row]) == row.not_judged


def test_a_quiet_machine_is_read_once_and_a_case_that_loses_stays():
    machine, calls = Machine(), []
    rows = run(machine, {"B": machine.method("B", round_s=2.0), "C": machine.method("C", accepted=1)}, ("one", "two"),
               when_busy=lambda: calls.append(1))
    assert [(row.text, row.method) for row in rows] == [("one", "B"), ("one", "C"), ("two", "B"), ("two", "C")]
    assert [row.speedup for row in rows] == pytest.approx([0.5, 2.0] * 2) and calls == [] and not_judged(rows) == ""


def test_fewer_than_five_repetitions_are_refused():
    machine = Machine()
    with pytest.raises(BadInput, match="repeats"):
        run(machine, {"B": machine.method("B")}, repeats=4)
    with pytest.raises(BadInput, match="methods"):
        run(machine, {})


def test_a_bound_amid_the_readings_is_not_decided():
    machine = Machine()
    paces = iter([1.0] + [1.0, 1.10, 1.05, 0.9, 0.95] * 9)

    def uneven(target, prompt, n_new, eos=()):
        return np.array(prompt), Run([Round(0, 0, 0, 0.0, 1.0, first=True), Round(1, 1, 1, 0.0, 2 * next(paces))])
    a, b = run(machine, {"B": uneven, "C": machine.method("C", accepted=1, round_s=1.0)})
    assert a.judged and "lies on both sides of 1." in undecided(a, 1.0)
    assert undecided(a, 0.5) == "" and undecided(a, 1.5) == "" and undecided(b, 2.0) == ""
    assert "both sides" in undecided(b, 2.0, a) and undecided(b, 1.0, a) == ""
    assert a.plain == (1.0, 50.0)
    b.before[0], b.before[1], b.after[3] = [made._replace(run=Run([Round(0, 0, 0, 0.0, 9.0)])) for made in b.before[:3]]
    assert "busy" in undecided(a, 0.5, b)
