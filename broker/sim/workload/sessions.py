"""Agents' sessions: each turn says only what is new, and comes some time after the turn before.

JSON lines of Mooncake's keys, in which a session's first row has a `timestamp` (ms) and each later
one a `delay` (ms after the end of the turn before). A later row's `input_length` is an increment:
its prompt is all that was said before, answers included, and then the increment.

A history only grows, and is its session's own: so each whole block beyond the first turn's gets an
id of its own, once, and all later turns of the session share it. The increments' own `hash_ids`
are not used: they are counted from the increment's beginning, which is no block's.

Source of the format: NVIDIA aiperf 0.13.0 (agentic trace synthesis).
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path

from broker.sim.errors import TraceError
from broker.sim.request import Request, Workload
from broker.sim.workload.assembly import MS_PER_S, output_limit
from broker.sim.workload.mooncake import ID_BITS, NumberedRow, Row


def workload(numbered: Sequence[NumberedRow], path: Path, *, name: str, source: str) -> Workload:
    """Make the workload: sessions in the order of their starts, the turns of each together.

    Raises:
        TraceError: a session doesn't start with a timestamp, or a later turn has no delay.
    """
    sessions = _sessions(numbered, path)
    fresh = _fresh_ids(numbered)
    limit = output_limit(max(1, *(row.output_length for _, row in numbered)))
    requests: list[Request] = []
    for turns in sessions:
        requests.extend(_turns(turns, first_index=len(requests), fresh=fresh, limit=limit))
    return Workload(name=name, source=source, requests=requests)


def _fresh_ids(numbered: Sequence[NumberedRow]) -> Iterator[int]:
    """Yield ids that no row has: beyond the largest, or between those where it has the last bit."""
    largest = max((max(row.hash_ids, default=0) for _, row in numbered), default=0)
    if not largest >> (ID_BITS - 1):
        return count(1 + largest)
    taken = {block for _, row in numbered for block in row.hash_ids}
    return (block for block in count(1) if block not in taken)


def _sessions(numbered: Iterable[NumberedRow], path: Path) -> list[list[Row]]:
    by_id: dict[str, list[Row]] = {}
    for number, row in numbered:
        turns = by_id.setdefault(row.session_id, [])
        if (row.delay if turns else row.timestamp) is None:
            missing = "`delay`" if turns else "`timestamp`"
            raise TraceError(
                path, f"turn {len(turns)} of its session has no {missing}", line=number
            )
        turns.append(row)
    return sorted(by_id.values(), key=_start_ms)


def _start_ms(turns: Sequence[Row]) -> float:
    return turns[0].timestamp or 0.0


def _turns(
    turns: Sequence[Row], *, first_index: int, fresh: Iterator[int], limit: int
) -> Iterator[Request]:
    history_tokens = 0
    blocks = turns[0].whole_blocks
    for turn, row in enumerate(turns):
        prompt_tokens = history_tokens + row.input_length
        output_tokens = max(1, row.output_length)
        grown = prompt_tokens // row.block_tokens - len(blocks)
        blocks = (*blocks, *islice(fresh, max(0, grown)))
        yield Request(
            index=first_index + turn,
            at_s=((row.delay if turn else row.timestamp) or 0.0) / MS_PER_S,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            output_tokens_max=row.output_tokens_max or limit,
            blocks=blocks,
            block_tokens=row.block_tokens,
            lane=row.lane,
            band=row.band,
            session=row.session_id,
            after=first_index + turn - 1 if turn else None,
        )
        history_tokens = prompt_tokens + output_tokens
