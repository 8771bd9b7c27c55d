"""`inferlane ab`: the demo under two policies, alternated, side by side."""

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import cyclopts
import orjson
from cyclopts import Parameter

from ops.cli.demo import EngineChoice, PolicyChoice, run_once, went_well

app = cyclopts.App(name="ab", help="Run the demo under two policies in turn and compare them.")

MEASURES = (
    ("cached-token share", "cached_token_ratio", ""),
    ("TTFT p50 (ms)", "ttft_s", "p50"),
    ("TTFT p99 (ms)", "ttft_s", "p99"),
    ("spread of utilisation between workers", "utilisation_std", ""),
    ("throughput (tokens/s)", "throughput_tokens_s", ""),
    ("queue wait p50 (ms)", "queue_s", "p50"),
    ("queue wait p99 (ms)", "queue_s", "p99"),
)


@app.default
def ab(
    *,
    engine: Annotated[EngineChoice, Parameter(help="Engines of the four workers.")] = "llama",
    policies: Annotated[
        tuple[PolicyChoice, PolicyChoice], Parameter(help="The two to compare.")
    ] = ("round_robin", "first_token"),
    rounds: Annotated[int, Parameter(help="How often each runs, in turn.")] = 3,
    report: Annotated[Path | None, Parameter(help="Write all figures to this JSON file.")] = None,
) -> None:
    """Run the same load under both policies in turn, and print the medians side by side.

    In turn, because a busy machine would otherwise be taken for a worse policy.
    """
    from rich.console import Console
    from rich.table import Table

    place = Path(tempfile.mkdtemp(prefix="inferlane-ab-"))
    runs: dict[str, list[dict[str, Any]]] = {policy: [] for policy in policies}
    for number in range(rounds):
        for policy in policies:
            folder = place / f"{number + 1}-{policy}"
            runs[policy].append(run_once(folder, engine=engine, policy=policy))
    table = Table("measure (median of runs)", *policies, "ratio", title=f"{engine} engines")
    for name, *path in MEASURES:
        values = [_median(runs[policy], path) for policy in policies]
        scale = 1000 if "(ms)" in name else 1
        ratio = f"{values[1] / values[0]:.2f}" if values[0] else "-"
        table.add_row(name, *(f"{value * scale:.3g}" for value in values), ratio)
    Console().print(table)
    if report is not None:
        report.write_bytes(orjson.dumps(runs, option=orjson.OPT_INDENT_2) + b"\n")
    sys.exit(0 if all(went_well(run) for group in runs.values() for run in group) else 1)


def _median(runs: Sequence[Mapping[str, Any]], path: Sequence[str]) -> float:
    return statistics.median(_value(run, path) for run in runs)


def _value(run: Mapping[str, Any], path: Sequence[str]) -> float:
    name, part = path
    return run[name][part] if part else run[name]
