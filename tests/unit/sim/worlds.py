"""Builders: engines that can be computed by hand, requests, a router that does as it is told."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from broker.engine_model.profile import Curve, Profile
from broker.sim.host import Host
from broker.sim.request import Request, Workload
from broker.sim.world import Change, FleetChange, World
from broker.wire.messages import Usage

BLOCK_TOKENS = 100

BY_HAND = Profile(
    name="by-hand",
    source="chosen: 1 ms a prompt token, 10 ms a token",
    slots=4,
    step_tokens_max=1000,
    kv_tokens_max=4000,
    block_tokens=BLOCK_TOKENS,
    prefill_s=Curve(0.0, 0.001, 0.0),
    decode_s=Curve(0.01, 0.0, 0.0),
)

FIRST_TOKEN_S = 0.11
"""Of `a_request` alone on that engine: 100 tokens, and the first of five."""
END_S = 0.15


def a_profile(**changes: Any) -> Profile:
    """Return that profile, or one like it."""
    return replace(BY_HAND, **changes)


def a_request(index: int = 0, at_s: float = 0.0, **changes: Any) -> Request:
    """Return a request of 100 tokens, five out."""
    values: dict[str, Any] = {
        "index": index,
        "at_s": at_s,
        "prompt_tokens": 100,
        "output_tokens": 5,
        "output_tokens_max": 8,
        "block_tokens": BLOCK_TOKENS,
    }
    return Request(**(values | changes))


def a_workload(*requests: Request) -> Workload:
    """Return a workload of these."""
    return Workload(name="w", requests=requests, source="a test")


def a_world(
    *requests: Request,
    workers: int = 1,
    changes: Sequence[FleetChange] = (),
    journal: bool = False,
    profile: Profile = BY_HAND,
) -> World:
    """Return a world of workers that can be computed by hand."""
    return World(requests, profiles=(profile,) * workers, changes=changes, journal=journal)


class Told:
    """Gives each request to the worker that `hosts` names, in turn, and notes what it sees."""

    def __init__(self, world: World, hosts: Sequence[int] = (0,)) -> None:
        self.world = world
        self.seen: list[tuple[str, int]] = []
        """What happened, and the request or worker it happened to."""
        self._hosts = hosts

    def joined(self, host: Host, *, at_s: float) -> None:
        """Note it."""
        del at_s
        self.seen.append(("joined", host.number))

    def arrived(self, request: Request, *, at_s: float) -> None:
        """Give it."""
        self.seen.append(("arrived", request.index))
        host = self.world.hosts[self._hosts[request.index % len(self._hosts)]]
        self.world.submit(request, host, at_s=at_s)

    def first_token(self, request: Request, host: Host, *, cached_tokens: int, at_s: float) -> None:
        """Note it."""
        del host, cached_tokens, at_s
        self.seen.append(("first", request.index))

    def ended(self, request: Request, host: Host, *, usage: Usage, at_s: float) -> None:
        """Note it."""
        del host, usage, at_s
        self.seen.append(("ended", request.index))

    def changed(self, host: Host, change: Change, *, at_s: float) -> None:
        """Note it; what ran there is given anew to the same worker, where it lives."""
        self.seen.append((change.value, host.number))
        if change is Change.RESTART:
            for request in list(self.world.open.values()):
                self.world.submit(request, host, at_s=at_s)
