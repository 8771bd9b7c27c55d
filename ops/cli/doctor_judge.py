"""What `doctor` makes of the facts: pure, a finding for each."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

from broker.bus.nats_streams import stream_config
from broker.service.file_marks import mark_of
from broker.wire import subjects
from broker.wire.codec import MESSAGE_BYTES_MAX
from broker.wire.file_mark import differences
from broker.wire.prefix import BLOCK_BYTES
from broker.wire.prompt import BYTES_PER_TOKEN
from ops.cli.doctor_batches import batches, files, is_smaller, smaller_files
from ops.cli.doctor_facts import Facts, wanted_streams
from ops.cli.doctor_findings import Finding, fail, ok, warn
from ops.cli.doctor_first import first_start
from ops.cli.doctor_room import RoomRule, judge_room
from ops.cli.output import duration, size

RTT_S_MAX = 0.05
"""Beyond it each of a job's steps waits: a server in another region."""

CLOCK_S_WARN = 1.0
CLOCK_S_MAX = 30.0
"""Deadlines and waits are counted on these clocks."""

SIGNAL_S_MAX = 3.0
"""A worker silent for longer gets nothing new (policy.leases.lease_s)."""

LOST_TOLD_MAX = 5
"""Of lost workers, told one by one."""

DISK_RATIO_MAX = 0.9

SCARCE_RATIO, FULL_RATIO = 0.85, 0.95
"""Of a stream of results: a lane is refused new jobs beyond the second (`results_room`)."""

TO_DO = {
    "link": "look at the network between broker and server, and at the server's log",
    "deliveries": "asked for anew by itself; if it comes again, look at the server's log",
    "loop": "the broker's log says what held it (loop.stalled); is its machine overloaded?",
    "store": "look at the disk of the server's store, and at who else writes there",
    "results": "make room as said under results; lanes with room go on",
    "accounts": "the broker's log says which and why; whoever deletes results must look first",
    "file": "correct the broker's file and send it SIGHUP; as it is, SIGHUP lets them go",
    "log": "make room on the disk of broker.state_dir; no job depends on it",
}
"""By watchdog, `ops/docs/watchdogs.md`."""

BOUNDS = {
    "JOBS_": "lane_bytes_max",
    "BATCH_": "batch_bytes_max",
    "RESULTS_": "results_bytes_max",
    "DLQ_": "dead_letters_bytes_max",
    "FILES_": "files_bytes_max",
}
"""What bounds a lane's streams, by the beginning of their names."""

KEYS_MAX = 10
"""Of those in which two files differ, named in a line."""

MILLION = 1_000_000

INDEX_ENTRY_BYTES = 86
"""Of the prefix index, a block that one worker holds (measured: tests/bench/decision_bench.py)."""

JOB_BYTES_EXTRA = 250
"""What a stored job has around its request (measured: 230 bytes, and 3 % for prefix blocks)."""

RESULT_BYTES = 1_500
"""A stored result: 370 bytes around an answer of some 250 tokens."""

SIZES = frozenset(
    {"max_bytes", "max_age", "max_msgs_per_subject", "num_replicas", "duplicate_window"}
)
"""Settings that a configuration may choose; the others no cluster may have different. (A bound of
one message, as results have, is no choice either.)"""


def judge(facts: Facts, *, line_bytes: int) -> Iterator[Finding]:
    """Judge everything."""
    yield from _server(facts)
    if not facts.server.jetstream:
        return
    yield from _durability(facts)
    yield from _streams(facts)
    yield from _room(facts, line_bytes=line_bytes)
    yield from _results(facts)
    yield from files(facts)
    yield from smaller_files(facts)
    yield from batches(facts)
    yield from _broker(facts)
    yield from _file(facts)
    yield from _watchdogs(facts)
    yield from _workers(facts)
    yield from _index(facts)
    yield from _clocks(facts)
    yield from _dead_letters(facts)


