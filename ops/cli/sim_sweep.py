"""`inferlane sim sweep`: ours under other values of its knobs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ops.cli.errors import Misused
from ops.cli.sim_point import Jobs, Point, Seeds, told

if TYPE_CHECKING:
    from broker.sim.knobs import Knobs
    from broker.sim.report import Entry
    from broker.sim.request import Workload
    from broker.sim.runs import Setting


def sweep(
    *,
    knob: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    policy: str = "first_token",
    seeds: Seeds = 3,
    jobs: Jobs = 2,
    report: Path | None = None,
    point: Point = Point(),  # noqa: B008  # Frozen.
) -> None:
    """Run ours under each value of one or more knobs, beside the values it ships with.

    Several knobs are combined, each value with each. The last column says whether TTFT mean,
    paired by seed, differs from what ships. For example: `inferlane sim sweep --trace
    excerpt:conversation --knob routing.bias=0,1,2,4`.

    Args:
        knob: NAME=VALUE,VALUE,… of `[policy.routing]` or `[policy.order]`; may be repeated.
        policy: Which of ours is changed.
        seeds: Runs of each combination; each seed moves every gap between arrivals by up to 10 %.
        jobs: Processes that run at once.
        report: Write all figures to this JSON file.
        point: What runs, and where.
    """
    import msgspec

    from broker.sim.sweeping import swept_report
    from ops.cli.result_files import require_writable, write_whole
    from ops.cli.sim_show import written

    if not knob:
        message = "name a knob and its values, for example --knob routing.bias=0,1,2,4"
        raise Misused(message)
    require_writable(report, inputs=point.files())
    with told():
        setting, workload = point.setting(), point.workload()
        tried = _combinations(policy, knob)
        entries = _entries(
            tried, setting=setting, seeds=seeds, jobs=jobs, point=point, workload=workload
        )
    try:  # The file first: whoever reads the table may leave before its end.
        if report is not None:
            swept = swept_report(tried, entries, setting=setting, seeds=seeds, workload=workload)
            write_whole(report, msgspec.json.format(msgspec.json.encode(swept)) + b"\n")
            written(report)
    finally:
        _show(entries)


def _combinations(policy: str, knob: "Sequence[str]") -> "list[Knobs]":
    from broker.sim.contestants import contestant
    from broker.sim.knobs import combinations, parse

    base = contestant(policy).policy
    if base is None:
        message = f"{policy} is a peer's: a sweep changes ours (peers are tried at all their knobs)"
        raise Misused(message)
    return combinations(base, parse(knob))


def _entries(
    tried: "Sequence[Knobs]",
    *,
    setting: "Setting",
    seeds: int,
    jobs: int,
    point: Point,
    workload: "Workload",
) -> "list[Entry]":
    from broker.sim.report import entry
    from ops.cli.sim_pool import Run, required, run_all

    runs = [
        Run(label=one.label, policy=one.policy, setting=setting, seed=seed)
        for seed in range(1, seeds + 1)
        for one in tried
    ]
    outcomes = required(run_all(runs, point=point, workload=workload, jobs=jobs))
    return [
        entry(runs[place].contestant(), [one.figures for one in outcomes[place :: len(tried)]])
        for place in range(len(tried))
    ]


def _show(entries: "Sequence[Entry]") -> None:
    from ops.cli.output import console
    from ops.cli.sim_show import sweep_table

    console().print(sweep_table(entries))
