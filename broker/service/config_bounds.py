"""Values that are allowed by their type, and under which nothing would ever run.

Each is told with what to write instead. What merely works badly is not refused: it may be meant.
"""

from collections.abc import Iterator, Sequence
from typing import cast

from msgspec import Struct, structs

from broker.core.policy import QuotaRow
from broker.service.config_records import MIB, Config
from broker.wire.messages import BODY_BYTES_MAX
from broker.wire.toml_lines import KeyPath

Finding = tuple[KeyPath, str]

SECONDS_MAX = 1e9
"""Longest duration: 31 years. Beyond three centuries the server's nanoseconds overflow."""

WEIGHT_MAX = 1e6
"""Most and, as 1 ÷ this, least weight: beyond it sums of scores and shares lose the other side."""

RECORD_BYTES_MIN = 16 * MIB
"""Least room of a stream that holds results or dead letters: the largest one, and one more."""

_LEAST: tuple[tuple[KeyPath, float, str], ...] = (
    (
        ("policy", "routing", "kv_fill_ratio_max"),
        0.1,
        "with so little of its KV cache to give away no worker has room for a prompt; write 0.95",
    ),
    (
        ("policy", "routing", "prefill_tokens_s"),
        1.0,
        "no engine is so slow, and every wait would be endless; write 8000.0",
    ),
    (
        ("policy", "routing", "decode_tokens_s"),
        0.01,
        "no engine is so slow, and every answer would be endless; write 50.0",
    ),
    (
        ("policy", "leases", "heartbeat_s"),
        0.01,
        "workers and brokers would do nothing else; write 1.0",
    ),
    (
        ("policy", "leases", "stall_s"),
        0.1,
        "each job would be given up before its first token; write 120.0",
    ),
    (
        ("policy", "leases", "run_s_max"),
        0.1,
        "each job would be ended as soon as it runs; write 3600.0",
    ),
    (
        ("policy", "leases", "dispatch_answer_s"),
        0.01,
        "no worker answers an order so soon; write 2.0",
    ),
    (
        ("policy", "pressure", "refuse_batch_wait_s"),
        0.01,
        "all batch would be refused while a person waits at all; write 20.0",
    ),
)
"""Key, the least value with which jobs end, and why: tests use values just above."""


def check_bounds(config: Config) -> Iterator[Finding]:
    """Find what would let nothing run: (key, what comes of it and what to write)."""
    for path, least, why in _LEAST:
        value = _value(config, path)
        if value < least:
            yield path, f"{value:g} is too little: {why}"
    yield from _seconds(config, ())
    yield from _weights(config)
    for index, row in enumerate(config.policy.quotas):
        yield from _row(("policy", "quotas", index), row)
    yield from _bands(config)
    yield from _stuck(config)
    yield from _room(config)


def _value(config: Config, path: KeyPath) -> float:
    value: object = config
    for name in path:
        value = getattr(value, str(name))
    assert isinstance(value, float)
    return value


def _seconds(value: object, path: KeyPath) -> Iterator[Finding]:
    """Find durations that no clock counts, in all programs' tables."""
    match value:
        case Struct():
            for name in value.__struct_fields__:
                yield from _seconds(getattr(value, name), (*path, name))
        case dict():
            for name, item in cast("dict[str, object]", value).items():
                yield from _seconds(item, (*path, name))
        case tuple() | list():
            for index, item in enumerate(cast("Sequence[object]", value)):
                yield from _seconds(item, (*path, index))
        case int() | float() if _is_duration(path) and value > SECONDS_MAX:
            yield path, f"{value:g} s is longer than any clock runs; at most {SECONDS_MAX:,.0f} s"
        case _:
            pass


def _is_duration(path: KeyPath) -> bool:
    name = str(path[-1]) if path else ""
    return name.endswith(("_s", "_s_max", "_s_min")) and not name.endswith(("tokens_s",))


