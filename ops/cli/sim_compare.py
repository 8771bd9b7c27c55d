"""`inferlane sim compare`: ours and the field's policies on one trace, measure by measure."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ops.cli.errors import Misused
from ops.cli.sim_point import Jobs, Point, Seeds, told

if TYPE_CHECKING:
    from broker.sim.report import Report


def compare(
    *,
    policies: str = "all",
    seeds: Seeds = 5,
    sensitivity: Annotated[bool, Parameter(negative="")] = False,
    jobs: Jobs = 2,
    report: Path | None = None,
    html: Path | None = None,
    point: Point = Point(),  # noqa: B008  # Frozen.
) -> None:
    """Run a trace under many policies, and say which is better at what.

    Ours is compared with the best peer for each measure, at its best knobs. `better` is claimed
    where the difference, paired by seed, excludes 0 at 95 %, which needs 3 seeds or more. For
    example: `inferlane sim compare --trace excerpt:conversation --html compare.html`.

    Args:
        policies: all; defaults (ours, and each peer as it comes); or labels separated by commas
            (`inferlane sim run --policy list` shows them).
        seeds: Runs of each policy; each seed moves every gap between arrivals by up to 10 %.
        sensitivity: See also whether the order of the default policies holds when prefill rate,
            decode slope and KV size are each halved and doubled.
        jobs: Processes that run at once.
        report: Write all figures to this JSON file.
        html: Write a page with plots to this file (needs the extra `sim`).
        point: What runs, and where.
    """
    import msgspec

    from ops.cli.result_files import require_writable, write_whole
    from ops.cli.sim_show import show_report, written

    _require_plots(html)
    require_writable(report, html, inputs=point.files())
    with told():
        made = _compared(policies, seeds=seeds, jobs=jobs, sensitive=sensitivity, point=point)
    try:  # Files first: whoever reads the tables may leave before their end.
        if report is not None:
            write_whole(report, msgspec.json.format(msgspec.json.encode(made)) + b"\n")
        if html is not None:
            from ops.sim_page.page import page

            write_whole(html, page(made).encode())
        written(report, html)
    finally:
        show_report(made)


def _require_plots(html: Path | None) -> None:
    if html is not None and find_spec("matplotlib") is None:
        message = (
            "--html draws its plots with matplotlib, which is not installed: "
            "pip install 'inferlane[sim]' (or matplotlib), or leave --html out"
        )
        raise Misused(message)


def _compared(policies: str, *, seeds: int, jobs: int, sensitive: bool, point: Point) -> "Report":
    from broker.sim.lineup import chosen
    from ops.cli.sim_plan import Plan
    from ops.cli.sim_pool import run_all

    lineup = chosen(policies)
    if not lineup:
        message = "--policies names nobody: all, defaults, or labels separated by commas"
        raise Misused(message)
    plan = Plan(
        lineup,
        setting=point.setting(),
        seeds=range(1, seeds + 1),
        sensitive=sensitive,
    )
    workload = point.workload()
    outcomes = run_all(plan.runs, point=point, workload=workload, jobs=jobs)
    return plan.report(workload, outcomes)
