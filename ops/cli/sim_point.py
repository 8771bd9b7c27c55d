"""The point that a simulation is run at: which trace, how fast, on how large a cluster."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from ops.cli.errors import Misused

if TYPE_CHECKING:  # `--help` must answer before the simulator is imported.
    from broker.sim.request import Workload
    from broker.sim.runs import Setting

WORKERS_MAX = 10_000
"""More than one broker leads; each modelled worker takes memory and time of every event."""

BLOCKS_MAX = 1_000_000_000
"""KV cache of one worker: of 512 tokens each, more than all the world's GPUs hold together."""

SPEED_MAX = 1e6
"""A day of arrivals in a tenth of a second: all there at once, as the load is measured."""

SEEDS_MAX = 1_000
"""An interval shrinks with the root of their number: a hundred times these make it a tenth."""

JOBS_MAX = 256
"""Processes at once: each holds the trace and a run of its own."""

Seeds = Annotated[int, Parameter(validator=Number(gte=1, lte=SEEDS_MAX))]
Jobs = Annotated[int, Parameter(validator=Number(gte=1, lte=JOBS_MAX))]
Workers = Annotated[int, Parameter(validator=Number(gte=1, lte=WORKERS_MAX))]
Blocks = Annotated[int, Parameter(validator=Number(gte=1, lte=BLOCKS_MAX))]

PART_DIGITS_MAX = 18
"""Of a number of requests: no trace has more."""

PARTS = ("all", "first-half", "second-half")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What runs, and where."""

    trace: str = ""
    """A trace: a file (Mooncake, Azure, ServeGen, sessions), conversation, synthetic or another
    name in --traces, excerpt:conversation (ships with inferlane), or generated:NAME?key=value."""

    traces: Annotated[Path | None, Parameter(env_var="INFERLANE_TRACES")] = None
    """Folder of the public traces."""

    part: str = "all"
    """Of the trace: all, first-half, second-half, or a number of requests from its head."""

    workers: Workers = 8
    """Workers, all alike."""

    blocks_per_worker: Blocks = 2000
    """KV cache of each worker, in blocks of the profile (reference: 512 tokens)."""

    speed: Annotated[float, Parameter(validator=Number(gt=0, lte=SPEED_MAX))] = 1.0
    """How many times as fast as recorded the requests arrive."""

    profile: str = "reference"
    """How fast the modelled engines are."""

    change: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = ()
    """Something that happens to the fleet, in seconds of the run; may be repeated: join@60,
    restart:2@120, lose:0@90, drain:1@30. Workers are numbered from 0, those that join last."""

    def workload(self) -> "Workload":
        """Read the trace. Raises Misused."""
        from broker.sim.workload.loading import load

        self._require_trace()
        with told():
            workload = load(self.trace, traces=self.traces)
        part = self._part(workload)
        if not part.requests:
            message = f"--part {self.part} of {workload.name} has no request: take all of it"
            raise Misused(message)
        return part

    def _part(self, workload: "Workload") -> "Workload":
        from broker.sim.workload.shaping import first_half, head, second_half

        match self.part:
            case "all":
                return workload
            case "first-half":
                return first_half(workload)
            case "second-half":
                return second_half(workload)
            case number if _is_count(number):
                return head(workload, int(number))
            case _:
                message = f"--part is {', '.join(PARTS)} or a number of requests, not {self.part!r}"
                raise Misused(message)

    def files(self) -> list[Path]:
        """Return the files of the trace: no result may take their place. Raises Misused."""
        from broker.sim.workload.loading import files

        self._require_trace()
        with told():
            return files(self.trace, traces=self.traces)

    def _require_trace(self) -> None:
        if not self.trace:
            message = "name a trace, for example --trace excerpt:conversation"
            raise Misused(message)

    def setting(self) -> "Setting":
        """Make the cluster. Raises Misused."""
        from broker.engine_model.profile import PROFILES
        from broker.sim.fleet_changes import parse
        from broker.sim.runs import Setting
        from broker.wire.settings import nearest

        if self.profile not in PROFILES:
            known = ", ".join(PROFILES)
            close = nearest(self.profile, list(PROFILES))
            message = f"no such profile: {self.profile}.{close} Known: {known}"
            raise Misused(message)
        with told():
            changes = parse(self.change, workers=self.workers)
        return Setting(
            workers=self.workers,
            blocks_per_worker=self.blocks_per_worker,
            speed=self.speed,
            profile=PROFILES[self.profile],
            changes=changes,
        )


def _is_count(text: str) -> bool:
    return text.isdecimal() and len(text) <= PART_DIGITS_MAX and int(text) > 0


@contextmanager
def told() -> Generator[None]:
    """Turn what a simulation's user can mend into wrong usage."""
    from broker.sim.errors import SimError

    try:
        yield
    except SimError as error:
        raise Misused(str(error)) from error
