"""What can go wrong in a simulation for a reason its user can mend."""


class SimError(Exception):
    """Root of this package's errors; the text says what to do."""


class TraceError(SimError):
    """A workload that isn't there or can't be read."""

    def __init__(self, where: object, problem: str, *, line: int | None = None) -> None:
        super().__init__(f"{where}{'' if line is None else f':{line}'}: {problem}")
        self.where = str(where)
        """The path or name."""
        self.line = line
        """Number of the line at fault, from 1."""
        self.problem = problem
        """What is wrong, and what to do."""
