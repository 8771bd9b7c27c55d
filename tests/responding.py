"""The responder as a process of its own: `python -m tests.responding URL [JSON of faults]`.

Says `ready` once it serves, `begun` at the first job, and one JSON line of what it ran when it is
told to end (SIGTERM).
"""

import asyncio
import random
import signal
import sys

import orjson
import structlog

from broker.bus.nats import connect
from broker.wire.messages import Job, Kind, TerminalRecord
from tests.responder import Responder, a_record


async def serve(url: str, faults: dict[str, float]) -> None:
    """Serve lane `acme` until SIGTERM."""
    chance = random.Random(int(faults.get("seed", 1)))
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    bus = await connect(url, name="responder")
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    responder = Responder(bus, window=int(faults.get("window", 256)))
    responder.loses_end = lambda _: chance.random() < faults.get("loses_end", 0.0)
    responder.ends = int(faults.get("ends", 1))
    responder.run_s = faults.get("run_s", 0.0)

    def answer(job: Job) -> TerminalRecord:
        fails = chance.random() < faults.get("fails", 0.0)
        return a_record(job, kind=Kind.FAILED, status_code=500) if fails else a_record(job)

    responder.answer = answer
    async with responder, asyncio.TaskGroup() as tasks:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        begun = tasks.create_task(_tell_begun(responder))
        await stop.wait()
        begun.cancel()
    told = {
        "runs": responder.runs.total(),
        "jobs": len(responder.runs),
        "most": max(responder.runs.values(), default=0),
        "cancelled": len(responder.cancelled),
    }
    sys.stdout.write(orjson.dumps(told).decode() + "\n")
    await bus.close()


async def _tell_begun(responder: Responder) -> None:
    await responder.started.wait()
    sys.stdout.write("begun\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], orjson.loads(sys.argv[2]) if len(sys.argv) > 2 else {}))
