"""The shelf: what the broker holds, within its budget."""

from broker.service.held import Held, Shelf, hand_on
from broker.service.stages import Stage


class _Window:
    """A pull that counts what it is given back."""

    def __init__(self) -> None:
        self.released = 0

    def release(self, count: int = 1) -> None:
        self.released += count

    def resize(self, window: int) -> None:
        raise NotImplementedError

    async def stop(self) -> list[object]:
        raise NotImplementedError


def a_held(key: str = "acme.j1", *, band: int = 2, window: _Window | None = None) -> Held:
    """A waiting job of lane acme."""
    lane, _, job_id = key.partition(".")
    return Held(
        key=key,
        lane=lane,
        band=band,
        model="tiny",
        job_id=job_id,
        client="c",
        stream="JOBS_acme",
        subject="jobs.acme.2.tiny",
        sequence=1,
        ack_subject="ack.1",
        enqueued_at_s=0.0,
        pull=window,  # pyright: ignore[reportArgumentType]
    )


def a_shelf(*, bytes_max: int = 100) -> Shelf:
    """A shelf of 100 bytes, a fifth of it kept for each of bands 0-2."""
    return Shelf(bytes_max=bytes_max, reserve_ratios=(0.2, 0.2, 0.2, 0.0))


def test_a_body_over_the_budget_is_not_kept_but_its_job_is() -> None:
    """held_bytes_max bounds bodies, never jobs: the body is read from the stream when needed."""
    shelf = a_shelf()
    shelf.put(a_held("acme.a"), b"x" * 60)
    late = a_held("acme.b")
    shelf.put(late, b"x" * 10)
    assert late.body is None
    assert "acme.b" in shelf
    assert shelf.held_bytes == 60


def test_each_band_has_room_that_no_other_may_fill() -> None:
    """Batch bodies leave the reserves of bands 0-2 alone; a band may use its own."""
    shelf = a_shelf()
    batch = a_held("acme.batch", band=3)
    shelf.put(batch, b"x" * 41)
    assert batch.body is None
    assert shelf.give_body(batch, b"x" * 40)
    urgent = a_held("acme.urgent", band=0)
    shelf.put(urgent, b"x" * 20)
    assert urgent.body is not None


def test_bytes_are_given_back_when_a_body_is_dropped_or_its_job_forgotten() -> None:
    """The count is the sum of the bodies here, whatever happens to them."""
    shelf = a_shelf()
    one, two = a_held("acme.a"), a_held("acme.b")
    shelf.put(one, b"x" * 30)
    shelf.put(two, b"x" * 20)
    shelf.drop_body(one)
    shelf.drop_body(one)
    assert shelf.held_bytes == 20
    assert shelf.remove("acme.b") is two
    assert shelf.remove("acme.b") is None
    assert shelf.held_bytes == 0
    assert len(shelf) == 1


def test_a_body_is_counted_once() -> None:
    """Giving a body twice keeps the first."""
    shelf = a_shelf()
    held = a_held()
    shelf.put(held, b"x" * 10)
    assert shelf.give_body(held, b"y" * 10)
    assert (shelf.held_bytes, held.body) == (10, b"x" * 10)


def test_the_window_gets_its_place_back_exactly_once() -> None:
    """Handed on, then forgotten: one release, or the window would grow without bound."""
    shelf, window = a_shelf(), _Window()
    held = a_held(window=window)
    shelf.put(held, None)
    hand_on(held)
    shelf.remove(held.key)
    assert window.released == 1
    assert held.stage is Stage.WAITING
