"""Traces in JSON lines of Mooncake's shape, and our own format, which is that shape and more.

One JSON object a line, no header; unknown keys are ignored. As Mooncake publishes it:

- `timestamp`: arrival in ms; the earliest of the file becomes 0, lines may be in any order.
- `input_length`, `output_length`: tokens; an output of 0 counts as 1 (a request yields a token).
- `hash_ids`: one id per block of the prompt, chained: an equal id is an equal whole prefix. Only
  whole blocks can be cached, so a last, partial one is dropped. Absent or short: nothing known.
  Ids have 64 bits.

What our own format adds, each optional; `inferlane decisions trace` writes it:

- `block_tokens`: tokens per id (512).
- `output_tokens_max`: the sender's limit; else one for the whole trace, see `assembly`.
- `lane` ("main"), `band` (1), `session_id` (""): who asked, how urgently, in which conversation.
  A row with a session carries its whole prompt, history included.
- `model` (none): what was asked. All rows have the same, for a simulated fleet serves one model.

Source: Mooncake, FAST '25, https://github.com/kvcache-ai/Mooncake (FAST25-release/traces).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from broker.sim.errors import TraceError
from broker.sim.request import Request, Workload
from broker.sim.workload.assembly import MS_PER_S, UNKNOWN_OUTPUT_MAX, assembled
from broker.sim.workload.trace_file import Line
from broker.wire.ids import BANDS

BLOCK_TOKENS = 512
"""Tokens that one of Mooncake's ids stands for."""

NonNegative = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Band = Annotated[int, Meta(ge=BANDS[0], le=BANDS[-1])]
ID_BITS = 64
"""Of a block's id, as of the hashes that the mind counts with."""
Milliseconds = Annotated[float, Meta(ge=0)]


class Row(Struct, frozen=True, kw_only=True):
    """One line as it stands in the file."""

    timestamp: Milliseconds | None = None
    delay: Milliseconds | None = None
    """Only in session traces, see `sessions`: ms after the end of the turn before."""
    input_length: Positive
    output_length: NonNegative
    hash_ids: tuple[NonNegative, ...] = ()
    model: str | None = None
    lane: str = "main"
    band: Band = 1
    session_id: str = ""
    block_tokens: Positive = BLOCK_TOKENS
    output_tokens_max: Positive | None = None

    @property
    def whole_blocks(self) -> tuple[int, ...]:
        """Ids of the blocks that the prompt fills."""
        return self.hash_ids[: self.input_length // self.block_tokens]


NumberedRow = tuple[int, Row]
"""A row and its line's number."""


def rows(lines: Iterable[Line], path: Path) -> list[NumberedRow]:
    """Decode every line.

    Raises:
        TraceError: a line is no such row.
    """
    decoder = msgspec.json.Decoder(Row)
    found: list[NumberedRow] = []
    for number, line in lines:
        try:
            row = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(path, f"no row of a trace: {error}", line=number) from error
        if max(row.hash_ids, default=0) >> ID_BITS:
            raise TraceError(path, f"`hash_ids` have more than {ID_BITS} bits", line=number)
        found.append((number, row))
    return found


def workload(numbered: Iterable[NumberedRow], path: Path, *, name: str, source: str) -> Workload:
    """Make the workload of rows that each carry a whole prompt.

    Raises:
        TraceError: a row has no timestamp, or another model than those before it.
    """
    numbered = list(numbered)
    _require_one_model(numbered, path)
    requests = [_request(number, row, path) for number, row in numbered]
    return assembled(requests, name=name, source=source)


def _require_one_model(numbered: Iterable[NumberedRow], path: Path) -> None:
    first: str | None = None
    for number, row in numbered:
        first = first or row.model
        if row.model and row.model != first:
            problem = (
                f"of model {row.model}, after others of {first}: a simulated fleet serves one "
                f"model; make a trace of one with `inferlane decisions trace --model {first}`"
            )
            raise TraceError(path, problem, line=number)


def _request(number: int, row: Row, path: Path) -> Request:
    if row.timestamp is None:
        raise TraceError(path, "no `timestamp` (ms)", line=number)
    return Request(
        index=number,
        at_s=row.timestamp / MS_PER_S,
        prompt_tokens=row.input_length,
        output_tokens=max(1, row.output_length),
        output_tokens_max=row.output_tokens_max or UNKNOWN_OUTPUT_MAX,
        blocks=row.whole_blocks,
        block_tokens=row.block_tokens,
        lane=row.lane,
        band=row.band,
        session=row.session_id,
    )