def _server(facts: Facts) -> Iterator[Finding]:
    server = facts.server
    where = f"nats-server {server.version}" + (f" of {server.cluster}" if server.cluster else "")
    if facts.rtt_s > RTT_S_MAX:
        found = f"{where}, {duration(facts.rtt_s)} away"
        yield warn("nats", found, "put broker and workers near the server: each step is a trip")
    else:
        yield ok("nats", f"{where}, {duration(facts.rtt_s)} away")
    if not server.jetstream:
        to_do = "start it with a `jetstream { store_dir: ... }` block, as in ops/nats/single.conf"
        yield fail("nats", "JetStream is off: no job can be stored", to_do)
    if server.payload_bytes_max < MESSAGE_BYTES_MAX:
        found = f"max_payload is {size(server.payload_bytes_max)}: larger requests are refused"
        yield warn("nats", found, "set `max_payload: 8MB` in the server's configuration")
    else:
        yield ok("nats", f"max_payload is {size(server.payload_bytes_max)}")


def _durability(facts: Facts) -> Iterator[Finding]:
    known, replicas = facts.durability, _replicas(facts)
    if known.sync_s is None:
        found = (
            "not known how often the server flushes to disk; by default every 2 min, and a power"
            " cut then loses up to 2 min of accepted jobs and results"
        )
        to_do = "say --monitor http://HOST:8222 or --nats-config FILE, to have this judged"
        yield warn("durability", found, to_do)
    elif replicas == 1 and known.sync_s == 0:
        found = f"flushed at each write ({known.source}): a power cut loses no accepted job"
        yield ok("durability", found)
    elif replicas == 1:
        found = (
            f"one copy, flushed {known.told} ({known.source}): a power cut loses up to"
            f" {duration(known.sync_s)} of accepted jobs and results; a killed server loses none"
        )
        to_do = (
            "set `sync_interval: always` in the server's jetstream block (good for some 1,600"
            " jobs/s), or run three servers with replicas = 3 and `1s`"
        )
        yield warn("durability", found, to_do)
    elif known.sync_s <= 1:
        found = (
            f"{replicas} copies, flushed {known.told} ({known.source}): losing one server loses"
            f" nothing; a power cut of all at once loses up to {duration(known.sync_s)}"
        )
        yield ok("durability", found)
    else:
        found = (
            f"{replicas} copies, flushed {known.told} ({known.source}): a power cut of all at once"
            f" loses up to {duration(known.sync_s)} of accepted jobs and results"
        )
        yield warn("durability", found, "set `sync_interval: 1s` in each jetstream block")


def _replicas(facts: Facts) -> int:
    counts = [int(one.config.get("num_replicas", 1)) for one in facts.streams.values()]
    return min(counts, default=1 if facts.config is None else facts.config.nats.replicas)


def _streams(facts: Facts) -> Iterator[Finding]:
    if not facts.offers:
        found = facts.no_cluster or "no lanes: no broker has run here yet"
        to_do = "start a broker once: it makes the streams of its lanes"
        yield fail("streams", found, to_do)
        return
    wrong = 0
    for spec in wanted_streams(facts):
        stream = facts.streams.get(spec.name)
        if stream is None:
            wrong += 1
            to_do = "send the leading broker SIGHUP, or start it again: it makes what is missing"
            yield fail("streams", f"{spec.name} is not there", to_do)
            continue
        wanted = stream_config(spec)
        if is_smaller(spec, stream):
            del wanted["max_bytes"]  # It may be: `smaller_files` tells.
        found = _differences(wanted, stream.config, sizes=facts.config is not None)
        if found:
            wrong += 1
            to_do = (
                "if the file is right, send the leading broker SIGHUP, or start all again: whoever"
                " leads brings streams up to date; an old server refuses"
            )
            yield fail("streams", f"{spec.name}: {found}", to_do)
    if not wrong:
        how = "as configured" if facts.config else "as they must be (sizes: give --config)"
        lanes = f"{len(facts.offers)} lane{'' if len(facts.offers) == 1 else 's'}"
        yield ok("streams", f"{len(facts.streams)} streams of {lanes}, set {how}")


