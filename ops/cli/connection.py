"""How commands reach the cluster: where it is, and one request to the leading broker."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ops.cli.errors import CommandError, Misused, Unreachable, masked

if TYPE_CHECKING:  # `--help` must answer before the bus is imported.
    from broker.bus.base import Bus
    from broker.bus.nats import NatsBus
    from broker.bus.nats_wire import Credentials

URL = "nats://127.0.0.1:4222"

CONNECT_S_MAX = 2.0
"""A server that is there answers in milliseconds, through a slow VPN in tenths of a second."""

ANSWER_S_MAX = 10.0
"""How long the broker may take to answer: its own answers wait for others before them."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Where the cluster is."""

    url: Annotated[str, Parameter(name=("--url", "--nats"), env_var="INFERLANE_URL")] = URL
    """NATS server, or several separated by commas: nats://user:password@host:4222."""

    creds: Annotated[Path | None, Parameter(env_var="INFERLANE_CREDS")] = None
    """NATS credentials file, where the server asks for one."""


HERE = Cluster()


@asynccontextmanager
async def connected(
    cluster: Cluster, credentials: "Credentials | None" = None
) -> AsyncGenerator["NatsBus"]:
    """Connect for the time of one command; `cluster.creds` goes first.

    Raises Unreachable, Misused.
    """
    from broker.bus.base import BadLink, BusError
    from broker.bus.nats import connect
    from broker.bus.nats_wire import Credentials, RefusedCredentials

    url = masked(cluster.url)
    try:
        bus = await connect(
            cluster.url,
            name="inferlane-cli",
            credentials=Credentials(creds_file=cluster.creds) if cluster.creds else credentials,
            connect_timeout_s=CONNECT_S_MAX,
        )
    except RefusedCredentials as error:
        message = (
            f"{url} refuses these credentials: {error}; give nats://user:password@host:port as"
            " --url or INFERLANE_URL, or a file as --creds"
        )
        raise Unreachable(message) from error
    except BadLink as error:
        message = f"{error}; see --url or INFERLANE_URL, and --creds or INFERLANE_CREDS"
        raise Misused(message) from error
    except BusError as error:
        message = f"{error}; say with --url or INFERLANE_URL where NATS is, or start nats-server"
        raise Unreachable(message) from error
    try:
        yield bus
    finally:
        await bus.close()


async def ask(
    bus: "Bus", verb: str, data: bytes = b"", *, timeout_s: float = ANSWER_S_MAX
) -> bytes:
    """Ask the leading broker; return the JSON of its answer.

    Raises Unreachable without a broker, CommandError with the broker's own words when it refuses.
    """
    from broker.bus.base import NoResponders, Timeout
    from broker.wire import subjects
    from broker.wire.codec import MalformedMessage, decode
    from broker.wire.control import ControlReply

    try:
        answer = await bus.request(subjects.cluster_control(verb), data, timeout_s=timeout_s)
        reply = decode(answer.data, ControlReply)
    except NoResponders as error:
        message = (
            "no broker leads: start one with `inferlane broker --config FILE`, or wait some seconds"
            " if another has just stopped"
        )
        raise Unreachable(message) from error
    except Timeout as error:
        message = f"the broker did not answer within {timeout_s:g} s; try again"
        raise Unreachable(message) from error
    except MalformedMessage as error:
        message = f"the broker's answer can't be read ({error}): is it of another version?"
        raise CommandError(message) from error
    if not reply.ok:
        raise CommandError(reply.message or "the broker refused without saying why")
    return reply.data
