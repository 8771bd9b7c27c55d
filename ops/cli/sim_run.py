"""`inferlane sim run`: one policy, one run."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from ops.cli.sim_point import Point, told

LIST = "list"


def run(
    *,
    policy: str = "first_token",
    seed: Annotated[int, Parameter(validator=Number(gte=0))] = 0,
    report: Path | None = None,
    point: Point = Point(),  # noqa: B008  # Frozen.
) -> None:
    """Run a trace under one policy, ours or a peer's, and show its figures.

    For example: `inferlane sim run --trace excerpt:conversation --policy dynamo`.

    Args:
        policy: By label; `list` shows all. A peer's name alone is the peer as it comes.
        seed: 0 takes the arrivals as recorded; any other moves each gap by up to 10 %.
        report: Write the figures to this JSON file.
        point: What runs, and where.
    """
    import msgspec

    from broker.sim.contestants import contestant
    from broker.sim.report import entry
    from ops.cli.result_files import require_writable, write_whole
    from ops.cli.sim_pool import Run, required, run_all
    from ops.cli.sim_show import show_entry, written

    if policy == LIST:
        _show_policies()
        return
    with told():
        who = contestant(policy)
        require_writable(report, inputs=point.files())
        setting, workload = point.setting(), point.workload()
        wanted = Run(label=who.label, setting=setting, seed=seed, timed=who.is_ours)
        outcomes = run_all([wanted], point=point, workload=workload, jobs=1)
        made = entry(who, [outcome.figures for outcome in required(outcomes)])
    try:  # The file first: whoever reads the table may leave before its end.
        if report is not None:
            write_whole(report, msgspec.json.format(msgspec.json.encode(made)) + b"\n")
            written(report)
    finally:
        show_entry(made)


def _show_policies() -> None:
    from broker.sim.contestants import contestants
    from ops.cli.output import console, table

    rows = [(one.label, one.family, one.source) for one in contestants()]
    console().print(table("", ("POLICY", "FAMILY", "SOURCE"), rows))
