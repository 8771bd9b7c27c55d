"""What `doctor` makes of batches that the cluster runs, and of their files: pure."""

from collections.abc import Iterator, Sequence

from broker.bus.base import StreamSpec
from broker.wire import subjects
from ops.cli.doctor_facts import Facts, StreamFact, wanted_streams
from ops.cli.doctor_findings import Finding, fail, ok, warn
from ops.cli.doctor_room import RoomRule, judge_room
from ops.cli.output import duration, size
from producers.batches.census import is_late, is_untaken
from producers.batches.hold import is_free
from producers.batches.records import Batch

SCARCE_RATIO, FULL_RATIO = 0.85, 0.97
"""Of a lane's files: a full lane takes no upload, and its running batches can't store results."""


def batches(facts: Facts) -> Iterator[Finding]:
    """Judge whether batches are run, and end when they must."""
    now_s = facts.seen_at_s
    open_ = [batch for batch in facts.batches if not batch.has_ended]
    untaken = [batch for batch in open_ if is_untaken(batch, now_s=now_s)]
    late = [batch for batch in open_ if is_late(batch, now_s=now_s)]
    if untaken:
        running = sum(not is_free(batch, now_s=now_s) for batch in open_)
        yield _untaken(untaken, running, now_s)
    for batch in late:
        over = duration(now_s - batch.deadline_at_s)
        found = f"{_named(batch)} is {batch.status.value} {over} after the end of its window"
        if batch.lease is not None and not is_free(batch, now_s=now_s):
            to_do = (
                f"the log of the gateway that runs it ({batch.lease.runner}) says why "
                "(batches.files_full, batches.run_failed)"
            )
        else:
            to_do = "a gateway that runs it closes its lines: start `inferlane gateway`"
        yield fail("batches", found, to_do)
    if facts.batches and not untaken and not late:
        yield ok("batches", f"{len(open_):,} of {len(facts.batches):,} under way, each is run")


def _untaken(untaken: Sequence[Batch], running: int, now_s: float) -> Finding:
    oldest = min(untaken, key=lambda batch: batch.created_at_s)
    waits = duration(now_s - oldest.created_at_s)
    found = f"nobody runs {_many(untaken)}; {_named(oldest)} waits since {waits}"
    if running:
        to_do = (
            f"{running:,} others are run: raise gateway.batches.batches_running_max, or start "
            "another `inferlane gateway`"
        )
        return warn("batches", found, to_do)
    to_do = (
        "no gateway runs batches: start `inferlane gateway --config FILE` with "
        "gateway.batches.batches_running_max above 0"
    )
    return fail("batches", found, to_do)


def files(facts: Facts) -> Iterator[Finding]:
    """Judge whether each lane has room for uploads and results."""
    rule = RoomRule(
        kind=subjects.files_stream(""),
        about="files",
        scarce_ratio=SCARCE_RATIO,
        full_ratio=FULL_RATIO,
        soon="soon lane {lane} can store no results of batches",
        now="batches of lane {lane} wait for room",
        to_do=(
            "raise streams.files_bytes_max, or delete files (DELETE /v1/files/ID, or inferlane "
            "erase --lane {lane} --only files --older 7d)"
        ),
    )
    yield from judge_room(facts, rule)


def is_smaller(spec: StreamSpec, stream: StreamFact) -> bool:
    """Say whether a stream that may be smaller than wanted is so."""
    bytes_max = int(stream.config.get("max_bytes", 0))
    return 0 < spec.max_bytes_least <= bytes_max < spec.max_bytes


def smaller_files(facts: Facts) -> Iterator[Finding]:
    """Tell where the server had no room for all that a lane's files may take."""
    if facts.config is None:
        return  # What is wanted is not known.
    for spec in wanted_streams(facts):
        stream = facts.streams.get(spec.name)
        if stream is None or not is_smaller(spec, stream):
            continue
        given = int(stream.config.get("max_bytes", 0))
        found = (
            f"{spec.name} may hold {size(given)} of the {size(spec.max_bytes)} configured: the "
            "server had no room for more; a larger upload is refused"
        )
        to_do = (
            "raise `max_file` of the server (or give it a larger disk) and start the broker again, "
            "or lower streams.files_bytes_max"
        )
        yield warn("files", found, to_do)


def _named(batch: Batch) -> str:
    return f"{batch.lane}.{batch.id}"


def _many(found: Sequence[Batch]) -> str:
    return "a batch" if len(found) == 1 else f"{len(found):,} batches"
