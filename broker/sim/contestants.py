"""Who can run a workload: ours under several settings, and every peer at every knob worth trying.

Ours is there as it ships (`first_token`, `weighted`), and with what it brings taken away piece by
piece, so that routing, ordering and late binding can be told apart.
"""

import random
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from broker.core.policy import BandPolicy, LanePolicy, OrderPolicy, Policy, RoutingPolicy
from broker.sim.arrival import ArrivalRouter
from broker.sim.errors import SimError
from broker.sim.mind import MODEL, MindRouter, Network, Timer
from broker.sim.peers.base import MakePeer
from broker.sim.peers.registry import PEERS
from broker.sim.world import World

NO_BACKLOG_BOUND_S = 1e9
"""θ so large that nothing waits at the broker."""

WAIT_CREDIT_FIFO = 1e6
"""α so large that only the wait counts."""

_NO_LONGEST_WAITS = (
    BandPolicy(guaranteed_share=0.0),
    BandPolicy(guaranteed_share=0.20),
    BandPolicy(guaranteed_share=0.10, aging_s=60.0),
    BandPolicy(guaranteed_share=0.05),
)
"""Peers let requests wait for ever: if ours expired, the slowest would not be counted."""


class Contestant(Struct, frozen=True, kw_only=True):
    """One policy at one setting of its knobs."""

    label: str
    """Unique: `dynamo scale=32`."""
    family: str
    """Whose policy it is: `dynamo`, or `ours`."""
    source: str
    policy: Policy | None = None
    """Of the mind; None for a peer."""
    peer: MakePeer | None = None

    @property
    def is_ours(self) -> bool:
        """Whether it is the real mind."""
        return self.policy is not None


def _ours(
    label: str,
    says: str,
    *,
    routing: RoutingPolicy | None = None,
    order: OrderPolicy | None = None,
) -> Contestant:
    policy = Policy(
        bands=_NO_LONGEST_WAITS, routing=routing or RoutingPolicy(), order=order or OrderPolicy()
    )
    return Contestant(label=label, family="ours", source=says, policy=policy)


_ON_ARRIVAL = RoutingPolicy(
    backlog_s_max=NO_BACKLOG_BOUND_S, hold_for_affinity=False, kv_fill_ratio_max=1.0
)

OURS = (
    _ours("first_token", "as it ships"),
    _ours(
        "weighted",
        "the operators' weighted sum, otherwise as it ships",
        routing=RoutingPolicy(policy="weighted"),
    ),
    _ours("first_token on arrival", "routing alone: nothing waits", routing=_ON_ARRIVAL),
    _ours(
        "first_token no hold",
        "late binding, but to any free worker",
        routing=RoutingPolicy(hold_for_affinity=False),
    ),
    _ours(
        "first_token fifo",
        "late binding and hold, but first come first served",
        order=OrderPolicy(wait_credit=WAIT_CREDIT_FIFO, candidates_max=1),
    ),
)


def contestants() -> list[Contestant]:
    """Return all, ours first."""
    peers = [
        Contestant(label=label, family=name, source=module.SOURCE, peer=make)
        for name, module in PEERS.items()
        for label, make in module.variants().items()
    ]
    return [*OURS, *peers]


def contestant(label: str) -> Contestant:
    """Find one by its label, or a peer's default by its name; `_` and `-` are the same.

    Raises SimError when there is none.
    """
    wanted = _plain(label)
    everyone = contestants()
    for one in everyone:
        if _plain(one.label) == wanted:
            return one
    for one in everyone:
        if not one.is_ours and _plain(one.family) == wanted:
            return one
    names = ", ".join(one.label for one in everyone)
    message = f"no policy is called {label!r}; there are: {names}"
    raise SimError(message)


def _plain(label: str) -> str:
    return " ".join(label.lower().replace("_", "-").split())


def run_world(
    world: World,
    contestant: Contestant,
    *,
    lanes: Sequence[str],
    seed: int,
    network: Network,
    timer: Timer | None = None,
) -> list[float]:
    """Run a world under a contestant; returns the real seconds of its steps, where timed."""
    if contestant.peer is not None:
        peer = contestant.peer(random.Random(seed))
        world.run(ArrivalRouter(world, peer, hop_s=network.hop_s))
        return []
    assert contestant.policy is not None, "a contestant is ours or a peer"
    policy = replace(
        contestant.policy,
        models=contestant.policy.models or (MODEL,),
        lanes=contestant.policy.lanes or tuple(LanePolicy(name=lane) for lane in lanes),
    )
    router = MindRouter(world, policy, seed=seed, network=network, timer=timer)
    world.run(router)
    return router.step_s
