"""Faults carried out on a stage: each is done, waited for, undone, and told as a `Strike`."""

import asyncio
import os
import random
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from broker.bus.base import BusError, StreamSpec
from broker.service.config import load
from broker.service.queues import topology_of
from broker.wire import subjects
from broker.wire.ids import BATCH_BAND
from ops.chaos import nodes
from ops.chaos.checker import Strike
from ops.chaos.engine import Mode
from ops.chaos.history import Died, read_one
from ops.chaos.plan import DIES_THERE, Fault, Kind
from ops.chaos.setting import CHAT_BANDS, LEADER_TTL_S, OFFLINE_LANE, ONLINE_LANE
from ops.chaos.spy import Place
from ops.chaos.stage import Stage, place_of
from ops.cluster import ClusterError
from ops.nats.server import NatsServer

AIM_S_MAX = 5.0
"""How long a process may take to reach the place where it is to die; then it is killed outright."""

STANDS_ON_S = 0.3
"""How long after its beginning a fault is surely under way."""

LOOK_S = 0.01

ENDS_S_MAX = 30.0
"""Longest wait for a process that was asked to end: a worker first ends what it runs."""

DELAY_S = 0.15
"""Each way, on a delayed link."""

FULL_BYTES = 1024
"""Bound of a stream that is to be full: below what it holds."""

GARBAGE_BYTES_MAX = 2000

HIT_S_MAX = 60.0
"""How long a command of the cluster's owner may take."""

HIT_TEXT_CHARS_MAX = 500
"""Of what it said when it failed."""

STREAMS = (
    f"KV_{subjects.LEADER_BUCKET}",
    subjects.jobs_stream(ONLINE_LANE, CHAT_BANDS[0]),
    subjects.results_stream(ONLINE_LANE),
    subjects.jobs_stream(OFFLINE_LANE, BATCH_BAND),
    subjects.results_stream(OFFLINE_LANE),
)
"""Those whose leading server may be killed: the leader's key, jobs and records."""


_Choice = TypeVar("_Choice")


async def strike(stage: Stage, fault: Fault) -> Strike:
    """Carry a fault out, and return when it is over."""
    deed = DEEDS[fault.kind]
    if not fault.place or fault.kind in DIES_THERE:
        return await deed(stage, fault)
    name = await _victim(stage, fault, fault.part)
    stage.doom(name, _place(fault, dies=False))
    try:
        step = fault.step if await _stands(stage, name) else ""
        async with asyncio.TaskGroup() as group:
            doing = group.create_task(deed(stage, fault))
            await asyncio.wait([doing], timeout=STANDS_ON_S)
            stage.spare(name)
    finally:
        stage.spare(name)
    return replace(doing.result(), step=step)


def _place(fault: Fault, *, dies: bool) -> Place:
    operation, when, prefix = fault.place.split(":", 2)
    return Place(operation, when, prefix, fault.step, dies)


async def _stands(stage: Stage, name: str) -> bool:
    """Wait until a process stands at its place; False when it doesn't get there."""
    try:
        async with asyncio.timeout(AIM_S_MAX):
            while not stage.stands(name):  # noqa: ASYNC110 - another process has no event to give
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        return False
    return True


def _told(
    fault: Fault, member: str, at_s: float, *, step: str = "", back_at_s: float = 0.0
) -> Strike:
    return Strike(fault.number, fault.kind, member, at_s, time.time(), step, back_at_s)


def _picked(fault: Fault, choices: Sequence[_Choice]) -> _Choice:
    return choices[min(len(choices) - 1, int(fault.pick * len(choices)))]


async def _victim(stage: Stage, fault: Fault, part: str = "") -> str:
    """Find who plays this part; whom the fault hits, by the last word of its kind."""
    match part or fault.kind.value.rpartition("_")[2]:
        case "leader":
            return await stage.leader()
        case "standby":
            leader = await stage.leader()
            standbys = [name for name in stage.brokers if name != leader]
            return _picked(fault, standbys or stage.brokers)
        case "producer":
            return _picked(fault, stage.producers)
        case _:
            return _picked(fault, stage.workers)


# ---- processes ----


async def _kill(stage: Stage, fault: Fault) -> Strike:
    name = await _victim(stage, fault)
    at_s, step = time.time(), ""
    if fault.place:
        at_s, step = await _die_at_a_place(stage, fault, name)
    else:
        await stage.member(name).kill()
    await asyncio.sleep(fault.down_s)
    back_at_s = time.time()
    await stage.member(name).start()
    return _told(fault, name, at_s, step=step, back_at_s=back_at_s)


