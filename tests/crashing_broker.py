"""A real broker that dies at a given step: `python -m tests.crashing_broker PLACE CONFIG [stuck]`.

PLACE is `crash_at`'s. CONFIG is the broker's own file. With `stuck` it does not die there: its loop
stands still for ever, as by a bug of ours.
"""

import sys
import threading
from pathlib import Path

import uvloop

from broker.bus import logs
from broker.bus.base import Bus
from broker.service.config import Config, load
from broker.service.main import connect, serve
from tests.crashing import crash_at, faulty, kill_now


def main() -> None:
    """Serve until killed by the place or by a signal."""
    place, path, *how = sys.argv[1:]
    die = threading.Event().wait if how == ["stuck"] else kill_now
    config = load(Path(path))
    logs.set_up(broker=config.broker.name)

    async def open_dying(config: Config) -> Bus:
        return faulty(await connect(config), crash_at(place, die=die))

    uvloop.run(serve(config, open_bus=open_dying))


if __name__ == "__main__":
    main()
