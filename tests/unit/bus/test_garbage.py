"""A program's own objects are not looked at again and again."""

import gc

from broker.bus import garbage


def test_what_stands_is_left_out_of_collections() -> None:
    """It is kept apart, and what comes later is still collected."""
    try:
        garbage.leave_program_out()
        assert gc.get_freeze_count() > 0
        circle: list[object] = []
        circle.append(circle)
        del circle
        assert gc.collect() >= 1
    finally:
        gc.unfreeze()
