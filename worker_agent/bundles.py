"""Tokens that come within one turn of the loop leave together: one message for each caller.

An engine decodes its whole batch in one step, so the tokens of all streams come at once, and a
gateway asked for most of them. A message for each costs the agent, the server and the gateway more
than the tokens themselves. First tokens go in front: somebody waits for them, while later ones are
read at leisure.
"""

import asyncio
from collections.abc import Awaitable, Callable

from broker.wire import codec, subjects
from broker.wire.messages import Bundle, Job, Tokens

BUNDLE_BYTES_MAX = 16 * 1024
"""Most that is put together: some 60 usual tokens, a few milliseconds of work for their reader,
who has other things to do in between."""

OVERHEAD_BYTES = 96
"""Of a piece beside its data: names of fields, a job's id, numbers."""

_Caller = tuple[str, str]
"""Lane and client."""

Send = Callable[[str, bytes], Awaitable[None]]
"""Publishes; raises nothing."""


class Bundles:
    """What waits for the end of this turn."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: dict[_Caller, list[Tokens]] = {}
        self._is_awaited = False
        """Somebody sends all of it once this turn is over."""

    async def add(self, job: Job, tokens: Tokens) -> None:
        """Take a piece. The first one of a turn waits for the turn's end, and sends for all."""
        pieces = self._waiting.setdefault((job.lane, job.client), [])
        # A job's first token has none of its own before it.
        pieces.insert(len(pieces) if tokens.index else 0, tokens)
        if self._is_awaited:
            return
        self._is_awaited = True
        try:
            await asyncio.sleep(0)
        finally:
            await self.flush()

    async def flush(self) -> None:
        """Send what waits: before anything that may not overtake it."""
        self._is_awaited = False
        waiting, self._waiting = self._waiting, {}
        for (lane, client), pieces in waiting.items():
            for group in _cut(pieces):
                if len(group) == 1:
                    (tokens,) = group
                    await self._send(subjects.out(lane, client, tokens.job), codec.encode(tokens))
                else:
                    bundle = Bundle(tokens=tuple(group))
                    await self._send(subjects.out_bundles(lane, client), codec.encode(bundle))


def _cut(pieces: list[Tokens]) -> list[list[Tokens]]:
    """Put pieces into groups of at most BUNDLE_BYTES_MAX; a larger piece stands alone."""
    groups: list[list[Tokens]] = []
    room_bytes = 0
    for tokens in pieces:
        size = len(tokens.data) + OVERHEAD_BYTES
        if size > room_bytes:
            groups.append([])
            room_bytes = BUNDLE_BYTES_MAX
        groups[-1].append(tokens)
        room_bytes -= size
    return groups
