"""A bare relay: what this machine can carry at all, with no typed messages and no mind.

pump → request on an own reply inbox → compare-and-set result → ack, in two processes: the relay
pulls and hands on, the null agent records and acknowledges. `throughput.py` measures the broker
against it.

    python -m tests.bench.relay [--jobs 40000] [--bytes 2048]
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Coroutine

import orjson
import uvloop

from broker.bus import logs
from broker.bus.base import Bus, ConsumerSpec, Delivery, Message, StreamSpec
from broker.bus.nats import connect
from ops.nats.server import NatsServer

WINDOW = 1024
"""Jobs between pull and ack at once."""

ANSWER_S_MAX = 60.0
JOBS = StreamSpec(name="RELAY", subjects=("relay.jobs",), work_queue=True)
RESULTS = StreamSpec(
    name="RELAYED",
    subjects=("relay.results.*",),
    max_msgs_per_subject=1,
    discard_new_per_subject=True,
)
CONSUMER = ConsumerSpec(
    stream="RELAY", name="relay", filter_subject="relay.jobs", max_ack_pending=4 * WINDOW
)


async def lay_out(bus: Bus, *, jobs: int, body: bytes) -> None:
    """Make the streams and fill the queue."""
    await bus.ensure_stream(JOBS)
    await bus.ensure_stream(RESULTS)
    await bus.ensure_consumer(CONSUMER)
    await fill(bus, "relay.jobs", [body] * jobs)


async def fill(bus: Bus, subject: str, bodies: list[bytes]) -> None:
    """Append many messages, many at a time."""
    left = iter(bodies)

    async def publisher() -> None:
        for body in left:
            await bus.append(subject, body)

    async with asyncio.TaskGroup() as group:
        for _ in range(512):
            group.create_task(publisher())


async def relay(url: str, jobs: int) -> None:
    """Pull and hand on, until all are done; say how many a second."""
    bus = await connect(url, name="relay")
    arrived: asyncio.Queue[Delivery] = asyncio.Queue()

    def take(deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            arrived.put_nowait(delivery)

    pull = await bus.pull("RELAY", "relay", take, window=WINDOW)
    done = 0

    async def hand_on() -> None:
        nonlocal done
        while True:
            delivery = await arrived.get()
            head = f"{delivery.sequence} {delivery.ack_subject}\n".encode()
            await bus.request("relay.work", head + delivery.data, timeout_s=ANSWER_S_MAX)
            pull.release()
            done += 1
            if done == jobs:
                finished.set()

    finished = asyncio.Event()
    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        workers = [group.create_task(hand_on()) for _ in range(WINDOW)]
        await finished.wait()
        for worker in workers:
            worker.cancel()
    say({"jobs_s": jobs / (time.perf_counter() - began_s)})
    await bus.close()


async def null_agent(url: str) -> None:
    """Record and acknowledge each job at once, until standard input ends."""
    bus = await connect(url, name="null-agent")
    async with asyncio.TaskGroup() as group:

        async def work(message: Message) -> None:
            head, _, body = message.data.partition(b"\n")
            sequence, ack_subject = head.decode().split()
            await bus.append(f"relay.results.{sequence}", body, expected_last_subject_sequence=0)
            await bus.ack(ack_subject)
            await bus.publish(message.reply, b"")

        await bus.subscribe("relay.work", lambda message: _start(group, work(message)))
        say({"event": "ready"})
        await asyncio.to_thread(sys.stdin.read)
        await bus.close()


def _start(group: asyncio.TaskGroup, work: Coroutine[object, object, None]) -> None:
    group.create_task(work)


def say(what: dict[str, object]) -> None:
    """Tell the parent process, in one line."""
    sys.stdout.write(orjson.dumps(what).decode() + "\n")
    sys.stdout.flush()


async def measure(*, jobs: int, body_bytes: int) -> float:
    """Run the relay once on a server of its own; return jobs a second."""
    with NatsServer() as server:
        bus = await connect(server.url, name="bench")
        await lay_out(bus, jobs=jobs, body=b"x" * body_bytes)
        await bus.close()
        agent = await start_role("tests.bench.relay", "agent", server.url, jobs)
        try:
            await heard(agent)
            relaying = await start_role("tests.bench.relay", "relay", server.url, jobs)
            told = await heard(relaying)
            await relaying.wait()
        finally:
            await end_role(agent)
    return float(str(told["jobs_s"]))


async def start_role(module: str, role: str, url: str, jobs: int) -> asyncio.subprocess.Process:
    """Start one process of a bench."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, "--role", role, "--url", url, "--jobs", str(jobs)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )


async def heard(process: asyncio.subprocess.Process) -> dict[str, object]:
    """Read the next line a role says."""
    assert process.stdout is not None, "stdout is a pipe"
    async with asyncio.timeout(ANSWER_S_MAX):
        return orjson.loads(await process.stdout.readline())


async def end_role(process: asyncio.subprocess.Process) -> None:
    """End a role by closing its standard input."""
    assert process.stdin is not None, "stdin is a pipe"
    process.stdin.close()
    await process.wait()


def main() -> None:
    """Run the bench, or one of its roles."""
    parser = argparse.ArgumentParser(description="Measure a bare relay on this machine.")
    parser.add_argument("--jobs", type=int, default=40_000)
    parser.add_argument("--bytes", type=int, default=2048)
    parser.add_argument("--role", choices=("relay", "agent"))
    parser.add_argument("--url", default="")
    given = parser.parse_args()
    logs.set_up(role=given.role or "bench")
    match given.role:
        case "relay":
            uvloop.run(relay(given.url, given.jobs))
        case "agent":
            uvloop.run(null_agent(given.url))
        case _:
            jobs_s = uvloop.run(measure(jobs=given.jobs, body_bytes=given.bytes))
            print(f"bare relay: {jobs_s:,.0f} jobs/s at {given.bytes} bytes")


if __name__ == "__main__":
    main()