async def _die_at_a_place(stage: Stage, fault: Fault, name: str) -> tuple[float, str]:
    """Let a process kill itself at its place; return when, and the step if it got there."""
    member = stage.member(name)
    stage.doom(name, _place(fault, dies=True))
    try:
        async with asyncio.timeout(AIM_S_MAX):
            await member.ended()
    except TimeoutError:
        at_s = time.time()
        await member.kill()
        return at_s, ""
    finally:
        stage.spare(name)
    path = stage.folder / f"{name}.history.jsonl"
    deaths = [event for event in read_one(path) if isinstance(event, Died)]
    return (deaths[-1].at_s, deaths[-1].step) if deaths else (time.time(), "")


async def _term(stage: Stage, fault: Fault) -> Strike:
    name, at_s = await _victim(stage, fault), time.time()
    member = stage.member(name)
    await member.stop(timeout_s=ENDS_S_MAX)
    await asyncio.sleep(fault.down_s)
    back_at_s = time.time()
    await member.start()
    return _told(fault, name, at_s, back_at_s=back_at_s)


async def _pause(stage: Stage, fault: Fault) -> Strike:
    name, at_s = await _victim(stage, fault), time.time()
    stage.member(name).signal(signal.SIGSTOP)
    # Plans are made for a single server's leader key.
    longer_s = stage.setting.leader_ttl_s - LEADER_TTL_S[1]
    try:
        await asyncio.sleep(fault.for_s + longer_s * (fault.kind is Kind.ZOMBIE_LEADER))
    finally:
        stage.resume(name)
    return _told(fault, name, at_s)


async def _replace(stage: Stage, fault: Fault) -> Strike:
    name, at_s = await _victim(stage, fault), time.time()
    await stage.replace(name)
    return _told(fault, name, at_s)


# ---- the server ----


async def _kill_nats(stage: Stage, fault: Fault) -> Strike:
    """End one server, or all that there are, and start them again."""
    struck = await _struck(stage, fault)
    at_s = time.time()
    async with asyncio.TaskGroup() as group:
        for server in struck:
            end = server.stop if fault.kind is Kind.TERM_NATS else server.kill
            group.create_task(asyncio.to_thread(end))
    await asyncio.sleep(fault.for_s)
    await nodes.start(struck, stage.mark)
    return _told(fault, " ".join(server.options.name for server in struck), at_s)


async def _struck(stage: Stage, fault: Fault) -> list[NatsServer]:
    """Find the servers that a fault hits; where nobody leads just now, any."""
    chosen = None
    match fault.kind:
        case Kind.LOSE_NATS:
            return stage.servers
        case Kind.KILL_META_NATS:
            chosen = await nodes.leading(stage.servers)
        case Kind.KILL_STREAM_NATS:
            chosen = await nodes.leading(stage.servers, _picked(fault, STREAMS))
        case _:
            pass
    return [chosen or _picked(fault, stage.servers)]


async def _pause_nats(stage: Stage, fault: Fault) -> Strike:
    at_s, server = time.time(), _picked(fault, stage.servers)
    server.pause()
    try:
        await asyncio.sleep(fault.for_s)
    finally:
        server.resume()
    return _told(fault, server.options.name, at_s)


# ---- links ----


async def _cut(stage: Stage, fault: Fault) -> Strike:
    name, at_s = await _victim(stage, fault), time.time()
    link = stage.links[name]
    link.sever()
    try:
        await asyncio.sleep(fault.for_s)
    finally:
        link.mend()
    return _told(fault, name, at_s)


async def _delay(stage: Stage, fault: Fault) -> Strike:
    name, at_s = await _victim(stage, fault), time.time()
    link = stage.links[name]
    link.delay(DELAY_S)
    try:
        await asyncio.sleep(fault.for_s)
    finally:
        link.delay(0.0)
    return _told(fault, name, at_s)


# ---- engines ----

_MODES = {
    Kind.SLOW_ENGINE: Mode.SLOW,
    Kind.HANG_ENGINE: Mode.HANG,
    Kind.CRASH_ENGINE: Mode.CRASH,
}


async def _spoil_engine(stage: Stage, fault: Fault) -> Strike:
    name, at_s = await _victim(stage, fault), time.time()
    stage.tell_engine(name, _MODES[fault.kind].value)
    try:
        await asyncio.sleep(fault.for_s)
    finally:
        stage.tell_engine(name, Mode.FINE.value)
    return _told(fault, name, at_s)


# ---- what is sent and stored ----


