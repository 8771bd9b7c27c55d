"""How fast the bus is on this machine: appends, a continuous pull, acks and requests a second.

Run `python -m tests.bench.bus_bench [--messages N] [--bytes N]`. One process besides the server;
trust the ratios between the lines, not the figures: the machine is shared.
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable

import uvloop

from broker.bus.base import ConsumerSpec, Delivery, Message, StreamSpec
from broker.bus.nats import NatsBus, connect
from ops.nats.server import NatsServer

STREAM, CONSUMER, SUBJECT = "BENCH", "bench", "bench.jobs"
AT_ONCE = 512
WINDOW = 2048


async def side_by_side(count: int, work: Callable[[int], Awaitable[object]]) -> float:
    """Run `work` for 0..count-1, AT_ONCE at a time; returns how many a second."""
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await work(number)

    start_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(worker())
    return count / (time.perf_counter() - start_s)


async def pulled(bus: NatsBus, count: int) -> tuple[float, list[Delivery]]:
    """Pull `count` messages; returns how many a second, and the messages."""
    got: list[Delivery] = []
    done = asyncio.Event()

    def take(batch: list[Delivery]) -> None:
        got.extend(batch)
        pull.release(len(batch))
        if len(got) >= count:
            done.set()

    start_s = time.perf_counter()
    pull = await bus.pull(STREAM, CONSUMER, take, window=WINDOW)
    await done.wait()
    rate = count / (time.perf_counter() - start_s)
    await pull.stop()
    return rate, got


async def echo(bus: NatsBus, message: Message) -> None:
    """Answer with what came."""
    await bus.publish(message.reply, message.data)


async def main(url: str, *, messages: int, payload_bytes: int) -> None:
    """Measure and print."""
    bus = await connect(url, name="bench")
    peer = await connect(url, name="bench-peer")
    payload = b"x" * payload_bytes
    await bus.ensure_stream(StreamSpec(STREAM, (SUBJECT,), work_queue=True))
    await bus.ensure_consumer(ConsumerSpec(STREAM, CONSUMER, SUBJECT, max_ack_pending=2 * messages))

    await bus.ensure_stream(StreamSpec("RECORDS", ("record.*",), max_msgs_per_subject=1))
    await peer.subscribe("bench.echo", lambda message: echo(peer, message))
    append = await side_by_side(messages, lambda _: bus.append(SUBJECT, payload))
    print(f"append           {append:10,.0f} /s")
    pull, got = await pulled(bus, messages)
    print(f"pull             {pull:10,.0f} /s")
    ack = await side_by_side(messages, lambda number: bus.ack(got[number].ack_subject))
    print(f"ack with reply   {ack:10,.0f} /s")
    compare = await side_by_side(
        messages,
        lambda number: bus.append(f"record.{number}", payload, expected_last_subject_sequence=0),
    )
    print(f"compare-and-set  {compare:10,.0f} /s")
    request = await side_by_side(
        messages, lambda _: bus.request("bench.echo", payload, timeout_s=30)
    )
    print(f"request (echo)   {request:10,.0f} /s")
    await bus.close()
    await peer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--bytes", type=int, default=2048)
    given = parser.parse_args()
    with NatsServer() as server:
        uvloop.run(main(server.url, messages=given.messages, payload_bytes=given.bytes))
