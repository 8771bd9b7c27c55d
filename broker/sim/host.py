"""A worker's machine in the simulation: one modelled engine, and the next look at it."""

from broker.engine_model.model import EngineModel
from broker.engine_model.profile import Profile


class Host:
    """One engine. A restarted one is empty; a lost one never comes back under its number."""

    def __init__(
        self, number: int, profile: Profile, *, journal: bool, joined_at_s: float = 0.0
    ) -> None:
        """With `journal`, the cache keeps its changes for reports."""
        self.number = number
        self.joined_at_s = joined_at_s
        self.profile = profile
        self.alive = True
        self.draining = False
        self.fails_after_s: float | None = None
        """Sick: each request is answered with an error so long after it came. None: sound."""
        self.lives = 1
        """Starts of the engine so far."""
        self.wake_at_s: float | None = None
        """The pending look at the engine; None when there is none."""
        self.wake = 0
        """Number of the last look asked for: earlier ones are void."""
        self.busy_before_s = 0.0
        self._journal = journal
        self.model = self._start()

    @property
    def name(self) -> str:
        """What people call it."""
        return f"w{self.number}"

    @property
    def busy_s(self) -> float:
        """Time spent in steps, in all its lives."""
        return self.busy_before_s + self.model.busy_s

    def restart(self) -> None:
        """Lose all that runs and all that is cached."""
        self.busy_before_s += self.model.busy_s
        self.model = self._start()
        self.lives += 1
        self.wake_at_s = None
        self.wake += 1

    def _start(self) -> EngineModel:
        model = EngineModel(self.profile)
        if self._journal:
            model.kv.journal = {}
        return model
