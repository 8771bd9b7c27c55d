"""Finds a workload by path or name, and tells its format from its content."""

import random
from collections.abc import Mapping
from pathlib import Path

from broker.sim.errors import TraceError
from broker.sim.request import Workload
from broker.sim.workload import azure, mooncake, named, servegen, sessions
from broker.sim.workload.trace_file import Line, read_lines

MOONCAKE = "Mooncake FAST '25 (kvcache-ai/Mooncake 3b5a5941, Apache-2.0)"
AZURE = "Azure 2023, Splitwise ISCA '24 (Azure/AzurePublicDataset b469a113, CC-BY-4.0)"
SERVEGEN = "ServeGen NSDI '26 (alibaba/ServeGen f891d118, Apache-2.0); lengths chosen"
AIPERF = "generated with NVIDIA aiperf 0.13.0, seed 42"

KNOWN = {
    "conversation": ("mooncake/conversation_trace.jsonl", MOONCAKE),
    "synthetic": ("mooncake/synthetic_trace.jsonl", MOONCAKE),
    "azure-code": ("azure/AzureLLMInferenceTrace_code.csv", AZURE),
    "azure-conv": ("azure/AzureLLMInferenceTrace_conv.csv", AZURE),
    "servegen": ("servegen/deepseek-r1", SERVEGEN),
    "agentic": ("agentic-synth/dataset.jsonl", AIPERF),
}
"""Short names of public traces: their place in the traces folder, and their source."""

EXCERPTS = Path(__file__).parent / "excerpts"
EXCERPT_PREFIX = "excerpt:"
EXCERPT_NAMES = ("conversation", "synthetic")
"""What ships with the package: 1,000 rows of each."""


def load(path_or_name: str, *, traces: Path | None = None, seed: int = 1) -> Workload:
    """Return the workload that a name or a path means; the seed decides what is drawn.

    Tried in this order: `generated:NAME?key=value&…`, `excerpt:NAME`, a short name of a public
    trace in the `traces` folder (INFERLANE_TRACES), a path, a path in that folder. `servegen` (name
    or folder) takes `?start_h=…&hours=…`.

    Raises:
        TraceError: nothing is there, or it is no trace; says which line, and what to do.
    """
    rng = random.Random(seed)
    if path_or_name.startswith(named.PREFIX):
        return named.generate(path_or_name.removeprefix(named.PREFIX), rng)
    if path_or_name.startswith(EXCERPT_PREFIX):
        return _excerpt(path_or_name.removeprefix(EXCERPT_PREFIX))
    name, values = named.split(path_or_name)
    path, source = _found(name, traces)
    if path.is_dir():
        shown = name if name in KNOWN else _text(path.name)
        return _folder(path, name=shown, source=source, rng=rng, values=values)
    if values:
        raise TraceError(path_or_name, "a trace file takes no parameters")
    shown = name if name in KNOWN else _text(path.name).split(".")[0]
    return _file(path, name=shown, source=source)


def files(path_or_name: str, *, traces: Path | None = None) -> list[Path]:
    """Return the files that `load` reads; none for what is generated, or ships with the package.

    Raises:
        TraceError: nothing is there.
    """
    if path_or_name.startswith((named.PREFIX, EXCERPT_PREFIX)):
        return []
    path, _ = _found(named.split(path_or_name)[0], traces)
    return [chunk for _, chunk in servegen.chunks(path)] if path.is_dir() else [path]


def _text(name: str) -> str:
    """Return a file's name as text, whatever bytes it has."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def _excerpt(name: str) -> Workload:
    if name not in EXCERPT_NAMES:
        raise TraceError(EXCERPT_PREFIX + name, f"known: {', '.join(EXCERPT_NAMES)}")
    path = EXCERPTS / f"{name}.jsonl.zst"
    return _file(path, name=f"{name}-excerpt", source=f"{MOONCAKE}, 1,000 rows")


def _found(name: str, traces: Path | None) -> tuple[Path, str]:
    """Return where it is, and its source; a short name goes before a file of that name."""
    relative, source = KNOWN.get(name, (name, ""))
    if name in KNOWN and traces is None:
        raise TraceError(name, f"set INFERLANE_TRACES to the folder that holds {relative}")
    places = [] if name in KNOWN else [Path(relative)]
    if traces is not None:
        places.append(traces / relative)
    for place in places:
        if _exists(place):
            return place, source or _text(str(place))
    looked = " nor ".join(str(place) for place in places)
    raise TraceError(name, f"no such trace: not {looked}; {_names()}")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # A name too long for a file, a folder that may not be entered.
        return False


def _names() -> str:
    excerpts = ", ".join(EXCERPT_PREFIX + name for name in EXCERPT_NAMES)
    return f"names: {', '.join(KNOWN)}, {excerpts}, {named.PREFIX}{{{','.join(named.GENERATED)}}}"


def _folder(
    path: Path, *, name: str, source: str, rng: random.Random, values: Mapping[str, str]
) -> Workload:
    if not servegen.chunks(path):
        raise TraceError(path, "is a folder without chunk-N-trace.csv: name a trace file in it")
    chosen = named.parameters(servegen.workload, values, where=str(path))
    return servegen.workload(path, name=name, source=source, rng=rng, **chosen)


def _file(path: Path, *, name: str, source: str) -> Workload:
    lines = read_lines(path)
    number, first = lines[0]
    if first.strip() == azure.HEADER:
        return azure.workload(lines, path, name=name, source=source)
    if first.lstrip().startswith(b"{"):
        return _json(lines, path, name=name, source=source)
    raise TraceError(
        path,
        "not a trace: expected JSON lines with timestamp, input_length, output_length, hash_ids, "
        f"or a CSV with the header {azure.HEADER.decode()}",
        line=number,
    )


def _json(lines: list[Line], path: Path, *, name: str, source: str) -> Workload:
    rows = mooncake.rows(lines, path)
    if any(row.delay is not None for _, row in rows):
        return sessions.workload(rows, path, name=name, source=source)
    return mooncake.workload(rows, path, name=name, source=source)
