"""What doctor makes of the facts, how it prints, and which code it ends with."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from broker.bus.nats import ServerInfo
from broker.bus.nats_streams import stream_config
from broker.service.config import Config, default_config
from broker.service.snapshot import WatchView
from broker.wire.messages import LaneOffer
from ops.cli.doctor import exit_code, tell
from ops.cli.doctor_facts import Facts, StreamFact, wanted_streams
from ops.cli.doctor_findings import Finding, Level, fail, ok, warn
from ops.cli.doctor_judge import (
    CLOCK_S_MAX,
    CLOCK_S_WARN,
    FULL_RATIO,
    RTT_S_MAX,
    SCARCE_RATIO,
    SIGNAL_S_MAX,
    judge,
)
from ops.cli.durability import Durability
from ops.cli.errors import ExitCode
from tests.views import a_status_view, a_worker_view

SERVER = ServerInfo(
    name="n1", version="2.15.1", cluster="", payload_bytes_max=8 * 1024 * 1024, jetstream=True
)
ALWAYS = Durability(0.0, "the server", storage_bytes_max=1024**4)
GIB = 1024**3


def a_cluster(**fields: Any) -> Facts:
    """One healthy lane, a leader, and a worker that serves its model."""
    facts = Facts(server=SERVER, rtt_s=0.0002, durability=ALWAYS, config=None)
    facts.offers = [LaneOffer(lane="acme", models=("tiny",))]
    facts.status = a_status_view()
    facts.workers = (a_worker_view(),)
    facts.server_ahead_s = facts.broker_ahead_s = 0.001
    facts.workers_ahead_s = {"gpu-1": 0.002}
    facts.disk_free_bytes = 100 * GIB
    for name, value in fields.items():
        setattr(facts, name, value)
    if "streams" not in fields:
        facts.streams = {
            spec.name: StreamFact(stream_config(spec), 0, 0) for spec in wanted_streams(facts)
        }
    return facts


def _judged(facts: Facts, *, about: str = "", line_bytes: int = 2000) -> list[Finding]:
    found = list(judge(facts, line_bytes=line_bytes))
    return [one for one in found if about in ("", one.about)]


def _of(facts: Facts, about: str, level: Level) -> list[str]:
    return [one.found for one in _judged(facts, about=about) if one.level is level]


def test_healthy_cluster() -> None:
    """All is ok, and every subject has a line."""
    found = _judged(a_cluster())
    assert {one.level for one in found} == {Level.OK}
    assert {one.about for one in found} == {
        *("nats", "durability", "streams", "disk", "results", "files", "broker", "watchdogs"),
        *("workers", "clocks", "dlq"),
    }


def test_every_trouble_has_something_to_do() -> None:
    """A warning without a way out is noise."""
    bad = a_cluster(
        server=replace(SERVER, payload_bytes_max=1024**2),
        rtt_s=RTT_S_MAX * 2,
        durability=Durability(None),
        workers=(a_worker_view(phase="suspect"), a_worker_view(worker="b", ready=False)),
        server_ahead_s=40.0,
        disk_free_bytes=1,
    )
    troubles = [one for one in _judged(bad) if one.level is not Level.OK]
    assert len(troubles) >= 8
    assert all(one.to_do for one in troubles)


def test_server_without_jetstream() -> None:
    """Nothing else can be judged then."""
    found = _judged(a_cluster(server=replace(SERVER, jetstream=False)))
    assert [one.found for one in found if one.level is Level.FAIL] == [
        "JetStream is off: no job can be stored"
    ]
    assert {one.about for one in found} == {"nats"}


@pytest.mark.parametrize(
    ("rtt_s", "level"), [(RTT_S_MAX, Level.OK), (RTT_S_MAX + 0.001, Level.WARN)]
)
def test_server_far_away(rtt_s: float, level: Level) -> None:
    """Each of a job's steps is a trip."""
    assert _judged(a_cluster(rtt_s=rtt_s))[0].level is level


@pytest.mark.parametrize(
    ("bytes_max", "level"), [(8_000_000, Level.OK), (7_999_999, Level.WARN), (1024**2, Level.WARN)]
)
def test_payload_of_the_server(bytes_max: int, level: Level) -> None:
    """nats-server's default of 1 MiB refuses large requests."""
    found = _judged(a_cluster(server=replace(SERVER, payload_bytes_max=bytes_max)))[1]
    assert found.level is level


