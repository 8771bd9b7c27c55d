"""What batches and files there are in the whole cluster, by lane: for metrics and for `doctor`."""

from collections.abc import Iterable
from dataclasses import dataclass

from broker.bus.base import Bus, NoStream, NotFound, StreamState
from broker.wire import subjects
from producers.batches.hold import is_free
from producers.batches.records import Batch
from producers.batches.shelf import all_batches
from producers.door import lanes_of

UNTAKEN_S = 30.0
"""A gateway with room takes a free batch within its `scan_s` (5 s), one whose runner died within
`lease_s` more (15 s): beyond, none has room, or none is there."""

LATE_S = 120.0
"""What a batch may take to end after its window: `grace_s` (10 s), a runner's death, the writing of
its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneCensus:
    """One lane's batches that have not ended, and its files."""

    open: int = 0
    untaken: int = 0
    """Of these, those that nobody runs though they wait for more than UNTAKEN_S."""
    late: int = 0
    """Those that should have ended: their window was over LATE_S ago."""
    oldest_s: float = 0.0
    """Age of the oldest; 0 without one."""
    files_bytes: int = 0
    files_bytes_max: int = 0
    """0: no bound, or not known."""


NOBODY = LaneCensus()


async def take_census(bus: Bus, *, now_s: float) -> dict[str, LaneCensus]:
    """Look at all lanes' batches and files. Raises BusError."""
    batches = await all_batches(bus)
    lanes = {*await lanes_of(bus), *(batch.lane for batch in batches)}
    found: dict[str, LaneCensus] = {}
    for lane in sorted(lanes):
        try:
            files = await bus.stream_state(subjects.files_stream(lane))
        except (NoStream, NotFound):
            files = None  # A lane that may not batch.
        of_lane = [batch for batch in batches if batch.lane == lane]
        found[lane] = lane_census(of_lane, files, now_s=now_s)
    return found


def lane_census(batches: Iterable[Batch], files: StreamState | None, *, now_s: float) -> LaneCensus:
    """Count one lane's. Pure."""
    open_ = [batch for batch in batches if not batch.has_ended]
    return LaneCensus(
        open=len(open_),
        untaken=sum(is_untaken(batch, now_s=now_s) for batch in open_),
        late=sum(is_late(batch, now_s=now_s) for batch in open_),
        oldest_s=max((now_s - batch.created_at_s for batch in open_), default=0.0),
        files_bytes=files.bytes if files else 0,
        files_bytes_max=files.bytes_max if files else 0,
    )


def is_untaken(batch: Batch, *, now_s: float) -> bool:
    """Say whether nobody runs a batch, and nobody will soon.

    A runner that ends in good order leaves a batch that looks so until the next one takes it, which
    is a matter of seconds.
    """
    free_since_s = batch.lease.until_s if batch.lease else batch.created_at_s
    return is_free(batch, now_s=now_s) and now_s > max(free_since_s, batch.created_at_s) + UNTAKEN_S


def is_late(batch: Batch, *, now_s: float) -> bool:
    """Say whether a batch should have ended."""
    return not batch.has_ended and now_s > batch.deadline_at_s + LATE_S
