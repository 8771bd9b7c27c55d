"""The agent's process: connect, start the engine, serve, drain on a signal, leave nothing behind.

    python -m worker_agent.main --config inferlane.toml
    python -m worker_agent.main --worker w1 --engine openai --base-url http://127.0.0.1:8080

Lines of JSON on standard output say what is so: `waiting`, for an engine that is not ready, and
`ready` once orders are heard and the engine takes requests; the log goes to standard error. Exit
codes: 0 drained and left, 1 could not start, 2 wrong settings, 4 another agent has this worker's
name or took it, 130 interrupted before it was up.
"""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from importlib import metadata
from pathlib import Path

import orjson
import structlog
import uvloop

from broker.bus import garbage, logs
from broker.bus.base import Bus, BusError, LinkDown, Timeout
from worker_agent.agent import Agent, Superseded
from worker_agent.config import NatsLink, WorkerConfig
from worker_agent.engine.base import Engine, EngineError
from worker_agent.engines import ConfigMistake, make_engine
from worker_agent.flags import parse_flags
from worker_agent.heartbeat import HeartbeatThread
from worker_agent.namesake import NameTaken, require_own_name

_log = structlog.get_logger(__name__)

EXIT_OK, EXIT_FAILED, EXIT_SETTINGS, EXIT_SUPERSEDED, EXIT_INTERRUPTED = 0, 1, 2, 4, 130
"""3 is left out: for all commands of `inferlane` it means that the cluster can't be reached."""

CONNECT_RETRY_S = 0.5
"""Pause between two tries to reach the server at the start: agents may come up before it."""

Connect = Callable[[str], Awaitable[Bus]]
"""Opens a connection under a name. Called twice: for the agent, and in the heartbeats' thread."""


async def serve(
    config: WorkerConfig, *, connect: Connect, engine: Engine, replace: bool = False
) -> None:
    """Run one worker until it is told to leave; with `replace`, in a live one's place.

    Raises NameTaken, Superseded.
    """
    bus = await connect(config.worker)
    try:
        if not replace:
            await require_own_name(bus, config.worker)
        await engine.start()
        try:
            await _serve(config, bus, engine, connect)
        finally:
            await engine.stop()
    finally:
        await bus.close()


async def _serve(config: WorkerConfig, bus: Bus, engine: Engine, connect: Connect) -> None:
    agent = Agent(config=config, bus=bus, engine=engine, version=metadata.version("inferlane"))
    beats = HeartbeatThread(
        connect=lambda: connect(f"{config.worker}-beat"),
        report=agent.report,
        worker=config.worker,
        interval_s=config.heartbeat_s,
        stuck_s_max=config.stuck_s_max,
    )
    agent.on_urgent = beats.wake
    beats.start()
    try:
        async with asyncio.TaskGroup() as group:
            announcing = group.create_task(_announce(agent))
            work = group.create_task(agent.run())
            _on_signals(agent, work)
            await asyncio.wait([work])
            announcing.cancel()
    except* Superseded as errors:
        # Told as itself: who runs a worker need not know of task groups.
        raise errors.exceptions[0] from None
    finally:
        await beats.stop()


def _on_signals(agent: Agent, work: asyncio.Task[None]) -> None:
    """First signal: drain. Second: leave at once."""
    heard = 0

    def on_signal() -> None:
        nonlocal heard
        if work.done():
            return  # It is leaving already, and what is left takes a moment.
        heard += 1
        if heard == 1:
            _log.info("draining", running=len(agent.ledger.running))
            agent.leave()
        else:
            _log.warning("leaving at once", running=len(agent.ledger.running))
            work.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)


async def _announce(agent: Agent) -> None:
    """Tell whoever started this process what it waits for, and when it can serve."""
    await agent.up.wait()
    watch = agent.watch
    if not watch.was_ready.is_set():
        _say(agent, "waiting", engine=_place(agent.config), detail=watch.readiness.detail)
        await watch.was_ready.wait()
    _say(agent, "ready")


def _say(agent: Agent, event: str, **facts: str) -> None:
    said = {"event": event, "worker": agent.config.worker, "incarnation": agent.incarnation}
    sys.stdout.write(orjson.dumps(said | facts).decode() + "\n")
    sys.stdout.flush()


def _place(config: WorkerConfig) -> str:
    """Say where the engine is looked for; a URL's user and password are nobody's to read."""
    if config.engine != "openai":
        return config.engine
    before, at, host = config.base_url.rpartition("@")
    return f"{before.partition('://')[0]}://{host}" if at else host


def nats_connect(link: NatsLink) -> Connect:
    """Return what opens NATS connections, waiting for a server that isn't up yet."""
    from broker.bus import nats  # noqa: PLC0415

    creds_file = Path(link.creds_file) if link.creds_file else None
    credentials = nats.Credentials(user=link.user, password=link.password, creds_file=creds_file)

    async def connect(name: str) -> Bus:
        while True:
            try:
                return await nats.connect(link.url, name=name, credentials=credentials)
            except (LinkDown, Timeout) as error:
                _log.warning("server not reached yet", error=str(error))
                await asyncio.sleep(CONNECT_RETRY_S)

    return connect


def run(config: WorkerConfig, *, replace: bool = False) -> int:
    """Run a worker in this process, with `replace` in a live one's place; returns the exit code."""
    logs.set_up(worker=config.worker)
    garbage.leave_program_out()
    try:
        engine = make_engine(config)
    except ConfigMistake as mistake:
        return _fail(EXIT_SETTINGS, str(mistake))
    try:
        connect = nats_connect(config.nats)
        uvloop.run(serve(config, connect=connect, engine=engine, replace=replace))
    except (NameTaken, Superseded) as error:
        return _fail(EXIT_SUPERSEDED, str(error))
    except (BusError, EngineError) as error:
        return _fail(EXIT_FAILED, str(error))
    except KeyboardInterrupt:
        # Before the signal handlers stood: there was nothing to drain yet.
        return EXIT_INTERRUPTED
    return EXIT_OK


def _fail(code: int, sentence: str) -> int:
    sys.stderr.write(f"inferlane worker: {sentence}\n")
    return code


def main() -> None:
    """Run a worker as the command line says."""
    flags = parse_flags(sys.argv[1:])
    sys.exit(EXIT_SETTINGS if flags is None else run(flags.config, replace=flags.replace))


if __name__ == "__main__":
    main()