def _with_replicas(facts: Facts, replicas: int) -> Facts:
    facts.streams = {
        name: StreamFact({**one.config, "num_replicas": replicas}, 0, 0)
        for name, one in facts.streams.items()
    }
    return facts


@pytest.mark.parametrize(
    ("replicas", "sync_s", "level", "told"),
    [
        (1, None, Level.WARN, "not known how often the server flushes to disk; by default every 2"),
        (3, None, Level.WARN, "not known how often"),
        (1, 0.0, Level.OK, "flushed at each write (x): a power cut loses no accepted job"),
        (1, 1.0, Level.WARN, "one copy, flushed every 1.0 s (x): a power cut loses up to 1.0 s of"),
        (1, 120.0, Level.WARN, "a power cut loses up to 2 min of accepted jobs and results; a kil"),
        (3, 1.0, Level.OK, "3 copies, flushed every 1.0 s (x): losing one server loses nothing; a"),
        (3, 0.0, Level.OK, "3 copies, flushed at each write (x): losing one server loses nothing"),
        (3, 120.0, Level.WARN, "3 copies, flushed every 2 min (x): a power cut of all at once los"),
    ],
)
def test_durability(replicas: int, sync_s: float | None, level: Level, told: str) -> None:
    """Case 32: what a power cut may lose is said in seconds, from copies and flushing."""
    facts = _with_replicas(a_cluster(durability=Durability(sync_s, "x")), replicas)
    (found,) = _judged(facts, about="durability")
    assert found.level is level
    assert told in found.found


@pytest.mark.parametrize(
    ("share", "level", "told"),
    [
        (SCARCE_RATIO - 0.01, Level.OK, "there is room for more in each lane"),
        (SCARCE_RATIO, Level.WARN, "soon no job of lane acme can end"),
        (FULL_RATIO - 0.01, Level.WARN, "soon no job of lane acme can end"),
        (FULL_RATIO, Level.FAIL, "lane acme takes no jobs until it has room"),
    ],
)
def test_room_for_results(share: float, level: Level, told: str) -> None:
    """A full stream ends no job: said before, and said when it is so."""
    facts = a_cluster()
    stream = facts.streams["RESULTS_acme"]
    stored = math.ceil(share * int(stream.config["max_bytes"]))
    facts.streams["RESULTS_acme"] = StreamFact(stream.config, 1000, stored)
    (found,) = _judged(facts, about="results")
    assert found.level is level
    assert told in found.found


def test_watchdogs_are_told_with_what_to_do() -> None:
    """What is wrong, or was within the last minute."""
    well, bad = WatchView(name="link", alarms=2), WatchView(name="store", trouble="slow", alarms=1)
    (found,) = _judged(a_cluster(status=a_status_view(watches=(well,))), about="watchdogs")
    assert found.found == "1 watch, nothing is wrong now; 2 alarms since the broker's start"
    (found,) = _judged(a_cluster(status=a_status_view(watches=(well, bad))), about="watchdogs")
    assert (found.level, found.found) == (Level.WARN, "store: slow")


def test_a_workers_notice_is_told() -> None:
    """It knows what keeps it from ending jobs."""
    facts = a_cluster(workers=(a_worker_view(notice="3 acks not confirmed"),))
    assert _of(facts, "workers", Level.WARN) == ["gpu-1 says: 3 acks not confirmed"]


def test_streams_without_a_cluster() -> None:
    """A server on which no broker has run."""
    facts = a_cluster(offers=[], no_cluster="no inferlane cluster here", streams={})
    assert _of(facts, "streams", Level.FAIL) == ["no inferlane cluster here"]


def test_stream_that_is_missing() -> None:
    """It is named."""
    facts = a_cluster()
    del facts.streams["RESULTS_acme"]
    assert _of(facts, "streams", Level.FAIL) == ["RESULTS_acme is not there"]