def _weights(config: Config) -> Iterator[Finding]:
    for index, lane in enumerate(config.policy.lanes):
        if not 1 / WEIGHT_MAX <= lane.weight <= WEIGHT_MAX:
            message = (
                f"{lane.weight:g} against others' 1 is all or nothing; write a weight from"
                f" {1 / WEIGHT_MAX:g} to {WEIGHT_MAX:,.0f}, and paused = true to stop a lane"
            )
            yield ("policy", "lanes", index, "weight"), message
    for table in ("routing", "order"):
        for name, value in structs.asdict(getattr(config.policy, table)).items():
            is_weight = name.endswith(("_weight", "_credit", "bias"))
            if is_weight and value > WEIGHT_MAX:
                message = f"{value:g} drowns all else that is weighed; at most {WEIGHT_MAX:,.0f}"
                yield ("policy", table, name), message


def _row(path: KeyPath, row: QuotaRow) -> Iterator[Finding]:
    whose = f"of lane {row.lane}" if row.lane else "that the row matches"
    for name in ("inflight_jobs_max", "inflight_tokens_max", "tokens_per_min", "result_bytes_max"):
        if getattr(row, name) == 0:
            yield (*path, name), f"0 lets no job {whose} ever run; {_instead(row)}"
    if row.queued_jobs_max == 0:
        message = (
            f"0 refuses every job {whose}, for each waits before it runs; write the expected"
            " requests per second × the wait that people accept, 1 at least"
        )
        yield (*path, "queued_jobs_max"), message


def _instead(row: QuotaRow) -> str:
    """Say how to stop what a row of zero was probably to stop."""
    if row.band is not None:
        return f"write 1 at least, or leave {row.band} out of the bands of the lanes"
    if row.model is not None:
        return "write 1 at least, or leave the model out of the models of the lanes"
    return "write 1 at least, or paused = true in the lane's table"


def _bands(config: Config) -> Iterator[Finding]:
    for index, band in enumerate(config.policy.bands):
        if band.wait_s_max is not None and band.wait_s_max < _WAIT_S_LEAST:
            message = (
                f"{band.wait_s_max:g} s is over before a job can be placed; write 10.0, or leave it"
                " out: then only a job's own deadline counts"
            )
            yield ("policy", "bands", index, "wait_s_max"), message


_WAIT_S_LEAST = 0.01
"""A decision and an order take some milliseconds."""


def _stuck(config: Config) -> Iterator[Finding]:
    stuck_s_max = config.broker.loop_stuck_s_max
    if 0 < stuck_s_max < _STUCK_S_LEAST:
        message = (
            f"{stuck_s_max:g} s: a busy machine's broker would end itself again and again; write"
            f" 60.0, {_STUCK_S_LEAST:g} at least, or 0 for never"
        )
        yield ("broker", "loop_stuck_s_max"), message


_STUCK_S_LEAST = 0.5


def _room(config: Config) -> Iterator[Finding]:
    """Find streams in which not even one of what they are for has room."""
    streams = config.streams
    body = streams.body_bytes_max
    for name in ("lane_bytes_max", "batch_bytes_max"):
        if getattr(streams, name) < body:
            message = (
                f"a job of body_bytes_max ({body:,} bytes) would never fit; write that at least,"
                " or lower body_bytes_max"
            )
            yield ("streams", name), message
    for path, given in _record_streams(config):
        if given is not None and given < RECORD_BYTES_MIN:
            message = (
                f"a result of {BODY_BYTES_MAX:,} bytes hardly fits, and jobs without room for"
                f" theirs never end; write {RECORD_BYTES_MIN:_} at least"
            )
            yield path, message


def _record_streams(config: Config) -> Iterator[tuple[KeyPath, int | None]]:
    for name in ("results_bytes_max", "dead_letters_bytes_max"):
        yield ("streams", name), getattr(config.streams, name)
        for index, kept in enumerate(config.retention):
            yield ("retention", index, name), getattr(kept, name)
