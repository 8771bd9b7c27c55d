"""A real worker agent that dies at a given step: `python -m tests.crashing_agent PLACE FLAGS...`.

PLACE is `crash_at`'s, or `never`. FLAGS are the agent's own.
"""

import sys

import uvloop

from broker.bus import logs
from broker.bus.base import Bus
from tests.crashing import crash_at, faulty
from worker_agent.engines import make_engine
from worker_agent.flags import parse_flags
from worker_agent.main import Connect, nats_connect, serve


def _dying(connect: Connect, place: str, *, worker: str) -> Connect:
    async def opened(name: str) -> Bus:
        bus = await connect(name)
        # The agent's own connection has the worker's name; heartbeats go over another.
        is_agents = name == worker
        return faulty(bus, crash_at(place)) if is_agents and place != "never" else bus

    return opened


def main() -> None:
    """Serve until killed by the place or by a signal."""
    place, *arguments = sys.argv[1:]
    flags = parse_flags(arguments)
    assert flags is not None, "the test gave wrong flags"
    config = flags.config
    logs.set_up(worker=config.worker)
    connect = _dying(nats_connect(config.nats), place, worker=config.worker)
    engine = make_engine(config)
    uvloop.run(serve(config, connect=connect, engine=engine, replace=flags.replace))


if __name__ == "__main__":
    main()
