"""The agent's settings: `[worker]` and `[nats]` of the one TOML file, or flags."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from broker.disk.named_file import read_named
from broker.wire import settings
from broker.wire.fields import Model, Token

Positive = Annotated[float, Meta(gt=0, le=1e9)]
AtLeastOne = Annotated[int, Meta(ge=1, le=1_000_000)]
NotNegative = Annotated[int, Meta(ge=0, le=2**53)]

EngineKind = Literal["openai", "llama", "fake"]


class NatsLink(Struct, frozen=True, kw_only=True):
    """How to reach the message server: the part of `[nats]` that an agent needs."""

    url: Annotated[str, Meta(min_length=1, max_length=1024)] = "nats://127.0.0.1:4222"
    """One server or several, separated by commas."""
    user: str = ""
    password: str = ""
    creds_file: str = ""
    """Path of a NATS credentials file, instead of user and password."""


class WorkerConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One worker: which engine it stands beside, and how patient it is."""

    worker: Token
    """Name of this worker in the cluster; two may not share one."""
    nats: NatsLink = NatsLink()
    engine: EngineKind = "openai"
    base_url: str = "http://127.0.0.1:8000"
    """openai: where the engine listens; `unix:/path/to/socket` for a Unix socket."""
    api_key: str = ""
    """openai: sent as a bearer token, where the engine asks for one."""
    gguf: str = ""
    """llama: the model file."""
    kv_events: Annotated[str, Meta(max_length=1024)] = ""
    """openai: where the engine publishes its KV-cache events, ipc:///path or tcp://host:port."""
    kv_events_replay: Annotated[str, Meta(max_length=1024)] = ""
    """openai: where it replays those that were missed; empty: it doesn't."""
    kv_events_ranks: Annotated[int, Meta(ge=1, le=64)] = 1
    """openai: data-parallel ranks of the engine; each publishes, and replays, at the port of the
    one before it plus 1."""
    kv_silent_s_max: Positive = 10.0
    """openai: how long after a prompt's first token no event may tell of its blocks; then the cache
    is guessed until events come again. Engines tell at each step."""
    context_tokens: AtLeastOne = 4096
    """llama: longest prompt and answer of one job; each slot has so much room."""
    threads: AtLeastOne = 1
    """llama: of the engine; engines that share a host stand in each other's way with more."""
    cache_ram_mib: NotNegative = 0
    """llama: host memory for prefixes that left their slot."""
    models: dict[Model, Model] = {}
    """Names that jobs ask for, each with the engine's own name. Empty: what the engine says it
    serves."""
    slots: Annotated[int, Meta(ge=1, le=4096)] = 4
    """Jobs at once; the engine's own number, where it tells a smaller one."""
    profile: str = "demo"
    """fake: which modelled engine, `broker.engine_model.profile`."""
    speed: Positive = 1.0
    """fake: how many of its seconds pass in one."""

    heartbeat_s: Positive = 1.0
    renew_s: Positive = 20.0
    """How often a job's ack-wait (60 s) is renewed: two renewals may be lost."""
    poll_s: Positive = 1.0
    """How often the engine is asked for its readiness and load."""
    poll_s_max: Positive = 5.0
    """An engine that takes longer to answer that is not ready."""
    check_s_max: Positive = 30.0
    """How long a job waits to learn whether its record stands already, at most half of its
    `stall_s`; then it is handed back."""
    retry_base_s: Positive = 0.05
    retry_s_max: Positive = 5.0
    """Back-off of records and acks that the bus did not confirm: base · 2^(n-1), at most this."""
    call_s_max: Positive = 5.0
    """Longest wait for one answer of the bus."""
    drain_s_max: Positive = 600.0
    """After SIGTERM: longest wait for running jobs; what still runs is handed back."""
    leave_s_max: Positive = 5.0
    """After that: longest wait for records, acks and the last report."""
    duty_pause_s: Positive = 1.0
    """Before a duty of the agent that failed by a fault of ours is begun again."""
    stuck_s_max: Positive = 60.0
    """Heartbeats stop when the agent's loop has said nothing for this long: it is not busy but
    stuck."""

    ack_retries_max: AtLeastOne = 256
    """Jobs with a record and no confirmed ack; at this many the worker takes nothing new."""
    finished_beats: AtLeastOne = 5
    """Heartbeats in which a confirmed end is repeated, in case its note was lost."""
    finished_max: AtLeastOne = 256
    """Confirmed ends kept for that; the oldest go first."""
    seen_max: AtLeastOne = 4096
    """Attempts remembered, so that an order that arrives twice runs once."""

    cache_tokens: NotNegative = 0
    """Size of the engine's prefix cache; 0: as the engine tells, else 65,536."""
    cache_sequences: NotNegative = 0
    """Sequences the engine keeps, where it caches whole ones (llama.cpp: its slots); 0: caches
    blocks."""
    cache_ttl_s: Positive = 600.0
    """A block unused for this long is no longer reported."""
    cache_refresh_s: Positive = 60.0
    """A block in use is reported anew this often, so that the broker doesn't forget it."""
    prefix_tokens_min: NotNegative = 1000
    """Shorter prefixes are not reported: not worth a detour."""
    summary_bytes_max: Annotated[int, Meta(ge=1024, le=1_000_000)] = 65_536
    """Of one report; the rest follows in the next."""

    @property
    def cached_sequences(self) -> int:
        """Whole sequences that the engine caches; 0 when it caches blocks."""
        is_llama = self.engine == "llama"
        return self.cache_sequences or (self.slots if is_llama else 0)


def load(path: Path | None, *, overrides: Mapping[str, Any] | None = None) -> WorkerConfig:
    """Read `[worker]` of a TOML file, and `[nats]` beside it; `overrides` go before both.

    Without a path, `overrides` and the defaults are all. Raises SettingsError, OSError.
    """
    source = "flags" if path is None else str(path)
    data = b"" if path is None else read_named(path, bytes_max=settings.SETTINGS_BYTES_MAX)
    document = settings.parse(data, source=source)
    given = dict(overrides or {})
    nats: dict[str, Any] = {**document.data.get("nats", {}), **given.pop("nats", {})}
    table: dict[str, Any] = {"nats": nats, **document.data.get("worker", {}), **given}
    return replace(document, data={"worker": table}).read(WorkerConfig, ("worker",))
