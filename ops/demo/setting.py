"""The demo's cluster: its configuration file, its model, its lanes."""

from dataclasses import dataclass
from pathlib import Path

ONLINE_LANE = "online"
OFFLINE_LANE = "offline"
MODEL = "tiny"
CHAT_BAND = 1

ONLINE_KEY = "sk-online"
OFFLINE_KEY = "sk-offline"
"""Bearer keys of the two lanes. No secrets: all of it listens on loopback."""

TINY_GGUF = Path(__file__).parents[1] / "tiny_model" / "tiny.gguf"

CONTEXT_TOKENS = 4096
"""Context of one slot: a system prompt of 2,000 tokens, a question and an answer, with room."""

BYTES_PER_TOKEN = {"llama": 1.0, "fake": 4.0}
"""The tiny model reads bytes; the modelled engine counts as usual tokenizers do."""

_FILE = """\
# Written by the demo: the whole configuration of this cluster.
[nats]
url = "{url}"

[broker]
name = "broker-1"
state_dir = "{folder}/state"
http_port = {http_port}
leader_ttl_s = {leader_ttl_s}

[policy]
models = ["{model}"]

[policy.routing]
policy = "{policy}"

[[policy.lanes]]
name = "{online}"

[[policy.lanes]]
name = "{offline}"

[[policy.quotas]]
band = 1
queued_jobs_max = 400

[producer.client]
cache_scope = "cluster"

[gateway]
port = {gateway_port}

[gateway.keys.online]
lane = "{online}"
key = "{online_key}"

[gateway.keys.offline]
lane = "{offline}"
key = "{offline_key}"
band = 2

[worker]
worker = "worker"
engine = "{engine}"
slots = {slots}
prefix_tokens_min = 256
models = {{ "{model}" = "{model}" }}
{engine_lines}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What one local cluster runs with."""

    folder: Path
    url: str
    engine: str = "llama"
    policy: str = "first_token"
    slots: int = 6
    speed: float = 1.0
    """Of modelled engines: seconds of theirs in one of ours."""
    gguf: Path = TINY_GGUF
    context_tokens: int = CONTEXT_TOKENS
    threads: int = 1
    http_port: int = 0
    gateway_port: int = 0
    leader_ttl_s: float = 5.0
    model: str = MODEL


def write_config(setting: Setting) -> Path:
    """Write the configuration file that all programs of the cluster read; return its path."""
    llama = (
        f'gguf = "{setting.gguf}"\ncontext_tokens = {setting.context_tokens}\n'
        f"cache_ram_mib = 0\nthreads = {setting.threads}"
    )
    modelled = f'profile = "demo"\nspeed = {setting.speed}'
    path = setting.folder / "inferlane.toml"
    path.write_text(
        _FILE.format(
            **{name: getattr(setting, name) for name in setting.__dataclass_fields__},
            online=ONLINE_LANE,
            offline=OFFLINE_LANE,
            online_key=ONLINE_KEY,
            offline_key=OFFLINE_KEY,
            engine_lines=llama if setting.engine == "llama" else modelled,
        )
    )
    return path
