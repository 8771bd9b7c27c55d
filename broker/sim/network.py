"""The wire between broker and agents: how long a message takes, and whether it arrives at all.

Orders to one worker may overtake each other only where `late_order_ratio` says so; heartbeats carry
their sequence, so the mind tells a late one by itself.
"""

import random

from msgspec import Struct

FOREVER_S = float("inf")


class Network(Struct, frozen=True, kw_only=True):
    """What happens to messages between broker and agents."""

    hop_s: float = 0.0005
    """One way of an order, an answer or a note. A request and its answer over loopback NATS take
    0.3-0.6 ms."""
    heartbeat_s: float = 1.0
    report_lag_s: float = 0.0
    """Extra time that heartbeats, with lists and cache summaries, take."""
    lost_ratio: float = 0.0
    """Share of heartbeats that never arrive."""
    reordered_ratio: float = 0.0
    """Share of heartbeats that arrive after the next one."""
    late_ratio: float = 0.0
    """Share of heartbeats that take up to `late_s_max` longer."""
    late_s_max: float = 0.0
    lost_order_ratio: float = 0.0
    """Share of orders that never arrive."""
    late_order_ratio: float = 0.0
    """Share of orders that take up to `late_s_max` longer, and may be overtaken."""
    lost_answer_ratio: float = 0.0
    """Share of answers to orders and probes that never arrive."""
    lost_note_ratio: float = 0.0
    """Share of notes (first tokens, ends) that never arrive; an end is told again in heartbeats."""
    faults_until_s: float = FOREVER_S
    """When the network is whole again."""


NETWORK = Network()


class Wire:
    """Draws the fate of each message."""

    def __init__(self, network: Network, rng: random.Random) -> None:
        self.network = network
        self.is_up = True
        """The broker's own link."""
        self._rng = rng
        self._cut_until_s: dict[str, float] = {}

    def cut(self, worker: str, *, until_s: float) -> None:
        """Let nothing through to or from a worker."""
        self._cut_until_s[worker] = until_s

    def is_cut(self, worker: str, at_s: float) -> bool:
        """Say whether nothing passes between broker and worker."""
        return not self.is_up or at_s < self._cut_until_s.get(worker, 0.0)

    def loses(self, ratio: float, at_s: float) -> bool:
        """Draw whether a message of a kind is lost. Nothing is drawn where none can be."""
        if not ratio or at_s >= self.network.faults_until_s:
            return False
        return self._rng.random() < ratio

    def report_s(self, at_s: float) -> float | None:
        """Draw how long a heartbeat takes; None when it never arrives."""
        network = self.network
        if self.loses(network.lost_ratio, at_s):
            return None
        lag_s = network.hop_s + network.report_lag_s
        if self.loses(network.reordered_ratio, at_s):
            lag_s += 1.5 * network.heartbeat_s
        if self.loses(network.late_ratio, at_s):
            lag_s += self._rng.random() * network.late_s_max
        return lag_s

    def order_s(self, worker: str, at_s: float) -> float | None:
        """Draw how long an order takes; None when it never arrives."""
        network = self.network
        if self.is_cut(worker, at_s) or self.loses(network.lost_order_ratio, at_s):
            return None
        if self.loses(network.late_order_ratio, at_s):
            return network.hop_s + self._rng.random() * network.late_s_max
        return network.hop_s
