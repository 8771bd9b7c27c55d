"""The first word on how long a new batch takes, before any of its lines ran."""

import time
from collections.abc import Iterable

from broker.bus.base import BusError
from broker.bus.files import Files
from broker.wire.ids import BATCH_BAND
from producers.batch.lines import Request, parse_line
from producers.batches.census import is_untaken
from producers.batches.forecast import SPREAD_UNKNOWN, forecast
from producers.batches.lines import Splitter
from producers.batches.records import Batch, Forecast
from producers.batches.survey import model_of
from producers.client import Client

BROKER_WINDOW_JOBS = 512
"""Jobs of a batch queue among which a broker chooses (`window_batch_jobs`, as it ships)."""

BATCHES_AGE_S_MAX = 86_400.0
"""A batch that ended longer ago says nothing of today's capacity."""


async def outlook(
    batch: Batch, others: list[Batch], client: Client, files: Files
) -> Forecast | None:
    """Forecast a new batch: by its lane's queue, else by the last batch that ended here.

    None while neither says anything.
    """
    now_s = time.time()
    lines_s = client.queue_pace_s(BATCH_BAND, await _first_model(batch, files))
    lines_s = lines_s or _pace_of_last(others, batch.endpoint, now_s)
    return forecast(
        left_lines=batch.lines + lines_before(batch, others, now_s=now_s),
        lines_s=lines_s,
        spread=SPREAD_UNKNOWN,
        left_s=batch.deadline_at_s - now_s,
        at_s=now_s,
    )


def lines_before(batch: Batch, others: Iterable[Batch], *, now_s: float) -> int:
    """Lines of a lane's other batches that end before a new one's do. Pure.

    Lines wait in order of their deadlines, so a batch whose window ends first is run first, whole,
    and one whose window ends later stands back, but for those of its jobs that a broker's window
    has no room for: they stand in the stream before the new ones. And one that waits for a runner
    to have room is taken up first in any case.
    """
    before = 0
    for one in others:
        if one.has_ended or one.id == batch.id:
            continue
        if one.deadline_at_s <= batch.deadline_at_s or is_untaken(one, now_s=now_s):
            before += _left(one)
        else:
            before += max(one.place.jobs_inflight - BROKER_WINDOW_JOBS, 0)
    return before


def _left(batch: Batch) -> int:
    return max((batch.counts.total or batch.lines) - batch.counts.ended, 0)


async def _first_model(batch: Batch, files: Files) -> str:
    """Model of the input's first line; empty when that can't be told."""
    splitter = Splitter()
    try:
        async for chunk in files.chunks(batch.input_file_id):
            for line in splitter.feed(chunk.data):
                parsed = parse_line(line.text, line.number, endpoint=batch.endpoint)
                return model_of(parsed.body) if isinstance(parsed, Request) else ""
            break
    except BusError:
        pass
    return ""


def _pace_of_last(others: list[Batch], endpoint: str, now_s: float) -> float:
    """Lines a second of the batch that completed last; 0 without one."""
    ended = [
        one
        for one in others
        if one.endpoint == endpoint and one.completed_at_s > now_s - BATCHES_AGE_S_MAX
    ]
    if not ended:
        return 0.0
    last = max(ended, key=lambda one: one.completed_at_s)
    return last.counts.total / max(last.finalizing_at_s - last.in_progress_at_s, 0.001)
