"""`inferlane replay`: yesterday's traffic under another policy or quota file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import cyclopts
from cyclopts import Parameter, validators

from ops.cli.errors import CommandError, Misused
from ops.cli.sim_point import Blocks, Workers

if TYPE_CHECKING:
    from broker.core.policy import Policy
    from broker.engine_model.profile import Profile
    from broker.sim.decisions import LoggedJob, Tally
    from broker.sim.replay_run import Plan, ReplayReport

BAR_STEPS = 1000
"""Of each simulation in the bar: the two may differ in how many jobs they simulate."""

AT_LEAST_ONE = validators.Number(gte=1)

app = cyclopts.App(name="replay", help="Judge a change on yesterday's traffic before it is made.")


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Fleet:
    """On what the traffic runs again."""

    workers: Workers | None = None
    """How many; default: as many as the log names for the model."""
    profile: str = ""
    """A modelled engine (reference, demo, ...) instead of the one fitted to the log."""
    blocks_per_worker: Blocks | None = None
    """Cache of a worker, in blocks of the profile (512 tokens, when fitted)."""
    slots: Annotated[int | None, Parameter(validator=AT_LEAST_ONE)] = None
    """Jobs that a worker runs at once; default: the profile's."""


@app.default
def replay(
    *logs: Path,
    policy: str = "",
    quotas: Path | None = None,
    quotas_before: Path | None = None,
    model: str = "",
    fleet: Fleet = Fleet(),  # Frozen: one for all calls is as good.
    report: Path | None = None,
) -> None:
    """Run a decision log's traffic through the simulator, as it was and under something else.

    Three figures stand side by side: as logged / simulated as it ran / simulated under the change.
    The first two differ by what the simulation gets wrong: trust differences between the last two
    that are larger.

        inferlane replay inferlane-state/decisions*.jsonl --policy weighted
        inferlane replay inferlane-state/decisions*.jsonl --quotas tighter.toml

    Engines are modelled with rates fitted to the log, or by --profile. Answers are as long as they
    were; of jobs that never ran, as long as their lane's are on average. Clients' reactions to a
    refusal are not modelled.

    Args:
        logs: Files of the log, in any order, plain, .gz or .zst; all brokers' that led meanwhile.
        policy: One that `inferlane sim compare` knows, such as weighted, round_robin, or dynamo.
        quotas: A broker's configuration: its [policy] table is taken, quota rows and all. Jobs that
            were refused ask again.
        quotas_before: The configuration that ran: what it refused is then refused by simulation.
        model: Which model's jobs, when the log has several.
        fleet: On what it runs.
        report: Write everything to this JSON file.
    """
    from broker.sim.decisions import Tally
    from broker.sim.replay_run import Plan
    from ops.cli.output import note
    from ops.cli.replay_text import assumptions
    from ops.cli.result_files import require_writable
    from ops.cli.sim_point import told

    if not logs:
        message = "name the log's files, such as inferlane-state/decisions*.jsonl"
        raise Misused(message)
    if not policy and quotas is None:
        message = "say what to change: --policy NAME, --quotas FILE, or both"
        raise Misused(message)
    require_writable(report, inputs=(*logs, quotas, quotas_before))
    before, after = _policy(quotas_before), _policy(quotas)
    tally = Tally()
    jobs = _of_one_model(_read(logs, tally), model)
    chosen, said = _engine(jobs, fleet)
    plan = Plan(
        model=jobs[0].model,
        profile=chosen,
        workers=_workers(jobs, fleet.workers),
        ran=_policy_that_ran(jobs),
        quotas_before=before,
        policy=policy,
        quotas=after,
    )
    said += assumptions(plan, tally)
    for sentence in said:
        note(sentence)
    with told():
        found = _replayed(jobs, plan)
    try:  # The file first: whoever reads the tables may leave before their end.
        if report is not None:
            _write(report, found, said)
    finally:
        _show(found)


def _read(logs: Sequence[Path], tally: "Tally") -> list["LoggedJob"]:
    from broker.sim.decisions import read_jobs
    from ops.cli.decision_files import lines_in_order
    from ops.cli.decision_tally import nothing_usable

    jobs = list(read_jobs(lines_in_order(logs), tally))
    if jobs:
        return jobs
    raise CommandError(nothing_usable(tally))


def _of_one_model(jobs: Sequence["LoggedJob"], model: str) -> list["LoggedJob"]:
    models = sorted({job.model for job in jobs})
    if not model and len(models) > 1:
        message = f"the log has several models; choose one with --model: {', '.join(models)}"
        raise Misused(message)
    chosen = [job for job in jobs if job.model == (model or models[0])]
    if not chosen:
        message = f"no job of {model!r} in the log; there are: {', '.join(models)}"
        raise Misused(message)
    return chosen


def _policy(path: Path | None) -> "Policy | None":
    from broker.service.config import load

    return None if path is None else load(path).policy


def _workers(jobs: Sequence["LoggedJob"], asked: int | None) -> int:
    found = asked or len({job.worker for job in jobs if job.worker})
    if found < 1:
        message = "the log names no worker of this model; say how many with --workers"
        raise Misused(message)
    return found


def _policy_that_ran(jobs: Sequence["LoggedJob"]) -> str:
    """Return the policy of most dispatches; the default's name where there was none."""
    from collections import Counter

    counts = Counter(job.policy for job in jobs if job.policy)
    return counts.most_common(1)[0][0] if counts else "first_token"


def _engine(jobs: Sequence["LoggedJob"], fleet: Fleet) -> tuple["Profile", list[str]]:
    """Choose the modelled engine, and say what of it is known from where."""
    from dataclasses import replace

    from broker.engine_model.profile import PROFILES, REFERENCE
    from broker.sim.logged_engine import logged_engine
    from ops.cli.replay_text import fitted

    name, blocks = fleet.profile, fleet.blocks_per_worker
    if name and name not in PROFILES:
        message = f"no profile is called {name!r}; there are: {', '.join(PROFILES)}"
        raise Misused(message)
    if name:
        profile = PROFILES[name]
        said = [f"engine: profile {name} ({profile.kv_tokens_max:,} tokens of KV cache)"]
    else:
        found = logged_engine(jobs, REFERENCE)
        profile = found.profile
        said = fitted(found, says_size=blocks is None)
    if blocks is not None:
        profile = replace(profile, kv_tokens_max=blocks * profile.block_tokens)
        said.append(f"{profile.kv_tokens_max:,} tokens of KV cache a worker, as asked")
    if fleet.slots is not None:
        profile = replace(profile, slots=min(fleet.slots, profile.step_tokens_max))
    return profile, said


def _replayed(jobs: Sequence["LoggedJob"], plan: "Plan") -> "ReplayReport":
    from broker.sim.replay_run import replay as run_replay
    from ops.cli.sim_bar import bar

    with bar(("as it ran", "changed"), weights=(1, 1), requests=BAR_STEPS) as shown:

        def report(number: int, ended: int, requests: int) -> None:
            shown(number, BAR_STEPS * ended // max(1, requests))

        return run_replay(jobs, plan, report=report)


def _show(found: "ReplayReport") -> None:
    from ops.cli.output import console
    from ops.cli.replay_text import tables

    screen = console()
    for table in tables(found):
        screen.print(table)


def _write(path: Path, found: "ReplayReport", said: Sequence[str]) -> None:
    import msgspec

    from ops.cli.output import note
    from ops.cli.result_files import write_whole

    body = {"assumptions": list(said), **msgspec.to_builtins(found)}
    write_whole(path, msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n")
    note(f"report: {path}")
