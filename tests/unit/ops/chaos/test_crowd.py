"""How crowded the machine was, from the kernel's count."""

from pathlib import Path

import pytest

from ops.chaos.crowd import Crowd


def a_crowd(folder: Path, *notes: tuple[float, float]) -> Crowd:
    """Notes of a count in seconds, each at its time."""
    path = folder / "cpu"
    crowd = Crowd(path)
    for at_s, waited_s in notes:
        total_us = int(waited_s * 1e6)
        path.write_text(
            f"some avg10=1.00 avg60=2.00 avg300=3.00 total={total_us}\n"
            "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
        )
        crowd.note(at_s)
    return crowd


def test_the_share_is_that_of_the_time_asked_for(tmp_path: Path) -> None:
    """Also where it begins and ends between two notes."""
    crowd = a_crowd(tmp_path, (10.0, 5.0), (12.0, 5.0), (14.0, 7.0), (20.0, 10.0))
    assert crowd.share(10.0, 12.0) == 0.0
    assert crowd.share(12.0, 14.0) == 1.0
    assert crowd.share(11.0, 13.0) == pytest.approx(0.5)
    assert crowd.share(14.0, 20.0) == pytest.approx(0.5)
    assert crowd.whole_share() == pytest.approx(0.5)


def test_before_the_first_note_and_after_the_last_it_goes_on_alike(tmp_path: Path) -> None:
    """Notes are taken with heartbeats, which a fault may hold up."""
    crowd = a_crowd(tmp_path, (10.0, 5.0), (12.0, 6.0))
    assert crowd.share(8.0, 10.0) == pytest.approx(0.5)
    assert crowd.share(12.0, 16.0) == pytest.approx(0.5)


def test_where_the_kernel_does_not_count_nothing_is_known(tmp_path: Path) -> None:
    """Nothing is excused there; nor of no time, nor with a single note."""
    crowd = Crowd(tmp_path / "none")
    crowd.note(1.0)
    crowd.note(2.0)
    assert crowd.share(1.0, 2.0) == crowd.whole_share() == 0.0
    one = a_crowd(tmp_path, (10.0, 5.0))
    assert one.share(10.0, 12.0) == one.whole_share() == 0.0
    assert a_crowd(tmp_path, (10.0, 5.0), (12.0, 6.0)).share(11.0, 11.0) == 0.0


def test_a_file_in_other_words_says_nothing(tmp_path: Path) -> None:
    """No number, or no line."""
    for text in ("", "some avg10=1\n", "total=much\n"):
        path = tmp_path / "cpu"
        path.write_text(text)
        crowd = Crowd(path)
        crowd.note(1.0)
        crowd.note(2.0)
        assert crowd.whole_share() == 0.0