async def _send_garbage(stage: Stage, fault: Fault) -> Strike:
    """Send what is no message wherever one is awaited; what is stored must end like a job."""
    at_s, rng = time.time(), random.Random(fault.pick)
    load = stage.load
    queue = subjects.jobs(load.online, rng.choice(CHAT_BANDS), load.model)
    addresses = [
        subjects.lane_control(load.online, "cancel"),
        subjects.out(load.online, rng.choice(stage.chatters), "nobody"),
    ]
    if stage.is_own:
        worker = rng.choice(stage.workers)
        addresses += [
            subjects.work(worker),
            subjects.heartbeat(worker),
            subjects.worker_note(worker),
            subjects.INVENTORY,
            subjects.queue_state(load.online),
            subjects.cluster_control("workers"),
        ]
    with suppress(BusError):
        stored = await stage.bus.append(queue, rng.randbytes(rng.randint(0, GARBAGE_BYTES_MAX)))
        stage.garbage.add(place_of(stored.stream, stored.sequence))
        for address in addresses:
            await stage.bus.publish(address, rng.randbytes(rng.randint(0, GARBAGE_BYTES_MAX)))
    return _told(fault, "", at_s)


async def _fill(stage: Stage, fault: Fault) -> Strike:
    """Bound a lane's streams below what they hold: nothing more can be stored there."""
    at_s = time.time()
    wanted = "RESULTS_" if fault.kind is Kind.FULL_RESULTS else "JOBS_"
    lane = _picked(fault, [ONLINE_LANE, OFFLINE_LANE])
    wanted = "BATCH_" if (wanted, lane) == ("JOBS_", OFFLINE_LANE) else wanted
    spec = _spec(stage, f"{wanted}{lane}")
    await _bounded(stage, replace(spec, max_bytes=FULL_BYTES))
    try:
        await asyncio.sleep(fault.for_s)
    finally:
        await _bounded(stage, spec)
    return _told(fault, "", at_s)


def _spec(stage: Stage, name: str) -> StreamSpec:
    config = load(stage.folder / f"{stage.brokers[0]}.toml")
    return next(spec for spec in topology_of(config).streams if spec.name == name)


async def _bounded(stage: Stage, spec: StreamSpec) -> None:
    with suppress(BusError):
        await stage.bus.ensure_stream(spec)


# ---- what others run ----


async def _hit(stage: Stage, fault: Fault) -> Strike:
    """Run a command of the cluster's owner. Raises ClusterError when it fails or takes too long."""
    hit, at_s = _picked(fault, stage.hits), time.time()
    process = await asyncio.create_subprocess_shell(
        hit.command, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, start_new_session=True
    )
    try:
        async with asyncio.timeout(HIT_S_MAX):
            _, said = await process.communicate()
    except TimeoutError as error:
        message = f"`{hit.command}` took more than {HIT_S_MAX:g} s"
        raise ClusterError(message) from error
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # It leads a session of its own.
            await process.communicate()
    if process.returncode:
        text = said.decode(errors="replace").strip()[-HIT_TEXT_CHARS_MAX:]
        message = f"`{hit.command}` ended with code {process.returncode}: {text}"
        raise ClusterError(message)
    return _told(fault, hit.name, at_s)


DEEDS: dict[Kind, Callable[[Stage, Fault], Coroutine[None, None, Strike]]] = {
    Kind.KILL_LEADER: _kill,
    Kind.TERM_LEADER: _term,
    Kind.PAUSE_LEADER: _pause,
    Kind.ZOMBIE_LEADER: _pause,
    Kind.KILL_STANDBY: _kill,
    Kind.KILL_WORKER: _kill,
    Kind.TERM_WORKER: _term,
    Kind.PAUSE_WORKER: _pause,
    Kind.SILENCE_WORKER: _pause,
    Kind.REPLACE_WORKER: _replace,
    Kind.KILL_NATS: _kill_nats,
    Kind.TERM_NATS: _kill_nats,
    Kind.PAUSE_NATS: _pause_nats,
    Kind.KILL_STREAM_NATS: _kill_nats,
    Kind.KILL_META_NATS: _kill_nats,
    Kind.LOSE_NATS: _kill_nats,
    Kind.KILL_PRODUCER: _kill,
    Kind.TERM_PRODUCER: _term,
    Kind.PAUSE_PRODUCER: _pause,
    Kind.CUT_LEADER: _cut,
    Kind.CUT_WORKER: _cut,
    Kind.CUT_PRODUCER: _cut,
    Kind.PART_WORKER: _cut,
    Kind.DELAY_LEADER: _delay,
    Kind.DELAY_WORKER: _delay,
    Kind.SLOW_ENGINE: _spoil_engine,
    Kind.HANG_ENGINE: _spoil_engine,
    Kind.CRASH_ENGINE: _spoil_engine,
    Kind.MALFORMED: _send_garbage,
    Kind.FULL_RESULTS: _fill,
    Kind.FULL_JOBS: _fill,
    Kind.HIT_YOURS: _hit,
}
"""How each kind is carried out."""
