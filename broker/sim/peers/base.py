"""What a peer's router sees of the workers, and what the simulator asks of it.

Every peer binds on arrival: a request is given to a worker at once, and waits there.
"""

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from broker.sim.request import Request


class PeerWorker(Protocol):
    """One worker as a router in front of it can know it.

    All sums count a request from the moment it was given there: peers count their own dispatches.
    """

    @property
    def id(self) -> int:
        """Stable number of the worker, from 0; never used again after it is lost."""
        ...

    @property
    def requests(self) -> int:
        """Requests given and not ended."""
        ...

    @property
    def running(self) -> int:
        """Requests that hold a slot in the engine, as its metrics tell."""
        ...

    @property
    def waiting(self) -> int:
        """Requests in the engine's own queue, as its metrics tell."""
        ...

    @property
    def prefill_tokens(self) -> int:
        """Uncached prompt tokens of the requests given whose first token is not out.

        What was cached is known as of the moment each was given.
        """
        ...

    @property
    def active_tokens(self) -> int:
        """Prompt tokens of the requests given and not ended, cached ones included."""
        ...

    @property
    def active_block_tokens(self) -> int:
        """The same, with a block that several of them share counted once."""
        ...

    @property
    def kv_ratio(self) -> float:
        """Share of the engine's KV cache that running requests hold, 0..1, as its metrics tell."""
        ...

    def hit_tokens(self, request: Request) -> int:
        """Prompt tokens that the engine's cache would serve now: exact, as KV events tell it.

        Blocks still being prefilled there count only once they are prefilled.
        """
        ...


class Peer(Protocol):
    """A routing policy. Deterministic but for the `rng` it was made with."""

    def choose(self, request: Request, workers: Sequence[PeerWorker], *, at_s: float) -> int:
        """Return the place in `workers` (never empty; in the order of joining) to give it to.

        The simulator gives it there at once: what the policy remembers of its own choices (a tree
        of prefixes, a count) is updated here.
        """
        ...

    def first_token(self, request: Request, worker: PeerWorker, *, at_s: float) -> None:
        """See a request's first token."""
        ...

    def ended(self, request: Request, worker: PeerWorker, *, at_s: float) -> None:
        """See a request's end; `worker` no longer counts it."""
        ...

    def lost(self, worker: PeerWorker, *, at_s: float) -> None:
        """See a worker go, or its cache: what was remembered of it is void."""
        ...


MakePeer = Callable[[random.Random], Peer]
"""Makes a fresh policy for one run."""


class Knobs(Protocol):
    """What each peer's module offers: the policy as published, and the settings worth trying."""

    NAME: str
    SOURCE: str
    """Where the rule is published (project, file or paper, version)."""

    def variants(self) -> dict[str, MakePeer]:
        """Return the settings by label; the first one is the project's default."""
        ...