@pytest.mark.parametrize(
    ("stream", "setting", "value", "told"),
    [
        ("JOBS_acme", "discard", "old", "JOBS_acme: discard is 'old', not 'new'"),
        ("JOBS_acme", "retention", "limits", "JOBS_acme: retention is 'limits', not 'workqueue'"),
        ("JOBS_acme", "subjects", ["jobs.>"], "JOBS_acme: subjects is ['jobs.>'], not ['jobs.acm"),
        ("BATCH_acme", "allow_direct", False, "BATCH_acme: allow_direct is False, not True"),
        ("RESULTS_acme", "max_msgs_per_subject", -1, "RESULTS_acme: max_msgs_per_subject is -1, n"),
        ("RESULTS_acme", "discard_new_per_subject", False, "RESULTS_acme: discard_new_per_subject"),
    ],
)
def test_stream_that_is_set_otherwise(stream: str, setting: str, value: object, told: str) -> None:
    """What no cluster may have different is found without a configuration."""
    facts = a_cluster()
    config = {**facts.streams[stream].config, setting: value}
    facts.streams[stream] = StreamFact(config, 0, 0)
    (found,) = _of(facts, "streams", Level.FAIL)
    assert found.startswith(told)


def test_setting_that_an_old_server_does_not_know() -> None:
    """It is left out of the server's answer, which is how it is noticed."""
    facts = a_cluster()
    config = dict(facts.streams["JOBS_acme"].config)
    del config["allow_atomic"]
    facts.streams["JOBS_acme"] = StreamFact(config, 0, 0)
    assert _of(facts, "streams", Level.FAIL) == ["JOBS_acme: allow_atomic is False, not True"]


def a_config(**fields: Any) -> Config:
    """The configuration of lane `acme`."""
    return _with_streams(default_config(lanes=["acme"], models=["tiny"]), **fields)


def _with_streams(config: Config, **fields: Any) -> Config:
    """Change [streams]."""
    streams = msgspec.structs.replace(config.streams, **fields)
    return msgspec.structs.replace(config, streams=streams)


def test_sizes_are_compared_with_the_configuration() -> None:
    """Without one, they are the operator's own; with one, they have to be its."""
    streams = a_cluster(config=a_config()).streams
    other = a_config(lane_bytes_max=2 * GIB)
    assert _of(a_cluster(streams=streams), "streams", Level.FAIL) == []
    assert _of(a_cluster(config=other, streams=streams), "streams", Level.FAIL) == [
        "JOBS_acme: max_bytes is 1073741824, not 2147483648"
    ]


def test_ceiling_above_the_configured_one() -> None:
    """It is never lowered, so it is no difference; one below is."""
    streams = a_cluster(config=a_config()).streams
    lower, higher = a_config(jobs_per_subject_max=100), a_config(jobs_per_subject_max=30_000)
    assert _of(a_cluster(config=lower, streams=streams), "streams", Level.FAIL) == []
    assert _of(a_cluster(config=higher, streams=streams), "streams", Level.FAIL) == [
        "JOBS_acme: max_msgs_per_subject is 20000, not 30000"
    ]


def test_disk_that_a_million_lines_need() -> None:
    """From the size given, or from the lines that are queued."""
    facts = a_cluster()
    assert "take about 3.5 GiB (2.0 KiB each; --line-bytes" in _judged(facts, about="disk")[1].found
    config = facts.streams["BATCH_acme"].config
    facts.streams["BATCH_acme"] = StreamFact(config, 100, 100 * 9000)
    told = _judged(facts, about="disk")[1].found
    assert "take about 9.8 GiB (8.8 KiB each, as those queued now)" in told


def test_batch_stream_too_small_for_a_million() -> None:
    """How many it holds is told: a full one makes producers wait."""
    facts = a_cluster(config=a_config(batch_bytes_max=GIB))
    (found,) = _of(facts, "disk", Level.WARN)
    assert found == "a lane's batch stream holds about 477,219 such lines"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"disk_free_bytes": 5 * GIB}, "may grow by 29.2 GiB, and the disk has 5.0 GiB"),
        (
            {"durability": Durability(0.0, "x", storage_bytes_max=10 * GIB)},
            "may grow to 9.2 GiB, and the server allows 10.0 GiB",
        ),
    ],
)
def test_disk_that_may_fill(fields: dict[str, Any], told: str) -> None:
    """Before it does."""
    (found,) = _of(a_cluster(**fields), "disk", Level.WARN)
    assert told in found


def test_disk_on_another_machine() -> None:
    """Free space can't be seen from here, and that is said."""
    (first, *_) = _judged(a_cluster(disk_free_bytes=None), about="disk")
    assert first.level is Level.OK
    assert "free space not known" in first.found


