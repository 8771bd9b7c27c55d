"""The knobs of a client, with units, defaults and why they stand where they do."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """How patient a client is, and how much it holds. Durations in seconds."""

    append_s: float = 5.0
    """Longest wait for one word of the stream; then the same message is sent again under the same
    id."""

    submit_s: float = 30.0
    """How long `submit` tries while the cluster can't be reached."""

    no_stream_s: float = 15.0
    """How long "no such stream" may be an election: three nodes take 4 to 9 s, and 15 leaves
    room."""

    watchdog_s: float = 10.0
    """A ticket that hears nothing for so long looks for its job itself; doubled while the job only
    waits."""

    watchdog_s_max: float = 60.0
    """Slowest look: a lost end is found after this long at the latest."""

    lookups_max: int = 64
    """Tickets that look for their jobs at once: keeps ten thousand waiting tickets from being a
    load."""

    lookup_s: float = 5.0
    """Longest wait for one answer when a ticket looks for its job."""

    lookup_retry_s: float = 1.0
    """Pause before a ticket looks again that got no answer, or not yet the one that must come."""

    sweep_s: float = 0.5
    """Tickets that are due are gathered this often: one pass over ten thousand takes half a
    millisecond, and it is coarse enough beside watchdog_s."""

    reconnect_spread_s: float = 2.0
    """After a lost link all tickets look, spread over this long: not all in the server's first
    moment."""

    retry_after_s_min: float = 1.0
    """Shortest pause after a refusal: a rejection record stands for a second at least."""

    retry_after_s_max: float = 60.0
    """Longest pause between two tries of the built-in back-off."""

    cancel_s: float = 10.0
    """How long `cancel` tries to find a broker."""

    stream_chunks_max: int = 4096
    """Chunks kept for a reader of a streamed answer; ..."""

    stream_bytes_max: int = 4_000_000
    """... and their bytes. A slower reader gets the whole answer at the end instead of the lost
    chunks."""

    stream_reorder_max: int = 64
    """Chunks kept while an earlier one is missing. More, and it counts as lost."""

    prepare_inline_bytes_max: int = 256_000
    """A larger body is parsed and hashed in a thread: it would hold up the loop for over a
    millisecond."""
