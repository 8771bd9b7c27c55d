"""Azure's traces: arrivals and lengths."""

import os
from pathlib import Path

import pytest

from broker.sim.errors import TraceError
from broker.sim.workload.loading import load

CODE = "azure/AzureLLMInferenceTrace_code.csv"
CONVERSATION = "azure/AzureLLMInferenceTrace_conv.csv"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def a_file(folder: Path, *rows: str) -> str:
    """Write a trace, and return its path."""
    path = folder / "azure.csv"
    path.write_text("\r\n".join((HEADER, *rows)))
    return str(path)


def test_rows_become_requests_without_prefix(tmp_path: Path) -> None:
    """Arrivals count from the first; a length of output is at least 1; no blocks."""
    rows = ("2023-11-16 18:17:04.5000000,3180,0", "2023-11-16 18:17:03.2500000,4808,10")
    first, second = load(a_file(tmp_path, *rows)).requests
    assert (first.at_s, first.prompt_tokens, first.output_tokens) == (0.0, 4808, 10)
    assert (second.prompt_tokens, second.output_tokens, second.blocks) == (3180, 1, ())
    assert second.at_s == pytest.approx(1.25)
    assert first.output_tokens_max == second.output_tokens_max == 16


@pytest.mark.parametrize(
    "row",
    ["yesterday,1,1", "2023-11-16 18:17:03,1", "2023-11-16 18:17:03,x,1", "\xff,1,1"],
)
def test_garbage_row_is_named(tmp_path: Path, *, row: str) -> None:
    """The error names file and line."""
    path = a_file(tmp_path, "2023-11-16 18:17:03,1,1", row)
    with pytest.raises(TraceError, match="no row") as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:3: ")


@pytest.mark.parametrize("lengths", ["0,1", "-4,1", "4,-1"])
def test_impossible_length_is_named(tmp_path: Path, *, lengths: str) -> None:
    """A prompt has at least one token, an output no fewer than none."""
    with pytest.raises(TraceError, match="lengths"):
        load(a_file(tmp_path, f"2023-11-16 18:17:03,{lengths}"))


def test_header_alone_is_empty(tmp_path: Path) -> None:
    """A file without rows is no workload."""
    with pytest.raises(TraceError, match="only a header"):
        load(a_file(tmp_path))


@pytest.mark.trace(CODE)
@pytest.mark.trace(CONVERSATION)
@pytest.mark.parametrize(
    ("name", "rows", "output_tokens_max"),
    [("azure-code", 8_819, 2048), ("azure-conv", 19_366, 1024)],
)
def test_published_traces(*, name: str, rows: int, output_tokens_max: int) -> None:
    """Both have their published number of rows, over somewhat less than an hour."""
    traces = Path(os.environ.get("INFERLANE_TRACES", "traces"))
    requests = load(name, traces=traces).requests
    assert len(requests) == rows
    assert 3400 < requests[-1].at_s < 3600
    assert requests[0].output_tokens_max == output_tokens_max