def test_no_leader() -> None:
    """The reason stands there; workers are not judged on nobody's word."""
    facts = a_cluster(status=None, no_leader="no broker leads: start one", workers=())
    assert _of(facts, "broker", Level.FAIL) == ["no broker leads: start one"]
    assert _judged(facts, about="workers") == []


def test_a_key_whose_broker_is_silent() -> None:
    """A server that was full frees no key: to start a broker, as of old, would help nobody."""
    facts = a_cluster(status=None, no_leader="no broker leads: start one", key_of="b1", workers=())
    (found,) = _judged(facts, about="broker")
    assert found.found == "the leader's key of broker b1 stands, and it does not answer"
    assert "make room and start it anew" in found.to_do


@pytest.mark.parametrize(
    ("page", "level", "told"),
    [
        ("nothing", Level.OK, "127.0.0.1:9470 is free for a broker's status page here"),
        ("leader, ready", Level.OK, "status page at http://127.0.0.1:9470: leader, ready"),
        ("something else", Level.FAIL, "127.0.0.1:9470 is taken by something that is no broker"),
    ],
)
def test_port_of_the_page(page: str, level: Level, told: str) -> None:
    """Free, a broker's, or taken."""
    (found,) = _judged(a_cluster(config=a_config(), page=page), about="ports")
    assert (found.level, found.found) == (level, told)


@pytest.mark.parametrize(("workers", "warned"), [(256, False), (257, True)])
def test_caches_larger_than_the_prefix_index(workers: int, *, warned: bool) -> None:
    """The broker knows of 4,000,000 blocks of 64 tokens; the finding says what to set."""
    views = tuple(a_worker_view(worker=f"w{n}", kv_tokens_max=1_000_000) for n in range(workers))
    ahead_s = {one.worker: 0.0 for one in views}
    facts = a_cluster(workers=views, workers_ahead_s=ahead_s, config=a_config())
    found = [one for one in _judged(facts, about="workers") if "prefix index" in one.found]
    assert bool(found) is warned
    if warned:
        assert "4,015,625 blocks" in found[0].found
        assert "index_entries_max to 4015625" in found[0].to_do


def test_no_workers() -> None:
    """Nothing will run."""
    assert _of(a_cluster(workers=(), workers_ahead_s={}), "workers", Level.FAIL) == ["none"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"phase": "suspect", "signal_age_s": 5.0}, "b is suspect, last heard 5.0 s ago"),
        ({"signal_age_s": SIGNAL_S_MAX + 0.1}, "b is live, last heard 3.1 s ago"),
        ({"ready": False}, "b is alive and not ready"),
        ({"breaker": "half_open"}, "b fails its jobs: half-open breaker"),
    ],
)
def test_worker_in_trouble(fields: dict[str, Any], told: str) -> None:
    """It is named; the others serve on."""
    workers = (a_worker_view(), a_worker_view(worker="b", **fields))
    facts = a_cluster(workers=workers, workers_ahead_s={"gpu-1": 0.0, "b": 0.0})
    (found,) = _of(facts, "workers", Level.WARN)
    assert found.startswith(told)
    assert _of(facts, "workers", Level.FAIL) == []


def test_model_that_nobody_serves() -> None:
    """Its jobs would wait for ever."""
    offer = LaneOffer(lane="acme", models=("tiny", "big", "huge"))
    facts = a_cluster(offers=[offer])
    assert _of(facts, "workers", Level.FAIL) == [
        "no ready worker serves big, huge of lane acme: jobs wait"
    ]


def test_worker_that_is_not_heard_here() -> None:
    """The broker hears it: the permissions of this connection are narrower."""
    (found,) = _of(a_cluster(workers_ahead_s={}), "workers", Level.WARN)
    assert found.startswith("no heartbeat of gpu-1 was heard here")


@pytest.mark.parametrize(
    ("ahead_s", "level"),
    [
        (CLOCK_S_WARN, Level.OK),
        (-CLOCK_S_WARN - 0.1, Level.WARN),
        (CLOCK_S_MAX, Level.WARN),
        (-CLOCK_S_MAX - 0.1, Level.FAIL),
    ],
)
@pytest.mark.parametrize("who", ["server_ahead_s", "broker_ahead_s", "workers_ahead_s"])
def test_clock_that_is_off(who: str, ahead_s: float, level: Level) -> None:
    """Whose, and in which direction."""
    value = {"gpu-1": ahead_s} if who == "workers_ahead_s" else ahead_s
    (found,) = _judged(a_cluster(**{who: value}), about="clocks")
    assert found.level is level
    if level is not Level.OK:
        assert ("ahead of" if ahead_s > 0 else "behind") in found.found


