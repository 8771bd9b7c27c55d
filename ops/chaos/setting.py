"""The cluster of a chaos run: its lanes, its quotas, its load, its configuration files."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ops.chaos.engine import SLOTS

ONLINE_LANE = "online"
OFFLINE_LANE = "offline"
MODEL = "chaos"
CHAT_BANDS = (1, 2)

BATCH_PRODUCER = "batches"
CHAT_PRODUCER = "chats"
CHAT_PRODUCERS = 2

ONLINE_JOBS_MAX = 56
OFFLINE_JOBS_MAX = 32
"""Quota rows of the lanes: together less than three workers' slots, so that they are what holds,
also with one of four gone; and chats alone keep 50 in flight."""

CHATS_AT_ONCE = 48
"""Of each of two producers: more than the lane may run, so that there always is a queue."""

BATCH_CONCURRENCY = 64
BATCH_LINES = 200
"""A batch of so many lines runs for ten seconds or so; then the next begins."""

LEADER_TTL_S = {1: 5.0, 3: 15.0}
"""By message servers: elections among three take 4 to 9 s."""

KILLED_WORKER_S_MAX = 5.0
"""A worker for which nobody answers is gone at the first probe, seconds after its kill; ..."""

LEADER_LEFT_S_MAX = 3.0
"""... a leader that is asked to end frees its key, for which others look twice a second; ..."""

AGENT_BACK_S_MAX = 3.0
"""... loading Python takes one second; ..."""

NATS_BACK_S_MAX = {1: 5.0, 3: 15.0}
"""... clients dial again within one, and a broker is elected; three servers elect first, too."""

DEAD_LEADER_TERMS_MAX = 2.0
"""In lives of a leader's key: one until another may lead, the rest to adopt and to dispatch."""

CROWDED_SHARE_MIN = 0.6
"""Where something waits for a processor for more of the time than this, times are those of the
machine and not of the product, ..."""

CROWDED_TIMES_MAX = 4.0
"""... but for those that are so many times too long: no crowd explains a job that never goes on."""

STALL_S = 5.0
"""Tokens come every 0.2 s; a machine that is busy with other things may be late by seconds."""

_FILE = """\
# Written by chaos: what one process of the cluster reads.
[nats]
url = "{url}"
replicas = {replicas}

[broker]
name = "{name}"
state_dir = "{folder}/state-{name}"
http_port = 0
leader_ttl_s = {leader_ttl_s}
reconcile_s = 10

[policy]
models = ["{model}"]

[policy.leases]
stall_s = {stall_s}
retry_base_s = 0.2
retry_s_max = 2.0

[[policy.lanes]]
name = "{online}"

[[policy.lanes]]
name = "{offline}"

[[policy.quotas]]
lane = "{online}"
inflight_jobs_max = {online_max}

[[policy.quotas]]
lane = "{offline}"
inflight_jobs_max = {offline_max}

[worker]
worker = "worker"
engine = "fake"
slots = {slots}
models = {{ "{model}" = "{model}" }}
"""


@dataclass(frozen=True, slots=True)
class Load:
    """Where the load goes, and who brings it."""

    online: str = ONLINE_LANE
    offline: str = OFFLINE_LANE
    model: str = MODEL
    prefix: str = ""
    """Of the producers' names, and so of chats' ids: among others' jobs it must be a run's own."""

    @property
    def chatters(self) -> list[str]:
        """Name the producers of chats."""
        return [f"{self.prefix}{CHAT_PRODUCER}-{number + 1}" for number in range(CHAT_PRODUCERS)]

    @property
    def batcher(self) -> str:
        """Name the producer of batches."""
        return f"{self.prefix}{BATCH_PRODUCER}"

    def command(self, name: str, *, folder: Path, url: str) -> tuple[str, ...]:
        """Tell how the producer of this name is started."""
        is_batch = name == self.batcher
        what, lane = (BATCH_PRODUCER, self.offline) if is_batch else (CHAT_PRODUCER, self.online)
        flags = (str(folder), name, what, url, lane, self.model)
        return (sys.executable, "-m", "ops.chaos.producer", *flags)


@dataclass(frozen=True, slots=True)
class Hit:
    """What the owner of a cluster lets be done to it."""

    name: str
    command: str
    """For the shell; the owner's own means start again what it ends."""


@dataclass(frozen=True, slots=True)
class Row:
    """A quota row as the checker knows it."""

    lane: str
    jobs_max: int


ROWS = (Row(ONLINE_LANE, ONLINE_JOBS_MAX), Row(OFFLINE_LANE, OFFLINE_JOBS_MAX))


def has_room(workers: int) -> bool:
    """Say whether all that the rows allow has slots also with one of so many workers gone."""
    return (workers - 1) * SLOTS >= sum(row.jobs_max for row in ROWS)


@dataclass(frozen=True, slots=True)
class Setting:
    """What depends on the number of message servers."""

    replicas: int
    leader_ttl_s: float
    nats_back_s_max: float
    killed_worker_s_max: float = KILLED_WORKER_S_MAX
    leader_left_s_max: float = LEADER_LEFT_S_MAX
    agent_back_s_max: float = AGENT_BACK_S_MAX

    @classmethod
    def of(cls, nats_nodes: int) -> Self:
        """Say it for so many; there are 1 or 3."""
        return cls(nats_nodes, LEADER_TTL_S[nats_nodes], NATS_BACK_S_MAX[nats_nodes])

    @property
    def dead_leader_s_max(self) -> float:
        """How soon after a leader's kill all that it held is to be dispatched."""
        return DEAD_LEADER_TERMS_MAX * self.leader_ttl_s


def write_config(folder: Path, *, name: str, url: str, setting: Setting) -> Path:
    """Write the file that one process reads; return its path."""
    path = folder / f"{name}.toml"
    path.write_text(
        _FILE.format(
            url=url,
            name=name,
            folder=folder,
            replicas=setting.replicas,
            leader_ttl_s=setting.leader_ttl_s,
            stall_s=STALL_S,
            model=MODEL,
            online=ONLINE_LANE,
            offline=OFFLINE_LANE,
            online_max=ONLINE_JOBS_MAX,
            offline_max=OFFLINE_JOBS_MAX,
            slots=SLOTS,
        )
    )
    return path
