"""Sums up what became of replayed jobs: by lane and band, and in all; and how two views differ."""

from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct

from broker.sim.figures import Spread, spread

NOTICEABLE = 0.05
"""Change of a lane's mean TTFT that counts as gain or loss: less is drawn by chance."""

REFUSED_NOTICEABLE = 0.005
"""Change of the share of jobs without an answer that counts, whatever the others' TTFT."""


class Ending(Struct, frozen=True, kw_only=True, order=True):
    """How a job ended that got no answer."""

    kind: str
    reason: str = ""
    row: str = ""
    """The quota row, or lane, that refused it."""


class Seen(Struct, frozen=True, kw_only=True):
    """What became of one job in one view."""

    lane: str
    band: int
    came_s: float
    ended_s: float
    ttft_s: float | None
    queue_s: float | None
    """Until it was first given to a worker; None: it never was."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ending: Ending | None
    """None: it was answered."""


class GroupFigures(Struct, frozen=True, kw_only=True):
    """Jobs in one view."""

    jobs: int
    answered: int
    ttft_s: Spread
    queue_s: Spread
    cached_token_ratio: float
    throughput_tokens_s: float
    """Prompt and output tokens of what was answered ÷ the view's span."""
    unanswered_ratio: float


class EndingCount(Struct, frozen=True, kw_only=True):
    """Jobs that ended in one way, in each view."""

    ending: Ending
    logged: int
    as_it_ran: int
    changed: int


class Row(Struct, frozen=True, kw_only=True):
    """A lane's band, or all of them, in each view."""

    lane: str
    band: int | None
    """None: all lanes and bands."""
    logged: GroupFigures
    as_it_ran: GroupFigures
    changed: GroupFigures
    verdict: str
    """`gains`, `loses` or `same`: the change against the simulation as it ran."""


class Views(Struct, frozen=True, kw_only=True):
    """The three views of the same traffic."""

    logged: Sequence[Seen]
    as_it_ran: Sequence[Seen]
    changed: Sequence[Seen]


def rows(views: Views) -> list[Row]:
    """Return all together first, then each lane's bands, by name."""
    everyone = (views.logged, views.as_it_ran, views.changed)
    spans_s = [_span_s(each) for each in everyone]
    groups = sorted({(one.lane, one.band) for each in everyone for one in each})
    found = [_row("all", None, everyone, spans_s)]
    for lane, band in groups:
        parts = [[one for one in each if (one.lane, one.band) == (lane, band)] for each in everyone]
        found.append(_row(lane, band, parts, spans_s))
    return found


def endings(views: Views) -> list[EndingCount]:
    """Count the jobs without an answer, by kind, reason and row."""
    logged, as_it_ran, changed = (
        Counter(one.ending for one in each if one.ending is not None)
        for each in (views.logged, views.as_it_ran, views.changed)
    )
    return [
        EndingCount(
            ending=ending,
            logged=logged[ending],
            as_it_ran=as_it_ran[ending],
            changed=changed[ending],
        )
        for ending in sorted({*logged, *as_it_ran, *changed})
    ]


def figures(seen: Iterable[Seen], *, span_s: float) -> GroupFigures:
    """Sum jobs up; all 0 of nothing."""
    jobs = list(seen)
    answered = [one for one in jobs if one.ending is None]
    prompt_tokens = sum(one.prompt_tokens for one in answered)
    tokens = prompt_tokens + sum(one.output_tokens for one in answered)
    return GroupFigures(
        jobs=len(jobs),
        answered=len(answered),
        ttft_s=spread(one.ttft_s for one in answered if one.ttft_s is not None),
        queue_s=spread(one.queue_s for one in answered if one.queue_s is not None),
        cached_token_ratio=_ratio(sum(one.cached_tokens for one in answered), prompt_tokens),
        throughput_tokens_s=_ratio(tokens, span_s),
        unanswered_ratio=_ratio(len(jobs) - len(answered), len(jobs)),
    )


def change(before: float, after: float) -> float:
    """Return how much larger the second is, as a share of the first; 0 where there is no first."""
    return after / before - 1 if before else 0.0


def _row(
    lane: str, band: int | None, views: Sequence[Sequence[Seen]], spans_s: Sequence[float]
) -> Row:
    logged, as_it_ran, changed = (
        figures(each, span_s=span_s) for each, span_s in zip(views, spans_s, strict=True)
    )
    return Row(
        lane=lane,
        band=band,
        logged=logged,
        as_it_ran=as_it_ran,
        changed=changed,
        verdict=_verdict(as_it_ran, changed),
    )


def _verdict(before: GroupFigures, after: GroupFigures) -> str:
    more_unanswered = after.unanswered_ratio - before.unanswered_ratio
    if abs(more_unanswered) > REFUSED_NOTICEABLE:
        return "loses" if more_unanswered > 0 else "gains"
    ttft = change(before.ttft_s.mean, after.ttft_s.mean)
    if abs(ttft) <= NOTICEABLE:
        return "same"
    return "loses" if ttft > 0 else "gains"


def _span_s(seen: Sequence[Seen]) -> float:
    came_s = min((one.came_s for one in seen), default=0.0)
    return max((one.ended_s for one in seen), default=0.0) - came_s


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
