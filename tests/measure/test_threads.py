"""The number of threads is chosen by a scripted clock."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from console import ROOT
from lab.measure.scripted import random_decoder
from lab.measure.threads import choose_threads


class Clocked:
    """A decoder, its number of threads, and a clock that a forward moves by the seconds of that number."""

    def __init__(self, seconds):
        self.seconds, self.now, self.threads, self.tried = seconds, 0.0, None, []
        self.decoder = random_decoder(5, 0)
        self.decoder.device = SimpleNamespace(type="cpu")
        send = self.decoder.send

        def timed(tokens, parents=None):
            self.now += self.seconds[self.threads]
            return send(tokens, parents)
        self.decoder.send = timed

    def set(self, n):
        self.threads = n
        self.tried.append(n)

    def choose(self):
        return choose_threads(self.decoder, list(self.seconds), 3, 4, set_threads=self.set, clock=lambda: self.now)


@pytest.mark.parametrize("seconds, chosen", [
    ({1: 0.097, 2: 0.073}, 2),                    # alone on two cores
    ({1: 0.090, 2: 0.290}, 1),                    # beside one busy program
    ({1: 1.0, 2: 0.99}, 1),                       # about as fast: the least
    ({1: 1.0, 2: 0.6, 4: 0.4, 8: 0.5}, 4), ({3: 1.0}, 3)])
def test_the_fastest_number_is_chosen_and_set(seconds, chosen):
    machine = Clocked(seconds)
    reading = machine.choose()
    assert reading.chosen == machine.threads == chosen
    if len(seconds) > 1:
        assert reading.medians == pytest.approx(seconds) and all(len(x) == 3 for x in reading.seconds.values())
        assert str(reading).startswith(f"Threads: {chosen}. A forward of one token takes ")


def test_it_is_read_again_when_the_machine_has_changed():
    machine = Clocked({1: 0.097, 2: 0.073})
    assert machine.choose().chosen == 2
    machine.seconds = {1: 0.090, 2: 0.290}
    assert machine.choose().chosen == machine.threads == 1
    assert machine.decoder.length == 0


def test_on_another_device_nothing_is_read_or_changed():
    machine = Clocked({1: 1.0, 2: 0.5})
    machine.decoder.device = SimpleNamespace(type="cuda")
    assert machine.choose().seconds == {} and machine.tried == [] and machine.decoder.calls == []


@pytest.mark.parametrize("given", [None, "active"])
def test_threads_sleep_while_they_wait_unless_the_user_says_otherwise(given):
    """It must be asked for before torch is loaded."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    code = "import sys, os, console; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60,
                          env=env | ({"OMP_WAIT_POLICY": given} if given else {}))
    assert done.stdout.split() == [given or "passive", "False"], done.stderr
