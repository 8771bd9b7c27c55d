"""A worker of a chaos run: the agent as it ships, on a spied bus, beside an engine that obeys.

    python -m ops.chaos.worker FOLDER PLANT --config FILE --worker NAME

FOLDER holds histories and orders; PLANT is `none` or a fault to plant.
"""

import sys
from pathlib import Path

import uvloop

from broker.bus import logs
from broker.bus.base import Bus
from ops.chaos.engine import ChaosEngine
from ops.chaos.plants import Plant, planted
from ops.chaos.spy import Spy, a_spy
from worker_agent.agent import Superseded
from worker_agent.flags import parse_flags
from worker_agent.main import EXIT_SETTINGS, EXIT_SUPERSEDED, Connect, nats_connect, serve
from worker_agent.namesake import NameTaken

NO_PLANT = "none"


def read_plant(text: str) -> Plant | None:
    """Read the plant of a command line."""
    return None if text == NO_PLANT else Plant(text)


def _spied(connect: Connect, spy: Spy, plant: Plant | None) -> Connect:
    async def opened(name: str) -> Bus:
        bus = await connect(name)
        # The agent's own connection has the worker's name; heartbeats go over another.
        return planted(spy.on(bus), plant) if name == spy.name else bus

    return opened


def main() -> None:
    """Serve until told to leave."""
    folder, plant, *arguments = sys.argv[1:]
    flags = parse_flags(arguments)
    if flags is None:
        sys.exit(EXIT_SETTINGS)
    config = flags.config
    logs.set_up(worker=config.worker)
    spy = a_spy(folder=Path(folder), name=config.worker)
    connect = _spied(nats_connect(config.nats), spy, read_plant(plant))
    engine = ChaosEngine(Path(folder), spy, models=tuple(config.models.values()))
    try:
        uvloop.run(serve(config, connect=connect, engine=engine, replace=flags.replace))
    except (NameTaken, Superseded):
        sys.exit(EXIT_SUPERSEDED)


if __name__ == "__main__":
    main()
