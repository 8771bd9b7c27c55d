"""A broker of a chaos run: the one that ships, on a spied bus.

python -m ops.chaos.broker FOLDER PLANT CONFIG
"""

import sys
from pathlib import Path

import uvloop

from broker.bus import logs
from broker.bus.base import Bus
from broker.service.config import Config, load
from broker.service.main import connect, serve
from ops.chaos.plants import planted
from ops.chaos.spy import a_spy
from ops.chaos.worker import read_plant


def main() -> None:
    """Serve until told to stop."""
    folder, plant, path = sys.argv[1:]
    config = load(Path(path))
    logs.set_up(broker=config.broker.name)
    spy = a_spy(folder=Path(folder), name=config.broker.name)

    async def open_bus(config: Config) -> Bus:
        return planted(spy.on(await connect(config)), read_plant(plant))

    uvloop.run(serve(config, open_bus=open_bus))


if __name__ == "__main__":
    main()
