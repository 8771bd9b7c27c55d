"""Alarms: in order, alive only, and no larger than what lives."""

from broker.core.alarms import SWEEP_ALARMS_MIN, Alarms


def test_alarms_ring_in_order_of_time_and_then_of_setting() -> None:
    """Due alarms come earliest first, equal times as they were set; later ones stay."""
    alarms = Alarms[str](lambda _: True)
    for at_s, what in ((3.0, "late"), (1.0, "b"), (1.0, "c"), (0.5, "a"), (2.0, "d")):
        alarms.set(at_s, what)
    assert list(alarms.due(2.0)) == ["a", "b", "c", "d"]
    assert list(alarms.due(2.0)) == []
    assert len(alarms) == 1


def test_a_dead_alarm_does_not_ring() -> None:
    """Whoever set it says at the ring whether it still matters."""
    dead = {"b"}
    alarms = Alarms[str](lambda what: what not in dead)
    alarms.set(1.0, "a")
    alarms.set(1.0, "b")
    assert list(alarms.due(1.0)) == ["a"]
    assert len(alarms) == 0


def test_an_alarm_set_while_ringing_rings_too_if_it_is_due() -> None:
    """What a ring sets for now is heard in the same pass."""
    alarms = Alarms[str](lambda _: True)
    alarms.set(1.0, "a")
    rung: list[str] = []
    for what in alarms.due(1.0):
        rung.append(what)
        if what == "a":
            alarms.set(1.0, "b")
            alarms.set(1.1, "c")
    assert rung == ["a", "b"]


def test_dead_alarms_are_swept_out() -> None:
    """A million alarms of which ten live at a time take the memory of a few thousand."""
    living: list[int] = []
    alarms = Alarms[int](lambda n: n in living[-10:])
    most = 0
    for n in range(20_000):
        living.append(n)
        alarms.set(1e9 + n, n)
        most = max(most, len(alarms))
    assert most == SWEEP_ALARMS_MIN
    assert list(alarms.due(2e9)) == list(range(19_990, 20_000))


def test_living_alarms_are_not_swept_out() -> None:
    """Many living alarms all ring; the bound rises with them, so sweeps stay rare."""
    sweeps = 0

    def alive(_: int) -> bool:
        nonlocal sweeps
        sweeps += 1
        return True

    alarms = Alarms[int](alive)
    count = 5 * SWEEP_ALARMS_MIN
    for n in range(count):
        alarms.set(float(n), n)
    assert sweeps < 4 * count
    assert list(alarms.due(1e9)) == list(range(count))
