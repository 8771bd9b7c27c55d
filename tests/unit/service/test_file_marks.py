"""What brokers tell each other of their files: which keys differ, and no value."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from broker.bus.base import LinkDown
from broker.bus.memory import MemoryBus
from broker.core.policy import LanePolicy, Policy, QuotaRow, RoutingPolicy
from broker.service import file_marks
from broker.service.config import Config, StreamsConfig
from broker.service.config_records import LaneRetention, NatsConfig
from broker.service.file_marks import FileWatch, is_declared, mark_of, read_mark, write_mark
from broker.service.reload import RELOADED, declare
from broker.wire import subjects
from broker.wire.file_mark import FILE_MARK_KEY, FileMark, differences
from broker.wire.subjects import CONFIG_BUCKET
from tests.builders import LANE, MODEL
from tests.clusters import a_cluster, until
from tests.crashing import Failing, faulty
from tests.leaders import a_config

OTHERS: dict[str, dict[str, Any]] = {
    "policy.quotas": {"policy": {"quotas": (QuotaRow(queued_jobs_max=3),)}},
    "policy.aliases": {"policy": {"aliases": {"gpt": MODEL}}},
    "policy.routing.bias": {"policy": {"routing": RoutingPolicy(bias=3.0)}},
    "streams.results_age_s_max": {"streams": {"results_age_s_max": 60.0}},
    "policy.lanes": {"lanes": (LanePolicy(name="one", weight=2.0),)},
}


@pytest.mark.parametrize("key", OTHERS)
def test_a_value_that_is_another_is_named_by_its_key(key: str) -> None:
    """Either way round: what one has not, the other has."""
    one, other = mark_of(a_config()), mark_of(a_config(**OTHERS[key]))
    assert differences(one, other) == differences(other, one) == (key,)


def test_retention_is_a_key_too() -> None:
    """A table of its own."""
    other = replace(a_config(), retention=(LaneRetention(lane="a", results_age_s_max=60.0),))
    assert differences(mark_of(a_config()), mark_of(other)) == ("retention",)


def test_what_is_each_brokers_own_is_in_no_mark() -> None:
    """Its name, its ports and its folder; the mark has all that a reload takes."""
    own = a_config(name="b2", http_port=1, state_dir="elsewhere")
    assert mark_of(own) == mark_of(a_config())
    assert file_marks.SHARED == RELOADED


def test_defaults_are_in_no_mark() -> None:
    """A key that a newer version adds at its default is no difference to an older one's file."""
    assert mark_of(Config()).values == {}
    assert mark_of(Config(policy=Policy(models=("m",)), streams=StreamsConfig())).values.keys() == {
        "policy.models"
    }


def test_the_order_of_a_table_says_nothing() -> None:
    """Aliases are a map."""
    aliases = {"a": MODEL, "b": MODEL}
    turned = dict(reversed(aliases.items()))
    one, other = (mark_of(a_config(policy={"aliases": names})) for names in (aliases, turned))
    assert one == other


def test_what_follows_from_other_tables_is_another_topology() -> None:
    """Copies of streams stand in `[nats]`: a leader that has others must declare them."""
    three = replace(a_config(), nats=NatsConfig(replicas=3))
    assert mark_of(three) != mark_of(a_config())
    assert differences(mark_of(three), mark_of(a_config())) == ()


async def test_a_mark_that_is_not_there_or_no_mark_is_none() -> None:
    """A cluster of an older version; and garbage that somebody wrote there."""
    bus = MemoryBus()
    await declare(bus, a_config())
    assert await read_mark(bus) is None
    await bus.kv_put(CONFIG_BUCKET, FILE_MARK_KEY, b"\xff garbage")
    assert await read_mark(bus) is None
    await write_mark(bus, a_config())
    assert isinstance(await read_mark(bus), FileMark)


async def test_a_stream_that_was_deleted_is_missed(tmp_path: Path) -> None:
    """The mark says that all stands: whoever leads next makes it anew all the same."""
    async with a_cluster(tmp_path, brokers=2, workers=0) as cluster:
        assert await is_declared(cluster.bus, cluster.config)
        await cluster.bus.delete_stream(subjects.results_stream(LANE))
        assert not await is_declared(cluster.bus, cluster.config)
        await cluster.members[0].kill()
        await cluster.members[1].ready()
        assert await is_declared(cluster.bus, cluster.config)


async def test_brokers_that_are_told_one_after_the_other_raise_no_alarm() -> None:
    """A standby that was sent SIGHUP first differs from the leader for a moment."""
    bus = MemoryBus()
    await declare(bus, a_config())
    await write_mark(bus, a_config())
    new = a_config(streams={"results_age_s_max": 60.0})
    watch = FileWatch(bus, config=lambda: new, leads=lambda: False)
    await watch.look()
    assert watch.different == ()
    await write_mark(bus, new)
    await watch.look()
    await watch.look()
    assert watch.different == ()
    await write_mark(bus, a_config())
    await watch.look()
    await watch.look()
    assert watch.different == ("streams.results_age_s_max",)


async def test_a_standby_compares_again_and_again_and_a_leader_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also after a look that the server did not answer; who leads is what others compare with."""
    monkeypatch.setattr(file_marks, "LOOK_S", 0.0)
    bus, leads = MemoryBus(), False
    await declare(bus, a_config())
    failing = Failing("kv_get", LinkDown("down"))
    ours = a_config(streams={"results_age_s_max": 60.0})
    watch = FileWatch(faulty(bus, failing), config=lambda: ours, leads=lambda: leads)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(watch.run())
        await until(lambda: failing.raised == 1)
        assert watch.different == ()
        await write_mark(bus, a_config())
        await until(lambda: watch.different == ("streams.results_age_s_max",))
        leads = True
        await until(lambda: watch.different == ())
        running.cancel()
