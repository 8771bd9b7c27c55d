"""What doctor says of workers that were lost."""

from ops.cli.doctor_facts import Facts
from ops.cli.doctor_judge import LOST_TOLD_MAX, judge
from tests.unit.ops.cli.test_doctor import a_cluster
from tests.views import a_gone_view


def _found(facts: Facts) -> list[str]:
    return [one.found for one in judge(facts, line_bytes=2000) if one.about == "workers"]


def test_lost_workers_are_told_until_they_are_back() -> None:
    """The latest one by one, the others by number; those that left or came again not at all."""
    lost = tuple(a_gone_view(worker=f"w{number}") for number in range(LOST_TOLD_MAX + 2))
    others = (a_gone_view(how="left"), a_gone_view(how="restarted"), a_gone_view(back=True))
    found = [one for one in _found(a_cluster(gone=(*lost, *others))) if "lost" in one]
    told = "was lost 5 min ago (no responders); 2 of its 3 jobs were put back"
    each = [f"w{number} {told}" for number in range(LOST_TOLD_MAX)]
    assert found == [*each, "2 more were lost and are not back"]


def test_a_fleet_that_was_lost_as_a_whole_is_told_before_that_there_is_none() -> None:
    """What was lost says where to look."""
    facts = a_cluster(workers=(), gone=(a_gone_view(),))
    found = _found(facts)
    assert found[0].startswith("gpu-9 was lost")
    assert found[1] == "none"
