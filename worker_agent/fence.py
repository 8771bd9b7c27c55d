"""Whose orders count: the highest leader epoch seen, and how far through its orders we are. Pure.

A new leader's epoch is higher than any before it, so an order with a lower one comes from a broker
that lost its leadership and may not know. `echo` is what heartbeats send back: a broker that reads
it knows that every order up to that number was processed, and that an attempt among them that isn't
listed does not run.
"""

from enum import Enum, auto


class Verdict(Enum):
    """What the fence says of an order."""

    NEXT = auto()
    STALE_EPOCH = auto()
    OVERTAKEN = auto()
    """A later order of this epoch was processed before: the echo has already denied this one."""


class Fence:
    """The highest epoch seen and the last order processed of it."""

    def __init__(self) -> None:
        self.epoch = 0
        self.echo = 0

    def learn(self, epoch: int) -> bool:
        """Take a higher epoch, wherever it was heard; the echo starts anew. True if it was one."""
        if epoch <= self.epoch:
            return False
        self.epoch = epoch
        self.echo = 0
        return True

    def judge(self, *, epoch: int, number: int) -> Verdict:
        """Judge an order, and count it as processed when it is the next."""
        self.learn(epoch)
        if epoch < self.epoch:
            return Verdict.STALE_EPOCH
        if number <= self.echo:
            return Verdict.OVERTAKEN
        self.echo = number
        return Verdict.NEXT