def _differences(wanted: Mapping[str, object], present: Mapping[str, Any], *, sizes: bool) -> str:
    found: list[str] = []
    for name, value in wanted.items():
        if name in SIZES and not sizes and value != 1:
            continue
        # The server leaves out what is false or zero.
        given = present.get(name, type(value)())
        if name == "max_msgs_per_subject" and given > value:
            continue  # Never lowered: the server would delete the oldest.
        if name == "subjects" and sorted(given) == sorted(cast("list[str]", value)):
            continue  # Order means nothing.
        if given != value:
            found.append(f"{name} is {given!r}, not {value!r}")
    return "; ".join(found)


def _room(facts: Facts, *, line_bytes: int) -> Iterator[Finding]:
    if not facts.streams:
        yield first_start(facts)
        return
    yield from _disk(facts)
    batch = _of_kind(facts, "BATCH_")
    stored = sum(facts.streams[name].messages for name in batch)
    if stored:
        job_bytes = sum(facts.streams[name].stored_bytes for name in batch) / stored
        whence = f"{size(job_bytes)} each, as those queued now"
    else:
        job_bytes = line_bytes + JOB_BYTES_EXTRA
        whence = f"{size(line_bytes)} each; --line-bytes for others"
    needed = MILLION * (job_bytes + RESULT_BYTES)
    yield ok("disk", f"a million batch lines take about {size(needed)} ({whence})")
    bounds = [int(facts.streams[name].config.get("max_bytes", -1)) for name in batch]
    smallest = min((bound for bound in bounds if bound > 0), default=0)
    if smallest and smallest < MILLION * job_bytes:
        found = f"a lane's batch stream holds about {smallest / job_bytes:,.0f} such lines"
        to_do = "raise streams.batch_bytes_max for more; a full stream makes producers wait"
        yield warn("disk", found, to_do)


def _disk(facts: Facts) -> Iterator[Finding]:
    used = sum(one.stored_bytes for one in facts.streams.values())
    reserved = sum(max(0, int(one.config.get("max_bytes", 0))) for one in facts.streams.values())
    free = facts.disk_free_bytes
    limit = facts.durability.storage_bytes_max
    # Files take what the others leave, and give it back (`topology.apply`).
    pliant = sum(
        max(0, int(facts.streams[name].config.get("max_bytes", 0)))
        for name in _of_kind(facts, "FILES_")
    )
    firm = reserved - pliant
    if limit is not None and firm > limit * DISK_RATIO_MAX:
        found = f"the streams may grow to {size(firm)}, and the server allows {size(limit)}"
        to_do = (
            "it sets all of it aside, and refuses what is beyond: raise `max_file` of the server, "
            f"or lower the bounds of [streams] ({_set_aside(facts)})"
        )
        yield warn("disk", found, to_do)
    if free is None:
        found = f"the streams hold {size(used)} of {size(reserved)} allowed"
        yield ok("disk", f"{found}; free space not known (--monitor, on the server's host)")
    elif free < reserved - used:
        found = f"the streams may grow by {size(reserved - used)}, and the disk has {size(free)}"
        to_do = f"make room, or lower the bounds of [streams] ({_set_aside(facts)})"
        yield warn("disk", found, to_do)
    else:
        yield ok("disk", f"the streams hold {size(used)} of {size(reserved)}; {size(free)} free")


def _set_aside(facts: Facts) -> str:
    """What the streams of each kind may hold together, the most first, by their settings."""
    sums = {
        setting: sum(max(0, int(facts.streams[n].config.get("max_bytes", 0))) for n in names)
        for prefix, setting in BOUNDS.items()
        if (names := _of_kind(facts, prefix))
    }
    ordered = sorted(sums.items(), key=lambda one: -one[1])
    return ", ".join(f"{setting}: {size(count)} in all" for setting, count in ordered)


def _of_kind(facts: Facts, prefix: str) -> list[str]:
    return [name for name in facts.streams if name.startswith(prefix)]


