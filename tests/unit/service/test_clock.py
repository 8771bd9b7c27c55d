"""The broker's clock: what steps and sleeps of the machine do to it."""

import time

from broker.service.clock import WallClock, since_boot_s


def test_a_step_of_the_wall_clock_changes_nothing() -> None:
    """NTP sets the time back an hour: no lease ends by that, and no job gets younger."""
    wall_s, steady_s = [1_000_000.0], [50.0]
    clock = WallClock(wall=lambda: wall_s[0], steady=lambda: steady_s[0])
    assert clock() == 1_000_000.0
    wall_s[0] -= 3600.0
    assert clock() == 1_000_000.0
    steady_s[0] += 2.5
    assert clock() == 1_000_002.5


def test_time_that_the_machine_slept_is_counted() -> None:
    """Deadlines pass and leaderships end while a machine sleeps, so its steady clock goes on."""
    before_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before_s <= since_boot_s() <= time.clock_gettime(time.CLOCK_BOOTTIME)


def test_it_begins_at_the_wall_time() -> None:
    """What others are told is Unix time."""
    before_s = time.time()
    assert before_s - 0.5 <= WallClock()() <= time.time() + 0.5
