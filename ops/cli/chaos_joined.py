"""What `inferlane chaos --url` does to a cluster of yours: asked of it, checked, and said first."""

import asyncio
import secrets
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ops.cli.errors import Misused, masked

if TYPE_CHECKING:
    from broker.wire.messages import LaneOffer
    from ops.chaos.plan import Kind
    from ops.chaos.run import Options
    from ops.chaos.setting import Hit, Load

LANES = ("online", "offline")
"""Those of the demo and of the shipped configuration."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Yours:
    """A cluster of yours, and what may be done to it."""

    url: Annotated[
        str, Parameter(help="Join the cluster of this NATS server instead of starting one.")
    ] = ""
    lane: Annotated[
        list[str] | None,
        Parameter(help="There: the lanes of chats and of batches; give it twice.", negative=""),
    ] = None
    model: Annotated[str, Parameter(help="There: the model to ask for.")] = ""
    hit: Annotated[
        list[str] | None,
        Parameter(help="There: NAME=COMMAND, a fault of your own; with --yes.", negative=""),
    ] = None
    yes: Annotated[bool, Parameter(help="Do run the commands of --hit.", negative="")] = False


NOT_YOURS = Yours()


@dataclass(frozen=True, slots=True)
class Joining:
    """Where the load goes, and what may be done."""

    load: "Load"
    hits: "tuple[Hit, ...]"

    @property
    def kinds(self) -> "tuple[Kind, ...]":
        """List the faults that touch only what chaos starts itself, and those of your own."""
        from ops.chaos.plan import IN_OTHERS_CLUSTER, Kind

        return (*IN_OTHERS_CLUSTER, Kind.HIT_YOURS) if self.hits else IN_OTHERS_CLUSTER


def joining(yours: Yours, *, is_planted: bool) -> Joining | None:
    """Check what is asked for, against the cluster itself; None without `--url`.

    Raises Misused, Unreachable; nothing was done then.
    """
    if not yours.url:
        if yours.lane or yours.model or yours.hit:
            message = "--lane, --model and --hit are for a cluster of yours: say --url"
            raise Misused(message)
        return None
    from ops.chaos.joined import addresses_of
    from ops.chaos.setting import Load

    if is_planted:
        message = "--plant breaks brokers and workers that chaos starts itself: not with --url"
        raise Misused(message)
    try:
        addresses_of(yours.url)
    except ValueError as error:
        raise Misused(str(error)) from error
    hits = _hits(yours.hit or [], yes=yours.yes)
    online, offline = _two(yours.lane or list(LANES))
    model = asyncio.run(_model_of(yours.url, (online, offline), yours.model))
    # Ids of chats are made of the producers' names: a name must not come twice in one cluster.
    prefix = f"chaos-{secrets.token_hex(3)}-"
    return Joining(Load(online, offline, model, prefix), hits)


def _hits(texts: list[str], *, yes: bool) -> "tuple[Hit, ...]":
    from ops.chaos.setting import Hit

    parts = [text.partition("=") for text in texts]
    if not all(name and command for name, _, command in parts):
        message = '--hit is NAME=COMMAND, such as --hit worker-1="systemctl kill -s KILL worker-1"'
        raise Misused(message)
    hits = tuple(Hit(name, command) for name, _, command in parts)
    if hits and not yes:
        message = (
            f"nothing was done. {_commands_told(hits)} Say --yes to have that done to your cluster"
        )
        raise Misused(message)
    return hits


def _two(lanes: list[str]) -> tuple[str, str]:
    match lanes:
        case [online, offline] if online != offline:
            return online, offline
        case _:
            message = "give --lane twice, for chats and for batches, or not at all"
            raise Misused(message)


async def _model_of(url: str, lanes: tuple[str, str], model: str) -> str:
    """Ask the lanes' offers for a model that both have. Raises Misused, Unreachable."""
    offers = await _offers(url)
    for lane in lanes:
        if lane not in offers:
            message = f"there is no lane {lane}; there are: {', '.join(sorted(offers)) or 'none'}"
            raise Misused(message)
    both = [name for name in offers[lanes[0]].models if name in offers[lanes[1]].models]
    if not both or (model and model not in both):
        message = (
            f"lanes {lanes[0]} and {lanes[1]} do not both offer {model or 'one model'}; "
            f"both offer: {', '.join(both) or 'none'}"
        )
        raise Misused(message)
    return model or both[0]


async def _offers(url: str) -> "dict[str, LaneOffer]":
    from broker.wire import subjects
    from broker.wire.codec import MalformedMessage, decode
    from broker.wire.messages import LaneOffer
    from ops.cli.connection import Cluster, connected

    found: dict[str, LaneOffer] = {}
    async with connected(Cluster(url=url)) as bus:
        async for entry in bus.kv_entries(subjects.CONFIG_BUCKET, subjects.lane_offer_key("*")):
            try:
                offer = decode(entry.value, LaneOffer)
            except MalformedMessage:
                continue
            found[offer.lane] = offer
    return found


def announced(options: "Options") -> str:
    """Say what is about to be done to a cluster."""
    from ops.chaos.plan import Kind, plan

    load, faults = options.load, plan(options.seed, options.faults, kinds=options.kinds)
    counts = Counter(fault.kind for fault in faults)
    hits, garbage = counts.pop(Kind.HIT_YOURS, 0), counts.pop(Kind.MALFORMED, 0)
    own = ", ".join(f"{count} × {kind}" for kind, count in sorted(counts.items())) or "nothing"
    said = [
        (
            f"chaos joins {masked(options.url)}: at least {options.jobs} jobs for model "
            f"{load.model} in lanes {load.online} and {load.offline}, from producers of its own."
        ),
        f"Done to those: {own}.",
        f"{garbage} messages that are none are stored as jobs of {load.online}.",
    ]
    if hits:
        said.append(f"{hits} times, one of these. {_commands_told(options.hits)}")
    else:
        said.append("Nothing of yours is killed, stopped or cut off.")
    return "\n".join(said)


def _commands_told(hits: "tuple[Hit, ...]") -> str:
    return " ".join(f"For {hit.name} it runs `{hit.command}`." for hit in hits)