def _broker(facts: Facts) -> Iterator[Finding]:
    status = facts.status
    if status is None and facts.key_of:
        found = f"the leader's key of broker {facts.key_of} stands, and it does not answer"
        to_do = (
            "if that broker is gone, the key is freed within seconds; if not, nats-server stores"
            " nothing (its log says why; after `no space left`: make room and start it anew)"
        )
        yield fail("broker", found, to_do)
    elif status is None:
        yield fail("broker", facts.no_leader or "no broker answers", "")
    else:
        found = (
            f"epoch {status.epoch} leads; {status.inflight_jobs:,} jobs run,"
            f" {status.held_jobs:,} held ({size(status.held_bytes)})"
        )
        yield ok("broker", found)
    if facts.config is None or not facts.page:
        return
    address = f"{facts.config.broker.http_host}:{facts.config.broker.http_port}"
    if facts.page == "something else":
        to_do = "set broker.http_port to a free port (0 takes any)"
        yield fail("ports", f"{address} is taken by something that is no broker", to_do)
    elif facts.page == "nothing":
        yield ok("ports", f"{address} is free for a broker's status page here")
    else:
        yield ok("ports", f"status page at http://{address}: {facts.page}")


def _file(facts: Facts) -> Iterator[Finding]:
    """Compare the file at hand with what the leading broker runs with."""
    if facts.config is None or facts.file_mark is None:
        return
    keys = differences(mark_of(facts.config), facts.file_mark)
    if keys:
        more = f" and {len(keys) - KEYS_MAX:,} more" if len(keys) > KEYS_MAX else ""
        found = f"not what the leading broker runs with: {', '.join(keys[:KEYS_MAX])}{more}"
        to_do = "if it is the right one, give it to all brokers, and send each SIGHUP"
        yield warn("file", found, to_do)
    else:
        yield ok("file", "the leading broker runs with the same")


def _results(facts: Facts) -> Iterator[Finding]:
    """Judge whether jobs can end: each leaves a record, and a full stream takes none."""
    rule = RoomRule(
        kind=subjects.results_stream(""),
        about="results",
        scarce_ratio=SCARCE_RATIO,
        full_ratio=FULL_RATIO,
        soon="soon no job of lane {lane} can end",
        now="lane {lane} takes no jobs until it has room",
        to_do=(
            "raise results_bytes_max or lower results_age_s_max ([streams], [[retention]]), or"
            " delete what was read: inferlane erase --lane {lane} --only results --older 1d"
        ),
    )
    yield from judge_room(facts, rule)


def _watchdogs(facts: Facts) -> Iterator[Finding]:
    watches = facts.status.watches if facts.status is not None else ()
    for watch in watches:
        if watch.trouble:
            yield warn("watchdogs", f"{watch.name}: {watch.trouble}", TO_DO[watch.name])
    if watches and not any(watch.trouble for watch in watches):
        alarms = sum(watch.alarms for watch in watches)
        raised = f"{alarms:,} alarm{'' if alarms == 1 else 's'} since the broker's start"
        yield ok("watchdogs", f"{len(watches)} watch, nothing is wrong now; {raised}")


def _workers(facts: Facts) -> Iterator[Finding]:
    if facts.status is None:
        return
    yield from _lost(facts)
    ready = {one.worker for one in facts.workers if one.phase == "live" and one.ready}
    if not facts.workers:
        yield fail("workers", "none", "start `inferlane worker` beside each engine")
        return
    for one in sorted(facts.workers, key=lambda worker: worker.worker):
        if one.phase != "live" or one.signal_age_s > SIGNAL_S_MAX:
            found = f"{one.worker} is {one.phase}, last heard {duration(one.signal_age_s)} ago"
            yield warn("workers", found, f"look at the agent's log on the host of {one.worker}")
        elif not one.ready:
            found = f"{one.worker} is alive and not ready: its engine loads, or does not answer"
            yield warn("workers", found, f"look at the engine of {one.worker}")
        elif one.notice:
            to_do = f"look at the agent's log on the host of {one.worker}"
            yield warn("workers", f"{one.worker} says: {one.notice}", to_do)
        elif one.breaker != "closed":
            found = f"{one.worker} fails its jobs: {one.breaker.replace('_', '-')} breaker"
            yield warn("workers", found, f"look at the engine of {one.worker}, and its agent's log")
    yield ok("workers", f"{len(ready)} of {len(facts.workers)} ready")
    served = {model for one in facts.workers if one.worker in ready for model in one.models}
    for offer in facts.offers:
        missing = sorted(set(offer.models) - served)
        if missing:
            found = f"no ready worker serves {', '.join(missing)} of lane {offer.lane}: jobs wait"
            yield fail("workers", found, "start a worker for it, or take it from the lane's models")


