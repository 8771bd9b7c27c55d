"""What `inferlane batch check` tells: findings, and hours from the cluster's own rates."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ops.cli.errors import CommandError, Misused, Unreachable

if TYPE_CHECKING:
    from broker.bus.base import Bus
    from broker.wire.messages import LaneOffer
    from producers.batch.check import Findings
    from producers.config import ProducerConfig

MODELS_SHOWN_MAX = 10


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second that the workers get through, all together; 0 where not known."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    workers: int = 0


@dataclass(frozen=True, slots=True)
class Offered:
    """What a lane's cluster offers to a batch."""

    offer: "LaneOffer"
    rates: Rates


async def ask_cluster(found: "ProducerConfig", lane: str) -> Offered:
    """Ask which models the lane has, and how fast the workers are. Raises Unreachable, Misused."""
    from producers import errors
    from producers.client import Client
    from producers.connecting import connect_bus

    try:
        async with (
            connect_bus(found.nats, name="inferlane-batch-check") as bus,
            Client(bus, lane=lane, config=found.client) as client,
        ):
            if client.offer is None:
                message = f"the cluster offers nothing to lane {lane!r}; is a broker running?"
                raise Unreachable(message)
            return Offered(client.offer, await _rates(bus))
    except errors.BadLink as error:
        raise Misused(str(error)) from error
    except errors.Unreachable as error:
        raise Unreachable(str(error)) from error


async def _rates(bus: "Bus") -> Rates:
    """Rates of the live workers; none when the broker doesn't tell, which a tenant can't expect."""
    import msgspec

    from broker.service.snapshot import WorkersView
    from ops.cli.connection import ask

    try:
        found = msgspec.json.decode(await ask(bus, "workers", timeout_s=2.0), type=WorkersView)
    except (CommandError, msgspec.MsgspecError):
        return Rates()
    live = [one for one in found.workers if one.phase == "live" and not one.draining]
    return Rates(
        prefill_s=sum(one.prefill_tokens_s for one in live),
        # Workers tell the decode rate of one job.
        decode_s=sum(one.decode_tokens_s * one.slots for one in live),
        workers=len(live),
    )


def told(findings: "Findings", tokens_per_second: float | None, rates: Rates) -> list[str]:
    """The findings, line by line."""
    bad = sum(findings.faults.values())
    lines = [f"{findings.requests + bad:,} lines: {findings.requests:,} good, {bad:,} bad"]
    lines += [f"  {fault.code}: {fault.message}" for fault in findings.first_faults]
    if bad > len(findings.first_faults):
        counted = ", ".join(f"{code} {count:,}" for code, count in findings.faults.most_common())
        lines.append(f"  ... and {bad - len(findings.first_faults):,} more; in all: {counted}")
    if not findings.requests:
        return lines
    known = findings.models.most_common(MODELS_SHOWN_MAX)
    models = ", ".join(f"{model} {count:,}" for model, count in known)
    shared = findings.shared_tokens / findings.prompt_tokens
    lines.append(f"endpoint: {findings.endpoint}; models: {models}")
    lines.append(
        f"prompt tokens: about {findings.prompt_tokens:,}, of which {shared:.0%} repeat the "
        "beginning of a neighbouring line"
    )
    lines.append(f"output tokens: at most {findings.output_tokens_max:,}")
    lines.append(_hours(findings, tokens_per_second, rates))
    return lines


def _hours(findings: "Findings", tokens_per_second: float | None, rates: Rates) -> str:
    if tokens_per_second is not None:
        hours = findings.hours(tokens_per_second)
        return f"hours: at most {hours:,.2f} at {tokens_per_second:,.0f} tokens/s"
    if rates.prefill_s and rates.decode_s:
        prefill_s = findings.prompt_tokens / rates.prefill_s
        decode_s = findings.output_tokens_max / rates.decode_s
        return (
            f"hours: at most {(prefill_s + decode_s) / 3600:,.2f} on the {rates.workers} workers "
            "that are there now, if they had nothing else to do"
        )
    return (
        "hours: give --tokens-per-second, or --lane of a cluster that is at work, for an estimate"
    )
