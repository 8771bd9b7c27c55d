"""Every policy of the field that the simulator knows, and a way to make one by its label."""

from broker.sim.peers import (
    aibrix,
    dynamo,
    least_requests,
    llmd_affinity,
    llmd_weighted,
    lmetric,
    power_of_two,
    prefix_hash,
    production_stack,
    round_robin,
    sglang,
)
from broker.sim.peers.base import Knobs, MakePeer

_MODULES: tuple[Knobs, ...] = (
    round_robin,
    least_requests,
    power_of_two,
    prefix_hash,
    sglang,
    production_stack,
    llmd_affinity,
    llmd_weighted,
    dynamo,
    lmetric,
    aibrix,
)

PEERS: dict[str, Knobs] = {peer.NAME: peer for peer in _MODULES}
"""By name, in the order of the report's tables."""


def labels() -> dict[str, MakePeer]:
    """Return every setting of every peer by label, each peer's default first."""
    return {label: made for peer in _MODULES for label, made in peer.variants().items()}


def make(label: str) -> MakePeer:
    """Return the maker of a setting; a peer's bare name stands for its default.

    Raises ValueError, naming the labels there are, where it is neither.
    """
    if label in PEERS:
        return next(iter(PEERS[label].variants().values()))
    known = labels()
    if label not in known:
        message = f"no peer {label!r}; there are: {', '.join(known)}"
        raise ValueError(message)
    return known[label]
