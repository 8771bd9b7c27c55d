"""What doctor says of a configuration file beside the one that the cluster runs with."""

from typing import Any

from msgspec.structs import replace

from broker.service.config import Config, StreamsConfig, default_config
from broker.service.file_marks import mark_of
from ops.cli.doctor_findings import Level
from ops.cli.doctor_judge import KEYS_MAX, judge
from tests.unit.ops.cli.test_doctor import a_cluster


def found_of(ours: Config, theirs: Config | None) -> list[tuple[Level, str]]:
    """What is said of a file, with another in the leader's hands."""
    mark = None if theirs is None else mark_of(theirs)
    found = judge(a_cluster(config=ours, file_mark=mark), line_bytes=2000)
    return [(one.level, one.found) for one in found if one.about == "file"]


def test_a_file_that_is_not_the_leaders() -> None:
    """Who leads next goes by it: the keys are named, the values are not told."""
    ours = default_config(lanes=["acme"], models=["tiny"])
    assert found_of(ours, ours) == [(Level.OK, "the leading broker runs with the same")]
    theirs = default_config(lanes=["acme"], models=["tiny", "large"])
    text = "not what the leading broker runs with: policy.models"
    assert found_of(ours, theirs) == [(Level.WARN, text)]
    names = StreamsConfig.__struct_fields__[: KEYS_MAX + 2]
    doubled: dict[str, Any] = {name: 2 * getattr(ours.streams, name) for name in names}
    many = replace(ours, streams=replace(ours.streams, **doubled))
    ((_, found),) = found_of(ours, many)
    assert found.count("streams.") == KEYS_MAX
    assert found.endswith(" and 2 more")


def test_a_cluster_of_an_older_version_has_no_mark() -> None:
    """Nothing can be said then."""
    ours = default_config(lanes=["acme"], models=["tiny"])
    assert found_of(ours, None) == []
