"""Why a batch can't go on. Each message is one sentence and says what to do."""

from producers.errors import ProducerError


class BatchError(ProducerError):
    """Root of what stops a whole batch. A bad line never does."""


class InputUnusable(BatchError):
    """The input can't be read, is empty, or is not the one this output was begun with."""


class OutputUnusable(BatchError):
    """A result file (or the state beside it) can't be written, is in use, or is somebody else's."""


class Interrupted(BatchError):
    """The user stopped the run; unfinished lines are left for the next one."""
