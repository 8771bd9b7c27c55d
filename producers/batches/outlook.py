"""The first word on how long a new batch takes, before any of its lines ran."""

import time

from broker.bus.base import BusError
from broker.bus.files import Files
from broker.wire.ids import BATCH_BAND
from producers.batch.lines import Request, parse_line
from producers.batches.forecast import SPREAD_UNKNOWN, Rate, forecast
from producers.batches.lanes import line_cost, mean_cost, shared_work
from producers.batches.lines import Splitter
from producers.batches.records import Batch, Forecast
from producers.batches.survey import model_of
from producers.client import Client

RATE_AGE_S_MAX = 60.0
"""How old the pace may be that a batch of the lane tells; it is told anew each second or so."""

BATCHES_AGE_S_MAX = 86_400.0
"""A batch that ended longer ago says nothing of today's capacity."""


async def outlook(
    batch: Batch, others: list[Batch], client: Client, files: Files
) -> Forecast | None:
    """Forecast a new batch: by its lane's pace as batches tell it, its queue's, or the last's.

    None while neither says anything.
    """
    now_s = time.time()
    open_ = [one for one in others if not one.has_ended and one.id != batch.id]
    cost = mean_cost(map(line_cost, open_))
    lines_s = _told_pace(open_, cost, now_s)
    lines_s = lines_s or client.queue_pace_s(BATCH_BAND, await _first_model(batch, files))
    lines_s = lines_s or pace_of_last(others, batch.endpoint, now_s=now_s)
    return forecast(
        shared_work(batch, open_, cost=cost),
        Rate(lines_s * cost, SPREAD_UNKNOWN) if lines_s else None,
        left_s=batch.deadline_at_s - now_s,
        at_s=now_s,
    )


def _told_pace(open_: list[Batch], cost: float, now_s: float) -> float:
    """Lines of such a cost a second, as the newest forecast of the lane says; 0 without one."""
    told = [
        (one.forecast.at_s, one.forecast.lane_lines_s * (line_cost(one) or cost))
        for one in open_
        if one.forecast and one.forecast.at_s > now_s - RATE_AGE_S_MAX
    ]
    return max(told)[1] / cost if told else 0.0


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


def pace_of_last(others: list[Batch], endpoint: str, *, now_s: float) -> float:
    """Lines a second of the lane while the batch ran that completed last; 0 without one. Pure.

    What ran beside it counts for the part of its time that the two shared.
    """
    ended = [
        one
        for one in others
        if one.endpoint == endpoint and one.completed_at_s > now_s - BATCHES_AGE_S_MAX
    ]
    if not ended:
        return 0.0
    last = max(ended, key=lambda one: one.completed_at_s)
    begin_s, end_s = _ran(last, now_s)
    lines = 0.0
    for one in others:
        began_s, ended_s = _ran(one, now_s)
        both_s = min(end_s, ended_s) - max(begin_s, began_s)
        if one is last or (one.in_progress_at_s and both_s > 0):
            lines += one.counts.ended * both_s / (ended_s - began_s)
    return lines / (end_s - begin_s)


def _ran(batch: Batch, now_s: float) -> tuple[float, float]:
    """From when to when a batch's lines ran."""
    begin_s = batch.in_progress_at_s
    ends_s = (batch.finalizing_at_s, batch.expired_at_s, batch.cancelled_at_s, batch.failed_at_s)
    return begin_s, max(next(filter(None, ends_s), now_s), begin_s + 0.001)
