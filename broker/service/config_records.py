"""The tables of the configuration file that the broker reads: values, defaults and bounds.

`ops/inferlane.toml` shows every key. `[worker]`, `[producer]` and `[gateway]` belong to the other
programs, which read the same file and judge their own table.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from broker.core.policy import Policy
from broker.wire.fields import ShortText, Token
from broker.wire.messages import BODY_BYTES_MAX

MIB = 1024 * 1024
GIB = 1024 * MIB

Share = Annotated[float, Meta(ge=0, le=1)]
Positive = Annotated[float, Meta(gt=0)]
Window = Annotated[int, Meta(ge=1, le=100_000)]
Bytes = Annotated[int, Meta(ge=MIB)]
Jobs = Annotated[int, Meta(ge=1)]


class NatsConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to reach the message server, and how it keeps what it is given."""

    url: Annotated[str, Meta(min_length=1, max_length=1024)] = "nats://127.0.0.1:4222"
    """One server or several, separated by commas."""
    user: ShortText = ""
    password: ShortText = ""
    creds_file: str = ""
    """Path of a NATS credentials file, instead of user and password."""
    replicas: Literal[1, 3, 5] = 1
    """Copies of each stream: 1 on one server, 3 on a cluster of three."""
    sync_interval: ShortText = ""
    """What the server's own file sets (`always`, `1s`, …). It does not tell its clients, so
    `inferlane doctor` can judge durability only if it stands here; empty: not known."""


class BrokerConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The broker process."""

    name: Token = "broker"
    """Told to the other brokers in the leader's key."""
    state_dir: Annotated[str, Meta(min_length=1)] = "inferlane-state"
    """Folder of the decision log; nothing in it is needed after a restart."""
    decision_log_bytes_max: Annotated[int, Meta(ge=0)] = 64 * MIB
    """One file of the decision log; then the next is begun. 0: no decision log."""
    decision_log_files_max: Annotated[int, Meta(ge=1, le=1000)] = 8
    """Files of the decision log that are kept."""
    decision_log_prefixes: bool = True
    """Tell each job's prefix hashes (no text), which traces and replays need."""
    http_host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    """Where /healthz, /readyz, /metrics and the status page listen. They have no password."""
    http_port: Annotated[int, Meta(ge=0, le=65535)] = 9470
    """0: any free port."""
    leader_ttl_s: Annotated[float, Meta(ge=1, le=120)] = 5.0
    """How long a dead leader's key stands: 5 on one server, 15 on three (elections take 9)."""
    reconcile_s: Annotated[float, Meta(ge=1)] = 60.0
    """Between two comparisons of the ledger with the workers' lists and the streams."""
    reconcile_alarm_jobs: Jobs = 3
    """As many differences in one comparison raise the alarm, ..."""
    reconcile_alarm_ratio: Share = 0.01
    """... or this share of the jobs in flight, whichever is more."""
    loop_stuck_s_max: Annotated[float, Meta(ge=0)] = 60.0
    """A process whose loop has stood still for this long ends itself; 0: never."""
    renew_s: Annotated[float, Meta(ge=0.1)] = 20.0
    """Between two renewals of a held job's ack-wait."""
    window_online_jobs: Window = 512
    """Jobs of bands 0-2 pulled and not yet dispatched, per queue (lane, band, model)."""
    window_batch_jobs: Window = 512
    """The same of band 3: enough to choose from, little to hold."""
    held_bytes_max: Bytes = 512 * MIB
    """Bodies of all jobs held at once."""
    held_reserve_ratios: tuple[Share, Share, Share, Share] = (0.05, 0.20, 0.15, 0.05)
    """Share of `held_bytes_max` that bands 0, 1, 2, 3 each have for themselves."""


class StreamsConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bounds of what the server keeps for each lane."""

    jobs_per_subject_max: Jobs = 20_000
    """Messages of one online queue (lane, band, model), running jobs included. Raise it freely;
    the server is never told a lower value, for it would delete the oldest."""
    batch_per_subject_max: Jobs = 2_000_000
    """The same of a batch queue."""
    lane_bytes_max: Bytes = GIB
    """JOBS_<lane>: all online jobs of a lane."""
    batch_bytes_max: Bytes = 4 * GIB
    """BATCH_<lane>: all batch jobs of a lane."""
    results_bytes_max: Bytes = 4 * GIB
    """RESULTS_<lane>: terminal records. When full, no job can end: see `inferlane doctor`."""
    results_age_s_max: Annotated[float, Meta(ge=60)] = 3 * 86_400.0
    """How long a result can be fetched."""
    dead_letters_bytes_max: Bytes = GIB // 4
    dead_letters_age_s_max: Annotated[float, Meta(ge=60)] = 30 * 86_400.0
    files_bytes_max: Bytes = 20 * GIB
    """FILES_<lane>: inputs of batches and their results; less where the server has no room."""
    files_age_s_max: Annotated[float, Meta(ge=60)] = 60 * 86_400.0
    """Files that nobody removed leave by themselves after this."""
    batches_age_s_max: Annotated[float, Meta(ge=60)] = 60 * 86_400.0
    """A batch that nothing happens to any more is forgotten after this."""
    usage_age_s_max: Annotated[float, Meta(ge=86_400)] = 400 * 86_400.0
    """How long a lane's accounts (`inferlane usage`) are kept."""
    duplicate_window_s: Annotated[float, Meta(ge=1, le=3600)] = 120.0
    """How long the server knows a submission's id and swallows the same one."""
    ack_wait_s: Annotated[float, Meta(ge=5, le=3600)] = 60.0
    """A job nobody renews for this long is delivered again."""
    ack_pending_jobs_max: Jobs = 10_000
    """Jobs of one queue delivered and not ended: window and in-flight together."""
    body_bytes_max: Annotated[int, Meta(ge=1024, le=BODY_BYTES_MAX)] = BODY_BYTES_MAX
    """Largest request body."""


class LaneRetention(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long one lane keeps results and given-up prompts, where not as `[streams]` says."""

    lane: Token
    results_age_s_max: Annotated[float, Meta(ge=60)] | None = None
    results_bytes_max: Bytes | None = None
    dead_letters_age_s_max: Annotated[float, Meta(ge=60)] | None = None
    """Dead letters hold the prompts of jobs that were given up."""
    dead_letters_bytes_max: Bytes | None = None


class Config(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file."""

    nats: NatsConfig = NatsConfig()
    broker: BrokerConfig = BrokerConfig()
    streams: StreamsConfig = StreamsConfig()
    retention: tuple[LaneRetention, ...] = ()
    policy: Policy = Policy()
    worker: dict[str, Any] | None = None
    """The agent's table, as it stands: `worker_agent` judges it."""
    producer: dict[str, Any] | None = None
    """The producers' table, as it stands."""
    gateway: dict[str, Any] | None = None
    """The gateway's table, as it stands."""
