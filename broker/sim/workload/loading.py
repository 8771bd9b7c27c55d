"""Finds a workload by path or name, and tells its format from its content."""

from pathlib import Path

from broker.sim.errors import TraceError
from broker.sim.request import Workload
from broker.sim.workload import mooncake
from broker.sim.workload.trace_file import read_lines

MOONCAKE = "Mooncake FAST '25 (kvcache-ai/Mooncake 3b5a5941, Apache-2.0)"

KNOWN = {
    "conversation": ("mooncake/conversation_trace.jsonl", MOONCAKE),
    "synthetic": ("mooncake/synthetic_trace.jsonl", MOONCAKE),
}
"""Short names of public traces: their place in the traces folder, and their source."""


def load(path_or_name: str, *, traces: Path | None = None) -> Workload:
    """Return the workload that a short name, a path, or a path in the `traces` folder names.

    A short name goes before a file of the same name: write `./conversation` for that.

    Raises:
        TraceError: nothing is there, or it is no trace; says which line, and what to do.
    """
    relative, source = KNOWN.get(path_or_name, (path_or_name, ""))
    path = _found(path_or_name, relative, traces)
    name = path_or_name if path_or_name in KNOWN else path.name.split(".")[0]
    return _read(path, name=name, source=source or str(path))


def _found(path_or_name: str, relative: str, traces: Path | None) -> Path:
    places = [] if path_or_name in KNOWN else [Path(relative)]
    if traces is not None:
        places.append(traces / relative)
    for place in places:
        if place.exists():
            return place
    if path_or_name in KNOWN and traces is None:
        raise TraceError(path_or_name, f"set INFERLANE_TRACES to the folder that holds {relative}")
    looked = " nor ".join(str(place) for place in places)
    raise TraceError(path_or_name, f"no such trace: not {looked}; known names: {', '.join(KNOWN)}")


def _read(path: Path, *, name: str, source: str) -> Workload:
    lines = read_lines(path)
    number, first = lines[0]
    if first.lstrip().startswith(b"{"):
        return mooncake.workload(mooncake.rows(lines, path), path, name=name, source=source)
    raise TraceError(
        path,
        "not a trace: expected JSON lines with timestamp, input_length, output_length, hash_ids",
        line=number,
    )