def test_dead_letters() -> None:
    """Somebody should look at them."""
    facts = a_cluster()
    config = facts.streams["DLQ_acme"].config
    facts.streams["DLQ_acme"] = StreamFact(config, 1200, 5)
    (found,) = _judged(facts, about="dlq")
    assert (found.level, found.to_do) == (Level.WARN, "inferlane dlq list acme")
    assert found.found.startswith("1,200 in lane acme")


FINDINGS = [ok("nats", "fine"), warn("dlq", "three\x1b", "look"), fail("disk", "full", "make room")]


def test_printed_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """A line each, what to do below it, counts at the end."""
    tell(FINDINGS, as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "ok    nats        fine",
        "warn  dlq         three�",
        "                  → look",
        "FAIL  disk        full",
        "                  → make room",
        "",
        "1 ok, 1 warn, 1 FAIL",
    ]


def test_printed_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    """The same as JSON."""
    tell(FINDINGS, as_json=True)
    assert orjson.loads(capsys.readouterr().out)[2] == {
        "level": "FAIL",
        "about": "disk",
        "found": "full",
        "to_do": "make room",
    }


@pytest.mark.parametrize(
    ("findings", "code"),
    [
        ([ok("a", "")], ExitCode.OK),
        ([ok("a", ""), warn("a", "", "")], ExitCode.OK),
        ([warn("a", "", ""), fail("a", "", "")], ExitCode.FAILED),
        ([Finding(Level.FAIL, "nats", "", unreachable=True)], ExitCode.UNREACHABLE),
    ],
)
def test_code(findings: list[Finding], code: ExitCode) -> None:
    """A warning is no failure."""
    assert exit_code(findings) == code


def a_fresh_server(**fields: Any) -> Facts:
    """A server where no broker has run."""
    return a_cluster(
        **{
            "offers": [],
            "no_cluster": "no inferlane cluster on this NATS server: no broker has run here yet",
            "no_leader": "no broker leads: start one with `inferlane broker --config FILE`",
            "status": None,
            "workers": (),
            "streams": {},
            **fields,
        }
    )


def test_a_fresh_server_is_told_what_a_first_start_needs() -> None:
    """It said "0 bytes of 0 bytes allowed", and that there is room in each of no lanes."""
    (found,) = _judged(a_fresh_server(disk_free_bytes=None), about="disk")
    assert found.level is Level.OK
    assert (
        "a broker's first start sets 9.5 GiB aside for each lane, as [streams] ships (--config FILE"
        " has your own), and up to 19.8 GiB more for files where there is room" in found.found
    )
    assert "--monitor" in found.found
    about = {one.about for one in _judged(a_fresh_server())}
    assert not about & {"results", "files", "batches", "dlq", "workers", "watchdogs"}
    assert not any(" 0 bytes" in one.found for one in _judged(a_fresh_server()))


def test_a_first_start_that_has_no_room() -> None:
    """Before the broker is refused: which disk, how much is needed, what to lower."""
    config = a_config()
    (small,) = _judged(
        a_fresh_server(
            disk_free_bytes=GIB, durability=replace(ALWAYS, store_dir=Path("/data")), config=config
        ),
        about="disk",
    )
    assert small.level is Level.WARN
    assert "for 1 lane, and up to" in small.found
    assert small.found.endswith("and the disk has 1.0 GiB free")
    assert small.to_do.startswith("make room in /data, or lower the bounds of [streams]")
    (strict,) = _judged(
        a_fresh_server(durability=replace(ALWAYS, storage_bytes_max=GIB)), about="disk"
    )
    assert "and the server allows 1.0 GiB" in strict.found
    assert strict.to_do.startswith("raise `max_file` of the server")
    (enough,) = _judged(a_fresh_server(disk_free_bytes=100 * GIB), about="disk")
    assert (enough.level, enough.to_do) == (Level.OK, "")
    assert "100.0 GiB are free" in enough.found
