"""Runs the demo: a real cluster, chats and a batch side by side in two lanes, and a report."""

import asyncio
import os
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from broker.bus.base import Bus, BusError, Message
from broker.bus.nats import connect
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, decode, decode_out
from broker.wire.control import ControlReply
from broker.wire.ids import BANDS
from broker.wire.messages import End, Heartbeat, Kind, LaneState, StoredEnd
from broker.wire.prefix import CLUSTER_SCOPE
from ops.cluster import LocalCluster, Member
from ops.demo import setting
from ops.demo.measure import Seen, read_lane, report
from ops.demo.scenario import Chat, LoadPlan, Scenario, load_scenario, plan_load
from producers.client import Client
from producers.errors import ProducerError, Refused

READY_S_MAX = 30.0
"""Longest wait until all workers take jobs, once their processes are up."""

RESULT_S_MAX = 60.0
"""Longest wait for one chat; the whole load takes 40 s."""

BATCH_S_MAX = 90.0


class DemoError(Exception):
    """The demo could not be run; the text says what failed and where to look."""


@dataclass(slots=True)
class Progress:
    """What the live table shows."""

    requests: int
    done: int = 0
    stage: str = "starting"
    workers: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    lanes: list[dict[str, object]] = field(default_factory=list[dict[str, object]])


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What may differ between two runs of the same scenario."""

    folder: Path
    engine: str = "llama"
    policy: str = "first_token"


async def run_demo(
    options: DemoOptions,
    *,
    show: Callable[[Progress], None],
    scenario: Scenario | None = None,
) -> dict[str, object]:
    """Run the scenario once and return its report. Raises DemoError, ClusterError, BusError."""
    scenario = scenario or load_scenario()
    plan = plan_load(
        scenario,
        model=setting.MODEL,
        bytes_per_token=setting.BYTES_PER_TOKEN[options.engine],
    )
    progress = Progress(plan.requests)
    options.folder.mkdir(parents=True, exist_ok=True)
    async with LocalCluster(options.folder) as cluster:
        show(progress)
        wanted = setting.Setting(
            folder=options.folder,
            url=cluster.url,
            engine=options.engine,
            policy=options.policy,
            slots=scenario.slots,
        )
        await start_members(cluster, wanted, workers=scenario.workers)
        bus = await connect(cluster.url, name="inferlane-demo")
        try:
            await until_ready(bus, workers=scenario.workers)
            progress.stage = "running"
            seen = await _under_load(bus, plan, scenario, options, progress, show, cluster.mark)
            lanes = [
                await read_lane(bus, lane, bands=BANDS)
                for lane in (setting.ONLINE_LANE, setting.OFFLINE_LANE)
            ]
        finally:
            await bus.close()
    return report(seen, lanes, policy=options.policy, engine=options.engine, slots=scenario.slots)


async def start_members(
    cluster: LocalCluster, wanted: setting.Setting, *, workers: int, gateways: int = 0
) -> list[Member]:
    """Start a broker, workers and gateways. Raises ClusterError."""
    config = setting.write_config(replace(wanted, url=cluster.url))
    members = [cluster.add_broker("broker-1", config)]
    members += [cluster.add_worker(f"worker-{number + 1}", config) for number in range(workers)]
    members += [cluster.add_gateway(f"gateway-{number + 1}", config) for number in range(gateways)]
    await cluster.start(*members)
    return members


async def until_ready(bus: Bus, *, workers: int) -> None:
    """Wait until `workers` workers take jobs from a broker that pulls them. Raises DemoError.

    Workers know a broker's epoch before it has heard all of them and pulls its queues; what it
    says of the queues comes after that.
    """
    ready: set[str] = set()
    notices: dict[str, str] = {}
    epochs: set[int] = set()
    all_ready = asyncio.Event()

    def heartbeat(message: Message) -> None:
        try:
            told = decode(message.data, Heartbeat)
        except MalformedMessage:
            return
        notices[told.worker] = told.notice
        if told.ready and told.epoch:
            ready.add(told.worker)
        check()

    def queue_state(message: Message) -> None:
        with suppress(MalformedMessage):
            epochs.add(decode(message.data, LaneState).epoch)
        check()

    def check() -> None:
        if len(ready) >= workers and epochs:
            all_ready.set()

    hearings = [
        await bus.subscribe(subjects.HEARTBEATS, heartbeat),
        await bus.subscribe(subjects.QUEUE_STATES, queue_state),
    ]
    try:
        async with asyncio.timeout(READY_S_MAX):
            await all_ready.wait()
    except TimeoutError as error:
        why = "; ".join(f"{name}: {said}" for name, said in sorted(notices.items()) if said)
        leads = "" if epochs else ", and no broker said that it leads"
        message = (
            f"{len(ready)} of {workers} workers were ready in {READY_S_MAX:g} s{leads}: "
            f"{why or 'see the logs'}"
        )
        raise DemoError(message) from error
    finally:
        for hearing in hearings:
            await hearing.unsubscribe()


async def ask(bus: Bus, verb: str) -> dict[str, object]:
    """Ask the leading broker; empty while nobody leads."""
    try:
        reply = await bus.request(subjects.cluster_control(verb), b"", timeout_s=2.0)
    except BusError:
        return {}
    answer = decode(reply.data, ControlReply)
    return msgspec.json.decode(answer.data, type=dict[str, object]) if answer.ok else {}


async def _under_load(
    bus: Bus,
    plan: LoadPlan,
    scenario: Scenario,
    options: DemoOptions,
    progress: Progress,
    show: Callable[[Progress], None],
    mark: Mapping[str, str],
) -> Seen:
    seen = Seen()
    await bus.subscribe(subjects.ALL_OUT, partial(_count_end, seen))
    began_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(_watch(bus, progress, show))
        async with asyncio.TaskGroup() as load:
            load.create_task(_run_batch(plan, scenario, options, seen, progress, mark))
            load.create_task(_run_chats(bus, plan, seen, progress))
        watching.cancel()
    seen.span_s = time.monotonic() - began_s
    progress.stage = "done"
    show(progress)
    return seen


async def _watch(bus: Bus, progress: Progress, show: Callable[[Progress], None]) -> None:
    while True:
        workers, lanes = await ask(bus, "workers"), await ask(bus, "lanes")
        progress.workers = msgspec.convert(workers.get("workers", []), list[dict[str, object]])
        progress.lanes = msgspec.convert(lanes.get("lanes", []), list[dict[str, object]])
        show(progress)
        await asyncio.sleep(0.5)


async def _run_chats(bus: Bus, plan: LoadPlan, seen: Seen, progress: Progress) -> None:
    """Submit each chat at its time; none waits for another."""
    began_s = time.monotonic()
    async with Client(bus, lane=setting.ONLINE_LANE) as client, asyncio.TaskGroup() as group:
        for chat in plan.chats:
            await asyncio.sleep(max(0.0, began_s + chat.at_s - time.monotonic()))
            group.create_task(_chat(client, chat, seen, progress))


async def _chat(client: Client, chat: Chat, seen: Seen, progress: Progress) -> None:
    began_s = time.monotonic()
    try:
        async with asyncio.timeout(RESULT_S_MAX):
            ticket = await client.submit(
                chat.body, band=setting.CHAT_BAND, cache_scope=CLUSTER_SCOPE
            )
            seen.submitted.append((setting.ONLINE_LANE, ticket.job_id))
            first = True
            async for _ in ticket.stream(raise_for_kind=False):
                if first:
                    seen.ttft_s.append(time.monotonic() - began_s)
                    first = False
            record = await ticket.result(raise_for_kind=False)
            seen.rejected += record.kind is Kind.REJECTED
    except Refused:
        seen.rejected += 1
    except (ProducerError, TimeoutError) as error:
        sys.stderr.write(f"a chat came to nothing: {error or 'no answer in time'}\n")
    progress.done += 1


async def _run_batch(
    plan: LoadPlan,
    scenario: Scenario,
    options: DemoOptions,
    seen: Seen,
    progress: Progress,
    mark: Mapping[str, str],
) -> None:
    """Run the lines as a user would: `inferlane batch run`."""
    source, output = options.folder / "batch.jsonl", options.folder / "batch-results.jsonl"
    source.write_bytes(b"\n".join(plan.batch_lines) + b"\n")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ops.cli.main", "batch", "run", str(source)),
        *("--config", str(options.folder / "inferlane.toml"), "--lane", setting.OFFLINE_LANE),
        *("--output", str(output), "--concurrency", str(scenario.batch_concurrency)),
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=PIPE,
        env={**os.environ, **mark},
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(BATCH_S_MAX):
            _, said = await process.communicate()
    except TimeoutError as error:
        message = f"the batch did not end within {BATCH_S_MAX:g} s; see {options.folder}"
        raise DemoError(message) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        message = f"the batch ended with {process.returncode}: {said.decode(errors='replace')}"
        raise DemoError(message)
    seen.batch_lines = len(plan.batch_lines)
    seen.batch_results = sum(_lines(path) for path in (output, output.with_suffix(".errors.jsonl")))
    progress.done += len(plan.batch_lines)


def _lines(path: Path) -> int:
    """Count the lines of a file; none where there is no file."""
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def _count_end(seen: Seen, message: Message) -> None:
    """Hear all callers' subjects, as an auditor: how often was each job's end told?"""
    try:
        event = decode_out(message.data)
    except MalformedMessage:
        return
    if isinstance(event, End | StoredEnd):
        seen.ends[message.subject] += 1
