"""A real broker that dies at a given step: `python -m tests.crashing_broker PLACE CONFIG`.

PLACE is `crash_at`'s. CONFIG is the broker's own file.
"""

import sys
from pathlib import Path

import uvloop

from broker.bus import logs
from broker.bus.base import Bus
from broker.service.config import Config, load
from broker.service.main import connect, serve
from tests.crashing import crash_at, faulty


def main() -> None:
    """Serve until killed by the place or by a signal."""
    place, path = sys.argv[1:]
    config = load(Path(path))
    logs.set_up(broker=config.broker.name)

    async def open_dying(config: Config) -> Bus:
        return faulty(await connect(config), crash_at(place))

    uvloop.run(serve(config, open_bus=open_dying))


if __name__ == "__main__":
    main()
