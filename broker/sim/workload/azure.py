"""Azure's LLM inference traces: arrivals and lengths of two services, without prefixes.

CSV with the header `TIMESTAMP,ContextTokens,GeneratedTokens`. Nothing tells which prompts share a
beginning, so no request has blocks: the trace is for load and lengths, not for caches.

Source: Patel et al., "Splitwise: Efficient Generative LLM Inference Using Phase Splitting", ISCA
2024; data: https://github.com/Azure/AzurePublicDataset (2023), CC-BY-4.0.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from broker.sim.errors import TraceError
from broker.sim.request import Request, Workload
from broker.sim.workload.assembly import UNKNOWN_OUTPUT_MAX, assembled
from broker.sim.workload.trace_file import Line

HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"

BLOCK_TOKENS = 512
"""As in Mooncake's traces; without blocks it stands for nothing."""


def workload(lines: Iterable[Line], path: Path, *, name: str, source: str) -> Workload:
    """Make the workload of the lines, the header first.

    Raises:
        TraceError: a line is no row, or none follows the header.
    """
    requests = [_request(number, line, path) for number, line in lines if line.strip() != HEADER]
    if not requests:
        raise TraceError(path, "is empty: only a header")
    return assembled(requests, name=name, source=source)


def _request(number: int, line: bytes, path: Path) -> Request:
    try:
        timestamp, context, generated = line.decode().split(",")
        at = datetime.fromisoformat(timestamp)
        prompt_tokens, output_tokens = int(context), int(generated)
    except ValueError as error:
        raise TraceError(path, f"no row of {HEADER.decode()}: {error}", line=number) from error
    if prompt_tokens < 1 or output_tokens < 0:
        raise TraceError(path, "lengths are at least 1 and 0 tokens", line=number)
    return Request(
        index=number,
        at_s=(at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp(),
        prompt_tokens=prompt_tokens,
        output_tokens=max(1, output_tokens),
        output_tokens_max=UNKNOWN_OUTPUT_MAX,
        block_tokens=BLOCK_TOKENS,
    )