def _lost(facts: Facts) -> Iterator[Finding]:
    lost = [one for one in facts.gone if one.how == "lost" and not one.back]
    for one in lost[:LOST_TOLD_MAX]:
        put_back = f"{one.requeued_jobs} of its {one.jobs} jobs were put back"
        found = f"{one.worker} was lost {duration(one.ago_s)} ago ({one.cause}); {put_back}"
        yield warn("workers", found, "look at its host, and at the agent's log there")
    if len(lost) > LOST_TOLD_MAX:
        found = f"{len(lost) - LOST_TOLD_MAX} more were lost and are not back"
        yield warn("workers", found, "see `inferlane workers`")


def _index(facts: Facts) -> Iterator[Finding]:
    """Judge whether the broker can know of all that the workers' caches hold."""
    if facts.config is None:
        return
    kv_tokens = sum(one.kv_tokens_max for one in facts.workers)
    blocks = math.ceil(kv_tokens * BYTES_PER_TOKEN / BLOCK_BYTES)
    entries_max = facts.config.policy.routing.index_entries_max
    if blocks <= entries_max:
        return
    found = (
        f"the workers' caches hold {blocks:,} blocks, the broker's prefix index {entries_max:,}:"
        " much of what is cached is not known, and computed again"
    )
    more_bytes = (blocks - entries_max) * INDEX_ENTRY_BYTES
    to_do = (
        f"set policy.routing.index_entries_max to {blocks}"
        f" ({size(more_bytes)} more memory of the broker)"
    )
    yield warn("workers", found, to_do)


def _clocks(facts: Facts) -> Iterator[Finding]:
    clocks = {f"worker {name}": ahead_s for name, ahead_s in sorted(facts.workers_ahead_s.items())}
    if facts.server_ahead_s is not None:
        clocks["the NATS server"] = facts.server_ahead_s
    if facts.broker_ahead_s is not None:
        clocks["the broker"] = facts.broker_ahead_s
    worst = 0.0
    for who, ahead_s in clocks.items():
        off_s = abs(ahead_s)
        worst = max(worst, off_s)
        found = f"{who} is {duration(off_s)} {'ahead of' if ahead_s > 0 else 'behind'} this clock"
        to_do = "run NTP (chrony) there and here: deadlines and waits are counted on these clocks"
        if off_s > CLOCK_S_MAX:
            yield fail("clocks", found, to_do)
        elif off_s > CLOCK_S_WARN:
            yield warn("clocks", found, to_do)
    if clocks and worst <= CLOCK_S_WARN:
        yield ok("clocks", f"{len(clocks)} compared with this one, {duration(worst)} off at most")
    for one in facts.workers:
        if one.phase == "live" and one.worker not in facts.workers_ahead_s:
            found = f"no heartbeat of {one.worker} was heard here, though the broker hears it"
            to_do = "listen longer (--listen-s 10), or look at the permissions of this connection"
            yield warn("workers", found, to_do)


def _dead_letters(facts: Facts) -> Iterator[Finding]:
    waiting = {
        offer.lane: facts.streams[name].messages
        for offer in facts.offers
        if (name := subjects.dead_letters_stream(offer.lane)) in facts.streams
    }
    for lane, count in waiting.items():
        if count:
            found = f"{count:,} in lane {lane}: jobs given up, waiting for somebody"
            yield warn("dlq", found, f"inferlane dlq list {lane}")
    if waiting and not any(waiting.values()):
        yield ok("dlq", "no dead letters")
