"""What a demo says where the machine is slower than the one of its "Takes" figure."""

from lab.support import pace


def test_the_median_of_the_readings_over_the_reference():
    times = iter([0, 1, 10, 12, 20, 29])               # readings of 1, 2 and 9 seconds
    assert pace.slowness(3, clock=lambda: next(times)) == 2 / pace.REFERENCE_S


def test_a_slower_machine_is_said_with_what_to_expect():
    assert pace.sentence("about 9 s", 1.1) == "" and pace.sentence("", 9.0) == ""
    said = pace.sentence("about 9 s", 3.0)
    assert "3.0 times" in said and "27 s" in said
