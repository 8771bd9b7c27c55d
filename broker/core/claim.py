"""A waiting job's claim on room, as a worker or a quota row that is kept for it sees it."""

from dataclasses import dataclass

from broker.core.events import JobSpec


@dataclass(frozen=True, slots=True)
class Claim:
    """Who waits, and against whom room is kept for it."""

    key: str
    band: int
    late_from_s: float
    """Jobs that were enqueued later have been overtaken by this one's patience: they wait."""
    cost_tokens: float = 0.0
    """What it needs of a row, beside a seat."""

    def binds(self, job: JobSpec) -> bool:
        """Say whether a job must leave the room: it came too late, and is not more urgent."""
        is_late = job.enqueued_at_s > self.late_from_s
        return is_late and job.band >= self.band and job.key != self.key
