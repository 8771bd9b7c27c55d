"""What can go wrong with a batch as a whole. Each message is one sentence and says what to do."""

from producers.errors import ProducerError


class BatchesError(ProducerError):
    """Root of what the batches raise."""


class NoSuchBatch(BatchesError):
    """The lane has no batch of this id."""


class NoSuchFile(BatchesError):
    """The lane has no file of this id, or none any more."""


class FileInUse(BatchesError):
    """A batch that has not ended reads the file, or writes it."""


class BadBatch(BatchesError):
    """The batch can't be created as it was asked for; `param` names what is at fault."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


class LeaseLost(BatchesError):
    """Another runner has the batch now, or may have: this one has to leave it."""
