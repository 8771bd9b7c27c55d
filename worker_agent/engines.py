"""Makes the engine that the configuration names; imports only that one."""

import importlib.util
import re
from pathlib import Path

from worker_agent.config import WorkerConfig
from worker_agent.engine.base import Engine

_KV_ENDPOINT = re.compile(r"ipc:///.{1,106}|tcp://[^*/\s]+:\d{1,5}")
"""A Unix socket's path has at most 107 bytes."""

PORT_MAX = 65_535


class ConfigMistake(ValueError):
    """Settings that are well-formed and can't work together; one sentence for a person."""


def make_engine(config: WorkerConfig) -> Engine:
    """Make an engine, not started. Raises ConfigMistake."""
    if config.engine != "openai" and (config.kv_events or config.kv_events_replay):
        message = f"`kv_events` is for engines of kind openai: one of kind {config.engine} has none"
        raise ConfigMistake(message)
    match config.engine:
        case "openai":
            return _openai(config)
        case "fake":
            return _fake(config)
        case "llama":
            return _llama(config)


def _openai(config: WorkerConfig) -> Engine:
    _check_kv_events(config)
    from worker_agent.engine.openai_http import OpenAiHttpEngine  # noqa: PLC0415

    try:
        return OpenAiHttpEngine(
            config.base_url,
            slots=config.slots,
            models=tuple(config.models.values()),
            api_key=config.api_key,
        )
    except ValueError as error:
        raise ConfigMistake(str(error)) from error


def _check_kv_events(config: WorkerConfig) -> None:
    if not config.kv_events:
        if config.kv_events_replay:
            message = "`kv_events_replay` replays what `kv_events` missed: set that, too"
            raise ConfigMistake(message)
        return
    for name, endpoint in (
        ("kv_events", config.kv_events),
        ("kv_events_replay", config.kv_events_replay),
    ):
        if endpoint and not _KV_ENDPOINT.fullmatch(endpoint):
            message = (
                f"{name} = {endpoint!r}: give ipc:///path or tcp://host:port, the address to "
                "connect to; the engine itself binds ipc:///path or tcp://*:port (to "
                "tcp://127.0.0.1:port vLLM connects, and nobody hears it)"
            )
            raise ConfigMistake(message)
        if endpoint and config.kv_events_ranks > 1:
            _check_ranks(name, endpoint, config.kv_events_ranks)
    if config.cache_sequences:
        message = "`kv_events` are of blocks: an engine that has them keeps no `cache_sequences`"
        raise ConfigMistake(message)
    if importlib.util.find_spec("zmq") is None:
        message = "`kv_events` needs pyzmq: pip install 'inferlane[kv-events]'"
        raise ConfigMistake(message)


def _check_ranks(name: str, endpoint: str, ranks: int) -> None:
    port = endpoint.rpartition(":")[2] if endpoint.startswith("tcp://") else ""
    if not port:
        message = (
            f"{name} = {endpoint!r}: each of {ranks} ranks publishes at a port of its own, so give "
            "tcp://host:port, that of the first one"
        )
        raise ConfigMistake(message)
    if int(port) + ranks - 1 > PORT_MAX:
        message = f"{name} = {endpoint!r}: the ports of {ranks} ranks end above {PORT_MAX}"
        raise ConfigMistake(message)


def _fake(config: WorkerConfig) -> Engine:
    from broker.engine_model.profile import PROFILES  # noqa: PLC0415
    from worker_agent.engine.fake import FakeEngine  # noqa: PLC0415

    profile = PROFILES.get(config.profile)
    if profile is None:
        message = f"no profile {config.profile!r}; there are {', '.join(sorted(PROFILES))}"
        raise ConfigMistake(message)
    if not config.models:
        message = "a fake engine serves what `models` names: give at least one"
        raise ConfigMistake(message)
    models = tuple(config.models.values())
    return FakeEngine(profile, models=models, slots=config.slots, speed=config.speed)


def _llama(config: WorkerConfig) -> Engine:
    from worker_agent.engine.llama import LlamaEngine  # noqa: PLC0415
    from worker_agent.engine.llama_server import LlamaOptions  # noqa: PLC0415

    path = Path(config.gguf)
    if not path.is_file():
        message = f"there is no model file {config.gguf!r}: set `gguf`"
        raise ConfigMistake(message)
    options = LlamaOptions(
        gguf=str(path),
        model=next(iter(config.models.values()), path.stem),
        slots=config.slots,
        context_tokens=config.context_tokens,
        threads=config.threads,
        cache_ram_mib=config.cache_ram_mib,
    )
    try:
        return LlamaEngine(options)
    except ValueError as error:
        raise ConfigMistake(str(error)) from error
