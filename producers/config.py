"""The producers' settings: `[producer]` and `[nats]` of the one TOML file, or flags."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from broker.disk.named_file import read_named
from broker.wire import settings
from broker.wire.fields import ShortText
from broker.wire.prefix import CLUSTER_SCOPE

Positive = Annotated[float, Meta(gt=0, le=1e9)]
AtLeastOne = Annotated[int, Meta(ge=1, le=1_000_000_000)]


class ClientConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How patient a client is, and how much it holds. Durations in seconds."""

    cache_scope: Literal["lane", "cluster"] = "lane"
    """Who may share these jobs' prefix cache. `cluster` is for system prompts that are no secret:
    another lane could tell from its own speed that somebody used them."""

    append_s: Positive = 5.0
    """Longest wait for one word of the stream; then the same message is sent again under the same
    id."""

    submit_s: Positive = 30.0
    """How long `submit` tries while the cluster can't be reached."""

    no_stream_s: Positive = 15.0
    """How long "no such stream" may be an election: three nodes take 4 to 9 s, 15 leaves room."""

    watchdog_s: Positive = 10.0
    """A ticket that hears nothing for so long looks for its job itself; doubled while the job only
    waits."""

    watchdog_s_max: Positive = 60.0
    """Slowest look: a lost end is found after this long at the latest."""

    lookups_max: AtLeastOne = 64
    """Tickets that look for their jobs at once: keeps ten thousand waiting tickets from being a
    load."""

    lookup_s: Positive = 5.0
    """Longest wait for one answer when a ticket looks for its job."""

    lookup_retry_s: Positive = 1.0
    """Pause before a ticket looks again that got no answer, or not yet the one that must come."""

    sweep_s: Positive = 0.5
    """Tickets that are due are gathered this often: one pass over ten thousand takes half a
    millisecond, and it is coarse enough beside watchdog_s."""

    reconnect_spread_s: Positive = 2.0
    """After a lost link all tickets look, spread over this long: not all in the server's first
    moment."""

    retry_after_s_min: Positive = 1.0
    """Shortest pause after a refusal: a rejection record stands for a second at least."""

    retry_after_s_max: Positive = 60.0
    """Longest pause between two tries of the built-in back-off."""

    look_jobs_max: AtLeastOne = 20_000
    """Messages read, at most, in search of a job that no broker holds: as many as one online queue
    may have, a second or so of reading."""

    cancel_s: Positive = 10.0
    """How long `cancel` tries to find a broker."""

    stream_chunks_max: AtLeastOne = 4096
    """Chunks kept for a reader of a streamed answer; ..."""

    stream_bytes_max: AtLeastOne = 4_000_000
    """... and their bytes. A slower reader gets the whole answer at the end instead of the lost
    chunks."""

    stream_reorder_max: AtLeastOne = 64
    """Chunks kept while an earlier one is missing. More, and it counts as lost."""

    prepare_inline_bytes_max: AtLeastOne = 256_000
    """A larger body is parsed and hashed in a thread: it would hold up the loop for over a
    millisecond."""

    @property
    def scope(self) -> str:
        """The cache scope to ask for: empty for the lane's own."""
        return CLUSTER_SCOPE if self.cache_scope == "cluster" else ""


class NatsLink(Struct, frozen=True, kw_only=True):
    """How to reach the message server: the part of `[nats]` that a producer needs."""

    url: Annotated[str, Meta(min_length=1, max_length=1024)] = "nats://127.0.0.1:4222"
    """One server or several, separated by commas."""
    user: str = ""
    password: str = ""
    creds_file: str = ""
    """Path of a NATS credentials file, instead of user and password."""


class ProducerConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a producer's jobs go."""

    nats: NatsLink = NatsLink()
    lane: ShortText = ""
    """Lane of jobs that name none."""
    client: ClientConfig = ClientConfig()


def load(
    path: Path | None,
    *,
    nats: str | None = None,
    creds: Path | None = None,
    lane: str | None = None,
) -> ProducerConfig:
    """Read `[producer]` of a TOML file, and `[nats]` beside it; arguments go before both.

    Without a path, the arguments and the defaults are all. Raises SettingsError, OSError.
    """
    source = "flags" if path is None else str(path)
    data = b"" if path is None else read_named(path, bytes_max=settings.SETTINGS_BYTES_MAX)
    document = settings.parse(data, source=source)
    table: dict[str, Any] = dict(document.data.get("producer", {}))
    table["nats"] = dict(document.data.get("nats", {}))
    if nats:
        table["nats"]["url"] = nats
    if creds:
        table["nats"]["creds_file"] = str(creds)
    if lane:
        table["lane"] = lane
    return replace(document, data={"producer": table}).read(ProducerConfig, ("producer",))
