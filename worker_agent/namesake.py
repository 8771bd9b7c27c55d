"""A worker's name is one agent's: whoever starts asks whether another one answers to it.

A second agent under one name, as of a copied unit file, must not end the first: with a supervisor
behind each they would end each other for ever, and with them what they run. So the second refuses,
unless it was told to take the place; then the first hears its heartbeats and leaves.
"""

import asyncio
import os
import socket
from datetime import UTC, datetime

import structlog

from broker.bus.base import Bus, LinkDown, NoResponders, Timeout
from broker.wire import codec, subjects
from broker.wire.codec import MalformedMessage
from broker.wire.messages import Answer, Probe, WorkReply

ASK_S_MAX = 5.0
"""How long a live agent may take to answer. Where the server knows nobody it says so at once; whose
host lost its power, or whose process was stopped, is still known to it and answers nobody."""

LEAVING_POLL_S = 0.5
"""How often an agent that is leaving is asked again."""

LEAVING_ASK_S_MAX = 1.0
"""How long one that said so may take then: a question may meet it on its way out."""

_log = structlog.get_logger(__name__)


class NameTaken(Exception):
    """Another agent runs under this worker's name, and lives."""


def own_place() -> str:
    """Say where this process is, for people: `process 123 on gpu-host-1`."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def question() -> Probe:
    """Make what is asked: no leader's order, for epochs begin with 1."""
    return Probe(epoch=0, number=0)


async def require_own_name(
    bus: Bus, worker: str, *, ask_s_max: float = ASK_S_MAX, poll_s: float = LEAVING_POLL_S
) -> None:
    """Return once no agent answers to the name; one that is leaving is waited for.

    Raises NameTaken when one answers and stays.
    """
    is_told = False
    while (reply := await _asked(bus, worker, ask_s_max=ask_s_max)) is not None:
        if reply.answer is not Answer.DRAINING:
            message = (
                f"another agent runs as worker {worker} ({_whose(reply)}): give each a name of its"
                " own, or end that one first; --replace takes its place at once, and what it runs"
                " is run again elsewhere"
            )
            raise NameTaken(message)
        if not is_told:
            is_told, ask_s_max = True, min(ask_s_max, LEAVING_ASK_S_MAX)
            _log.warning("waiting for the agent of this name to leave", agent=_whose(reply))
        await asyncio.sleep(poll_s)


async def _asked(bus: Bus, worker: str, *, ask_s_max: float) -> WorkReply | None:
    data = codec.encode(question())
    while True:
        try:
            message = await bus.request(subjects.work(worker), data, timeout_s=ask_s_max)
            return codec.decode(message.data, WorkReply)
        except (NoResponders, Timeout):
            return None
        except MalformedMessage as error:
            _log.warning("an answer that can't be read", error=str(error))
            return None
        except LinkDown:
            await asyncio.sleep(LEAVING_POLL_S)


def _whose(reply: WorkReply) -> str:
    started = datetime.fromtimestamp(reply.incarnation / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    since = f"started {started} UTC"
    return f"{reply.detail}, {since}" if reply.answer is not Answer.STALE_EPOCH else since
