"""Requests that are made as they are read, for runs too long to be held in memory."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import overload

from broker.sim.request import Request


class Stream(Sequence[Request]):
    """A sequence whose every iteration makes the same requests anew; holds none of them.

    Iterate it: an index or a slice is reached by making all requests before it.
    """

    def __init__(self, length: int, make: Callable[[], Iterator[Request]]) -> None:
        self._length = length
        self._make = make

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        return islice(self._make(), self._length)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            assert step > 0
            return list(islice(self, start, stop, step))
        place = index + self._length if index < 0 else index
        if not 0 <= place < self._length:
            raise IndexError(index)
        return next(islice(self, place, None))
